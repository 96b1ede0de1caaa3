"""Metrics as (numerator, denominator): sums over any batches and processes give the same number as one big batch.

K classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Pair = tuple[Tensor | float, Tensor | float]
"""Two numbers; or two tensors (K,) of a mean over classes, as mIoU is: each class is summed by itself."""


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
