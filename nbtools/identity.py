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

from nbtools import disk, measure, train
from nbtools.data import Card, Pack
from nbtools.errors import NbtoolsError, PlanError, TrainError
from nbtools.live import Panel
from nbtools.run import PLAN, stored
from nbtools.train import Plan, Task, checkpoint

RUNS = Path("runs")
MOST = 6  # differences in a sentence


def identity(task: Task, digest: str, model: nn.Module, plan: Plan) -> dict[str, Any]:
    """Return what a run is besides its plan, as texts. digest: the pack's key. plan: where advice chose its lr and
    batch size, those that the task gave for a start belong to it."""
    (loss, metrics, augment, functions), name = train.objective(task), train.task_name(task)
    advised = task.card is not None and not plan.given().keys() & {"lr", "batch_size"}
    return {
        **({"recipe": f"lr {task.PLAN.lr}, batch size {task.PLAN.batch_size}"} if advised else {}),
        **({} if ":" in name else {"task": name}),  # else the name of a variable, which may change
        "pack": digest,
        "network": structure(model),
        "loss": structure(loss, hashed=True) if isinstance(loss, nn.Module) else {"": {"type": function_name(loss)}},
        "metrics": ", ".join(metrics),
        "augment": ", ".join(f"{name} {strength}" for name, strength in augment.items()),
        **functions,
        "trained": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
    }


def structure(model: nn.Module, hashed: bool = False) -> dict[str, dict[str, str]]:
    """Return the name of each module → its type, its plain settings, and the shapes of its own tensors; hashed: with a
    hash of their values."""
    return {name: dict(settings(module, hashed)) for name, module in model.named_modules()}


def settings(module: nn.Module, hashed: bool) -> Iterator[tuple[str, str]]:
    # SyncBatchNorm takes the place of BatchNorm in several processes, and the run stays the same
    yield "type", "BatchNorm" if isinstance(module, _BatchNorm) else type(module).__name__
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in ("training", "process_group") and is_plain(value):
            yield name, str(value)
    for name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if hashed else b""
        yield name, f"{[*tensor.shape]}{f' {hashlib.sha256(data).hexdigest()[:12]}' if hashed else ''}"


def is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (int, float, bool, str))


def function_name(value: Any) -> str:
    value = value or "default"
    return value if isinstance(value, str) else getattr(value, "__qualname__", type(value).__qualname__)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs between two identities, one phrase each: `network: body.1 ReLU → Tanh`. Names of trained
    parameters are left to `newly_trained`."""
    differing = [key for key in sorted(before.keys() & now.keys() - {"trained"}) if before[key] != now[key]]
    return [f"{key}: {first([*changes(before[key], now[key])])}" for key in differing]


def changes(old: Any, new: Any) -> Iterator[str]:
    """Yield what differs between two texts, or two structures, module by module: `body.2 Dropout(p=0.0 → 0.5)`."""
    if isinstance(new, str):
        yield f"{old or 'none'} → {new or 'none'}"
        return
    for name in {**old, **new}:
        before, after = old.get(name, {"type": "nothing"}), new.get(name, {"type": "nothing"})
        changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        pairs = {key: f"{before.get(key)} → {after.get(key)}" for key in changed}
        what = f"{before['type']}({', '.join(f'{key}={pair}' for key, pair in pairs.items())})"
        if pairs:
            yield f"{name} {pairs.get('type', what)}".strip()


def first(phrases: Sequence[str]) -> str:
    return ", ".join([*phrases[:MOST], *["…"] * (len(phrases) > MOST)])


def newly_trained(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the sentence about layers that were frozen or unfrozen since; "" for none."""
    new, old = now["trained"], before.get("trained", now["trained"])
    thawed, frozen = [name for name in new if name not in old], [name for name in old if name not in new]
    parts = [f"now trained {first(thawed)}"] * bool(thawed) + [f"now frozen {first(frozen)}"] * bool(frozen)
    return f"other parameters are trained from here on: {'; '.join(parts)}" if parts else ""


# -- the run in a folder, and what a call means for it


@dataclass(frozen=True)
class Former:
    """The run that a folder holds. index: run.json; given, applied: its plans; place: (epoch, step) of its last
    checkpoint; over: whether it has trained to its end; drops: of lr, on a plateau."""

    folder: Path
    index: Mapping[str, Any]
    given: Mapping[str, Any]
    applied: Plan
    place: tuple[int, ...]
    over: bool
    drops: int


def former_run(task: Task, folder: Path) -> Former | None:
    """Return the run in a folder; None where there is none with a finished step. Raises CheckpointError, DiskError."""
    names, facts = checkpoint.names(folder), {}
    if not names:
        return None
    index = checkpoint.read_index(folder)
    last = index.get("last", names[0])
    for name in checkpoint.names(folder, last):
        with suppress(NbtoolsError):  # a damaged one is complained about when it is loaded
            facts = checkpoint.facts_of(folder, name)
            break
    place, state = checkpoint.place(last), facts.get("state", {})
    if facts and place[1] == 0:
        return None
    with disk.explained("reading the plan", folder / PLAN):
        values = stored(folder / PLAN) if (folder / PLAN).exists() else facts.get("plan", {})
    applied = type(task.PLAN).from_dict(values)
    over = place[0] >= applied.epochs and not state.get("position", {}).get("segments")
    over, drops = over or bool(state.get("stopped")), state.get("best", {}).get("drops", 0)
    return Former(folder, index, index.get("given", values), applied, place, over, drops)


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
            f"{type(plan).__qualname__}; use {train.spoken(task)}.PLAN, with .replace(...) for your changes"
        )
    return plan


def meant(task: Task, pack: Pack, plan: Any, folder: Path, fresh: bool) -> Call:
    """Return what a call means in a folder. Raises TrainError where it is refused."""
    former = None if fresh else former_run(task, folder)
    if plan is not None or former is None:
        call = decide(former, chosen_plan(task, pack, plan, measured=former is None))
        advised = getattr(plan, "advised", getattr(plan, "plan", None))  # a plain plan may come from anywhere
        return call._replace(advised=advised, panel=panel_of(plan))
    start = chosen_plan(task, pack, None)
    recipe = {} if former.given.keys() & {"lr", "batch_size"} else start.given()  # of the task, as it was before
    call = decide(former, former.applied.replace(**recipe).marked(former.applied.to_dict().keys() - recipe.keys()))
    return call._replace(given=call.plan)


def decide(former: Former | None, plan: Plan) -> Call:
    """Return what a call with this plan means for the run in a folder. Raises TrainError where it is refused."""
    if former is None:
        return Call(plan, plan)
    old, given = former.applied, former.given
    changed = {} if former.over else dict(former.index.get("requested", {}))  # and not applied when it stopped
    for name, value in plan.given().items():
        if (name not in given or plain(value) != plain(given[name])) and value != getattr(old, name):
            changed[name] = value
    # lr follows a batch size where the plan was made, see Plan.turn, and is given then
    new = old.turn(**{"lr": old.lr, **changed}) if changed else old
    moved = new.changes_from(old)
    if former.over:
        refuse(former, moved.keys() - ({"epochs"} if new.epochs > old.epochs else set()), moved)
        said = [extending(former, new)] if moved else []
    else:
        refuse(former, moved.keys() & train.fixed(old).keys() - set(train.AT_START), moved)
        said = [f"resumed at step {former.place[1]:,} with {train.listed(moved)}"] if moved else []
    said += keeping(former, plan) if moved or not former.over else []
    return Call(plan if new == plan else new.marked(new.to_dict().keys() - plan.given().keys()), plan, said)


def plain(value: Any) -> Any:
    """Return a setting as JSON reads it back."""
    return [*value] if isinstance(value, tuple) else value


def refuse(former: Former, names: set[str], moved: Mapping[str, str]) -> None:
    if names:
        why = "is finished" if former.over else "has started"
        more = "more epochs extend it; for anything else" if former.over else "keep these values, or"
        changes = train.listed({name: change for name, change in moved.items() if name in names})
        rule = f"{former.folder}: this run {why} and cannot change {changes}"
        raise TrainError(f"{rule}; {more} name another run=, or start over with fresh=True")


def extending(former: Former, new: Plan) -> str:
    """Return the sentence about the lr that more epochs mean."""
    now, before = (train.lr_at(plan, former.place[0], former.drops) for plan in (new, former.applied))
    goes = f"lr goes on at {train.shown(now)} ({new.schedule} over {new.epochs} epochs)"
    fallen = f", where it had fallen to {train.shown(before)}" if before < now else ""
    return f"epochs {former.applied.epochs} → {new.epochs}: {goes}{fallen}"


def keeping(former: Former, plan: Plan) -> list[str]:
    """Return the sentence about newly measured advice that a resumed run does not take."""
    old, advice = former.applied, former.index.get("advised", {})
    free = {name: value for name, value in plan.to_dict().items() if name not in plan.given()}
    names = [n for n, v in free.items() if v != getattr(old, n) and plain(v) != plain(advice.get(n, v))]
    kept, would = (", ".join(f"{name} {train.shown(getattr(each, name))}" for name in names) for each in (old, plan))
    sentence = f"this run keeps {kept} as it has applied them so far; newly measured advice would be {would}"
    return [sentence] if names else []


# -- run=None


def own_folder(task: Task, pack: Pack, plan: Any, fresh: bool) -> Path:
    """Return the folder of a call without `run=`: of the newest run below `runs/` that it resumes, extends or returns,
    else a new one."""
    wanted = chosen_plan(task, pack, plan)
    indices = sorted(RUNS.glob(f"*/{checkpoint.INDEX}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [] if fresh else indices:
        with suppress(NbtoolsError, OSError):  # another kind of run, or one that this call cannot go on with
            if matches(task, pack, wanted, panel_of(plan), path.parent):
                return path.parent
    part = train.readable(task, pack, wanted)
    train.require_sizes(part, wanted)
    return new_folder(task, part.card, wanted)


def matches(task: Task, pack: Pack, plan: Plan, panel: str | None, folder: Path) -> bool:
    """Return whether a call without `run=` means this run. Raises TrainError where it refuses the call's changes."""
    index = checkpoint.read_index(folder)
    given, now = index.get("given"), {name: plain(value) for name, value in plan.given().items()}
    if given is None or index.get("task") != train.task_name(task):
        return False
    former = former_run(task, folder)
    longer = former is not None and former.over and plan.epochs > former.applied.epochs
    equal = given == now or (longer and {**given, "epochs": 0} == {**now, "epochs": 0})
    if not equal and (panel is None or index.get("panel") != panel):
        return False
    wanted, before = decide(former, plan).plan, index.get("identity", {})
    card = train.readable(task, pack, wanted).card
    present = identity(train.bound(task, card), card.digest, network(task, card, wanted), wanted)
    return not differences(before, present) and before.get("trained") == present["trained"]


def network(task: Task, card: Card, plan: Plan) -> nn.Module:
    """Build a network to look at; random numbers stay as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        return train.build(train.bound(task, card), card, plan)


def new_folder(task: Task, card: Card, plan: Plan) -> Path:
    """Make the folder of a run with the next free number; two processes never get the same. One's own task is named by
    its network."""
    name = train.task_name(task)
    short = type(network(task, card, plan)).__name__ if ":" in name else name.rpartition(".")[2]
    short = re.sub("[^a-z0-9]+", "-", short.lower()).strip("-") or "run"
    with disk.explained("making a run folder", RUNS):
        RUNS.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            with suppress(FileExistsError):
                (folder := RUNS / f"{short}-{number}").mkdir()
                return folder
    raise AssertionError
