"""The metrics of classes and of texts as (numerator, denominator). B samples, N positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nbtools.errors import MissingExtra
from nbtools.train import Pair

MEANINGS = {
    "cer": "character error rate: wrong, missing and extra characters, per character of the truth; 0 is perfect",
    "ar": "accurate rate: 1 - cer",
    "cr": "correct rate: share of characters read correctly; extra characters do not count",
    "whole_accuracy": "share of samples with every character right",
}
"""Of `text_metrics`, in plain words."""


def accuracy(predicted: Tensor, target: Tensor) -> Pair:
    """Share of equal entries; both (B, N) or (B,), whole numbers."""
    return (predicted == target).sum(), target.numel()


def whole_accuracy(predicted: Tensor, target: Tensor) -> Pair:
    """Share of rows equal in every position; both (B, N)."""
    return (predicted == target).all(dim=1).sum(), target.shape[0]


def levenshtein() -> Any:
    """rapidfuzz's edit distance. Raises MissingExtra."""
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        raise MissingExtra(
            "edit distances (cer, ar, cr) need the package rapidfuzz: pip install rapidfuzz, or nbtools[text]"
        ) from None
    return Levenshtein


def edits(predicted: Sequence, target: Sequence) -> tuple[int, int, int]:
    """(substitutions, deletions, insertions) that turn target into predicted in the fewest steps.

    Of several shortest edits, rapidfuzz's: `cr` depends on the choice, `cer` and `ar` do not.
    """
    kinds = [step.tag for step in levenshtein().editops(target, predicted)]
    return kinds.count("replace"), kinds.count("delete"), kinds.count("insert")


def text_metrics(predicted: Sequence[Sequence], target: Sequence[Sequence]) -> dict[str, Pair]:
    """cer, ar = 1 - cer, cr (insertions not counted) and whole_accuracy, over all characters of the targets."""
    wrong = missed = whole = 0
    for guess, truth in zip(predicted, target, strict=True):
        substitutions, deletions, insertions = edits(guess, truth)
        wrong += substitutions + deletions + insertions
        missed += substitutions + deletions
        whole += substitutions + deletions + insertions == 0
    count = sum(map(len, target))
    return {
        "cer": (wrong, count),
        "ar": (count - wrong, count),
        "cr": (count - missed, count),
        "whole_accuracy": (whole, len(target)),
    }
