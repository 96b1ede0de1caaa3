"""One optimizer step: draw, forward, backward, clip, update. Failures are handled in `recovery`."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from nbtools.data import Draws
from nbtools.train.device import DTYPES, recurrent_in_float32
from nbtools.train.graph import Graphs
from nbtools.train.plan import lr_at
from nbtools.train.ranks import shares
from nbtools.train.state import TrainState
from nbtools.train.task import Batch, set_training, summed


def attempt(state: TrainState, raw: Batch, epoch_size: float, size: int | None = None) -> tuple[Tensor, Tensor | float]:
    """Train on one raw batch, or this rank's share of one of `size` samples; returns the (loss sum, count) of the whole
    batch, still on the device: with Plan.graph until the next step."""
    size = size or len(raw["id"])
    if state.graphs is not None and state.graphs.follow(state.applied):
        return replayed(state, state.graphs, raw, epoch_size)
    loss_sum, count = differentiate(state, raw) if state.ranks is None else together(state, raw, size)
    update(state, size, epoch_size)
    return loss_sum, count


def replayed(state: TrainState, graphs: Graphs, raw: Batch, epoch_size: float) -> tuple[Tensor, Tensor | float]:
    """`attempt`, as a CUDA graph where it is recorded. What the host does in a step, it does here: `recordable` is run
    only until it is recorded."""
    set_lr(state, len(raw["id"]), epoch_size)
    state.keys.of(state.applied.seed, state.position.epoch)
    found = graphs.step(raw, partial(recordable, state, share_of_weights(state)), partial(written, state))
    count_average(state)
    return found


def written(state: TrainState) -> list[Tensor]:
    """The tensors that a step changes, parameters first."""
    modules = [state.model] if state.ema is None else [state.model, state.ema]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return [*tensors, *state.moments().values()]


def recordable(state: TrainState, share: float, raw: Batch) -> tuple[Tensor, Tensor | float]:
    """A step without what the host does in it."""
    found = differentiate(state, raw)
    apply(state, len(raw["id"]), share)
    return found


def differentiate(state: TrainState, raw: Batch) -> tuple[Tensor, Tensor | float]:
    """The gradient of sum / count over the whole batch, in any number of micro-batches; returns (sum, count)."""
    if not state.model.training:
        set_training(state.model)
    clear_gradients(state.parameters)  # before the forward: an interrupt after backward leaves none to the next step
    size, micro = len(raw["id"]), state.recovery.micro
    if not micro or micro >= size:
        return backward(state, raw)
    loss_sum, count = torch.zeros((), device=state.device), 0
    for part in parts(raw, size, micro):
        part_sum, part_count = backward(state, part, denominator=size)
        loss_sum, count = loss_sum + part_sum, count + part_count
    scale_gradients(state, size, count)
    return loss_sum, count


def scale_gradients(state: TrainState, size: int, count: Tensor | float) -> None:
    """From sum / size to sum / count, which is known only after the last micro-batch."""
    factor = size / at_least_one(count)
    if isinstance(factor, Tensor) or factor != 1:
        gradients = [p.grad for p in state.parameters if p.grad is not None]
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]


def together(state: TrainState, raw: Batch, size: int) -> tuple[Tensor, Tensor | float]:
    """`differentiate` on several ranks: raw is this one's share of a batch of `size` samples. The mean of the ranks'
    gradients, which DDP takes in the last micro-batch, is that of sum / size, since each divides by size / ranks."""
    ranks, network = state.ranks, state.network
    assert ranks is not None
    ranks.seed(state.applied.seed, state.step)
    if not state.model.training:
        set_training(state.model)
    clear_gradients(state.parameters)
    own = ranks.counts(size)
    denominator = size / ranks.world if own else math.inf  # of padding: a gradient of 0
    loss_sum, count = torch.zeros((), device=state.device), 0
    some = list(parts_of_share(state, raw, size))
    for part in some:
        with nullcontext() if part is some[-1] else network.no_sync():
            part_sum, part_count = backward(state, part, denominator)
        if own:
            loss_sum, count = loss_sum + part_sum, count + part_count
    loss_sum, count = ranks.total(loss_sum, count)
    scale_gradients(state, size, count)
    return loss_sum, count


def parts_of_share(state: TrainState, raw: Batch, size: int) -> Iterator[Batch]:
    """The micro-batches of a share. SyncBatchNorm communicates in every forward pass: with it each rank has as many, by
    the largest share, but no more than the smallest share has samples."""
    ranks, micro, own = state.ranks, state.recovery.micro, len(raw["id"])
    if not micro:
        return iter([raw])
    if ranks is None or not state.applied.sync_batchnorm:
        return parts(raw, own, micro)
    count = len(shares(size, ranks.world)) - 1
    return cut(raw, own, min(count_parts(-(-size // count), micro), size // count))


def backward(state: TrainState, raw: Batch, denominator: float | None = None) -> tuple[Tensor, Tensor | float]:
    """Draw, forward and backward of a micro-batch: adds the gradient of sum / denominator (None: its own count)."""
    task, plan, network = state.task, state.applied, state.network  # another plan waits for the next step
    batch = task.batch(raw, plan, Draws(plan.seed, state.position.epoch, raw["id"], state.keys))
    if plan.channels_last:
        batch = {k: v.contiguous(memory_format=torch.channels_last) if v.dim() == 4 else v for k, v in batch.items()}
    if plan.amp == "off":
        loss_sum, count = summed(task.loss(network, batch, plan), len(raw["id"]))
        (loss_sum / at_least_one(denominator or count)).backward()
    else:
        with recurrent_in_float32(plan, state.device, state.model):  # backward may compute activations again
            with torch.autocast(state.device.type, DTYPES[plan.amp]):
                loss_sum, count = summed(task.loss(network, batch, plan), len(raw["id"]))
            loss = loss_sum / at_least_one(denominator or count)
            (loss if state.scaler is None else state.scaler.scale(loss)).backward()
    return loss_sum.detach(), count


def update(state: TrainState, size: int, epoch_size: float) -> None:
    """Set lr, clip, and update the weights and their moving average, on gradients of a batch of so many samples."""
    set_lr(state, size, epoch_size)
    apply(state, size, share_of_weights(state))
    count_average(state)


def set_lr(state: TrainState, size: int, epoch_size: float) -> None:
    """The lr of a step of so many samples, as a number; or in the tensors that CUDA graphs read."""
    plan, position = state.applied, state.position
    middle = (position.samples - state.skipped + size / 2) / epoch_size  # a warmup starts, a cosine ends with 0
    position.lr = lr_at(plan, middle, state.best.drops, state.schedule)
    for group in state.optimizer.param_groups:
        lr = position.lr * group["lr_scale"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def apply(state: TrainState, size: int, share: float) -> None:
    """Clip the gradients of so many samples, update the weights, and by this share of them their moving average."""
    plan, optimizer, scaler = state.applied, state.optimizer, state.scaler
    if plan.clip_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        clip_gradients(state.parameters, plan.clip_norm)
    if scaler is None:
        optimizer.step()
    else:
        scale: Any = scaler._scale  # where it is, on the device: `get_scale` would wait for it
        before, after = state.scales.tensor.split(1)
        before.copy_(scale)
        scaler.step(optimizer)
        scaler.update()
        after.copy_(scale)
        state.scales.send()
        state.unsure = size
    if state.ema is not None:
        average(state, share)


def parts(raw: Batch, size: int, micro: int) -> Iterator[Batch]:
    return cut(raw, size, count_parts(size, micro))


def count_parts(size: int, micro: int) -> int:
    """How many parts have at most `micro` samples, and at least two unless one is requested: a single sample breaks
    BatchNorm."""
    return min(-(-size // micro), max(size // 2, 1) if micro > 1 else size)


def cut(raw: Batch, size: int, count: int) -> Iterator[Batch]:
    for start, end in pairwise(size * i // count for i in range(count + 1)):
        yield {name: tensor[start:end] for name, tensor in raw.items()}


def at_least_one(count: Tensor | float) -> Tensor | float:
    """A denominator: a batch in which nothing counts has loss 0, not NaN."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def clear_gradients(parameters: list[nn.Parameter]) -> None:
    """`optimizer.zero_grad()` does the same for 9 CPU-µs, this for less than one."""
    for parameter in parameters:
        parameter.grad = None


def release(state: TrainState) -> None:
    """Free what a failed step left: gradients, recorded steps, and what the scaler knows about them."""
    clear_gradients(state.parameters)
    if state.graphs is not None:
        state.graphs.clear()
    if state.scaler is not None:  # it may stand between unscaling and update, and take no second unscaling
        scaler = torch.amp.GradScaler(state.device.type)
        scaler.load_state_dict(state.scaler.state_dict())
        state.scaler = scaler
    gc.collect()
    if state.device.type == "cuda":
        torch.cuda.empty_cache()


def clip_gradients(parameters: list[nn.Parameter], most: float) -> None:
    """`nn.utils.clip_grad_norm_`, its kernels and so its bits, without sorting tensors by device and dtype twice: a run
    has one device, and the foreach functions sort mixed dtypes by themselves. 31 CPU-µs a step instead of 57."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]
    factor = (most / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]


def share_of_weights(state: TrainState) -> float:
    """What the next moving average takes of the weights: all of them at first."""
    return 1 - (state.applied.ema or 0.0) if state.ema is not None and state.ema.n_averaged else 1.0


def count_average(state: TrainState) -> None:
    if state.ema is not None:
        state.ema.n_averaged += 1


@torch.no_grad()
def average(state: TrainState, share: float) -> None:
    """Update the moving average after the weights; buffers that are not floats, such as counters, are copied. A step
    that fp16 skips counts as one in which the weights stood still: whether it was skipped is not known yet.

    The bits of `AveragedModel.update_parameters` with `get_ema_multi_avg_fn`, which allocates for the counters, where
    memory could run out after the weights were updated, and copies its own counter to the GPU, which makes the
    host wait in every step.
    """
    assert state.ema is not None
    pairs = {mean: value for ours, theirs in state.averaged for mean, value in zip(own(ours), own(theirs), strict=True)}
    floats = [mean for mean in pairs if mean.is_floating_point()]
    others = [mean for mean in pairs if not mean.is_floating_point()]
    torch._foreach_lerp_(floats, [pairs[mean] for mean in floats], share)  # pyright: ignore[reportPrivateImportUsage]
    if others:
        torch._foreach_copy_(others, [pairs[mean] for mean in others])  # pyright: ignore[reportPrivateImportUsage]


def own(module: nn.Module) -> list[Tensor]:
    """A module's own parameters and buffers, without those of its children."""
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
