"""Which run a call means: what makes two runs the same, and what the plan of a call changes in a run that is there."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from nbtools import disk, measure, train
from nbtools.data import Card, Pack
from nbtools.errors import NbtoolsError, PlanError, TrainError
from nbtools.train import Plan, Task, checkpoint

RUNS = Path("runs")
PLAIN, VARYING = (int, float, str, tuple, type(None)), ("training", "process_group")  # settings of a module; not these
FREE = {"lr", "batch_size"}  # what advice chooses where a call gives neither


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
        plain = [(n, v) for n, v in vars(module).items() if isinstance(v, PLAIN) and n not in VARYING and n[0] != "_"]
        settings = [f"{n}={value}" for n, value in plain]
        yield f"{name}: {kind}({', '.join(settings)})".removeprefix(": ")
    for name, tensor in model.state_dict().items():
        digest = hashlib.sha256(repr(tensor.tolist()).encode()).hexdigest()[:12] if values else ""
        yield f"{name} {[*tensor.shape]} {digest}".strip()


def differences(before: Mapping[str, list[str]], now: Mapping[str, list[str]]) -> list[str]:
    """Return what differs between two identities but the trained parameters: `metrics: accuracy → f1`."""
    phrases = []
    for part in [part for part in now if part in before and part != "trained" and before[part] != now[part]]:
        old = [line for line in before[part] if line not in now[part]]
        new = [line for line in now[part] if line not in before[part]]
        phrases.append(f"{part}: {', '.join(old[:3]) or 'none'} → {', '.join(new[:3]) or 'none'}")
    return phrases


class Former(NamedTuple):
    """The run in a folder: its index and plan, (epoch, step), whether it has ended, drops of lr on a plateau."""

    folder: Path
    index: Mapping[str, Any]
    applied: Plan
    place: tuple[int, ...]
    over: bool
    drops: int


def former_run(task: Task, folder: Path) -> Former | None:
    """Return the run in a folder; None where there is none with a finished step. Raises CheckpointError, DiskError."""
    index = checkpoint.read_index(folder)
    place = checkpoint.place(index.get("last", "0-0"))
    if place[1] == 0:
        return None
    state: dict[str, Any] = {"position": {"segments": []}, "stopped": None, "best": {"drops": 0}}
    with suppress(NbtoolsError):  # a damaged one is reported when it is loaded
        state = checkpoint.facts_of(folder, index["last"])["state"]
    applied = type(task.PLAN).from_dict(index["applied"])
    over = bool(state["stopped"]) or (place[0] >= applied.epochs and not state["position"]["segments"])
    return Former(folder, index, applied, place, over, state["best"]["drops"])


def plan_for(task: Task, pack: Pack, plan: Any, measured: bool = False) -> Plan:
    """Return the plan of a call, where it gives none the advised one. Raises PlanError for that of another task."""
    plan = measure.advise(task, pack, measure=measured) if plan is None else plan
    plan, kind = getattr(plan, "plan", plan), type(task.PLAN)
    if not isinstance(plan, kind):
        rule = f"plan must be a {kind.__module__}.{kind.__qualname__} (or an Advice or a Panel of one)"
        raise PlanError(f"{rule}, got {type(plan).__qualname__}; use {train.spoken(task)}.PLAN.replace(...)")
    return plan


def settle(task: Task, pack: Pack, plan: Any, folder: Path, fresh: bool) -> tuple[Plan, Plan, list[str]]:
    """Return (the plan to train with, the one that counts as given, what to say). Raises TrainError, see `decide`."""
    if fresh or (former := former_run(task, folder)) is None:
        plan = plan_for(task, pack, plan, measured=True)
        return plan, plan, []
    if plan is None:  # the run's own, with what the task gives where no call ever gave a plan
        plan = former.applied.marked(former.applied.to_dict())
        if not former.index["given"].keys() & FREE:
            plan = plan.replace(**plan_for(task, pack, None).given())
    plan = plan_for(task, pack, plan)
    new, messages = decide(former, plan)
    return new, plan, messages


def decide(former: Former, plan: Plan) -> tuple[Plan, list[str]]:
    """Return the plan that a run goes on with where a call gives `plan`, and what to say: what is given otherwise than
    last time is a change, newly measured advice is not. Raises TrainError for a change that the run refuses."""
    old, given = former.applied, given_by(plan)
    changed = {name: value for name, value in given.items() if value != former.index["given"].get(name, ...)}
    # lr follows a batch size where the plan was made, see Plan.turn, and is given then
    new = old.turn(**{"lr": old.lr, **changed}) if changed else old
    moved, extended = new.changes_from(old), former.over and new.epochs > old.epochs
    refused = moved.keys() & train.fixed(old).keys() - set(train.AT_START)
    if former.over:
        refused = moved.keys() - ({"epochs"} if extended else set())
    if refused:
        why = "finished: more epochs extend it, but it" if former.over else "started, and"
        changes = train.listed({name: change for name, change in moved.items() if name in refused})
        rule = f"{former.folder}: this run is {why} cannot change {changes}"
        raise TrainError(f"{rule}; name another run=, or start over with fresh=True")
    messages = [f"resumed at step {former.place[1]:,} with {train.listed(moved)}"] if moved else []
    if extended:
        now, then = (train.shown(train.lr_at(each, former.place[0], former.drops)) for each in (new, old))
        messages = [f"{train.listed(moved)}: lr goes on at {now}, where it had come to {then}"]
    if (moved or not former.over) and (advice := plan.changes_from(new)):
        messages.append(f"this run keeps what it has applied so far; the advice would be {train.listed(advice)}")
    return plan if new == plan else new.marked(new.to_dict().keys() - given.keys()), messages


def given_by(plan: Plan) -> dict[str, Any]:
    """Return the settings that code or a hand gave, as JSON reads them back."""
    return json.loads(json.dumps(plan.given()))


def own_folder(task: Task, pack: Pack, plan: Any, fresh: bool) -> Path:
    """Return the folder of the newest run below `runs/` that a call resumes, extends or returns, else a new one."""
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
