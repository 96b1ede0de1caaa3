"""The folder of a run: which one a call means, held by one process; started, resumed or taken over from where it is
kept; and the Job that saves the run in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

import torch

from nbtools import disk, measure, train
from nbtools.data import Pack, cache, patient, say
from nbtools.errors import CheckpointError, NbtoolsError, PlanError, TrainError
from nbtools.identity import decide, differences, former_run, given_by, identity
from nbtools.live import Surface
from nbtools.run import CARD, EVALUATION, HISTORY, PLAN, RECEIPT, VERDICT, Run, lock
from nbtools.train import KEPT, History, Keeper, Plan, Record, Task, TrainState, checkpoint
from nbtools.version import VERSION

RUNS = Path("runs")
LEFT = (HISTORY, RECEIPT, VERDICT, EVALUATION, "plot.png")  # what an earlier run leaves besides its checkpoints
OURS = (checkpoint.INDEX, PLAN, CARD, KEPT, *LEFT)
EVENTS = "events.out.tfevents"  # how TensorBoard's files begin
SAVE_EVERY = 60.0  # seconds between checkpoints inside an epoch: what a lost session may cost
SAVE_SHARE = 0.01  # of the time that checkpoints may take


# -- what a call means


def plan_for(task: Task, pack: Pack, plan: Any, measured: bool = False) -> Plan:
    """Return the plan of a call, where it gives none the advised one. Raises PlanError for that of another task."""
    plan = measure.advise(task, pack, measure=measured) if plan is None else plan
    plan, kind = getattr(plan, "plan", plan), type(task.PLAN)
    if not isinstance(plan, kind):
        rule = f"plan must be a {kind.__module__}.{kind.__qualname__} (or an Advice or a Panel of one)"
        fix = f"use {train.spoken(task)}.PLAN, with .replace(...) for your changes"
        raise PlanError(f"{rule}, got {type(plan).__qualname__}; {fix}")
    return plan


def settle(task: Task, pack: Pack, plan: Any, folder: Path, fresh: bool) -> tuple[Plan, Plan, list[str]]:
    """Return (the plan to train with, the plan that counts as given, what to say). Raises TrainError where the run in
    the folder refuses a change."""
    former = None if fresh else former_run(task, folder)
    if former is None:
        plan = plan_for(task, pack, plan, measured=True)
        return plan, plan, []
    if plan is None:  # the run's own, with what the task gives unless a call gave the run its lr or batch size
        plan = former.applied.marked(former.applied.to_dict())
        if not former.index["given"].keys() & {"lr", "batch_size"}:
            plan = plan.replace(**plan_for(task, pack, None).given())
    plan = plan_for(task, pack, plan)
    new, messages = decide(former, plan)
    return new, plan, messages


def own_folder(task: Task, pack: Pack, plan: Any, fresh: bool) -> Path:
    """Return the folder of a call without `run=`: that of the newest run below `runs/` that the call resumes, extends
    or returns, else a new one."""
    panel, plan = getattr(plan, "id", None), plan_for(task, pack, plan)
    card = train.readable(task, pack, plan).card
    bound, name = train.bound(task, card), train.task_name(task)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        network = train.build(bound, card, plan)
    now = identity(bound, card, network, plan)
    indices = sorted(RUNS.glob(f"*/{checkpoint.INDEX}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [] if fresh else indices:
        with suppress(NbtoolsError):  # another kind of run, or one that refuses this call
            if matches(task, plan, panel, now, path.parent):
                return path.parent
    return new_folder(type(network).__name__ if ":" in name else name.rpartition(".")[2])


def matches(task: Task, plan: Plan, panel: str | None, now: Mapping[str, list[str]], folder: Path) -> bool:
    """Return whether a call without `run=` means this run. Raises TrainError where the run refuses the call."""
    index, former = checkpoint.read_index(folder), former_run(task, folder)
    theirs, given, before = index["identity"], given_by(plan), index["given"]
    if differences(theirs, now) or theirs["trained"] != now["trained"]:
        return False
    if former is not None:
        decide(former, plan)
        if former.over and plan.epochs > former.applied.epochs:
            given, before = ({**values, "epochs": 0} for values in (given, before))
    return given == before or (panel is not None and panel == index.get("panel"))


def new_folder(name: str) -> Path:
    """Make the folder of a run with the next free number; two processes never get the same."""
    short = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-") or "run"
    with disk.explained("making a run folder", RUNS):
        RUNS.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            with suppress(FileExistsError):
                (folder := RUNS / f"{short}-{number}").mkdir()
                return folder
    raise AssertionError


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold the run folder's lock. Raises TrainError where another process trains in it. An empty folder goes where the
    block fails."""
    with ExitStack() as stack:
        with disk.explained("locking a run", cache()):
            try:
                stack.enter_context(lock(folder))
            except BlockingIOError:
                rule = f"{folder}: another process is training this run"
                raise TrainError(f"{rule}; stop it, or name another run folder") from None
        try:
            yield
        except BaseException:
            with suppress(OSError):
                folder.rmdir()
            raise


# -- keep=


def restore(folder: Path, kept: Path | None, fresh: bool = False) -> None:
    """Take over the kept run where the local folder is missing, as after a lost session, or behind. Raises
    CheckpointError if that would mix two runs, or replace files that belong to no run."""
    theirs = {} if kept is None else patient(lambda: checkpoint.read_index(kept), kept)
    ours = checkpoint.read_index(folder)
    if kept is None or not theirs:
        return
    if kept.resolve() == folder.resolve():
        raise CheckpointError(f"{kept} is the folder of a run itself; name another one with keep=")
    if fresh:
        raise CheckpointError(f"{kept} holds a run, which fresh=True does not replace; name another keep=")
    if ours and not further(folder, ours, kept, theirs):
        return
    with disk.explained(f"restoring {folder} from {kept}", folder):
        if not ours and folder.exists() and [*folder.iterdir()]:
            rule = f"{folder} holds files but no run, and {kept} holds a run"
            raise CheckpointError(f"{rule}; name a new folder with run=")
        part = folder.with_name(f"{folder.name}.part")
        train.restore_kept(kept, part)
        disk.remove(folder)
        disk.publish_folder(part, folder)


def further(folder: Path, ours: Mapping[str, Any], kept: Path, theirs: Mapping[str, Any]) -> bool:
    """Return whether the kept run is further than the local one. Raises CheckpointError where neither continues the
    other."""
    if ours["id"] != theirs["id"]:
        raise CheckpointError(f"{kept} holds a different run than {folder}; name another keep=, or another run=")
    if continues(ours, theirs):
        return False
    if not continues(theirs, ours):
        here, there = (f"{checkpoint.place(each['last'])[1]:,}" for each in (ours, theirs))
        rule = f"{folder} (step {here}) and {kept} (step {there}) were trained apart, and neither continues the other"
        raise CheckpointError(f"{rule}; name another keep=, or another run= to go on from the kept one")
    say(f"{kept} is further than {folder}, and is taken over")
    return True


def continues(longer: Mapping[str, Any], shorter: Mapping[str, Any]) -> bool:
    """Return whether one copy of a run went on from where the other one had ended, or from later: by their starts, each
    with its first step."""
    last, end = (checkpoint.place(each["last"])[1] for each in (longer, shorter))
    shared = [start for start in shorter["starts"] if start[1] < end]
    later = [start[1] for start in longer["starts"][len(shared) :] if start[1] < last]
    return longer["starts"][: len(shared)] == shared and min([*later, last]) >= end


# -- start or resume


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
        for part in folder.glob("*.part"):
            if part.name.rsplit(".", 2)[0] in OURS:  # of a killed process; control.json's writers may be at it
                disk.remove(part)
        if not resumes:
            disk.remove(folder / checkpoint.INDEX)  # without it the folder holds no run, with it a whole one
        disk.write_atomic(folder / CARD, json.dumps(pack.card.to_dict(), ensure_ascii=False, indent=1))
        disk.write_atomic(folder / PLAN, state.applied.to_json())
        history, notes = resume(folder, state) if resumes else start(folder, index.get("id", uuid4().hex), state)
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


def start(folder: Path, name: str, state: TrainState) -> tuple[History, list[str]]:
    """Write a new run, in place of one that is there; files of others stay. name: what identifies it and its copies."""
    for path in folder.glob("*"):
        if path.name in LEFT or path.name.startswith(EVENTS) or checkpoint.FILE.fullmatch(path.name):
            disk.remove(path)
    checkpoint.mark(folder, version=checkpoint.VERSION, nbtools=VERSION, id=name)
    checkpoint.save(folder, state, rows=0)
    return History(folder / HISTORY), []


def resume(folder: Path, state: TrainState) -> tuple[History, list[str]]:
    """Load the last checkpoint, and record what the state's plan has otherwise."""
    saved, new = checkpoint.newest(folder), state.plan
    old = type(new).from_dict(saved.facts["plan"])  # plan.json may be ahead of the checkpoint
    state.load(saved.tensors, saved.facts["state"])
    checkpoint.rewind(folder, saved.name)  # before rows go: a run killed between them resumes with all of its rows
    history = History(folder / HISTORY)
    history.cut(saved.facts["rows"])
    if new != old and state.stopped:
        state.stopped, state.best.stale = None, 0  # asked to continue: an early stop counts anew from here
    for record in train.caught_up(state, old):
        history.append(record)
    return history, [*saved.complaints]


# -- while it trains


class Job:
    """A run in progress. It is saved at the end of each epoch, and within one every minute, where that takes at most
    1 % of the time; at its best in any case. keeper: copies the folder to where the run is kept, if it is."""

    def __init__(self, pack: Pack, folder: Path, state: TrainState, surface: Surface):
        self.task, self.pack, self.folder, self.state = state.task, pack, folder, state
        self.surface, self.history = surface, surface.history
        self.keeper: Keeper | None = None
        self.saved, self.cost = monotonic(), 0.0  # when the state was last copied, and the seconds it took to write
        self.begun: float | None = None  # when `fit` was called, for a run that starts here
        self.cold_start: float | None = None  # seconds from then to the tenth step
        self.writer = ThreadPoolExecutor(1, "nbtools-writer")
        self.writing: Future[float] | None = None  # the last checkpoint, until it is written
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
        taken, draw = checkpoint.snapshot(self.state, len(self.history), best), self.surface.keep_still()
        self.place, self.state.improved, self.saved = place, False, monotonic()
        self.writing = self.writer.submit(self.write, taken, draw)
        return True

    def write(self, taken: checkpoint.Checkpoint, draw: Callable[[], None]) -> float:
        """Write a copied state and the picture of that moment; return the seconds. Called in the writer's thread."""
        began = monotonic()
        checkpoint.publish(self.folder, taken)
        draw()
        if self.keeper is not None:
            self.keeper.keep()
        return monotonic() - began

    def wait(self) -> None:
        """Wait for the checkpoint that is being written. Raises DiskError if it could not be."""
        if self.writing is not None:
            writing, self.writing = self.writing, None
            self.cost = writing.result()
            self.surface.show_still()
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
