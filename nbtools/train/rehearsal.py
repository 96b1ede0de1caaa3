"""A few samples through network and loss before anything is trained or written: what does not fit is said in one
sentence, with the shapes.

B samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_map

from nbtools.data import TARGET, Pack, gather
from nbtools.errors import NbtoolsError, TrainError
from nbtools.train.call import logits_of
from nbtools.train.device import autocast, out_of_memory
from nbtools.train.evaluation import forward
from nbtools.train.state import TrainState
from nbtools.train.task import spoken, summed

SAMPLES = 8  # a loss may need more than one or two
ASSERTING = ("cuda",)  # devices whose kernels end the process where an index is out of range


def rehearse(state: TrainState, pack: Pack) -> None:
    """Raise TrainError if the network does not take the pack's samples, or the loss what the network returns. Changes
    nothing: no weight, buffer or random state."""
    task, plan, device, model = state.task, state.applied.while_training(), state.device, state.model
    ids = pack.ids("train")[: min(SAMPLES, plan.batch_size)]
    raw = {name: tensor.to(device) for name, tensor in gather(pack, ids).items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    running: list[tuple[nn.Module, Any]] = []  # layers and what they got, the innermost last
    hooks = (  # of all modules, since one of TorchScript takes none of its own
        register_module_forward_pre_hook(lambda layer, given: running.append((layer, given))),
        register_module_forward_hook(lambda *_: running.pop() and None),
    )
    batch, outputs = {}, None

    def compute(gradients: bool) -> None:
        with autocast(plan, device, model), torch.set_grad_enabled(gradients):
            summed(task.loss(lambda *_, **__: outputs, batch, plan), len(ids))

    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if device.type in ASSERTING:
                require_targets(state, pack)
            batch, outputs = forward(task, model, raw, plan, device)
            try:
                compute(False)
            except RuntimeError:  # of a loss that needs gradients, as for a hook, or of one that does not fit
                if isinstance(outputs, Tensor) and outputs.is_floating_point():
                    outputs.requires_grad_()
                compute(True)
    except NbtoolsError:
        raise
    except Exception as error:
        if out_of_memory(error) or (outputs is not None and isinstance(error, AttributeError)):
            return  # a loss may ask the network for more than outputs: training will tell
        why = (str(error).splitlines() or [type(error).__name__])[0]
        if outputs is not None:
            what = unfit_loss(task, outputs, batch, len(ids))
            raise TrainError(f"{what}: {why}; change the last layer or the loss") from error
        if not running:
            rule = f"{spoken(task)}: its `batch` or `infer` does not take the pack's {inputs_of(state)}: {why}"
            raise TrainError(f"{rule}; change it, or pack other data") from error
        layer, given = running[-1]
        what = f"{spoken(task)}: the network does not take the pack's {inputs_of(state)}: {place(model, layer)}"
        named = [("", each) for each in given]
        if len(given) == 1 and isinstance(given[0], Mapping):  # a batch, of which it takes these
            named = [(f"{name} ", given[0][name]) for name in inputs(state) if name in given[0]]
        shapes = ", ".join(f"{name}{shape(each, len(ids))}" for name, each in named) or "nothing"
        raise TrainError(f"{what} got {shapes}: {why}; change the network, or pack other data") from error
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])


def require_targets(state: TrainState, pack: Pack) -> None:
    """Raise TrainError for a sample with a class that the loss has no place for, as torch says on a CPU."""
    task, plan = state.task, state.applied.while_training()
    for i in extremes(pack):
        raw = {name: tensor.to(state.device) for name, tensor in gather(pack, np.array([i, i])).items()}
        try:
            given = tree_map(on_cpu, forward(task, state.model, raw, plan, state.device))
            with torch.no_grad():
                task.loss(lambda *_, given=given, **__: given[1], given[0], plan)
        except Exception as error:
            why, fix = str(error), "correct the sample, leave it out, or give the network more classes"
            if isinstance(error, IndexError) or "out of bounds" in why:  # others are explained where they come again
                rule = f"{pack.folder}: sample {i} ({pack.names[i]}): {why.splitlines()[0].rstrip('.')}"
                raise TrainError(f"{rule}; {fix}", entry="Device-side assert") from None


def on_cpu(value: Any) -> Any:
    value = value.cpu() if isinstance(value, Tensor) else value
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def extremes(pack: Pack) -> list[int]:
    """The samples of train and val with the two lowest and the two highest classes: one may be ignored."""
    found, used = dict[int, None](), np.zeros(len(pack), bool)
    used[[*pack.ids("train"), *pack.ids("val")]] = True
    for name in {TARGET, "label"} & set(pack.read):
        values, ends = pack.arrays[name], pack.offsets.get(name)
        if values.dtype.kind in "iu":
            sample = np.arange(len(pack)) if ends is None else np.repeat(np.arange(len(pack)), np.diff(ends))
            rows, kind = used[sample].reshape(-1, *[1] * (values.ndim - 1)), np.iinfo(values.dtype)
            for end, none in ((np.min, kind.max), (np.max, kind.min)):
                first = end(values, initial=none, where=rows)
                for number in (first, end(values, initial=none, where=rows & (values != first))):
                    hits = (rows & (values == number)).reshape(len(values), -1).any(1)
                    found |= {int(sample[hits.argmax()]): None} if hits.any() else {}
    return list(found)


def place(model: nn.Module, layer: nn.Module) -> str:
    """A layer in words: `Net.fc Linear(in_features=100, …)`; of one that has layers itself its type alone."""
    told = type(layer).__name__ if list(layer.children()) else str(layer)
    name = next((name for name, each in model.named_modules() if each is layer), "")
    return f"{type(model).__name__}.{name} {told}" if name else told


def inputs(state: TrainState) -> list[str]:
    """The columns that the network may read."""
    columns = state.card.columns
    names = state.card.options.get("inputs") or [name for name in columns if name != TARGET]
    return [name for name in names if name in columns]


def inputs_of(state: TrainState) -> str:
    """These columns in words."""
    return ", ".join(f"{name} {state.card.columns[name]}" for name in inputs(state))


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
