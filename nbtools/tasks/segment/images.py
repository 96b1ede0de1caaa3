"""Image files and label images → arrays at the packed size.

Images are turned as their EXIF data say, and decoded no larger than needed. Transparency is kept with 4 channels; with
3 the image lies on white paper, as most viewers and converters show it.

A label's pixel value is its id: grey images of 1 to 16 bits, and the index of a palette. Colour images, and palettes
whose colours in use are all in the class table, are read by their colours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image

from nbtools.table import plural, sized
from nbtools.tasks.common.files import on_white, open_image
from nbtools.tasks.common.report import WARNING, Refused, Row
from nbtools.tasks.segment.classes import IGNORE, MOST_ID, UNKNOWN, Table

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
LOSSY = ("JPEG", "MPO")
WIDE = ("I;16", "I;16L", "I;16B", "I;16N", "I")  # what Pillow calls 16 bits, by version and file
SHOWN = 6  # unknown ids in a message
AGAIN = "export it as PNG of one channel, whose values are the ids"

Size = tuple[int, int]
"""(height, width) in pixels."""


@dataclass(frozen=True)
class Place:
    """Where in the packed image the picture lies; the rest is 0, and ignored."""

    top: int
    left: int
    height: int
    width: int

    @property
    def area(self) -> tuple[slice, slice]:
        """Its rows and columns."""
        return slice(self.top, self.top + self.height), slice(self.left, self.left + self.width)


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

    def place(self, size: Size) -> Place:
        """Where a picture of a size lies: in the middle if it is scaled to fit inside. Raises Refused for another size
        than `same` asks for."""
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
    """pixels (H, W, C) uint8; size: of the whole upright picture; rows: what was done to it."""

    pixels: np.ndarray
    size: Size
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Mask:
    """label (H, W) uint8 class indices; ids: raw id → pixels of the file; rows: what was done to it."""

    label: np.ndarray
    ids: Mapping[int, int]
    rows: tuple[Row, ...] = ()


# Images


def orientation(image: Image.Image) -> int:
    """EXIF's, 1 to 8, as far as it is left to do. A PNG may have it only after decoding, unless it comes first; a TIFF
    is turned by Pillow itself."""
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    turn = image.getexif().get(ORIENTATION, 1)
    return turn if turn in TURNS else 1


def size_of(image: Image.Image) -> Size:
    """(height, width) of the upright picture, from its header."""
    width, height = image.size
    return (width, height) if orientation(image) >= SIDEWAYS else (height, width)


def read_image(path: Path, recipe: Recipe) -> Picture:
    """Raises Refused on what cannot be used."""
    with open_image(path, key="image") as image:
        size, turn, rows = size_of(image), orientation(image), []
        place = recipe.place(size)
        inner = (place.height, place.width) if turn >= SIDEWAYS else (place.width, place.height)
        drafted = image.draft(None, inner) if image.format == "JPEG" else None  # type: ignore[arg-type]
        box = drafted[1] if drafted else (0, 0, *image.size)
        flat = flatten(image, recipe.channels, rows)
        if flat.size != inner or tuple(box[2:]) != flat.size:
            method = Image.Resampling.BOX if inner[0] < image.width else Image.Resampling.BILINEAR
            flat = flat.resize(inner, method, box=box)
        if turn in TURNS:
            flat = flat.transpose(TURNS[turn])
            fix = "nothing, if its label was drawn on the turned picture"
            rows.append(Row("image", "an image is turned as its EXIF data say", f"orientation {turn}", fix, WARNING))
    pixels = np.zeros((*recipe.size, recipe.channels), np.uint8)
    pixels[place.area] = np.asarray(flat)
    return Picture(pixels, size, tuple(rows))


def flatten(image: Image.Image, channels: int, rows: list[Row]) -> Image.Image:
    """RGB, or RGBA for 4 channels."""
    if channels == 4 and not image.mode.startswith(("I", "F")):
        return image.convert("RGBA")
    if image.has_transparency_data and np.asarray(image.convert("RGBA").getchannel("A")).min() < 255:
        rule, fix = "3 channels have no transparency", "nothing: it lies on white; channels=4 keeps it"
        rows.append(Row("image", rule, "transparent pixels", fix, WARNING))
    return on_white(image)


# Label images


def read_mask(path: Path, recipe: Recipe, size: Size) -> Mask:
    """The label of an image of a size. Raises Refused on what cannot be used."""
    rows: list[Row] = []
    with open_image(path, key="label") as file:
        require_lossless(file)
        require_size((file.height, file.width), size)
        ids = ids_of(file, recipe.table, rows)
    found = count_ids(ids)
    require_known(found, recipe.table)
    place = recipe.place(size)
    inner = ids.resize((place.width, place.height), Image.Resampling.NEAREST)
    label = np.full(recipe.size, IGNORE, np.uint8)
    label[place.area] = recipe.table.lookup[np.asarray(inner)]
    require_some(label)
    return Mask(label, found, tuple(rows))


def raw_ids(path: Path) -> tuple[dict[int, int], bool]:
    """(id → pixels of a label image, whether it has 16 bits), to learn which ids there are; none if it cannot be used,
    or has colours."""
    try:
        with open_image(path, key="label") as file:
            require_lossless(file)
            return count_ids(ids_of(file, None, [])), file.mode in WIDE
    except Refused:
        return {}, False


def require_lossless(file: Image.Image) -> None:
    if file.format in LOSSY:
        raise Refused(Row("label", "a label is stored without loss: JPEG changes ids", str(file.format), AGAIN))


def require_size(label: Size, image: Size) -> None:
    if label != image:
        rule, fix = "a label is as large as its image", "export it again from the image as it is"
        if label == image[::-1]:
            fix = "turn one of them: the image may have an EXIF orientation that its label does not follow"
        raise Refused(Row("label", rule, f"{sized(*label)}, the image has {sized(*image)}", fix))


def require_known(found: Mapping[int, int], table: Table) -> None:
    unknown = {i: count for i, count in sorted(found.items()) if table.lookup[i] == UNKNOWN}
    if unknown:
        fix = "add them to classes=, or to ignore=; or correct the label"
        raise Refused(Row("label", "ids are in the class table", listed(unknown), fix))


def listed(unknown: Mapping[Any, int]) -> str:
    """The first ids or colours with their pixels, and how many more there are."""
    some = ", ".join(f"{one} ({plural(count, 'pixel')})" for one, count in list(unknown.items())[:SHOWN])
    return some + (f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else "")


def require_some(label: np.ndarray) -> None:
    if (label == IGNORE).all():
        fix = "annotate it, or delete it with its image; is the class in ignore=?"
        raise Refused(Row("label", "some pixel has a class", "all are ignored", fix))


def ids_of(file: Image.Image, table: Table | None, rows: list[Row]) -> Image.Image:
    """An image of one channel of ids. table: None if only ids are wanted, and colours are none."""
    if file.mode == "1":
        return Image.fromarray(np.asarray(file).astype(np.uint8))
    if file.mode == "P" and table is not None and is_coloured(file, table):
        return ids_by_colour(file.convert("RGB"), table)
    if file.mode in ("L", "P", *WIDE):
        file.load()
        return file
    if file.mode in ("LA", "PA", "RGBA"):
        file = drop_alpha(file, rows)
    if file.mode == "L":
        return file
    if file.mode != "RGB":
        raise Refused(Row("label", "a label has one channel of ids, or colours", f"mode {file.mode}", AGAIN))
    if table is not None and table.by_colour:
        return ids_by_colour(file, table)
    red, *others = file.split()
    if any(red.tobytes() != other.tobytes() for other in others):
        fix = f"give classes= a file of names and colours; or {AGAIN}"
        raise Refused(Row("label", "colours are in the class table", "RGB, and the table has no colours", fix))
    rule, fix = "a label has one channel", "nothing: the three are equal, and read as one"
    rows.append(Row("label", rule, "RGB", fix, WARNING))
    return red


def is_coloured(file: Image.Image, table: Table) -> bool:
    """Whether all colours of a palette that the pixels use are in the table: programs number them as they please."""
    palette = np.array(file.getpalette("RGB") or []).reshape(-1, 3).tolist()
    return all(i < len(palette) and tuple(palette[i]) in table.by_colour for i in count_ids(file))


def drop_alpha(file: Image.Image, rows: list[Row]) -> Image.Image:
    """Without an alpha channel that is opaque everywhere."""
    if np.asarray(file.getchannel("A")).min() < 255:
        raise Refused(Row("label", "a label has no transparency", f"{file.mode}, with transparent pixels", AGAIN))
    rows.append(Row("label", "a label has no alpha channel", file.mode, "nothing: all of it is opaque", WARNING))
    return file.getchannel("P") if file.mode == "PA" else file.convert("RGB" if file.mode == "RGBA" else "L")


def ids_by_colour(file: Image.Image, table: Table) -> Image.Image:
    """Every colour's id, exactly."""
    every = file.getcolors(MOST_ID)
    unknown = {colour: count for count, colour in every or [] if colour not in table.by_colour}
    if unknown or every is None:
        fix = "correct the colours of the class table; or save labels without smoothing, as PNG"
        value = listed(dict(sorted(unknown.items()))) or f"more than {MOST_ID:,}"
        raise Refused(Row("label", "colours are in the class table", value, fix))
    codes = np.asarray(file).astype(np.int32) @ np.array([65_536, 256, 1], np.int32)
    known = np.array(sorted((r << 16 | g << 8 | b, i) for (r, g, b), i in table.by_colour.items()))
    ids = known[np.searchsorted(known[:, 0], codes), 1]
    return Image.fromarray(ids.astype(np.uint8 if ids.max() < 256 else np.uint16))


def count_ids(ids: Image.Image) -> dict[int, int]:
    """Id → pixels."""
    if ids.mode in ("L", "P"):
        return {i: count for i, count in enumerate(ids.histogram()) if count}
    values = np.asarray(ids)
    if values.min() < 0 or values.max() > MOST_ID:
        raise Refused(Row("label", f"ids are from 0 to {MOST_ID}", f"{values.min()} to {values.max()}", AGAIN))
    found, counts = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))
