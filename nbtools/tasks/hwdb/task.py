"""How lines are trained: plans, batches, loss, metrics, decoding.

B samples, H × W pixels, N characters, T time steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from nbtools.data import Card, Draws, Pack
from nbtools.tasks.common import ctc
from nbtools.tasks.common.metrics import text_metrics
from nbtools.tasks.common.plans import THUMB, at_most, epochs_for
from nbtools.tasks.hwdb import networks
from nbtools.tasks.hwdb.augment import augmented
from nbtools.train import Batch, Pair, knob
from nbtools.train import Plan as BasePlan

Outputs = tuple[Tensor, Tensor]

BEST = "-cer"
HCTR_HEIGHT = (
    96  # pixels from which "auto" takes the reference's network: lower lines give it a step a character or less
)
LINES_A_CLASS = 150  # to train on, over all epochs: that many read the demo's new writers with CER 0.02 (measured)
SHORT = 12  # epochs up to which augmentation stays mild


@dataclass(frozen=True)
class Plan(BasePlan):
    """The settings of lines, in addition to those of every plan."""

    network: str = knob(
        "auto",
        f"hctr: the reference's; slim: for CPUs and small sets; crnn: with LSTMs; auto: hctr from {HCTR_HEIGHT} px on",
        choices=("auto", "hctr", "slim", "crnn"),
    )
    augment: float = knob(0.0, "strength of the augmentation; 0: none", least=0, most=2)
    dropout: float | None = knob(
        None, "share dropped before the classifier; None: the network's own", least=0, most=0.99
    )


BASELINE = Plan(
    epochs=90, batch_size=8, optimizer="sgd", lr=1e-3, weight_decay=1e-4, schedule="plateau", feed="workers", workers=0
)
"""The reference's recipe: every line decoded again in the main process, no mixed precision. It multiplies the lr by 0.1
every 30 epochs; here that happens when the validation no longer improves."""

PLAN = Plan(
    epochs=30,
    batch_size=64,
    lr=2.83e-3,
    lr_rule="sqrt",
    warmup_epochs=2,
    weight_decay=0.01,
    clip_norm=5.0,
    amp="bf16",
    channels_last=True,
    workers=8,
    augment=1.0,
)
"""For a GPU with bfloat16: the guide's batch, the reference's lr by the √ rule, and from the start the clipping that
the guide turns to after a NaN. AdamW, where the reference has SGD at that lr: slim was measured with it (3e-3 on a
CPU), hctr was not. `nb.advise` fits it to the machine and the data."""


def suggest(card: Card, accelerator: str) -> dict[str, tuple[Any, str]]:
    """The task's settings for a machine: field → (value, reason). Those for slim were measured on a CPU with 1,828
    lines of the demo, 60 characters, 32 pixels high; no GPU was at hand."""
    cuda = accelerator == "cuda"
    if cuda and network_for(card) == "hctr":
        return {
            "network": ("hctr", "the reference's own: a GPU has time for it"),
            "batch_size": (at_most(64, card), f"the guide's, {THUMB}; a smaller micro batch where memory asks for it"),
        }
    scaled = f"the CPU's {{}} by the sqrt rule, {THUMB}"
    epochs = epochs_for(card, (4 if cuda else 1) * LINES_A_CLASS * len(card.classes))
    return {
        "network": ("slim", "trains 15 times as many lines/s on a CPU as the CRNN (measured); hctr is for high lines"),
        "augment": (1.0, f"few lines, seen often, {THUMB}")
        if epochs > SHORT
        else (0.5, "mild: a run this short ended at CER 0.08 with 1.0, at 0.03 with this (measured)"),
        "batch_size": (
            at_most(64 if cuda else 16, card),
            scaled.format(16) if cuda else "CER 0.03 after 4 epochs where 32 had 0.07, in the same time (measured)",
        ),
        "lr": (6e-3, scaled.format("3e-3"))
        if cuda
        else (3e-3, "with warmup and cosine; 5e-3 ended at CER 0.04 instead of 0.03 (measured)"),
        "epochs": (epochs, "as many as show every class often enough, from 3 to 200"),
        "warmup_epochs": (round(epochs * 0.08, 2), "8 % of the run: CTC answers blank everywhere at first"),
        "weight_decay": (0.02, f"for a small set, {THUMB}"),
        "clip_norm": (5.0, "only guards against outliers"),
        "channels_last": (cuda, THUMB if cuda else "9 % more time a step on a CPU (measured)"),
    }


def network_for(card: Card) -> str:
    """What `auto` means for lines of that height."""
    return "hctr" if card.options["height"] >= HCTR_HEIGHT else "slim"


def model(card: Card | Pack, plan: Plan) -> nn.Module:
    """The network for a data set. Raises PlanError where it cannot read lines of that height."""
    about = card.card if isinstance(card, Pack) else card
    name = network_for(about) if plan.network == "auto" else plan.network
    network = networks.build(name, about.options["height"], len(about.classes), plan.dropout)
    network.recompute = plan.checkpoint_activations
    return network


def batch(raw: Batch, plan: Plan, draws: Draws | None) -> Batch:
    """uint8 ink on its side (B, W, H) → image (B, 1, H, W), upright, paper 0 and full ink 2. Augmented given draws.

    That is 1 - g, where g = (grey / 255 - .5) / .5 of dark strokes on white paper is the guide's: sign and offset are
    absorbed by the first batch norm, so that paper, padding and what convolutions see around a picture are all 0.
    """
    ink, lengths = raw["image"].transpose(1, 2).unsqueeze(1).contiguous().float() / 255, raw["image_length"]
    if draws is not None and plan.augment:
        ink, lengths = augmented(ink, lengths, draws, plan.augment)
    return {**raw, "image": 2 * ink, "image_length": lengths}


def loss(model: Callable[[Batch], Outputs], batch: Batch, plan: Plan) -> tuple[Tensor, Tensor]:
    """Sum of the CTC loss over the lines whose text fits into their time steps, and the number of those lines.

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
    known = labels.where(labels != logits.shape[2] - 2, -1)  # the last class is unknown; no answer is -1
    misfits = (~ctc.feasible(steps, labels, lengths)).sum()
    return {
        **text_metrics(ctc.greedy(outputs), ctc.texts(known, lengths)),
        "infeasible": (misfits, len(labels)),
    }


def decode(outputs: Outputs, card: Card | Pack) -> list[str]:
    """The text of each line, by the best class of every step."""
    return ["".join(card.classes[place] for place in places) for places in ctc.greedy(outputs)]
