"""How captchas are trained: batches, losses, metrics, decoding. B samples, N characters, T time steps."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from nbtools.data import Card, Draws, Pack
from nbtools.errors import PlanError
from nbtools.tasks.captcha import augment
from nbtools.tasks.captcha.networks import Ctc, Guide, Small
from nbtools.tasks.captcha.plans import Plan
from nbtools.tasks.common import ctc
from nbtools.tasks.common import metrics as measures
from nbtools.train import Pair

Batch = dict[str, Tensor]
Outputs = Tensor | tuple[Tensor, Tensor]

BEST = "whole_accuracy"


def model(card: Card | Pack, plan: Plan) -> nn.Module:
    """The network for a data set. Raises PlanError where they do not fit each other."""
    network, lines = network_of(card, plan), card.options["layout"] == "lines"
    if (network == "ctc") != lines:
        fits = "ctc" if lines else "guide or small"
        raise PlanError(
            f'Plan.network = "{network}" cannot read captchas of layout "{card.options["layout"]}"; '
            f"choose {fits}, or auto"
        )
    if lines:
        built: Guide | Small | Ctc = Ctc(card.options["height"], len(card.classes))
    else:
        kind = Guide if network == "guide" else Small
        built = kind(tuple(card.options["size"]), card.options["length"], len(card.classes))
    built.recompute = plan.checkpoint_activations
    return built


def network_of(card: Card | Pack, plan: Plan) -> str:
    if plan.network != "auto":
        return plan.network
    return "ctc" if card.options["layout"] == "lines" else "guide"


def batch(raw: Batch, plan: Plan, draws: Draws | None) -> Batch:
    """uint8 → image (B, 1, H, W): fixed in [-1, 1]; lines upright, ink in about [-0.3, 1.7]. Augmented given draws."""
    strength = plan.augment if draws is not None else 0.0
    if "image_length" not in raw:
        image = raw["image"].unsqueeze(1).float() / 127.5 - 1
        return {**raw, "image": augment.jitter(image, draws, strength) if draws is not None and strength else image}
    ink, lengths = raw["image"].transpose(1, 2).unsqueeze(1).float() / 255, raw["image_length"]
    if draws is not None and strength:
        ink, lengths = augment.distort(ink, lengths, draws, strength)
    return {**raw, "image": 2 * ink - 0.3, "image_length": lengths}


def loss(model: Callable[[Batch], Outputs], batch: Batch, plan: Plan) -> tuple[Tensor, int]:
    """Sum of a loss over the batch, and how many terms it has: samples, or characters for cross-entropy."""
    outputs, labels = model(batch), batch["label"]
    if isinstance(outputs, tuple):
        return ctc.loss(outputs, labels, batch["label_length"]), len(labels)
    if plan.loss == "cross_entropy":
        return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()
    wanted = F.one_hot(labels, outputs.shape[2]).float()
    logits = outputs.float()  # autocast does not list this loss, and a sum in bf16 keeps three digits
    return F.multilabel_soft_margin_loss(logits.flatten(1), wanted.flatten(1), reduction="sum"), len(labels)


def metrics(outputs: Outputs, batch: Batch) -> dict[str, Pair]:
    """char_accuracy and whole_accuracy; for lines cer, ar, cr and whole_accuracy."""
    labels = batch["label"]
    if isinstance(outputs, tuple):
        return measures.text_metrics(ctc.greedy(outputs), ctc.texts(labels, batch["label_length"]))
    predicted = outputs.argmax(2)
    return {
        "char_accuracy": measures.accuracy(predicted, labels),
        "whole_accuracy": measures.whole_accuracy(predicted, labels),
    }


def decode(outputs: Outputs, card: Card | Pack) -> list[str]:
    """The text of each sample."""
    places = ctc.greedy(outputs) if isinstance(outputs, tuple) else outputs.argmax(2).tolist()
    return ["".join(card.classes[place] for place in row) for row in places]
