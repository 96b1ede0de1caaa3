"""One optimizer step: draw the batch, forward in autocast, backward, clip, `optimizer.step()`, average. Around it, one
function halves the micro-batch when memory runs out, and one skips a step whose loss or gradient is not finite."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nbtools.data import Draws
from nbtools.errors import TrainError
from nbtools.train.defaults import Batch
from nbtools.train.device import autocast, give_back, within_memory
from nbtools.train.graph import Graphs, Sums
from nbtools.train.meter import Diverged
from nbtools.train.state import TrainState
from nbtools.train.task import as_sum, set_training, title_of

MAX_SKIPPED = 3  # steps with a non-finite loss that a run skips: more are no accident
FIXES = {  # patterns of torch's errors in a step → what to do
    "(sparse|dense) gradients|'Sparse(CPU|CUDA)'": "with Embedding(sparse=True) set sparse=False, or pass another "
    "optimizer, without clip_norm",
    "fused_": "the built-in optimizers are fused: pass optimizer=torch.optim.AdamW",
    "more than 1 value per channel": "BatchNorm needs two samples at a time: raise batch_size or micro_batch_size",
    "does not require grad": "compute the loss in torch only, without .item(), .detach(), argmax, NumPy and no_grad",
    "inplace operation": "write y = y + 1 in place of y += 1 in the network or the loss",
    "CUBLAS_WORKSPACE": "torch computed on the GPU before nbtools was imported: restart, and import nbtools first",
    "deterministic implementation": "set deterministic=False, or use another layer",
    "second time": "the network keeps what it computed for the last batch: detach it in forward",
}


@contextmanager
def explained() -> Iterator[None]:
    """Raise TrainError for torch's errors in a step whose cause is known."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not (fix := next((fix for pattern, fix in FIXES.items() if re.search(pattern, str(error))), "")):
            raise
        raise TrainError(f"{str(error).split('. ')[0].rstrip('.')}; {fix}") from error


@explained()
def train_step(state: TrainState, raw: Batch, size: int | None = None, halves: bool = True) -> Sums:
    """Train on one raw batch, or on this rank's share of one of `size` samples; return the (loss sum, count) of the
    whole batch, still on the device: with Plan.graph until the next step.

    Where memory runs out, the gradients are computed again in micro-batches of half the size, unless `halves` is False;
    effective batch and lr stay. After a loss that was not finite, steps are checked, and skipped without any effect if
    theirs is not. Raises TrainError where nothing fits, Diverged where more steps are skipped than accidents explain.
    """
    size, careful = size or len(raw["id"]), state.step < state.careful_until
    set_lr(state, size)
    if state.graphs is not None and not state.graphs.off and not careful:
        if (sums := within_memory(partial(replay, state, state.graphs, raw))[0]) is not None:
            return sums
        release(state)
    buffers = [buffer.clone() for buffer in state.model.buffers()] if careful else []
    sums = (gradients_in_memory if halves else gradients)(state, raw, size)
    if careful:
        named = () if state.scaler.is_enabled() else state.model.named_parameters()  # fp16's scaler skips by itself
        if lost := not_finite([("loss", sums[0]), *((f"gradient of {name}", p.grad) for name, p in named)]):
            return leave_out(state, raw, size, buffers, lost)
    update(state)
    return sums


def replay(state: TrainState, graphs: Graphs, raw: Batch) -> Sums:
    """Take a step as CUDA graphs repeat it: all of it but what the host decides, lr and epoch."""

    def whole(raw: Batch) -> Sums:
        sums = gradients(state, raw, len(raw["id"]))
        update(state)
        return sums

    def written() -> list[Tensor]:
        models = [state.model] if state.ema is None else [state.model, state.ema]
        moments = (value for value in state.moments().values() if isinstance(value, Tensor))
        return [*(tensor for model in models for tensor in (*model.parameters(), *model.buffers())), *moments]

    state.keys.of(state.applied.seed, state.epoch)
    kind = state.task, state.model, state.applied.amp, state.applied.channels_last
    return graphs.step(raw, state.applied.batch_size, whole, written, kind)


def gradients(state: TrainState, raw: Batch, size: int) -> Sums:
    """Compute the gradient of sum / count over the batch, of which raw is this rank's share; return (sum, count)."""
    ranks = state.ranks
    if not state.model.training:
        set_training(state.model)
    state.optimizer.zero_grad()  # before the forward: an interrupt after backward leaves none to the next step
    ranks.seed(state.applied.seed, state.step)
    parts = micro_batches(state, raw, size)
    if len(parts) == 1 and ranks.world == 1:
        return backward(state, raw, None)
    # DDP takes the mean of gradients: of sum / (size / shares), so of sum / size; the count is known only at the end.
    shares = ranks.shares(size)
    loss_sum, count = torch.zeros((), device=state.device), 0
    for part in parts:
        with nullcontext() if part is parts[-1] or ranks.world == 1 else state.network.no_sync():
            part_sum, part_count = backward(state, part, size / shares)
        loss_sum, count = loss_sum + part_sum, count + part_count
    loss_sum, count = ranks.total(loss_sum, count, shares)
    factor = size / (count + (count == 0))
    if isinstance(factor, Tensor) or factor != 1:
        kept = [p.grad for p in state.parameters if p.grad is not None]
        like = factor.to(kept[0].dtype) if isinstance(factor, Tensor) else factor  # else it takes a kernel for each
        torch._foreach_mul_(kept, like)  # pyright: ignore[reportPrivateImportUsage]
    return loss_sum, count


def backward(state: TrainState, raw: Batch, denominator: float | None) -> Sums:
    """Draw, forward and backward a micro-batch: add the gradient of sum / denominator (None: its own count)."""
    task, plan = state.task, state.applied
    batch = task.batch(raw, plan, Draws(plan.seed, state.epoch, raw["id"], state.keys))
    if plan.channels_last:
        images = {k: v for k, v in batch.items() if getattr(v, "ndim", 0) == 4}  # not a number, such as of mixup
        batch = {**batch, **{k: v.contiguous(memory_format=torch.channels_last) for k, v in images.items()}}
    with autocast(plan, state.device):
        loss_sum, count = as_sum(task.loss(state.network, batch, plan), len(raw["id"]))
    held = [] if state.step else vars(task).values()
    own = [p for each in held if isinstance(each, nn.Module) for p in each.parameters()]
    groups = [group for each in held for group in getattr(each, "param_groups", ())]  # of an optimizer of its own
    trained = {*state.names, *(p for group in groups for p in group["params"])}
    own = [p for p in (*own, *held) if isinstance(p, nn.Parameter) and p.requires_grad and p not in trained]
    if own and any(g is not None for g in torch.autograd.grad(loss_sum, own, retain_graph=True, allow_unused=True)):
        rule = f"the loss reads parameters that {title_of(task)} holds, which would not be trained"
        raise TrainError(f"{rule}; let its network hold them, or freeze them: requires_grad_(False)")
    terms = denominator or count  # a batch in which nothing counts has loss 0, not NaN
    state.scaler.scale(loss_sum / (terms + (terms == 0))).backward()  # scaled in fp16 only
    return loss_sum.detach(), count


def update(state: TrainState) -> None:
    """Clip the gradients, update the weights and their moving average."""
    plan, optimizer, scaler = state.applied, state.optimizer, state.scaler
    if not state.step and (idle := [name for p, name in state.names.items() if p.grad is None]):
        state.events.append(f"no gradient reaches {', '.join(idle[:3])}: no output that the loss reads depends on it")
    if plan.clip_norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(state.parameters, plan.clip_norm)
    scaler.step(optimizer)
    scaler.update()
    if state.ema is not None:
        average(state, state.ema.module)


def set_lr(state: TrainState, size: int) -> None:
    """Set the lr of a step of so many samples: that of its middle, so that a warmup rises and a cosine ends with 0."""
    groups = state.optimizer.param_groups
    lr = state.applied.lr_at((state.samples + size / 2) / state.epoch_size, state.best.drops, state.schedule)
    for group in groups:
        if isinstance(group["lr"], Tensor):  # where a CUDA graph reads it
            group["lr"].fill_(lr * group["lr_scale"])
        else:
            group["lr"] = lr * group["lr_scale"]
    state.lr = lr if state.built_in else float(groups[0]["lr"])


@torch.no_grad()
def average(state: TrainState, mean: nn.Module) -> None:
    """Update the moving average of weights and buffers; those that are not floats or not finite, or of another shape,
    are copied. `AveragedModel.update_parameters` copies its counter to the GPU in every step, so the host waits."""
    share = 1 - (state.applied.ema or 0) if state.step else 1.0  # the first average is the weights themselves
    means, latest = (dict(chain(each.named_parameters(), each.named_buffers())) for each in (mean, state.model))
    for name, value in latest.items():
        if name not in means or means[name].shape != value.shape:  # such as positions, made as they are needed
            part, _, own = name.rpartition(".")
            means[name] = value.clone()
            setattr(mean.get_submodule(part), own, means[name])
    floats = [name for name, value in latest.items() if value.is_floating_point()]
    torch._foreach_lerp_([means[name] for name in floats], [latest[name] for name in floats], share)  # pyright: ignore
    for name, value in latest.items():
        if not value.is_floating_point():
            means[name].copy_(value)
        elif not isinstance(value, nn.Parameter) and "running_" not in name:  # such as a mask of -inf
            means[name].copy_(torch.where(means[name].isfinite(), means[name], value))


def micro_batches(state: TrainState, raw: Batch, size: int) -> list[Batch]:
    """Return the parts of raw that take a forward pass each: of at most `state.micro` samples, and of at least two
    unless one is wanted, since a single one breaks BatchNorm. Each rank has as many, which SyncBatchNorm needs."""
    micro, own = state.micro, len(raw["id"])
    if micro is None:
        return [raw]
    shares = state.ranks.shares(size)
    smallest, largest = size // shares, -(-size // shares)
    count = min(-(-largest // micro), max(smallest // 2, 1) if micro > 1 else smallest)
    cuts = [own * i // count for i in range(count + 1)]
    return [{name: tensor[start:end] for name, tensor in raw.items()} for start, end in pairwise(cuts)]


def gradients_in_memory(state: TrainState, raw: Batch, size: int) -> Sums:
    """Compute `gradients`, in micro-batches of half the size if memory runs out. Nothing has been updated then, so
    nothing is applied twice; only BatchNorm's running statistics may count some samples twice. Raises TrainError where
    there is no smaller micro-batch, or other ranks wait in their own pass."""
    state.capture_rng()
    while True:
        sums, reason = within_memory(partial(gradients, state, raw, size))
        if sums is not None:
            return sums
        release(state)
        ranks, micro = state.ranks, min(state.micro or size, size)
        norms = any(isinstance(layer, _BatchNorm) for layer in state.model.modules())
        few = "two samples at a time, and BatchNorm needs two" if norms else "one sample at a time"
        rule = f"with {few} ({reason}); use a smaller network or samples"
        if ranks.world > 1:
            rule = f"on rank {ranks.rank} of {ranks.world} ({reason}); set a smaller micro_batch_size"
        if ranks.world > 1 or micro // 2 < 1 + norms:
            raise TrainError(f"out of memory {rule}", entry="Out of memory")
        state.micro = micro // 2
        state.events.append(f"out of memory: micro batch {micro} → {micro // 2}; effective batch and lr unchanged")
        state.restore_rng()


def release(state: TrainState) -> None:
    """Free what a failed step left: gradients, recorded steps, and the allocator's cache."""
    state.optimizer.zero_grad()
    state.forget_graphs()
    give_back()


def not_finite(named: Iterable[tuple[str, object]]) -> str:
    """Return the first name whose tensor has a number that is not finite; "" if none has."""
    floats = ((name, x) for name, x in named if isinstance(x, Tensor) and x.is_floating_point())
    return next((name for name, tensor in floats if not torch.isfinite(tensor).all()), "")


def leave_out(state: TrainState, raw: Batch, size: int, buffers: list[Tensor], lost: str) -> Sums:
    """Undo a step that has updated no weight yet, and report what is not finite: with the samples to look at, if it is
    in their batch. Several ranks agree on one. Raises Diverged where that happens too often to be an accident."""
    for buffer, value in zip(state.model.buffers(), buffers, strict=True):
        buffer.copy_(value)
    state.optimizer.zero_grad()
    plan, bad = state.applied, list[tuple[int, str, list[int]]]([(1, lost, [])])
    for part in micro_batches(state, raw, size):
        batch = state.task.batch(part, plan, Draws(plan.seed, state.epoch, part["id"]))
        if name := not_finite((f"batch[{name!r}]", tensor) for name, tensor in batch.items()):
            bad.append((0, name, part["id"].tolist()))
    _, name, ids = min(state.ranks.gather(min(bad)))
    named = f" (sample ids {', '.join(map(str, ids[:16]))}{' …' if len(ids) > 16 else ''})" if ids else ""
    what = f"step {state.step + 1} skipped: {name} is not finite{named}"
    state.events.append(what)
    state.skipped += 1
    if state.skipped > max(MAX_SKIPPED, state.step) and not ids and plan.amp != "fp16":
        rule = f"the {name} is not finite in the first {state.skipped} steps, before any weight was changed"
        raise TrainError(f"{rule}; correct it; targets may be negative, as nb.regress scales them", entry="NaN")
    if state.skipped > MAX_SKIPPED:
        message = f"more than {MAX_SKIPPED} steps had to be skipped, the last: {what}"
        raise Diverged(message + "; check these samples" * bool(ids), (state.step, state.step))
    return torch.zeros((), device=state.device), 0
