"""A frame of keypoints as a picture: limbs between the points that are seen, hands in colours of their own.

Drawn with Pillow alone, three times as large and then reduced: stills, animations and the live picture are the same
drawing, and no frame costs a figure of matplotlib's. T frames, P = 78 points.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from nbtools.tasks.sign.landmarks import FACE, FACE_MESH, LEFT, RIGHT

BODY_INK, FACE_INK = "#4d4d4d", "#999999"
LEFT_INK, RIGHT_INK = "#009e73", "#cc79a7"  # Okabe and Ito's, but not blue and vermilion, which mean right and wrong
PAPER = "white"
FINE = 3  # pixels drawn for a pixel shown
MARGIN = 0.06  # of the person's size, around

FINGERS = [bone for f in range(0, 20, 4) for bone in pairwise((0, *range(f + 1, f + 5)))] + [*pairwise((5, 9, 13, 17))]
MESH = {number: FACE.start + i for i, number in enumerate(FACE_MESH)}
OUTLINE = ((33, 133), (263, 362), (61, 291), (1, 4), (33, 105), (263, 334))

LIMBS: tuple[tuple[str, float, Sequence[tuple[int, int]]], ...] = (
    (FACE_INK, 0.006, [*pairwise((8, 6, 5, 4, 0, 1, 2, 3, 7)), (9, 10)]),
    (FACE_INK, 0.006, [(MESH[a], MESH[b]) for a, b in OUTLINE]),
    (BODY_INK, 0.014, [(11, 12), (11, 23), (12, 24), (23, 24), (11, 13), (13, 15), (12, 14), (14, 16)]),
    (LEFT_INK, 0.010, [(LEFT.start + a, LEFT.start + b) for a, b in FINGERS]),
    (RIGHT_INK, 0.010, [(RIGHT.start + a, RIGHT.start + b) for a, b in FINGERS]),
)
"""(colour, width as a share of the picture, pairs of points), from behind to the front."""

ALONE = ((FACE_INK, 0.008, (0, 7, 8, MESH[199])), (BODY_INK, 0.014, (11, 12, 13, 14, 15, 16)))
"""(colour, radius, points that are drawn as dots): what is seen without its neighbour still shows."""


class View(NamedTuple):
    """The square of a picture that is shown."""

    left: float
    top: float
    side: float

    def placed(self, points: np.ndarray, size: int) -> np.ndarray:
        return (points - (self.left, self.top)) * (size / self.side)


def view_of(points: np.ndarray, seen: np.ndarray) -> View:
    """The square about all that is seen in a clip, points (T, P, 2), seen (T, P); the whole picture if nothing is."""
    found = points[seen]
    if not len(found):
        return View(0.0, 0.0, 1.0)
    low, high = found.min(0), found.max(0)
    side = max(float((high - low).max()), 0.05) * (1 + 2 * MARGIN)
    left, top = (low + high - side) / 2
    return View(float(left), float(top), side)


def frame(points: np.ndarray, seen: np.ndarray, view: View, size: int) -> Image.Image:
    """One frame, points (P, 2), seen (P,), as a square RGB picture of so many pixels."""
    large = FINE * size
    image = Image.new("RGB", (large, large), PAPER)
    pen, places = ImageDraw.Draw(image), view.placed(points, large)
    for ink, width, pairs in LIMBS:
        thick = max(FINE, round(width * large))
        for a, b in pairs:
            if seen[a] and seen[b]:
                pen.line([*places[a], *places[b]], fill=ink, width=thick)
                for end in (a, b):
                    dot(pen, places[end], thick / 2, ink)
    for ink, radius, ones in ALONE:
        for one in ones:
            if seen[one]:
                dot(pen, places[one], radius * large, ink)
    return image.reduce(FINE)


def dot(pen: ImageDraw.ImageDraw, place: np.ndarray, radius: float, ink: str) -> None:
    x, y = place
    pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=ink)
