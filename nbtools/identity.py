"""What a call of `nb.fit` means for a run folder: the identity of a run, what differs from it, and whether the call
resumes, extends, returns or refuses the run. These functions decide; `nbtools.folder` and `nbtools.fit` act."""

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

from nbtools import disk, measure
from nbtools.data import Pack
from nbtools.errors import NbtoolsError, PlanError, TrainError
from nbtools.live import Panel
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
    require_sizes,
    shown,
    spoken,
    task_name,
)

RUNS = Path("runs")
MOST = 6  # differences in a sentence


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
        "loss": structure(loss, hashed=True) if isinstance(loss, nn.Module) else function_name(loss),
        "metrics": metrics,
        "augment": augment,
        **functions,
        "trained": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
    }


def structure(model: nn.Module, hashed: bool = False) -> dict[str, dict[str, Any]]:
    """Return the name of each module → its type, its plain settings, and the shapes of its own tensors; hashed: with a
    hash of their values."""
    return {name: dict(settings(module, hashed)) for name, module in model.named_modules()}


def settings(module: nn.Module, hashed: bool) -> Iterator[tuple[str, Any]]:
    # SyncBatchNorm takes the place of BatchNorm in several processes, and the run stays the same
    yield "type", "BatchNorm" if isinstance(module, _BatchNorm) else type(module).__name__
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in ("training", "process_group") and is_plain(value):
            yield name, plain(value)
    for name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
        yield name, [*tensor.shape]
        if hashed:
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            yield f"{name} hash", hashlib.sha256(data).hexdigest()[:12]


def is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (int, float, bool, str))


def plain(value: Any) -> Any:
    """Return a value as JSON reads it back, and equal to itself: tuples become lists, a NaN its text."""
    if value != value:
        return str(value)
    return [plain(each) for each in value] if isinstance(value, (tuple, list)) else value


def function_name(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "default"
    return getattr(value, "__qualname__", type(value).__qualname__)


# -- differences


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs between two identities, one phrase each: `network: body.1 ReLU → Tanh`. Names of trained
    parameters are left to `trained`."""
    phrases: list[str] = []
    for key in sorted(before.keys() & now.keys() - {"trained"}):
        old, new = before[key], now[key]
        if old != new and not (key == "task" and "" in (old, new)):
            nested = key in ("network", "loss") and isinstance(old, dict) and isinstance(new, dict)
            phrases.append(f"{key}: {first(modules(old, new) if nested else [arrow(old, new)])}")
    return phrases


def modules(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return what differs between two structures, module by module."""
    phrases = []
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name, {"type": "nothing"}), new.get(name, {"type": "nothing"})
        pairs = {key: (before.get(key), after.get(key)) for key in dict.fromkeys([*before, *after])}
        changed = ", ".join(f"{key}={arrow(*pair)}" for key, pair in pairs.items() if pair[0] != pair[1])
        what = f"{before['type']}({changed})" if before["type"] == after["type"] else arrow(*pairs["type"])
        phrases += [f"{name} {what}".strip()] if changed else []
    return phrases


def arrow(old: Any, new: Any) -> str:
    return f"{text_of(old)} → {text_of(new)}"


def text_of(value: Any) -> str:
    if isinstance(value, dict):  # of a loss module, or names with strengths
        value = [value[""]["type"]] if "" in value else [f"{name} {each:g}" for name, each in value.items()]
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return (text if len(text) <= 40 else f"{text[:39]}…") or "none"


def first(phrases: Sequence[str]) -> str:
    return ", ".join([*phrases[:MOST], *["…"] * (len(phrases) > MOST)])


def trained(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the sentence about layers that were frozen or unfrozen since; "" for none."""
    new, old = now["trained"], before.get("trained", now["trained"])
    thawed, frozen = [name for name in new if name not in old], [name for name in old if name not in new]
    parts = [f"now trained {first(thawed)}"] * bool(thawed) + [f"now frozen {first(frozen)}"] * bool(frozen)
    return f"other parameters are trained from here on: {'; '.join(parts)}" if parts else ""


# -- the run in a folder, and what a call means for it


@dataclass(frozen=True)
class Former:
    """The run that a folder holds. index: run.json; given, applied: its plans; place: (epoch, step) of its last
    checkpoint; over: whether it has trained to its end; stopped: why before; drops: of lr, on a plateau."""

    folder: Path
    index: Mapping[str, Any]
    given: Mapping[str, Any]
    applied: Plan
    place: tuple[int, ...]
    over: bool
    stopped: str | None
    drops: int


def former_run(task: Task, folder: Path) -> Former | None:
    """Return the run in a folder; None where there is none with a finished step. Raises CheckpointError, DiskError."""
    names, facts = checkpoint.names(folder), {}
    if not names:
        return None
    index = checkpoint.read_index(folder)
    last = index.get("last", names[0])
    for name in checkpoint.names(folder, last):  # a damaged one is complained about when it is loaded
        try:
            facts = checkpoint.facts_of(folder, name)
            break
        except NbtoolsError:
            continue
    place, state = checkpoint.place(last), facts.get("state", {})
    if facts and place[1] == 0:
        return None
    with disk.explained("reading the plan", folder / PLAN):
        values = stored(folder / PLAN) if (folder / PLAN).exists() else facts.get("plan", {})
    applied, stopped = type(task.PLAN).from_dict(values), state.get("stopped")
    ended = place[0] >= applied.epochs and not state.get("position", {}).get("segments")
    drops = state.get("best", {}).get("drops", 0)
    return Former(folder, index, index.get("given", values), applied, place, ended or bool(stopped), stopped, drops)


@dataclass(frozen=True)
class Given:
    """What `launch` hands to its ranks as their plan, with the one that it was advised; requests to a former run are
    removed already, and `control.json` has those that came since."""

    plan: Plan
    advised: Plan | None
    panel: str | None = None


def called(plan: Any) -> Any:
    return plan() if callable(plan) and not isinstance(plan, type) else plan


def panel_of(plan: Any) -> str | None:
    """Return what identifies the Panel that drives a run; None for another plan."""
    return plan.id if isinstance(plan, Panel) else getattr(plan, "panel", None)


def chosen_plan(task: Task, pack: Pack, plan: Any, measured: bool = False) -> Plan:
    """Return the plan that a call gives; where it gives none, the advised one: measured, or by what is known so far."""
    if plan is None:
        plan = measure.advise(task, pack, measure=measured)
    plan, kind = getattr(plan, "plan", plan), type(task.PLAN)
    if not isinstance(plan, kind):
        raise PlanError(
            f"plan must be a {kind.__module__}.{kind.__qualname__} (or an Advice or a Panel of one), got "
            f"{type(plan).__qualname__}; use {spoken(task)}.PLAN, with .replace(...) for your changes"
        )
    return plan


class Call(NamedTuple):
    """What a call means for a run: the plan that it goes on with, the one it gives, what is said of it, the plan that
    values are compared with (None: the run's own), and what identifies the Panel that drives it."""

    plan: Plan
    given: Plan
    said: Sequence[str] = ()
    advised: Plan | None = None
    panel: str | None = None


def meant(task: Task, pack: Pack, plan: Any, folder: Path, fresh: bool) -> Call:
    """Return what a call means in a folder. Raises TrainError where it is refused."""
    former = None if fresh else former_run(task, folder)
    if plan is not None or former is None:
        call = decide(former, chosen_plan(task, pack, plan, measured=former is None))
        advised = getattr(plan, "advised", getattr(plan, "plan", None))  # a plain plan may come from anywhere
        return call._replace(advised=advised, panel=panel_of(plan))
    asked = chosen_plan(task, pack, None)
    recipe = {} if former.given.keys() & {"lr", "batch_size"} else asked.given()  # of the task, as it was before
    call = decide(former, former.applied.replace(**recipe).marked(former.applied.to_dict().keys() - recipe.keys()))
    return call._replace(given=call.plan)


def decide(former: Former | None, plan: Plan) -> Call:
    """Return what a call with this plan means for the run in a folder. Raises TrainError where it is refused."""
    if former is None:
        return Call(plan, plan)
    old, given = former.applied, former.given
    asked = former.index.get("requested", {})  # wanted and not applied when it stopped
    if former.over:  # then void, but for more epochs
        asked = {name: value for name, value in asked.items() if name == "epochs" and value > old.epochs}
    changed = asked | {
        name: value
        for name, value in plan.given().items()
        if (name not in given or plain(value) != plain(given[name])) and value != getattr(old, name)
    }
    # lr follows a batch size where the plan was made, see Plan.turn, and is given then
    new = old.turn(**{"lr": old.lr, **changed}) if changed else old
    moved = new.changes_from(old)
    if former.over:
        more = {"epochs"} if new.epochs > old.epochs else set()
        longer = (new.early_stop or float("inf")) > (old.early_stop or float("inf"))
        refuse(former, moved.keys() - (more | ({"early_stop"} if former.stopped and longer else set())), moved)
    else:
        refuse(former, moved.keys() & fixed(old).keys() - set(AT_START), moved)
    said = [extending(former, new)] if former.over and new.epochs != old.epochs else []
    said += [f"resumed at step {former.place[1]:,} with {listed(moved)}"] if moved and not said else []
    said += keeping(former, plan) if moved or not former.over else []
    return Call(plan if new == plan else new.marked(new.to_dict().keys() - plan.given().keys()), plan, said)


def refuse(former: Former, names: set[str], moved: Mapping[str, str]) -> None:
    if names:
        why = "is finished" if former.over else "has started"
        more = "more epochs extend it; for anything else" if former.over else "keep these values, or"
        changes = listed({name: change for name, change in moved.items() if name in names})
        rule = f"{former.folder}: this run {why} and cannot change {changes}"
        raise TrainError(f"{rule}; {more} name another run=, or start over with fresh=True")


def extending(former: Former, new: Plan) -> str:
    """Return the sentence about the lr that more epochs mean."""
    now, before = (lr_at(plan, former.place[0], former.drops) for plan in (new, former.applied))
    goes = f"lr goes on at {shown(now)} ({new.schedule} over {new.epochs} epochs)"
    fallen = f", where it had fallen to {shown(before)}" if before < now else ""
    return f"epochs {former.applied.epochs} → {new.epochs}: {goes}{fallen}"


def keeping(former: Former, plan: Plan) -> list[str]:
    """Return the sentence about newly measured advice that a resumed run does not take."""
    old, advice = former.applied, former.index.get("advised", {})
    free = {name: value for name, value in plan.to_dict().items() if name not in plan.given()}
    names = [n for n, v in free.items() if v != getattr(old, n) and plain(v) != plain(advice.get(n, v))]
    kept, would = (", ".join(f"{name} {shown(getattr(each, name))}" for name in names) for each in (old, plan))
    sentence = f"this run keeps {kept} as it has applied them so far; newly measured advice would be {would}"
    return [sentence] if names else []


# -- run=None


def own_folder(task: Task, pack: Pack, plan: Any, fresh: bool) -> Path:
    """Return the folder of a call without `run=`."""
    wanted = chosen_plan(task, pack, plan)
    there = None if fresh else search(task, pack, wanted, panel_of(plan))
    part = readable(task, pack, wanted)
    require_sizes(part, wanted)
    return there or new_folder(task, part.card, wanted)


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
    now = {name: plain(value) for name, value in plan.given().items()}
    if given is None:
        return False
    longer = former is not None and former.over and plan.epochs > former.applied.epochs
    equal = given == now or (longer and {**given, "epochs": 0} == {**now, "epochs": 0})
    if not equal and (panel is None or index.get("panel") != panel):
        return False
    wanted = decide(former, plan).plan
    card = readable(task, pack, wanted).card
    own, before = bound(task, card), index.get("identity", {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(wanted.seed)
        present = identity(own, card.digest, build(own, card, wanted), wanted)
    return all(before.get(key) == present[key] for key in present.keys() - ({"recipe"} - before.keys()))


def new_folder(task: Task, card: Any, plan: Plan) -> Path:
    """Make the folder of a run with the next free number; two processes never get the same."""
    name = task_name(task)
    short = name.rpartition(".")[2]
    if ":" in name:  # of one's own: named by its network
        with torch.random.fork_rng(devices=[]):
            short = type(build(bound(task, card), card, plan)).__name__
    short = re.sub("[^a-z0-9]+", "-", short.lower()).strip("-") or "run"
    with disk.explained("making a run folder", RUNS):
        RUNS.mkdir(parents=True, exist_ok=True)
        ends = [path.name.removeprefix(f"{short}-") for path in RUNS.glob(f"{short}-*")]
        for number in count(max((int(end) for end in ends if end.isdecimal()), default=0) + 1):
            with suppress(FileExistsError):
                (folder := RUNS / f"{short}-{number}").mkdir()
                return folder
    raise AssertionError
