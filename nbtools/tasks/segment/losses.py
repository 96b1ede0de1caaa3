"""The weights of the loss: of hard pixels (OHEM) in each output, and of closeness to a class boundary in the main one.

Each image is scored separately and images are summed, so that micro-batches and processes give the gradient of one big
batch. A pixel's weight is a constant of the backward pass: the loss of an output is Σ weight · cross-entropy. Nothing
synchronises with the device. An image without a valid pixel adds 0, never NaN.

B images, K classes, H × W pixels, h × w positions of an auxiliary output, N pixels of an image.
"""

import math

import torch
from torch import Tensor

from nbtools.data import constant
from nbtools.tasks.segment.data import IGNORE


def subsample(labels: Tensor, logits: Tensor) -> Tensor:
    """Return labels (B, h, w) at the pixels on which the positions of coarser logits are centred: every stride-th,
    where strides are powers of two."""
    fraction = max(n / m for n, m in zip(labels.shape[1:], logits.shape[2:], strict=True))
    stride = 2 ** math.ceil(math.log2(fraction))
    return labels[:, ::stride, ::stride]


def hard_pixels(entropies: list[Tensor], targets: list[Tensor], *rule: float) -> list[Tensor]:
    """Return `ohem_weights` of every output; of those of one size, as published, at once: few launches."""
    flat = [entropy.detach() for entropy in entropies]
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


def edge_weights(distance: Tensor, valid: Tensor, weight: float, width: float, threshold: float) -> Tensor:
    """Return weights (B, H, W) of the mean over each image's valid pixels, in which one on a boundary counts `weight`
    times, falling to 1 by exp(-distance / width); once where that is below `threshold`."""
    closeness = (distance / -width).exp()
    near = 1 + (weight - 1) * closeness * (closeness >= threshold)
    weights = near * valid
    return weights / weights.sum((1, 2), keepdim=True).clamp(min=1)
