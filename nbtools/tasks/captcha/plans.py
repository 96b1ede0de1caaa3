"""The plans of captchas: the guide's "before", the recommended one for a GPU, and settings for other machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbtools.data import Card
from nbtools.tasks.common.plans import THUMB, at_most, epochs_for
from nbtools.train import plan

FIXED_IMAGES = 40_000  # to train on, all epochs together: 99 % of four generated digits are read after half of them
LINES = 280_000  # of the real captchas, 20 minutes on two cores: their CER stopped falling after 200,000


@dataclass(frozen=True)
class Plan(plan.Plan):
    """The settings of captchas, in addition to those of every plan."""

    network: str = plan.knob(
        "auto",
        "guide: the guide's; small: for CPUs and small sets; ctc: for lines; auto: guide, or ctc for lines",
        choices=("auto", "guide", "small", "ctc"),
    )
    loss: str = plan.knob(
        "soft_margin",
        "loss of fixed captchas: the guide's multi-label soft margin, or cross-entropy per position",
        choices=("soft_margin", "cross_entropy"),
    )
    augment: float = plan.knob(0.0, "strength of the augmentation; 0: none", least=0, most=2)


BASELINE = Plan(
    epochs=150, batch_size=64, optimizer="adam", lr=2e-4, min_lr=1e-6, eval_every=5, feed="workers", workers=0
)
"""The guide's "before": every image decoded again in the main process, no mixed precision."""

PLAN = Plan(
    epochs=150,
    batch_size=1024,
    lr=6e-4,
    lr_rule="sqrt",
    min_lr=1e-6,
    warmup_epochs=5,
    weight_decay=1e-4,
    clip_norm=1.0,
    amp="bf16",
    channels_last=True,
    workers=16,
)
"""Guide 3's recipe, for a GPU with bfloat16. `nb.advise` fits it to the machine and the data."""


def suggest(card: Card, accelerator: str) -> dict[str, tuple[Any, str]]:
    """The settings of the task for a machine: field → (value, reason)."""
    if card.options["layout"] == "lines":
        return for_lines(card, accelerator)
    if accelerator == "cuda":
        return {"network": ("guide", "the guide's own: a GPU has time for it")}
    return for_small(card)


def for_small(card: Card) -> dict[str, tuple[Any, str]]:
    """Fixed captchas without a CUDA GPU. Measured on two cores of a Xeon (AVX-512) with 4,800 four-digit captchas."""
    epochs = epochs_for(card, FIXED_IMAGES)
    return {
        "network": ("small", "trains 8 times as many images/s on a CPU as the guide's, and needs fewer (measured)"),
        "loss": ("cross_entropy", "learns in fewer epochs than the guide's soft margin"),
        "augment": (0.3, "mild shifts, shear and contrast, for a small set; 7 % of a step"),
        "batch_size": (
            at_most(64, card),
            "17 % faster than 32 in bf16, and learns as much (measured); 128 gains 6 % more",
        ),
        "lr": (2e-3, "read 99 % of generated four-digit captchas after 4 epochs of 4,800 (measured)"),
        "epochs": (epochs, f"{FIXED_IMAGES:,} images in all: about 2 minutes on two cores"),
        "warmup_epochs": (min(1.0, epochs / 5), f"Adam's first estimates are poor, {THUMB}"),
        "weight_decay": (0.02, f"for a small set, {THUMB}"),
        "clip_norm": (5.0, "only guards against outliers"),
        "channels_last": (True, "a fifth less time a step on a CPU (measured)"),
    }


def for_lines(card: Card, accelerator: str) -> dict[str, tuple[Any, str]]:
    """Lines on any machine. Measured on a CPU with 3,100 real captchas; no GPU was at hand."""
    batch, lr = (128, 6e-3) if accelerator == "cuda" else (32, 3e-3)
    rule = (
        f"the CPU's 3e-3 at batch 32 by the sqrt rule, {THUMB}" if accelerator == "cuda" else "2 × as much is no better"
    )
    epochs = epochs_for(card, LINES)
    return {
        "network": ("ctc", "lines need CTC"),
        "augment": (1.3, "at 1.0 the training loss fell to half of the validation loss in 66 epochs; 5 % of a step"),
        "batch_size": (at_most(batch, card), f"many steps for a small set, {THUMB}"),
        "lr": (lr, f"with warmup and cosine; {rule}"),
        "epochs": (epochs, f"{LINES:,} lines in all: about 20 minutes on two cores"),
        "warmup_epochs": (round(epochs * 0.06, 1), "6 % of the run: CTC answers blank everywhere at first"),
        "weight_decay": (0.05, f"for a small set, {THUMB}"),
        "clip_norm": (5.0, "only guards against outliers"),
        "channels_last": (True, "a quarter less time a step on a CPU (measured)"),
        "eval_every": (2, "an evaluation takes a tenth of an epoch's time"),
    }
