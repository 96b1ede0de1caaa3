"""The raw format: image files whose name holds their text. Finding them, reading labels, and telling the layout."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from nbtools.errors import PackError
from nbtools.table import plural

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
FOLDERS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
SURVEYED = 300  # files whose header is read to tell the layout
ALIKE = 0.9  # share of them with one size and one length of label that makes a fixed layout
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # all that Pillow raises on a bad file


@dataclass(frozen=True)
class Found:
    """One file and the text that its name gives; text None: the name does not fit the pattern."""

    name: str
    file: Path
    split: str | None
    text: str | None

    @property
    def is_image(self) -> bool:
        return self.file.suffix.lower() in SUFFIXES


def pattern_of(label: str) -> re.Pattern[str]:
    """The text of a name's stem as the first group: `_` means everything before the first underscore."""
    if len(label) == 1:
        return re.compile(f"([^{re.escape(label)}]*){re.escape(label)}")
    try:
        pattern = re.compile(label)
    except re.error as error:
        raise PackError(f"label is no regular expression ({error}): {label!r}") from None
    if not pattern.groups:
        raise PackError(f"label must be one character, or have a group around the text like '^(.+?)_', got {label!r}")
    return pattern


def listed(folder: Path, pattern: re.Pattern[str], fold: Callable[[str], str]) -> Iterator[Found]:
    """Every file but hidden ones, in order; a folder called train, val or test on its way is its split."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not hidden(name))
        way = os.path.relpath(place, folder).split(os.sep)
        split = next((FOLDERS[part.lower()] for part in way if part.lower() in FOLDERS), None)
        prefix = "" if way == ["."] else "/".join(way) + "/"
        for name in sorted(name for name in names if not hidden(name)):
            match = pattern.match(os.path.splitext(name)[0])
            yield Found(prefix + name, Path(place, name), split, fold(match[1] or "") if match else None)


def hidden(name: str) -> bool:
    """Left behind by systems, not by people: .DS_Store, ._name.png, __MACOSX."""
    return name.startswith(".") or name == "__MACOSX"


def layout_of(folder: Path, found: Sequence[Found], layout: str, height: int) -> dict[str, Any]:
    """The layout's options, by a look at some of the files. Raises PackError where there is nothing to look at."""
    usable = [one for one in found if one.text and one.is_image]
    if not usable:
        example = f"; the first of {plural(len(found), 'file')} is {found[0].name}" if found else "; it is empty"
        raise PackError(
            f"{folder}: no image ({', '.join(SUFFIXES)}) whose name holds its text{example}. "
            "Name the files LABEL_1.png, or give label= the separator or a regular expression"
        )
    some = usable[:: max(1, len(usable) // SURVEYED)]
    lengths = Counter(len(one.text or "") for one in some)
    sizes = Counter(filter(None, map(size_of, some)))
    (length, same_length), (size, same_size) = lengths.most_common(1)[0], (sizes.most_common(1) or [(None, 0)])[0]
    if size is None:
        raise PackError(
            f"{folder}: none of {plural(len(some), 'file')} is a readable image, from {some[0].name} on; copy them "
            "again"
        )
    if layout == "fixed" or (layout == "auto" and min(same_length, same_size) >= ALIKE * len(some)):
        return {"layout": "fixed", "size": list(size), "length": length}
    return {"layout": "lines", "height": height}


def size_of(one: Found) -> tuple[int, int] | None:
    """(height, width) from the header; None where that cannot be read: packing will say why."""
    try:
        with Image.open(one.file) as image:
            return image.height, image.width
    except UNREADABLE:
        return None
