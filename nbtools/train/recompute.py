"""Activation checkpointing that leaves BatchNorm's running averages as one forward pass leaves them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def again(part: nn.Module, *inputs: Any) -> Tensor:
    """`part(*inputs)`, whose activations are computed a second time in backward instead of being kept; that second
    forward must not move the running averages of batch norm again."""
    norms = [m for m in part.modules() if isinstance(m, _BatchNorm) and m.training]
    passes = 0

    def forward(*inputs: Any) -> Tensor:
        nonlocal passes
        passes += 1
        momenta = [m.momentum for m in norms]
        for m in norms if passes > 1 else []:
            m.momentum = 0.0
            if m.num_batches_tracked is not None:
                m.num_batches_tracked -= 1
        try:
            return part(*inputs)
        finally:
            for m, momentum in zip(norms, momenta, strict=True):
                m.momentum = momentum

    result = checkpoint(forward, *inputs, use_reentrant=False)
    assert isinstance(result, Tensor)
    return result
