"""What a call of `nb.fit` means for a run folder: the identity of a run, what differs from it, and whether the call
resumes, extends, returns or refuses the run. Pure functions decide; `nbtools.folder` and `nbtools.fit` act."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from nbtools import disk
from nbtools.data import Pack
from nbtools.errors import NbtoolsError, TrainError
from nbtools.run import PLAN, stored
from nbtools.train import (
    AT_START,
    Plan,
    Task,
    TaskLike,
    bound,
    build,
    checkpoint,
    fixed,
    listed,
    lr_at,
    objective,
    readable,
    shown,
    task_name,
)

RUNS = Path("runs")
MOST = 6  # differences in a sentence
PLAIN = (int, float, bool, str, type(None))


# -- identity


def identity(task: Task, digest: str, model: nn.Module, plan: Plan) -> dict[str, Any]:
    """Return what a run is besides its plan, as plain JSON values. digest: the pack's key. plan: where advice chose
    its lr and batch size, those that the task gave for a start belong to it."""
    loss, metrics, augment, functions = objective(task)
    advised = task.card is not None and not plan.given().keys() & {"lr", "batch_size"}
    return {
        **({"recipe": {"lr": task.PLAN.lr, "batch size": task.PLAN.batch_size}} if advised else {}),
        "task": "" if ":" in task_name(task) else task_name(task),  # else the name of a variable, which may change
        "pack": digest,
        "network": structure(model),
        "loss": structure(loss, weights=True) if isinstance(loss, nn.Module) else function_name(loss),
        "metrics": metrics,
        "augment": augment,
        **functions,
        "trained": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
    }


def structure(model: nn.Module, weights: bool = False) -> dict[str, dict[str, Any]]:
    """Return the name of each module → its type, its plain settings, and the shapes of its own tensors. weights: with
    a hash of their values."""
    return {name: dict(settings(module, weights)) for name, module in model.named_modules()}


def settings(module: nn.Module, weights: bool) -> Iterator[tuple[str, Any]]:
    # SyncBatchNorm takes the place of BatchNorm in several processes, and the run stays the same
    yield "type", "BatchNorm" if isinstance(module, _BatchNorm) else type(module).__name__
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in ("training", "process_group") and is_plain(value):
            yield name, plain(value)
    for name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
        yield name, [*tensor.shape]
        if weights:
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            yield f"{name} hash", hashlib.sha256(data).hexdigest()[:12]


def is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(is_plain, value)))


def plain(value: Any) -> Any:
    """Return a value as JSON reads it back, and equal to itself: tuples become lists, a NaN its text."""
    if value != value:
        return str(value)
    return [plain(each) for each in value] if isinstance(value, (tuple, list)) else value


def function_name(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "default"
    return getattr(value, "__qualname__", type(value).__qualname__)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs between two identities, one phrase each: `network: body.1 ReLU → Tanh`. Names of trained
    parameters are left to `trained`."""
    found: list[str] = []
    for key in before.keys() & now.keys() - {"trained"}:
        old, new = before[key], now[key]
        if old == new or (key == "task" and "" in (old, new)):
            continue
        nested = key in ("network", "loss") and isinstance(old, dict) and isinstance(new, dict)
        parts = modules(old, new) if nested else [f"{say_value(old)} → {say_value(new)}"]
        found += [f"{key}: {', '.join(parts[:MOST])}{', …' if len(parts) > MOST else ''}"]
    return sorted(found)


def modules(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return what differs between two structures, module by module."""
    found = []
    for name in dict.fromkeys([*old, *new]):
        before, after, where = old.get(name), new.get(name), f"{name} " if name else ""
        if before is None or after is None:
            found.append(f"{where}{after['type']} is new" if after else f"{where}{old[name]['type']} is gone")
        elif before["type"] != after["type"]:
            found.append(f"{where}{before['type']} → {after['type']}")
        elif before != after:
            keys = [key for key in dict.fromkeys([*before, *after]) if before.get(key) != after.get(key)]
            changed = ", ".join(f"{key}={say_value(before.get(key))} → {say_value(after.get(key))}" for key in keys)
            found.append(f"{where}{before['type']}({changed})")
    return found


def say_value(value: Any) -> str:
    if isinstance(value, dict):  # of a loss module, or names with strengths
        value = [value[""]["type"]] if "" in value else [f"{name} {each:g}" for name, each in value.items()]
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return (text if len(text) <= 40 else f"{text[:39]}…") or "none"


def trained(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the sentence about layers that were frozen or unfrozen since; "" for none."""
    old, new = before.get("trained", now["trained"]), now["trained"]
    parts = [
        f"{what} {', '.join(names[:MOST])}{' …' if len(names) > MOST else ''}"
        for what, names in (
            ("now trained", [name for name in new if name not in old]),
            ("now frozen", [name for name in old if name not in new]),
        )
        if names
    ]
    return f"other parameters are trained from here on: {'; '.join(parts)}" if parts else ""


# -- the run in a folder


@dataclass(frozen=True)
class Former:
    """The run that a folder holds. given, applied: its plans; requested: settings that were wanted and not applied
    when it stopped; place: (epoch, step) of its last checkpoint; over: whether it has trained to its end."""

    folder: Path
    index: Mapping[str, Any]
    given: Mapping[str, Any]
    applied: Plan
    requested: Mapping[str, Any]
    place: tuple[int, ...]
    over: bool
    stopped: str | None
    drops: int = 0  # of lr, on a plateau


def former_run(task: Task, folder: Path) -> Former | None:
    """Return the run in a folder; None where there is none with a finished step. Raises CheckpointError, DiskError."""
    names = checkpoint.names(folder)
    if not names:
        return None
    index = checkpoint.read_index(folder)
    last = index.get("last", names[0])
    facts: dict[str, Any] = {}
    for name in checkpoint.names(folder, last):  # a damaged one is complained about when it is loaded
        try:
            facts = checkpoint.facts_of(folder, name)
            break
        except NbtoolsError:
            continue
    place = checkpoint.place(last)
    if facts and place[1] == 0:
        return None
    with disk.explained("reading the plan", folder / PLAN):
        values = stored(folder / PLAN) if (folder / PLAN).exists() else facts.get("plan", {})
    applied = type(task.PLAN).from_dict(values)
    state = facts.get("state", {})
    segments = state.get("position", state).get("segments", [])
    over = state.get("stopped") is not None or (place[0] >= applied.epochs and not segments)
    best = state.get("best")
    drops = best.get("drops", 0) if isinstance(best, dict) else 0
    given, requested = index.get("given", values), index.get("requested", {})
    return Former(folder, index, given, applied, requested, place, over, state.get("stopped"), drops)


@dataclass(frozen=True)
class Call:
    """What a call means for a run: the plan that it goes on with, and what is said of it."""

    plan: Plan
    said: tuple[str, ...] = ()


def decide(former: Former | None, plan: Plan) -> Call:
    """Return what a call with this plan means for the run in a folder. Raises TrainError where it is refused."""
    if former is None:
        return Call(plan)
    old = former.applied
    ended = former.over  # what is left of a stop in its last step is void, but for more epochs
    requested = {n: v for n, v in former.requested.items() if not ended or (n == "epochs" and v > old.epochs)}
    changed = requested | {
        name: value
        for name, value in plan.given().items()
        if (name not in former.given or plain(value) != plain(former.given[name])) and value != getattr(old, name)
    }
    # lr follows a batch size where the plan was made, see Plan.turn, and is given then
    new = old.turn(**{"lr": old.lr, **changed}) if changed else old
    moved = new.changes_from(old)
    if former.over:
        more = {"epochs"} if new.epochs > old.epochs else set()
        if former.stopped and (new.early_stop or float("inf")) > (old.early_stop or float("inf")):
            more |= {"early_stop"}
        refuse(former, {name: change for name, change in moved.items() if name not in more}, "is finished")
    else:
        kept = fixed(old).keys() - set(AT_START)
        refuse(former, {name: change for name, change in moved.items() if name in kept}, "has started")
    said = [extending(former, new) if former.over else changing(former, moved)]
    if moved or not former.over:
        said.append(keeping(former, plan))
    if new == plan:
        return Call(plan, tuple(filter(None, said)))
    return Call(new.marked(new.to_dict().keys() - plan.given().keys()), tuple(filter(None, said)))


def refuse(former: Former, changes: Mapping[str, str], why: str) -> None:
    if changes:
        more = "more epochs extend it; for anything else" if former.over else "keep these values, or"
        raise TrainError(
            f"{former.folder}: this run {why} and cannot change {listed(changes)}; {more} name another run=, or start "
            "over with fresh=True"
        )


def changing(former: Former, moved: Mapping[str, str]) -> str:
    return f"resumed at step {former.place[1]:,} with {listed(moved)}" if moved else ""


def extending(former: Former, new: Plan) -> str:
    old, epoch = former.applied, former.place[0]
    if new.epochs == old.epochs:
        return changing(former, new.changes_from(old))
    now, before = (lr_at(plan, epoch, former.drops) for plan in (new, old))
    where = f", where it had fallen to {shown(before)}" if before < now else ""
    goes = f"lr goes on at {shown(now)} ({new.schedule} over {new.epochs} epochs)"
    return f"epochs {old.epochs} → {new.epochs}: {goes}{where}"


def keeping(former: Former, plan: Plan) -> str:
    """Return the sentence about newly measured advice that a resumed run does not take; "" for none."""
    old, advice = former.applied, former.index.get("advised", {})
    names = [
        name
        for name, value in plan.to_dict().items()
        if name not in plan.given() and value != getattr(old, name) and plain(value) != plain(advice.get(name, value))
    ]
    if not names:
        return ""
    kept, would = (", ".join(f"{name} {shown(getattr(each, name))}" for name in names) for each in (old, plan))
    return f"this run keeps {kept} as it has applied them so far; newly measured advice would be {would}"


# -- run=None


def search(task: TaskLike, pack: Pack, plan: Plan, panel: str | None) -> Path | None:
    """Return the newest run below `runs/` that this call resumes, extends or returns; None for a new one."""
    name = task_name(task)
    places = [path.parent for path in RUNS.glob(f"*/{checkpoint.INDEX}")]
    for folder in sorted(places, key=lambda each: (each / checkpoint.INDEX).stat().st_mtime, reverse=True):
        try:
            index = checkpoint.read_index(folder)
            if index.get("task") == name and matches(task, pack, plan, panel, folder, index):
                return folder
        except (NbtoolsError, OSError):
            continue  # another kind of run, or one that this call cannot go on with
    return None


def matches(task: Any, pack: Pack, plan: Plan, panel: str | None, folder: Path, index: Mapping[str, Any]) -> bool:
    """Return whether a call without `run=` means this run. Raises TrainError where it refuses the call's changes."""
    former, given = former_run(task, folder), index.get("given")
    driven = panel is not None and index.get("panel") == panel
    now = {name: plain(value) for name, value in plan.given().items()}
    if given is None:
        return False
    ended = former is not None and former.over and plan.epochs > former.applied.epochs
    longer = ended and {**given, "epochs": 0} == {**now, "epochs": 0}
    if not (driven or given == now or longer):
        return False
    wanted = decide(former, plan).plan
    card = readable(task, pack, wanted).card
    own = bound(task, card)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(wanted.seed)
        present = identity(own, card.digest, build(own, card, wanted), wanted)
    before = index.get("identity", {})
    return all(before.get(key) == present[key] for key in present.keys() - ({"recipe"} - before.keys()))


def new_folder(task: Task, card: Any, plan: Plan) -> Path:
    """Make the folder of a run with the next free number; two processes never get the same."""
    short = task_name(task).partition(":")[0].rpartition(".")[2] if ":" not in task_name(task) else ""
    if not short:
        with torch.random.fork_rng(devices=[]):
            short = type(build(bound(task, card), card, plan)).__name__
    short = re.sub("[^a-z0-9]+", "-", short.lower()).strip("-") or "run"
    with disk.explained("making a run folder", RUNS):
        RUNS.mkdir(parents=True, exist_ok=True)
        numbers = [int(end) for path in RUNS.glob(f"{short}-*") if (end := path.name[len(short) + 1 :]).isdecimal()]
        number = max(numbers, default=0) + 1
        while True:
            try:
                (RUNS / f"{short}-{number}").mkdir()
                return RUNS / f"{short}-{number}"
            except FileExistsError:
                number += 1
