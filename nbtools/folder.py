"""A run's folder: which one a call refers to and changes; how it starts, resumes, is taken over, and is saved."""

import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

import torch

from nbtools import disk, measure, show, train
from nbtools.data import Pack, bar, retry, say
from nbtools.errors import CheckpointError, NbtoolsError, PlanError, TrainError
from nbtools.live import Surface
from nbtools.run import CARD, HISTORY, PLAN, RECEIPT, VERDICT, Run, as_plan
from nbtools.train import ADVISED, History, Keeper, Plan, Record, Task, TrainState, checkpoint, identity

RUNS = Path("runs")
OURS = (checkpoint.INDEX, PLAN, CARD, HISTORY, RECEIPT, VERDICT, "plot.png")  # besides checkpoints
SAVE_EVERY = 60.0  # seconds between checkpoints inside an epoch: what a lost session may cost
SAVE_SHARE = 0.01  # of the time that checkpoints may take
Lines = Mapping[str, list[str]]


def differences(before: Lines, now: Lines) -> list[str]:
    """Return what differs between two identities but the trained parameters: `metrics: accuracy → f1`."""

    def first(lines: list[str], others: list[str]) -> str:
        return ", ".join([line for line in lines if line not in others][:3]) or "none"

    pairs = [(part, before.get(part, lines), lines) for part, lines in now.items() if part != "trained"]
    return [f"{part}: {first(old, new)} → {first(new, old)}" for part, old, new in pairs if old != new]


def former_run(task: Task, folder: Path) -> Run | None:
    """Return the run in a folder; None where there is none with a finished step. Raises CheckpointError, DiskError."""
    return Run.open(folder, task) if last_place(checkpoint.read_index(folder))[1] else None


def last_place(index: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the (epoch, step) of the last checkpoint of a run; (0, 0) before it has one."""
    return checkpoint.place(index.get("last", "0-0"))


def plan_for(task: Task, pack: Pack, call: Any) -> Plan:
    """Return the plan that a call gives, None: that of the rules. Raises PlanError for that of another task."""
    call = measure.advise(task, pack, measure=False) if call is None else call
    plan, kind = getattr(call, "plan", call), type(task.PLAN)
    if not isinstance(plan, kind):
        rule = f"plan must be a {kind.__module__}.{kind.__qualname__} (or an Advice or a Panel of one)"
        raise PlanError(f"{rule}, got {type(plan).__qualname__}; use {train.title_of(task)}.PLAN.replace(...)")
    return plan


def decide(task: Task, pack: Pack, call: Any, former: Run | None) -> tuple[Plan, Plan, list[str]]:
    """Return (the plan to train with, the one that counts as given, what to say) where a call gives `call`, None: the
    run's own. What is given otherwise than last time is a change, newly measured advice is not. Raises TrainError."""
    if former is None:
        plan = plan_for(task, pack, call)
        return plan, plan, []
    index, old, messages = former.index, former.plan, []
    if call is None:
        call = old.marked(old.to_dict())
        if not index["given"].keys() & ADVISED:  # where no call ever gave a plan, the task does
            call = call.replace(**plan_for(task, pack, None).given())
    plan, (epoch, step) = plan_for(task, pack, call), last_place(index)
    changed = {name: value for name, value in plan.given().items() if value != index["given"].get(name, ...)}
    new = old.turn(**{"lr": old.lr, **changed}) if changed else old  # lr follows the batch where a plan is made
    moved = new.changes_from(old)
    refused, why = moved.keys() & old.fixed_settings(resumed=True).keys(), "has started"
    if former.over and (new.epochs < old.epochs or moved.keys() != {"epochs"}):
        refused, why = moved.keys(), "is finished (more epochs extend it)"
    if refused:
        changes = train.list_changes({name: moved[name] for name in moved if name in refused})
        fix = "name another run= (and keep=), or start over with fresh=True"
        raise TrainError(f"{former.folder}: this run {why}, and cannot change {changes}; {fix}")
    if former.over and moved:
        drops = checkpoint.newest(former.folder).facts["state"]["best"]["drops"]
        now, then = (show.shown(each.lr_at(epoch, drops, task.schedule(each))) for each in (new, old))
        messages.append(f"{train.list_changes(moved)}: lr continues at {now}; it had reached {then}")
    elif moved:
        messages.append(f"resumed at step {step:,} with {train.list_changes(moved)}")
    if (moved or not former.over) and (advice := plan.changes_from(new)):
        messages.append(f"this run keeps its applied settings; this call would change {train.list_changes(advice)}")
    return new.marked(new.to_dict().keys() - plan.given().keys()), plan, messages


def own_folder(task: Task, pack: Pack, call: Any, fresh: bool) -> Path:
    """Return the folder of the newest run below `runs/` that a call means, else a new one, which no other gets."""
    plan = plan_for(task, pack, call)
    card, name, number = task.part(pack, plan).card, train.task_name(task), 0
    with train.device.untouched(torch.device("cpu")):
        network = train.build(bound := train.bind(task, card), card, plan)
    now = identity(bound, card, network, plan)
    indices = sorted(RUNS.glob(f"*/{checkpoint.INDEX}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [] if fresh else indices:
        with suppress(NbtoolsError, KeyError):  # another kind of run, one that refuses this call, or no whole one
            index, given = checkpoint.read_index(path.parent), plan.given()
            if differences(index["identity"], now) or index["identity"]["trained"] != now["trained"]:
                continue
            decide(task, pack, plan, former := former_run(task, path.parent))
            if former and former.over and given.get("epochs", 0) > former.plan.epochs:
                given, index["given"] = ({**each, "epochs": 0} for each in (given, index["given"]))
            if given == index["given"] or getattr(call, "id", "") == index.get("panel"):
                return path.parent
    short = type(network).__name__ if ":" in name else name.rpartition(".")[2]
    short = re.sub("[^a-z0-9]+", "-", short.lower()).strip("-") or "run"
    with disk.explained("making a run folder", RUNS):
        while True:
            number += 1
            with suppress(FileExistsError):
                (folder := RUNS / f"{short}-{number}").mkdir(parents=True)
                return folder


def restore(folder: Path, kept: Path, fresh: bool, progress: bool) -> None:
    """Take over the kept run where the local folder is missing or behind. Raises CheckpointError for other runs."""
    ours, theirs = checkpoint.read_index(folder), retry(lambda: checkpoint.read_index(kept), kept)
    if kept.resolve() == folder.resolve():
        raise CheckpointError(f"{kept} is the run's own folder; name another keep=")
    if not last_place(theirs)[1]:  # not even one step
        return
    if fresh:
        raise CheckpointError(f"{kept} holds a run, which fresh=True does not replace; name another keep=")
    if not ours.get("id") and any(folder.glob("*")):
        raise CheckpointError(f"{folder} holds files but no run; name another run=")
    if ours and ours.get("id") != theirs.get("id"):
        raise CheckpointError(f"{kept} holds a different run from {folder}; use another keep=")
    if ours and continues(ours, theirs):
        return
    if ours and not continues(theirs, ours):
        here, there = (f"{last_place(each)[1]:,}" for each in (ours, theirs))
        rule = f"{folder} (step {here}) and {kept} (step {there}) were trained separately"
        raise CheckpointError(f"{rule}; name another keep=, or another run= to continue from the kept one")
    if ours:
        say(f"{kept} is further along than {folder}, and replaces it")
    with disk.explained(f"restoring {folder} from {kept}", folder):
        part = folder.with_name(f"{folder.name}.part")
        paths = retry(lambda: sorted(kept.iterdir()), kept)
        for path in bar(paths, desc="restoring", unit=" files", leave=False, disable=not progress):
            if path.suffix in (*checkpoint.SMALL, ".safetensors"):
                disk.write_atomic(part / path.name, retry(path.read_bytes, path))
        former = folder.with_name(f"{folder.name}.former.part")
        if ours:
            folder.rename(former)
        disk.publish_folder(part, folder)
        for path in former.iterdir() if former.exists() else ():  # also of a call that was killed here
            if not is_ours(path):  # but TensorBoard's or a callback's
                path.rename(folder / path.name)
        disk.remove(former)


def continues(longer: Mapping[str, Any], shorter: Mapping[str, Any]) -> bool:
    """Return whether a copy of a run went on from where the other had ended, or later: by their starts' first steps."""
    last, end = (last_place(each)[1] for each in (longer, shorter))
    shared = [start for start in shorter["starts"] if start[1] < end]
    later = [start[1] for start in longer["starts"][len(shared) :] if start[1] < last]
    back = longer.get("returns", 0) > shorter.get("returns", 0)  # by Undo or to the best, which left later steps
    return longer["starts"][: len(shared)] == shared and (back or min([*later, last]) >= end)


def begin(
    folder: Path, pack: Pack, state: TrainState, former: Run | None, given: Plan, call: Any, now: Lines
) -> tuple[History, list[str]]:
    """Start the run in a folder, or load its last checkpoint; return its history, and complaints about newer ones.
    given: the plan that counts as given; call: what the user gave; now: its identity. Raises CheckpointError."""
    index, complaints = former.index if former else {}, []
    if former and (differing := differences(index["identity"], now)):
        rule = f"{folder} holds another run ({'; '.join(differing)})"
        raise CheckpointError(f"{rule}; name another run= (and keep=) for this one, or start over with fresh=True")
    left = [path for path in folder.glob("*") if is_ours(path) or path.name.startswith("events.out.tfevents")]
    whole = {path.name for path in left if path.suffix != ".part"}
    if whole and not whole & {CARD, checkpoint.INDEX}:  # a run begins with its card
        raise CheckpointError(f"{folder} holds {min(whole)}, but no run; name another folder, run='runs/…'")
    with disk.explained("resuming a run" if former else "starting a run", folder):
        for path in sorted(left, key=lambda path: (path.name != checkpoint.INDEX, path.name == CARD)):
            if path.suffix == ".part" or not former:  # half-written when killed, or of the run before
                disk.remove(path)
        disk.write_atomic(folder / CARD, json.dumps(pack.card.to_dict(), indent=1))
        disk.write_atomic(folder / PLAN, json.dumps(state.applied.to_dict(), indent=1))
        history = History(folder / HISTORY)
        if former:
            complaints, changes = resume(folder, state, history)
            if changes and state.stopped:
                state.stopped, state.best.stale = None, 0  # asked to continue: an early stop counts anew from here
            if not state.over:  # a receipt is that of the epochs so far
                disk.remove(folder / RECEIPT)
            for record in changes:
                history.append(record)
    advised = getattr(call, "advised", getattr(call, "plan", None))
    starts = [start for start in index.get("starts", []) if state.over or start[1] < state.step]  # else undone since
    plans = {
        "given": given.given() or index.get("given", {}),
        "applied": state.applied.to_dict(),
        "advised": advised.to_dict() if advised else index.get("advised", state.plan.to_dict()),
        "lr_trial": trial.to_dict() if (trial := getattr(call, "lr_trial", None)) else index.get("lr_trial"),
    }
    made = {"version": checkpoint.VERSION, "nbtools": disk.VERSION, "pack": str(pack.folder.absolute())}
    task = {"task": train.task_name(state.task), "metric": state.task.BEST, "identity": now}
    starts = starts if state.over else [*starts, [uuid4().hex[:8], state.step]]
    run = {"id": index.get("id", uuid4().hex), "starts": starts, "panel": getattr(call, "id", None)}
    checkpoint.mark(folder, **made, **task, **plans, **run)
    if former is None:
        checkpoint.publish(folder, checkpoint.snapshot(state, rows=0))
    return history, complaints


def is_ours(path: Path) -> bool:
    whole = path.name.rsplit(".", 2)[0] if path.suffix == ".part" else path.name
    return whole in OURS or checkpoint.FILE.fullmatch(path.name) is not None


def resume(folder: Path, state: TrainState, history: History) -> tuple[list[str], list[Record]]:
    """Load the last checkpoint that is whole, and cut the history to it; return complaints about newer ones, and the
    row of what the wanted plan changes."""
    saved, wanted = checkpoint.newest(folder), state.plan
    train.adopt(state, as_plan(type(wanted), saved.facts["plan"]))  # plan.json may be ahead of the checkpoint
    state.load(saved.tensors, saved.facts["state"])
    checkpoint.rewind(folder, saved.name)  # before rows go: a run killed between them resumes with all of its rows
    history.cut(saved.facts["rows"])
    return [*saved.complaints], [*train.change(state, wanted)]


class Job:
    """A run in progress. It is saved at the end of each epoch, and within one every minute, where that takes at most
    1 % of the time. Its best state is copied at once, and written before the next. kept: the second folder, if any."""

    def __init__(self, surface: Surface, kept: Path | None):
        self.surface, self.pack, self.folder, self.history = surface, surface.pack, surface.folder, surface.history
        self.state = state = surface.state
        self.task = state.task
        if kept is not None and kept.is_dir() and not os.access(kept, os.W_OK):  # as Kaggle's inputs
            surface.report(f"{kept} may only be read: the run continues what it holds, and is not copied there")
            kept = None
        self.keeper = None if kept is None else Keeper(self.folder, kept)
        self.saved, self.place, self.plan = monotonic(), (state.epoch, state.step), state.applied  # when, and what
        self.best: checkpoint.Checkpoint | None = None  # the best state, where it is still to be written
        self.writer, self.writing = ThreadPoolExecutor(1, "nbtools-writer"), Future[float]()  # of seconds
        self.writing.set_result(0.0)

    def log(self, record: Record) -> None:
        """Write a record to the history, the plan where it has changed, and a checkpoint where one is due."""
        self.history.append(record)
        self.write_plan()
        since, ends = monotonic() - self.saved, record.kind == "epoch"
        if record.kind == "change":  # a checkpoint amid it would resume with its row, but without the change
            return
        if (ends or since > SAVE_EVERY) and self.writing.done() and since * SAVE_SHARE >= self.writing.result():
            self.save()
        elif self.state.improved and not self.state.lost():
            self.best, self.state.improved = checkpoint.snapshot(self.state, len(self.history), best=True), False

    def write_plan(self) -> None:
        if self.plan is not self.state.applied:
            self.plan = self.state.applied
            with disk.explained("writing the plan", self.folder):
                disk.write_atomic(self.folder / PLAN, json.dumps(self.plan.to_dict(), indent=1))
            checkpoint.mark(self.folder, applied=self.plan.to_dict())

    def save(self) -> bool:
        """Have the state written, unless it is; return False for one whose loss is no number, which will be undone.
        Training continues once the state is copied."""
        self.write_plan()
        self.finish_writing()  # for the memory of the last copy
        if self.place == (place := (self.state.epoch, self.state.step)):
            self.wait()
            return True
        if self.state.lost():
            return False
        taken, best = checkpoint.snapshot(self.state, len(self.history), self.state.improved), self.best
        if best is not None and best.name == taken.name:
            best, taken.facts["best"] = None, True
        self.surface.keep_still()
        self.place, self.state.improved, self.saved, self.best = place, False, monotonic(), None
        self.writing = self.writer.submit(self.write, *filter(None, (best, taken)))
        return True

    def write(self, *taken: checkpoint.Checkpoint) -> float:
        if "id" not in checkpoint.read_index(self.folder):
            raise CheckpointError(f"{self.folder} was moved or deleted while it trained; put it back, and run it again")
        began = monotonic()
        for each in taken:
            checkpoint.publish(self.folder, each)
        if self.keeper is not None:
            self.keeper.keep()
        return monotonic() - began

    def wait(self) -> None:
        """Wait until all that is to be saved is written. Raises DiskError where it could not be."""
        self.finish_writing()
        if self.best is not None:
            self.writing, self.best = self.writer.submit(self.write, self.best), None
            self.finish_writing()

    def finish_writing(self) -> None:
        self.writing.result()
        if self.keeper is not None:
            self.surface.report_all(self.keeper.complaints)

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self.writer.shutdown()
            if self.keeper is not None:
                self.keeper.close(not self.surface.requests.stop, self.surface.report)
                self.surface.report_all(self.keeper.complaints)
