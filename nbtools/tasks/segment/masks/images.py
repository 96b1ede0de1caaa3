"""One image file → (H, W, C) uint8 at the packed size, turned as its EXIF data say, and decoded no larger than needed.

Transparency: with 4 channels it is kept; with 3 it lies on white paper, as most viewers and converters show it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image

from nbtools.data import WARNING, Refused, Row
from nbtools.table import sized
from nbtools.tasks.segment.masks.classes import Table

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError)  # what Pillow raises on damage
FITS = ("same", "pad", "stretch")
ORIENTATION = 0x0112  # EXIF
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
LYING = 5  # orientations from here on exchange width and height

Size = tuple[int, int]
"""(height, width) in pixels."""


@dataclass(frozen=True)
class Place:
    """Where in the packed image the picture stands; the rest is 0, and ignored."""

    top: int
    left: int
    height: int
    width: int

    @property
    def rows(self) -> slice:
        return slice(self.top, self.top + self.height)

    @property
    def columns(self) -> slice:
        return slice(self.left, self.left + self.width)


@dataclass(frozen=True)
class Recipe:
    """How files become samples; a pack's options say it."""

    size: Size
    fit: str
    channels: int
    table: Table

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        height, width = options["size"]
        return cls((height, width), options["fit"], options["channels"], Table.of(options))

    def place(self, size: Size) -> Place:
        """Where a picture of a size comes to stand: in the middle where it is scaled to fit inside."""
        (height, width), (rows, columns) = self.size, size
        if self.fit == "same" and size != self.size:
            fix = 'pack with size=, or with fit="pad": then all are scaled'
            raise Refused(Row("image", f"images have {sized(*self.size)}", sized(*size), fix))
        if self.fit != "pad":
            return Place(0, 0, height, width)
        scale = min(height / rows, width / columns)
        inner = max(1, min(height, round(rows * scale))), max(1, min(width, round(columns * scale)))
        return Place((height - inner[0]) // 2, (width - inner[1]) // 2, *inner)


@dataclass(frozen=True)
class Picture:
    """pixels (H, W, C) uint8; size: of the whole picture as it is looked at; rows: what was done to it."""

    pixels: np.ndarray
    size: Size
    rows: tuple[Row, ...]


@contextlib.contextmanager
def opened(path: Path, key: str) -> Iterator[Image.Image]:
    """A file of an image. Raises Refused for one that is empty, damaged or none, now or when it is decoded."""
    try:
        if path.stat().st_size == 0:
            raise Refused(Row(key, f"the {key} is an image", "an empty file", "copy it again, or delete it"))
        with Image.open(path) as image:
            yield image
    except Image.DecompressionBombError:
        rule = f"the {key} has at most {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels"
        raise Refused(Row(key, rule, "more", "cut it into pieces, or make it smaller")) from None
    except UNREADABLE as error:
        value = str(getattr(error, "strerror", None) or error).replace(str(path), path.name)
        raise Refused(Row(key, f"the {key} is a whole image", value, "copy it again from its origin")) from None


def orientation(image: Image.Image) -> int:
    """As EXIF has it, 1 to 8, where it is left to do. A PNG tells it only after it was decoded, unless it stands in
    front; a TIFF is turned by Pillow itself."""
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    turn = image.getexif().get(ORIENTATION, 1)
    return turn if turn in TURNS else 1


def size_of(image: Image.Image) -> Size:
    """(height, width) of the turned picture, by its header."""
    width, height = image.size
    return (width, height) if orientation(image) >= LYING else (height, width)


def picture(path: Path, recipe: Recipe) -> Picture:
    """Raises Refused on what cannot be used."""
    with opened(path, "image") as image:
        size, turn, rows = size_of(image), orientation(image), []
        place = recipe.place(size)
        inner = (place.height, place.width) if turn >= LYING else (place.width, place.height)
        drafted = image.draft(None, inner) if image.format == "JPEG" else None  # type: ignore[arg-type]
        box = drafted[1] if drafted else (0, 0, *image.size)
        flat = flattened(image, recipe.channels, rows)
        if flat.size != inner or tuple(box[2:]) != flat.size:
            way = Image.Resampling.BOX if inner[0] < image.width else Image.Resampling.BILINEAR
            flat = flat.resize(inner, way, box=box)
        if turn in TURNS:
            flat = flat.transpose(TURNS[turn])
            fix = "nothing, if its label was drawn on the turned picture"
            rows.append(Row("image", "an image is turned as its EXIF data say", f"orientation {turn}", fix, WARNING))
    pixels = np.zeros((*recipe.size, recipe.channels), np.uint8)
    pixels[place.rows, place.columns] = np.asarray(flat)
    return Picture(pixels, size, tuple(rows))


def flattened(image: Image.Image, channels: int, rows: list[Row]) -> Image.Image:
    """RGB, or RGBA for 4 channels."""
    if image.mode.startswith(("I", "F")):
        raise Refused(Row("image", "an image has 8 bits a channel", f"mode {image.mode}", "convert it to 8 bits"))
    if "A" not in image.getbands() and "transparency" not in image.info:
        return image.convert("RGB" if channels == 3 else "RGBA")
    clear = image.convert("RGBA")
    if channels == 4 or clear.getchannel("A").getextrema()[0] == 255:
        return clear if channels == 4 else clear.convert("RGB")
    rule, fix = "3 channels have no transparency", "nothing: it lies on white; channels=4 keeps it"
    rows.append(Row("image", rule, "transparent pixels", fix, WARNING))
    paper = Image.new("RGBA", clear.size, "white")
    paper.alpha_composite(clear)
    return paper.convert("RGB")
