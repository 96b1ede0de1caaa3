"""The metrics of classes and of texts as (numerator, denominator), and which classes a network confuses. B samples,
N positions, K classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from torch import Tensor

from nbtools.errors import MissingExtra, PackError
from nbtools.show import plural
from nbtools.train import Pair

if TYPE_CHECKING:
    import pandas as pd

A = TypeVar("A")
B = TypeVar("B")

MEANINGS = {
    "cer": "character error rate: wrong, missing and extra characters, per character of the truth; 0 is perfect",
    "ar": "accurate rate: 1 - cer",
    "cr": "correct rate: share of characters read correctly; extra characters do not count",
    "whole_accuracy": "share of samples with every character right",
}
"""Of `text_metrics`, in plain words."""


def accuracy(predicted: Tensor, target: Tensor) -> Pair:
    """Return the share of equal entries; both (B, N) or (B,), whole numbers."""
    return (predicted == target).sum(), target.numel()


def whole_accuracy(predicted: Tensor, target: Tensor) -> Pair:
    """Return the share of rows equal in every position; both (B, N)."""
    return (predicted == target).all(dim=1).sum(), target.shape[0]


def levenshtein() -> Any:
    """Return rapidfuzz's edit distance. Raises MissingExtra."""
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        raise MissingExtra(
            "edit distances (cer, ar, cr) need the package rapidfuzz: pip install rapidfuzz, or nbtools[text]"
        ) from None
    return Levenshtein


def text_metrics(predicted: Sequence[Sequence], target: Sequence[Sequence]) -> dict[str, Pair]:
    """Return cer, ar = 1 - cer, cr (insertions not counted) and whole_accuracy, over all characters of the targets.

    Of several shortest edits, rapidfuzz's: `cr` depends on the choice, `cer` and `ar` do not.
    """
    kinds: Counter[str] = Counter()
    whole, editops = 0, levenshtein().editops
    for guess, truth in zip(predicted, target, strict=True):
        tags = [step.tag for step in editops(truth, guess)]
        kinds.update(tags)
        whole += not tags
    count, wrong = sum(map(len, target)), kinds.total()
    return {
        "cer": (wrong, count),
        "ar": (count - wrong, count),
        "cr": (count - wrong + kinds["insert"], count),
        "whole_accuracy": (whole, len(target)),
    }


# -- mistakes


def paired(truth: Sequence[A], predicted: Sequence[B], what: str = "answer", each: str = "id") -> list[tuple[A, B]]:
    """Return both side by side. Raises PackError unless there is one prediction for each."""
    if len(truth) != len(predicted):
        raise PackError(
            f"predicted must be one {what} for each {each}, got {len(predicted)} for {plural(len(truth), each)}; "
            "take both from the same ids"
        )
    return list(zip(truth, predicted, strict=True))


def counts_of(truth: Sequence[str], predicted: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """Return (K, K) int64: how many samples of each class (rows) were taken for each (columns). Raises PackError for
    names that are not among the classes."""
    pairs = Counter(paired(truth, predicted))
    if strange := sorted({name for pair in pairs for name in pair} - set(classes)):
        raise PackError(f"classes must hold all true and predicted ones, {strange[0]!r} is missing")
    return np.array([[pairs[true, read] for read in classes] for true in classes], np.int64).reshape([len(classes)] * 2)


def confusion(counts: np.ndarray, classes: Sequence[str]) -> pd.DataFrame:
    """Return a confusion matrix (K, K) as a table of truth (rows) and predicted (columns)."""
    import pandas as pd

    return pd.DataFrame(counts, pd.Index(list(classes), name="truth"), pd.Index(list(classes), name="predicted"))


def most_confused(counts: np.ndarray, classes: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Return (name, (K,) how often): what each class is wrongly taken for most often, "" where never."""
    wrong = counts - np.diag(counts.diagonal())
    times = wrong.max(1, initial=0)
    return [str(classes[row.argmax()]) if n else "" for row, n in zip(wrong, times, strict=True)], times
