"""Characters that no font draws: strokes from a seed, of the kinds that Chinese has.

N characters in cells of S pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

EM = 0.7  # of a cell: the rest is room for slant and wobble
BLUR = 0.022  # of a cell: a slope along the strokes, on which a threshold makes them thick or thin
STROKES = (4, 6)


def shapes(characters: str, size: int, seed: int) -> np.ndarray:
    """(N, S, S) uint8 soft ink of each character, by the seed and its code point alone."""
    return soft([shape(character, size, seed) for character in characters])


def shape(character: str, size: int, seed: int) -> Image.Image:
    """(S, S) L, ink 255: four to six strokes in the places of a 3 × 3 grid."""
    rng = np.random.default_rng([seed, ord(character)])
    scale = 4 * size  # drawn large and reduced, since Pillow's lines have hard edges
    cell = Image.new("L", (scale, scale))
    pen, width = ImageDraw.Draw(cell), round(0.048 * scale)
    places = rng.permutation(9)[: rng.integers(STROKES[0], STROKES[1], endpoint=True)]
    for place in places:
        middle = (np.array([place % 3, place // 3]) - 1) * 0.27 * EM + rng.uniform(-0.06, 0.06, 2)
        points = (np.clip(middle + stroke(rng), -EM / 2, EM / 2) + 0.5) * scale
        pen.line([tuple(point) for point in points], 255, width, "curve")
        for x, y in (points[0], points[-1]):
            pen.ellipse((x - width / 2, y - width / 2, x + width / 2, y + width / 2), 255)
    return cell.resize((size, size), Image.Resampling.BOX)


def stroke(rng: np.random.Generator) -> np.ndarray:
    """Points (n, 2) about the origin in parts of a cell: a line, a falling or a turning stroke, or a dot."""
    long, bend = rng.uniform(0.16, 0.34), rng.uniform(-0.04, 0.04)
    kinds: Sequence[list[tuple[float, float]]] = (
        [(-long, 0.02), (0, bend), (long, -0.02)],  # across
        [(0, -long), (bend, 0), (0, long)],  # down
        [(long * 0.7, -long), (0.04, 0), (-long * 0.7, long)],  # falling to the left
        [(-long * 0.7, -long), (-0.04, 0), (long * 0.7, long)],  # falling to the right
        [(-long, -long * 0.6), (long, -long * 0.6), (long * 0.8, long)],  # across, then down
        [(-long * 0.6, -long), (-long * 0.6, long), (long, long * 0.8)],  # down, then across
        [(-0.04, -0.05), (0.04, 0.05)],  # a dot
    )
    return np.array(kinds[rng.choice(7, p=(0.2, 0.2, 0.15, 0.15, 0.12, 0.12, 0.06))])


def soft(cells: Sequence[Image.Image]) -> np.ndarray:
    """(N, S, S) uint8 with a slope along the strokes; thin strokes are brought to the same peak as thick ones."""
    radius = BLUR * cells[0].width
    ink = np.stack([np.asarray(cell.filter(ImageFilter.GaussianBlur(radius))) for cell in cells])
    peak = max(np.quantile(ink.max(axis=(1, 2)), 0.1), 32)
    return np.minimum(ink * (255 / peak), 255).astype(np.uint8)
