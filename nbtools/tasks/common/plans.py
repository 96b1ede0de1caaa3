"""What the plans of the tasks share: rules of thumb, and the setting by which feeds pad."""

from __future__ import annotations

from typing import Any

from nbtools.data import Card
from nbtools.train import knob

THUMB = "rule of thumb"


def epochs_for(card: Card, samples: float, least: int = 3, most: int = 200) -> int:
    """Epochs that show this many training samples in all, within limits."""
    return min(most, max(least, round(samples / max(card.splits["train"], 1))))


def at_most(batch_size: int, card: Card) -> int:
    """The batch size, or the whole training split where that is smaller."""
    return min(batch_size, max(card.splits["train"], 1))


def bucket_knob(unit: str) -> Any:
    """Return the setting by which feeds pad; off by default, so that a run that began without it goes on."""
    help = f"pad batches to a multiple of this many {unit}: convolutions and compiled code then see few lengths"
    return knob(1, help, least=1, unit=unit)
