"""What the ways of a folder's files say: which are images, which labels, of what split, and what belongs together."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nbtools import disk

HEAD = 4096  # bytes of a text file that tell what it is
FOLDER = re.compile(
    r"(?P<split>train|val|test)?(?:ing|id|idation)?[_-]?"
    r"(?:(?P<image>images?|imgs?|jpegimages)|(?P<label>labels?|masks?|annot(?:ation)?s?|segmentationclass|gt))?"
    r"(?:[_-](?P<after>train|val|test)(?:ing|id|idation)?)?",
    re.I,
)
MARK = re.compile(r"[_-](?:mask|label|seg|gt)s?$", re.I)  # at the end of a label's name: a_mask.png is a.jpg's


@dataclass(frozen=True)
class Way:
    """A file's name in parts. key: (split, folders that say neither split nor kind, stem): a pair's are equal."""

    name: str
    split: str | None
    is_label: bool
    key: tuple[str | None, str, str]


def deep(name: str) -> tuple[int, str]:
    return name.count("/"), name


def walked(folder: Path) -> Iterator[str]:
    """Every file's name from the folder on; hidden ones, which systems leave behind, are none."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not hidden(name)]
        way = Path(place).relative_to(folder)
        yield from ((way / name).as_posix() for name in names if not hidden(name))


def hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def head_of(path: Path) -> bytes:
    with open(path, "rb") as file:
        return disk.read(file, HEAD)


def way_of(name: str) -> Way:
    """What the folders on a file's way say of it."""
    way, split, is_label, rest = PurePosixPath(name), None, False, []
    for part in way.parts[:-1]:
        if match := FOLDER.fullmatch(part):
            split = (match["split"] or match["after"] or split or "").lower() or None
            is_label = is_label or match["label"] is not None
        else:
            rest.append(part)
    stem = MARK.sub("", way.stem) if is_label else way.stem
    return Way(name, split, is_label, (split, "/".join(rest), stem))


def split_named(text: str) -> str | None:
    """train, val or test where a folder's name, or a subset's, says so: Validation, val_images."""
    match = FOLDER.fullmatch(text)
    return ((match["split"] or match["after"] or "").lower() or None) if match else None
