"""The 78 points of a frame, and whole batches of them on their device: coordinates relative to the body, augmentation.

A frame has MediaPipe's pose 0–24, then 21 points of the left hand, 21 of the right, and 11 of its face mesh. x grows to
the right of the picture, y downwards, both in [0, 1] of it. Augmentation draws from each clip's own random numbers: the
result does not depend on the batch, its padding, or the machine. B clips, T frames, P = 78 points.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from nbtools.data import Draws
from nbtools.tasks.sign.networks import POSITIONS
from nbtools.tasks.sign.plans import Plan

ORDER = "pose25,left_hand21,right_hand21,face11"
POINTS = 78
POSE, LEFT, RIGHT, FACE = slice(0, 25), slice(25, 46), slice(46, 67), slice(67, 78)
HANDS = (LEFT, RIGHT)  # each a wrist, then four points a finger from the thumb on
SHOULDERS = slice(11, 13)
FACE_MESH = (1, 33, 263, 133, 362, 61, 291, 105, 334, 199, 4)

POSE_PAIRS = ((1, 4), (2, 5), (3, 6), *((i, i + 1) for i in range(7, 25, 2)))
"""Left and right: eyes (inner, middle, outer), then ears, mouth, shoulders, elbows, wrists, little fingers, index
fingers, thumbs, hips. 0 is the nose."""

FACE_PAIRS = ((33, 263), (133, 362), (61, 291), (105, 334))
"""Eye corners (outer, inner), mouth corners, brows, by their numbers in the mesh; nose and chin have no partner."""

SPAN = 3.0  # times a finger is enlarged relative to its wrist: in shoulder widths a hand is a third of what an arm is
NARROW = 0.02  # of the picture: least width of the shoulders, so that a profile view does not enlarge the rest
STRETCH, BEND = 0.3, 0.5  # at time_warp 1: change of a clip's length; of its pace within it
TURN, SIZE, SHIFT = 0.2, 0.15, 0.15  # at move 1: radians; share; shoulder widths


def mirror_table() -> list[int]:
    """Point → the point that takes its place in the mirrored clip."""
    table = list(range(POINTS))
    face = {mesh: FACE.start + i for i, mesh in enumerate(FACE_MESH)}
    hands = zip(range(LEFT.start, LEFT.stop), range(RIGHT.start, RIGHT.stop), strict=True)
    for a, b in (*POSE_PAIRS, *hands, *((face[a], face[b]) for a, b in FACE_PAIRS)):
        table[a], table[b] = b, a
    return table


MIRROR = tuple(mirror_table())


class Keypoints(NamedTuple):
    """Clips of points (B, T, P, 2), which of them are seen (B, T, P) bool, and their lengths (B,) in frames. Beyond its
    length nothing of a clip is seen."""

    points: Tensor
    seen: Tensor
    lengths: Tensor


def prepared(clips: Keypoints, plan: Plan, draws: Draws | None) -> Keypoints:
    """Clips in the plan's coordinates, augmented given draws; 0 where a point is not seen, whatever its value was."""
    if draws is not None and (plan.time_warp or plan.time_crop):
        clips = retimed(clips, draws, plan.time_warp, plan.time_crop, longest=POSITIONS)
    if draws is not None and plan.mirror:
        clips = mirrored(clips, draws.chance(plan.mirror))
    clips = clips._replace(points=normalised(clips, plan, draws))
    if draws is not None and (plan.drop_hand or plan.drop_points):
        clips = hidden(clips, draws, plan.drop_hand, plan.drop_points)
    return clips._replace(points=clips.points.where(clips.seen[..., None], 0.0))


def normalised(clips: Keypoints, plan: Plan, draws: Draws | None) -> Tensor:
    """Points (B, T, P, 2) in the plan's coordinates, moved relative to the body given draws."""
    move = plan.move if draws is not None else 0.0
    if plan.normalise == "none" and not move:
        return clips.points
    centre, width = body(clips.points, clips.seen)
    points = (clips.points - centre) / width
    if draws is not None and move:
        points = moved(points, draws, move)
    if plan.normalise == "none":
        return points * width + centre
    return about_wrists(points) if plan.normalise == "hands" else points


def body(points: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """(centre (B, 1, 1, 2), width (B, 1, 1, 1)): the middle between the shoulders, and their distance, over a clip.

    Where no frame shows both shoulders: the middle of all that is seen, and a quarter of the picture.
    """
    both = seen[:, :, SHOULDERS].all(2)[:, :, None, None].to(points.dtype)  # (B, T, 1, 1)
    count = both.sum(1, keepdim=True)
    shoulders = (points[:, :, SHOULDERS] * both).sum(1, keepdim=True) / count.clamp(min=1)  # (B, 1, 2, 2)
    apart = (shoulders[:, :, :1] - shoulders[:, :, 1:]).norm(dim=3, keepdim=True)
    shown = seen[..., None].to(points.dtype)
    middle = (points * shown).sum((1, 2), keepdim=True) / shown.sum((1, 2), keepdim=True).clamp(min=1)
    centre = torch.where(count > 0, shoulders.mean(2, keepdim=True), middle)
    return centre, torch.where(count > 0, apart.clamp(min=NARROW), 0.25)


def about_wrists(points: Tensor) -> Tensor:
    """Each hand's fingers relative to its wrist, enlarged; the wrists and all else stay where they are.

    MediaPipe finds a hand whole or not at all: where a finger is seen, so is the wrist."""
    parts = [points[:, :, POSE]]
    for hand in HANDS:
        wrist, fingers = points[:, :, hand].split([1, 20], 2)
        parts += [wrist, SPAN * (fingers - wrist)]
    return torch.cat([*parts, points[:, :, FACE]], 2)


def retimed(clips: Keypoints, draws: Draws, warp: float, crop: float, longest: int) -> Keypoints:
    """Clips cut at both ends, and played faster or slower, and unevenly. None grows beyond `longest` frames that was
    not longer before."""
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

    A point is interpolated between two frames that show it, or taken from the one that does; seen as in the nearer one.
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
    """Left-right mirror images of the chosen (B,) clips; the left hand then becomes the right one."""
    table, swapped = mirror_on(clips.points.device), chosen[:, None, None]
    image, seen = clips.points.index_select(2, table), clips.seen.index_select(2, table)
    image = torch.stack([1 - image[..., 0], image[..., 1]], 3)
    points = torch.where(swapped[..., None], image, clips.points)
    return Keypoints(points, torch.where(swapped, seen, clips.seen), clips.lengths)


@cache
def mirror_on(device: torch.device) -> Tensor:
    """The mirror table on a device (P,), copied there once: a copy in every step would make the host wait."""
    return torch.tensor(MIRROR, device=device)


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
    """With the chance `hand` a hand is missing for up to half of a clip; with the chance `share` each point for all of
    it."""
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
