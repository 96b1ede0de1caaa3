"""Raw images and labels → pack: image (H, W, C), label (H, W) and distance (H, W), all uint8 and of one size.

label: places in the classes, 255 where a pixel is ignored. distance: eighths of a pixel to the nearest boundary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nbtools.data import ERROR, MANIFEST, Entry, Pack, Writer, build, stage
from nbtools.tasks.segment.masks.choices import Choices
from nbtools.tasks.segment.masks.classes import IGNORE
from nbtools.tasks.segment.masks.naming import Given
from nbtools.tasks.segment.masks.pairs import Pairs, read


def pack(
    source: str | Path,
    *,
    size: int | tuple[int, int] | None = None,
    fit: str = "auto",
    channels: int = 3,
    classes: Given | None = None,
    ignore: int | str | Iterable[int | str] | None = None,
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
    id → name; or a file, see `naming`, which one called `classes.txt` in the source is without being named; else the
    labels of CVAT's file, else the ids that the label images have. ignore: raw ids, or names, that are no class, beside
    255, which is none unless `classes` names it. labels: `lists`, `images` or `cvat` where a source has several.
    val, test: shares, or whole numbers for exactly so many; the source's own folders and lists come first.
    Raises PackError where nothing can be used. What is wrong with single files, `validate` tells too.
    """
    choices = Choices.of(size, fit, channels, classes, ignore, labels)
    folder = stage(source, progress=progress)
    if (folder / MANIFEST).is_file():
        return build(folder, "segment", {}, lambda *_: None, read=read)
    reader, options = Pairs(folder, labels), {}  # options follow from files: only one that is made anew looks into them
    return build(
        folder,
        "segment",
        options,
        partial(fill, reader=reader, choices=choices, options=options),
        read=reader,
        val=val,
        test=test,
        into=into,
        progress=progress,
        chosen=choices.key,
        resume=True,
    )


def fill(writer: Writer, folder: Path, reader: Pairs, choices: Choices, options: dict[str, Any]) -> None:
    """Write every image that has a label and can be used; the others go to the table of bad ones. Fills in the options.

    Raises PackError where no image has a label, or there is no class table.
    """
    options |= choices.decided(folder, reader.survey)
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
