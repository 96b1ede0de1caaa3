"""The network of a task, called with the columns that its forward names."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from nbtools.data import Card
from nbtools.errors import TrainError
from nbtools.train.defaults import require_augmentable
from nbtools.train.task import Task, spoken


def build(task: Task, card: Card, plan: Any) -> nn.Module:
    """Return the network of a bound task; for a pack of `nb.pack` one that takes batches. Raises TrainError for
    anything else."""
    model = task.model(card, plan)
    if not isinstance(model, nn.Module):
        raise TrainError(f"{spoken(task)}: model must return a torch.nn.Module, got {type(model).__name__}")
    if any(map(is_lazy, model.parameters())):
        fix = "give its layers their sizes, or call the network on a sample once before"
        raise TrainError(f"{spoken(task)}: the network has layers that learn their sizes when first called; {fix}")
    if task.card is not None:
        require_augmentable(card, task.augment)
        model.register_forward_pre_hook(find_arguments(model, card), prepend=True, with_kwargs=True)
        set_training(model)
    return model


def set_training(model: nn.Module, training: bool = True) -> None:
    """Call `model.train(training)`, but leave norm layers whose parameters are all frozen in eval mode, and so the
    statistics that they apply."""
    model.train(training)
    for layer in model.modules() if training else ():
        trained = [p.requires_grad for p in layer.parameters(recurse=False)]
        if isinstance(layer, _NormBase) and trained and not any(trained):
            layer.eval()


@dataclass(frozen=True)
class Arguments:
    """The columns that a network's forward takes, by name or in order; none: the batch as a dict. As a forward pre-hook
    it replaces a batch, and nothing else, by these, so that DDP and calls with tensors stay as they are."""

    forward: str
    columns: tuple[str, ...]
    named: bool = False

    def __call__(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if named or len(given) != 1 or not isinstance(given[0], dict) or not self.columns:
            return None
        if lost := [name for name in self.columns if name not in given[0]]:
            came = f"the batch has {', '.join(given[0])}"
            raise TrainError(f"{self.forward} takes {lost[0]!r}, but {came}; return it too")
        taken = {name: given[0][name] for name in self.columns}
        return ((), taken) if self.named else ((*taken.values(),), {})


def find_arguments(model: nn.Module, card: Card) -> Arguments:
    """Return what forward takes: the whole batch where its first parameter is called `batch`; the inputs and their
    lengths, `<input>_length`, that its parameters name; else the inputs in order. Raises TrainError for other ones."""
    inputs, start = card.options["inputs"], f"{type(model).__name__}.forward"
    parameters = [*inspect.signature(model.forward).parameters.values()]
    plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if plain and plain[0].name == "batch":
        return Arguments(f"{start}(batch)", ())
    offered = [*inputs, *(f"{name}_length" for name in inputs if card.columns[name].kind == "ragged")]
    columns, required = [p.name for p in plain if p.name in offered], [p.name for p in plain if p.default is p.empty]
    unknown = [name for name in required if name not in columns]
    if unknown and (columns or len(unknown) != len(inputs)):
        came = f"which columns are {', '.join(unknown)}? The pack has {', '.join(offered)}"
        fix = "name the parameters as the columns, or take the whole dict: forward(self, batch)"
        raise TrainError(f"{start}({', '.join(required)}): {came}; {fix}")
    return Arguments(f"{start}({', '.join(columns or inputs)})", tuple(columns or inputs), named=bool(columns))
