"""Augmentation of whole batches of lines on their device, from each sample's own random numbers only: what a line
becomes depends neither on its batch nor on its padding nor on the machine.

Ink (B, 1, H, W) in [0, 1], 0 is paper; lengths (B,) columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from nbtools.data import Draws
from nbtools.tasks.hwdb.networks import beyond

STRETCH, SLANT = 0.08, 0.2  # largest change of a line's length; columns a row leans by
SPOTS = 3


def augmented(ink: Tensor, lengths: Tensor, draws: Draws, strength: float) -> tuple[Tensor, Tensor]:
    """Lines bent, with thicker or thinner strokes, in another contrast, partly covered by spots of paper; and their
    lengths, which never shrink, so that every text that fitted still fits. strength: 1 is the recipe's."""
    ink, lengths = bent(ink, lengths, draws, strength)
    ink = thickened(ink, draws.uniform(-0.5 * strength, 0.5 * strength))
    gain, offset = 1 + draws.uniform(-0.3, 0.3) * strength, draws.uniform(-0.08, 0.08) * strength
    ink = (ink * gain.view(-1, 1, 1, 1) + offset.view(-1, 1, 1, 1)).clamp_(0, 1)
    ink.masked_fill_(spots(ink, lengths, draws, strength), 0)
    return ink.masked_fill_(beyond(lengths, ink.shape[3]), 0), lengths


def bent(ink: Tensor, lengths: Tensor, draws: Draws, strength: float) -> tuple[Tensor, Tensor]:
    """Stretched, slanted, scaled, shifted and turned a little; a turn moves a line's ends by at most 6 % of its height
    up or down, however long it is."""
    height, width = ink.shape[2:]

    def u(most: float) -> Tensor:
        return draws.uniform(-most * strength, most * strength).view(-1, 1, 1)

    stretch, slant, size, rise, turn = 1 + u(STRETCH), u(SLANT), 1 + u(0.1), u(0.05), u(0.06)
    wider = math.ceil(width * (1 + STRETCH * strength) + SLANT * strength * height) + 1
    lean = slant.abs() * height / 2  # room on either side for what leans out
    x = torch.arange(wider, device=ink.device, dtype=torch.float32).view(1, 1, -1)
    y = torch.arange(height, device=ink.device, dtype=torch.float32).view(1, -1, 1) - (height - 1) / 2
    from_x = (x - lean - slant * y) / stretch
    along = from_x / lengths.view(-1, 1, 1) - 0.5
    from_y = y / size + (rise + 2 * turn * along) * height + (height - 1) / 2
    scale = torch.tensor([2 / width, 2 / height], device=ink.device)
    moved = F.grid_sample(ink, (torch.stack([from_x, from_y], 3) + 0.5) * scale - 1, align_corners=False)
    grown = torch.ceil(lengths * stretch.view(-1) + 2 * lean.view(-1)).long()
    return moved, torch.maximum(lengths, grown)


def thickened(ink: Tensor, amount: Tensor) -> Tensor:
    """Strokes a pixel wider where the amount (B,) is positive, thinner where it is negative: interpolated by that
    amount towards the 3 × 3 maximum or minimum. Padding and what lies outside of the picture are both paper."""
    sign = amount.sign().view(-1, 1, 1, 1)
    around = F.pad(ink * sign, (1, 1, 1, 1))
    return ink + amount.view(-1, 1, 1, 1) * (F.max_pool2d(around, 3, 1) - ink * sign)


def spots(ink: Tensor, lengths: Tensor, draws: Draws, strength: float) -> Tensor:
    """(B, 1, H, W) bool: rectangles of up to a quarter of the height, and strips of up to a tenth across all of it;
    no character, which is about as wide as high, is covered whole."""
    height, width = ink.shape[2:]
    x = torch.arange(width, device=ink.device).view(1, 1, 1, -1)
    y = torch.arange(height, device=ink.device).view(1, 1, -1, 1)
    covered = torch.zeros(1, dtype=torch.bool, device=ink.device)
    for _ in range(SPOTS):
        left, top = (draws.uniform().view(-1, 1, 1, 1) * size for size in (lengths.view(-1, 1, 1, 1), height))
        wide, high = (draws.uniform(0, 0.25 * strength * height).view(-1, 1, 1, 1) for _ in range(2))
        covered = covered | ((x >= left) & (x < left + wide) & (y >= top) & (y < top + high))
        left, wide = draws.uniform() * lengths, draws.uniform(0, 0.1 * strength * height)
        covered = covered | ((x >= left.view(-1, 1, 1, 1)) & (x < (left + wide).view(-1, 1, 1, 1)))
    return covered
