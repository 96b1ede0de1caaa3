"""Image files and label images → arrays at the packed size.

Transparency is kept with 4 channels; with 3 the image is drawn on white, as most viewers and converters show it.

A label's pixel value is its id: grey images of 1 to 16 bits, and the index of a palette.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image

from nbtools.show import plural, sized
from nbtools.tasks.common.files import DAMAGED, decode_image, on_white
from nbtools.tasks.common.report import Refused, Row
from nbtools.tasks.segment.classes import IGNORE, MOST_ID, UNKNOWN, Table

ORIENTATION = 0x0112  # the EXIF tag
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
    channels: int
    table: Table

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        height, width = options["size"]
        return cls((height, width), options["channels"], Table.of(options))

    def area(self, size: Size) -> Area:
        """Where in the packed image a picture of a size lies: in the middle, scaled to fit inside."""
        (height, width), (rows, columns) = self.size, size
        scale = min(height / rows, width / columns)
        inner = [max(1, min(most, round(n * scale))) for n, most in zip(size, self.size, strict=True)]
        top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
        return slice(top, top + inner[0]), slice(left, left + inner[1])

    def label(self, drawn: Image.Image, area: Area) -> np.ndarray:
        """(H, W) uint8: class indices drawn at any size, at the packed one. Raises Refused if all are ignored."""
        label = np.full(self.size, IGNORE, np.uint8)
        label[area] = np.asarray(drawn.resize(label[area].shape[::-1], Image.Resampling.NEAREST))
        if (label == IGNORE).all():
            fix = "annotate it, or delete it with its image"
            raise Refused(Row("label", "some pixel must have a class", "all are ignored", fix))
        return label


def read_image(path: Path, recipe: Recipe) -> tuple[np.ndarray, Size]:
    """(pixels (H, W, C) uint8, size of the whole upright picture). Raises Refused on what cannot be used."""
    size = header_size(path) or recipe.size  # of a damaged file, which is refused below
    rows, columns = recipe.area(size)
    image = flatten(decode_image(path, side=min(rows.stop - rows.start, columns.stop - columns.start)), recipe.channels)
    scale = max(1, round(max(size) / max(image.size)))  # of a JPEG that was decoded smaller
    if scale == 1:
        size = image.height, image.width  # a PNG may say after its pixels that it lies on its side
    pixels = np.zeros((*recipe.size, recipe.channels), np.uint8)
    height, width, _ = pixels[area := recipe.area(size)].shape
    if (height, width) != size:
        method = Image.Resampling.BOX if width < image.width else Image.Resampling.BILINEAR
        image = image.resize((width, height), method, (0, 0, size[1] / scale, size[0] / scale))
    pixels[area] = np.asarray(image)
    return pixels, size


def header_size(path: Path) -> Size | None:
    """The size of the upright picture, without decoding it; None if it cannot be read."""
    with contextlib.suppress(*DAMAGED), Image.open(path) as image:
        turned = "exif" in image.info and image.getexif().get(ORIENTATION) in range(5, 9)
        return image.size if turned else (image.height, image.width)


def flatten(image: Image.Image, channels: int) -> Image.Image:
    """RGB, or RGBA for 4 channels."""
    return image.convert("RGBA") if channels == 4 and not image.mode.startswith(("I", "F")) else on_white(image)


# Label images


def read_label(path: Path, recipe: Recipe, size: Size) -> np.ndarray:
    """(H, W) uint8: the class indices of the label of an image of a size. Raises Refused on what cannot be used."""
    ids, table = read_ids(path), recipe.table
    require_size((ids.shape[0], ids.shape[1]), size)
    if unknown := {i: count for i, count in count_ids(ids).items() if table.lookup[i] == UNKNOWN}:
        fix = "add them to classes=, or to ignore=; or correct the label"
        raise Refused(Row("label", "ids must be in the class table", listed(unknown), fix))
    return recipe.label(Image.fromarray(table.lookup[ids]), recipe.area(size))


def ids_in(path: Path) -> list[int]:
    """The ids in a label image, to see which occur; none if it cannot be used."""
    with contextlib.suppress(Refused):
        return list(count_ids(read_ids(path)))
    return []


def require_size(label: Size, image: Size) -> None:
    if label != image:
        value, fix = f"{sized(*label)}, the image has {sized(*image)}", "export it again from the image as it is"
        raise Refused(Row("label", "a label must have the size of its image", value, fix))


def listed(unknown: Mapping[int, int]) -> str:
    """The first ids with their pixels, and how many more there are."""
    some = ", ".join(f"{one} ({plural(count, 'pixel')})" for one, count in sorted(unknown.items())[:SHOWN])
    return some + (f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else "")


def count_ids(ids: np.ndarray) -> dict[int, int]:
    """Id → pixels."""
    if ids.min() < 0 or ids.max() > MOST_ID:
        raise Refused(Row("label", f"ids must be from 0 to {MOST_ID}", f"{ids.min()} to {ids.max()}", AGAIN))
    return {i: count for i, count in enumerate(np.bincount(ids.ravel()).tolist()) if count}


def read_ids(path: Path) -> np.ndarray:
    """(H, W) whole numbers."""
    image = decode_image(path, key="label")
    if image.format in ("JPEG", "MPO") or path.suffix.lower() in (".jpg", ".jpeg"):
        rule = "a label must be stored without loss: JPEG changes ids"
        raise Refused(Row("label", rule, "JPEG", AGAIN))
    ids = np.asarray(image)
    if ids.ndim != 2 or ids.dtype.kind not in "biu":
        raise Refused(Row("label", "a label must have one channel of ids", f"mode {image.mode}", AGAIN))
    return ids.astype(np.uint8) if ids.dtype.kind == "b" else ids
