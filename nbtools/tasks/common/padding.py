"""Batches of ragged samples padded to a multiple of `Plan.bucket`, so that networks see few lengths: cuDNN and oneDNN
plan each convolution anew for a length that is new, and compiled code is compiled again.

B samples, L the longest of a batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from nbtools.train import knob


def bucket_knob(unit: str) -> Any:
    """The setting; off by default, so that a run that began without it goes on as it began."""
    help = f"pad batches to a multiple of this many {unit}: convolutions and compiled code then see few lengths"
    return knob(1, help, least=1, unit=unit)


def padded(x: Tensor, bucket: int, most: int | None = None) -> Tensor:
    """(B, L, …) with L padded by zeros to a multiple of the bucket, but not beyond `most`."""
    length = -(-x.shape[1] // bucket) * bucket
    more = (length if most is None else min(length, most)) - x.shape[1]
    return F.pad(x, (*(0, 0) * (x.dim() - 2), 0, more)) if more > 0 else x
