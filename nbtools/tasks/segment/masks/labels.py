"""One label image → (H, W) uint8 places of the classes, at the packed size.

A pixel's value is its id: of grey images of 1 to 16 bits, and of a palette's its index. Images of colours, and palettes
of which every colour in use is a class's, are read by their colours where the class table has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from nbtools.data import WARNING, Refused, Row
from nbtools.table import plural, sized
from nbtools.tasks.segment.masks.classes import IGNORE, MOST_ID, UNKNOWN, Table
from nbtools.tasks.segment.masks.images import Recipe, Size, opened

LOSSY = ("JPEG", "MPO")
WIDE = ("I;16", "I;16L", "I;16B", "I;16N", "I")  # what Pillow calls 16 bits, by version and file
SHOWN = 6  # unknown ids in a message
AGAIN = "export it as PNG of one channel, whose values are the ids"


@dataclass(frozen=True)
class Mask:
    """label (H, W) uint8; ids: raw id → pixels of the file; rows: what was done to it."""

    label: np.ndarray
    ids: Mapping[int, int]
    rows: tuple[Row, ...] = ()


def mask(path: Path, recipe: Recipe, size: Size) -> Mask:
    """The label of an image of a size. Raises Refused on what cannot be used."""
    rows: list[Row] = []
    with opened(path, "label") as file:
        require_lossless(file)
        require_size((file.height, file.width), size)
        ids = ids_of(file, recipe.table, rows)
    found = counted(ids)
    require_known(found, recipe.table)
    place = recipe.place(size)
    inner = ids.resize((place.width, place.height), Image.Resampling.NEAREST)
    label = np.full(recipe.size, IGNORE, np.uint8)
    label[place.rows, place.columns] = recipe.table.lookup[np.asarray(inner)]
    require_some(label)
    return Mask(label, found, tuple(rows))


def raw_ids(path: Path) -> tuple[dict[int, int], bool]:
    """(id → pixels of a label image as it is, whether it has 16 bits), to learn which ids there are; none where it
    cannot be used, or has colours."""
    try:
        with opened(path, "label") as file:
            require_lossless(file)
            return counted(ids_of(file, None, [])), file.mode in WIDE
    except Refused:
        return {}, False


def require_lossless(file: Image.Image) -> None:
    if file.format in LOSSY:
        raise Refused(Row("label", "a label is stored without loss: JPEG changes ids", str(file.format), AGAIN))


def require_size(label: Size, image: Size) -> None:
    if label != image:
        rule, fix = "a label is as large as its image", "export it again from the image as it is"
        if label == image[::-1]:
            fix = "turn one of them: the image may have an EXIF orientation that its label does not know of"
        raise Refused(Row("label", rule, f"{sized(*label)}, the image has {sized(*image)}", fix))


def require_known(found: Mapping[int, int], table: Table) -> None:
    unknown = {i: count for i, count in sorted(found.items()) if table.lookup[i] == UNKNOWN}
    if unknown:
        some = ", ".join(f"{i} ({plural(count, 'pixel')})" for i, count in list(unknown.items())[:SHOWN])
        value = some + (f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else "")
        fix = "add them to classes=, or to ignore=; or correct the label"
        raise Refused(Row("label", "ids are in the class table", value, fix))


def require_some(label: np.ndarray) -> None:
    if (label == IGNORE).all():
        fix = "annotate it, or delete it with its image; is the class in ignore=?"
        raise Refused(Row("label", "some pixel has a class", "all are ignored", fix))


def ids_of(file: Image.Image, table: Table | None, rows: list[Row]) -> Image.Image:
    """An image of one channel of ids. table: None where only ids are wanted, and colours are none."""
    if file.mode == "1":
        return Image.fromarray(np.asarray(file).astype(np.uint8))
    if file.mode == "P" and table is not None and coloured(file, table):
        return by_colour(file.convert("RGB"), table)
    if file.mode in ("L", "P", *WIDE):
        file.load()
        return file
    if file.mode in ("LA", "PA", "RGBA"):
        file = opaque(file, rows)
    if file.mode == "L":
        return file
    if file.mode != "RGB":
        raise Refused(Row("label", "a label has one channel of ids, or colours", f"mode {file.mode}", AGAIN))
    if table is not None and table.by_colour:
        return by_colour(file, table)
    red, *others = file.split()
    if any(red.tobytes() != other.tobytes() for other in others):
        fix = f"give classes= a file of names and colours; or {AGAIN}"
        raise Refused(Row("label", "colours are in the class table", "RGB, and the table has no colours", fix))
    rule, fix = "a label has one channel", "nothing: the three are equal, and read as one"
    rows.append(Row("label", rule, "RGB", fix, WARNING))
    return red


def coloured(file: Image.Image, table: Table) -> bool:
    """Whether all colours of a palette that the pixels use are classes': programs number them as they please."""
    palette = np.array(file.getpalette("RGB") or []).reshape(-1, 3).tolist()
    return all(i < len(palette) and tuple(palette[i]) in table.by_colour for i in counted(file))


def opaque(file: Image.Image, rows: list[Row]) -> Image.Image:
    """Without its alpha channel, which says nothing where all is opaque."""
    if np.asarray(file.getchannel("A")).min() < 255:
        raise Refused(Row("label", "a label has no transparency", f"{file.mode}, with transparent pixels", AGAIN))
    rows.append(Row("label", "a label has no alpha channel", file.mode, "nothing: all of it is opaque", WARNING))
    return file.getchannel("P") if file.mode == "PA" else file.convert("RGB" if file.mode == "RGBA" else "L")


def by_colour(file: Image.Image, table: Table) -> Image.Image:
    """Every colour's id, exactly."""
    every = file.getcolors(MOST_ID)
    found = {colour: count for count, colour in every or []}
    unknown = [colour for colour in found if colour not in table.by_colour]
    if unknown or every is None:
        some = ", ".join(f"{colour} ({plural(found[colour], 'pixel')})" for colour in sorted(unknown)[:SHOWN])
        fix = "correct the colours of the class table; or save labels without smoothing, as PNG"
        value = some + (f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else "")
        raise Refused(Row("label", "colours are in the class table", value or f"more than {MOST_ID:,}", fix))
    codes = np.asarray(file).astype(np.int32) @ np.array([65_536, 256, 1], np.int32)
    known = np.array(sorted((r << 16 | g << 8 | b, i) for (r, g, b), i in table.by_colour.items()))
    ids = known[np.searchsorted(known[:, 0], codes), 1]
    return Image.fromarray(ids.astype(np.uint8 if ids.max() < 256 else np.uint16))


def counted(ids: Image.Image) -> dict[int, int]:
    """Id → pixels."""
    if ids.mode in ("L", "P"):
        return {i: count for i, count in enumerate(ids.histogram()) if count}
    values = np.asarray(ids)
    if values.min() < 0 or values.max() > MOST_ID:
        value = f"{values.min()} to {values.max()}"
        raise Refused(Row("label", f"ids are from 0 to {MOST_ID}", value, AGAIN))
    found, counts = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))
