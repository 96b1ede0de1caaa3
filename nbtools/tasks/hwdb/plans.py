"""The plans of lines: the reference's before, the recommended one for a GPU, and what to change for other machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbtools.data import Card
from nbtools.train import plan

THUMB = "rule of thumb"
HCTR_HEIGHT = 96  # pixels from which the reference's network is taken: below, it has a step a glyph or less
LINES_A_CLASS = 150  # to train on, all epochs together: they read the demo's new writers with CER 0.02 (measured)
SHORT = 12  # epochs up to which augmentation stays mild


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
where it waits for a NaN. AdamW, where the reference has SGD at that lr: slim was measured with it (3e-3 on a CPU), hctr
was not. `nb.advise` fits it to the machine and the data."""


def network_of(card: Card, plan: Plan) -> str:
    if plan.network != "auto":
        return plan.network
    return "hctr" if card.options["height"] >= HCTR_HEIGHT else "slim"


def suggest(card: Card, accelerator: str) -> dict[str, tuple[Any, str]]:
    """The task's knobs for a machine: field → (value, reason)."""
    if accelerator == "cuda" and card.options["height"] >= HCTR_HEIGHT:
        return {
            "network": ("hctr", "the reference's own: a GPU has time for it"),
            "batch_size": (at_most(64, card), f"the guide's, {THUMB}; a smaller micro batch where memory asks for it"),
        }
    return for_slim(card, accelerator == "cuda")


def for_slim(card: Card, cuda: bool) -> dict[str, tuple[Any, str]]:
    """Small machines and low lines. Measured on a CPU with 1,828 lines of the demo, 60 characters, 32 pixels high; no
    GPU was at hand."""
    batch, lr = (64, 6e-3) if cuda else (16, 3e-3)
    scaled = f"the CPU's {{}} by the sqrt rule, {THUMB}"
    epochs = rounds(card, (4 if cuda else 1) * LINES_A_CLASS)
    return {
        "network": ("slim", "trains 15 times as many lines/s on a CPU as the CRNN (measured); hctr is for high lines"),
        "augment": (1.0, f"few lines, seen often, {THUMB}")
        if epochs > SHORT
        else (0.5, "mild: a run this short ended at CER 0.08 with 1.0, at 0.03 with this (measured)"),
        "batch_size": (
            at_most(batch, card),
            scaled.format(16) if cuda else "CER 0.03 after 4 epochs where 32 had 0.07, in the same time (measured)",
        ),
        "lr": (
            lr,
            scaled.format("3e-3")
            if cuda
            else "with warmup and cosine; 5e-3 ended at CER 0.04 instead of 0.03 (measured)",
        ),
        "epochs": (epochs, "as many as show every class often enough, from 3 to 200"),
        "warmup_epochs": (round(epochs * 0.08, 2), "8 % of the run: CTC answers blank everywhere at first"),
        "weight_decay": (0.02, f"for a small set, {THUMB}"),
        "clip_norm": (5.0, "only guards against outliers"),
        "channels_last": (cuda, THUMB if cuda else "9 % more time a step on a CPU (measured)"),
    }


def rounds(card: Card, lines: int) -> int:
    """Epochs that show so many lines a class."""
    return min(200, max(3, round(lines * len(card.classes) / max(card.splits["train"], 1))))


def at_most(batch: int, card: Card) -> int:
    return min(batch, max(card.splits["train"], 1))
