"""classify and regress: tasks in one line, for a pack of `nb.pack`. B samples, K classes or labels, D values."""

import copy
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, autocast, nn
from torch.nn import functional as F

from nbtools.data import TARGET, Card, Draws
from nbtools.errors import TrainError
from nbtools.train import defaults
from nbtools.train.defaults import Batch, Pair
from nbtools.train.plan import Plan
from nbtools.train.task import Task, as_sum, copied

CROSS_ENTROPY = (nn.CrossEntropyLoss, nn.NLLLoss)
LOGISTIC = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss, F.binary_cross_entropy_with_logits)
POISSON = (nn.PoissonNLLLoss, F.poisson_nll_loss)
KL = (nn.KLDivLoss, F.kl_div)
UNSCALED = (*LOGISTIC, *POISSON, *KL, nn.BCELoss, F.binary_cross_entropy, nn.SoftMarginLoss, F.soft_margin_loss)
"""Losses of probabilities, counts and signs: y means something as it is."""
METRICS = {"classes": ("accuracy",), "labels": ("map", "f1"), "values": ("mae",)}


class classify(Task):
    """The task of predicting a sample's class, or all its labels: `nb.fit(nb.classify(net), nb.pack("pictures"))`.

    model: a module, of which each run trains a copy, or a function that makes one from those it takes of `classes`
    (how many), `inputs` (features, or channels of an image), `card` and `plan`. It returns logits (B, K), as a tensor,
    `.logits` or ["out"]; its forward takes columns of the pack by name, else in order. metrics: accuracy (default),
    top5_accuracy, balanced_accuracy, f1; of labels map and f1 (default: both); or functions of (outputs, batch) that
    return (sum, count). The first name chooses the best checkpoint. augment: crop, flip, colour; a mapping gives
    strengths. loss: of (outputs, y), returns a term per sample, their mean, or (sum, count); default: cross entropy, of
    labels binary; y is (B,) int64, of labels (B, K) float32. plan: the settings to start from. pretrained: True if the
    weights are; advice then starts from a lower lr. optimizer: a class of torch.optim, or a functools.partial of one,
    called with (groups, lr=plan.lr), or a function of (groups, plan). schedule: a function of plan that returns
    f(progress), the factor on plan.lr at 0 to 1 of the planned epochs, also in place of its warmup. Raises TrainError.
    """

    kind = "classes"  # of the targets; labels are classes too
    spoilt = "the network returns probabilities, and the loss makes them of logits, so it learns slowly"
    card: Any = None

    def __init__(
        self,
        model: nn.Module | Callable[..., nn.Module],
        *,
        metrics: Any = None,
        augment: Collection[str] | Mapping[str, float] = (),
        loss: Callable[[Any, Tensor], Tensor | Pair] | None = None,
        plan: Plan | None = None,
        pretrained: bool = False,
        optimizer: Any = None,
        schedule: Callable[[Any], Any] | None = None,
    ):
        if not callable(model):
            raise TrainError(f"model must be a torch.nn.Module or a function that makes one, got {model!r}")
        if plan is not None and not isinstance(plan, Plan):
            raise TrainError(f"plan must be an nb.Plan, got {type(plan).__name__}; give an Advice or a Panel to nb.fit")
        if loss is not None and (isinstance(loss, type) or not callable(loss)):
            rule = "loss must be a function of (outputs, y), or a module such as nn.CrossEntropyLoss()"
            raise TrainError(f"{rule}, got {loss!r}; leave it out for the default")
        if self.kind == "classes" and is_of(loss, (nn.BCELoss, F.binary_cross_entropy)):
            rule = "loss takes probabilities, but metrics and answers take logits"
            raise TrainError(f"{rule}; leave out this loss, and the sigmoid at the network's end")
        if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
            rule = f"loss {type(loss).__name__} has parameters, which would not be trained"
            raise TrainError(f"{rule}; write a Task whose model holds them")
        self.network, self.pretrained, self.PLAN = model, pretrained, plan or Plan()
        self.chosen, self.augment = None if metrics is None else defaults.as_tuple(metrics), defaults.strengths(augment)
        self.given = {"loss": loss, "optimizer": optimizer, "schedule": schedule}
        self.criterion: Any = copy.deepcopy(loss).float() if isinstance(loss, nn.Module) else loss  # NumPy's weights
        if type(loss) in CROSS_ENTROPY and self.criterion.reduction == "mean":
            self.criterion.reduction = "sum"  # the mean is over the weights of a batch, see `terms`
        hooks = {"optimizer": optimizer and maker_of(optimizer), "schedule": schedule}
        vars(self).update({name: hook for name, hook in hooks.items() if hook is not None})
        self.made = f"nb.{type(self).__name__}(…)"
        self.__module__ = sys._getframe(1).f_globals.get("__name__", "__main__")  # where a run looks for its name

    @property
    def measured(self) -> Any:
        kind = self.card.options["kind"] if self.card is not None else self.kind
        return METRICS.get(kind, ()) if self.chosen is None else self.chosen

    def spoiling_layer(self, outputs: Any, ends: Mapping[Any, Tensor]) -> str:
        """Return the name of the network's last layer, where it is one that spoils its learning by this loss, also of a
        softmax that is no layer; else "". ends: kind of layer → its last result."""
        kinds: tuple[Any, ...] = () if self.criterion is not None else (nn.Softmax, nn.Sigmoid)
        if self.kind == "values":
            kinds = () if is_of(self.criterion, UNSCALED) else (nn.ReLU, nn.Softplus, nn.Sigmoid, nn.Tanh)
        values = defaults.logits_of(outputs).float() if kinds else torch.zeros(0)
        same = [k.__name__ for k in kinds if k in ends and torch.equal(ends[k].float().flatten(), values.flatten())]
        shares = nn.Softmax in kinds and self.card.options["kind"] == "classes" and values.shape[1] > 1
        if shares and (values >= 0).all():
            same += ["softmax"] * torch.allclose(values.sum(1), torch.ones_like(values[:, 0]), atol=1e-3)
        return same[0] if same else ""

    def model(self, card: Card, plan: Any) -> nn.Module:
        came = card.options["kind"] if defaults.packed_dataset(card) else "not of nb.pack"
        ragged = came == "values" and card.columns[TARGET].kind == "ragged"
        if ragged or (came != self.kind and (self.kind, came) != ("classes", "labels")):
            rule = f"{self.made} needs a pack of nb.pack whose targets are {self.kind}, but these are {came}"
            fix = "floats become classes with astype(int), one-hot rows with argmax(1); classes=False keeps numbers"
            fix = "several labels are lists of names, with classes=[…]" if ragged and self.kind == "classes" else fix
            fix = "name one: nb.pack(…, target=…)" if came == "none" else fix
            raise TrainError(f"{rule}; {fix}; for per-pixel classes or sequences, write a Task with model and loss")
        network: Any = self.network
        if isinstance(network, nn.Module):
            return copied(network)
        first = card.options["inputs"][0]
        width = (defaults.shape_of(card, first) or (1,))[0 if card.columns[first].layout else -1]
        offered = {"classes": len(card.classes), "inputs": width, "card": card, "plan": plan}
        parameters = inspect.signature(network).parameters.values()
        for p in parameters:
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in offered:
                rule = f"the function that makes the network has the parameter {p.name!r}"
                raise TrainError(f"{rule}, but can get only {', '.join(offered)}; rename it, or give it a default")
        return network(**{p.name: offered[p.name] for p in parameters if p.name in offered})

    def batch(self, raw: Batch, plan: Any, draws: Draws | None) -> Batch:
        if TARGET in raw and self.card.options["kind"] != "classes":
            raw = {**raw, TARGET: defaults.as_input(raw[TARGET], self.card, TARGET).float()}
        return super().batch(raw, plan, draws)

    def loss(self, model: Any, batch: Batch, plan: Any) -> Pair:
        y, outputs = batch[TARGET], defaults.logits_of(model(batch))
        if self.card.options["kind"] == "classes" and is_of(self.criterion, LOGISTIC):
            rule = "this loss takes 0 or 1 for each output, but y holds class indices"
            raise TrainError(f"{rule}; end the network with an output for each class, and leave out the loss")
        if self.criterion is not None:
            return terms(self.criterion, outputs, y)
        logits = defaults.class_logits(outputs, self.card)
        if self.card.options["kind"] == "labels":
            return F.binary_cross_entropy_with_logits(logits, y, reduction="sum"), y.numel()
        return F.cross_entropy(logits, y, reduction="sum"), len(y)

    def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, Pair]:
        return defaults.score(self.measured, outputs, batch, self.card)


class regress(classify):
    """The task of predicting the values of a sample, (B,), (B, D) or arrays of any shape, of an `nb.pack`.

    Its options are those of `classify`; metrics: mae (default), mse, or functions. The network returns values of the
    targets' shape, also (B, 1) for (B,), images as (B, C, H, W). The loss (default: squared error) takes targets
    standardised to mean 0 and standard deviation 1 over the training split, but torch's of probabilities, counts and
    signs (BCE, BCEWithLogits, MultiLabelSoftMargin, KLDiv, PoissonNLL, SoftMargin) take them as they are. Metrics and
    predictions are in the targets' own unit (mse in its square), images of bytes in 0…1; of logits and KLDiv
    probabilities, of Poisson rates.
    """

    kind = "values"
    spoilt = "targets are standardised to mean 0 and standard deviation 1, which the network cannot all reach"

    def loss(self, model: Any, batch: Batch, plan: Any) -> Pair:
        y = batch[TARGET]
        if not is_of(self.criterion, UNSCALED):
            mean, std = defaults.scale_of(self.card, TARGET, y.device)
            y = (y - mean) / std
        outputs = defaults.values_like(model(batch), y.shape)
        if self.criterion is not None:
            return terms(self.criterion, outputs, y)
        return F.mse_loss(outputs, y, reduction="sum"), y.numel()

    def in_units(self, outputs: Any) -> Tensor:
        values = defaults.logits_of(outputs)
        values = defaults.values_like(values, (len(values), *defaults.shape_of(self.card, TARGET)))
        if is_of(self.criterion, UNSCALED):
            given = {**vars(self.criterion), **getattr(self.criterion, "keywords", {})}
            logs = is_of(self.criterion, POISSON) and given.get("log_input", True)
            logs |= is_of(self.criterion, KL) and not given.get("log_target", False)
            return values.sigmoid() if is_of(self.criterion, LOGISTIC) else values.exp() if logs else values
        mean, std = defaults.scale_of(self.card, TARGET, values.device)
        return values * std + mean

    def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, Pair]:
        return super().metrics(self.in_units(outputs), batch)

    def decode(self, outputs: Any, card: Card) -> list[Any]:
        return super().decode(self.in_units(outputs), card)


def is_of(loss: Any, kinds: tuple[Any, ...]) -> bool:
    """Return whether a loss is an instance of one of these classes, or one of these functions or a partial of it."""
    function = getattr(loss, "func", loss)
    return any(isinstance(loss, kind) if isinstance(kind, type) else function is kind for kind in kinds)


def terms(loss: Any, outputs: Tensor, y: Tensor) -> Pair:
    plain: Any = loss.to(y.device) if isinstance(loss, nn.Module) else loss
    with autocast(y.device.type, enabled=False):  # in which CUDA refuses nn.BCELoss
        made = plain(outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs, y)
    if not isinstance(made, Tensor) or made.dim() or getattr(loss, "reduction", "mean") != "sum":
        return as_sum(made, len(y))
    if type(loss) not in CROSS_ENTROPY or y.is_floating_point():
        return made, len(y)
    counted = y != plain.ignore_index  # the mean of cross entropy is over the weights of the samples' classes
    return made, (counted if plain.weight is None else plain.weight[y.where(counted, 0)] * counted).sum()


def maker_of(optimizer: Any) -> Callable[[Any, Any], Any]:
    """Return a function of (groups, plan) that makes the optimizer, of what `classify` takes. Raises TrainError."""
    kind, given = getattr(optimizer, "func", optimizer), getattr(optimizer, "keywords", {})
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and "lr" not in given:
        return lambda groups, plan: optimizer(groups, lr=plan.lr)
    if callable(kind) and not isinstance(kind, type):
        return optimizer
    why = " with an lr, which is the plan's: pass plan=nb.Plan(lr=…)" if "lr" in given else ""
    rule = "optimizer must be a class of torch.optim, a functools.partial of one, or a function of (groups, plan)"
    raise TrainError(f"{rule}, got {getattr(kind, '__name__', repr(kind).partition(' ')[0])}{why}")
