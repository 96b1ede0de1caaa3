"""classify and regress: the tasks of one line, for a network and a pack of `nb.pack`.

B samples, K classes, D values.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from nbtools.data import TARGET, Card, Draws
from nbtools.errors import TrainError
from nbtools.train.augment import strengths
from nbtools.train.defaults import (
    answers,
    as_input,
    expressions,
    layout_of,
    moments_as_text,
    packed_dataset,
    scale_of,
    shape_of,
)
from nbtools.train.metrics import Batch, Pair, best_of, class_logits, listed, logits_of, score, values_like
from nbtools.train.plan import Plan
from nbtools.train.task import Task, Tensors

Model = nn.Module | Callable[..., nn.Module]
Loss = Callable[[Any, Tensor], Tensor | Pair]
CROSS_ENTROPY = (nn.CrossEntropyLoss, nn.NLLLoss)
LOGISTIC = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)
LOGISTIC_FUNCTIONS = (F.binary_cross_entropy_with_logits, F.multilabel_soft_margin_loss)
UNSCALED = (*LOGISTIC, nn.BCELoss, nn.KLDivLoss, nn.PoissonNLLLoss, nn.SoftMarginLoss)  # y means something as it is
UNSCALED_FUNCTIONS = (
    *LOGISTIC_FUNCTIONS,
    *(F.binary_cross_entropy, F.kl_div, F.poisson_nll_loss, F.soft_margin_loss),
)


def classify(
    model: Model,
    *,
    metrics: Any = ("accuracy",),
    augment: Collection[str] | Mapping[str, float] = (),
    loss: Loss | None = None,
    plan: Plan | None = None,
    pretrained: bool = False,
    optimizer: Any = None,
    schedule: Callable[[Any], Any] | None = None,
) -> Task:
    """Return the task of naming the class of a sample of an `nb.pack`: `nb.fit(nb.classify(net), nb.pack("pictures"))`.

    model: a module, of which each run trains a copy, or a function that makes one: of parameters called `classes` (how
    many there are), `inputs` (features, or channels of an image), `card` and `plan`, as far as it has them. It returns
    logits (B, K), as a tensor, `.logits` or ["out"]; its forward takes columns of the pack by name, else in order.
    Frozen parameters stay frozen, and so do the statistics of norm layers that have no others. metrics: accuracy,
    top5_accuracy, balanced_accuracy, f1, or functions of (outputs, batch) that return (sum, count); the first name
    chooses the best checkpoint. augment: crop, flip, rotate, colour, erase, mixup; a mapping gives strengths. loss: of
    (outputs, y), None: cross entropy; y is (B,) int64, with mixup (B, K) probabilities; it returns a term per sample,
    their mean, or (sum, count); cross entropy with weights is divided by these. plan: the settings to start from.
    pretrained: whether its weights are, for which advice starts from a lower lr; frozen parameters say so too.
    optimizer: a class of torch.optim, or a functools.partial of one, called with (groups, lr=plan.lr), or a function
    of (groups, plan). schedule: a function of plan that returns f(progress), the factor on plan.lr at 0 to 1 of the
    planned epochs. Raises TrainError.
    """
    return Classes(model, metrics, augment, loss, plan, pretrained, optimizer, schedule, caller())


def regress(
    model: Model,
    *,
    metrics: Any = ("mae",),
    augment: Collection[str] | Mapping[str, float] = (),
    loss: Loss | None = None,
    plan: Plan | None = None,
    pretrained: bool = False,
    optimizer: Any = None,
    schedule: Callable[[Any], Any] | None = None,
) -> Task:
    """Return the task of predicting the values of a sample, (B,), (B, D) or arrays of any shape, of an `nb.pack`.

    As `classify`; the network returns values of the targets' shape, also (B, 1) for (B,), and images as (B, C, H, W).
    The targets are standardised: mean 0 and standard deviation 1 over the training split. Metrics (mae, mse, or
    functions) and predictions are in the targets' own unit, images of bytes in 0…1. loss: of (outputs, standardised y),
    both of y's shape; None: squared error. The losses of probabilities, counts and signs get y as it is: torch's
    BCEWithLogits, BCE, MultiLabelSoftMargin, KLDiv, PoissonNLL and SoftMargin; of logits the answers are probabilities.
    """
    return Values(model, metrics, augment, loss, plan, pretrained, optimizer, schedule, caller())


def caller() -> str:
    """Return the module that calls classify or regress, where a run looks for the task's name."""
    return sys._getframe(2).f_globals.get("__name__", "__main__")


class Own(Task):
    """What `classify` and `regress` return has this in common."""

    kind: str  # of the targets
    made: str  # what a sentence calls it
    wrong: str  # what is said of other targets
    card: Any = None

    def __init__(
        self,
        model: Model,
        metrics: Any,
        augment: Any,
        loss: Loss | None,
        plan: Plan | None,
        pretrained: bool,
        optimizer: Any,
        schedule: Any,
        module: str,
    ):
        if not callable(model):
            raise TrainError(f"model must be a torch.nn.Module or a function that makes one, got {model!r}")
        if plan is not None and not isinstance(plan, Plan):
            raise TrainError(f"plan must be a nb.Plan, got {type(plan).__name__}; give an Advice or a Panel to nb.fit")
        if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
            rule = f"loss {type(loss).__name__} has parameters, which are not trained"
            raise TrainError(f"{rule}; write a Task whose model holds them")
        self.network, self.measured, self.given_loss, self.pretrained = model, listed(metrics), loss, pretrained
        self.augment, self.PLAN, self.BEST = strengths(augment), plan or Plan(), best_of(metrics)
        self.__module__ = module
        if optimizer is not None:
            self.given_optimizer, self.optimizer = optimizer, maker_of(optimizer)
        if schedule is not None:
            if not callable(schedule) or isinstance(schedule, type):
                rule = "schedule must be a function of the plan that returns f(progress), a factor on lr"
                raise TrainError(f"{rule}, got {shown(schedule)}; such as schedule=lambda plan: lambda t: 1 - t")
            self.schedule = schedule

    def model(self, card: Card, plan: Any) -> nn.Module:
        came = card.options["kind"] if packed_dataset(card) else "none of nb.pack"
        if came != self.kind:
            raise TrainError(
                f"{self.made} needs a pack of nb.pack whose targets are {self.kind}, got {came}; {self.wrong}"
            )
        network: Any = self.network
        if isinstance(network, nn.Module):
            return network  # `build` copies it
        first = card.options["inputs"][0]
        shape = shape_of(card, first) or (1,)
        width = shape[0] if layout_of(card, first) else shape[-1]
        offered = {"classes": len(card.classes), "inputs": width, "card": card, "plan": plan}
        try:
            wanted = inspect.signature(network).parameters.values()
        except ValueError:  # of a function written in C
            wanted = []
        plain = [p for p in wanted if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if unknown := [p.name for p in plain if p.default is p.empty and p.name not in offered]:
            rule = f"the function that makes the network has the parameter {unknown[0]!r}"
            raise TrainError(f"{rule}, but can get only {', '.join(offered)}; rename it, or give it a default")
        return network(**{p.name: offered[p.name] for p in plain if p.name in offered})

    def terms(self, outputs: Tensor, y: Tensor) -> Pair:
        """Return (sum, count) of the loss that was given."""
        loss = self.given_loss
        if isinstance(loss, nn.Module):
            copies = vars(self).setdefault("_losses", {})
            loss = copies[y.device] if y.device in copies else copies.setdefault(y.device, moved(loss, y.device))
        made: Any = loss(outputs, y) if loss is not None else None
        if isinstance(made, tuple):
            return made
        if made.dim():
            return made.sum(), made.numel()
        return (made, weights(loss, y)) if getattr(loss, "reduction", "mean") == "sum" else (made * len(y), len(y))


class Classes(Own):
    kind, made = "classes", "nb.classify(…)"
    wrong = (
        "nb.regress is for values. Labels that are floats become classes with astype(int), one-hot ones with argmax(1)"
    )

    def loss(self, model: Any, batch: Batch, plan: Any) -> Pair:
        y, outputs = batch[TARGET], model(batch)
        if self.given_loss is not None:
            return self.terms(logits_of(outputs), y)
        return F.cross_entropy(class_logits(outputs, self.card), y, reduction="sum"), len(y)

    def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, Pair]:
        return score(self.measured, outputs, batch, self.card)

    def tensors(self, card: Card, plan: Any) -> tuple[Tensors, Tensors]:
        return expressions(card), {"output": ((), "a logit for each of the classes; their softmax: probabilities")}


class Values(Own):
    kind, made = "values", "nb.regress(…)"
    wrong = "nb.classify is for classes. Whole numbers are values with nb.pack(…, classes=False), or as floats"

    def model(self, card: Card, plan: Any) -> nn.Module:
        network = super().model(card, plan)
        if card.columns[TARGET].kind == "ragged":
            rule = "nb.regress needs targets of one shape, and these are sequences of any length"
            raise TrainError(f"{rule}; write a Task with model, loss, metrics and decode")
        return network

    def batch(self, raw: Batch, plan: Any, draws: Draws | None) -> Batch:
        if TARGET in raw:
            raw = {**raw, TARGET: as_input(raw[TARGET], self.card, TARGET).float()}
        return super().batch(raw, plan, draws)

    def loss(self, model: Any, batch: Batch, plan: Any) -> Pair:
        y, outputs = batch[TARGET], model(batch)
        if not self.unscaled:
            mean, std = scale_of(self.card, TARGET, y.device)
            y = (y - mean) / std
        outputs = values_like(outputs, y.shape)
        if self.given_loss is not None:
            return self.terms(outputs, y)
        return F.mse_loss(outputs, y, reduction="sum"), y.numel()

    @property
    def unscaled(self) -> bool:
        return is_of(self.given_loss, UNSCALED, UNSCALED_FUNCTIONS)

    def in_units(self, outputs: Any) -> Tensor:
        """Return values in the targets' own unit."""
        values = logits_of(outputs)
        values = values_like(values, (len(values), *shape_of(self.card, TARGET)))
        if self.unscaled:
            return values.sigmoid() if is_of(self.given_loss, LOGISTIC, LOGISTIC_FUNCTIONS) else values
        mean, std = scale_of(self.card, TARGET, values.device)
        return values * std + mean

    def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, Pair]:
        return score(self.measured, self.in_units(outputs), batch, self.card)

    def decode(self, outputs: Any, card: Card) -> list[Any]:
        return answers(self.in_units(outputs), card)

    def tensors(self, card: Card, plan: Any) -> tuple[Tensors, Tensors]:
        (mean, std), shape = moments_as_text(card, TARGET), ", ".join(map(str, ("-1", *shape_of(card, TARGET))))
        text = f"output.reshape({shape})"
        if is_of(self.given_loss, LOGISTIC, LOGISTIC_FUNCTIONS):
            text = f"1 / (1 + np.exp(-{text}))"
        return expressions(card), {"output": ((), text if self.unscaled else f"{text} * {std} + {mean}")}


# -- what may be given


def is_of(loss: Any, kinds: tuple[type, ...], functions: tuple[Any, ...]) -> bool:
    """Return whether a loss is of one of these modules, or one of these functions or a partial of it."""
    return isinstance(loss, kinds) or getattr(loss, "func", loss) in functions


def moved(loss: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a loss on the device; of cross entropy not the mean but the sum, whose count `weights` gives."""
    loss = copy.deepcopy(loss).to(device)
    if isinstance(loss, CROSS_ENTROPY) and loss.reduction == "mean":
        loss.reduction = "sum"
    return loss


def weights(loss: Any, y: Tensor) -> Tensor | int:
    """Return what the mean of a loss divides its sum by: of cross entropy the weights of the samples' classes."""
    if not isinstance(loss, CROSS_ENTROPY) or y.is_floating_point():
        return len(y)
    counted = y != loss.ignore_index
    return (counted if loss.weight is None else loss.weight[y.where(counted, 0)] * counted).sum()


def maker_of(optimizer: Any) -> Callable[[Any, Any], Any]:
    """Return a function of (groups, plan) that makes the optimizer. Raises TrainError for anything but a class, a
    partial of one, and such a function."""
    kind = getattr(optimizer, "func", optimizer)
    if isinstance(kind, type) and issubclass(kind, Optimizer):
        if "lr" in getattr(optimizer, "keywords", {}):
            raise TrainError("optimizer: its lr is the plan's; leave lr out, and pass plan=nb.Plan(lr=…)")
        return lambda groups, plan: optimizer(groups, lr=plan.lr)
    if callable(kind) and not isinstance(kind, type | Optimizer):
        return optimizer
    rule = "optimizer must be a class of torch.optim, a functools.partial of one, or a function of (groups, plan)"
    why = ", which holds another network's parameters" if isinstance(optimizer, Optimizer) else ""
    raise TrainError(f"{rule}, got {shown(optimizer)}{why}; pass its class")


def shown(value: Any) -> str:
    kind = value if isinstance(value, type) else type(value)
    return f"{'the class' if kind is value else 'a'} {kind.__name__}"
