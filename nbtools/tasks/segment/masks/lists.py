"""Lists of samples: text files of lines `image,label`, or of two names with a blank between as SegNet's; a header is
allowed. A way leads from the list's folder on, or from one above it; ways of other machines,
/SegNet/CamVid/train/1.png, are found by their ends. A line of one name, or stem as Pascal VOC's, tells the split only.
"""

from __future__ import annotations

import codecs
import os.path
import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import PurePosixPath

from nbtools.data import Row
from nbtools.tasks.segment.masks.images import SUFFIXES

NAME = re.compile(r"(?:.*[^a-z])?(train|val|test|list|pairs|all)(?:ing|id|idation)?", re.I)
HEADS = ("image", "images", "file", "img", "image_path")
ENDINGS = (".txt", ".csv")
LOOKED_AT = 20  # lines that tell whether a file is a list
RULE = "a line is image,label, or names an image whose label has its name"


@dataclass(frozen=True)
class Line:
    """where: `train.txt:14`; image, label: names from the source on, label None where the line has none."""

    where: str
    split: str | None
    image: str
    label: str | None


@dataclass(frozen=True)
class Source:
    """names: every file; stems: those that one image alone has, with its name."""

    names: AbstractSet[str]
    stems: Mapping[str, str]

    def find(self, way: str, folder: str) -> str | None:
        """The file that a way in a list of this folder names, from there or from above, never outside the source."""
        bases = (folder, *map(str, PurePosixPath(folder).parents))
        parts = [part for part in way.replace("\\", "/").split("/") if part]
        for first in range(len(parts)):
            rest = "/".join(parts[first:])
            for base in bases:
                if (name := os.path.normpath(f"{base}/{rest}")) in self.names:
                    return name
        return None


def is_list(name: str, head: bytes, source: Source) -> bool:
    """Whether a text file is a list, by a line of two images; or by its name and a line of one, or its stem."""
    way = PurePosixPath(name)
    if way.suffix.lower() not in ENDINGS:
        return False
    coding = "utf-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"  # PowerShell's >
    found = [cells(line) for line in head.decode(coding, "replace").splitlines()[:LOOKED_AT]]
    if any(is_image(image) and is_image(label) for image, label in found):
        return True
    return NAME.fullmatch(way.stem) is not None and any(
        is_image(image) or is_image(label) or image in source.stems for image, label in found
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


def read_list(text: str, name: str, split: str | None, source: Source) -> Iterator[Line | Row]:
    """Every line of a list, or what is wrong with it."""
    folder = str(PurePosixPath(name).parent)
    for i, line in enumerate(text.splitlines(), 1):
        image, label = cells(line)
        where = f"{name}:{i}"
        if not line.strip() or (i == 1 and image.casefold() in HEADS):
            continue
        ways = {"image": image, "label": label}
        found = {key: source.find(way, folder) for key, way in ways.items() if way is not None}
        if label is None:
            stem = PurePosixPath(image).stem if is_image(image) else image
            found["image"] = found["image"] or source.stems.get(stem)
        for key, there in found.items():
            if there is None:
                fix = "copy the file too, correct the line, or delete it"
                rule = f"the {key} of a line is there" if label else RULE
                yield Row(key, rule, (ways[key] or "nothing")[:120], fix, file=where)
        if found["image"] and (label is None or found["label"]):
            yield Line(where, split, found["image"], found.get("label"))
