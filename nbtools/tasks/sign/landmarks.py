"""The 78 points of a frame: which is which, and which is whose mirror image.

MediaPipe's pose 0–24, then 21 of the left hand, 21 of the right, and 11 of its face mesh. x grows to the right of the
picture, y downwards, both in [0, 1] of it. B clips, T frames, P = 78 points.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

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
