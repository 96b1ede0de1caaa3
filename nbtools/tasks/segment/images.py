"""Image files and label images → arrays at the packed size.

Images are rotated according to their EXIF data, and decoded no larger than needed. Transparency is kept with 4
channels; with 3 the image is drawn on white, as most viewers and converters show it.

A label's pixel value is its id: grey images of 1 to 16 bits, and the index of a palette. Colour images, and palettes
whose colours in use are all in the class table, are read by their colours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image

from nbtools.table import plural, sized
from nbtools.tasks.common.files import on_white, open_image
from nbtools.tasks.common.report import WARNING, Refused, Row
from nbtools.tasks.segment.classes import IGNORE, MOST_ID, UNKNOWN, Colour, Table

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
SIDEWAYS = 5  # orientations from here on exchange width and height
SHOWN = 6  # unknown ids in a message
AGAIN = "export it as PNG of one channel, whose values are the ids"

Size = tuple[int, int]
"""(height, width) in pixels."""
Area = tuple[slice, slice]
"""Rows and columns."""


@dataclass(frozen=True)
class Recipe:
    """How files become samples, as a pack's options have it."""

    size: Size
    fit: str
    channels: int
    table: Table

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        height, width = options["size"]
        return cls((height, width), options["fit"], options["channels"], Table.of(options))

    def area(self, size: Size) -> Area:
        """Where in the packed image a picture of a size lies: in the middle if it is scaled to fit inside.

        Raises Refused for another size than `same` asks for.
        """
        (height, width), (rows, columns) = self.size, size
        if self.fit == "same" and size != self.size:
            fix = 'pack with size=, or with fit="pad": then all are scaled'
            raise Refused(Row("image", f"images must have {sized(*self.size)}", sized(*size), fix))
        scale = min(height / rows, width / columns)
        pad = self.fit == "pad"
        inner = [max(1, min(most, round(n * scale))) if pad else most for n, most in zip(size, self.size, strict=True)]
        top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
        return slice(top, top + inner[0]), slice(left, left + inner[1])

    def label(self, drawn: Image.Image, area: Area) -> np.ndarray:
        """(H, W) uint8: class indices drawn at any size, at the packed one. Raises Refused if all are ignored."""
        label = np.full(self.size, IGNORE, np.uint8)
        label[area] = np.asarray(drawn.resize(label[area].shape[::-1], Image.Resampling.NEAREST))
        if (label == IGNORE).all():
            fix = "annotate it, or delete it with its image; is the class in ignore=?"
            raise Refused(Row("label", "some pixel must have a class", "all are ignored", fix))
        return label


def orientation(image: Image.Image) -> int:
    """The remaining EXIF orientation, 1 to 8. A PNG may have it only after decoding, unless it comes first; a TIFF
    is rotated by Pillow itself."""
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    turn = image.getexif().get(ORIENTATION, 1)
    return turn if turn in TURNS else 1


def size_of(image: Image.Image) -> Size:
    """(height, width) of the upright picture, from its header."""
    width, height = image.size
    return (width, height) if orientation(image) >= SIDEWAYS else (height, width)


def read_image(path: Path, recipe: Recipe, rows: list[Row]) -> tuple[np.ndarray, Size]:
    """(pixels (H, W, C) uint8, size of the whole upright picture); what was done to it is added to `rows`.

    Raises Refused on what cannot be used.
    """
    with open_image(path, key="image") as image:
        size, turn = size_of(image), orientation(image)
        pixels, area = np.zeros((*recipe.size, recipe.channels), np.uint8), recipe.area(size)
        height, width, _ = pixels[area].shape
        inner = (height, width) if turn >= SIDEWAYS else (width, height)
        drafted = image.draft(None, inner) if image.format == "JPEG" else None  # type: ignore[arg-type]
        box = drafted[1] if drafted else (0, 0, *image.size)
        flat = flatten(image, recipe.channels, rows)
        if flat.size != inner or tuple(box[2:]) != flat.size:
            method = Image.Resampling.BOX if inner[0] < image.width else Image.Resampling.BILINEAR
            flat = flat.resize(inner, method, box=box)
        if turn in TURNS:
            flat = flat.transpose(TURNS[turn])
            fix = "nothing, if its label was drawn on the rotated image"
            rows.append(
                Row("image", "an image is rotated by its EXIF orientation", f"orientation {turn}", fix, WARNING)
            )
    pixels[area] = np.asarray(flat)
    return pixels, size


def flatten(image: Image.Image, channels: int, rows: list[Row]) -> Image.Image:
    """RGB, or RGBA for 4 channels."""
    if channels == 4 and not image.mode.startswith(("I", "F")):
        return image.convert("RGBA")
    if image.has_transparency_data and np.asarray(image.convert("RGBA").getchannel("A")).min() < 255:
        rule, fix = "3 channels hold no transparency", "nothing: it is drawn on white; channels=4 keeps it"
        rows.append(Row("image", rule, "transparent pixels", fix, WARNING))
    return on_white(image)


# Label images


def read_label(path: Path, recipe: Recipe, size: Size) -> np.ndarray:
    """(H, W) uint8: the class indices of the label of an image of a size. Raises Refused on what cannot be used."""
    ids, table = read_ids(path, recipe.table.by_colour), recipe.table
    require_size((ids.shape[0], ids.shape[1]), size)
    if unknown := {i: count for i, count in count_ids(ids).items() if table.lookup[i] == UNKNOWN}:
        fix = "add them to classes=, or to ignore=; or correct the label"
        raise Refused(Row("label", "ids must be in the class table", listed(unknown), fix))
    return recipe.label(Image.fromarray(table.lookup[ids]), recipe.area(size))


def ids_in(path: Path) -> list[int]:
    """The ids in a label image, to see which occur; none if it cannot be used, or has colours."""
    with contextlib.suppress(Refused):
        return list(count_ids(read_ids(path, {})))
    return []


def require_size(label: Size, image: Size) -> None:
    if label != image:
        fix = "export it again from the image as it is"
        if label == image[::-1]:
            fix = "rotate one of them: the image may have an EXIF orientation that its label does not follow"
        value = f"{sized(*label)}, the image has {sized(*image)}"
        raise Refused(Row("label", "a label must have the size of its image", value, fix))


def listed(unknown: Mapping[Any, int]) -> str:
    """The first ids or colours with their pixels, and how many more there are."""
    some = ", ".join(f"{one} ({plural(count, 'pixel')})" for one, count in sorted(unknown.items())[:SHOWN])
    return some + (f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else "")


def count_ids(ids: np.ndarray) -> dict[int, int]:
    """Id → pixels."""
    if ids.min() < 0 or ids.max() > MOST_ID:
        raise Refused(Row("label", f"ids must be from 0 to {MOST_ID}", f"{ids.min()} to {ids.max()}", AGAIN))
    return {i: count for i, count in enumerate(np.bincount(ids.ravel()).tolist()) if count}


def read_ids(path: Path, by_colour: Mapping[Colour, int]) -> np.ndarray:
    """(H, W) whole numbers. by_colour: colour → id, of tables that have colours."""
    with open_image(path, key="label") as file:
        if file.format in ("JPEG", "MPO"):
            raise Refused(
                Row("label", "a label must be stored without loss: JPEG changes ids", str(file.format), AGAIN)
            )
        if file.mode in ("LA", "PA", "RGBA"):
            if np.asarray(file.getchannel("A")).min() < 255:
                value = f"{file.mode}, with transparent pixels"
                raise Refused(Row("label", "a label must have no transparency", value, AGAIN))
            file = file.getchannel("P") if file.mode == "PA" else file.convert(file.mode[:-1])
        if file.mode == "P":
            return ids_of_palette(np.asarray(file), file.getpalette("RGB") or [], by_colour)
        if file.mode == "RGB":
            return ids_of_colours(file, by_colour)
        ids = np.asarray(file)
        if ids.ndim != 2 or ids.dtype.kind not in "biu":
            raise Refused(Row("label", "a label must have one channel of ids, or colours", f"mode {file.mode}", AGAIN))
        return ids.astype(np.uint8) if ids.dtype.kind == "b" else ids


def ids_of_palette(index: np.ndarray, palette: list[int], by_colour: Mapping[Colour, int]) -> np.ndarray:
    """By colour if the table has all colours in use, since programs number them arbitrarily; else the index."""
    lookup = np.zeros(256, np.uint16)
    for i in count_ids(index):
        if (found := by_colour.get((*palette[3 * i : 3 * i + 3],))) is None:  # type: ignore[arg-type]
            return index
        lookup[i] = found
    return lookup[index]


def ids_of_colours(file: Image.Image, by_colour: Mapping[Colour, int]) -> np.ndarray:
    """The id of each colour, exactly; of a table without colours, the value that all three channels have."""
    rule = "colours must be in the class table"
    if not by_colour:
        red, *others = file.split()
        if all(red.tobytes() == other.tobytes() for other in others):
            return np.asarray(red)
        fix = f"give classes= a file of names and colours; or {AGAIN}"
        raise Refused(Row("label", rule, "RGB, and the table has no colours", fix))
    every = file.getcolors(MOST_ID)
    unknown = {colour: count for count, colour in every or [] if colour not in by_colour}
    if unknown or every is None:
        fix = "correct the colours of the class table; or save labels without smoothing, as PNG"
        raise Refused(Row("label", rule, listed(unknown) or f"more than {MOST_ID:,}", fix))
    codes = np.asarray(file).astype(np.int32) @ np.array([65_536, 256, 1], np.int32)
    known = np.array(sorted((r << 16 | g << 8 | b, i) for (r, g, b), i in by_colour.items()))
    return known[np.searchsorted(known[:, 0], codes), 1]
