"""Figures that tasks share: metrics of texts as (numerator, denominator), and rules of thumb."""

from collections.abc import Sequence
from typing import Any

from nbtools.data import Card
from nbtools.errors import MissingExtra, PackError
from nbtools.show import plural
from nbtools.train import Pair, knob

THUMB = "rule of thumb"


def text_metrics(predicted: Sequence[Sequence], target: Sequence[Sequence]) -> dict[str, Pair]:
    """Return cer, ar = 1 - cer, cr (insertions not counted) and whole_accuracy, over all characters of the targets.

    Of several shortest edits, rapidfuzz's: `cr` depends on the choice, `cer` and `ar` do not. Raises MissingExtra.
    """
    try:
        from rapidfuzz.distance.Levenshtein import editops
    except ImportError:
        fix = "pip install rapidfuzz, or the extra text"
        raise MissingExtra(f"edit distances (cer, ar, cr) need the package rapidfuzz: {fix}") from None
    edits = [editops(truth, guess) for guess, truth in zip(predicted, target, strict=True)]
    count, wrong = sum(map(len, target)), sum(map(len, edits))
    inserted = sum(step.tag == "insert" for steps in edits for step in steps)
    return {
        "cer": (wrong, count),
        "ar": (count - wrong, count),
        "cr": (count - wrong + inserted, count),
        "whole_accuracy": (sum(not steps for steps in edits), len(target)),
    }


def pair(truth: Sequence, predicted: Sequence, what: str = "answer", each: str = "id") -> list[tuple[Any, Any]]:
    """Return both side by side. Raises PackError unless there is one prediction for each."""
    if len(truth) != len(predicted):
        came = f"{len(predicted)} for {plural(len(truth), each)}"
        raise PackError(f"predicted must be one {what} for each {each}, got {came}; take both from the same ids")
    return list(zip(truth, predicted, strict=True))


def epochs_for(card: Card, samples: float, least: int = 3, most: int = 200) -> int:
    """Return the epochs that show this many training samples in all, within limits."""
    return min(most, max(least, round(samples / max(card.splits["train"], 1))))


def at_most(batch_size: int, card: Card) -> int:
    return min(batch_size, max(card.splits["train"], 1))


def bucket_knob(unit: str) -> Any:
    """Return the setting by which feeds pad; off by default, so that a run that began without it resumes."""
    help = f"pad batches to a multiple of this many {unit}: convolutions and compiled code then see fewer lengths"
    return knob(1, help, least=1, unit=unit)
