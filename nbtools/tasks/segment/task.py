"""What training, evaluation and prediction call.

B images, C channels (RGB, or RGB and alpha), K classes, H × W pixels.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from nbtools.data import Card, Draws, Pack
from nbtools.tasks.segment import augment, scores
from nbtools.tasks.segment.inference import Outputs, infer
from nbtools.tasks.segment.losses import loss
from nbtools.tasks.segment.networks import groups, model
from nbtools.tasks.segment.plans import Plan
from nbtools.tasks.segment.scores import metrics

__all__ = ["BEST", "batch", "decode", "groups", "infer", "loss", "metrics", "model"]

BEST = "miou"
MEAN, SPREAD = 127.5, 63.75  # of pixel values; defined here alone, for training and for predictions


def batch(raw: dict[str, Tensor], plan: Plan, draws: Draws | None) -> dict[str, Tensor]:
    """What the network takes: image (B, C, H, W) float32 from -2 to 2, and, if the raw batch has them, label (B, H, W)
    int64 and distance (B, H, W) float32 in pixels. Augmented, and so cropped, only if draws are given."""
    raw = {**raw, "image": augment.to_float(raw["image"])} if draws is None else augment.augment(raw, plan, draws)
    found = {**raw, "image": raw["image"].sub_(MEAN).div_(SPREAD)}
    if "label" in raw:
        found["label"] = raw["label"].long()
    if "distance" in raw:
        found["distance"] = raw["distance"] / scores.PER_PIXEL
    return found


def decode(outputs: Outputs, card: Card | Pack) -> list[np.ndarray]:
    """The class of each pixel, (H, W) uint8, for each image."""
    return list(scores.argmax(outputs[0]).to("cpu").numpy().astype(np.uint8))
