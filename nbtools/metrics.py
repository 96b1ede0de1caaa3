"""Metrics as (numerator, denominator): sums that add up over batches and processes to the same number as one big batch.

B samples, T time steps, N positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Pair = tuple[Tensor | float, Tensor | float]


def accuracy(predicted: Tensor, target: Tensor) -> Pair:
    """Share of equal entries; both (B, N) or (B,), whole numbers."""
    return (predicted == target).sum(), target.numel()


def whole_accuracy(predicted: Tensor, target: Tensor) -> Pair:
    """Share of rows equal in every position; both (B, N)."""
    return (predicted == target).all(dim=1).sum(), target.shape[0]


def edit_distance(a: Sequence, b: Sequence) -> int:
    """Levenshtein distance: the fewest insertions, deletions and substitutions that turn a into b."""
    return sum(edits(a, b))


def edits(predicted: Sequence, target: Sequence) -> tuple[int, int, int]:
    """(substitutions, deletions, insertions) of one cheapest way from target to predicted.

    Row by row over (cost, substitutions, deletions, insertions); ties go to the fewest insertions, so that CR is the
    largest that the distance allows.
    """
    row = [(j, 0, 0, j) for j in range(len(predicted) + 1)]
    for i, wanted in enumerate(target, 1):
        above, row = row, [(i, 0, i, 0)]
        for j, got in enumerate(predicted, 1):
            if got == wanted:
                row.append(above[j - 1])
                continue
            c, s, d, n = above[j - 1]
            substitute = (c + 1, s + 1, d, n)
            c, s, d, n = above[j]
            delete = (c + 1, s, d + 1, n)
            c, s, d, n = row[j - 1]
            insert = (c + 1, s, d, n + 1)
            row.append(min(substitute, delete, insert, key=lambda way: (way[0], way[3])))
    return row[-1][1:]


def text_metrics(predicted: Sequence[Sequence], target: Sequence[Sequence]) -> dict[str, Pair]:
    """cer, ar = 1 - cer, cr (insertions not counted) and whole_accuracy, over all characters of the targets."""
    wrong = missed = whole = 0
    for guess, truth in zip(predicted, target, strict=True):
        substitutions, deletions, insertions = edits(guess, truth)
        wrong += substitutions + deletions + insertions
        missed += substitutions + deletions
        whole += wrong_free(substitutions, deletions, insertions)
    count = sum(map(len, target))
    return {
        "cer": (wrong, count),
        "ar": (count - wrong, count),
        "cr": (count - missed, count),
        "whole_accuracy": (whole, len(target)),
    }


def wrong_free(*counts: int) -> int:
    return int(not any(counts))


class Sums:
    """Running (numerator, denominator) sums by name, kept on the device; `read` is the one transfer to the host."""

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self.names: list[str] = []
        self.totals: dict[str, Tensor] = {}  # name → (2,) float64, float32 on MPS

    def add(self, pairs: dict[str, Pair]) -> None:
        for name, (numerator, denominator) in pairs.items():
            if name not in self.totals:
                self.totals[name] = torch.zeros(2, dtype=self.dtype, device=self.device)
            total = self.totals[name]
            total[0] += numerator
            total[1] += denominator

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "mps" else torch.float64

    def read(self) -> dict[str, float]:
        """name → numerator / denominator, 0 where nothing was counted."""
        if not self.totals:
            return {}
        values = torch.stack(list(self.totals.values())).tolist()
        return {name: n / d if d else 0.0 for name, (n, d) in zip(self.totals, values, strict=True)}
