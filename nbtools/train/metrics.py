"""Metrics by name, and of functions, as sums that add up over batches.

B samples, K classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nbtools.data import TARGET, Card
from nbtools.errors import TrainError
from nbtools.train.call import logits_of

Batch = dict[str, Tensor]
Pair = tuple[Tensor | float, Tensor | float]
"""A metric's numerator and denominator, which add up; or two tensors (K,) of a mean over K classes, as mIoU is."""


def class_logits(outputs: Any, card: Card) -> Tensor:
    """(B, K) logits. Raises TrainError if they are not of the pack's classes."""
    logits, count = logits_of(outputs), len(card.classes)
    if logits.dim() < 2 or logits.shape[1] != count:
        raise TrainError(
            f"the network must return one logit for each of {count} classes, (B, {count}), got "
            f"{tuple(logits.shape)}; change its last layer, or pass a function: lambda classes: Net(classes)"
        )
    return logits


def values_like(outputs: Any, target: Tensor) -> Tensor:
    """The outputs in the target's shape: (B, 1) and (B,) would be broadcast to (B, B). Raises TrainError."""
    values = logits_of(outputs)
    if values.numel() != target.numel():
        raise TrainError(
            f"the network must return one value for each of the target, {tuple(target.shape)}, got "
            f"{tuple(values.shape)}; change its last layer"
        )
    return values.float().view(target.shape)


def top(logits: Tensor, y: Tensor, count: int) -> Pair:
    best = logits.topk(min(count, logits.shape[1]), 1).indices
    return (best == y[:, None]).any(1).sum(), y.numel()


def per_class(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(K,) each: how often a class is predicted rightly, is predicted, and is the truth."""
    predicted, classes = logits.argmax(1), torch.arange(logits.shape[1], device=y.device)
    guess, truth = predicted.view(-1, 1) == classes, y.view(-1, 1) == classes
    return (guess & truth).sum(0), guess.sum(0), truth.sum(0)


def recall(logits: Tensor, y: Tensor) -> Pair:
    right, _, truth = per_class(logits, y)
    return right, truth


def f1(logits: Tensor, y: Tensor) -> Pair:
    right, guess, truth = per_class(logits, y)
    return 2 * right, guess + truth


METRICS: dict[str, tuple[str, str, Callable[[Tensor, Tensor], Pair]]] = {
    "accuracy": ("classes", "", lambda logits, y: top(logits, y, 1)),
    "top5_accuracy": ("classes", "", lambda logits, y: top(logits, y, 5)),
    "balanced_accuracy": ("classes", "", recall),
    "f1": ("classes", "", f1),
    "mae": ("values", "-", lambda values, y: ((values - y).abs().sum(), y.numel())),
    "mse": ("values", "-", lambda values, y: ((values - y).square().sum(), y.numel())),
}
"""Name → what it is of, "-" where lower is better, (outputs, targets) → Pair. balanced_accuracy and f1: the mean over
classes of recall, and of 2 TP / (2 TP + FP + FN)."""


MEANINGS = {
    "loss": "what training minimises, as a mean over the split",
    "accuracy": "share of samples whose likeliest class is right",
    "top5_accuracy": "share of samples whose class is among the five likeliest",
    "balanced_accuracy": "accuracy of each class, averaged: rare classes count as much as frequent ones",
    "f1": "of each class, how far what is found is right and what is there is found; averaged over classes",
    "mae": "mean distance from the true value",
    "mse": "mean squared distance from the true value",
}
"""Metric → what it says, in plain words; a task's own are in `Task.MEANINGS`."""


def listed(metrics: Any) -> tuple[Any, ...]:
    """Names and functions as a tuple. Raises TrainError for an unknown name."""
    found = (metrics,) if isinstance(metrics, str) or callable(metrics) else tuple(metrics)
    for name in found:
        if not callable(name) and name not in METRICS:
            close = difflib.get_close_matches(str(name), METRICS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(METRICS)}, or pass a function"
            raise TrainError(f"metrics has no {name!r}; {hint}")
    return found


def best_of(metrics: Any) -> str:
    """What `Task.BEST` is, if the task says nothing else: the first metric that has a name, else -loss."""
    names = () if callable(metrics) else [name for name in listed(metrics) if not callable(name)]
    return f"{METRICS[names[0]][1]}{names[0]}" if names else "-loss"


def score(metrics: Any, outputs: Any, batch: Batch, card: Card | None) -> dict[str, Pair]:
    """Metric → Pair, of names and of functions of (outputs, batch), which return a Pair or a mapping of them."""
    found: dict[str, Pair] = {}
    for metric in listed(metrics):
        if callable(metric):
            one: Any = metric(outputs, batch)
            found |= one if isinstance(one, Mapping) else {getattr(metric, "__name__", "metric"): one}
            continue
        if card is None:
            raise TrainError(f"metrics: {metric!r} by name needs a pack of nb.pack; write metrics(outputs, batch)")
        y, (kind, _, measure) = batch[TARGET], METRICS[metric]
        found[metric] = measure(class_logits(outputs, card) if kind == "classes" else values_like(outputs, y), y)
    return found
