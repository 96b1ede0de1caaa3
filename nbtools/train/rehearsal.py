"""Pass a few samples through network, metrics and loss before anything is trained or written."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_map_only

from nbtools.data import TARGET, Draws, Pack, gather
from nbtools.errors import NbtoolsError, TrainError
from nbtools.train.device import autocast, out_of_memory
from nbtools.train.evaluation import forward
from nbtools.train.metrics import Batch, score
from nbtools.train.state import TrainState
from nbtools.train.task import spoken

ASSERTING = ("cuda",)  # devices whose kernels end the process where a class is out of range
SAMPLES, MOST = 8, 10**8  # numbers of labels that are looked through: larger ones are masks, which take seconds


def rehearse(state: TrainState, pack: Pack) -> None:
    """Raise TrainError, with layer and shapes, if the network does not take the pack's samples, or loss and metrics
    what it returns. No weight and no random state changes."""
    task, plan, device, ends = state.task, state.applied.while_training(), state.device, extremes(pack)
    ids = [*pack.ids("train")[: min(SAMPLES, plan.batch_size)], *ends]
    running: list[Any] = []  # layers and what they got, the innermost last
    hooks = (  # of all modules, since one of TorchScript takes none of its own
        register_module_forward_pre_hook(lambda layer, given: running.append((layer, given))),
        register_module_forward_hook(lambda *_: running.pop() and None),
    )
    batch, outputs = {}, None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            raw = {name: tensor.to(device) for name, tensor in gather(pack, np.array(ids)).items()}
            batch, outputs = forward(task, state.model, raw, plan, device)
            with autocast(plan, device, state.model):
                if task.card is not None:
                    score(task.metrics, outputs, batch, task.card)
                    task.batch(raw, plan, draws := Draws(plan.seed, 0, raw["id"]))
                    if task.augment and not draws.count:
                        rule = f"{spoken(task)}: its `batch` leaves out augment={task.augment!r}"
                        raise TrainError(f"{rule}; begin it with batch = super().batch(raw, plan, draws)")
                if device.type in ASSERTING:
                    with suppress(RuntimeError):  # of a loss with tensors of its own on the GPU
                        require_loss(task, *tree_map_only(Tensor, Tensor.cpu, (outputs, batch)), plan=plan)
                require_loss(task, outputs, batch, plan)
    except NbtoolsError:
        raise
    except Exception as error:
        if out_of_memory(error) or (outputs is not None and isinstance(error, AttributeError)):
            return  # a loss may ask the network for more than outputs: training will tell
        why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        if isinstance(error, IndexError):
            why += f" (its lowest and highest classes: {', '.join(str(pack.names[i]) for i in ends)})"
        raise TrainError(f"{spoken(task)}: {misfit(state, running, outputs, batch)}: {why}; change it") from error
    finally:
        for hook in hooks:
            hook.remove()


def extremes(pack: Pack) -> list[int]:
    """Return samples with the two lowest and the two highest classes: one may be ignored."""
    samples, ids = set(), np.concatenate([pack.ids("train"), pack.ids("val")])
    for name in {TARGET, "label"} & set(pack.read) - pack.offsets.keys():
        if pack.arrays[name].dtype.kind in "iu" and pack.arrays[name].size <= MOST:
            values = pack.arrays[name][ids]
            low, high = values.min(), values.max()
            inner = values.min(where=values != low, initial=high), values.max(where=values != high, initial=low)
            samples |= {int(ids[np.argmax(values == k) // (values.size // len(ids))]) for k in (low, high, *inner)}
    return sorted(samples)


def require_loss(task: Any, outputs: Any, batch: Batch, plan: Any) -> None:
    with torch.enable_grad():  # a loss may work on gradients
        floats = isinstance(outputs, Tensor) and outputs.is_floating_point()
        tracked = outputs.clone().requires_grad_() if floats else outputs
        loss = task.loss(lambda *_, **__: tracked, batch, plan)
    if not isinstance(loss, Tensor) and not (isinstance(loss, tuple) and len(loss) == 2):
        rule = "loss must return (sum, count), or a tensor: the mean, or a term per sample"
        raise TrainError(f"{spoken(task)}: {rule}; got a {type(loss).__name__}")


def misfit(state: TrainState, running: list[Any], outputs: Any, batch: Batch) -> str:
    """Return what does not fit: the loss, the innermost layer that was running, or the task's hooks."""
    columns, model = state.card.columns, state.model
    if outputs is not None:
        y, classes = batch.get(TARGET), len(state.card.classes)
        target = f" and y {shape(y)} {str(y.dtype).removeprefix('torch.')}" if isinstance(y, Tensor) else ""
        came = f"{shape(getattr(outputs, 'logits', outputs))}{target}{f' of {classes} classes' * bool(classes)}"
        return f"the loss or a metric does not take outputs {came}"
    inputs = [name for name in state.card.options.get("inputs") or columns if name in columns and name != TARGET]
    data = f"the pack's {', '.join(f'{name} {columns[name]}' for name in inputs)}"
    if not running:
        return f"its `batch` or `infer` does not take {data}"
    layer, given = running[-1]
    path = "".join(f"{type(model).__name__}.{name} " for name, each in model.named_modules() if each is layer and name)
    kind = type(layer).__name__ if list(layer.children()) else str(layer)
    whole = given[0] if given and isinstance(given[0], dict) else {}
    got = [f"{name} {shape(whole[name])}" for name in inputs if name in whole] or map(shape, given)
    return f"the network does not take {data}: {path}{kind} got {', '.join(got) or 'nothing'}"


def shape(value: Any) -> str:
    """Return a tensor's shape as text, its first axis as B."""
    if not isinstance(value, Tensor) or not value.dim():
        return f"a {type(value).__name__}"
    return f"({', '.join(['B', *map(str, value.shape[1:])])}{',' * (value.dim() == 1)})"
