"""How segmentation is trained: batches, loss, metrics, decoding.

B images, C channels (RGB, or RGB and alpha), K classes, H × W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn

from nbtools.data import Card, Draws, Pack
from nbtools.tasks.segment import augment, inference, losses, networks, scores
from nbtools.tasks.segment.masks.distance import PER_PIXEL
from nbtools.tasks.segment.plans import Plan
from nbtools.train import Pair

Batch = dict[str, Tensor]
Outputs = tuple[Tensor, tuple[Tensor, ...]]

BEST = "miou"
MEAN, SPREAD = 127.5, 63.75  # of pixel values; the only place that knows, for training and for answers


def model(card: Card | Pack, plan: Plan) -> nn.Module:
    """The network for a data set."""
    return networks.built(card.card if isinstance(card, Pack) else card, plan)


def groups(model: nn.Module, plan: Plan) -> list[dict[str, Any]]:
    """Parameters by lr and weight decay: the heads learn `head_lr` times as fast."""
    return networks.groups(model, plan)


def batch(raw: Batch, plan: Plan, draws: Draws | None) -> Batch:
    """What the network reads: image (B, C, H, W) float32 from -2 to 2, and, where there are any, label (B, H, W) int64
    and distance (B, H, W) float32 in pixels. Augmented, and so cropped, given draws only."""
    raw = {**raw, "image": augment.floats(raw["image"])} if draws is None else augment.augmented(raw, plan, draws)
    found = {**raw, "image": raw["image"].sub_(MEAN).div_(SPREAD)}
    if "label" in raw:
        found["label"] = raw["label"].long()
    if "distance" in raw:
        found["distance"] = raw["distance"] / PER_PIXEL
    return found


def loss(model: Callable[[Batch], Outputs], batch: Batch, plan: Plan) -> tuple[Tensor, Tensor]:
    """(sum over images, images with a pixel that counts)."""
    return losses.loss_of(model(batch), batch, plan)


def infer(model: Callable[[Batch], Outputs], batch: Batch, plan: Plan) -> Outputs:
    """The answers of evaluation and prediction: of all scales, mirror images and windows that the plan asks for."""
    return inference.infer(model, batch, plan)


def metrics(outputs: Outputs, batch: Batch) -> dict[str, Pair]:
    """miou, pixel_accuracy and boundary_f."""
    return scores.metrics_of(outputs, batch)


def decode(outputs: Outputs, card: Card | Pack) -> list[np.ndarray]:
    """The class of each pixel, (H, W) uint8, of each image."""
    return list(scores.likeliest(outputs[0]).to("cpu").numpy().astype(np.uint8))
