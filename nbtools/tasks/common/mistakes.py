"""Which classes a network confuses: truth and predictions side by side, and the confusion table of their classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from nbtools.errors import PackError
from nbtools.show import plural

if TYPE_CHECKING:
    import pandas as pd

A = TypeVar("A")
B = TypeVar("B")


def paired(truth: Sequence[A], predicted: Sequence[B], what: str = "answer", each: str = "id") -> list[tuple[A, B]]:
    """Both side by side. Raises PackError unless there is one prediction for each."""
    if len(truth) != len(predicted):
        raise PackError(
            f"predicted must be one {what} for each {each}, got {len(predicted)} for {plural(len(truth), each)}; "
            "take both from the same ids"
        )
    return list(zip(truth, predicted, strict=True))


def counts_of(truth: Sequence[str], predicted: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """(K, K) int64: how many samples of each class (rows) were taken for each (columns).

    Raises PackError for names that are not among the classes.
    """
    pairs = Counter(paired(truth, predicted))
    if strange := sorted({name for pair in pairs for name in pair} - set(classes)):
        raise PackError(f"classes must hold all true and predicted ones, {strange[0]!r} is missing")
    counts = [pairs[stood, read] for stood in classes for read in classes]
    return np.array(counts, np.int64).reshape(len(classes), len(classes))


def confusion(counts: np.ndarray, classes: Iterable[str]) -> pd.DataFrame:
    """A confusion matrix (K, K) as a table of truth (rows) and predicted (columns), with the classes' names."""
    import pandas as pd

    names = list(classes)
    return pd.DataFrame(counts, pd.Index(names, name="truth"), pd.Index(names, name="predicted"))


def most_confused(counts: np.ndarray, classes: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """(name, (K,) how often): what each class of a confusion matrix is wrongly taken for most often, "" where never."""
    wrong = counts - np.diag(counts.diagonal())
    times = wrong.max(1, initial=0)
    names = [str(classes[row.argmax()]) if n else "" for row, n in zip(wrong, times, strict=True)]
    return names, times
