"""How lines are trained: batches, loss, metrics, decoding. B samples, H × W pixels, N characters, T time steps."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from nbtools.data import Card, Draws, Pack
from nbtools.tasks.common import ctc
from nbtools.tasks.common.metrics import text_metrics
from nbtools.tasks.hwdb import augment
from nbtools.tasks.hwdb.networks import built
from nbtools.tasks.hwdb.plans import Plan, network_of
from nbtools.train import Pair

Batch = dict[str, Tensor]
Outputs = tuple[Tensor, Tensor]

BEST = "-cer"


def model(card: Card | Pack, plan: Plan) -> nn.Module:
    """The network for a data set. Raises PlanError where it cannot read lines of that height."""
    about = card.card if isinstance(card, Pack) else card
    network = built(network_of(about, plan), about.options["height"], len(about.classes), plan.dropout)
    network.recompute = plan.checkpoint_activations
    return network


def batch(raw: Batch, plan: Plan, draws: Draws | None) -> Batch:
    """uint8 ink on its side (B, W, H) → image (B, 1, H, W), upright, paper 0 and full ink 2. Augmented given draws.

    That is 1 - g, where g = (grey / 255 - .5) / .5 of dark strokes on white paper is the guide's: sign and shift, which
    the first batch norm takes in, so that paper, padding and what convolutions see around a picture are all 0.
    """
    ink, lengths = raw["image"].transpose(1, 2).unsqueeze(1).contiguous().float() / 255, raw["image_length"]
    if draws is not None and plan.augment:
        ink, lengths = augment.varied(ink, lengths, draws, plan.augment)
    return {**raw, "image": 2 * ink, "image_length": lengths}


def loss(model: Callable[[Batch], Outputs], batch: Batch, plan: Plan) -> tuple[Tensor, Tensor]:
    """Sum of the CTC loss over the lines whose text fits into their steps, and how many these are.

    The others have an infinite loss, and no gradient could change that: they are left out, and `metrics` counts them.
    """
    logits, steps = model(batch)
    labels, lengths = batch["label"], batch["label_length"]
    fits = ctc.feasible(steps, labels, lengths)
    kept = fits.nonzero().view(-1)  # waits for the device, as CTC itself does for the lengths
    if not len(kept):
        return logits.sum() * 0, fits.sum()
    return ctc.loss((logits.index_select(1, kept), steps[kept]), labels[kept], lengths[kept]), fits.sum()


def metrics(outputs: Outputs, batch: Batch) -> dict[str, Pair]:
    """cer, ar, cr and whole_accuracy, over all lines; infeasible: the share of lines that the loss leaves out.

    By the definitions of the ICDAR 2013 competition, ar = 1 - (substitutions + deletions + insertions) / characters,
    and cr the same without insertions. A character of the truth that is unknown counts as an error whatever is read
    there, so that an answer of "unknown" is never right.
    """
    logits, steps = outputs
    labels, lengths = batch["label"], batch["label_length"]
    known = labels.where(labels != logits.shape[2] - 2, -1)  # the last class; no answer is -1
    misfits = (~ctc.feasible(steps, labels, lengths)).sum()
    return {
        **text_metrics(ctc.greedy(outputs), ctc.texts(known, lengths)),
        "infeasible": (misfits, len(labels)),
    }


def decode(outputs: Outputs, card: Card | Pack) -> list[str]:
    """The text of each line, by the best class of every step."""
    return ["".join(card.classes[place] for place in places) for places in ctc.greedy(outputs)]
