"""Steps with care, after a loss that was no number: each is checked before it counts, and one that is not finite is
skipped and says which tensor was the first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nbtools.data import Draws
from nbtools.train.device import autocast
from nbtools.train.meter import Diverged
from nbtools.train.state import TrainState
from nbtools.train.step import Sums, gradients_in_memory, micro_batches, set_lr, update
from nbtools.train.task import Batch

LEFT_OUT = 3  # steps with a non-finite loss that a run skips: more are no accident


def careful_step(state: TrainState, raw: Batch, epoch_size: float, size: int | None = None) -> Sums:
    """`train_step` that is skipped, without any effect, if its loss or a gradient is not finite. Raises Diverged where
    that happens more often than by accident."""
    size, kept = size or len(raw["id"]), [buffer.clone() for buffer in state.model.buffers()]
    set_lr(state, size, epoch_size)
    loss_sum, count = gradients_in_memory(state, raw, size)
    if bad := after_backward(state, loss_sum):
        for buffer, before in zip(state.model.buffers(), kept, strict=True):
            buffer.copy_(before)
        skip(state, *first_bad(state, raw, size, bad))
        return torch.zeros_like(loss_sum), 0
    update(state)
    return loss_sum, count


def after_backward(state: TrainState, loss_sum: Tensor) -> str:
    """What is not finite after backward, the same on all ranks; "" if all is. Under fp16 gradients that overflow are
    how the scaler finds its scale: it skips such steps by itself."""
    if not finite(loss_sum):
        return "loss"
    named = state.model.named_parameters() if state.scaler is None else ()
    return next((f"gradient of {name}" for name, p in named if not finite(p.grad)), "")


def first_bad(state: TrainState, raw: Batch, size: int, after: str) -> tuple[str, list[int]]:
    """The first tensor of this step that is not finite, and the samples to look at: of the batch, the weights, the
    outputs of a layer, else what was found after backward. Several ranks agree on the earliest."""
    task, plan, model = state.task, state.applied, state.model
    inputs: list[str] = []
    layers: list[str] = []

    def look(name: str, out: Any) -> None:
        layers.extend([] if finite(out) else [f"output of layer {name}"])

    leaves = [(name, module) for name, module in model.named_modules() if name and not list(module.children())]
    hooks = [m.register_forward_hook(lambda _m, _i, out, name=name: look(name, out)) for name, m in leaves]
    try:
        for part in micro_batches(state, raw, size):
            batch = task.batch(part, plan, Draws(plan.seed, state.position.epoch, part["id"]))
            inputs += [f"batch[{name!r}]" for name, tensor in batch.items() if not finite(tensor)]
            with torch.no_grad(), autocast(plan, state.device, model):
                task.loss(model, batch, plan)
    finally:
        for hook in hooks:
            hook.remove()
    weights = [f"weight {name}" for name, p in model.named_parameters() if not finite(p)]
    kind, bad = next((kind, names[0]) for kind, names in enumerate((inputs, weights, layers, [after])) if names)
    # Where a weight or a layer is the first that is bad, training has diverged, and any sample would do the same.
    ids = raw["id"].tolist() if kind in (0, 3) else []
    return min(state.ranks.gather((kind, bad, ids)))[1:]


def finite(tensor: Any) -> bool:
    return not isinstance(tensor, Tensor) or not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def skip(state: TrainState, bad: str, ids: list[int]) -> None:
    """Report a step that is left out. Raises Diverged if that happens more often than by accident."""
    state.optimizer.zero_grad()
    state.recovery.refused += 1
    shown = f" (sample ids {', '.join(map(str, ids[:16]))}{' …' if len(ids) > 16 else ''})" if ids else ""
    state.events.append(f"step {state.step + 1} skipped: {bad} is not finite{shown}")
    if state.recovery.refused > LEFT_OUT:
        raise Diverged(
            f"four steps had to be skipped, the last: {state.events[-1]}{'; check these samples' if ids else ''}",
            (state.step, state.step),
        )
