"""Clips as skeletons, drawn by Pillow three times as large and then reduced: strips of frames, and the live picture.

T frames, P = 78 points, D = 2048 features, S px of a square picture.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from PIL import Image, ImageDraw

from nbtools.data import Pack
from nbtools.figures import Sheet, gallery, judge
from nbtools.tasks.common.metrics import pair
from nbtools.tasks.sign.keypoints import FACE, FACE_MESH, LEFT, POINTS, RIGHT

BODY_INK, FACE_INK = "#7d7d7d", "#999999"  # seen on white and on black: a skeleton has no ground of its own
LEFT_INK, RIGHT_INK = "#009e73", "#cc79a7"  # Okabe and Ito's, but not blue and vermilion, which mean right and wrong
FINE = 3  # pixels drawn for a pixel shown
MARGIN = 0.06  # around the person, as a share of their size
MOMENTS, CELL = 9, 240  # frames of a strip; px of each

FINGERS = [bone for f in range(0, 20, 4) for bone in pairwise((0, *range(f + 1, f + 5)))] + [*pairwise((5, 9, 13, 17))]
MESH = {number: FACE.start + i for i, number in enumerate(FACE_MESH)}
OUTLINE = ((33, 133), (263, 362), (61, 291), (1, 4), (33, 105), (263, 334), (61, 199), (199, 291))
LIMBS: tuple[tuple[str, float, Sequence[tuple[int, int]]], ...] = (
    (FACE_INK, 0.006, [*pairwise((8, 6, 5, 4, 0, 1, 2, 3, 7)), (9, 10)]),
    (FACE_INK, 0.006, [(MESH[a], MESH[b]) for a, b in OUTLINE]),
    (BODY_INK, 0.014, [(11, 12), (11, 23), (12, 24), (23, 24), (11, 13), (13, 15), (12, 14), (14, 16)]),
    (LEFT_INK, 0.010, [(LEFT.start + a, LEFT.start + b) for a, b in FINGERS]),
    (RIGHT_INK, 0.010, [(RIGHT.start + a, RIGHT.start + b) for a, b in FINGERS]),
)
"""(colour, width as a share of the picture, pairs of points), from back to front."""


def skeleton(points: np.ndarray, seen: np.ndarray, size: int) -> Image.Image:
    """Return one frame, points (P, 2) in [0, 1] of the picture, seen (P,), as an RGBA picture (S, S)."""
    large = FINE * size
    image = Image.new("RGBA", (large, large))
    pen, places = ImageDraw.Draw(image), points * large
    for ink, width, pairs in LIMBS:
        thick = max(FINE, round(width * large))
        for a, b in pairs:
            if seen[a] and seen[b]:
                pen.line([*places[a], *places[b]], fill=ink, width=thick)
                for x, y in places[[a, b]]:
                    pen.ellipse((x - thick / 2, y - thick / 2, x + thick / 2, y + thick / 2), fill=ink)
    return image.convert("RGBa").reduce(FINE).convert("RGBA")  # by opacity: what is transparent has no colour


def strip(pack: Pack, i: int, moments: Sequence[float]) -> np.ndarray:
    """Return (S, moments · S, 4) uint8, the frames at shares of a clip in [0, 1], in the square around all that is seen
    in it; of one without keypoints its features, as grey."""
    sample = pack.sample(i)
    name = "x" if len(sample.get("x", ())) else "features"
    places = [round(share * (len(sample[name]) - 1)) for share in moments]
    if name == "features":
        grey = 255 * (1 - np.abs(sample["features"]) / (np.abs(sample["features"]).max() or 1))
        pictures = (Image.fromarray(grey[t].astype(np.uint8).reshape(32, -1)) for t in places)
        return np.hstack([np.asarray(picture.resize((CELL, CELL)).convert("RGBA")) for picture in pictures])
    points, seen = sample["x"].reshape(-1, POINTS, 2), sample["mask"].astype(bool)
    shown = points[seen] if seen.any() else np.array([(0, 0), (1, 1)])
    low, high = shown.min(0), shown.max(0)
    side = max((high - low).max(), 0.05) * (1 + 2 * MARGIN)
    points = (points - (low + high - side) / 2) / side
    return np.hstack([np.asarray(skeleton(points[t], seen[t], CELL)) for t in places])


def text_of(pack: Pack, i: int) -> str:
    return pack.classes[int(pack.arrays["label"][i][0])]


def show(pack: Pack, ids: Sequence[int] | np.ndarray, predicted: Sequence[str] | None = None) -> Sheet:
    """Draw clips one below the other, each as a strip of frames with its gloss and category; wrong predictions are
    marked by colour and ≠. Raises PackError unless there is one prediction an id."""
    ids, pictures = [int(i) for i in ids], []
    for i, guess in pair(ids, [None] * len(ids) if predicted is None else predicted, "gloss"):
        category = pack.options["categories"][int(pack.arrays["label"][i][1])]
        caption, colour = judge(text_of(pack, i), guess)
        pictures.append((strip(pack, i, np.linspace(0, 1, MOMENTS).tolist()), f"{caption} · {category}", colour))
    return gallery(pictures, columns=1)


def preview(pack: Pack, i: int, answer: str) -> tuple[np.ndarray, str, str, bool]:
    """Return (image (S, 3 S, 4) uint8 of three moments, truth, answer, True: these are names) for the live picture."""
    return strip(pack, i, (0.25, 0.5, 0.75)), text_of(pack, i), answer, True  # hands mostly hang at both ends
