"""A few samples through network, loss and metrics before anything is trained or written: what does not fit is said in
one sentence, with the shapes. B samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_map

from nbtools.data import TARGET, Draws, Pack, gather
from nbtools.errors import NbtoolsError, TrainError
from nbtools.train.device import autocast, out_of_memory
from nbtools.train.evaluation import forward
from nbtools.train.metrics import Batch, score
from nbtools.train.state import TrainState
from nbtools.train.task import lr_of, spoken

ASSERTING = ("cuda",)  # devices whose kernels end the process where a class is out of range
SAMPLES, MOST = 8, 10**8  # numbers of labels that are looked through: larger ones are masks, which take seconds


def rehearse(state: TrainState, pack: Pack) -> None:
    """Raise TrainError if the network does not take the pack's samples, or loss and metrics what it returns. Weights and
    random states stay as they are."""
    task, plan, model, device = state.task, state.applied.while_training(), state.model, state.device
    ends = extremes(pack)
    ids = [*pack.ids("train")[: min(SAMPLES, plan.batch_size)], *ends]
    running: list[tuple[nn.Module, Any]] = []  # layers and what they got, the innermost last
    hooks = (  # of all modules, since one of TorchScript takes none of its own
        register_module_forward_pre_hook(lambda layer, given: running.append((layer, given))),
        register_module_forward_hook(lambda *_: running.pop() and None),
    )
    batch, outputs = {}, None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            raw = {name: tensor.to(device) for name, tensor in gather(pack, np.array(ids)).items()}
            batch, outputs = forward(task, model, raw, plan, device)
            if device.type in ASSERTING:
                require_classes(task, outputs, batch, plan)
            with autocast(plan, device, model):
                if task.card is not None:
                    score(task.metrics, outputs, batch, task.card)
                    require_augment(state, raw)
                require_loss(task, outputs, batch, plan)
            lr_of(task, plan, 0.0)
    except NbtoolsError:
        raise
    except Exception as error:
        if not out_of_memory(error) and (outputs is None or not isinstance(error, AttributeError)):
            names = f"; its lowest and highest classes: {', '.join(str(pack.names[i]) for i in ends)}"
            said = explained(state, running, outputs, batch, error)
            raise TrainError(said + names * isinstance(error, IndexError)) from error
        return  # a loss may ask the network for more than outputs: training will tell
    finally:
        for hook in hooks:
            hook.remove()


def extremes(pack: Pack) -> list[int]:
    """Return samples with the two lowest and the two highest classes: one may be ignored."""
    samples: dict[int, None] = {}
    ids = np.concatenate([pack.ids("train"), pack.ids("val")])
    for name in {TARGET, "label"} & set(pack.read) - pack.offsets.keys():
        if pack.arrays[name].dtype.kind in "iu" and pack.arrays[name].size <= MOST:
            values = pack.arrays[name][ids]
            low, high = values.min(), values.max()
            inner = values.min(where=values != low, initial=high), values.max(where=values != high, initial=low)
            for number in (low, high, *inner):
                samples[int(ids[np.argmax(values == number) // (values.size // len(ids))])] = None
    return list(samples)


@torch.enable_grad()
def require_loss(task: Any, outputs: Any, batch: Batch, plan: Any) -> None:
    def tracked(value: Any) -> Any:  # for a loss that works on gradients; not a leaf, which refuses work in place
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().requires_grad_().clone() if floats else value

    outputs = tree_map(tracked, outputs)
    loss = task.loss(lambda *_, **__: outputs, batch, plan)
    if not isinstance(loss, Tensor) and not (isinstance(loss, tuple) and len(loss) == 2):
        rule = f"{spoken(task)}: loss must return (sum, count), or a tensor: the mean, or a term per sample"
        raise TrainError(f"{rule}; got a {type(loss).__name__}")


def require_classes(task: Any, outputs: Any, batch: Batch, plan: Any) -> None:
    try:
        require_loss(task, *tree_map(lambda t: t.cpu() if isinstance(t, Tensor) else t, (outputs, batch)), plan)
    except Exception as error:
        if isinstance(error, IndexError) or "out of bounds" in str(error):
            raise
        return  # others, as of a loss with tensors of its own on the GPU, come again there


def require_augment(state: TrainState, raw: Batch) -> None:
    draws = Draws(state.applied.seed, 0, raw["id"])
    state.task.batch(raw, state.applied, draws)
    if state.task.augment and not draws.count:
        rule = f"{spoken(state.task)}: its `batch` leaves out augment={state.task.augment!r}"
        raise TrainError(f"{rule}; begin it with batch = super().batch(raw, plan, draws), or leave augment out")


def explained(state: TrainState, running: list[Any], outputs: Any, batch: Batch, error: Exception) -> str:
    """Return the sentence about what does not fit."""
    why, columns = (str(error).splitlines() or [type(error).__name__])[0], state.card.columns
    names = [name for name in state.card.options.get("inputs") or columns if name in columns and name != TARGET]
    start, data = f"{spoken(state.task)}: ", f"the pack's {', '.join(f'{name} {columns[name]}' for name in names)}"
    if outputs is not None:
        logits, y = getattr(outputs, "logits", outputs), batch.get(TARGET)
        target = f" and y {shape(y)} {str(y.dtype).removeprefix('torch.')}" if isinstance(y, Tensor) else ""
        classes = f" of {len(state.card.classes)} classes" if state.card.classes else ""
        start += f"the loss or a metric does not take outputs {shape(logits)}{target}{classes}"
        return f"{start}: {why}; change the last layer, or loss and metrics"
    if not running:
        return f"{start}its `batch` or `infer` does not take {data}: {why}; change it, or pack other data"
    layer, given = running[-1]
    where = next((f".{name}" for name, each in state.model.named_modules() if each is layer and name), "")
    told = type(layer).__name__ if list(layer.children()) else str(layer)
    place = f"{type(state.model).__name__}{where} {told}" if where else told
    got = ", ".join(
        ", ".join(f"{name} {shape(each[name])}" for name in names if name in each)
        if isinstance(each, dict)
        else shape(each)
        for each in given
    )
    start += f"the network does not take {data}: {place} got {got or 'nothing'}"
    return f"{start}: {why}; change the network, or pack other data"


def shape(value: Any) -> str:
    """Return a tensor's shape as text, its first axis as B."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"({', '.join(['B', *map(str, value.shape[1:])])}{',' * (value.dim() == 1)})" if value.dim() else "()"
