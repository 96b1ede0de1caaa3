"""Metrics as (numerator, denominator): sums that add up over batches and processes to the same number as one big batch.

B samples, T time steps, N positions, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nbtools.errors import MissingExtra

Pair = tuple[Tensor | float, Tensor | float]
"""Two numbers; or two tensors (K,) of a mean over classes, as mIoU is: each class is summed by itself."""


def accuracy(predicted: Tensor, target: Tensor) -> Pair:
    """Share of equal entries; both (B, N) or (B,), whole numbers."""
    return (predicted == target).sum(), target.numel()


def whole_accuracy(predicted: Tensor, target: Tensor) -> Pair:
    """Share of rows equal in every position; both (B, N)."""
    return (predicted == target).all(dim=1).sum(), target.shape[0]


def edits(predicted: Sequence, target: Sequence) -> tuple[int, int, int]:
    """(substitutions, deletions, insertions) that turn target into predicted in the fewest steps (Levenshtein).

    Where several ways are as short, rapidfuzz's: `cr` depends on the choice, `cer` and `ar` do not.
    """
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        raise MissingExtra(
            "edit distances (cer, ar, cr) need the package rapidfuzz: pip install rapidfuzz, or nbtools[text]"
        ) from None
    kinds = [step.tag for step in Levenshtein.editops(target, predicted)]
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


class Sums:
    """Running (numerator, denominator) sums by name, kept on the device; `read` is the one transfer to the host."""

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self.totals: dict[str, Tensor] = {}  # name → (2,) or (2, K) float64, float32 on MPS

    def add(self, pairs: Mapping[str, Pair]) -> None:
        for name, (numerator, denominator) in pairs.items():
            if name not in self.totals:
                shape = numerator.shape if isinstance(numerator, Tensor) else ()
                self.totals[name] = torch.zeros((2, *shape), dtype=self.dtype, device=self.device)
            total = self.totals[name]
            total[0] += numerator
            total[1] += denominator

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "mps" else torch.float64

    def read(self) -> dict[str, float]:
        """name → numerator / denominator, 0 where nothing was counted; of classes the mean of those that were."""
        if not self.totals:
            return {}
        flat = torch.cat([total.view(2, -1) for total in self.totals.values()], 1).tolist()
        found, start = {}, 0
        for name, total in self.totals.items():
            stop = start + total[0].numel()
            ratios = [n / d for n, d in zip(*(row[start:stop] for row in flat), strict=True) if d]
            found[name], start = sum(ratios) / max(len(ratios), 1), stop
        return found
