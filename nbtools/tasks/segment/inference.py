"""Predictions beyond one forward pass: several scales, mirror images, sliding windows; what they gain, and cost.

B images, C channels, K classes, H × W pixels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbtools.data import Card, Pack, collate
from nbtools.errors import PlanError
from nbtools.tasks import segment
from nbtools.tasks.common.latency import measure_latency
from nbtools.tasks.segment.augment import MEAN, SPREAD
from nbtools.tasks.segment.networks import Outputs
from nbtools.tasks.segment.plans import ALL_SCALES, Plan
from nbtools.tasks.segment.scores import argmax
from nbtools.train import Batch, Sums, Tensors, forward

if TYPE_CHECKING:
    import pandas as pd

Ids = Sequence[int] | np.ndarray


def infer(model: Callable[[Batch], Outputs], batch: Batch, plan: Plan) -> Outputs:
    """Logits (B, K, H, W) of a model in eval mode for image (B, C, H, W), and no auxiliary outputs.

    A single pass over the whole image returns the model's own logits. Otherwise the probabilities of all scales, mirror
    images and windows are averaged at full size, each scale with the same weight, and returned as logarithms, which
    cross-entropy and argmax take as logits. One scale and direction at a time: the largest scale sets the memory.
    """
    if plan.eval_scales == (1.0,) and not plan.eval_flip and plan.eval_window is None:
        return model(batch)
    size = batch["image"].shape[2], batch["image"].shape[3]

    def predict(part: Tensor) -> Tensor:
        return model({**batch, "image": part})[0].float().softmax(1)

    def probabilities(scale: float) -> Tensor:
        zoomed = resize(batch["image"], scaled(size, scale))
        found = in_windows(predict, zoomed, plan.eval_window)
        if plan.eval_flip:
            found = (found + in_windows(predict, zoomed.flip(3), plan.eval_window).flip(3)) / 2
        return resize(found, size)

    total = torch.zeros((), device=batch["image"].device)
    for scale in plan.eval_scales:
        total = total + probabilities(scale)
    return (total / len(plan.eval_scales)).clamp_min_(torch.finfo(torch.float32).tiny).log_(), ()


def in_windows(predict: Callable[[Tensor], Tensor], image: Tensor, window: int | None) -> Tensor:
    """Probabilities (B, K, h, w): the mean over all windows that contain a pixel."""
    size = image.shape[2], image.shape[3]
    if len(places := windows(size, window)) == 1:
        return predict(image)
    total, seen = torch.zeros(()), image.new_zeros(size, dtype=torch.float32)
    for n, (rows, columns) in enumerate(places):
        found = predict(image[:, :, rows, columns])
        total = total if n else found.new_zeros((*found.shape[:2], *size))
        total[:, :, rows, columns] += found
        seen[rows, columns] += 1
    return total / seen


def windows(size: tuple[int, int], side: int | None) -> list[tuple[slice, slice]]:
    """Windows of one size that cover an image; the last ones end at its border. They overlap by a third, so that few
    pixels lie at a window's edge only. side: None or at least the image's for one window."""

    def spans(length: int) -> list[slice]:
        span = min(side or length, length)
        starts = [*range(0, length - span, max(1, (side or length) * 2 // 3)), length - span]
        return [slice(start, start + span) for start in starts]

    rows, columns = map(spans, size)
    return [(row, column) for row in rows for column in columns]


def scaled(size: tuple[int, int], scale: float) -> tuple[int, int]:
    height, width = (max(1, round(side * scale)) for side in size)
    return height, width


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, C, H, W) → (B, C, *size), bilinear."""
    return images if images.shape[2:] == size else F.interpolate(images, size, mode="bilinear", align_corners=False)


def decode(outputs: Outputs, card: Card | Pack) -> list[np.ndarray]:
    """The class of each pixel, (H, W) uint8, for each image."""
    return list(argmax(outputs[0]).to("cpu").numpy().astype(np.uint8))


def tensors(card: Card | Pack, plan: Plan) -> tuple[Tensors, Tensors]:
    """What the network reads and returns, for files that leave nbtools: a single pass, at any size."""
    channels = card.columns["image"].shape[-1]
    pixels = f"(image.transpose(0, 3, 1, 2) - {MEAN}) / {SPREAD}"
    inputs = {"image": (("batch", channels, "height", "width"), pixels)}
    return inputs, {"logits": (("batch", len(card.classes), "height", "width"), "argmax over axis 1: k is classes[k]")}


def eval_cost(plan: Plan, size: tuple[int, int]) -> float:
    """Pixels that evaluation passes through the network for each pixel of an image (H, W): about its cost relative to a
    single pass."""
    every = (one for scale in plan.eval_scales for one in windows(scaled(size, scale), plan.eval_window))
    pixels = sum((rows.stop - rows.start) * (columns.stop - columns.start) for rows, columns in every)
    return pixels * (1 + plan.eval_flip) / math.prod(size)


def usual(size: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """The variants to compare for images (H, W): name → settings of the plan. Windows have half the longer side."""
    window = max(32, round(max(size) / 64) * 32)
    scales = f"{len(ALL_SCALES)} scales, {min(ALL_SCALES):g} to {max(ALL_SCALES):g}"
    return {
        "single pass": {},
        "flip": {"eval_flip": True},
        scales: {"eval_scales": ALL_SCALES},
        f"{scales}, flip": {"eval_scales": ALL_SCALES, "eval_flip": True},
        f"windows of {window} px": {"eval_window": window},
    }


def costs(
    model: nn.Module,
    pack: Pack,
    plan: Plan,
    split: str = "val",
    ids: Ids | None = None,
    batch_size: int = 8,
) -> pd.DataFrame:
    """One row per way to evaluate a split, or some ids of a pack: miou, gain (over the first way), ms (an image, the
    median of all batches), times (relative to the first way, the median of the batches' ratios) and pixels (evaluated
    for each of an image's). A machine's speed varies, so every batch is evaluated in all ways in turn.

    Raises PlanError without images.
    """
    import pandas as pd

    ids, device = pack.ids(split) if ids is None else ids, next(model.parameters()).device
    if not len(ids):
        raise PlanError("costs need at least one image, got none; take some of pack.ids('val')")
    height, width, _ = pack.columns["image"].shape
    single = plan.replace(eval_scales=(1.0,), eval_flip=False, eval_window=None)
    ways = {name: single.replace(**changes) for name, changes in usual((height, width)).items()}
    sums, seconds = {name: Sums(device) for name in ways}, {name: [] for name in ways}
    for start in range(0, len(ids), batch_size):
        samples = [pack.sample(int(i)) for i in ids[start : start + batch_size]]
        raw = collate(samples, pack.columns)
        for name, way in ways.items():
            for _ in range(1 if start else 2):  # the first time loads libraries and chooses kernels
                taken, batch, outputs = timed(model, raw, way, pack)
            seconds[name].append(taken / len(samples))
            sums[name].add(segment.metrics(outputs, batch))
    first, rows = next(iter(ways)), []
    base = sums[first].read()["miou"]
    for name, way in ways.items():
        miou, ms = sums[name].read()["miou"], 1e3 * statistics.median(seconds[name])
        times = statistics.median(a / b for a, b in zip(seconds[name], seconds[first], strict=True))
        rows.append((miou, miou - base, ms, times, eval_cost(way, (height, width))))
    index = pd.Index(ways, name=f"{len(ids)} images on {device}")
    return pd.DataFrame(rows, index, ["miou", "gain", "ms", "times", "pixels"])


def latency(model: nn.Module, pack: Pack, plan: Plan, ids: Ids) -> pd.DataFrame:
    """The time from one packed image to its class map, evaluated as the plan says; each id once, after a few to warm
    up. Raises PlanError without ids."""
    height, width, _ = pack.columns["image"].shape
    images = [collate([{"image": np.asarray(pack.arrays["image"][int(i)])}], pack.columns) for i in ids]
    device = next(model.parameters()).device
    return measure_latency(lambda raw: timed(model, raw, plan, pack), images, device, f"{height} × {width} pixels")


def timed(model: nn.Module, raw: Batch, plan: Plan, pack: Pack) -> tuple[float, Batch, Outputs]:
    """(seconds until the class maps are on the host, batch, outputs). Copying to the host waits for the device."""
    first = next(model.parameters()).detach()
    first.flatten()[:1].cpu()  # what is still queued, such as the metrics of the batch before, does not count
    began = perf_counter()
    raw = {name: tensor.to(first.device) for name, tensor in raw.items()}
    batch, outputs = forward(segment, model, raw, plan, first.device)
    decode(outputs, pack)
    return perf_counter() - began, batch, outputs
