"""What a network's outputs are: predictions of one pass, or of several scales and mirror images; how good they
are, as exact sums that stay on the device; and what they become outside of nbtools.

B images, C channels, K classes, H × W pixels.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nbtools.data import Card, Pack
from nbtools.tasks.segment.data import IGNORE
from nbtools.tasks.segment.networks import Outputs
from nbtools.tasks.segment.task import MEAN, SPREAD, Plan
from nbtools.train import Batch, Pair, Tensors


def infer(model: Callable[[Batch], Outputs], batch: Batch, plan: Plan) -> Outputs:
    """Return logits (B, K, H, W) of a model in eval mode for image (B, C, H, W), and no auxiliary outputs.

    A single pass returns the model's own logits. Otherwise the probabilities of all scales and mirror images are
    averaged at full size, and returned as logarithms, which cross-entropy and argmax take as logits.
    """
    if plan.eval_scales == (1.0,) and not plan.eval_flip:
        return model(batch)
    height, width = batch["image"].shape[2:]
    total = torch.zeros((), device=batch["image"].device)
    for scale in plan.eval_scales:
        zoomed = resize(batch["image"], (max(1, round(height * scale)), max(1, round(width * scale))))
        mean = model({**batch, "image": zoomed})[0].float().softmax(1)
        if plan.eval_flip:
            mean = (mean + model({**batch, "image": zoomed.flip(3)})[0].float().softmax(1).flip(3)) / 2
        total = total + resize(mean, (height, width))
    return (total / len(plan.eval_scales)).clamp_min_(torch.finfo(torch.float32).tiny).log_(), ()


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return (B, C, H, W) as (B, C, *size), bilinear."""
    return images if images.shape[2:] == size else F.interpolate(images, size, mode="bilinear", align_corners=False)


def decode(outputs: Outputs, card: Card | Pack) -> list[np.ndarray]:
    """Return the class of each pixel, (H, W) uint8, for each image."""
    return list(argmax(outputs[0]).to("cpu").numpy().astype(np.uint8))


def argmax(logits: Tensor) -> Tensor:
    """Return (B, H, W) int64. `Tensor.argmax` takes 8 times as long on a CPU: 7 of 11 ms for 180 × 240."""
    return logits.max(1).indices


def metrics(outputs: Outputs, batch: Mapping[str, Tensor]) -> dict[str, Pair]:
    """Return miou and pixel_accuracy of logits (B, K, H, W), given label (B, H, W). Nothing waits for the device."""
    classes = outputs[0].shape[1]
    counts = count_pairs(argmax(outputs[0]), batch["label"], classes)
    both = counts.diagonal()
    return {"miou": (both, counts.sum(0) + counts.sum(1) - both), "pixel_accuracy": (both.sum(), counts.sum())}


def count_pairs(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return (K, K) int64: how many pixels of a class (row) were predicted as a class (column); both (B, H, W)."""
    cell = (labels * classes + predicted).where(labels != IGNORE, classes * classes).flatten()
    counts = torch.zeros(classes * classes + 1, dtype=torch.int64, device=cell.device)
    counts.scatter_add_(0, cell, torch.ones_like(cell))  # `bincount` waits for a GPU
    return counts[:-1].view(classes, classes)


def tensors(card: Card | Pack, plan: Plan) -> tuple[Tensors, Tensors]:
    """Return what the network reads and returns, for files that leave nbtools: a single pass, at any size."""
    channels = card.columns["image"].shape[-1]
    pixels = f"(image.transpose(0, 3, 1, 2) - {MEAN}) / {SPREAD}"
    inputs = {"image": (("batch", channels, "height", "width"), pixels)}
    return inputs, {"logits": (("batch", len(card.classes), "height", "width"), "argmax over axis 1: k is classes[k]")}
