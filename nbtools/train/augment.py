"""Augmentation by name, on whole batches on their device. What becomes of an image depends on seed, epoch and sample
only, whatever the batch; mixup also needs a second sample: one of the same forward pass.

B samples, C channels, H × W pixels, K classes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nbtools.data import TARGET, Card, Draws, constant, places
from nbtools.errors import TrainError
from nbtools.train.metrics import Batch, require_known

MIXUP = "mixup"
STRENGTHS = {"crop": 1 / 8, "flip": 0.5, "colour": 0.3, MIXUP: 0.5}
"""Name → its strength where none is given, in the order in which they are applied."""


def strengths(names: Collection[str] | Mapping[str, float]) -> dict[str, float]:
    """Return name → strength. Raises TrainError for an unknown name or a negative strength."""
    names = (names,) if isinstance(names, str) else names
    given = dict(names) if isinstance(names, Mapping) else {name: STRENGTHS.get(name, 0.0) for name in names}
    for name, strength in given.items():
        require_known("augment", name, STRENGTHS)
        if not strength >= 0:
            raise TrainError(f"augment: the strength of {name} must be at least 0, got {strength!r}")
    return given


def augment(batch: Batch, card: Card, images: Sequence[str], draws: Draws, names: Any) -> Batch:
    """Return the batch with its images (B, C, H, W) float32 augmented, those of a sample alike, and the points and
    boxes on them; with mixup all inputs and `y`, which becomes (B, K) probabilities where there are K classes."""
    wanted, batch = strengths(names), dict(batch)
    batch |= {name: batch[name].float() for name in images}
    if "crop" in wanted:
        bits = draws.bits((2,))
        batch |= {name: crop(batch[name], bits, wanted["crop"]) for name in images}
    if "flip" in wanted:
        flip(batch, card, images, draws.chance(wanted["flip"]))
    if "colour" in wanted:
        low, high = 1 - wanted["colour"], 1 + wanted["colour"]
        factors = draws.uniforms(*[(low, high)] * 3)[..., None, None, None]  # (B, 3, 1, 1, 1)
        batch |= {name: colour(batch[name], *factors.unbind(1)) for name in images}
    return mixup(batch, card, draws, wanted[MIXUP]) if MIXUP in wanted else batch


def crop(x: Tensor, bits: Tensor, most: float) -> Tensor:
    """Shift by whole pixels, up to this share of either side; the image is mirrored at its edges."""
    for axis in (2, 3):
        length = x.shape[axis]
        far = min(round(most * length), length - 1)
        at = (places(length, x.device) + (bits[:, axis - 2] % (2 * far + 1) - far)[:, None]).abs()
        at = at.minimum(2 * (length - 1) - at)  # (B, length), mirrored at both ends
        x = x.gather(axis, (at[:, None, :, None] if axis == 2 else at[:, None, None, :]).expand(x.shape))
    return x


def flip(batch: Batch, card: Card, images: Sequence[str], chosen: Tensor) -> None:
    """Swap left and right of the chosen samples (B,): of their images, and of the points and boxes on them. A point
    keeps its place in the list."""
    for name in images:
        batch[name] = torch.where(chosen[:, None, None, None], batch[name].flip(3), batch[name])
    for name, (image, kind) in card.options.get("points", {}).items():
        if name in batch:
            spots, width = batch[name], batch[image].shape[3]
            order = constant((2, 1, 0, 3) if kind == "boxes" else (0, 1), spots.device, torch.int64)
            moved = spots.index_select(-1, order)
            moved[..., ::2] = width - moved[..., ::2]
            swapped = chosen.view(-1, *[1] * (spots.dim() - 1))
            if card.columns[name].kind == "ragged":
                swapped = swapped & inside(spots, batch[f"{name}_length"])
            batch[name] = torch.where(swapped, moved, spots)


def inside(values: Tensor, lengths: Tensor) -> Tensor:
    """Return which steps (B, L, 1, …) of padded sequences (B, L, …) are within their lengths."""
    steps = places(values.shape[1], values.device) < lengths[:, None]
    return steps.view(*steps.shape, *[1] * (values.dim() - 2))


def colour(x: Tensor, light: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Multiply brightness, contrast around the image's mean and saturation (RGB) by these; not clipped."""
    mean = x.mean((1, 2, 3), keepdim=True)
    x = ((x - mean) * contrast + mean) * light
    grey = x.mean(1, keepdim=True)
    return grey + (x - grey) * saturation if x.shape[1] == 3 else x


def mixup(batch: Batch, card: Card, draws: Draws, most: float) -> Batch:
    """Mix into each sample a share, from 0 to `most`, of another one of this pass; 0.5 is mixup with α = 1 (arXiv
    1710.09412). Which one depends on the samples of the pass, not on their order."""
    share, order = draws.uniform(0, most), draws.bits().argsort()
    other = torch.empty_like(order).scatter_(0, order, order.roll(1))
    mixed = {name: batch[name] for name in (*card.options["inputs"], TARGET) if name in batch}
    if TARGET in mixed and card.options["kind"] == "classes":
        mixed[TARGET] = batch[TARGET][..., None] == places(len(card.classes), share.device)
    for name, x in mixed.items():
        x = x.float()
        mixed[name] = torch.lerp(x, x[other], share.view(-1, *[1] * (x.dim() - 1)))
    return {**batch, **mixed}
