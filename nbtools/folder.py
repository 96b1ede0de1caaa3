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
from nbtools.data import Pack, cache, patient, say
from nbtools.errors import CheckpointError, TrainError
from nbtools.identity import Call, differences, former_run, identity
from nbtools.live import Surface
from nbtools.run import CARD, EVALUATION, HISTORY, PLAN, RECEIPT, VERDICT, lock
from nbtools.train import CONTROL, KEPT, History, Keeper, Record, TrainState, checkpoint
from nbtools.version import VERSION

OURS = {checkpoint.INDEX, CONTROL, PLAN, CARD, HISTORY, RECEIPT, VERDICT, EVALUATION, KEPT, "plot.png"}
EVENTS = "events.out.tfevents"  # how TensorBoard's files begin
SAVE_EVERY = 60.0  # seconds between checkpoints inside an epoch: what a lost session may cost
SAVE_SHARE = 0.01  # of the time that checkpoints may take


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold the run folder's lock. Raises TrainError where another process trains in it: histories would mix. An empty
    folder goes where the block fails."""
    with ExitStack() as stack:
        with disk.explained("locking a run", cache()):
            for _ in range(5):  # `busy` holds the lock for an instant to test it
                with suppress(BlockingIOError):
                    stack.enter_context(lock(folder))
                    break
                sleep(0.05)
            else:
                rule = f"{folder}: another process is training this run"
                raise TrainError(f"{rule}; stop it, or name another run folder")
        try:
            yield
        except BaseException:
            with suppress(OSError):
                folder.rmdir()
            raise


def is_own(path: Path) -> bool:
    """Return whether a file is a run's own, or was left by a kill while such a one was written."""
    name = re.sub(r"(\.\d+-\d+)?\.part$", "", path.name)
    return path.is_file() and bool(name in OURS or name.startswith(EVENTS) or checkpoint.FILE.fullmatch(path.name))


# -- keep=


def restore(folder: Path, kept: Path | None, fresh: bool = False) -> None:
    """Restore a run from where it is kept, when the local folder is missing, as after a lost session, or behind. Raises
    CheckpointError if that would mix two runs, or replace files that do not belong to a run."""
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
    with disk.explained(f"restoring {folder} from {kept}", folder):
        if not ours and folder.exists() and not all(map(is_own, folder.iterdir())):
            rule = f"{folder} holds files but no run, and {kept} holds a run"
            raise CheckpointError(f"{rule}; name a new folder with run=")
        part = folder.with_name(f"{folder.name}.part")
        train.restore_kept(kept, part)
        disk.remove(folder)
        disk.publish_folder(part, folder)


def further(folder: Path, ours: Mapping[str, Any], kept: Path, theirs: Mapping[str, Any]) -> bool:
    """Return whether what is kept of a run is further than the local folder, and continues it. Raises CheckpointError
    where neither continues the other."""
    if ours.get("id") != theirs.get("id"):
        raise CheckpointError(f"{kept} holds a different run than {folder}; name another keep=, or another run=")
    if theirs == train.kept_note(folder).get("index") or continues(ours, theirs):  # the first: what it wrote there last
        return False
    if continues(theirs, ours):
        say(f"{kept} is further than {folder}, and is taken over")
        return True
    here, there = (f"{checkpoint.place(each['last'])[1]:,}" for each in (ours, theirs))
    raise CheckpointError(
        f"{folder} (step {here}) and {kept} (step {there}) were trained apart, and neither continues the other; name "
        "another keep=, or another run= to go on from the kept one"
    )


def continues(longer: Mapping[str, Any], shorter: Mapping[str, Any]) -> bool:
    """Return whether one copy of a run went on from where the other one had ended, or from later: by their starts, each
    with its first step."""
    last, end = (checkpoint.place(each["last"])[1] for each in (longer, shorter))
    shared = [start for start in shorter["starts"] if start[1] < end]
    later = [start[1] for start in longer["starts"][len(shared) :] if start[1] < last]
    return longer["starts"][: len(shared)] == shared and min([*later, last]) >= end


# -- start or resume


def rebuild(folder: Path) -> None:
    """Make run.json anew where only the checkpoints are there: Drive may lose a file."""
    if checkpoint.names(folder) and not checkpoint.read_index(folder):
        entries = checkpoint.last_and_best(folder)
        plan = checkpoint.facts_of(folder, entries["last"])["plan"]
        named = {"version": checkpoint.VERSION, "nbtools": VERSION, "id": uuid4().hex}
        checkpoint.mark(folder, **named, **entries, given=plan, applied=plan)
        say(f"{folder / checkpoint.INDEX}: is missing; rebuilt from the checkpoints in this folder")


def begin(
    folder: Path, pack: Pack, state: TrainState, call: Call | None = None, fresh: bool = False
) -> tuple[History, list[str]]:
    """Make a new run folder, or load the last checkpoint of the run in it. Returns its history, and what was
    wrong with newer checkpoints. call: None: of the state's plan. Raises CheckpointError for another identity."""
    call, now = call or Call(state.plan, state.plan), identity(state.task, pack.card, state.model, state.plan)
    index: dict[str, Any] = {} if fresh else checkpoint.read_index(folder)
    if not fresh and former_run(state.task, folder) is not None:
        if differing := differences(index.get("identity", {}), now):
            rule, other = f"{folder} holds another run ({'; '.join(differing)})", "network, loss, metric or data"
            raise CheckpointError(f"{rule}; for another {other} name another run=, or start over with fresh=True")
        with disk.explained("resuming a run", folder):
            history, notes = resume(folder, pack, state)
    else:  # a run without a finished step starts over as the same
        history, notes = start(folder, pack, state, index.get("id", uuid4().hex)), []
    starts = [*index.get("starts", []), *([] if state.over else [[uuid4().hex[:8], state.step]])]
    advised = call.advised.to_dict() if call.advised else index.get("advised", state.plan.to_dict())
    given = call.given.given() or index.get("given", {})
    about = {"given": given, "applied": state.applied.to_dict(), "advised": advised, "identity": now, "starts": starts}
    named = {"task": train.task_name(state.task), "metric": state.task.BEST, "pack": str(pack.folder.absolute())}
    checkpoint.mark(folder, **about, **named, panel=call.panel)
    return history, notes


def start(folder: Path, pack: Pack, state: TrainState, name: str) -> History:
    """Write a new run, in place of one that is there, whose checkpoints go first; files of others stay. name: what
    identifies the run and its copies."""
    with disk.explained("starting a run", folder):
        there = sorted(folder.glob("*"), key=lambda each: (not checkpoint.FILE.fullmatch(each.name), each.name))
        old = (folder / checkpoint.INDEX).exists()
        for path in there:
            if path.name == HISTORY or (old and is_own(path) and not path.name.startswith(CONTROL)):
                disk.remove(path)
        folder.mkdir(parents=True, exist_ok=True)
        describe(folder, pack, state)
        checkpoint.mark(folder, version=checkpoint.VERSION, nbtools=VERSION, id=name)
    checkpoint.save(folder, state, rows=0)
    return History(folder / HISTORY)


def resume(folder: Path, pack: Pack, state: TrainState) -> tuple[History, list[str]]:
    """Load the last checkpoint, and record what the state's plan has otherwise. Returns the history and complaints."""
    for part in folder.glob("*.part"):
        if is_own(part) and not part.name.startswith(CONTROL):  # which others may be writing
            disk.remove(part)
    saved, new = checkpoint.newest(folder), state.plan
    old = type(new).from_dict(saved.facts["plan"])  # plan.json may be ahead of the checkpoint
    state.load(saved.tensors, saved.facts["state"])
    checkpoint.rewind(folder, saved.name)  # before rows go: a run killed between them resumes with all of its rows
    history = History(folder / HISTORY)
    history.cut(saved.facts["rows"])
    describe(folder, pack, state)
    if new != old and state.stopped:
        state.stopped, state.best.stale = None, 0  # asked to continue: an early stop counts anew from here
    for record in train.caught_up(state, old):
        history.append(record)
    return history, [*saved.complaints]


def describe(folder: Path, pack: Pack, state: TrainState) -> None:
    disk.write_atomic(folder / CARD, json.dumps(pack.card.to_dict(), ensure_ascii=False, indent=1))
    disk.write_atomic(folder / PLAN, state.plan.to_json())


# -- while it trains


class Job:
    """A run in progress. It is saved at the end of each epoch, and within one every minute, where that takes at most
    1 % of the time; at its best in any case. keeper: copies the folder to where the run is kept."""

    def __init__(self, pack: Pack, folder: Path, state: TrainState, surface: Surface, keeper: Keeper | None):
        self.task, self.pack, self.folder, self.state = state.task, pack, folder, state
        self.surface, self.history, self.keeper = surface, surface.history, keeper
        self.saved, self.cost = monotonic(), 0.0  # when the state was last copied, and the seconds it took to write
        self.writer = ThreadPoolExecutor(1, "nbtools-writer")
        self.writing: Future[float] | None = None  # the last checkpoint, until it is written; its seconds
        self.place = state.epoch, state.step  # of the last checkpoint
        self.plan = state.applied  # as the folder has it

    def watch(self, record: Record) -> None:
        """Save where it is due. Training continues once the state is copied."""
        if self.writing is not None and self.writing.done():
            self.wait()
        ends, since = record.kind == "epoch", monotonic() - self.saved
        cheap = self.writing is None and since * SAVE_SHARE >= self.cost
        if (ends and self.state.improved) or (cheap and (ends or since > SAVE_EVERY)):
            self.save(ends and self.state.improved)

    def save(self, best: bool = False) -> bool:
        """Copy the state and have it written, with the picture of now, unless it is; return whether it was worth it: a
        loss that is no number is reported at the next log step, and undone."""
        self.wait()  # for the memory of the last copy
        if self.place == (place := (self.state.epoch, self.state.step)):
            return True
        if self.state.lost():
            return False
        taken, draw = checkpoint.snapshot(self.state, len(self.history), best), self.surface.keep_still()
        self.place, self.state.improved, self.saved = place, False, monotonic()

        def written() -> float:
            began = monotonic()
            checkpoint.publish(self.folder, taken)
            draw()
            if self.keeper is not None:
                self.keeper.keep()
            return monotonic() - began

        self.writing = self.writer.submit(written)
        return True

    def wait(self) -> None:
        """Wait for the checkpoint that is being written. Raises DiskError if it could not be."""
        if self.writing is not None:
            writing, self.writing = self.writing, None
            self.cost = writing.result()
            self.surface.show_still()
        if self.keeper is not None:
            self.surface.report_all(self.keeper.complaints)

    def write_plan(self) -> None:
        """Record the applied plan."""
        if self.plan is not self.state.applied:
            self.plan = self.state.applied
            with disk.explained("writing the plan", self.folder):
                disk.write_atomic(self.folder / PLAN, self.plan.to_json())
            checkpoint.mark(self.folder, applied=self.plan.to_dict())

    def close(self) -> None:
        """Wait until everything is written and kept."""
        try:
            self.wait()
        finally:
            self.writer.shutdown()
            if self.keeper is not None:
                self.keeper.keep()
                self.keeper.close(not self.surface.requests.stop, self.surface.report)
                self.surface.report_all(self.keeper.complaints)
