"""Metrics by name, and of functions, as sums that add up over batches. B samples, K classes or labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nbtools.data import TARGET, Card
from nbtools.errors import TrainError
from nbtools.train.plan import require_known

Batch = dict[str, Tensor]
Pair = tuple[Tensor | float, Tensor | float]
"""A metric's numerator and denominator, which add up; (K,) each for a mean over K classes, as mIoU is; (K, BINS) each,
of `binned`, for mean average precision."""
BINS, WIDTH = 2048, 1 / 64  # logits from -16 to 16, between which average precision tells no finer than this


# -- outputs


def logits_of(outputs: Any) -> Tensor:
    """Return the tensor of outputs: themselves, their `.logits` (transformers), or their "out" (torchvision)."""
    for tensor in (outputs, getattr(outputs, "logits", None), outputs.get("out") if hasattr(outputs, "get") else None):
        if isinstance(tensor, Tensor):
            return tensor
    rule = f"the network returns a {type(outputs).__name__} without a tensor as .logits or ['out']"
    raise TrainError(f"{rule}; return the tensor, or write a Task with model, loss, metrics and decode")


def class_logits(outputs: Any, card: Card) -> Tensor:
    """Return logits (B, K). Raises TrainError if they are not of the pack's classes."""
    logits, count = logits_of(outputs), len(card.classes)
    if logits.dim() < 2 or logits.shape[1] != count:
        rule = f"the network must return one logit for each of {count} classes, (B, {count}), got {tuple(logits.shape)}"
        raise TrainError(f"{rule}; change its last layer, or pass a function: lambda classes: Net(classes)")
    return logits


def values_like(outputs: Any, shape: Sequence[int]) -> Tensor:
    """Return outputs in the targets' shape, from which they may differ by axes of length 1, or as flat rows (B, D):
    (B, 1) and (B,) would be broadcast to (B, B). Raises TrainError for other shapes."""
    values, shape = logits_of(outputs), tuple(shape)
    alike = [n for n in values.shape if n != 1] == [n for n in shape if n != 1]
    if not alike and values.shape != (shape[0], math.prod(shape[1:])):
        rule = f"the network must return one value for each element of the target, {shape}, got {tuple(values.shape)}"
        raise TrainError(f"{rule}; change its last layer")
    return values.float().reshape(shape)


# -- metrics


def top(count: int, logits: Tensor, y: Tensor) -> Pair:
    best = logits.topk(min(count, logits.shape[1]), 1).indices
    return (best == y[:, None]).any(1).sum(), y.numel()


def per_class(logits: Tensor, y: Tensor, f1: bool) -> Pair:
    """Return, of each class, recall TP / (TP + FN) or F1, 2 TP / (2 TP + FP + FN), as two tensors (K,). y: classes
    (B,), or labels (B, K), of which those above 0.5 are predicted."""
    count = logits.shape[1]
    predicted, true = (logits > 0, y) if y.dim() > 1 else (F.one_hot(logits.argmax(1), count), F.one_hot(y, count))
    hits = (predicted * true).sum(0)
    return (2 * hits, predicted.sum(0) + true.sum(0)) if f1 else (hits, true.sum(0))


def binned(logits: Tensor, y: Tensor) -> Pair:
    """Return how many samples have each label, and how many there are, by the bin of their logit, (K, BINS) each."""
    bins = (logits.float() / WIDTH + BINS // 2).long().clamp(0, BINS - 1).t()  # (K, B)
    zeros, true = torch.zeros(len(bins), BINS, device=logits.device), y.t().float()
    return zeros.scatter_add(1, bins, true), zeros.scatter_add(1, bins, torch.ones_like(true))


def mean_average_precision(true: Tensor, all: Tensor) -> float:
    """Return Σ (recall_n - recall_(n-1)) · precision_n, averaged over the labels that some sample has, from the sums of
    `binned`; scikit-learn's definition."""
    hits, chosen = (each.cpu().double().flip(1).cumsum(1) for each in (true, all))  # from the highest logit down
    average = (true.cpu().flip(1) * hits / chosen.clamp(min=1)).sum(1) / hits[:, -1]
    return float(average.nanmean().nan_to_num())  # 0 / 0 of a label that no sample has


METRICS: dict[str, tuple[str, str, Callable[[Tensor, Tensor], Pair]]] = {
    "accuracy": ("classes", "", partial(top, 1)),
    "top5_accuracy": ("classes", "", partial(top, 5)),
    "balanced_accuracy": ("classes", "", partial(per_class, f1=False)),
    "f1": ("classes or labels", "", partial(per_class, f1=True)),
    "map": ("labels", "", binned),
    "mae": ("values", "-", lambda values, y: ((values - y).abs().sum(), y.numel())),
    "mse": ("values", "-", lambda values, y: ((values - y).square().sum(), y.numel())),
}
"""Name → kinds of target, "-" where lower is better, (outputs, targets) → Pair."""


def listed(metrics: Any) -> tuple[Any, ...]:
    """Return names and functions as a tuple. Raises TrainError for an unknown name."""
    each = (metrics,) if isinstance(metrics, str) or callable(metrics) else tuple(metrics)
    for name in each:
        if not callable(name):
            require_known("metrics has no", str(name), METRICS, TrainError)
    return each


def name_of(metric: Any) -> str:
    """Return the name under which a metric is reported that returns no mapping."""
    return metric if isinstance(metric, str) else getattr(metric, "__name__", type(metric).__name__)


def score(metrics: Any, outputs: Any, batch: Batch, card: Card | None) -> dict[str, Pair]:
    """Return metric → Pair, of names and of functions of (outputs, batch), which return a Pair or a mapping of them.
    Raises TrainError for anything else, and for a name that is taken."""
    pairs: dict[str, Pair] = {}
    for metric in listed(metrics):
        made = metric(outputs, batch) if callable(metric) else by_name(metric, outputs, batch[TARGET], card)
        for name, pair in (made if isinstance(made, Mapping) else {name_of(metric): made}).items():
            if name == "loss" or name in pairs:
                raise TrainError(f"metrics: the name {name!r} is taken; rename the function, or return {{name: pair}}")
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                came = f"a tensor of shape {tuple(pair.shape)}" if isinstance(pair, Tensor) else repr(pair)
                raise TrainError(f"metrics: {name} must be (sum, count), which add up over batches, got {came}")
            pairs[name] = (pair[0], pair[1])
    return pairs


def by_name(metric: str, outputs: Any, y: Tensor, card: Card | None) -> Pair:
    kinds, _, measure = METRICS[metric]
    kind = card.options.get("kind", "none") if card is not None else "not of nb.pack"
    if card is None or kind not in kinds:
        rule = f"metrics: {metric!r} is for {kinds} of nb.pack, but the targets of the pack are {kind}"
        raise TrainError(f"{rule}; choose another, or write metrics(outputs, batch)")
    return measure(values_like(outputs, y.shape) if kind == "values" else class_logits(outputs, card), y)
