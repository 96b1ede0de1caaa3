"""The 78 points of a frame: which is which, which is whose mirror image, and coordinates about the body.

MediaPipe's pose 0–24, then 21 of the left hand, 21 of the right, and 11 of its face mesh. x grows to the right of the
picture, y downwards, both in [0, 1] of it. B clips, T frames, P = 78 points.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

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

SPAN = 3.0  # times a finger is enlarged about its wrist: in shoulder widths a hand is a third of what an arm is
NARROW = 0.02  # of the picture: what shoulders measure at least, lest a profile view blow the rest up


def mirror_table() -> list[int]:
    """Place → the place whose point stands there in the mirrored clip."""
    table = list(range(POINTS))
    face = {mesh: FACE.start + i for i, mesh in enumerate(FACE_MESH)}
    hands = zip(range(LEFT.start, LEFT.stop), range(RIGHT.start, RIGHT.stop), strict=True)
    for a, b in (*POSE_PAIRS, *hands, *((face[a], face[b]) for a, b in FACE_PAIRS)):
        table[a], table[b] = b, a
    return table


MIRROR = tuple(mirror_table())


@cache
def mirror_on(device: torch.device) -> Tensor:
    """The table on a device (P,), copied there once: a copy in every step would make the host wait."""
    return torch.tensor(MIRROR, device=device)


class Keypoints(NamedTuple):
    """Clips of points (B, T, P, 2), which of them are seen (B, T, P) bool, and their lengths (B,) in frames. Beyond its
    length nothing of a clip is seen."""

    points: Tensor
    seen: Tensor
    lengths: Tensor


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
    """Each hand's fingers as seen from its wrist, enlarged; the wrists stay where they are, and so does the rest.
    MediaPipe finds a hand whole or not at all: where a finger is seen, so is the wrist."""
    parts = [points[:, :, POSE]]
    for hand in HANDS:
        wrist, fingers = points[:, :, hand].split([1, 20], 2)
        parts += [wrist, SPAN * (fingers - wrist)]
    return torch.cat([*parts, points[:, :, FACE]], 2)
