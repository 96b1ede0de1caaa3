"""CTC by cuDNN: on a GPU neither loss nor gradient waits for the host, both are deterministic, and a CUDA graph may
record them. `F.ctc_loss` copies lengths to the host on the way to either of its kernels, so the operator is called
below it. It checks nothing: texts lie in a tensor of fixed size, and what cuDNN leaves undefined is masked here."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MOST_LABELS = 255  # of a text, in cuDNN
NEAR = 1e-3


def able(logits: Tensor, labels: Tensor) -> bool:
    """Return whether cuDNN computes the loss of these: on CUDA, of at most 255 labels a text."""
    return logits.device.type == "cuda" and labels.shape[1] <= MOST_LABELS and agrees(logits.device)


@cache
def agrees(device: torch.device) -> bool:
    """Return whether a small batch has torch's own loss and gradient: once a process, which waits for it."""
    logits = torch.randn(12, 3, 7, generator=torch.Generator().manual_seed(0))
    labels, lengths = torch.tensor([[1, 1, 2], [3, 0, 0], [0, 5, 2]]), torch.tensor([3, 1, 3])
    steps, fits = torch.tensor([12, 9, 10]), torch.ones(3, dtype=torch.bool)
    with torch.enable_grad():
        mine, other = logits.to(device).requires_grad_(), logits.requires_grad_()
        expected = F.ctc_loss(other.log_softmax(2), labels + 1, steps, lengths, reduction="none")
        try:
            each = losses(mine, labels.to(device), steps.to(device), lengths.to(device), fits.to(device))
        except (RuntimeError, AttributeError):  # no such operator, or a cuDNN without it
            return False
        [one], [two] = torch.autograd.grad(each.sum(), mine), torch.autograd.grad(expected.sum(), other)
    return torch.allclose(each.cpu(), expected, NEAR, NEAR) and torch.allclose(one.cpu(), two, NEAR, NEAR)


def losses(logits: Tensor, labels: Tensor, steps: Tensor, lengths: Tensor, fits: Tensor) -> Tensor:
    """Return the loss of each sample (B,) in fp32; without a gradient it is infinite where the text does not fit, and 0
    for an empty one. fits: (B,) bool."""
    used = fits & (lengths > 0)
    counts = torch.where(used, lengths, 1)
    return torch.where(fits, CTC.apply(logits.float(), flat(labels + 1, counts), steps, counts, used), torch.inf)


def flat(labels: Tensor, lengths: Tensor) -> Tensor:
    """Return (B · N,) int32: the labels (B, N) of one text after another; what is beyond them is arbitrary."""
    ends, places = lengths.cumsum(0), torch.arange(labels.numel(), device=labels.device)
    sample = torch.searchsorted(ends, places, right=True).clamp(max=len(labels) - 1)
    within = (places - (ends - lengths)[sample]).clamp(max=labels.shape[1] - 1)
    return labels[sample, within].int()


class CTC(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, texts: Tensor, steps: Tensor, counts: Tensor, used: Tensor) -> Tensor:
        operator = torch.ops.aten._cudnn_ctc_loss.Tensor  # softmax is in it: its gradient is that of logits
        each, gradient = operator(logits, texts, steps.int(), counts.int(), 0, True, False)
        real = torch.arange(len(logits), device=logits.device)[:, None] < steps  # beyond, it leaves what was there
        ctx.save_for_backward(torch.where((real & used)[:, :, None], gradient, 0.0))
        return torch.where(used, each, 0.0)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.saved_tensors[0] * outer[0][:, None], None, None, None, None
