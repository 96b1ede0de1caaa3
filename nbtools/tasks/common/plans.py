"""Rules of thumb that the advised plans of the tasks share."""

from __future__ import annotations

from nbtools.data import Card

THUMB = "rule of thumb"


def epochs_for(card: Card, samples: float, least: int = 3, most: int = 200) -> int:
    """Epochs that show this many training samples in all, within limits."""
    return min(most, max(least, round(samples / max(card.splits["train"], 1))))


def at_most(batch_size: int, card: Card) -> int:
    """The batch size, or the whole training split where that is smaller."""
    return min(batch_size, max(card.splits["train"], 1))
