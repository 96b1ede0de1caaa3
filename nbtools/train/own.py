"""classify and regress: the tasks of one line, for a network and a pack of `nb.pack`.

B samples, K classes, D values.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbtools.data import TARGET, Card, Draws
from nbtools.errors import TrainError
from nbtools.train.augment import strengths
from nbtools.train.call import logits_of
from nbtools.train.defaults import (
    answers,
    as_input,
    expressions,
    moments_as_text,
    packed_dataset,
    require_fitting,
    scale_of,
    shape_of,
    width_of,
)
from nbtools.train.metrics import best_of, class_logits, listed, score, values_like
from nbtools.train.plan import Plan
from nbtools.train.task import Batch, Pair, Task, Tensors, spoken

Loss = Callable[[Any, Tensor], Tensor | Pair]
CROSS_ENTROPY = (nn.CrossEntropyLoss, nn.NLLLoss)
MAKERS = {"classes": "nb.classify", "values": "nb.regress"}  # kind of targets → what makes a task of them


def classify(
    model: nn.Module | Callable[..., nn.Module],
    *,
    metrics: Any = ("accuracy",),
    augment: Collection[str] | Mapping[str, float] = (),
    loss: Loss | None = None,
    plan: Plan | None = None,
    pretrained: bool = False,
) -> Task:
    """The task of naming the class of a sample of an `nb.pack`: `nb.fit(nb.classify(net), nb.pack("pictures"))`.

    model: a module, of which each run trains a copy, or a function that makes one: of parameters called `classes` (how
    many there are), `inputs` (features, or channels of an image), `card` and `plan`, as far as it has them. It returns
    logits (B, K), as a tensor, `.logits` or ["out"]; its forward takes columns of the pack by its signature. Frozen
    parameters stay frozen, and so do the statistics of norm layers that have no others. metrics: accuracy,
    top5_accuracy, balanced_accuracy, f1, or functions of (outputs, batch) that return (sum, count); the first name
    chooses the best checkpoint. augment: crop, flip, rotate, colour, erase, mixup; a mapping gives strengths. loss: of
    (outputs, y), None: cross entropy; y is (B,) int64, with mixup (B, K) probabilities; it returns a term per sample,
    their mean, or (sum, count); cross entropy with weights is divided by these. plan: the settings to start from.
    pretrained: whether its weights are, for which advice starts from a lower lr; frozen parameters say so too.
    Raises TrainError.
    """
    return Own("classes", model, metrics, augment, loss, plan, caller(), pretrained)


def regress(
    model: nn.Module | Callable[..., nn.Module],
    *,
    metrics: Any = ("mae",),
    augment: Collection[str] | Mapping[str, float] = (),
    loss: Loss | None = None,
    plan: Plan | None = None,
    pretrained: bool = False,
) -> Task:
    """The task of predicting the values of a sample, (B,), (B, D) or arrays of any shape, of an `nb.pack`.

    As `classify`; the network returns values of the targets' shape, also (B, 1) for (B,), and images as (B, C, H, W).
    The targets are standardised: mean 0 and standard deviation 1 over the training split. Metrics (mae, mse, or
    functions) and predictions are in the targets' own unit, images of bytes in 0…1. loss: of (outputs, standardised y),
    both of y's shape; None: squared error.
    """
    return Own("values", model, metrics, augment, loss, plan, caller(), pretrained)


def caller() -> str:
    """The module that calls classify or regress, where a run looks for the task's name."""
    return sys._getframe(2).f_globals.get("__name__", "__main__")


def on(loss: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a loss on the device; of cross entropy not the mean but the sum, whose count is that of `terms`."""
    loss = copy.deepcopy(loss).to(device)
    if isinstance(loss, CROSS_ENTROPY) and loss.reduction == "mean":
        loss.reduction = "sum"
    return loss


def terms(loss: Any, y: Tensor) -> Tensor | int:
    """What the mean of a loss divides its sum by: of cross entropy the weights of the samples' classes."""
    if not isinstance(loss, CROSS_ENTROPY) or y.is_floating_point():
        return len(y)
    counted = y != loss.ignore_index
    return (counted if loss.weight is None else loss.weight[y.where(counted, 0)] * counted).sum()


class Own(Task):
    """What `classify` and `regress` return. kind: `classes` or `values`."""

    def __init__(
        self,
        kind: str,
        model: Any,
        metrics: Any,
        augment: Any,
        loss: Loss | None,
        plan: Any,
        module: str,
        pretrained: bool = False,
    ):
        if not callable(model):
            raise TrainError(f"model must be a torch.nn.Module or a function that makes one, got {model!r}")
        if plan is not None and not isinstance(plan, Plan):
            raise TrainError(f"plan must be a nb.Plan, got {type(plan).__name__}; give an Advice or a Panel to nb.fit")
        if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
            rule = f"loss {type(loss).__name__} has parameters, which are not trained"
            raise TrainError(f"{rule}; write a Task whose model holds them")
        self.kind, self.network, self.measured, self.given_loss = kind, model, listed(metrics), loss
        self.pretrained = pretrained
        self.augment, self.PLAN, self.BEST = strengths(augment), plan or Plan(), best_of(metrics)
        self.__module__, self.made, self.losses = module, f"{MAKERS[kind]}(…)", {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "losses": {}}  # each run's copy of the task takes the loss as it is then

    def model(self, card: Card, plan: Any) -> nn.Module:
        if not packed_dataset(card) or (came := card.options["kind"]) != self.kind:
            came = f"{MAKERS[came]} is for them" if packed_dataset(card) and came in MAKERS else "make it with nb.pack"
            if self.kind == "values" and card.classes and all(map(str.isdecimal, card.classes)):
                came += (
                    ". Whole numbers are classes, unless they are packed with nb.pack(…, classes=False), or as floats"
                )
            if self.kind == "classes" and came.startswith(MAKERS["values"]):
                came += ". Labels that are floats become whole numbers with astype(int), one-hot ones with argmax(1)"
            raise TrainError(f"{MAKERS[self.kind]} needs a pack made by nb.pack whose targets are {self.kind}; {came}")
        if self.kind == "values" and card.columns[TARGET].kind == "ragged":
            rule = "nb.regress needs targets of one shape, and these are sequences of any length"
            raise TrainError(f"{rule}; write a Task with model, loss, metrics and decode")
        require_fitting(card, self.measured, ())
        network: Any = self.network
        if isinstance(network, nn.Module):
            return network  # `build` copies it
        offered = {"classes": len(card.classes), "inputs": width_of(card), "card": card, "plan": plan}
        try:
            wanted = inspect.signature(network).parameters.values()
        except ValueError:  # of a function written in C
            wanted = []
        plain = [p for p in wanted if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if unknown := [p.name for p in plain if p.default is p.empty and p.name not in offered]:
            rule = f"the function that makes the network has the parameter {unknown[0]!r}"
            raise TrainError(f"{rule}, but can get only {', '.join(offered)}; rename it, or give it a default")
        return network(**{p.name: offered[p.name] for p in plain if p.name in offered})

    def batch(self, raw: Batch, plan: Any, draws: Draws | None) -> Batch:
        if self.kind == "values" and TARGET in raw:
            raw = {**raw, TARGET: as_input(raw[TARGET], self.bound, TARGET).float()}
        return super().batch(raw, plan, draws)

    def loss(self, model: Any, batch: Batch, plan: Any) -> tuple[Tensor, Tensor | float]:
        y, outputs = batch[TARGET], model(batch)
        if self.kind == "values":
            mean, std = scale_of(self.bound, TARGET, y.device)
            y = (y - mean) / std
            outputs = values_like(outputs, y.shape)
        elif self.given_loss is None:
            outputs = class_logits(outputs, self.bound)
        else:
            outputs = logits_of(outputs)
        if self.given_loss is None:
            squared = self.kind == "values"
            found = F.mse_loss(outputs, y, reduction="sum") if squared else F.cross_entropy(outputs, y, reduction="sum")
            return found, y.numel() if squared else len(y)
        loss: Any = self.given_loss
        if isinstance(loss, nn.Module):
            if y.device not in self.losses:
                self.losses[y.device] = on(loss, y.device)
            loss = self.losses[y.device]
        found = loss(outputs, y)
        if isinstance(found, tuple):
            return found
        if found.dim():
            return found.sum(), found.numel()
        if getattr(loss, "reduction", "mean") == "sum":
            return found, terms(loss, y)
        return found * len(y), len(y)

    def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, Pair]:
        return score(self.measured, self.in_units(outputs), batch, self.bound)

    def decode(self, outputs: Any, card: Card) -> list[Any]:
        return answers(self.in_units(outputs), card)

    def in_units(self, outputs: Any) -> Any:
        """Values in the targets' own unit."""
        if self.kind == "classes":
            return outputs
        values = logits_of(outputs)
        values = values_like(values, (len(values), *shape_of(self.bound, TARGET)))
        mean, std = scale_of(self.bound, TARGET, values.device)
        return values * std + mean

    def tensors(self, card: Card, plan: Any) -> tuple[Tensors, Tensors]:
        if self.kind == "classes":
            return expressions(card), {"output": ((), "a logit for each of the classes; their softmax: probabilities")}
        (mean, std), shape = moments_as_text(card, TARGET), ", ".join(map(str, ("-1", *shape_of(card, TARGET))))
        return expressions(card), {"output": ((), f"output.reshape({shape}) * {std} + {mean}")}

    @property
    def bound(self) -> Card:
        if self.card is None:
            raise TrainError(f"{spoken(self)} has no data set yet; pass it to nb.fit or nb.TrainState with a pack")
        return self.card
