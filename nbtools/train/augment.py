"""Augmentation by name, on whole batches on their device. What becomes of an image depends on seed, epoch and sample
only, whatever the batch; mixup also needs a second sample: one of the same forward pass.

B samples, C channels, H × W pixels, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from nbtools.data import TARGET, Draws, constant, places
from nbtools.errors import TrainError
from nbtools.train.metrics import Batch, require_known

MIXUP = "mixup"
Names = Collection[str]


def crop(x: Tensor, draws: Draws, most: float) -> Tensor:
    """Shift by whole pixels, up to this share of either side; the image is mirrored at its edges."""
    lengths = x.shape[2:]
    far = tuple(min(round(most * length), length - 1) for length in lengths)
    drawn = draws.bits((2,)) % constant(tuple(2 * n + 1 for n in far), x.device, torch.int64)
    shifts = (drawn - constant(far, x.device, torch.int64))[..., None].unbind(1)  # each (B, 1)
    for axis, length, shift in zip((2, 3), lengths, shifts, strict=True):
        at = (places(length, x.device) + shift).abs()
        at = at.minimum(2 * (length - 1) - at)  # (B, length), mirrored at both ends
        x = x.gather(axis, (at[:, None, :, None] if axis == 2 else at[:, None, None, :]).expand(x.shape))
    return x


def flip(x: Tensor, draws: Draws, p: float) -> Tensor:
    """Swap left and right with this probability."""
    return torch.where(draws.chance(p)[:, None, None, None], x.flip(3), x)


def rotate(x: Tensor, draws: Draws, most: float) -> Tensor:
    """Rotate about the centre by up to so many degrees, bilinear, mirrored at the edges."""
    angle, (height, width) = draws.uniform(-most, most) * (math.pi / 180), x.shape[2:]
    cos, sin, none = angle.cos(), angle.sin(), constant((0,), x.device).expand_as(angle)
    theta = torch.stack([cos, sin * -height / width, none, sin * width / height, cos, none], 1).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def colour(x: Tensor, draws: Draws, strength: float) -> Tensor:
    """Multiply brightness, contrast around the image's mean and saturation (RGB) by 1 ± strength; not clipped."""
    light, contrast, saturation = draws.uniforms(*[(1 - strength, 1 + strength)] * 3)[..., None, None, None].unbind(1)
    mean = x.mean((1, 2, 3), keepdim=True)
    x = ((x - mean) * contrast + mean) * light
    if x.shape[1] != 3:
        return x
    grey = x.mean(1, keepdim=True)
    return grey + (x - grey) * saturation


def erase(x: Tensor, draws: Draws, most: float) -> Tensor:
    """Set to the mean of each channel, in every second image, a rectangle of 2 % up to this share of its area, 0.3 to
    3.3 times as high as wide (arXiv 1708.04896)."""
    drawn = draws.uniforms((0.02, most), (math.log(0.3), math.log(3.3)), (0, 1), (0, 1))
    area, ratio, lengths = drawn[:, 0], drawn[:, 1].exp(), constant(x.shape[2:], x.device)
    size = (torch.stack([area * ratio, area / ratio], 1).sqrt() * lengths).round()  # (B, 2)
    size = size.clamp(constant((1,), x.device), lengths)
    start = (drawn[:, 2:] * (lengths - size + 1)).floor()  # at most lengths - size: a draw is at most 1 - 2⁻²⁴
    inside = []
    for length, first, end in zip(x.shape[2:], start.unbind(1), (start + size).unbind(1), strict=True):
        at = places(length, x.device)
        inside.append((at >= first[:, None]) & (at < end[:, None]))
    chosen = (inside[0] & draws.chance(0.5)[:, None])[:, None, :, None] & inside[1][:, None, None, :]
    return torch.where(chosen, x.mean((2, 3), keepdim=True), x)


IMAGES: dict[str, tuple[float, Callable[[Tensor, Draws, float], Tensor]]] = {
    "crop": (1 / 8, crop),
    "flip": (0.5, flip),
    "rotate": (15.0, rotate),
    "colour": (0.3, colour),
    "erase": (0.2, erase),
}
"""Name → (its strength where none is given, function), in the order in which they are applied; mixup follows."""


def strengths(names: Collection[str] | Mapping[str, float]) -> dict[str, float]:
    """Return name → strength. Raises TrainError for an unknown name or a negative strength."""
    known = {name: strength for name, (strength, _) in IMAGES.items()} | {MIXUP: 0.5}
    names = (names,) if isinstance(names, str) else names
    given = dict(names) if isinstance(names, Mapping) else {name: known.get(name, 0.0) for name in names}
    for name, strength in given.items():
        require_known("augment", name, known)
        if not strength >= 0:
            raise TrainError(f"augment: the strength of {name} must be at least 0, got {strength!r}")
    return given


def augment(batch: Batch, images: Names, inputs: Names, classes: int, draws: Draws, names: Names) -> Batch:
    """Return the batch with its images (B, C, H, W) float32 augmented, several of a sample alike, and with mixup all
    inputs and `y`, which becomes (B, K) probabilities where there are K classes."""
    wanted, batch = strengths(names), dict(batch)
    for name, (_, act) in IMAGES.items():
        if name in wanted:
            first = draws.count
            for image in images:
                draws.count = first
                batch[image] = act(batch[image].float(), draws, wanted[name])
    return mixup(batch, inputs, classes, draws, wanted[MIXUP]) if MIXUP in wanted else batch


def mixup(batch: Batch, inputs: Names, classes: int, draws: Draws, most: float) -> Batch:
    """Mix into each sample a share, from 0 to `most`, of another one of this pass; 0.5 is mixup with α = 1 (arXiv
    1710.09412). Which one depends on the samples of the pass, not on their order."""
    share, order = draws.uniform(0, most), draws.bits().argsort()
    other = torch.empty_like(order).scatter_(0, order, order.roll(1))
    mixes = {name: batch[name] for name in inputs}
    if TARGET in batch:
        y = batch[TARGET]
        mixes[TARGET] = y[..., None] == places(classes, y.device) if classes else y
    for name, x in mixes.items():
        x = x.float()
        mixes[name] = torch.lerp(x, x[other], share.view(-1, *[1] * (x.dim() - 1)))
    return {**batch, **mixes}
