"""Connectionist temporal classification (Graves et al. 2006): loss, greedy decoding, and which texts fit at all.

A network's answer is logits (T, B, 1 + classes), blank 0, and the true number of time steps of each sample (B,). Labels
are places in `classes`, (B, N) padded, with their lengths (B,). B samples, T time steps, N characters.
"""

from collections.abc import Sequence
from functools import cache
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nbtools.errors import TrainError
from nbtools.train import Tensors

BLANK = 0
MOST_LABELS = 255  # of a text, in cuDNN
NEAR = 1e-3

Outputs = tuple[Tensor, Tensor]


def loss(outputs: Outputs, labels: Tensor, lengths: Tensor, reduction: str = "sum") -> Tensor:
    """Return the sum over samples, or with reduction="none" of each (B,); fp32 and outside autocast, which does not
    list CTC: bf16 raises there, fp16 gives NaN.

    Raises TrainError for deterministic training on CUDA without cuDNN: torch's kernel (LossCTC.cu) is not.
    """
    logits, steps = outputs
    device = logits.device.type
    if device == "mps":  # for which torch has no kernel
        return loss((logits.cpu(), steps.cpu()), labels.cpu(), lengths.cpu(), reduction).to(logits.device)
    if device == "cuda" and labels.shape[1] <= MOST_LABELS and cudnn_agrees(logits.device):
        each = cudnn_losses(logits, labels, steps, lengths)
        return each if reduction == "none" else each.sum()
    if device == "cuda" and torch.is_grad_enabled() and torch.get_deterministic_debug_mode() == 2:
        rule = "Plan.deterministic is True, and torch's CTC has no deterministic gradient on CUDA"
        limit = f"cuDNN's, where it works, takes texts of up to {MOST_LABELS} characters"
        raise TrainError(f"{rule} ({limit}); set deterministic=False, or train on a CPU")
    with torch.autocast(device, enabled=False):
        return F.ctc_loss(logits.float().log_softmax(2), labels + 1, steps, lengths, BLANK, reduction)


def greedy(outputs: Outputs) -> list[list[int]]:
    """Return the best class of every real time step, repeats merged, blanks dropped; places in classes."""
    logits, steps = outputs
    return [[place - 1 for place, _ in groupby(row) if place != BLANK] for row in texts(logits.argmax(2).t(), steps)]


def texts(labels: Tensor, lengths: Tensor) -> list[list[int]]:
    return [row[:n] for row, n in zip(labels.tolist(), lengths.tolist(), strict=True)]


def feasible(steps: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    """Return (B,) bool: whether CTC can spell labels of these lengths in this many steps; else its loss is infinite."""
    real = torch.arange(1, labels.shape[1], device=labels.device) < lengths[:, None]
    return steps >= lengths + ((labels[:, 1:] == labels[:, :-1]) & real).sum(1)


def needed_steps(text: Sequence[Any]) -> int:
    """Return the fewest steps in which CTC can spell a text: equal neighbours need a blank between them."""
    return len(text) + sum(a == b for a, b in pairwise(text))


def tensors(height: int, classes: int, image: str) -> tuple[Tensors, Tensors]:
    """Return what a network of lines reads and returns; image: how that follows from the packed one (B, W, H)."""
    meaning = "argmax over the last axis, repeats merged, 0 dropped; k is classes[k - 1]"
    inputs = {"image": (("batch", 1, height, "width"), image), "image_length": (("batch",), "image_length")}
    logits, steps = (("steps", "batch", 1 + classes), meaning), (("batch",), "how many of the steps are a line's own")
    return inputs, {"logits": logits, "steps": steps}


# By cuDNN: neither loss nor gradient waits for the host, both are deterministic, and a CUDA graph may record them.
# `F.ctc_loss` copies lengths to the host on the way to either of its kernels, so the operator is called below it. It
# checks nothing: texts lie in a tensor of fixed size, and what cuDNN leaves undefined is masked here.


@cache
def cudnn_agrees(device: torch.device) -> bool:
    """Return whether a small batch has torch's own loss and gradient: once a process, which waits for it."""
    logits = torch.randn(3, 7, 12, generator=torch.Generator().manual_seed(0)).permute(2, 0, 1)  # as of networks
    labels, lengths = torch.tensor([[1, 1, 2], [3, 0, 0], [0, 5, 2]]), torch.tensor([3, 1, 3])
    steps = torch.tensor([12, 9, 10])
    with torch.enable_grad():
        mine, other = logits.to(device).requires_grad_(), logits.requires_grad_()
        expected = F.ctc_loss(other.log_softmax(2), labels + 1, steps, lengths, reduction="none")
        try:
            each = cudnn_losses(mine, labels.to(device), steps.to(device), lengths.to(device))
        except (RuntimeError, AttributeError):  # no such operator, or a cuDNN without it
            return False
        [one], [two] = torch.autograd.grad(each.sum(), mine), torch.autograd.grad(expected.sum(), other)
    return torch.allclose(each.cpu(), expected, NEAR, NEAR) and torch.allclose(one.cpu(), two, NEAR, NEAR)


def cudnn_losses(logits: Tensor, labels: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
    """Return each sample's loss (B,) in fp32; without gradients inf where the text does not fit, 0 for an empty one."""
    fits = feasible(steps, labels, lengths)
    used = fits & (lengths > 0)
    counts = torch.where(used, lengths, 1)
    return torch.where(fits, CudnnCTC.apply(logits.float(), flat(labels + 1, counts), steps, counts, used), torch.inf)


def flat(labels: Tensor, lengths: Tensor) -> Tensor:
    """Return (B · N,) int32: the labels (B, N) of one text after another; what is beyond them is arbitrary."""
    ends, places = lengths.cumsum(0), torch.arange(labels.numel(), device=labels.device)
    sample = torch.searchsorted(ends, places, right=True).clamp(max=len(labels) - 1)
    within = (places - (ends - lengths)[sample]).clamp(max=labels.shape[1] - 1)
    return labels[sample, within].int()


class CudnnCTC(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, texts: Tensor, steps: Tensor, counts: Tensor, used: Tensor) -> Tensor:
        operator = torch.ops.aten._cudnn_ctc_loss.Tensor  # softmax is in it: its gradient is that of logits
        each, gradient = operator(logits.contiguous(), texts, steps.int(), counts.int(), 0, True, False)
        real = torch.arange(len(logits), device=logits.device)[:, None] < steps  # beyond, it leaves what was there
        ctx.save_for_backward(torch.where((real & used)[:, :, None], gradient, 0.0))
        return torch.where(used, each, 0.0)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.saved_tensors[0] * outer[0][:, None], None, None, None, None
