"""One optimizer step: micro-batches, mixed precision, the true mean of the whole batch, clipping, update."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from nbtools.data import Draws
from nbtools.errors import TrainError
from nbtools.train.device import DTYPES, autocast, recurrent_in_float32, within_memory
from nbtools.train.schedule import lr_at
from nbtools.train.state import TrainState
from nbtools.train.task import Batch, Task

LEFT_OUT = 3  # steps with a loss that is not finite that a run leaves out: more are no accident


class Diverged(TrainError):
    """The loss is no longer a number. steps: the first and last of the steps among which it happened. A notebook shows
    the sentence without a traceback: no line of code is at fault."""

    def __init__(self, message: str, steps: tuple[int, int]):
        super().__init__(message)
        self.steps = steps

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


def step(task: Task, state: TrainState, raw: Batch, epoch_size: int) -> tuple[Tensor, Tensor | float]:
    """Train on one raw batch; returns its (loss sum, count), still on the device.

    The gradient is that of sum / count over the whole batch, in however many micro-batches. Out of memory: the micro
    batch is halved and the same batch tried again; effective batch and lr stay, and `state.events` says so. A step
    allocates all that it needs before it changes the first weight, so that nothing is applied twice.

    The first pass under a plan, and each larger than all before it, is where memory ends if it does: there random
    states and buffers are kept, so that a failed pass leaves no trace in them. Where it ends at a later one, since
    another process took memory, dropout draws other numbers, and BatchNorm's statistics count some samples twice.
    """
    elements = sum(tensor.numel() for tensor in raw.values())
    proven = state.proven[0] is state.plan and elements <= state.proven[1]
    kept = None if proven else within_memory(lambda: Kept(state))[0]
    while True:
        done, reason = within_memory(lambda: attempt(task, state, raw, epoch_size))
        if done is not None:
            if not proven:
                state.proven = state.plan, elements
            return done
        halve(state, len(raw["id"]), reason)
        if kept is not None:
            kept.restore(state)


class Kept:
    """What a forward pass changes: random states, and the model's buffers."""

    def __init__(self, state: TrainState):
        self.buffers = [buffer.clone() for buffer in state.model.buffers()]
        self.rng = torch.get_rng_state()
        self.cuda_rng = torch.cuda.get_rng_state(state.device) if state.device.type == "cuda" else None

    def restore(self, state: TrainState) -> None:
        for buffer, kept in zip(state.model.buffers(), self.buffers, strict=True):
            buffer.copy_(kept)
        torch.set_rng_state(self.rng)
        if self.cuda_rng is not None:
            torch.cuda.set_rng_state(self.cuda_rng, state.device)


def attempt(task: Task, state: TrainState, raw: Batch, epoch_size: int) -> tuple[Tensor, Tensor | float]:
    plan, optimizer, size = state.plan, state.optimizer, len(raw["id"])
    if not state.model.training:
        state.model.train()
    buffers = [b.clone() for b in state.model.buffers()] if state.careful else []
    clear_gradients(state.parameters)  # before the forward: an interrupt after backward leaves none to the next step
    loss_sum, count = accumulate(task, state, raw) if state.micro and state.micro < size else backward(task, state, raw)
    if state.scaler is not None and (plan.clip_norm is not None or state.careful):
        state.scaler.unscale_(optimizer)
    if state.careful and (bad := first_bad(task, state, raw, loss_sum)):
        for buffer, kept in zip(state.model.buffers(), buffers, strict=True):
            buffer.copy_(kept)
        if state.scaler is not None:
            state.scaler.update()  # else it takes the next step's unscaling for a second one of this step
        refuse(state, raw, bad)
        return torch.zeros_like(loss_sum), 0
    if plan.clip_norm is not None:
        clip_gradients(state.parameters, plan.clip_norm)
    middle = (state.samples - state.skipped + size / 2) / epoch_size  # at its start a warmup, at its end a cosine is 0
    state.lr = lr_at(plan, middle, state.drops)
    for group in optimizer.param_groups:
        group["lr"] = state.lr * group.get("lr_scale", 1.0)
    update(state, size)
    return loss_sum, count


def backward(
    task: Task, state: TrainState, raw: Batch, denominator: int | None = None
) -> tuple[Tensor, Tensor | float]:
    """Forward and backward of one micro-batch; gradients of loss sum / denominator (its own count where None)."""
    plan = state.plan
    batch = task.batch(raw, plan, Draws(plan.seed, state.epoch, raw["id"]))
    if plan.channels_last:
        batch = {k: v.contiguous(memory_format=torch.channels_last) if v.dim() == 4 else v for k, v in batch.items()}
    if plan.amp == "off":
        loss_sum, count = task.loss(state.network, batch, plan)
        differentiate(state, loss_sum, denominator or count)
    else:
        with recurrent_in_float32(plan, state.device, state.model):  # backward may compute activations again
            with torch.autocast(state.device.type, DTYPES[plan.amp]):
                loss_sum, count = task.loss(state.network, batch, plan)
            differentiate(state, loss_sum, denominator or count)
    return loss_sum.detach(), count


def differentiate(state: TrainState, loss_sum: Tensor, denominator: Tensor | float) -> None:
    loss = loss_sum / at_least_one(denominator)
    (loss if state.scaler is None else state.scaler.scale(loss)).backward()


def accumulate(task: Task, state: TrainState, raw: Batch) -> tuple[Tensor, Tensor | float]:
    """Several micro-batches, one gradient: divided by the true count of all, known only at the end."""
    size = len(raw["id"])
    micro = state.micro or size
    parts = min(-(-size // micro), max(size // 2, 1) if micro > 1 else size)  # a part of one sample breaks BatchNorm
    bounds = [size * i // parts for i in range(parts + 1)]
    loss_sum, count = torch.zeros((), device=state.device), 0
    for start, end in pairwise(bounds):
        part = {name: tensor[start:end] for name, tensor in raw.items()}
        part_sum, part_count = backward(task, state, part, denominator=size)
        loss_sum, count = loss_sum + part_sum, count + part_count
    factor = size / at_least_one(count)
    if isinstance(factor, Tensor) or factor != 1:
        gradients = [p.grad for p in state.parameters if p.grad is not None]
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
    return loss_sum, count


def at_least_one(count: Tensor | float) -> Tensor | float:
    """A denominator: a batch in which nothing counts has loss 0, not NaN."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def clear_gradients(parameters: list[nn.Parameter]) -> None:
    """`optimizer.zero_grad()` does the same for 9 CPU-µs, this for less than one."""
    for parameter in parameters:
        parameter.grad = None


def clip_gradients(parameters: list[nn.Parameter], most: float) -> None:
    """Scale the gradients so that their norm, all taken together, is at most so much.

    The kernels of `nn.utils.clip_grad_norm_` and so its bits, without sorting tensors by device and dtype twice: a run
    has one device, and the foreach functions sort mixed dtypes by themselves. 31 CPU-µs a step instead of 57.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]
    factor = (most / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]


def update(state: TrainState, size: int) -> None:
    if state.scaler is None:
        state.optimizer.step()
    else:
        before = state.scaler.get_scale()
        state.scaler.step(state.optimizer)
        state.scaler.update()
        if state.scaler.get_scale() < before:  # the only sign of a skipped step; fp16 alone pays this sync
            state.skipped += size
            return
    if state.ema is not None:
        average(state.ema, state.model, state.plan.ema or 0.0)


@torch.no_grad()
def average(ema: AveragedModel, model: nn.Module, decay: float) -> None:
    """Update the moving average after the weights; buffers that are not floats, such as counters, are copied.

    `AveragedModel.update_parameters` with `get_ema_multi_avg_fn` gives the same bits of the floats. But it allocates
    for the counters, where memory could run out after the weights were updated, and copies a counter of its own to the
    GPU, which makes the host wait in every step.
    """
    first = not ema.n_averaged
    means, values = [], []
    ours, theirs = [*ema.module.parameters(), *ema.module.buffers()], [*model.parameters(), *model.buffers()]
    for mean, value in zip(ours, theirs, strict=True):
        if first or not mean.is_floating_point():
            mean.copy_(value)
        else:
            means.append(mean)
            values.append(value)
    if means:
        torch._foreach_lerp_(means, values, 1 - decay)  # pyright: ignore[reportPrivateImportUsage]
    ema.n_averaged += 1


def halve(state: TrainState, size: int, reason: str) -> None:
    """Choose the next smaller micro batch after an out-of-memory, and free what the failed pass left."""
    now = min(state.micro or size, size)
    if now == 1:
        raise TrainError(
            f"out of memory with one sample at a time ({reason}); take a smaller network or smaller samples"
        )
    half = max(1, now // 2)
    state.events.append(f"out of memory: micro batch {now} → {half}; effective batch and lr unchanged")
    state.take_parts(half)
    release(state)


def release(state: TrainState) -> None:
    """Free what a failed step left: gradients, and what the scaler knows about them."""
    clear_gradients(state.parameters)
    if state.scaler is not None:  # it may stand between unscaling and update, and take no second unscaling
        scaler = torch.amp.GradScaler(state.device.type)
        scaler.load_state_dict(state.scaler.state_dict())
        state.scaler = scaler
    gc.collect()
    if state.device.type == "cuda":
        torch.cuda.empty_cache()


def first_bad(task: Task, state: TrainState, raw: Batch, loss_sum: Tensor) -> str | None:
    """The first tensor of this step that is not finite: of the batch, the weights, a layer, the loss, a gradient.

    Under fp16 gradients that overflow are how the scaler finds its scale: it leaves such steps out by itself.
    """
    named = state.model.named_parameters() if state.scaler is None else ()
    gradients = [(f"gradient of {n}", p.grad) for n, p in named if p.grad is not None]
    if finite(loss_sum) and all(finite(g) for _, g in gradients):
        return None
    batch = task.batch(raw, state.plan, Draws(state.plan.seed, state.epoch, raw["id"]))
    layers: list[tuple[str, Any]] = []
    hooks = [
        module.register_forward_hook(lambda _m, _i, out, name=name: layers.append((f"output of layer {name}", out)))
        for name, module in state.model.named_modules()
        if name and not list(module.children())
    ]
    try:
        with torch.no_grad(), autocast(state.plan, state.device, state.model):
            task.loss(state.model, batch, state.plan)
    finally:
        for hook in hooks:
            hook.remove()
    inputs = [(f"batch[{name!r}]", tensor) for name, tensor in batch.items()]
    weights = [(f"weight {n}", p) for n, p in state.model.named_parameters()]
    return next(
        (name for name, t in [*inputs, *weights, *layers, ("loss", loss_sum), *gradients] if not finite(t)), "loss"
    )


def finite(tensor: Any) -> bool:
    return not isinstance(tensor, Tensor) or not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def refuse(state: TrainState, raw: Batch, bad: str) -> None:
    """Leave a bad step out, and say so; more than three of them are no accident.

    The samples are named where the batch, the loss or a gradient is the first that is bad. Where a weight or a layer
    is, training has diverged, and any sample would do the same.
    """
    clear_gradients(state.parameters)
    state.refused += 1
    ids = raw["id"].tolist() if bad.startswith(("batch[", "loss", "gradient")) else []
    shown = f" (sample ids {', '.join(map(str, ids[:16]))}{' …' if len(ids) > 16 else ''})" if ids else ""
    state.events.append(f"step {state.step + 1} left out: {bad} is not finite{shown}")
    if state.refused > LEFT_OUT:
        raise Diverged(
            f"four steps had to be left out, the last: {state.events[-1]}{'; look at these samples' if ids else ''}",
            (state.step, state.step),
        )
