"""Inference beyond one forward pass: several scales, mirror images, sliding windows.

B images, C channels, K classes, H × W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from nbtools.tasks.segment.plans import Plan
from nbtools.train import Batch

Outputs = tuple[Tensor, tuple[Tensor, ...]]
Predict = Callable[[Tensor], Tensor]
Window = tuple[slice, slice]  # rows, columns


def infer(model: Callable[[Batch], Outputs], batch: Batch, plan: Plan) -> Outputs:
    """Logits (B, K, H, W) of a model in eval mode for image (B, C, H, W), and no auxiliary outputs.

    A single pass over the whole image returns the model's own logits. Otherwise the probabilities of all scales, mirror
    images and windows are averaged at full size, each scale with the same weight, and returned as logarithms, which
    cross-entropy and argmax take as logits. One scale and direction at a time: the largest scale sets the memory.
    """
    if plan.eval_scales == (1.0,) and not plan.eval_flip and plan.eval_window is None:
        return model(batch)
    image = batch["image"]
    size, total = (image.shape[2], image.shape[3]), torch.zeros(())

    def predict(part: Tensor) -> Tensor:
        return model({**batch, "image": part})[0].float().softmax(1)

    for n, scale in enumerate(plan.eval_scales):
        zoomed = resize(image, scaled(size, scale))
        found = in_windows(predict, zoomed, plan.eval_window)
        if plan.eval_flip:
            found.add_(in_windows(predict, zoomed.flip(3), plan.eval_window).flip(3)).div_(2)
        found = resize(found, size)
        total = total.add_(found) if n else found
    return total.div_(len(plan.eval_scales)).clamp_min_(torch.finfo(torch.float32).tiny).log_(), ()


def in_windows(predict: Predict, image: Tensor, window: int | None) -> Tensor:
    """Probabilities (B, K, h, w): the mean over all windows that contain a pixel. Windows are batched as long as
    together they have no more pixels than the image."""
    size = image.shape[2], image.shape[3]
    places = windows(size, window)
    if len(places) == 1:
        return predict(image)
    total, seen = torch.zeros(()), image.new_zeros(size, dtype=torch.float32)
    many = max(1, math.prod(size) // area(places[0]))
    for start in range(0, len(places), many):
        some = places[start : start + many]
        found = predict(torch.cat([image[:, :, rows, columns] for rows, columns in some]))
        if not start:
            total = found.new_zeros((len(image), found.shape[1], *size))
        for (rows, columns), part in zip(some, found.split(len(image)), strict=True):
            total[:, :, rows, columns] += part
            seen[rows, columns] += 1
    return total.div_(seen)


def windows(size: tuple[int, int], side: int | None) -> list[Window]:
    """Windows of one size that cover an image; the last ones end at its border. They overlap by a third, so that few
    pixels lie at a window's edge only. side: None or at least the image's for one window."""

    def spans(length: int) -> list[slice]:
        span = min(side or length, length)
        starts = [*range(0, length - span, max(1, (side or length) * 2 // 3)), length - span]
        return [slice(start, start + span) for start in starts]

    rows, columns = map(spans, size)
    return [(row, column) for row in rows for column in columns]


def area(window: Window) -> int:
    rows, columns = window
    return (rows.stop - rows.start) * (columns.stop - columns.start)


def scaled(size: tuple[int, int], scale: float) -> tuple[int, int]:
    height, width = (max(1, round(side * scale)) for side in size)
    return height, width


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, C, H, W) → (B, C, *size), bilinear."""
    return images if images.shape[2:] == size else F.interpolate(images, size, mode="bilinear", align_corners=False)


def eval_cost(plan: Plan, size: tuple[int, int] | None = None) -> float:
    """Pixels that evaluation passes through the network for each pixel of an image (H, W): about its cost relative to a
    single pass. Without a size windows are not counted, whose overlaps may double it."""
    if size is None:
        return sum(scale**2 for scale in plan.eval_scales) * (1 + plan.eval_flip)
    pixels = sum(area(one) for scale in plan.eval_scales for one in windows(scaled(size, scale), plan.eval_window))
    return pixels * (1 + plan.eval_flip) / math.prod(size)
