"""A few samples through network and loss before anything is trained or written: what does not fit is said in one
sentence, with the shapes.

B samples.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from nbtools.data import TARGET, Pack, gather
from nbtools.errors import NbtoolsError, TrainError
from nbtools.train.call import logits_of
from nbtools.train.device import autocast, out_of_memory
from nbtools.train.evaluation import forward
from nbtools.train.indices import DEVICES, Checked
from nbtools.train.state import TrainState
from nbtools.train.task import spoken, summed

SAMPLES = 8  # a loss may need more than one or two


def rehearse(state: TrainState, pack: Pack) -> None:
    """Raise TrainError if the network does not take the pack's samples, or the loss what the network returns. Changes
    nothing: no weight, buffer or random state."""
    task, plan, device = state.task, state.applied.while_training(), state.device
    ids = pack.ids("train")[: min(SAMPLES, plan.batch_size)]
    raw = {name: tensor.to(device) for name, tensor in gather(pack, ids).items()}
    entered: list[tuple[str, nn.Module, Any]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, given, name=name: entered.append((name, layer, given)))
        for name, layer in state.model.named_modules()
        if not list(layer.children())
    ]
    batch, outputs = {}, None
    indices = Checked() if device.type in DEVICES else nullcontext()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad(), indices:
            batch, outputs = forward(task, state.model, raw, plan, device)
            with autocast(plan, device, state.model):
                summed(task.loss(lambda *_, **__: outputs, batch, plan), len(ids))
    except NbtoolsError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if out_of_memory(error):
            return
        why = (str(error).splitlines() or [type(error).__name__])[0]
        if outputs is not None:
            what = unfit_loss(task, outputs, batch, len(ids))
            raise TrainError(f"{what}: {why}; change the last layer or the loss") from error
        what = f"{spoken(task)}: the network does not take the pack's {inputs_of(state)}"
        if entered:
            name, layer, given = entered[-1]
            shapes = ", ".join(shape(each, len(ids)) for each in given)
            what += f": {type(state.model).__name__}.{name} {layer} got {shapes}" if name else f": {layer} got {shapes}"
        raise TrainError(f"{what}: {why}; change the network, or pack other data") from error
    finally:
        for hook in hooks:
            hook.remove()


def inputs_of(state: TrainState) -> str:
    """The columns that the network may read, in words."""
    columns = state.card.columns
    names = state.card.options.get("inputs") or [name for name in columns if name != TARGET]
    return ", ".join(f"{name} {columns[name]}" for name in names if name in columns)


def unfit_loss(task: Any, outputs: Any, batch: Any, count: int) -> str:
    """The start of the sentence about a loss that does not take what the network returns."""
    try:
        came = shape(logits_of(outputs), count)
    except TrainError:
        came = f"a {type(outputs).__name__}"
    y, classes = batch.get(TARGET), getattr(task.card, "classes", None)
    target = f" and y {shape(y, count)} {str(y.dtype).removeprefix('torch.')}" if isinstance(y, Tensor) else ""
    of = f" of {len(classes)} classes" if classes else ""
    return f"{spoken(task)}: the loss does not take outputs {came}{target}{of}"


def shape(value: Any, count: int) -> str:
    """A tensor's shape as text, the samples as B."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    sizes = ["B" if not axis and size == count else str(size) for axis, size in enumerate(value.shape)]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
