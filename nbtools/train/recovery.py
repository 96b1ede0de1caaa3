"""Recovery around a step: from out of memory, at any allocation, and from losses that are not finite."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from nbtools.data import Draws
from nbtools.errors import TrainError
from nbtools.train.device import autocast, within_memory
from nbtools.train.state import TrainState
from nbtools.train.step import attempt, clear_gradients, differentiate, parts_of_share, release, together, update
from nbtools.train.task import Batch

LEFT_OUT = 3  # steps with a non-finite loss that a run skips: more are no accident


class Diverged(TrainError):
    """The loss is no longer a number, or no step counts. steps: the first and last of the interval in which it
    happened. setting: which one to change; of any but lr it is certain."""

    def __init__(self, message: str, steps: tuple[int, int], setting: str = "lr"):
        super().__init__(message, entry="NaN")
        self.steps, self.setting = steps, setting

    def _render_traceback_(self) -> list[str]:
        """Shown by IPython instead of a traceback: no line of code is at fault."""
        return [f"{type(self).__name__}: {self}"]


def train_step(
    state: TrainState, raw: Batch, epoch_size: float, size: int | None = None
) -> tuple[Tensor, Tensor | float]:
    """`attempt` until there is enough memory: where it runs out, the micro batch is halved and the batch tried again;
    the effective batch and lr stay. An attempt allocates all that it needs before it changes the first weight, so that
    nothing is applied twice. For a batch that is smaller than the others, such as an epoch's last, none of this lasts
    longer than its step; where the others fitted, it is tried once more before it is divided.

    The first pass under a plan, and each larger than all before it, is where memory runs out if it does: there random
    states and buffers are kept. Where it runs out in a later one, since another process took memory, dropout draws
    other numbers, and BatchNorm's statistics count some samples twice.

    size: samples of the whole batch, of which several ranks have a share each; None: of raw. There the others wait amid
    their own pass, so that memory which runs out on one ends them all. Raises TrainError.
    """
    size = size or len(raw["id"])
    act = partial(checked if state.position.step < state.recovery.careful_until else attempt, state, raw, epoch_size)
    if state.ranks is not None:
        done, reason = within_memory(partial(act, size))
        if done is None:
            rule = f"out of memory on rank {state.ranks.rank} of {state.ranks.world} ({reason})"
            raise TrainError(f"{rule}; set a smaller micro_batch_size", entry="Out of memory")
        return done
    elements, kept = sum(tensor.numel() for tensor in raw.values()), None
    most = state.proven[1] if state.proven[0] is state.applied else 0
    proven = elements <= most
    if not proven:
        state.capture_rng()
        kept, _ = within_memory(partial(buffers, state))
    micro = state.recovery.micro
    small = size < (micro or state.applied.batch_size)
    again = small and proven
    try:
        while True:
            done, reason = within_memory(partial(act, size))
            if done is not None:
                if not proven:
                    state.proven = state.applied, max(elements, most)
                return done
            if again:
                again = False
                state.events.append("out of memory: a small batch is tried once more, since larger ones fitted")
                release(state)
            else:
                halve(state, size, reason, " for this step" if small else "")
            if not proven:
                state.restore_rng()
            if kept is not None:
                restore(state, kept)
    except ValueError as error:
        if state.recovery.micro != 1 or micro == 1 or "more than 1 value per channel" not in str(error):
            raise
        state.recovery.micro = 2
        rule = "out of memory with more than one sample at a time, which BatchNorm needs"
        raise TrainError(f"{rule}; use a smaller network or samples", entry="Out of memory") from None
    finally:
        if small:
            state.recovery.micro = micro


def buffers(state: TrainState) -> list[Tensor]:
    """Copies of what a forward pass changes in the model."""
    return [buffer.clone() for buffer in state.model.buffers()]


def restore(state: TrainState, kept: list[Tensor]) -> None:
    for buffer, before in zip(state.model.buffers(), kept, strict=True):
        buffer.copy_(before)


def halve(state: TrainState, size: int, reason: str, until: str) -> None:
    """Choose the next smaller micro batch, and free what the failed attempt left behind. until: how long, in words."""
    now = min(state.recovery.micro or size, size)
    if now == 1:
        rule = f"out of memory with one sample at a time ({reason})"
        raise TrainError(f"{rule}; use a smaller network or samples", entry="Out of memory")
    state.events.append(f"out of memory: micro batch {now} → {now // 2}{until}; effective batch and lr unchanged")
    state.recovery.micro = now // 2
    release(state)


def checked(state: TrainState, raw: Batch, epoch_size: float, size: int) -> tuple[Tensor, Tensor | float]:
    """An attempt that is skipped, without any effect, if the loss or a gradient is not finite."""
    kept = buffers(state)
    loss_sum, count = differentiate(state, raw) if state.ranks is None else together(state, raw, size)
    if bad := first_bad(state, raw, loss_sum, size):
        restore(state, kept)
        refuse(state, *bad)
        return torch.zeros_like(loss_sum), 0
    update(state, size, epoch_size)
    return loss_sum, count


def first_bad(state: TrainState, raw: Batch, loss_sum: Tensor, size: int) -> tuple[str, list[int]] | None:
    """The first tensor of this step that is not finite: of the batch, the weights, a layer, the loss, a gradient; and
    the samples' ids. On several ranks all find something, since they share the sum, and agree on the earliest.

    Under fp16 gradients that overflow are how the scaler finds its scale: it skips such steps by itself.
    """
    task, plan, model = state.task, state.applied, state.model
    named = model.named_parameters() if state.scaler is None else ()
    after = [("loss", loss_sum), *((f"gradient of {name}", p.grad) for name, p in named if p.grad is not None)]
    after = [name for name, tensor in after if not finite(tensor)]
    if not after:
        return None
    inputs: list[str] = []
    layers: list[str] = []

    def look(name: str, out: Any) -> None:
        if not finite(out):
            layers.append(name)

    hooks = [
        module.register_forward_hook(lambda _m, _i, out, name=name: look(name, out))
        for name, module in model.named_modules()
        if name and not list(module.children())
    ]
    try:
        for part in parts_of_share(state, raw, size):
            batch = task.batch(part, plan, Draws(plan.seed, state.position.epoch, part["id"]))
            inputs += [f"batch[{name!r}]" for name, tensor in batch.items() if not finite(tensor)]
            with torch.no_grad(), autocast(plan, state.device, model):
                task.loss(model, batch, plan)
    finally:
        for hook in hooks:
            hook.remove()
    weights = [f"weight {name}" for name, p in model.named_parameters() if not finite(p)]
    kinds = enumerate((inputs, weights, [f"output of layer {name}" for name in layers], after))
    found = next((kind, names[0], raw["id"].tolist()) for kind, names in kinds if names)
    _, bad, ids = found if state.ranks is None else min(state.ranks.gather(found), key=itemgetter(0))
    return bad, ids


def finite(tensor: Any) -> bool:
    return not isinstance(tensor, Tensor) or not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def refuse(state: TrainState, bad: str, ids: list[int]) -> None:
    """Skip a bad step, and report it. Raises Diverged if that happens more often than by accident."""
    clear_gradients(state.parameters)
    state.recovery.refused += 1
    # Where a weight or a layer is the first that is bad, training has diverged, and any sample would do the same.
    ids = ids if bad.startswith(("batch[", "loss", "gradient")) else []
    shown = f" (sample ids {', '.join(map(str, ids[:16]))}{' …' if len(ids) > 16 else ''})" if ids else ""
    state.events.append(f"step {state.step + 1} skipped: {bad} is not finite{shown}")
    if state.recovery.refused > LEFT_OUT:
        raise Diverged(
            f"four steps had to be skipped, the last: {state.events[-1]}{'; check these samples' if ids else ''}",
            (state.step, state.step),
        )
