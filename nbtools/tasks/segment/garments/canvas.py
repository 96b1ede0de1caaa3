"""Painting: outlines with cloth, folds, seams and shadows on a canvas under one light.

Costs are of the box that holds an outline, and what is smooth is computed on every second or fourth pixel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from nbtools.tasks.segment.garments.cloth import Cloth, Field
from nbtools.tasks.segment.garments.things import thick

Box = tuple[slice, slice]
"""Rows and columns of the canvas."""
Slopes = Callable[[Field, Field], Field]
"""Points x, y in pixels → slopes of the folds there, about −1 to 1."""

FINE = 3  # steps of coverage a pixel, either way
COARSE = 4  # pixels to one of a shadow, either way
RIMS = {"flat": (0.0, 1.0, 0.0), "edged": (0.025, 0.68, 0.36), "round": (0.15, 0.5, 0.62)}
"""How the rim of a thing is shaded: its width in extents of the thing, the tone at its very edge, the gain inwards."""


@dataclass
class Canvas:
    """pixels: (H, W, 3) float32 from 0 to 255. light: the direction (2,) in which shadows fall, about 1 long."""

    pixels: np.ndarray
    light: np.ndarray

    def box(self, outline: np.ndarray, margin: float = 2) -> Box | None:
        """The part of the canvas that holds an outline; None where nothing of it is seen."""
        height, width = self.pixels.shape[:2]
        low = np.maximum(np.floor(outline.min(0) - margin), 0).astype(int)
        high = np.minimum(np.ceil(outline.max(0) + margin), (width, height)).astype(int)
        return None if (high <= low).any() else (slice(low[1], high[1]), slice(low[0], high[0]))

    def shadow(self, outline: np.ndarray, height: float, strength: float) -> None:
        """Darken the ground beside an outline that is `height` pixels above it."""
        fallen = outline + height * self.light
        box = self.box(fallen, 3 * height)
        if box is not None:
            self.pixels[box] *= 1 - strength * soft(fallen, box, height)[..., None]

    def lay(self, outline: np.ndarray, cloth: Cloth, slopes: Slopes | None = None, rim: str = "edged") -> None:
        """Lay a thing of cloth down, whose pattern is bent and shaded by its folds."""
        box = self.box(outline)
        if box is None:
            return
        x, y = points(box)
        shade = np.ones((1, 1), np.float32)
        if slopes is not None:
            slope = halved(slopes, box)
            shade, x, y = np.exp(0.4 * np.clip(slope, -2, 1.2)), x + 3 * slope, y + 2 * slope
        if rim != "flat":
            width, edge, gain = RIMS[rim]
            shade = shade * (edge + gain * soft(outline, box, width * extent(outline)))
        colours = cloth.at(x, y) * shade[..., None]
        if cloth.weave:
            colours += (cloth.weave * ((x + y) % 3 - 1))[..., None]
        area = self.pixels[box]
        area += coverage(outline, box)[..., None] * (colours - area)

    def sew(self, way: np.ndarray, width: float, tone: float) -> None:
        """A seam: a line darker or lighter by `tone`, and its other side in the light."""
        for shift, factor in ((0.0, tone), (width, 2 - tone)):
            outline = thick(way + shift * self.light, width)
            box = self.box(outline)
            if box is not None:
                self.pixels[box] *= 1 + (factor - 1) * coverage(outline, box)[..., None]


def extent(outline: np.ndarray) -> float:
    """Pixels over which it extends, either way."""
    return float(np.sqrt(np.ptp(outline, axis=0).prod()))


def points(box: Box) -> tuple[Field, Field]:
    """x (1, w) and y (h, 1) of the pixels' places in a box."""
    y, x = np.ogrid[box]
    return x.astype(np.float32), y.astype(np.float32)


def coverage(outline: np.ndarray, box: Box) -> Field:
    """(h, w) shares from 0 to 1 of the pixels that an outline covers."""
    height, width = (axis.stop - axis.start for axis in box)
    mask = filled((outline - (box[1].start, box[0].start)) * FINE, height * FINE, width * FINE)
    return np.asarray(mask.reduce(FINE), np.float32) / 255


def soft(outline: np.ndarray, box: Box, radius: float) -> Field:
    """(h, w) shares from 0 to 1, blurred over `radius` pixels."""
    height, width = (axis.stop - axis.start for axis in box)
    small = (outline - (box[1].start, box[0].start)) / COARSE
    mask = filled(small, -(-height // COARSE), -(-width // COARSE))
    blurred = mask.filter(ImageFilter.GaussianBlur(float(radius) / COARSE))
    return np.asarray(blurred.resize((width, height), Image.Resampling.BILINEAR), np.float32) / 255


def filled(outline: np.ndarray, height: int, width: int) -> Image.Image:
    mask = Image.new("L", (width, height))
    ImageDraw.Draw(mask).polygon((outline - 0.5).ravel().tolist(), fill=255)
    return mask


def halved(slopes: Slopes, box: Box) -> Field:
    """(h, w) slopes, computed on every second pixel."""
    height, width = (axis.stop - axis.start for axis in box)
    x, y = points(box)
    rough = np.broadcast_to(slopes(x[:, ::2], y[::2]), (-(-height // 2), -(-width // 2)))
    found = Image.fromarray(np.ascontiguousarray(rough, np.float32))
    return np.asarray(found.resize((width, height), Image.Resampling.BILINEAR))
