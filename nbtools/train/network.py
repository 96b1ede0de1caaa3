"""The network of a task: a run's own, with sized layers, and called with the columns that its forward names."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

from nbtools.data import Card
from nbtools.errors import TrainError
from nbtools.train.defaults import require_augmentable
from nbtools.train.task import Task, set_training, spoken

STEPS = 128  # of the sequences from which lazy layers learn their sizes


def build(task: Task, card: Card, plan: Any) -> nn.Module:
    """Return the network of a bound task; for a pack of `nb.pack` one that takes batches, and shares no weights with
    another run's. Raises TrainError for anything else."""
    model = task.model(card, plan)
    if not isinstance(model, nn.Module):
        raise TrainError(f"{spoken(task)}: model must return a torch.nn.Module, got {type(model).__name__}")
    if task.card is None:
        return model
    require_augmentable(card, task.augment)
    if is_shared(task, model, card, plan):
        model = own_copy(model)
    model.register_forward_pre_hook(find_arguments(model, card), prepend=True, with_kwargs=True)  # before lazy layers'
    if any(map(is_lazy, chain(model.parameters(), model.buffers()))):
        size_layers(task, model, card, plan)
    set_training(model)
    return model


def is_shared(task: Task, model: nn.Module, card: Card, plan: Any) -> bool:
    """Return whether `model` returns some of the same weights each time, as of a network that a variable holds. Other
    networks are not copied, since hooks that refer to one would not follow."""
    known = vars(task)
    if "_shared" not in known:
        with torch.random.fork_rng(devices=[]):
            known["_shared"] = not {*model.parameters()}.isdisjoint(task.model(card, plan).parameters())
    return known["_shared"]


def own_copy(model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {id(b): UninitializedBuffer() for b in model.buffers() if is_lazy(b)}  # which have no copy
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        rule = f"each run trains a copy of its network, and {type(model).__name__} cannot be copied: {error}"
        raise TrainError(f"{rule}; keep what cannot be copied, such as a file or a lock, out of the module") from error


@torch.no_grad()
def size_layers(task: Task, model: nn.Module, card: Card, plan: Any) -> None:
    """Let lazy layers learn their sizes from two samples of zeros. Raises TrainError."""
    raw = {"id": torch.arange(2)}
    for name, column in card.columns.items():
        ragged = column.kind == "ragged"
        raw[name] = torch.from_numpy(np.zeros((2, *(STEPS,) * ragged, *column.shape), column.dtype))
        raw |= {f"{name}_length": torch.full((2,), STEPS)} if ragged else {}
    try:
        task.infer(model.eval(), task.batch(raw, plan, None), plan)
    except Exception as error:
        inputs = ", ".join(f"{name} {card.columns[name]}" for name in card.options["inputs"])
        rule = f"{type(model).__name__}: {error}; lazy layers learn their sizes from two samples of zeros, {inputs}"
        raise TrainError(f"{rule}; write layers with sizes instead") from error


# -- the call


@dataclass(frozen=True)
class Arguments:
    """The columns that a network's forward takes, by position and by keyword only; neither: the batch as a dict.

    As a forward pre-hook it replaces a batch, and nothing else, by these: the names of weights, DDP and calls with
    tensors stay as they are.
    """

    called: str
    positions: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def __call__(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if named or len(given) != 1 or not isinstance(given[0], dict) or not (self.positions or self.names):
            return None
        batch = given[0]
        if lost := [name for name in (*self.positions, *self.names) if name not in batch]:
            raise TrainError(f"{self.called} takes {lost[0]!r}, but the batch has {', '.join(batch)}; return it too")
        return tuple(batch[name] for name in self.positions), {name: batch[name] for name in self.names}


def find_arguments(model: nn.Module, card: Card) -> Arguments:
    """Return what forward takes: the whole batch where its first parameter is called `batch`; the inputs and their
    lengths, `<input>_length`, that its parameters name; else the inputs in order. Raises TrainError for other ones."""
    inputs, start = card.options["inputs"], f"{type(model).__name__}.forward"
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # compiled code has none
        signature = inspect.Signature()
    plain = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if plain and plain[0].name == "batch":
        return Arguments(f"{start}(batch)")
    offered = [*inputs, *(f"{name}_length" for name in inputs if card.columns[name].kind == "ragged")]
    columns, required = [p.name for p in plain if p.name in offered], [p.name for p in plain if p.default is p.empty]
    unknown = [name for name in required if name not in columns]
    if unknown and (columns or len(unknown) != len(inputs)):
        came = f"which columns are {', '.join(unknown)}? The pack has {', '.join(offered)}"
        fix = "name the parameters as the columns, or take the whole dict: forward(self, batch)"
        raise TrainError(f"{start}({', '.join(required)}): {came}; {fix}")
    if not columns:
        return Arguments(f"{start}({', '.join(inputs)})", tuple(inputs))
    arguments = signature.bind(**{name: name for name in columns})
    return Arguments(f"{start}({', '.join(columns)})", arguments.args, tuple(arguments.kwargs))


def call_of(model: nn.Module) -> str:
    """Return how a network of `build` is called, and how many of its parameters are trained; "" for another."""
    hook = next((hook for hook in model._forward_pre_hooks.values() if isinstance(hook, Arguments)), None)
    if hook is None:
        return ""
    whole, trained = (sum(p.numel() for p in model.parameters() if p.requires_grad >= least) for least in (0, 1))
    return f"{hook.called}, {whole:,} parameters, {'all' if trained == whole else f'{trained:,}'} trained"
