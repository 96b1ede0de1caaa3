"""What a run is besides its plan, and what a call of `nb.fit` means for the run in a folder: it resumes, extends,
returns or refuses it. These functions decide; `nbtools.folder` and `nbtools.fit` act."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from nbtools import disk, measure, train
from nbtools.data import Card, Pack
from nbtools.errors import NbtoolsError, PlanError, TrainError
from nbtools.live import Panel
from nbtools.train import Plan, Task, checkpoint

RUNS = Path("runs")
MOST = 3  # lines of a difference in a sentence

# -- what a run is


def identity(task: Task, card: Card, model: nn.Module, plan: Plan) -> dict[str, list[str]]:
    """Return what a run is besides its plan, each part as a list of lines. plan: where advice chose its lr and batch
    size, those of the task's own plan, from which advice starts, belong to it."""
    (loss, metrics, augment, functions), name = train.objective(task), train.task_name(task)
    advised = task.card is not None and not plan.given().keys() & {"lr", "batch_size"}
    kind = getattr(loss, "__qualname__", type(loss).__qualname__) if loss else "default"
    return {
        **({"recipe": [f"lr {task.PLAN.lr}, batch size {task.PLAN.batch_size}"]} if advised else {}),
        **({} if ":" in name else {"task": [name]}),  # else the name of a variable, which may change
        "pack": [card.digest[:12]],
        "network": [*structure(model)],
        "loss": [*structure(loss), *values(loss)] if isinstance(loss, nn.Module) else [kind],
        "metrics": metrics,
        "augment": [f"{name} {strength}" for name, strength in augment.items()],
        **{part: [name] for part, name in functions.items()},
        "trained": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
    }


def structure(model: nn.Module) -> Iterator[str]:
    """Yield a line a module, with its type and its plain settings, and a line a tensor, with its shape."""
    for name, module in model.named_modules():
        # SyncBatchNorm takes the place of BatchNorm in several processes, and the run stays the same
        kind = "BatchNorm" if isinstance(module, _BatchNorm) else type(module).__name__
        plain = [f"{n}={value}" for n, value in vars(module).items() if is_setting(n, value)]
        yield f"{name}: {kind}({', '.join(plain)})".removeprefix(": ")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        yield f"{name} {[*tensor.shape]}"


def is_setting(name: str, value: Any) -> bool:
    if name.startswith("_") or name in ("training", "process_group"):
        return False
    members = value if isinstance(value, tuple) else (value,)
    return all(member is None or isinstance(member, (int, float, str)) for member in members)


def values(loss: nn.Module) -> Iterator[str]:
    """Yield a line a tensor of a loss, such as the weights of classes, with a hash of its values."""
    for name, tensor in loss.state_dict().items():
        yield f"{name} {hashlib.sha256(repr(tensor.tolist()).encode()).hexdigest()[:12]}"


def differences(before: Mapping[str, list[str]], now: Mapping[str, list[str]]) -> list[str]:
    """Return what differs between two identities, a phrase a part: `metrics: accuracy → f1`. A run may go on
    with other trained parameters."""
    parts = [part for part in now if part in before and part != "trained" and before[part] != now[part]]
    return [f"{part}: {without(before[part], now[part])} → {without(now[part], before[part])}" for part in parts]


def without(lines: Sequence[str], others: Sequence[str]) -> str:
    """Return the lines that are not among the others, in a phrase."""
    left = [line for line in lines if line not in others]
    return ", ".join([*left[:MOST], *["…"] * (len(left) > MOST)]) or "none"


# -- what a call means for the run in a folder


@dataclass(frozen=True)
class Former:
    """The run that a folder holds. index: run.json; applied: its plan; place: (epoch, step) of its last checkpoint;
    over: whether it has trained to its end; drops: of lr, on a plateau."""

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
    with suppress(NbtoolsError):  # a damaged one is complained about when it is loaded
        state = checkpoint.facts_of(folder, index["last"])["state"]
    applied = type(task.PLAN).from_dict(index["applied"])
    over = bool(state["stopped"]) or (place[0] >= applied.epochs and not state["position"]["segments"])
    return Former(folder, index, applied, place, over, state["best"]["drops"])


class Call(NamedTuple):
    """What a call means for a run: the plan that it goes on with, the one it gives, what is said of it, the plan that
    values are compared with (None: the run's own), and what identifies the Panel that drives it. `launch` hands it to
    its ranks in place of a plan."""

    plan: Plan
    given: Plan
    said: Sequence[str] = ()
    advised: Plan | None = None
    panel: str | None = None


def called(plan: Any) -> Any:
    return plan() if callable(plan) and not isinstance(plan, type) else plan


def chosen_plan(task: Task, pack: Pack, plan: Any, measured: bool = False) -> Plan:
    """Return the plan that a call gives; where it gives none, the advised one: measured, or by what is known so far."""
    if plan is None:
        plan = measure.advise(task, pack, measure=measured)
    plan, kind = getattr(plan, "plan", plan), type(task.PLAN)
    if not isinstance(plan, kind):
        rule = f"plan must be a {kind.__module__}.{kind.__qualname__} (or an Advice or a Panel of one)"
        fix = f"use {train.spoken(task)}.PLAN, with .replace(...) for your changes"
        raise PlanError(f"{rule}, got {type(plan).__qualname__}; {fix}")
    return plan


def panel_of(plan: Any) -> str | None:
    return plan.id if isinstance(plan, Panel) else getattr(plan, "panel", None)


def meant(task: Task, pack: Pack, plan: Any, folder: Path, fresh: bool) -> Call:
    """Return what a call means in a folder. Raises TrainError where it is refused."""
    advised, panel = getattr(plan, "advised", getattr(plan, "plan", None)), panel_of(plan)
    former = None if fresh else former_run(task, folder)
    if former is None:
        given = chosen_plan(task, pack, plan, measured=True)
        return Call(given, given, [], advised, panel)
    if plan is None and former.index["given"].keys() & {"lr", "batch_size"}:  # the run's own; else what the task gives
        given = former.applied.marked(former.applied.to_dict())
    else:
        given = chosen_plan(task, pack, plan)
    new, said = decide(former, given)
    if plan is not None and (said or not former.over):
        said += keeping(former, given)
    return Call(new, given, said, advised, panel)


def decide(former: Former, plan: Plan) -> tuple[Plan, list[str]]:
    """Return the plan that a run goes on with where a call gives `plan`, and what is said of it: what was given
    otherwise than last time is a change. Raises TrainError where it is refused."""
    old, given = former.applied, former.index["given"]
    changed = {name: value for name, value in plan.given().items() if plain(value) != given.get(name, ...)}
    # lr follows a batch size where the plan was made, see Plan.turn, and is given then
    new = old.turn(**{"lr": old.lr, **changed}) if changed else old
    moved = new.changes_from(old)
    refused = moved.keys() & train.fixed(old).keys() - set(train.AT_START)
    why, fix = "has started", "keep these values, or name"
    said = f"resumed at step {former.place[1]:,} with {train.listed(moved)}"
    if former.over:
        refused = moved.keys() - ({"epochs"} if new.epochs > old.epochs else set())
        why, fix = "is finished", "more epochs extend it; for anything else name"
        now, before = (train.shown(train.lr_at(each, former.place[0], former.drops)) for each in (new, old))
        said = f"{train.listed(moved)}: lr goes on at {now}, where it had come to {before}"
    if refused:
        changes = train.listed({name: change for name, change in moved.items() if name in refused})
        rule = f"{former.folder}: this run {why} and cannot change {changes}"
        raise TrainError(f"{rule}; {fix} another run=, or start over with fresh=True")
    new = plan if new == plan else new.marked(new.to_dict().keys() - plan.given().keys())
    return new, [said] if moved else []


def plain(value: Any) -> Any:
    """Return a setting as JSON reads it back."""
    return [*value] if isinstance(value, tuple) else value


def keeping(former: Former, plan: Plan) -> list[str]:
    """Return the sentence about advice that a resumed run does not take."""
    pairs = {n: (getattr(former.applied, n), v) for n, v in plan.to_dict().items() if n not in plan.given()}
    kept, advised = ({name: train.shown(pair[i]) for name, pair in pairs.items() if pair[0] != pair[1]} for i in (0, 1))
    said = f"this run keeps {train.listed(kept)} as it has applied them so far; the advice would be"
    return [f"{said} {train.listed(advised)}"] if kept else []


# -- run=None


def own_folder(task: Task, pack: Pack, plan: Any, fresh: bool) -> Path:
    """Return the folder of a call without `run=`: of the newest run below `runs/` that it resumes, extends or returns,
    else a new one."""
    wanted = chosen_plan(task, pack, plan)
    card = train.readable(task, pack, wanted).card
    bound = train.bound(task, card)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(wanted.seed)
        network = train.build(bound, card, wanted)
    now = identity(bound, card, network, wanted)
    indices = sorted(RUNS.glob(f"*/{checkpoint.INDEX}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [] if fresh else indices:
        with suppress(NbtoolsError, OSError):  # another kind of run, or one that this call cannot go on with
            if matches(task, wanted, panel_of(plan), now, path.parent):
                return path.parent
    name = train.task_name(task)
    return new_folder(type(network).__name__ if ":" in name else name.rpartition(".")[2])


def matches(task: Task, plan: Plan, panel: str | None, now: Mapping[str, list[str]], folder: Path) -> bool:
    """Return whether a call without `run=` means this run. Raises TrainError where it refuses the call's changes."""
    index, given = checkpoint.read_index(folder), {name: plain(value) for name, value in plan.given().items()}
    theirs = index.get("identity", {"trained": None})
    if differences(theirs, now) or theirs["trained"] != now["trained"]:
        return False
    former, before = former_run(task, folder), index["given"]
    longer = former is not None and former.over and plan.epochs > former.applied.epochs
    equal = given == before or (longer and {**given, "epochs": 0} == {**before, "epochs": 0})
    means = equal or (panel is not None and index.get("panel") == panel)
    if means and former is not None:
        decide(former, plan)
    return means


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
