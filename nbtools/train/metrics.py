"""Metrics by name, and of functions, as sums that add up over batches.

B samples, K classes.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
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


def values_like(outputs: Any, shape: Sequence[int]) -> Tensor:
    """The outputs in the targets' shape: (B, 1) and (B,) would be broadcast to (B, B). Raises TrainError."""
    values = reshaped(found := logits_of(outputs), shape)
    if values is None:
        raise TrainError(
            f"the network must return one value for each element of the target, {tuple(shape)}, got "
            f"{tuple(found.shape)}; change its last layer"
        )
    return values


def reshaped(values: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Values (B, …) in a shape that differs by axes of length 1 only, or of which they are the flat rows (B, D); None
    for others, as it would mix up their axes."""
    alike = [n for n in values.shape if n != 1] == [n for n in shape if n != 1]
    flat = values.dim() == 2 and values.shape == (shape[0], math.prod(shape[1:]))
    return values.float().reshape(tuple(shape)) if alike or flat else None


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
    "loss": "the loss that training minimises, averaged over the split",
    "accuracy": "share of samples whose likeliest class is right",
    "top5_accuracy": "share of samples whose class is among the five likeliest",
    "balanced_accuracy": "accuracy of each class, averaged: rare classes count as much as frequent ones",
    "f1": "harmonic mean of precision and recall of each class, averaged over the classes",
    "mae": "mean distance from the true value",
    "mse": "mean squared distance from the true value",
    "train_loss": "mean over the samples of the epoch, each when it was trained on",
    "data_wait": "share of the time that training waited for its next batch",
    "epoch_time": "of training; evaluations are not in it",
    "lr": "learning rate of the last step",
}
"""Metric, or another column of an epoch → what it says, in plain words; a task's own are in `Task.MEANINGS`."""


def listed(metrics: Any) -> tuple[Any, ...]:
    """Names and functions as a tuple. Raises TrainError for an unknown name."""
    found = (unbound(metrics),) if isinstance(metrics, str) or callable(metrics) else tuple(metrics)
    for name in found:
        if not callable(name) and name not in METRICS:
            close = difflib.get_close_matches(str(name), METRICS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(METRICS)}, or pass a function"
            raise TrainError(f"metrics has no {name!r}; {hint}")
    return found


def unbound(metric: Any) -> Any:
    """The function of (outputs, batch) in `metrics = hit` of a class, which Python binds to the task as a method."""
    function = getattr(metric, "__func__", metric)
    if function is metric:
        return metric
    given = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    return function if len(given) == 2 and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in given) else metric


def name_of(metric: Any) -> str:
    """Under which name a metric is reported that is no mapping."""
    return metric if isinstance(metric, str) else getattr(metric, "__name__", type(metric).__name__)


def best_of(metrics: Any) -> str:
    """What `Task.BEST` is, if the task says nothing else: the first metric that has a name, else -loss."""
    names = () if callable(metrics) else [name for name in listed(metrics) if not callable(name)]
    return f"{METRICS[names[0]][1]}{names[0]}" if names else "-loss"


def score(metrics: Any, outputs: Any, batch: Batch, card: Card | None) -> dict[str, Pair]:
    """Metric → Pair, of names and of functions of (outputs, batch), which return a Pair or a mapping of them. Raises
    TrainError for anything else, and for a name that is taken."""
    found: dict[str, Pair] = {}
    for metric in listed(metrics):
        if callable(metric):
            one: Any = metric(outputs, batch)
        elif card is None:
            raise TrainError(f"metrics: {metric!r} by name needs a pack made by nb.pack; write metrics(outputs, batch)")
        else:
            y, (kind, _, measure) = batch[TARGET], METRICS[metric]
            one = measure(class_logits(outputs, card) if kind == "classes" else values_like(outputs, y.shape), y)
        for name, pair in (one if isinstance(one, Mapping) else {name_of(metric): one}).items():
            if name == "loss" or name in found:
                rule = f"metrics: {name!r} is " + (
                    "the loss, which is always reported" if name == "loss" else "there twice"
                )
                raise TrainError(f"{rule}; rename the function, or return {{name: (sum, count)}}")
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                came = f"a tensor of shape {tuple(pair.shape)}" if isinstance(pair, Tensor) else repr(pair)
                raise TrainError(f"metrics: {name} must be (sum, count), which add up over batches, got {came}")
            found[name] = (pair[0], pair[1])
    return found
