"""Augmentation of whole batches on their device, from a sample's own random numbers only: what a sample becomes does
not depend on its batch, its padding, or the machine. B samples, H × W pixels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from nbtools.data import Draws

STRETCH = 0.1  # largest change of a line's length


def jitter(images: Tensor, draws: Draws, strength: float) -> Tensor:
    """Small shift, scale, shear and contrast of images (B, 1, H, W) in [-1, 1]; borders are repeated outwards."""
    height, width = images.shape[2:]

    def u(most: float) -> Tensor:
        return draws.uniform(-most * strength, most * strength)

    theta = torch.zeros(len(images), 2, 3, device=images.device)
    theta[:, 0, 0], theta[:, 1, 1] = 1 + u(0.08), 1 + u(0.08)
    theta[:, 0, 1], theta[:, 1, 0] = u(0.15) * height / width, u(0.04) * width / height
    theta[:, 0, 2], theta[:, 1, 2] = u(0.06), u(0.08)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    gain, offset = (1 + u(0.25)).view(-1, 1, 1, 1), u(0.2).view(-1, 1, 1, 1)
    return (moved * gain + offset).clamp(-1, 1)


def distort(ink: Tensor, lengths: Tensor, draws: Draws, strength: float) -> tuple[Tensor, Tensor]:
    """Bend and stretch lines of ink (B, 1, H, W) in [0, 1], lengths (B,) in columns; returns both, new.

    Slant, size and height wander smoothly along a line, so that one line shows several of each. A length never shrinks:
    what follows is blank, and every label that fitted still fits.
    """
    height, width = ink.shape[2:]

    def u(most: float) -> Tensor:
        return draws.uniform(-most * strength, most * strength).view(-1, 1, 1)

    wider = math.ceil(width * (1 + STRETCH * strength))
    x = torch.arange(wider, device=ink.device, dtype=torch.float32).view(1, 1, -1)
    y = torch.arange(height, device=ink.device, dtype=torch.float32).view(1, -1, 1) - (height - 1) / 2
    stretch = 1 + u(STRETCH)
    slant = u(0.25) + wave(x, draws, 0.25 * strength)
    size = (1 + u(0.15)) * (1 + wave(x, draws, 0.15 * strength))
    rise = (u(0.06) + wave(x, draws, 0.05 * strength)) * height
    grid = torch.stack([(stretch * x + slant * y).expand(-1, height, -1), y * size + rise + (height - 1) / 2], dim=3)
    scale = torch.tensor([2 / width, 2 / height], device=ink.device)
    moved = F.grid_sample(ink, (grid + 0.5) * scale - 1, align_corners=False)
    gain = 1 + u(0.3)
    lengths = torch.maximum(lengths, torch.ceil(lengths / stretch.view(-1)).long() + 2).clamp(max=wider)
    return (moved * gain[..., None]).clamp(0, 1), lengths


def wave(x: Tensor, draws: Draws, most: float) -> Tensor:
    """(B, 1, W) in [-most, most]: two sines of random phase and of periods between 24 and 200 columns."""
    period, phase = draws.uniform(24, 200, (2,)), draws.uniform(0, 2 * math.pi, (2,))
    angles = 2 * math.pi * x[:, None] / period[:, :, None, None] + phase[:, :, None, None]  # (B, 2, 1, W)
    return most / 2 * torch.sin(angles).sum(1)
