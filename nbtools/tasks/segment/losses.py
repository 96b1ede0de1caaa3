"""The loss: the hardest pixels of each output (OHEM), and all of them again, those near a boundary weighing more.

Each image is judged on its own and the images are summed, so that micro-batches and processes give the gradient of one
big batch. A pixel's weight is a constant of the backward pass: the loss of an output is Σ weights · cross-entropy.
Nothing waits for the device. An image without a valid pixel weighs nothing: it adds 0, and no NaN.

B images, K classes, H × W pixels, h × w places of an auxiliary output, N pixels of an image.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from nbtools.tasks.segment.masks.classes import IGNORE
from nbtools.tasks.segment.plans import Plan


def loss_of(outputs: tuple[Tensor, tuple[Tensor, ...]], batch: dict[str, Tensor], plan: Plan) -> tuple[Tensor, Tensor]:
    """(sum over images, images that have a valid pixel) of main logits (B, K, H, W) and auxiliary ones, if any; batch
    has label (B, H, W) int64 and, where edge_factor counts, distance (B, H, W) to the nearest boundary in pixels."""
    (main, auxiliary), labels = outputs, batch["label"]
    entropy, valid = cross_entropy(main, labels), labels != IGNORE
    weights = hardest(entropy.detach(), valid, plan.ohem_threshold, plan.ohem_least)
    if plan.edge_factor:
        near = boundary_weights(batch["distance"], plan.edge_weight, plan.edge_width, plan.edge_threshold)
        weights = weights + plan.edge_factor * shares(near, valid)
    total = (weights * entropy).sum()
    for logits in auxiliary if plan.aux_weight else ():
        seen = sampled(labels, logits)
        entropy = cross_entropy(logits, seen)
        weights = hardest(entropy.detach(), seen != IGNORE, plan.ohem_threshold, plan.ohem_least)
        total = total + plan.aux_weight * (weights * entropy).sum()
    return total, valid.flatten(1).any(1).sum()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, H, W) float32 of each pixel, 0 where it is ignored; never in half precision."""
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="none")


def sampled(labels: Tensor, logits: Tensor) -> Tensor:
    """Labels (B, h, w) of the pixels on which the places of coarser logits are centred: every stride-th, and strides
    are powers of two."""
    fraction = max(n / m for n, m in zip(labels.shape[1:], logits.shape[2:], strict=True))
    stride = 2 ** math.ceil(math.log2(fraction))
    return labels[:, ::stride, ::stride]


def hardest(entropy: Tensor, valid: Tensor, threshold: float, least: float) -> Tensor:
    """Weights (B, H, W) of the mean over each image's hard pixels: those whose class has a probability below the
    threshold, or the `least` share of the valid ones that are the hardest, where that is more.

    Pixels that tie for the last places share them, so that the loss does not depend on an order of pixels. How many
    places there are depends on the valid pixels, known on the device alone: the cutoff is looked up among as many as
    there could be. Source: OhemCELoss of CoinCheung's BiSeNet, over the pixels of a whole batch there.
    """
    pixels = entropy.flatten(1).masked_fill(~valid.flatten(1), -1.0)  # (B, N), below all that is valid
    most = math.ceil(pixels.shape[1] * least)
    wanted = (valid.flatten(1).sum(1, keepdim=True) * least).ceil().long().clamp(max=most)  # (B, 1)
    top = pixels.topk(most, 1).values
    cutoff = top.gather(1, (wanted - 1).clamp(min=0)).clamp(0.0, -math.log(threshold))
    above, tied = pixels > cutoff, pixels == cutoff
    count = above.sum(1, keepdim=True)
    places = (wanted - count).clamp(min=0) / tied.sum(1, keepdim=True).clamp(min=1)
    kept = torch.maximum(count, wanted).clamp(min=1)
    return ((above + tied * places) / kept).view_as(entropy)


def boundary_weights(distance: Tensor, most: float, width: float, threshold: float) -> Tensor:
    """`most` on a boundary, falling to 1 by exp(-distance / width); 1 where that closeness is below the threshold."""
    closeness = (-distance / width).exp()
    return 1 + (most - 1) * closeness.where(closeness >= threshold, 0.0)


def shares(weights: Tensor, valid: Tensor) -> Tensor:
    """Weights (B, H, W) of the weighted mean over each image's valid pixels."""
    weights = weights * valid
    return weights / weights.sum((1, 2), keepdim=True).clamp(min=1)
