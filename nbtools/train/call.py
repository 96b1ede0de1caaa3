"""How a network is called with a batch of an `nb.pack`: with the columns that its forward names."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from nbtools.data import TARGET, Card
from nbtools.errors import TrainError

LENGTHS = ("lengths", "length")  # what a forward may call the lengths of a single ragged input


@dataclass(frozen=True)
class Arguments:
    """The columns of a batch that a network's forward takes, by position and by name; `whole`: the batch as a dict.

    As a forward pre-hook it replaces a batch, and nothing else, by these: the names of weights, DDP and calls with
    tensors stay as they are.
    """

    called: str
    positions: tuple[str, ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    whole: bool = False

    def __call__(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self.whole or named or len(given) != 1 or not isinstance(given[0], dict):
            return None
        batch = given[0]
        if lost := [name for name in (*self.positions, *dict(self.names).values()) if name not in batch]:
            raise TrainError(f"{self.called} takes {lost[0]!r}, but the batch has {', '.join(batch)}; return it too")
        return tuple(batch[name] for name in self.positions), {name: batch[each] for name, each in self.names}


def find_arguments(model: nn.Module, card: Card) -> Arguments:
    """From the signature of forward: the batch as a dict where its first parameter is called `batch`, or annotated as a
    mapping; parameters with names of columns get these, but never the target by its name; `lengths` get those of a
    single ragged input; the other required ones get the remaining inputs in order, a single one the first of them;
    `*inputs` alone get all in order, `**inputs` by name. Raises TrainError if that leaves one without."""
    inputs, called = list(card.options["inputs"]), type(model).__name__
    ragged = [name for name in inputs if card.columns[name].kind == "ragged"]
    offered = {name: name for name in (*inputs, *(f"{name}_length" for name in ragged))}
    if len(ragged) == 1:
        offered |= dict.fromkeys(LENGTHS, f"{ragged[0]}_length")
    parameters = parameters_of(model)
    plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if takes_dict(model):
        return Arguments(f"{called}.forward({plain[0].name if plain else ''})", whole=True)
    required = [p.name for p in plain if p.default is p.empty]
    others = {*card.columns, "id"} - {TARGET}
    known = {**{name: name for name in required if name in others}, **offered}
    found = {p.name: known[p.name] for p in plain if p.name in known}
    rest = [name for name in required if name not in found]
    free = [name for name in inputs if name not in found.values()]
    if (rest and len(rest) not in (1, len(free))) or len(rest) > len(free):
        raise TrainError(
            f"{called}.forward({', '.join(required)}): which columns are {', '.join(rest)}? The inputs are "
            f"{', '.join(inputs)}; name the parameters as the columns, or take the whole dict: forward(self, batch)"
        )
    found |= dict(zip(rest, free, strict=False))
    if parameters and not plain:
        in_order = parameters[0].kind is inspect.Parameter.VAR_POSITIONAL
        found = {name: name for name in inputs}
        called = f"{called}.forward({', '.join(inputs)})"
        return Arguments(called, tuple(inputs)) if in_order else Arguments(called, names=tuple(found.items()))
    if not found:
        return Arguments(f"{called}.forward({inputs[0]})", (inputs[0],))
    given = ", ".join(name if name == column else f"{name}={column}" for name, column in found.items())
    first = next((k for k, p in enumerate(plain) if p.name not in found or p.kind is p.KEYWORD_ONLY), len(plain))
    named = tuple((p.name, found[p.name]) for p in plain[first:] if p.name in found)
    return Arguments(f"{called}.forward({given})", tuple(found[p.name] for p in plain[:first]), named)


def parameters_of(model: nn.Module) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):  # compiled code has none
        return []


def takes_dict(model: nn.Module) -> bool:
    """Whether its forward, or that of the first part of a Sequential, takes a batch as a dict."""
    while isinstance(model, nn.Sequential) and len(model):
        model = model[0]
    first = next(iter(parameters_of(model)), None)
    if first is None:
        return False
    kind = first.annotation.partition("[")[0] if isinstance(first.annotation, str) else first.annotation
    kind = typing.get_origin(kind) or kind
    mapping = isinstance(kind, type) and issubclass(kind, Mapping)
    return first.name == "batch" or mapping or kind in ("dict", "Mapping", "Batch")


def connect(model: nn.Module, card: Card) -> nn.Module:
    """The network, which takes a batch from now on, besides whatever its forward takes. A run calls it so."""
    found = find_arguments(model, card)
    if found not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(found, prepend=True, with_kwargs=True)  # a lazy layer looks at what it gets
    return model


def call_of(model: nn.Module) -> str:
    """How a connected network is called, and how many of its parameters are trained; "" for one that is not."""
    found = next((hook for hook in model._forward_pre_hooks.values() if isinstance(hook, Arguments)), None)
    if found is None:
        return ""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    whole, trained = sum(size for size, _ in sizes), sum(size for size, needed in sizes if needed)
    return f"{found.called}, {whole:,} parameters, {'all' if trained == whole else f'{trained:,}'} trained"


def logits_of(outputs: Any) -> Tensor:
    """The tensor of outputs: themselves, their `.logits` (transformers), or what they have as "out" (torchvision)."""
    for found in (outputs, getattr(outputs, "logits", None), outputs.get("out") if hasattr(outputs, "get") else None):
        if isinstance(found, Tensor):
            return found
    raise TrainError(
        f"the network returns a {type(outputs).__name__} without a tensor as .logits or ['out']; return the tensor "
        "from forward, or write a Task with model, loss, metrics and decode"
    )
