"""Lists of samples: text files of lines `image,label`, or of two names with a blank between as SegNet's; a header is
allowed. A way leads from the list's folder on, or from any folder on it that the source has: ways of other machines,
/SegNet/CamVid/train/1.png, are found by their ends.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from nbtools.report import Row
from nbtools.tasks.segment.masks.images import SUFFIXES

NAME = re.compile(r"(?:.*[^a-z])?(train|val|test|list|pairs|all)(?:ing|id|idation)?", re.I)
HEADS = ("image", "images", "file", "img", "image_path")
ENDINGS = (".txt", ".csv")


@dataclass(frozen=True)
class Line:
    """where: `train.txt:14`; image, label: names from the source on."""

    where: str
    image: str
    label: str


def is_list(name: str, head: bytes) -> bool:
    """Whether a text file is a list, by a line of two images; or by its name, so that a broken one is told of."""
    way = PurePosixPath(name)
    if way.suffix.lower() not in ENDINGS:
        return False
    lines = head.decode("utf-8-sig", "replace").splitlines()
    return any(None not in (found := cells(line)) and all(map(is_image, found)) for line in lines[:20]) or (
        NAME.fullmatch(way.stem) is not None and any(is_image(cell) for line in lines for cell in cells(line) if cell)
    )


def is_image(cell: str | None) -> bool:
    return (cell or "").strip().lower().endswith(SUFFIXES)


def cells(line: str) -> tuple[str, str | None]:
    """(image, label or None) of a line: up to the first comma, else up to the first blank after an image's name."""
    first, comma, rest = line.partition(",")
    if not comma:
        parts = re.split(r"(?<=\.\w{3})\s+|(?<=\.\w{4})\s+", line.strip(), maxsplit=1)
        first, rest = parts[0], parts[1] if len(parts) == 2 else ""
    return first.strip().strip('"'), rest.strip().strip('"') or None


def read_list(text: str, name: str, names: Collection[str]) -> Iterator[Line | Row]:
    """Every line of a list, or what is wrong with it. names: the files of the source."""
    for i, line in enumerate(text.splitlines(), 1):
        image, label = cells(line)
        where = f"{name}:{i}"
        if not line.strip() or (i == 1 and image.casefold() in HEADS):
            continue
        if label is None:
            rule, fix = "a line is image,label", "write both names, with a comma between"
            yield Row("line", rule, image[:80], fix, file=where)
            continue
        found = [found_at(way, str(PurePosixPath(name).parent), names) for way in (image, label)]
        for key, way, there in zip(("image", "label"), (image, label), found, strict=True):
            if there is None:
                fix = "copy the file too, correct the line, or delete it"
                yield Row(key, f"the {key} of a line is there", way[:120], fix, file=where)
        if found[0] and found[1]:
            yield Line(where, found[0], found[1])


def found_at(way: str, folder: str, names: Collection[str]) -> str | None:
    """The file of the source that a way names, without ever leaving the source."""
    parts = [part for part in way.replace("\\", "/").split("/") if part]
    for first in range(len(parts)):
        rest = "/".join(parts[first:])
        for base in (folder, "."):
            if (name := os.path.normpath(f"{base}/{rest}")) in names:
                return name
    return None
