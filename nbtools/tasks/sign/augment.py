"""Augmentation of whole batches of keypoints on their device, from a clip's own random numbers only: what a clip
becomes does not depend on its batch, its padding, or the machine.

B clips, T frames, P = 78 points.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nbtools.data import Draws
from nbtools.tasks.sign.landmarks import HANDS, POINTS, Keypoints, mirror_on

STRETCH, BEND = 0.3, 0.5  # at strength 1: change of a clip's length; of its pace within it
TURN, SIZE, SHIFT = 0.2, 0.15, 0.15  # at strength 1: radians; share; shoulder widths


def retimed(clips: Keypoints, draws: Draws, warp: float, crop: float, longest: int) -> Keypoints:
    """Clips cut at both ends, played faster or slower, and unevenly. No clip grows beyond `longest` frames that was not
    longer before."""
    points, seen, lengths = clips
    kept, start = 1 - draws.uniform(0, crop)[:, None], draws.uniform()[:, None]
    new = (lengths * kept[:, 0] * (1 + draws.uniform(-STRETCH, STRETCH) * warp)).round().long()
    new = torch.minimum(new, lengths.clamp(min=longest)).clamp(min=1)
    room = min(math.ceil(points.shape[1] * (1 + STRETCH * warp)), max(points.shape[1], longest))
    step = torch.arange(room, device=points.device)
    u = step / (new[:, None] - 1).clamp(min=1)  # (B, room), 0 to 1 along the new clip
    slow, swing = (draws.uniform(-BEND, BEND)[:, None] * warp for _ in range(2))
    u = u + slow * torch.sin(math.pi * u) / math.pi + swing * torch.sin(2 * math.pi * u) / (2 * math.pi)
    last = (lengths[:, None] - 1).clamp(min=0)
    place = torch.minimum(((start * (1 - kept) + kept * u) * last).clamp(min=0), last)
    points, seen = between(points, seen, place)
    return Keypoints(points, seen & (step < new[:, None])[:, :, None], new)


def between(points: Tensor, seen: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Clips at other moments: place (B, R) in frames, with fractions → points (B, R, P, 2), seen (B, R, P).

    A point lies between its places in the two frames, or where the one stands that is seen; seen as in the nearer one.
    """
    first, second = place.floor().long(), place.ceil().long()
    rows = torch.arange(len(place), device=place.device)[:, None]
    part = (place - first)[:, :, None]
    seen_first, seen_second = seen[rows, first], seen[rows, second]
    a, b = (1 - part) * seen_first, part * seen_second
    total = (a + b).clamp(min=1e-6)
    mixed = points[rows, first] * (a / total)[..., None] + points[rows, second] * (b / total)[..., None]
    return mixed, torch.where(part < 0.5, seen_first, seen_second)


def mirrored(clips: Keypoints, chosen: Tensor) -> Keypoints:
    """Left-right mirror images of the chosen (B,) clips; what was the left hand is then the right one."""
    table, swapped = mirror_on(clips.points.device), chosen[:, None, None]
    image, seen = clips.points.index_select(2, table), clips.seen.index_select(2, table)
    image = torch.stack([1 - image[..., 0], image[..., 1]], 3)
    points = torch.where(swapped[..., None], image, clips.points)
    return Keypoints(points, torch.where(swapped, seen, clips.seen), clips.lengths)


def moved(points: Tensor, draws: Draws, strength: float) -> Tensor:
    """Clips turned, resized, widened and shifted about the origin: the body, in shoulder widths."""

    def u(most: float) -> Tensor:
        return draws.uniform(-most * strength, most * strength)

    angle, size, wider = u(TURN), 1 + u(SIZE), 1 + u(SIZE / 2)
    cos, sin = size * torch.cos(angle), size * torch.sin(angle)
    turn = torch.stack([cos * wider, sin * wider, -sin, cos], 1).view(-1, 1, 2, 2)
    shift = torch.stack([u(SHIFT), u(SHIFT)], 1)[:, None, None]
    return points @ turn + shift


def hidden(clips: Keypoints, draws: Draws, hand: float, share: float) -> Keypoints:
    """A hand is lost for up to half of a clip, with the chance `hand`; each point for all of it, with the chance
    `share`."""
    points, seen, lengths = clips
    lost, right = draws.chance(hand), draws.chance(0.5)
    span = draws.uniform(0, 0.5) * lengths
    start = draws.uniform() * (lengths - span)
    step = torch.arange(seen.shape[1], device=seen.device)
    gone = lost[:, None] & (step >= start[:, None]) & (step < (start + span)[:, None])  # (B, T)
    seen = seen & ~draws.chance(share, (POINTS,))[:, None]
    for k, place in enumerate(HANDS):
        seen[:, :, place] &= ~(gone & (right == bool(k))[:, None])[:, :, None]
    return Keypoints(points, seen, lengths)
