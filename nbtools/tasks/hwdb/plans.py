"""The plans of lines: the reference's before, the recommended one for a GPU, and what to change for other machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbtools import plan
from nbtools.pack import Card

THUMB = "rule of thumb"
HCTR_HEIGHT = (
    96  # pixels from which the reference's network is taken, made for 128: below it has a step a glyph or less
)
LINES_A_CLASS = 150  # to train on, all epochs together: after 120, CER on the demo's new writers was 0.03 (measured)


@dataclass(frozen=True)
class Plan(plan.Plan):
    """The knobs of lines, beside those of every plan."""

    network: str = plan.knob(
        "auto",
        f"hctr: the reference's; slim: for CPUs and small sets; crnn: with LSTMs; auto: hctr from {HCTR_HEIGHT} px on",
        choices=("auto", "hctr", "slim", "crnn"),
    )
    augment: float = plan.knob(0.0, "strength of the augmentation; 0: none", least=0, most=2)
    dropout: float | None = plan.knob(
        None, "share dropped before the classifier; None: the network's own", least=0, most=0.99
    )


BASELINE = Plan(
    epochs=90, batch_size=8, optimizer="sgd", lr=1e-3, weight_decay=1e-4, schedule="plateau", feed="workers", workers=0
)
"""The reference's recipe: every line decoded again in the main process, no mixed precision. Its steps of × 0.1, every
30 epochs there, come here when the validation no longer improves."""

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
"""For a GPU with bfloat16: the guide's batch, the reference's lr by the √ rule, and the guide's clipping from the start
where it waits for a NaN. `nb.advise` fits it to the machine and the data."""


def network_of(card: Card, plan: Plan) -> str:
    if plan.network != "auto":
        return plan.network
    return "hctr" if card.options["height"] >= HCTR_HEIGHT else "slim"


def suggest(card: Card, accelerator: str) -> dict[str, tuple[Any, str]]:
    """The task's knobs for a machine: field → (value, reason)."""
    height = card.options["height"]
    if accelerator == "cuda" and height >= HCTR_HEIGHT:
        return {
            "network": ("hctr", "the reference's own: a GPU has time for it"),
            "batch_size": (at_most(64, card), "the guide's; more in a step taught no one anything here yet"),
        }
    return for_slim(card)


def for_slim(card: Card) -> dict[str, tuple[Any, str]]:
    """Small sets and machines. Measured on a CPU with the demo: 1,828 lines of 60 characters, 32 pixels high."""
    epochs = rounds(card)
    return {
        "network": ("slim", "a CPU trains it some 20 times as fast as the CRNN (measured)"),
        "augment": (0.5, "mild, for a run this short; 10 % of a step"),
        "batch_size": (at_most(16, card), "CER 0.03 after 4 epochs where 32 had 0.07, in the same time (measured)"),
        "lr": (3e-3, "with warmup and cosine"),
        "epochs": (epochs, f"{LINES_A_CLASS} lines a class in all, from 3 to 200 epochs"),
        "warmup_epochs": (round(epochs * 0.08, 2), "8 % of the run: CTC answers blank everywhere at first"),
        "weight_decay": (0.02, f"for a small set, {THUMB}"),
        "clip_norm": (5.0, "only guards against outliers"),
        "channels_last": (True, "less time a step on a CPU (measured)"),
    }


def rounds(card: Card) -> int:
    """Epochs that show every character often enough."""
    return min(200, max(3, round(LINES_A_CLASS * len(card.classes) / max(card.splits["train"], 1))))


def at_most(batch: int, card: Card) -> int:
    return min(batch, max(card.splits["train"], 1))
