"""Evaluation: loss and metrics as exact sums, never augmented, in eval mode; and of a few samples first. K classes."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_map_only

from nbtools.data import SLOW, TARGET, Draws, Feed, Pack, bar, gather, in_order, lengths_of, open_feed
from nbtools.errors import NbtoolsError, TrainError
from nbtools.show import plural
from nbtools.train.defaults import mean_average_precision, score
from nbtools.train.device import DTYPES, autocast, run_or_explain, untouched, within_memory
from nbtools.train.meter import sum_dtype
from nbtools.train.own import classify
from nbtools.train.plan import Plan
from nbtools.train.ranks import Ranks
from nbtools.train.task import Batch, Pair, Task, TaskLike, as_sum, as_task, title_of

REHEARSED = 8  # samples


class Sums:
    """Running (numerator, denominator) sums by name, kept on the device until `read`; ranks: over all of these."""

    def __init__(self, device: torch.device | str = "cpu", ranks: Ranks | None = None):
        self.device, self.ranks = torch.device(device), ranks or Ranks()
        self.totals: dict[str, Tensor] = {}  # name → (2,), (2, K) or (2, K, bins) float64, float32 on MPS

    def add(self, pairs: Mapping[str, Pair]) -> None:
        to: Any = {"dtype": sum_dtype(self.device), "device": self.device}
        for name, pair in pairs.items():
            shape = np.shape(pair[0])
            if name not in self.totals:
                self.totals[name] = torch.zeros((2, *shape), **to)
            if self.totals[name].shape[1:] != shape:
                came = f"{tuple(self.totals[name].shape[1:])} and {tuple(shape)}"
                raise TrainError(f"metric {name} must be sums of one shape for all batches, got {came}; sum it up")
            for total, value in zip(self.totals[name], pair, strict=True):
                total += torch.as_tensor(value, **to) if isinstance(value, np.ndarray) else value

    def read(self) -> dict[str, float]:
        """Return name → numerator / denominator, 0 if nothing was counted; for classes, the mean over those counted."""
        values, totals = {}, dict[str, Any]()
        for there in self.ranks.gather(dict(zip(self.totals, map(Tensor.cpu, self.totals.values()), strict=True))):
            totals |= {name: totals.get(name, 0) + total for name, total in there.items()}  # some had no batch
        for name, total in totals.items():
            if total.dim() == 3:
                values[name] = mean_average_precision(*total)
            else:
                ratios = [n / d for n, d in zip(*total.view(2, -1).tolist(), strict=True) if d]
                values[name] = sum(ratios) / max(len(ratios), 1)
        return values


class Answered:
    """A network that has given its outputs of a batch: a loss in evaluation shares the forward pass of metrics."""

    def __init__(self, network: nn.Module, outputs: Any, batch: Any):
        self.network: Any = network
        self.outputs, self.batch, self.state = outputs, batch, state_of(batch)

    def __call__(self, *given: Any, **named: Any) -> Any:
        if not named and len(given) == 1 and given[0] is self.batch and state_of(self.batch) == self.state:
            return self.outputs
        return self.network(*given, **named)

    def __getattr__(self, name: str) -> Any:  # such as parameters(), of which a loss may add a norm
        return getattr(self.network, name)

    def __getitem__(self, key: Any) -> Any:
        return self.network[key]


def state_of(batch: Any) -> list[Any]:
    held = batch.items() if isinstance(batch, Mapping) else ()
    return [(n, id(x), x._version if isinstance(x, Tensor) and not x.is_inference() else 0) for n, x in held]


@torch.no_grad()
def forward(task: TaskLike, model: nn.Module, raw: Batch, plan: Plan) -> tuple[Any, Any]:
    """Return (batch, outputs) of a raw batch in evaluation: never augmented, in eval mode, which the next step ends."""
    task = as_task(task)
    model.eval()
    batch = task.batch(raw, plan, None)
    with autocast(plan, next(iter(raw.values())).device):
        outputs = task.infer(model, batch, plan)
    return batch, tree_map_only(Tensor, lambda x: x.float() if x.dtype in DTYPES.values() else x, outputs)


def scores(task: Task, model: nn.Module, raw: Batch, plan: Plan, metrics: Any = None) -> dict[str, Pair]:
    """Return loss and metrics of a batch, from one forward pass. metrics: others than the task's."""
    (batch, outputs), first = forward(task, model, raw, plan), next(iter(raw.values()))
    with torch.no_grad(), autocast(plan, first.device):
        loss = as_sum(task.loss(Answered(model, outputs, batch), batch, plan), len(first))
    return {"loss": loss, **score(task.metrics if metrics is None else metrics, outputs, batch, task.card)}


def costs(task: Task, model: nn.Module, raws: Iterable[Batch], plan: Plan, best: str) -> np.ndarray:
    """Return a metric, as in `Task.BEST`, and the loss of each raw batch, (2, n) float64, of which lower is better."""
    rows, sign, metrics = list[list[float]](), 1 if best.startswith("-") else -1, () if best == "-loss" else None
    for raw in raws:
        (sums := Sums(next(iter(raw.values())).device)).add(scores(task, model, raw, plan, metrics))
        values = sums.read()
        rows.append([sign * values[best.removeprefix("-")], values["loss"]])
    return np.array(rows).reshape(-1, 2).T


def score_split(
    task: Task, model: nn.Module, pack: Pack, plan: Plan, split: str, sums: Sums, feed: Feed | None = None
) -> Iterator[int]:
    """Add loss and metrics of a split to sums, of several ranks in turns; yield after each batch how many samples it
    had. At most `plan.eval_samples`, always the same. Raises TrainError if the split is empty, or memory ends."""
    ids, most, ranks = pack.ids(split), plan.eval_samples, sums.ranks
    if not len(ids):
        there = ", ".join(f"{name}: {count:,}" for name, count in pack.splits.items() if count)
        fix = f"choose one that is not ({there}) with split=, or pack data of its own: {split}=…"
        raise TrainError(f"{pack.folder}: the {split} split is empty; {fix}")
    if most is not None and most < len(ids):
        ids = ids[np.linspace(0, len(ids) - 1, most).round().astype(int)]
    feed = feed or run_or_explain(partial(open_feed, pack, plan, sums.device), "opening the pack")
    batches = in_order(ids, lengths_of(pack, ids), plan.micro_batch_size or plan.batch_size)
    for raw in feed(batches[ranks.rank :: ranks.world]):
        pairs, reason = within_memory(partial(scores, task, model, raw, plan))
        if pairs is None:
            rule = f"out of memory evaluating {plural(len(raw['id']), 'sample')} ({reason})"
            fix = "set a smaller micro_batch_size, which evaluations take too"
            raise TrainError(f"{rule}; {fix}", entry="Out of memory")
        sums.add(pairs)
        yield len(raw["id"])


def evaluate(task: Task, model: nn.Module, pack: Pack, plan: Plan, split: str) -> dict[str, float]:
    """Return metric → value over what the network can read of a split. Raises TrainError if that is empty."""
    sums, pack = Sums(next(model.parameters()).device), task.part(pack, plan)
    shown = {"total": len(pack.ids(split)), "unit": " samples", "leave": False, "delay": SLOW}
    with bar(desc=f"evaluating the {split} split", **shown) as counted, untouched(sums.device):
        for number in score_split(task, model, pack, plan.replace(eval_samples=None), split, sums):
            counted.update(number)
    return sums.read()


def rehearse(state: Any, pack: Pack) -> None:
    """Raise TrainError, with shapes, unless network, loss and metrics take the pack's samples. No state changes."""
    task, model, plan, device = state.task, state.model, state.applied.while_training(), state.device
    first, target = pack.ids("train")[:REHEARSED], pack.arrays.get(TARGET, np.zeros(()))
    if pack.options.get("kind") == "classes" and target.ndim == 1:  # a loss may not take the highest one
        first = np.append(first, pack.ids("train")[np.argmax(target[pack.ids("train")])])
    raw = {name: tensor.to(device) for name, tensor in gather(pack, first).items()}
    what = "the network or its `batch` does not take the pack's "
    what += ", ".join(f"{name} {column}" for name, column in pack.columns.items())
    odd = [p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype != torch.float32]
    try:
        with torch.no_grad(), untouched(device):
            if task.card is not None:
                if not {*model.parameters()}.isdisjoint(task.model(state.card, plan).parameters()):
                    rule = f"{title_of(task)}: model returns the same network each time, so runs share its weights"
                    raise TrainError(f"{rule}; make a new one in it, or pass it to nb.classify, which copies it")
                task.batch(raw, plan, Draws(plan.seed, 0, raw["id"]))
            ends, before = dict[Any, Any](), {name: x.shape for name, x in model.state_dict().items()}
            with register_module_forward_hook(lambda layer, _, output: ends.update({type(layer): output})):
                batch, outputs = forward(task, model, raw, plan)
            if grown := [name for name, x in model.state_dict().items() if x.shape != before.get(name)]:
                rule = f"{title_of(task)}: the first forward pass creates {grown[0]}, which no optimizer would train"
                raise TrainError(f"{rule}; make it in __init__, or call the network on a sample first")
            shapes = (tuple(getattr(value, "shape", ())) for value in (outputs, raw.get(TARGET)))
            what = "the loss or a metric does not take outputs {}, y {}".format(*shapes)
            if device.type == "cuda":  # whose kernels end the process where a class is out of range
                with suppress(RuntimeError):  # of a loss with tensors of its own on the GPU
                    check_batch(task, model, *tree_map_only(Tensor, Tensor.cpu, (outputs, batch)), plan=plan)
            with autocast(plan, device):
                check_batch(task, model, outputs, batch, plan)
            if not pack.splits["val"] and (plan.early_stop or plan.schedule == "plateau"):
                state.events.append("without a validation split early_stop and plateau do nothing; pack with val=0.1")
            if isinstance(task, classify) and (last := task.spoiling_layer(outputs, ends)):
                state.events.append(f"{task.spoilt}; leave out the {last} at its end")
            if half := [p.dtype for p in state.parameters if p.dtype in DTYPES.values()]:
                state.events.append(f"the weights are {half[0]}, too coarse for small updates; net.float() is not")
    except torch.OutOfMemoryError:
        return  # the first step takes smaller parts
    except NbtoolsError:
        raise
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        fix = "; whole numbers are not converted: pack float32, or pixels as uint8 images" * ("take the pack" in what)
        fix = f"; the weights are {odd[0]}: pass net.float()" if odd else fix
        if "does not require grad" in why:
            why += ": evaluations record no gradients; compute those that the loss needs under torch.enable_grad()"
        raise TrainError(f"{title_of(task)}: {what}: {why}; make them match{fix * ('type' in why)}") from error


def check_batch(task: Any, model: nn.Module, outputs: Any, batch: Any, plan: Any) -> None:
    """Raise an error where loss or metrics do not take these outputs, or the loss returns what cannot be added up."""
    as_sum(task.loss(Answered(model, outputs, batch), batch, plan), 1)
    names = ["loss", *score(task.metrics, outputs, batch, task.card)]
    if task.BEST.lstrip("-") not in names or (task.card is not None and task.BEST in ("loss", "mae", "mse")):
        rule = f"BEST must be one of {', '.join(names)}, with a minus where lower is better"
        raise TrainError(f"{title_of(task)}: {rule}, got {task.BEST!r}; correct it")
