"""What makes two runs the same, and what a call's plan means for a run that is there already. Nothing here writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from nbtools import train
from nbtools.data import Card
from nbtools.errors import NbtoolsError, TrainError
from nbtools.train import Plan, Task, checkpoint


def identity(task: Task, card: Card, model: nn.Module, plan: Plan) -> dict[str, list[str]]:
    """Return what a run is besides its plan, each part as a list of lines."""
    (loss, metrics, augment, functions), name = train.objective(task), train.task_name(task)
    kind = getattr(loss, "__qualname__", type(loss).__qualname__) if loss else "default"
    parts = {
        "pack": [card.digest[:12]],
        "network": [*structure(model)],
        "loss": [*structure(loss)] if isinstance(loss, nn.Module) else [kind],
        "metrics": metrics,
        "augment": [f"{name} {strength}" for name, strength in augment.items()],
        **{part: [name] for part, name in functions.items()},
        "trained": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
    }
    if isinstance(loss, nn.Module):  # such as the weights of classes
        digests = ((n, hashlib.sha256(repr(t.tolist()).encode()).hexdigest()) for n, t in loss.state_dict().items())
        parts["loss"] += [f"{name} {digest[:12]}" for name, digest in digests]
    if ":" not in name:  # else the name of a variable, which may change
        parts["task"] = [name]
    if task.card is not None and not plan.given().keys() & {"lr", "batch_size"}:  # where advice starts from
        parts["recipe"] = [f"lr {task.PLAN.lr}, batch size {task.PLAN.batch_size}"]
    return parts


def structure(model: nn.Module) -> Iterator[str]:
    """Yield a line a module, with its type and its plain settings, and a line a tensor, with its shape."""
    for name, module in model.named_modules():
        # SyncBatchNorm takes the place of BatchNorm in several processes, and the run stays the same
        kind = "BatchNorm" if isinstance(module, _BatchNorm) else type(module).__name__
        settings = [f"{n}={value}" for n, value in vars(module).items() if is_setting(n, value)]
        yield f"{name}: {kind}({', '.join(settings)})".removeprefix(": ")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        yield f"{name} {[*tensor.shape]}"


def is_setting(name: str, value: Any) -> bool:
    members = value if isinstance(value, tuple) else (value,)
    plain = all(member is None or isinstance(member, (int, float, str)) for member in members)
    return plain and not name.startswith("_") and name not in ("training", "process_group")


def differences(before: Mapping[str, list[str]], now: Mapping[str, list[str]]) -> list[str]:
    """Return what differs between two identities, a phrase a part: `metrics: accuracy → f1`. A run may go on with other
    trained parameters."""
    phrases = []
    for part in [part for part in now if part in before and part != "trained" and before[part] != now[part]]:
        old = [line for line in before[part] if line not in now[part]]
        new = [line for line in now[part] if line not in before[part]]
        phrases.append(f"{part}: {', '.join(old[:3]) or 'none'} → {', '.join(new[:3]) or 'none'}")
    return phrases


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
    with suppress(NbtoolsError):  # a damaged one is reported when it is loaded
        state = checkpoint.facts_of(folder, index["last"])["state"]
    applied = type(task.PLAN).from_dict(index["applied"])
    over = bool(state["stopped"]) or (place[0] >= applied.epochs and not state["position"]["segments"])
    return Former(folder, index, applied, place, over, state["best"]["drops"])


def given_by(plan: Plan) -> dict[str, Any]:
    """Return the settings that code or a hand gave, as JSON reads them back."""
    return json.loads(json.dumps(plan.given()))


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
