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
from nbtools.train.task import lr_of, spoken, summed

SAMPLES = 8  # a loss may need more than one or two
ASSERTING = ("cuda",)  # devices whose kernels end the process where an index is out of range


def rehearse(state: TrainState, pack: Pack) -> None:
    """Raise TrainError if the network does not take the pack's samples, or loss and metrics what the network returns.
    Changes nothing: no weight, buffer or random state."""
    task, plan, model = state.task, state.applied.while_training(), state.model
    ids = pack.ids("train")[: min(SAMPLES, plan.batch_size)]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    running: list[tuple[nn.Module, Any]] = []  # layers and what they got, the innermost last
    hooks = (  # of all modules, since one of TorchScript takes none of its own
        register_module_forward_pre_hook(lambda layer, given: running.append((layer, given))),
        register_module_forward_hook(lambda *_: running.pop() and None),
    )
    batch, outputs = {}, None
    try:
        with torch.random.fork_rng(devices=[state.device] if state.device.type == "cuda" else []):
            if state.device.type in ASSERTING:
                require_classes(state, pack)
            raw = raw_of(state, pack, ids)
            batch, outputs = forward(task, model, raw, plan, state.device)
            with autocast(plan, state.device, model):
                require_loss(task, outputs, batch, plan)
                if task.card is not None:
                    score(task.metrics, outputs, batch, task.card)
                    require_augment(state, raw)
            lr_of(task, plan, 0.0)
    except NbtoolsError:
        raise
    except Exception as error:
        if out_of_memory(error) or (outputs is not None and isinstance(error, AttributeError)):
            return  # a loss may ask the network for more than outputs: training will tell
        why = (str(error).splitlines() or [type(error).__name__])[0]
        said = misfit_outputs(state, outputs, batch) if outputs is not None else misfit_inputs(state, running, len(ids))
        raise TrainError(said.format(why=why)) from error
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])


def raw_of(state: TrainState, pack: Pack, ids: Any) -> Batch:
    return {name: tensor.to(state.device) for name, tensor in gather(pack, np.asarray(ids)).items()}


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
    summed(loss, len(batch))


def require_augment(state: TrainState, raw: Batch) -> None:
    task, plan = state.task, state.applied
    draws = Draws(plan.seed, 0, raw["id"])
    task.batch(raw, plan, draws)
    if task.augment and not draws.count:
        rule = f"{spoken(task)}: its `batch` leaves out augment={task.augment!r}"
        raise TrainError(f"{rule}; begin it with batch = super().batch(raw, plan, draws), or leave augment out")


def require_classes(state: TrainState, pack: Pack) -> None:
    """Raise TrainError for a sample with a class that the loss has no place for, as torch says on a CPU."""
    for i in extremes(pack):
        given = forward(state.task, state.model, raw_of(state, pack, [i, i]), state.applied, state.device)
        try:
            batch, outputs = tree_map(on_cpu, given)
            require_loss(state.task, outputs, batch, state.applied)
        except Exception as error:
            if isinstance(error, IndexError) or "out of bounds" in str(error):  # others come again, and are explained
                why = str(error).splitlines()[0].rstrip(".")
                rule = f"{pack.folder}: sample {i} ({pack.names[i]}): {why}"
                fix = "correct the sample, leave it out, or give the network more classes"
                raise TrainError(f"{rule}; {fix}", entry="Device-side assert") from None


def on_cpu(value: Any) -> Any:
    value = value.cpu() if isinstance(value, Tensor) else value
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def extremes(pack: Pack) -> list[int]:
    """Return the samples with the two lowest and the two highest classes: one may be ignored."""
    samples: dict[int, None] = {}
    for name in {TARGET, "label"} & set(pack.read):
        values, ends = pack.arrays[name], pack.offsets.get(name)
        if values.dtype.kind in "iu" and len(values):
            low, high = values.min(), values.max()
            inner = values.min(where=values != low, initial=high), values.max(where=values != high, initial=low)
            for number in (low, high, *inner):
                row = int(np.argmax(values == number)) // (values.size // len(values))
                samples[row if ends is None else int(np.searchsorted(ends, row, "right")) - 1] = None
    return list(samples)


def misfit_inputs(state: TrainState, running: list[tuple[nn.Module, Any]], count: int) -> str:
    columns = state.card.columns
    names = [name for name in state.card.options.get("inputs") or columns if name in columns and name != TARGET]
    pack = f"the pack's {', '.join(f'{name} {columns[name]}' for name in names)}"
    if not running:
        return (
            f"{spoken(state.task)}: its `batch` or `infer` does not take {pack}: {{why}}; change it, or pack other data"
        )
    layer, given = running[-1]
    where = next((f".{name}" for name, each in state.model.named_modules() if each is layer and name), "")
    told = type(layer).__name__ if list(layer.children()) else str(layer)
    place = f"{type(state.model).__name__}{where} {told}" if where else told
    parts = [shape(each, count) for each in given]
    if len(given) == 1 and isinstance(given[0], dict):  # a batch, of which it takes these
        parts = [f"{name} {shape(given[0][name], count)}" for name in names if name in given[0]]
    rule = f"{spoken(state.task)}: the network does not take {pack}: {place} got {', '.join(parts) or 'nothing'}"
    return f"{rule}: {{why}}; change the network, or pack other data"


def misfit_outputs(state: TrainState, outputs: Any, batch: Batch) -> str:
    count, y = len(next(iter(batch.values()))), batch.get(TARGET)
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", outputs)
    target = f" and y {shape(y, count)} {str(y.dtype).removeprefix('torch.')}" if isinstance(y, Tensor) else ""
    classes = f" of {len(state.card.classes)} classes" if state.task.card is not None and state.card.classes else ""
    rule = f"{spoken(state.task)}: the loss or a metric does not take outputs {shape(logits, count)}{target}{classes}"
    return f"{rule}: {{why}}; change the last layer, or loss and metrics"


def shape(value: Any, count: int) -> str:
    """Return a tensor's shape as text, the samples as B."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    sizes = ["B" if not axis and size == count else str(size) for axis, size in enumerate(value.shape)]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
