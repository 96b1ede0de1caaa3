"""The loss: OHEM cross-entropy of each output, plus all pixels again, weighted by closeness to a class boundary.

Each image is scored separately and images are summed, so that micro-batches and processes give the gradient of one big
batch. A pixel's weight is a constant of the backward pass: the loss of an output is Σ weight · cross-entropy. Nothing
synchronises with the device. An image without a valid pixel adds 0, never NaN.

B images, K classes, H × W pixels, h × w positions of an auxiliary output, N pixels of an image.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from nbtools.data import constant
from nbtools.tasks.segment.data import IGNORE
from nbtools.tasks.segment.networks import Outputs
from nbtools.tasks.segment.task import Plan
from nbtools.train import Batch


def loss(model: Callable[[Batch], Outputs], batch: Batch, plan: Plan) -> tuple[Tensor, Tensor]:
    """Return (sum over images, number of images with a valid pixel) of main logits (B, K, H, W) and auxiliary ones.
    batch: label (B, H, W) int64 and, with edge_factor, distance (B, H, W) to the nearest boundary in pixels."""
    (main, auxiliary), labels = model(batch), batch["label"]
    outputs = [main, *auxiliary] if plan.aux_weight else [main]
    targets, valid = [subsample(labels, logits) for logits in outputs], labels != IGNORE
    entropies = [  # (B, H, W) each, 0 where ignored; never in half precision
        F.cross_entropy(logits.float(), target, ignore_index=IGNORE, reduction="none")
        for logits, target in zip(outputs, targets, strict=True)
    ]
    weights = hard_pixels(entropies, targets, plan)
    if plan.edge_factor:
        weights[0] = weights[0] + plan.edge_factor * edge_weights(batch["distance"], valid, plan)
    total, *more = ((each * entropy).sum() for each, entropy in zip(weights, entropies, strict=True))
    for term in more:
        total = total + plan.aux_weight * term
    return total, valid.flatten(1).any(1).sum()


def subsample(labels: Tensor, logits: Tensor) -> Tensor:
    """Return labels (B, h, w) at the pixels on which the positions of coarser logits are centred: every stride-th,
    where strides are powers of two."""
    fraction = max(n / m for n, m in zip(labels.shape[1:], logits.shape[2:], strict=True))
    stride = 2 ** math.ceil(math.log2(fraction))
    return labels[:, ::stride, ::stride]


def hard_pixels(entropies: list[Tensor], targets: list[Tensor], plan: Plan) -> list[Tensor]:
    """Return `ohem_weights` of every output; of those of one size, as published, at once: few launches."""
    flat, rule = [entropy.detach() for entropy in entropies], (plan.ohem_threshold, plan.ohem_least)
    if len({entropy.shape for entropy in flat}) == 1:
        return list(ohem_weights(torch.cat(flat), torch.cat(targets) != IGNORE, *rule).split(len(flat[0])))
    return [ohem_weights(entropy, target != IGNORE, *rule) for entropy, target in zip(flat, targets, strict=True)]


def ohem_weights(entropy: Tensor, valid: Tensor, threshold: float, least: float) -> Tensor:
    """Return weights (B, H, W) of the mean over each image's hard pixels: those whose class has a probability below
    `threshold`, or the hardest `least` share of the valid pixels, whichever is more.

    Pixels that tie for the last places share them, so the loss does not depend on the order of pixels. Source:
    OhemCELoss of CoinCheung's BiSeNet, there over the pixels of a whole batch.
    """
    valid = valid.flatten(1)
    pixels = entropy.flatten(1).where(valid, constant((-1,), entropy.device))  # (B, N), ignored ones below the others
    most = math.ceil(pixels.shape[1] * least)
    wanted = (valid.sum(1, keepdim=True) * least).ceil().long().clamp(1, most)  # (B, 1)
    cutoff = pixels.topk(most, 1).values.gather(1, wanted - 1).clamp(0.0, -math.log(threshold))
    above, tied = pixels > cutoff, pixels == cutoff
    count = above.sum(1, keepdim=True)
    places = (wanted - count).clamp(min=0) / tied.sum(1, keepdim=True).clamp(min=1)
    return ((above + tied * places) / torch.maximum(count, wanted)).view_as(entropy)


def edge_weights(distance: Tensor, valid: Tensor, plan: Plan) -> Tensor:
    """Return weights (B, H, W) of the mean over each image's valid pixels, in which one on a boundary counts
    `edge_weight` times, falling to 1 by exp(-distance / edge_width); once where that is below `edge_threshold`."""
    closeness = (distance / -plan.edge_width).exp()
    near = 1 + (plan.edge_weight - 1) * closeness * (closeness >= plan.edge_threshold)
    weights = near * valid
    return weights / weights.sum((1, 2), keepdim=True).clamp(min=1)
