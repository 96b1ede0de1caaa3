"""The network of a task, as a run trains it: its own, connected to the pack's columns, and tried before it trains."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

from nbtools.data import TARGET, Card, Draws
from nbtools.errors import NbtoolsError, TrainError
from nbtools.train.call import connect, logits_of
from nbtools.train.defaults import blank, is_whole, require_fitting
from nbtools.train.metrics import Batch, score
from nbtools.train.task import Task, set_training, spoken

STEPS = (8, 128, 2048)  # how long sequences of zeros are tried, the longer ones where layers have no size yet


def build(task: Task, card: Card, plan: Any) -> nn.Module:
    """The network of a bound task; for a pack of `nb.pack` one that takes batches, and shares no weights with another
    run's. Raises TrainError for anything else."""
    model = task.model(card, plan)
    if not isinstance(model, nn.Module):
        raise TrainError(f"{spoken(task)}: model must return a torch.nn.Module, got {type(model).__name__}")
    if task.card is None:
        return model
    if is_shared(task, model, card, plan):
        model = copied(model)
    require_fitting(card, task.metrics, task.augment)
    connect(model, card)
    lazy = any(map(is_lazy, itertools.chain(model.parameters(), model.buffers())))  # of LazyLinear, LazyBatchNorm2d
    ragged = any(column.kind == "ragged" for column in card.columns.values())
    steps, *longer = STEPS if lazy and ragged else STEPS[:1]
    try:
        while error := try_out(task, model, card, plan, steps):
            if whole := [name for name in card.options["inputs"] if is_whole(card, name) and "type" in str(error)]:
                columns = ", ".join(f"{name} {card.columns[name]}" for name in whole)
                rule = (
                    f"{type(model).__name__}: {error}; whole numbers are passed to the network unchanged, and it gets"
                )
                fix = "cast them in the Dataset, x.astype(np.float32), or use an nn.Embedding"
                raise TrainError(f"{rule} {columns}: {fix}") from error
            if not longer:
                break
            steps, *longer = longer
        if error and lazy:
            inputs = ", ".join(f"{name} {card.columns[name]}" for name in card.options["inputs"])
            rule = f"{type(model).__name__}: {error}; lazy layers learn their sizes from two samples of zeros, {inputs}"
            raise TrainError(f"{rule}; write layers with sizes instead") from error
    finally:
        set_training(model)
    return model


def is_shared(task: Task, model: nn.Module, card: Card, plan: Any) -> bool:
    """Whether `model` returns some of the same weights each time, as of a network that a variable holds; asked once.
    Other networks are not copied, since hooks that refer to one would not follow."""
    known = vars(task)
    if "_shared" not in known:
        with torch.random.fork_rng(devices=[]):
            again = task.model(card, plan)
        first, second = ({*map(id, itertools.chain(m.parameters(), m.buffers()))} for m in (model, again))
        known["_shared"] = model is again or not first.isdisjoint(second)
    return known["_shared"]


def copied(model: nn.Module) -> nn.Module:
    """A network of a run's own."""
    memo: dict[int, Any] = {id(b): UninitializedBuffer() for b in model.buffers() if is_lazy(b)}  # which have no copy
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        rule = f"each run trains a copy of its network, and {type(model).__name__} cannot be copied: {error}"
        raise TrainError(f"{rule}; keep what cannot be copied, such as a file or a lock, out of the module") from error


@torch.no_grad()
def try_out(task: Task, model: nn.Module, card: Card, plan: Any, steps: int) -> Exception | None:
    """Two samples of zeros, through the network and what measures it: layers learn their sizes, and what cannot work is
    said before anything is trained. Raises TrainError for that; returns whatever else the task raises, since neither a
    network nor a function of one's own need take zeros."""
    try:
        feed_zeros(task, model, card, plan, steps)
    except NbtoolsError:
        raise
    except Exception as error:
        return error
    return None


def feed_zeros(task: Task, model: nn.Module, card: Card, plan: Any, steps: int) -> None:
    raw = blank(card, steps)
    batch = task.batch(raw, plan, None)
    outputs = task.infer(model.eval(), batch, plan)
    score(task.metrics, outputs, batch, card)
    require_loss(task, outputs, batch, plan)
    draws = Draws(plan.seed, 0, raw["id"])
    task.batch(raw, plan, draws)
    if task.augment and not draws.count:
        rule = f"{spoken(task)}: its `batch` leaves out augment={task.augment!r}"
        raise TrainError(f"{rule}; begin it with batch = super().batch(raw, plan, draws), or leave augment out")


def require_loss(task: Task, outputs: Any, batch: Batch, plan: Any) -> None:
    """Raise TrainError if the loss module of `classify` or `regress` does not take outputs and targets."""
    loss = getattr(task, "given_loss", None)
    if not isinstance(loss, nn.Module):
        return
    try:
        task.loss(lambda *_: outputs, batch, plan)
    except NbtoolsError:
        raise
    except Exception as error:
        y, name = batch[TARGET], type(loss).__name__
        came = f"outputs {tuple(logits_of(outputs).shape)} and y {tuple(y.shape)} {str(y.dtype).removeprefix('torch.')}"
        rule = f"loss {name} does not take {came}: {str(error).splitlines()[0]}"
        raise TrainError(f"{rule}; choose another, or pass a function of (outputs, y) that calls it") from error
