"""The folder of a run: locked while a process trains in it, restored from where it is kept, started or resumed; and the
Job that writes checkpoints into it where losing the work would cost more than saving it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

from nbtools import disk, train
from nbtools.data import Card, Pack, cache, patient, say
from nbtools.errors import CheckpointError, HeldInterrupt, TrainError
from nbtools.identity import Call, differences, former_run, identity, newly_trained
from nbtools.live import Surface
from nbtools.run import CARD, EVALUATION, HISTORY, NOTES, PLAN, RECEIPT, VERDICT, lock, stored
from nbtools.train import CONTROL, KEPT, History, Keeper, Plan, Record, TrainState, checkpoint
from nbtools.version import VERSION

OURS = {checkpoint.INDEX, CONTROL, PLAN, CARD, HISTORY, RECEIPT, VERDICT, EVALUATION, NOTES, KEPT, "plot.png"}
EVENTS = "events.out.tfevents"  # how TensorBoard's files begin
SAVE_EVERY = 60.0  # seconds between checkpoints inside an epoch: what a lost session may cost
SAVE_SHARE = 0.01  # of the time that checkpoints may take


@contextmanager
def only_one(folder: Path) -> Iterator[disk.Lock]:
    """Hold the run folder's lock. Raises TrainError where another process trains in it: histories would mix. An empty
    folder goes where the block fails."""
    own = lock(folder)
    with ExitStack() as stack:
        with disk.explained("locking a run", cache()):
            for patience in (0.1, 0.1, 0):  # `busy` holds the lock for an instant to test it
                try:
                    stack.enter_context(own)
                    break
                except BlockingIOError:
                    if not patience:
                        rule = f"{folder}: another process is training this run; stop it, or name another run folder"
                        raise TrainError(rule, entry="Several processes on the GPU") from None
                    sleep(patience)
        own.note("")
        try:
            yield own
        except BaseException:
            with suppress(OSError):
                folder.rmdir()
            raise


def is_own(path: Path) -> bool:
    """Return whether a file is a run's own, or was left by a kill while such a one was written."""
    name = re.sub(r"(\.\d+-\d+)?\.part$", "", path.name)
    named = name in OURS or name.startswith(EVENTS) or checkpoint.FILE.fullmatch(path.name)
    return bool(named) and path.is_file()


# -- keep=


def restore(folder: Path, kept: Path | None, fresh: bool = False) -> None:
    """Restore a run from where it is kept, when the local folder is missing, as after a lost session, or behind.

    Raises CheckpointError if that would mix two runs, or replace files that do not belong to a run.
    """
    if kept is None:
        return
    if kept.resolve() == folder.resolve():
        raise CheckpointError(f"{kept} is the folder of a run itself; name another one with keep=")
    theirs = patient(lambda: checkpoint.read_index(kept), kept)
    ours, newest = checkpoint.read_index(folder), next(iter(checkpoint.names(kept)), "0-0")
    if not theirs and checkpoint.place(newest) <= checkpoint.place(ours.get("last", "0-0")):
        return  # nothing, or a first copy that was interrupted; a run whose index Drive lost is restored without it
    if fresh:
        raise CheckpointError(f"{kept} holds a run, which fresh=True does not replace; name another keep=")
    if ours and not further(folder, ours, kept, theirs):
        return
    small = (PLAN, CARD, HISTORY, CONTROL)
    with disk.explained(f"restoring {folder} from {kept}", folder):
        others = folder.exists() and any(p.name not in small and p.suffix != ".part" for p in folder.iterdir())
        if others and not ours:
            rule = f"{folder} holds files but no run, and {kept} holds a run"
            raise CheckpointError(f"{rule}; name a new folder with run=", entry="Session lost")
        part = folder.with_name(f"{folder.name}.part")
        train.restore_kept(kept, part)
        disk.remove(folder)
        disk.publish_folder(part, folder)


def further(folder: Path, ours: Mapping[str, Any], kept: Path, theirs: Mapping[str, Any]) -> bool:
    """Return whether what is kept of a run is further than the local folder, and continues it. Raises CheckpointError
    where neither continues the other."""
    if ours.get("id") != theirs.get("id"):
        rule = f"{kept} holds a different run than {folder}"
        raise CheckpointError(f"{rule}; name another keep=, or another run=", entry="Session lost")
    if continues(ours, theirs):
        return False
    if continues(theirs, ours):
        say(f"{kept} is further than {folder}, and is taken over")
        return True
    here, there = (f"{checkpoint.place(each['last'])[1]:,}" for each in (ours, theirs))
    raise CheckpointError(
        f"{folder} (step {here}) and {kept} (step {there}) were trained apart, and neither continues the other; name "
        "another keep=, or another run= to go on from the kept one",
        entry="Session lost",
    )


def continues(longer: Mapping[str, Any], shorter: Mapping[str, Any]) -> bool:
    """Return whether one copy of a run went on from where the other one had ended, or from later."""
    ours, theirs = course(longer), course(shorter)
    end = len(theirs) - 1
    return ours[:end] == theirs[:end] and ours[end][1] >= theirs[end][1]


def course(index: Mapping[str, Any]) -> list[Any]:
    """Return the starts of a run, each with its first step, and at last (None, the step that it has reached)."""
    last = checkpoint.place(index["last"])[1]
    return [*(start for start in index.get("starts", []) if start[1] < last), [None, last]]


# -- start or resume


def begin(
    folder: Path, pack: Pack, state: TrainState, call: Call | None = None, fresh: bool = False
) -> tuple[History, list[str]]:
    """Make a new run folder, or load the last checkpoint of the run in it. Returns its history, and what is to be said:
    what was wrong with newer checkpoints, and which other parameters are trained than before. call: None: of the
    state's plan. Raises CheckpointError for another identity."""
    call = call or Call(state.plan, state.plan)
    now, place = identity(state.task, pack.card.digest, state.model, state.plan), str(pack.folder.absolute())
    new = {"version": checkpoint.VERSION, "nbtools": VERSION, "id": uuid4().hex, "task": train.task_name(state.task)}
    with disk.explained("starting a run", folder):
        for part in folder.glob("*.part"):
            if is_own(part) and not part.name.startswith((CONTROL, NOTES)):  # which others may be writing
                disk.remove(part)
    there, notes = bool(checkpoint.names(folder)) and not fresh, []
    index = checkpoint.read_index(folder) if there else {}
    before, advised = index.get("identity", {}), index.get("advised", state.plan.to_dict())
    if there and former_run(state.task, folder) is not None:
        require_same(folder, pack, before, now)
        if "task" not in index:
            notes = [f"{folder / checkpoint.INDEX}: is missing; rebuilt from the checkpoints in this folder"]
            checkpoint.mark(folder, **{**new, **checkpoint.last_and_best(folder), **index})
        with disk.explained("resuming a run", folder):
            history, complaints = resume(folder, state)
        notes += [*complaints, newly_trained(before, now)]
        given = merged(index, call, state.plan)
    else:  # a run without a finished step starts over as the same
        history, given = (
            start(folder, pack, state, {**new, "id": index.get("id", new["id"])}, fresh),
            call.given.given(),
        )
    if not state.over:
        index["starts"] = [*index.get("starts", []), [uuid4().hex[:8], state.step]]
    entries = {"given": given, "applied": state.applied.to_dict(), "identity": now, "pack": place, "panel": call.panel}
    entries |= {"advised": call.advised.to_dict() if call.advised else advised, "starts": index.get("starts")}
    checkpoint.mark(folder, **entries, requested=None, ended=None)
    return history, notes


def start(folder: Path, pack: Pack, state: TrainState, index: Mapping[str, Any], fresh: bool) -> History:
    """Write a new run, in place of one that is there: its checkpoints go first, a folder without one holds no run.
    fresh: raise CheckpointError where there are other files too."""
    with disk.explained("starting a run", folder):
        there = sorted(folder.glob("*"), key=lambda each: (not checkpoint.FILE.fullmatch(each.name), each.name))
        others = [path.name for path in there if not is_own(path)]
        if fresh and others:
            raise CheckpointError(
                f"{folder}: fresh=True removes the files of a run only, and this folder also holds {others[0]!r}; move "
                "it away, or name another run="
            )
        old = bool(checkpoint.names(folder))
        for path in there:
            if path.name == HISTORY or (old and is_own(path) and path.name != CONTROL):
                disk.remove(path)
        folder.mkdir(parents=True, exist_ok=True)
        disk.write_atomic(folder / CARD, json.dumps(pack.card.to_dict(), ensure_ascii=False, indent=1))
        disk.write_atomic(folder / PLAN, state.plan.to_json())
        disk.write_atomic(folder / checkpoint.INDEX, json.dumps(dict(index), indent=1))
    checkpoint.save(folder, state, rows=0)
    return History(folder / HISTORY)


def resume(folder: Path, state: TrainState) -> tuple[History, list[str]]:
    """Load the last checkpoint, and record what the state's plan has otherwise. Returns the history and complaints.
    Raises TrainError for a change of what a run keeps."""
    saved, new = checkpoint.newest(folder), state.plan
    facts, old = saved.facts, type(new).from_dict(saved.facts["plan"])  # plan.json may be ahead of the checkpoint
    changed = new.changes_from(old)
    train.refuse_fixed(changed, new, resumed=True)
    state.load(saved.tensors, facts["state"])
    checkpoint.rewind(folder, saved.name)  # before rows go: a run killed between them resumes with all of its rows
    history, complaints = History(folder / HISTORY), list(saved.complaints)
    if len(history) < facts["rows"]:
        less = f"{history.path}: {facts['rows'] - len(history):,} of {facts['rows']:,} rows are missing"
        complaints.append(f"{less}; charts, tables and run.best are of the rest")
    history.cut(facts["rows"])
    disk.write_atomic(folder / PLAN, new.to_json())
    if changed and state.stopped:
        state.stopped, state.best.stale = None, 0  # asked to continue: an early stop counts anew from here
    for record in train.caught_up(state, old):
        history.append(record)
    return history, complaints


def merged(index: Mapping[str, Any], call: Call, applied: Plan) -> dict[str, Any]:
    """Return the settings as given, for the next call to compare with. Where the same Panel drives on, those that a
    hand changed while it trained stay as the code gave them: after a restart of the kernel it gives them again."""
    before, given = index.get("given", {}), call.given.given()
    if call.panel is not None and call.panel == index.get("panel"):
        given |= {n: before[n] for n, value in given.items() if n in before and value == getattr(applied, n)}
    return given or before


def require_same(folder: Path, pack: Pack, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise CheckpointError for another pack, or another network, loss, metrics or augmentation."""
    if Card.from_dict(stored(folder / CARD)) != pack.card:
        raise CheckpointError(
            f"{folder}: this run was trained on another pack (its card.json is not that of {pack.folder}); "
            "give the same data and options, name another run folder, or start over with fresh=True"
        )
    if differing := differences(before, now):
        raise CheckpointError(
            f"{folder} holds another run ({'; '.join(differing)}); name another run=, or start over with fresh=True"
        )


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
        self.place = (state.epoch, state.step)  # of the last copy
        self.plans = state.applied, state.plan  # as the folder has them

    def watch(self, record: Record) -> None:
        """Write a checkpoint at the end of an epoch, and within one every minute, where that takes at most 1 % of the
        time. A best epoch's state is copied in any case, and written as soon as that is cheap, unless that of a better
        one has taken its place. Training continues once the state is copied."""
        if self.writing is not None and self.writing.done():
            self.wait()
        ends, since = record.kind == "epoch", monotonic() - self.saved
        best, moved = ends and self.state.improved, self.place != (self.state.epoch, self.state.step)
        cheap = self.writing is None and since * SAVE_SHARE >= self.cost
        if best or (cheap and self.taken is None and (ends or (moved and since > SAVE_EVERY))):
            self.take(best)
        if cheap:
            self.write()

    def save(self) -> bool:
        """Write the state of now, unless it is written, and return whether it was worth it: a loss that is no number is
        reported at the next log step, and undone."""
        self.settle()
        worth = self.place == (self.state.epoch, self.state.step) or self.take()
        self.settle()
        return worth

    def take(self, best: bool = False) -> bool:
        """Copy the state, to be written; return whether it was worth it, see `save`."""
        self.wait()
        self.taken, self.place = None, (self.state.epoch, self.state.step)  # its memory is used again
        if self.state.lost():
            return False
        self.taken = checkpoint.snapshot(self.state, len(self.history), best)
        self.state.improved = False
        return True

    def write(self) -> None:
        """Have the writer's thread write the copied state, if there is one, and the picture of now, and keep them."""
        if self.taken is None:
            return
        draw = self.surface.keep_still()

        def written(taken: checkpoint.Checkpoint) -> float:
            began = monotonic()
            checkpoint.publish(self.folder, taken)
            draw()
            if self.keeper is not None:
                self.keeper.keep()
            return monotonic() - began

        taken, self.taken, self.saved = self.taken, None, monotonic()
        with HeldInterrupt():  # it would leave the pool's locks held, for which `close` waits
            self.writing = self.writer.submit(written, taken)

    def settle(self) -> None:
        """Write what was copied, and wait until it is written. Raises DiskError if it could not be."""
        self.wait()
        self.write()
        self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self.writing is not None:
            self.writing.exception()  # an interrupt may leave its lock held, until `close` waits for it once more
            writing, self.writing = self.writing, None
            self.cost = writing.result()
            self.surface.show_still()
        if self.keeper is not None:
            self.surface.report_all(self.keeper.complaints)

    def write_plan(self) -> None:
        """Record the applied plan, and what is wanted beyond it, which a stop or a lost session leaves to the next
        start."""
        applied, wanted = self.state.applied, self.state.plan
        if (applied, wanted) == self.plans:
            return
        with disk.explained("writing the plan", self.folder):
            disk.write_atomic(self.folder / PLAN, applied.to_json())
        requested = {name: getattr(wanted, name) for name in wanted.changes_from(applied)} or None
        checkpoint.mark(self.folder, applied=applied.to_dict(), requested=requested)
        self.plans = applied, wanted

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
