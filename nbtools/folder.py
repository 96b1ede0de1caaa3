"""The folder of a run: which one a call means and changes, how it starts, resumes, is taken over, and is saved."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from nbtools import disk, measure, train
from nbtools.data import Card, Pack, retry, say
from nbtools.errors import CheckpointError, NbtoolsError, PlanError, TrainError
from nbtools.live import Surface
from nbtools.run import CARD, HISTORY, PLAN, RECEIPT, VERDICT, Run
from nbtools.train import History, Keeper, Plan, Record, Task, TrainState, checkpoint

RUNS = Path("runs")
LEFT = (HISTORY, RECEIPT, VERDICT, "plot.png")  # what an earlier run leaves besides its checkpoints
OURS = (checkpoint.INDEX, PLAN, CARD, *LEFT)
EVENTS = "events.out.tfevents"  # how TensorBoard's files begin
PLAIN, VARYING = (int, float, str, tuple, type(None)), ("training", "process_group")  # settings of a module; not these
FREE = {"lr", "batch_size"}  # what advice chooses where a call gives neither
SAVE_EVERY = 60.0  # seconds between checkpoints inside an epoch: what a lost session may cost
SAVE_SHARE = 0.01  # of the time that checkpoints may take
Lines = Mapping[str, list[str]]
Index = Mapping[str, Any]


# -- what makes two runs the same


def identity(task: Task, card: Card, model: nn.Module, plan: Plan) -> dict[str, list[str]]:
    """Return what a run is besides its plan, each part as a list of lines."""
    (loss, metrics, augment, functions), name = train.objective(task), train.task_name(task)
    kind = getattr(loss, "__qualname__", type(loss).__qualname__) if loss else "default"
    parts = {
        "pack": [card.digest[:12]],
        "network": [*structure(model)],
        "loss": [*structure(loss, values=True)] if isinstance(loss, nn.Module) else [kind],  # such as class weights
        "metrics": metrics,
        "augment": [f"{name} {strength}" for name, strength in augment.items()],
        **{part: [name] for part, name in functions.items()},
        "trained": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
    }
    if ":" not in name:  # else the name of a variable, which may change
        parts["task"] = [name]
    if task.card is not None and not plan.given().keys() & FREE:
        parts["recipe"] = [f"lr {task.PLAN.lr}, batch size {task.PLAN.batch_size}"]
    return parts


def structure(model: nn.Module, values: bool = False) -> Iterator[str]:
    """Yield a line a module, with its type and its plain settings, and a line a tensor, with its shape or values."""
    for name, module in model.named_modules():
        # SyncBatchNorm takes the place of BatchNorm in several processes, and the run stays the same
        kind = "BatchNorm" if isinstance(module, _BatchNorm) else type(module).__name__
        plain = ((n, v) for n, v in vars(module).items() if isinstance(v, PLAIN) and n not in VARYING and n[0] != "_")
        yield f"{name}: {kind}({', '.join(f'{n}={value}' for n, value in plain)})".removeprefix(": ")
    for name, tensor in model.state_dict().items():
        digest = hashlib.sha256(repr(tensor.tolist()).encode()).hexdigest()[:12] if values else ""
        yield f"{name} {[*tensor.shape]} {digest}".strip()


def differences(before: Lines, now: Lines) -> list[str]:
    """Return what differs between two identities but the trained parameters: `metrics: accuracy → f1`."""
    phrases = []
    for part in [part for part in now if part in before and part != "trained" and before[part] != now[part]]:
        old = [line for line in before[part] if line not in now[part]]
        new = [line for line in now[part] if line not in before[part]]
        phrases.append(f"{part}: {', '.join(old[:3]) or 'none'} → {', '.join(new[:3]) or 'none'}")
    return phrases


# -- what the plan of a call changes in a run that is there


def former_run(task: Task, folder: Path) -> Run | None:
    """Return the run in a folder; None where there is none with a finished step. Raises CheckpointError, DiskError."""
    return Run.open(folder, task) if last_place(checkpoint.read_index(folder))[1] else None


def last_place(index: Index) -> tuple[int, ...]:
    """Return the (epoch, step) of the last checkpoint of a run, which has none before it begins."""
    return checkpoint.place(index.get("last", "0-0"))


def plan_for(task: Task, pack: Pack, plan: Any, measured: bool = False) -> Plan:
    """Return the plan of a call, where it gives none the advised one. Raises PlanError for that of another task."""
    plan = measure.advise(task, pack, measure=measured) if plan is None else plan
    plan, kind = getattr(plan, "plan", plan), type(task.PLAN)
    if not isinstance(plan, kind):
        rule = f"plan must be a {kind.__module__}.{kind.__qualname__} (or an Advice or a Panel of one)"
        raise PlanError(f"{rule}, got {type(plan).__qualname__}; use {train.title_of(task)}.PLAN.replace(...)")
    return plan


def settle(task: Task, pack: Pack, plan: Any, former: Run | None) -> tuple[Plan, Plan, list[str]]:
    """Return (the plan to train with, the one that counts as given, what to say). Raises TrainError, see `decide`."""
    if former is None:
        plan = plan_for(task, pack, plan, measured=True)
        return plan, plan, []
    if plan is None:  # the run's own, with what the task gives where no call ever gave a plan
        plan = former.plan.marked(former.plan.to_dict())
        if not former.index["given"].keys() & FREE:
            plan = plan.replace(**plan_for(task, pack, None).given())
    plan = plan_for(task, pack, plan)
    new, messages = decide(former, plan)
    return new, plan, messages


def decide(former: Run, plan: Plan) -> tuple[Plan, list[str]]:
    """Return the plan that a run goes on with where a call gives `plan`, and what to say: what is given otherwise than
    last time is a change, newly measured advice is not. Raises TrainError for a change that the run refuses."""
    index, old, given = former.index, former.plan, given_by(plan)
    (epoch, step), messages = last_place(index), []
    changed = {name: value for name, value in given.items() if value != index["given"].get(name, ...)}
    # lr follows a batch size where the plan was made, see Plan.turn, and is given then
    new = old.turn(**{"lr": old.lr, **changed}) if changed else old
    if moved := new.changes_from(old):
        changes, fix = train.list_changes(moved), "name another run=, or start over with fresh=True"
        messages = [f"resumed at step {step:,} with {changes}"]
        if former.over and (new.epochs < old.epochs or moved.keys() != {"epochs"}):
            rule = f"{former.folder}: this run is finished: more epochs extend it, but it cannot change"
            raise TrainError(f"{rule} {changes}; {fix}")
        if former.over:
            drops = checkpoint.facts_of(former.folder, index["last"])["state"]["best"]["drops"]
            now, then = (train.shown(train.lr_at(each, epoch, drops)) for each in (new, old))
            messages = [f"{changes}: lr goes on at {now}, where it had come to {then}"]
        elif refused := train.fixed_settings(old).keys() & moved.keys() - set(train.AT_START):
            changes = train.list_changes({name: moved[name] for name in moved if name in refused})
            raise TrainError(f"{former.folder}: this run is started, and cannot change {changes}; {fix}")
    if (moved or not former.over) and (advice := plan.changes_from(new)):
        messages.append(f"this run keeps what it has applied so far; the advice would be {train.list_changes(advice)}")
    return plan if new == plan else new.marked(new.to_dict().keys() - given.keys()), messages


def given_by(plan: Plan) -> dict[str, Any]:
    """Return the settings that code or a hand gave, as JSON reads them back."""
    return json.loads(json.dumps(plan.given()))


# -- which run a call without a name means


def own_folder(task: Task, pack: Pack, plan: Any, fresh: bool) -> Path:
    """Return the folder of the newest run below `runs/` that a call means, else a new one, which no other gets."""
    panel, plan = getattr(plan, "id", None), plan_for(task, pack, plan)
    card, name = train.readable(task, pack, plan).card, train.task_name(task)
    with torch.random.fork_rng(devices=[]):
        network = train.build(bound := train.bind(task, card), card, plan)
    now = identity(bound, card, network, plan)
    indices = sorted(RUNS.glob(f"*/{checkpoint.INDEX}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [] if fresh else indices:
        with suppress(NbtoolsError):  # another kind of run, or one that refuses this call
            if matches(task, plan, panel, now, path.parent):
                return path.parent
    short = type(network).__name__ if ":" in name else name.rpartition(".")[2]
    short, number = re.sub("[^a-z0-9]+", "-", short.lower()).strip("-") or "run", 0
    with disk.explained("making a run folder", RUNS):
        RUNS.mkdir(parents=True, exist_ok=True)
        while True:
            number += 1
            with suppress(FileExistsError):
                (folder := RUNS / f"{short}-{number}").mkdir()
                return folder


def matches(task: Task, plan: Plan, panel: str | None, now: Lines, folder: Path) -> bool:
    """Return whether a call without `run=` means this run. Raises TrainError where the run refuses the call."""
    index, former = checkpoint.read_index(folder), former_run(task, folder)
    theirs, given, before = index["identity"], given_by(plan), index["given"]
    if differences(theirs, now) or theirs["trained"] != now["trained"]:
        return False
    if former is not None:
        decide(former, plan)
        if former.over and plan.epochs > former.plan.epochs:
            given, before = ({**values, "epochs": 0} for values in (given, before))
    return given == before or (panel is not None and panel == index.get("panel"))


# -- how a run starts, resumes, or is taken over


def restore(folder: Path, kept: Path, fresh: bool) -> None:
    """Take over the kept run where the local folder is missing or behind. Raises CheckpointError for other runs."""
    ours, theirs = checkpoint.read_index(folder), retry(lambda: checkpoint.read_index(kept), kept)
    if not theirs:
        return
    for wrong, rule in (
        (kept.resolve() == folder.resolve(), f"{kept} is the folder of a run itself; name another keep="),
        (fresh, f"{kept} holds a run, which fresh=True does not replace; name another keep="),
        (ours and ours["id"] != theirs["id"], f"{kept} holds a different run than {folder}; name another keep="),
        (not ours and folder.exists() and any(folder.iterdir()), f"{folder} holds files but no run; name another run="),
    ):
        if wrong:
            raise CheckpointError(rule)
    if ours and continues(ours, theirs):
        return
    if ours and not continues(theirs, ours):
        here, there = (f"{last_place(each)[1]:,}" for each in (ours, theirs))
        rule = f"{folder} (step {here}) and {kept} (step {there}) were trained apart"
        raise CheckpointError(f"{rule}; name another keep=, or another run= to go on from the kept one")
    if ours:
        say(f"{kept} is further than {folder}, and is taken over")
    with disk.explained(f"restoring {folder} from {kept}", folder):
        part = folder.with_name(f"{folder.name}.part")
        train.restore_kept(kept, part)
        disk.remove(folder)
        disk.publish_folder(part, folder)


def continues(longer: Index, shorter: Index) -> bool:
    """Return whether a copy of a run went on from where the other had ended, or later: by their starts' first steps."""
    last, end = (last_place(each)[1] for each in (longer, shorter))
    shared = [start for start in shorter["starts"] if start[1] < end]
    later = [start[1] for start in longer["starts"][len(shared) :] if start[1] < last]
    return longer["starts"][: len(shared)] == shared and min([*later, last]) >= end


def begin(
    folder: Path, pack: Pack, state: TrainState, former: Run | None = None, given: Plan | None = None, call: Any = None
) -> tuple[History, list[str]]:
    """Start the run in a folder, or load its last checkpoint; return its history, and complaints about newer ones.
    given: the plan that counts as given; call: what the user gave. Raises CheckpointError for another identity."""
    now, index = identity(state.task, pack.card, state.model, state.plan), former.index if former else {}
    if former and (differing := differences(index["identity"], now)):
        rule = f"{folder} holds another run ({'; '.join(differing)})"
        raise CheckpointError(f"{rule}; name another run= for this one, or start over with fresh=True")
    with disk.explained("resuming a run" if former else "starting a run", folder):
        clear(folder, former is not None)
        disk.write_atomic(folder / CARD, json.dumps(pack.card.to_dict(), ensure_ascii=False, indent=1))
        disk.write_atomic(folder / PLAN, state.applied.to_json())
        history, complaints = History(folder / HISTORY), ()
        if former:
            saved, changes = resume(folder, state, history)
            complaints = saved.complaints
            if changes and state.stopped:
                state.stopped, state.best.stale = None, 0  # asked to continue: an early stop counts anew from here
            for record in changes:
                history.append(record)
    advised = getattr(call, "advised", getattr(call, "plan", None))
    starts = [start for start in index.get("starts", []) if state.over or start[1] < state.step]  # else undone since
    checkpoint.mark(
        folder,
        version=checkpoint.VERSION,
        nbtools=disk.VERSION,
        id=index.get("id", uuid4().hex),
        task=train.task_name(state.task),
        metric=state.task.BEST,
        pack=str(pack.folder.absolute()),
        given=(given or state.plan).given() or index.get("given", {}),
        applied=state.applied.to_dict(),
        advised=advised.to_dict() if advised else index.get("advised", state.plan.to_dict()),
        identity=now,
        starts=starts if state.over else [*starts, [uuid4().hex[:8], state.step]],
        panel=getattr(call, "id", None),
    )
    if former is None:
        checkpoint.save(folder, state, rows=0)
    return history, [*complaints]


def clear(folder: Path, resumes: bool) -> None:
    """Remove what a killed process left half-written, and a run in whose place a new one starts; other files stay."""
    for path in [folder / checkpoint.INDEX, *folder.glob("*")]:  # without its index the folder holds no run
        name = path.name
        ours = name in (checkpoint.INDEX, *LEFT) or name.startswith(EVENTS) or checkpoint.FILE.fullmatch(name)
        if (name.endswith(".part") and name.rsplit(".", 2)[0] in OURS) or (ours and not resumes):
            disk.remove(path)


def resume(folder: Path, state: TrainState, history: History) -> tuple[checkpoint.Checkpoint, list[Record]]:
    """Load the last checkpoint, cut the history to it; return it, and the row of what the wanted plan changes."""
    saved, wanted = checkpoint.newest(folder), state.plan
    train.adopt(state, type(wanted).from_dict(saved.facts["plan"]))  # plan.json may be ahead of the checkpoint
    state.load(saved.tensors, saved.facts["state"])
    checkpoint.rewind(folder, saved.name)  # before rows go: a run killed between them resumes with all of its rows
    history.cut(saved.facts["rows"])
    return saved, [*train.change(state, wanted)]


class Job:
    """A run in progress. It is saved at the end of each epoch, and within one every minute, where that takes at most
    1 % of the time; at its best in any case. keeper: copies the folder to where the run is kept, if it is."""

    def __init__(self, pack: Pack, folder: Path, state: TrainState, surface: Surface):
        self.task, self.pack, self.folder, self.state = state.task, pack, folder, state
        self.surface, self.history = surface, surface.history
        self.keeper: Keeper | None = None
        self.saved, self.place, self.plan = monotonic(), (state.epoch, state.step), state.applied  # when, and what
        # A thread writes, since 100 MB take 1.5 s, a seventh of an epoch of 10 s. Its result: the seconds it took.
        self.writer, self.writing = ThreadPoolExecutor(1, "nbtools-writer"), Future[float]()
        self.writing.set_result(0.0)

    def watch(self, record: Record) -> None:
        """Save where it is due. Training continues once the state is copied."""
        ends, since = record.kind == "epoch", monotonic() - self.saved
        best = ends and self.state.improved
        due = (ends or since > SAVE_EVERY) and self.writing.done() and since * SAVE_SHARE >= self.writing.result()
        if best or due:
            self.save(best)

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

    def write(self, taken: checkpoint.Checkpoint) -> float:
        began = monotonic()
        checkpoint.publish(self.folder, taken)
        if self.keeper is not None:
            self.keeper.keep()
        return monotonic() - began

    def wait(self) -> None:
        """Wait for the checkpoint that is being written. Raises DiskError if it could not be."""
        self.writing.result()
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
