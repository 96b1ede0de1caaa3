"""The folder of a run: held by one process; started, resumed or taken over from where it is kept; saved while it
trains."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

from nbtools import disk, train
from nbtools.data import Pack, patient, say
from nbtools.errors import CheckpointError
from nbtools.identity import differences, former_run, identity
from nbtools.live import Surface
from nbtools.run import CARD, HISTORY, PLAN, RECEIPT, VERDICT, Run
from nbtools.train import KEPT, History, Keeper, Plan, Record, TrainState, checkpoint
from nbtools.version import VERSION

LEFT = (HISTORY, RECEIPT, VERDICT, "plot.png")  # what an earlier run leaves besides its checkpoints
OURS = (checkpoint.INDEX, PLAN, CARD, KEPT, *LEFT)
EVENTS = "events.out.tfevents"  # how TensorBoard's files begin
Checkpoint = checkpoint.Checkpoint
SAVE_EVERY = 60.0  # seconds between checkpoints inside an epoch: what a lost session may cost
SAVE_SHARE = 0.01  # of the time that checkpoints may take


def restore(folder: Path, kept: Path | None, fresh: bool) -> None:
    """Take over the kept run where the local folder is missing, as after a lost session, or behind. Raises
    CheckpointError if that would mix two runs, or replace files that belong to no run."""
    theirs = {} if kept is None else patient(lambda: checkpoint.read_index(kept), kept)
    if kept is None or not theirs:
        return
    if kept.resolve() == folder.resolve():
        raise CheckpointError(f"{kept} is the folder of a run itself; name another one with keep=")
    if fresh:
        raise CheckpointError(f"{kept} holds a run, which fresh=True does not replace; name another keep=")
    if ours := checkpoint.read_index(folder):
        if ours["id"] != theirs["id"]:
            raise CheckpointError(f"{kept} holds a different run than {folder}; name another keep=, or another run=")
        if continues(ours, theirs):
            return
        if not continues(theirs, ours):
            here, there = (f"{checkpoint.place(each['last'])[1]:,}" for each in (ours, theirs))
            rule = f"{folder} (step {here}) and {kept} (step {there}) were trained apart"
            raise CheckpointError(f"{rule}; name another keep=, or another run= to go on from the kept one")
        say(f"{kept} is further than {folder}, and is taken over")
    with disk.explained(f"restoring {folder} from {kept}", folder):
        if not ours and folder.exists() and [*folder.iterdir()]:
            raise CheckpointError(f"{folder} holds files but no run, and {kept} holds one; name a new folder with run=")
        part = folder.with_name(f"{folder.name}.part")
        train.restore_kept(kept, part)
        disk.remove(folder)
        disk.publish_folder(part, folder)


def continues(longer: Mapping[str, Any], shorter: Mapping[str, Any]) -> bool:
    """Return whether a copy of a run went on from where the other had ended, or later: by their starts' first steps."""
    last, end = (checkpoint.place(each["last"])[1] for each in (longer, shorter))
    starts, shared = lineage(longer), [start for start in lineage(shorter) if start[1] < end]
    later = [start[1] for start in starts[len(shared) :] if start[1] < last]
    return starts[: len(shared)] == shared and min([*later, last]) >= end


def lineage(index: Mapping[str, Any]) -> list[list[Any]]:
    """Return the starts whose steps still count: a later one from before them, after an Undo, has discarded theirs."""
    left: list[list[Any]] = []
    for start in index["starts"]:
        left = [*(each for each in left if each[1] < start[1]), start]
    return left


def begin(
    folder: Path, pack: Pack, state: TrainState, plan: Any = None, given: Plan | None = None, fresh: bool = False
) -> tuple[History, list[str]]:
    """Start the run in a folder, or load its last checkpoint; return its history, and what was wrong with newer
    checkpoints. plan: of the call; given: what counts as given. Raises CheckpointError for another identity."""
    now = identity(state.task, pack.card, state.model, state.plan)
    index: dict[str, Any] = {} if fresh else checkpoint.read_index(folder)
    resumes = not fresh and former_run(state.task, folder) is not None
    if resumes and (differing := differences(index["identity"], now)):
        rule = f"{folder} holds another run ({'; '.join(differing)})"
        raise CheckpointError(f"{rule}; name another run= for this one, or start over with fresh=True")
    with disk.explained("resuming a run" if resumes else "starting a run", folder):
        clear(folder, resumes)
        disk.write_atomic(folder / CARD, json.dumps(pack.card.to_dict(), ensure_ascii=False, indent=1))
        disk.write_atomic(folder / PLAN, state.applied.to_json())
        if not resumes:
            checkpoint.mark(folder, version=checkpoint.VERSION, nbtools=VERSION, id=index.get("id", uuid4().hex))
            checkpoint.save(folder, state, rows=0)
        history, notes = History(folder / HISTORY), []
        if resumes:
            saved, changes = resume(folder, state, history)
            notes = [*saved.complaints]
            if changes and state.stopped:
                state.stopped, state.best.stale = None, 0  # asked to continue: an early stop counts anew from here
            for record in changes:
                history.append(record)
    advised = getattr(plan, "advised", getattr(plan, "plan", None))
    checkpoint.mark(
        folder,
        task=train.task_name(state.task),
        metric=state.task.BEST,
        pack=str(pack.folder.absolute()),
        given=(given or state.plan).given() or index.get("given", {}),
        applied=state.applied.to_dict(),
        advised=advised.to_dict() if advised else index.get("advised", state.plan.to_dict()),
        identity=now,
        starts=[*index.get("starts", []), *([] if state.over else [[uuid4().hex[:8], state.step]])],
        panel=getattr(plan, "id", None),
    )
    return history, notes


def clear(folder: Path, resumes: bool) -> None:
    """Remove what a killed process left half-written, and a run in whose place a new one starts; files of others stay.
    control.json's writers may be at it."""
    for path in [folder / checkpoint.INDEX, *folder.glob("*")]:  # without its index the folder holds no run
        name = path.name
        ours = name in (checkpoint.INDEX, *LEFT) or name.startswith(EVENTS) or checkpoint.FILE.fullmatch(name)
        if (name.endswith(".part") and name.rsplit(".", 2)[0] in OURS) or (ours and not resumes):
            disk.remove(path)


def resume(folder: Path, state: TrainState, history: History) -> tuple[Checkpoint, list[Record]]:
    """Load the last checkpoint and cut the history to it; return it, and the row of what the wanted plan has otherwise,
    which is still to come."""
    saved = checkpoint.newest(folder)
    old = type(state.plan).from_dict(saved.facts["plan"])  # plan.json may be ahead of the checkpoint
    train.adopt(state, state.plan)  # first: a scaler takes over its saved state
    state.load(saved.tensors, saved.facts["state"])
    checkpoint.rewind(folder, saved.name)  # before rows go: a run killed between them resumes with all of its rows
    history.cut(saved.facts["rows"])
    return saved, [*train.caught_up(state, old)]


class Job:
    """A run in progress. It is saved at the end of each epoch, and within one every minute, where that takes at most
    1 % of the time; at its best in any case. keeper: copies the folder to where the run is kept, if it is."""

    def __init__(self, pack: Pack, folder: Path, state: TrainState, surface: Surface):
        self.task, self.pack, self.folder, self.state = state.task, pack, folder, state
        self.surface, self.history = surface, surface.history
        self.keeper: Keeper | None = None
        self.saved, self.cost = monotonic(), 0.0  # when the state was last copied, and the seconds it took to write
        self.writer, self.writing = ThreadPoolExecutor(1, "nbtools-writer"), None  # the last checkpoint, until written
        self.begun, self.cold_start = 0.0, 0.0  # when `fit` was called for a new run; from then to the tenth step
        self.place, self.plan = (state.epoch, state.step), state.applied  # as saved

    def result(self) -> Run:
        run = Run.open(self.folder, self.task)
        run.events = self.surface.events
        return run

    @property
    def kept_all(self) -> bool:
        """Return whether all of it is kept, and nobody stopped it."""
        kept = self.keeper is not None and self.keeper.done == self.keeper.requested
        return kept and not self.surface.requests.stop

    def watch(self, record: Record) -> None:
        """Save where it is due. Training continues once the state is copied."""
        if self.writing is not None and self.writing.done():
            self.wait()
        ends, since = record.kind == "epoch", monotonic() - self.saved
        cheap = self.writing is None and since * SAVE_SHARE >= self.cost
        if (ends and self.state.improved) or (cheap and (ends or since > SAVE_EVERY)):
            self.save(best=ends and self.state.improved)

    def save(self, best: bool = False) -> bool:
        """Have the state written, unless it is; return False for one whose loss is no number, which will be undone."""
        self.wait()  # for the memory of the last copy
        if self.place == (place := (self.state.epoch, self.state.step)):
            return True
        if self.state.lost():
            return False
        taken = checkpoint.snapshot(self.state, len(self.history), best)
        self.surface.keep_still()
        self.place, self.state.improved, self.saved = place, False, monotonic()
        self.writing = self.writer.submit(self.write, taken)
        return True

    def write(self, taken: Checkpoint) -> float:
        """Write a copied state; return the seconds. Called in the writer's thread."""
        began = monotonic()
        checkpoint.publish(self.folder, taken)
        if self.keeper is not None:
            self.keeper.keep()
        return monotonic() - began

    def wait(self) -> None:
        """Wait for the checkpoint that is being written. Raises DiskError if it could not be."""
        if self.writing is not None:
            writing, self.writing = self.writing, None
            self.cost = writing.result()
        if self.keeper is not None:
            self.surface.report_all(self.keeper.complaints)

    def write_plan(self) -> None:
        """Record the applied plan, if it has changed."""
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
