"""Raw images and labels → pack: image (H, W, C), label (H, W) and distance (H, W), all uint8 and of one size.

label: places in the classes, 255 where a pixel is ignored. distance: eighths of a pixel to the nearest boundary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nbtools.errors import PackError
from nbtools.pack import MANIFEST, Pack
from nbtools.packing import Entry, Writer, build
from nbtools.report import ERROR
from nbtools.stage import stage
from nbtools.tasks.segment.masks.classes import IGNORE, MOST_CLASSES, Class, Given, Table, given, parsed, table_of
from nbtools.tasks.segment.masks.files import LABELS, Survey
from nbtools.tasks.segment.masks.images import FITS, UNREADABLE, Size, opened, size_of
from nbtools.tasks.segment.masks.labels import raw_ids
from nbtools.tasks.segment.masks.pairs import Pairs, read

MIXED = 384, 384  # pixels that images of many sizes are brought to: the guide's
LARGEST = 1024 * 2048  # pixels of images that are packed as they are: Cityscapes'
LEAST, MOST = 32, 4096  # pixels of a side


def pack(
    source: str | Path,
    *,
    size: int | tuple[int, int] | None = None,
    fit: str = "auto",
    channels: int = 3,
    classes: Given | None = None,
    ignore: Iterable[int | str] | None = None,
    labels: str = "auto",
    val: float = 0.1,
    test: float = 0.1,
    into: str | Path | None = None,
    progress: bool = True,
) -> Pack:
    """The pack of images with labels, from a folder, archive or link; a second call opens the finished one, and one
    that was killed is gone on with. Needs scipy, for the distances to the class boundary.

    size: (height, width) or a side, in pixels; by default the images' own where they have one size, else 384 × 384.
    fit: `pad` scales to fit inside and leaves the rest 0, and ignored; `stretch` scales each side by itself; `same`
    takes images of exactly this size; `auto` is `same` where no size was given and all have one, else `pad`.
    channels: 3 (transparency lies on white) or 4 (RGBA). classes: names, in order of their ids from 0; or a mapping
    id → name; or a file, `classes.txt` or `labelmap.txt`, which one in the source is without being named; else the
    labels of CVAT's file, else the ids that the label images have. ignore: raw ids, or names, that are no class, beside
    255, which is none unless `classes` names it. labels: `lists`, `images` or `cvat` where a source has several.
    val, test: shares, or whole numbers for exactly so many; the source's own folders and lists come first.
    Raises PackError where nothing can be used. What is wrong with single files, `validate` tells too.
    """
    require_options(size, fit, channels, labels)
    folder = stage(source, progress=progress)
    if (folder / MANIFEST).is_file():
        return build(folder, "segment", {}, lambda *_: None, read=read)
    reader = Pairs(folder, labels)
    options = options_of(folder, reader.survey, size, fit, channels, classes, ignore)
    return build(
        folder,
        "segment",
        options,
        partial(fill, reader=reader, options=options),
        read=reader,
        val=val,
        test=test,
        into=into,
        progress=progress,
        chosen={"labels": labels},
        resume=True,
    )


def require_options(size: Any, fit: str, channels: int, labels: str) -> None:
    sides = size if isinstance(size, tuple | list) else (size, size)
    if size is not None and (len(sides) != 2 or not all(type(s) is int and LEAST <= s <= MOST for s in sides)):
        raise PackError(f"size must be (height, width) in pixels, {LEAST} to {MOST} each, or one side, got {size!r}")
    for name, value, known in (("fit", fit, ("auto", *FITS)), ("labels", labels, LABELS)):
        if value not in known:
            raise PackError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if channels not in (3, 4) or isinstance(channels, bool):
        raise PackError(f"channels must be 3 (RGB) or 4 (RGBA), got {channels!r}")


def options_of(
    folder: Path,
    survey: Survey,
    size: int | tuple[int, int] | None,
    fit: str,
    channels: int,
    classes: Given | None,
    ignore: Iterable[int | str] | None,
) -> dict[str, Any]:
    """How the samples are made, with all that was left open decided."""
    if not survey.pairs:
        raise PackError(unlabelled(folder, survey))
    if size is None:
        found = sizes(folder, survey)
        height, width = size_for(found)
        one = set(found) == {(height, width)}
    else:
        height, width = (size, size) if isinstance(size, int) else size
        one = False
    fit = ("same" if one else "pad") if fit == "auto" else fit
    table = decided(folder, survey, classes, ignore)
    return {"size": [height, width], "channels": channels, "fit": fit, **table.options}


def unlabelled(folder: Path, survey: Survey) -> str:
    for row in survey.rows:
        if row.severity == ERROR and row.value != "none":
            value, rule, fix = row.reasons
            return f"{folder}: no image has a label. The first fault: {row.file}: {rule}, got {value}; {fix}"
    return (
        f"{folder}: {survey.images} images and no label: put label images of the same names into labels/ beside "
        "images/, or write train.txt of lines image,label, or export CVAT for images 1.1 as annotations.xml"
    )


def sizes(folder: Path, survey: Survey) -> Counter[Size]:
    """(height, width) → images, by the headers of all that can be opened."""

    def size(name: str) -> Size | None:
        try:
            with opened(folder / name, "image") as image:
                return size_of(image)
        except PackError:
            return None

    with ThreadPoolExecutor() as pool:
        return Counter(filter(None, pool.map(size, survey.pairs)))


def size_for(found: Mapping[Size, int]) -> Size:
    """Their own where all have one size, of which a network can make something."""
    [size, *others] = found or [MIXED]
    fits = min(size) >= LEAST and size[0] * size[1] <= LARGEST
    return size if not others and fits else MIXED


def decided(folder: Path, survey: Survey, classes: Given | None, ignore: Iterable[int | str] | None) -> Table:
    """The class table: what was given, else the source's file, else CVAT's labels, else the ids of the labels."""
    if classes is not None:
        return table_of(given(classes), ignore)
    if survey.table is not None:
        try:
            return table_of(parsed((folder / survey.table).read_text("utf-8-sig"), survey.table), ignore)
        except UNREADABLE as error:
            raise PackError(f"{folder / survey.table} cannot be read ({error}); correct it, or give classes=") from None
    if any(found.drawing for found in survey.pairs.values()):
        return table_of(survey.document.classes, ignore)
    return table_of([Class(i, f"class {i}") for i in found_ids(folder, survey)], ignore)


def found_ids(folder: Path, survey: Survey) -> list[int]:
    """The ids of all labels but 255; of 16-bit ones only where there are no others, as one stray depth map is enough.

    Raises PackError for more than can be classes: those labels are pictures, or smoothed.
    """
    ids: dict[bool, Counter[int]] = {False: Counter(), True: Counter()}
    most = ("", 0)
    files = [found.label for found in survey.pairs.values()]
    with ThreadPoolExecutor() as pool:
        for name, (found, wide) in zip(files, pool.map(lambda name: raw_ids(folder / name), files), strict=True):
            ids[wide].update(found)
            most = max(most, (name, len(found)), key=lambda one: one[1])
    known = sorted({*(ids[False] or ids[True])} - {IGNORE})
    if len(known) > MOST_CLASSES:
        raise PackError(
            f"{folder}: labels have {len(known)} different ids, {most[0]} alone {most[1]}, and a pack has at most "
            f"{MOST_CLASSES} classes: are they pictures, or smoothed? Give classes=, and `validate` names them"
        )
    if len(known) < 2:
        raise PackError(
            f"{folder}: labels have {len(known)} different ids beside {IGNORE}, which is ignored"
            f"{f': {known[0]}' if known else ''}; there is nothing to tell apart. A mask of 0 and 255 is read by "
            "classes={0: 'background', 255: 'object'}, labels of colours by classes= a file of names and colours"
        )
    return known


def fill(writer: Writer, folder: Path, reader: Pairs, options: Mapping[str, Any]) -> None:
    """Write every image that has a label and can be used; the others go to the table of bad ones."""
    for row in reader.survey.rows:
        if row.severity == ERROR:
            writer.reject(row.file, *row.reasons)
    writer.classes = list(options["names"])
    entries = [Entry(found.name, folder / found.name, found.split) for found in reader.survey.pairs.values()]
    for entry, arrays in writer.decode(entries, reader, options):
        writer.add(entry.name, entry.split, **arrays)
    writer.counts = {"pixels": pixels(writer, options)}


def pixels(writer: Writer, options: Mapping[str, Any]) -> list[int]:
    """Training pixels of each class, image by image from the written column: which are train is known at the end."""
    total = np.zeros(IGNORE + 1, np.int64)
    if not writer.names:
        return total[: len(options["names"])].tolist()
    count = options["size"][0] * options["size"][1]
    with open(writer.folder / "label.npy", "rb") as file:
        file.seek(-count * len(writer.names), 2)
        for split in writer.assigned():
            label = np.frombuffer(file.read(count), np.uint8)
            if split == "train":
                total += np.bincount(label, minlength=IGNORE + 1)
    return total[: len(options["names"])].tolist()
