"""Answers that cost more than one look: several scales, mirror images, sliding windows.

B images, C channels, K classes, H × W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from nbtools.tasks.segment.plans import Plan

Batch = dict[str, Tensor]
Outputs = tuple[Tensor, tuple[Tensor, ...]]
Look = Callable[[Tensor], Tensor]
Window = tuple[slice, slice]  # rows, columns


def infer(model: Callable[[Batch], Outputs], batch: Batch, plan: Plan) -> Outputs:
    """What a model in eval mode says of image (B, C, H, W): (B, K, H, W), and no auxiliary outputs.

    One look at the whole image is the model's own logits. More are the mean of their probabilities, bilinear at full
    size, each scale with the same weight; what comes back is its logarithm, which cross-entropy and argmax take as
    logits. One scale and one direction at a time: the largest scale says what memory it needs.
    """
    if is_single(plan):
        return model(batch)
    image, total = batch["image"], None

    def look(part: Tensor) -> Tensor:
        return model({**batch, "image": part})[0].float().softmax(1)

    for scale in plan.eval_scales:
        found = of_scale(look, resized(image, scaled(size_of(image), scale)), plan)
        found = resized(found, size_of(image))
        total = found if total is None else total.add_(found)
    assert total is not None, "Plan.eval_scales is never empty"
    return total.div_(len(plan.eval_scales)).clamp_min_(torch.finfo(torch.float32).tiny).log_(), ()


def is_single(plan: Plan) -> bool:
    """Whether a plan evaluates with one look at the whole image as it is."""
    return plan.eval_scales == (1.0,) and not plan.eval_flip and plan.eval_window is None


def of_scale(look: Look, image: Tensor, plan: Plan) -> Tensor:
    """Probabilities (B, K, h, w) of an image of one scale, and of its mirror image where the plan says so."""
    found = in_windows(look, image, plan.eval_window)
    if not plan.eval_flip:
        return found
    return found.add_(in_windows(look, image.flip(3), plan.eval_window).flip(3)).div_(2)


def in_windows(look: Look, image: Tensor, window: int | None) -> Tensor:
    """Probabilities (B, K, h, w): the mean of all windows that see a pixel; the whole where it fits into one. So many
    windows at a time as together have no more pixels than the image."""
    places = windows(size_of(image), window)
    if len(places) == 1:
        return look(image)
    total, seen = None, image.new_zeros(size_of(image), dtype=torch.float32)
    many = max(1, math.prod(size_of(image)) // area(places[0]))
    for start in range(0, len(places), many):
        some = places[start : start + many]
        found = look(torch.cat([image[:, :, rows, columns] for rows, columns in some]))
        if total is None:
            total = found.new_zeros((len(image), found.shape[1], *size_of(image)))
        for (rows, columns), part in zip(some, found.split(len(image)), strict=True):
            total[:, :, rows, columns] += part
            seen[rows, columns] += 1
    assert total is not None, "there is at least one window"
    return total.div_(seen)


def windows(size: tuple[int, int], side: int | None) -> list[Window]:
    """Windows that cover an image, all of one size; the last ones end at its border."""
    rows, columns = (spans(length, side or length) for length in size)
    return [(row, column) for row in rows for column in columns]


def spans(length: int, side: int) -> list[slice]:
    """Stretches of `side`, or of all where that is less. They overlap by a third: few pixels lie at a rim only."""
    step = max(1, side * 2 // 3)
    starts = [*range(0, length - side, step), max(0, length - side)]
    return [slice(start, min(start + side, length)) for start in starts]


def scaled(size: tuple[int, int], scale: float) -> tuple[int, int]:
    height, width = (max(1, round(side * scale)) for side in size)
    return height, width


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, C, H, W) → (B, C, *size), bilinear."""
    return images if size_of(images) == size else F.interpolate(images, size, mode="bilinear", align_corners=False)


def size_of(images: Tensor) -> tuple[int, int]:
    return images.shape[2], images.shape[3]


def eval_cost(plan: Plan, size: tuple[int, int] | None = None) -> float:
    """Pixels that evaluation looks at for each pixel of an image (H, W): about how often it costs one look. Without a
    size windows are not counted, whose overlaps may double it."""
    if size is None:
        return sum(scale**2 for scale in plan.eval_scales) * (1 + plan.eval_flip)
    pixels = sum(
        map(area, (one for scale in plan.eval_scales for one in windows(scaled(size, scale), plan.eval_window)))
    )
    return pixels * (1 + plan.eval_flip) / math.prod(size)


def area(window: Window) -> int:
    rows, columns = window
    return (rows.stop - rows.start) * (columns.stop - columns.start)
