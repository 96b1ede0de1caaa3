"""Connectionist temporal classification (Graves et al. 2006): loss, greedy decoding, and which texts fit at all.

A network's answer is logits (T, B, 1 + classes), blank 0, and the true number of time steps of each sample (B,). Labels
are places in `classes`, (B, N) padded, with their lengths (B,). B samples, T time steps, N characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nbtools.errors import TrainError
from nbtools.tasks.common import cudnn_ctc
from nbtools.train import Tensors

BLANK = 0

Outputs = tuple[Tensor, Tensor]


def loss(outputs: Outputs, labels: Tensor, lengths: Tensor, reduction: str = "sum") -> Tensor:
    """Return the sum over samples, or with reduction="none" of each (B,); fp32 and outside autocast, which does not
    list CTC: bf16 raises there, fp16 gives NaN.

    Raises TrainError for deterministic training on CUDA where cuDNN cannot be used: torch has no deterministic kernel
    (LossCTC.cu).
    """
    logits, steps = outputs
    if cudnn_ctc.able(logits, labels):
        each = cudnn_ctc.losses(logits, labels, steps, lengths, feasible(steps, labels, lengths))
        return each if reduction == "none" else each.sum()
    device = logits.device.type
    if device == "cuda" and torch.is_grad_enabled() and torch.get_deterministic_debug_mode() == 2:
        raise TrainError(
            "Plan.deterministic is True, and CTC has no deterministic gradient on CUDA; set deterministic=False, "
            "or train on a CPU"
        )
    with torch.autocast(device, enabled=False):
        log_probs = logits.float().log_softmax(2)
        return F.ctc_loss(log_probs, labels + 1, steps, lengths, blank=BLANK, reduction=reduction)


def greedy(outputs: Outputs) -> list[list[int]]:
    """Return the best class of every real time step, repeats merged, blanks dropped; places in classes."""
    logits, steps = outputs
    best = texts(logits.argmax(2).t(), steps)
    return [[place - 1 for place, _ in groupby(row) if place != BLANK] for row in best]


def texts(labels: Tensor, lengths: Tensor) -> list[list[int]]:
    """Return the labels of each sample, without padding."""
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
