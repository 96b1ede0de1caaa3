"""A run in progress and its folder: locked while a process trains in it, started or resumed from its last checkpoint,
saved when losing the work would cost more than saving it, and restored from the folder where it is kept."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

from nbtools import disk
from nbtools.data import LATER, Card, Pack, cache, is_kept, latest, patient, restore_kept, say
from nbtools.errors import CheckpointError, TrainError
from nbtools.identity import differences, former_run, identity, trained
from nbtools.interrupt import HeldInterrupt
from nbtools.live import Surface
from nbtools.run import CARD, EVALUATION, HISTORY, NOTES, PLAN, RECEIPT, VERDICT, lock, stored
from nbtools.train import (
    CONTROL,
    KEPT,
    History,
    Keeper,
    Plan,
    Record,
    TrainState,
    caught_up,
    checkpoint,
    kept_note,
    refuse_fixed,
    task_name,
)
from nbtools.version import VERSION

OWN = re.compile(  # what is left of a file that a run alone writes
    r"(run|card|plan|kept|receipt|verdict|evaluation|history|plot)\.(json|csv|png)\.\d+-\d+\.part"
)
OWN_FILES = {
    *(checkpoint.INDEX, CONTROL, PLAN, CARD, HISTORY, RECEIPT, VERDICT, EVALUATION, NOTES),
    *(KEPT, LATER, "plot.png"),
}
SAVE_EVERY = 60.0  # seconds between checkpoints inside an epoch: what a lost session may cost
SAVE_SHARE = 0.01  # of the time that checkpoints may take


@contextmanager
def only_one(folder: Path) -> Iterator[disk.Lock]:
    """Two processes in one run folder would mix their histories. Raises TrainError for the second."""
    own = lock(folder)
    with ExitStack() as stack:
        with disk.explained("locking a run", cache()):
            for patience in (0.1, 0.1, 0):  # `busy` holds the lock for an instant to test it
                try:
                    stack.enter_context(own)
                    break
                except BlockingIOError:
                    if not patience:
                        raise TrainError(
                            f"{folder}: another process is training this run; stop it, or name another run folder",
                            entry="Several processes on the GPU",
                        ) from None
                    sleep(patience)
        own.note("")
        yield own


def require_replaceable(folder: Path) -> None:
    """Raise CheckpointError for a folder with other files than a run's, which fresh=True would not replace."""
    with disk.explained("looking for a run", folder):
        others = sorted(p.name for p in folder.iterdir() if not is_own(p)) if folder.exists() else []
    if others:
        raise CheckpointError(
            f"{folder}: fresh=True removes the files of a run only, and this folder also holds {others[0]!r}; move it "
            "away, or name another run="
        )


def is_own(path: Path) -> bool:
    named = path.name in OWN_FILES or path.suffix == ".part" or checkpoint.FILE.fullmatch(path.name)
    return bool(named) and path.is_file()


def clear(folder: Path) -> None:
    """Remove a run's files, checkpoints first: a folder without one holds no run."""
    with disk.explained("starting over", folder):
        for path in sorted(folder.glob("*"), key=lambda p: not checkpoint.FILE.fullmatch(p.name)):
            if is_own(path) and path.name != CONTROL:
                disk.remove(path)


def restore(folder: Path, kept: Path | None, fresh: bool = False) -> None:
    """Restore a run from the folder where it is kept, when the local folder is missing, as after a lost session, or
    when the kept run is further and continues the local one.

    Raises CheckpointError if that would mix two runs, or replace files that do not belong to a run.
    """
    with disk.explained("looking for a run", folder):
        if is_kept(folder):
            rule = f"{folder} is a folder where a run is kept"
            raise CheckpointError(f"{rule}; name it with keep=, and a local folder with run=", entry="Session lost")
    if kept is None:
        return
    with disk.explained(f"looking for a run in {kept}", kept):
        theirs = patient(lambda: latest(kept), kept)
        if disk.exists(kept) and disk.exists(kept / checkpoint.INDEX):
            raise CheckpointError(f"{kept} is the folder of a run itself; name another one with keep=")
    if not theirs:
        return
    if fresh:
        raise CheckpointError(f"{kept} holds a run, which fresh=True does not replace; name another keep=")
    index, ours, there = (
        json.loads(theirs["files"][checkpoint.INDEX]),
        checkpoint.read_index(folder),
        theirs["checkpoints"],
    )
    facts = [folder / f"{name}.json" for name in checkpoint.names(folder)]
    with disk.explained("looking for a run", folder):
        same = not ours and any(disk.sha256(path) == there.get(path.name, [0, ""])[1] for path in facts)
    if same:
        checkpoint.mark(folder, id=index["id"])  # its index was lost: `begin` makes the rest of it anew
        return
    if ours:
        if ours.get("id") != index.get("id"):
            rule = f"{kept} holds a different run than {folder}"
            raise CheckpointError(f"{rule}; name another keep=, or another run=", entry="Session lost")
        if not further(folder, kept, theirs):
            return
        say(f"{kept} is further than {folder}, and is taken over")
    elif folder.exists() and any(
        p.name not in (PLAN, CARD, HISTORY, CONTROL) and p.suffix != ".part" for p in folder.iterdir()
    ):
        rule = f"{folder} holds files but no run, and {kept} holds a run"
        raise CheckpointError(f"{rule}; name a new folder with run=", entry="Session lost")
    part = folder.with_name(f"{folder.name}.part")
    with disk.explained(f"restoring {folder} from {kept}", folder):
        restore_kept(kept, part)
        disk.remove(folder)
        disk.publish_folder(part, folder)


def further(folder: Path, kept: Path, theirs: Mapping[str, Any]) -> bool:
    """Return whether what is kept of a run is further than the local folder, and continues it. Raises CheckpointError
    where neither continues the other."""
    if theirs["start"] == kept_note(folder).get("start") and theirs["step"] == kept_note(folder).get("step"):
        return False  # what this folder itself wrote last
    last = json.loads(theirs["files"][checkpoint.INDEX])["last"]
    with disk.explained(f"comparing {folder} with {kept}", kept), tempfile.TemporaryDirectory() as place:
        (Path(place) / HISTORY).write_text(theirs["files"].get(HISTORY, ""))
        rows = checkpoint.facts_of(kept, last)["rows"]
        there = trace(History(Path(place) / HISTORY).rows[:rows])
    mine = checkpoint.read_index(folder)["last"]
    here = trace(History(folder / HISTORY).rows[: checkpoint.facts_of(folder, mine)["rows"]])
    if there == here[: len(there)]:
        return False
    if here == there[: len(here)]:
        return True
    steps = [checkpoint.place(name)[1] for name in (mine, last)]
    raise CheckpointError(
        f"{folder} (step {steps[0]:,}) and {kept} (step {steps[1]:,}) were trained apart, and neither continues the "
        "other; name another keep=, or another run= to go on from the kept one",
        entry="Session lost",
    )


def trace(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what tells one course of training from another: rows without times and rates."""
    names = ("kind", "epoch", "step", "samples", "loss", "train_loss", "val_loss")
    return [repr([row.get(name) for name in names]) for row in rows]


def begin(
    folder: Path,
    pack: Pack,
    state: TrainState,
    given: Plan | None = None,
    advised: Plan | None = None,
    panel: str | None = None,
    fresh: bool = False,
) -> tuple[History, list[str], str]:
    """A new run folder, or the old one and the state of its last checkpoint; what was wrong with newer ones; and which
    other parameters are trained than before.

    given: the plan of the call; None: the state's; advised: the plan that values are compared with; None: that of the
    old run, or the one it starts with; panel: what drives the run. Raises TrainError for another identity.
    """
    place: dict[str, Any] = {"pack": str(pack.folder.absolute())}  # where its samples are, while this machine lasts
    place["ended"] = None  # of an earlier start, in an error
    given = given or state.plan
    present = identity(state.task, pack.card.digest, state.model, state.plan)
    place |= {"identity": present, "panel": panel, "requested": None}
    new = {"version": checkpoint.VERSION, "nbtools": VERSION, "id": uuid4().hex, "task": task_name(state.task)}
    with disk.explained("starting a run", folder):
        for part in folder.glob("*.part"):  # of a process that was killed; others write control and notes
            if OWN.fullmatch(part.name) and part.is_file():
                disk.remove(part)
    if not fresh and former_run(state.task, folder) is not None:
        index = checkpoint.read_index(folder)
        place["given"] = merged(index, given, state.plan, panel)
        require_same(folder, pack, index.get("identity", {}), present)
        rebuilt = f"{folder / checkpoint.INDEX}: is missing; rebuilt from the checkpoints in this folder"
        lost = [] if "task" in index else [rebuilt]
        if lost:
            checkpoint.mark(
                folder, **{**new, "advised": state.plan.to_dict(), **checkpoint.last_and_best(folder), **index}
            )
        with disk.explained("resuming a run", folder):
            history, complaints = resume(folder, pack, state)
        checkpoint.mark(folder, **place, **({} if advised is None else {"advised": advised.to_dict()}))
        checkpoint.mark(folder, applied=state.applied.to_dict())
        return history, [*lost, *complaints], trained(index.get("identity", {}), present)
    before: dict[str, Any] = {}
    if checkpoint.names(folder):
        if not fresh and (before := checkpoint.read_index(folder)).get("id"):
            new["id"] = before["id"]  # a run without a finished step starts over as the same
        clear(folder)
    place |= {"given": given.given(), "applied": state.applied.to_dict()}
    with disk.explained("starting a run", folder):
        disk.make_folder(folder)
        disk.remove(folder / HISTORY)
        disk.write_atomic(folder / CARD, json.dumps(pack.card.to_dict(), ensure_ascii=False, indent=1))
        disk.write_atomic(folder / PLAN, state.plan.to_json())
        disk.write_atomic(folder / checkpoint.INDEX, disk.to_json(new))
    usual = before.get("advised", state.plan.to_dict()) if advised is None else advised.to_dict()
    checkpoint.mark(folder, **place, advised=usual)
    checkpoint.save(folder, state, rows=0)
    return History(folder / HISTORY), [], ""


def merged(index: Mapping[str, Any], given: Plan, applied: Plan, panel: str | None) -> dict[str, Any]:
    """Return the settings as given, for the next call to compare with. Where the same Panel drives on, those that a
    hand changed while it trained stay as the code gave them: after a restart of the kernel it gives them again."""
    before, now = index.get("given", {}), given.given()
    same = panel is not None and panel == index.get("panel")
    if not now:
        return before
    return {
        name: before[name] if same and name in before and value == getattr(applied, name) else value
        for name, value in now.items()
    }


def require_same(folder: Path, pack: Pack, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise CheckpointError for another pack, or another network, loss, metrics or augmentation."""
    require_card(folder, pack)
    if differing := differences(before, now):
        raise CheckpointError(
            f"{folder} holds another run ({'; '.join(differing)}); name another run=, or start over with fresh=True"
        )


def require_card(folder: Path, pack: Pack) -> None:
    if Card.from_dict(stored(folder / CARD)) != pack.card:
        raise CheckpointError(
            f"{folder}: this run was trained on another pack (its card.json is not that of {pack.folder}); "
            "give the same data and options, name another run folder, or start over with fresh=True"
        )


def resume(folder: Path, pack: Pack, state: TrainState) -> tuple[History, list[str]]:
    """The history and the state of the last checkpoint, with the plan that the state was created with. Raises
    CheckpointError for another pack, TrainError for a change of what a run keeps."""
    found = checkpoint.newest(folder)
    facts = found.facts
    old, new = type(state.plan).from_dict(facts["plan"]), state.plan  # plan.json may be ahead of the checkpoint
    changed = new.changes_from(old)
    refuse_fixed(changed, new, resumed=True)
    state.load(found.tensors, facts["state"])
    checkpoint.rewind(folder, found.name)  # before rows go: a run killed between them resumes with all of its rows
    history, complaints = History(folder / HISTORY), list(found.complaints)
    if len(history) < facts["rows"]:
        less = f"{history.path}: {facts['rows'] - len(history):,} of {facts['rows']:,} rows are missing"
        complaints.append(f"{less}; charts, tables and run.best are of the rest")
    history.cut(facts["rows"])
    disk.write_atomic(folder / PLAN, new.to_json())
    if changed and state.stopped:
        state.stopped, state.best.stale = None, 0  # asked to continue: an early stop counts anew from here
    for record in caught_up(state, old):
        history.append(record)
    checkpoint.copies(state)  # makes room: within training that takes ten times as long as the copies
    return history, complaints


class Job:
    """A run in progress, which writes a checkpoint when losing the work since the last one would cost more than that.

    taken: a copied state that is not being written yet. keeper: copies the folder to where the run is kept.
    """

    def __init__(self, pack: Pack, folder: Path, state: TrainState, surface: Surface, keeper: Keeper | None):
        self.task, self.pack, self.folder, self.state = state.task, pack, folder, state
        self.surface, self.history, self.keeper = surface, surface.history, keeper
        self.saved, self.cost = monotonic(), 0.0  # when a state was last written, and the seconds that took
        self.writer = ThreadPoolExecutor(1, "nbtools-writer")
        self.writing: Future[float] | None = None  # the last checkpoint, until it is written; its seconds
        self.taken: checkpoint.Checkpoint | None = None
        self.copying = 0.0  # seconds that it and the copies before it took that no longer count
        self.place = (state.epoch, state.step)  # of the last copy
        self.written: Plan = state.applied  # in plan.json
        self.requested: dict[str, Any] | None = None  # in run.json, see `note_request`

    @property
    def done(self) -> bool:
        """Whether nothing was trained since the last checkpoint."""
        return self.taken is None and self.place == (self.state.epoch, self.state.step)

    def watch(self, record: Record) -> None:
        """Write a checkpoint at the end of an epoch, and within one every minute, where that takes at most 1 % of the
        time. A best epoch's state is copied in any case, and written as soon as that is cheap, unless that of a better
        one has taken its place. Training continues once the state is copied."""
        if self.writing is not None and self.writing.done():
            self.wait()
        ends, since = record.kind == "epoch", monotonic() - self.saved
        due = ends or (self.place != (self.state.epoch, self.state.step) and since > SAVE_EVERY)
        cheap = self.writing is None and since * SAVE_SHARE >= self.cost
        if (ends and self.state.improved) or (cheap and self.taken is None and due):
            self.take(best=ends and self.state.improved)
        if cheap:
            self.write()

    def save(self) -> bool:
        """Write the state of now; whether it was worth it: a non-finite loss is reported at the next log step, and
        undone."""
        if self.taken is None or self.place != (self.state.epoch, self.state.step):
            self.settle()
            if not self.take():
                return False
        self.settle()
        return True

    def take(self, best: bool = False) -> bool:
        """Copy the state, to be written; whether it was worth it, see `save`."""
        self.wait()
        start, self.taken = monotonic(), None  # whose memory is used again
        self.place = (self.state.epoch, self.state.step)
        if self.state.lost():
            return False
        self.taken = checkpoint.snapshot(self.state, len(self.history), best)
        self.state.improved = False
        self.copying += monotonic() - start
        return True

    def write(self) -> None:
        """Have the writer's thread write the copied state, if there is one, and the picture of now, and request their
        copy."""
        if self.taken is None:
            return
        ends = self.surface.requests.stop  # then the final picture comes next, and seconds count in a shutdown
        keep_still = None if ends else self.surface.keep_still()

        def written(taken: checkpoint.Checkpoint) -> float:
            start = monotonic()
            self.history.sync()
            checkpoint.publish(self.folder, taken)
            if keep_still is not None:
                keep_still()
            if self.keeper is not None:
                self.keeper.keep()
            return monotonic() - start

        taken, self.taken = self.taken, None
        self.saved, self.cost, self.copying = monotonic(), self.copying, 0.0
        with HeldInterrupt():  # it would leave the pool's locks held, for which `close` waits
            self.writing = self.writer.submit(written, taken)

    def settle(self) -> None:
        """Write what was copied, and wait until it is written. Raises DiskError if it could not be."""
        self.wait()
        self.write()
        self.wait()

    def wait(self) -> None:
        if self.writing is not None:
            self.writing.exception()  # an interrupt may leave its lock held, until `close` waits for it once more
            writing, self.writing = self.writing, None
            self.cost += writing.result()
            self.surface.show_still()
        if self.keeper is not None:
            self.surface.report_all(self.keeper.complaints)

    def write_plan(self) -> None:
        """Make plan.json the applied plan, with which a resumed run continues."""
        plan = self.state.applied
        if plan is not self.written:
            with disk.explained("writing the plan", self.folder):
                disk.write_atomic(self.folder / PLAN, plan.to_json())
            checkpoint.mark(self.folder, applied=plan.to_dict(), requested=None)
            self.written, self.requested = plan, None

    def note_request(self) -> None:
        """Note the settings that are wanted and not applied yet, which a stop or a lost session leaves to the next
        start."""
        wanted, applied = self.state.plan, self.state.applied
        requested = {name: getattr(wanted, name) for name in wanted.changes_from(applied)} or None
        if requested != self.requested:
            checkpoint.mark(self.folder, requested=requested)
            self.requested = requested

    def close(self) -> None:
        """Wait until everything is written and kept."""
        try:
            self.settle()
        finally:
            self.writer.shutdown()
            if self.keeper is not None:
                self.keeper.keep()
                self.keeper.close(not self.surface.requests.stop, self.surface.report)
                self.surface.report_all(self.keeper.complaints)
