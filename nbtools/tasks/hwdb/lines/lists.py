"""The prepared layout's lists: `name,text` a row, and the image that a name means."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")

Problem = tuple[str, str, str]


@dataclass(frozen=True)
class Row:
    """One row of a list; problem: (value, rule, fix) where it is none."""

    number: int
    name: str = ""
    text: str = ""
    problem: Problem | None = None


def rows_of(data: bytes) -> Iterator[Row]:
    """The rows of a list, empty ones left out. The first comma ends the name; all others belong to the text, which is
    taken as it is, blanks and quotes too. A mark at the file's beginning (utf-8-sig) is none of it."""
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        line = line.removesuffix(b"\r")
        if line:
            yield row_of(number, line)


def row_of(number: int, line: bytes) -> Row:
    try:
        name, comma, text = line.decode().partition(",")
    except UnicodeDecodeError as error:
        value = f"{line[error.start : error.start + 8]!r} at byte {error.start} of the row"
        return Row(number, problem=(value, "a list is UTF-8", "save it as UTF-8"))
    if not comma or not name.strip():
        return Row(number, problem=(f"{name}{comma}{text}", "a row is name,text", "correct the row"))
    return Row(number, name.strip(), text)


class Images:
    """The images that a list of some folder may name, by their way below it, with or without their suffix.

    A list TRAIN_img_id_gt.txt means those in TRAIN/ (or an archive called so) where there are any, else all beside it.
    """

    def __init__(self, place: str, word: str, names: Iterable[str]):
        images = [n for n in names if n.startswith(place) and n.lower().endswith(IMAGES)]
        self.own = re.compile(rf"{re.escape(place)}(?:{re.escape(word)}(?:\.[\w.]+)?/)+")
        inside = [name for name in images if self.own.match(name)]
        self.names = inside or images
        keys = [self.key(name, place) for name in self.names]
        self.whole = dict(zip(keys, self.names, strict=True))
        stems = Counter(os.path.splitext(key)[0] for key in keys)
        self.stems = {os.path.splitext(k)[0]: n for k, n in self.whole.items() if stems[os.path.splitext(k)[0]] == 1}
        self.twice = {stem for stem, count in stems.items() if count > 1}
        self.place = place

    def key(self, name: str, place: str) -> str:
        match = self.own.match(name)
        return name[match.end() :] if match else name[len(place) :]

    def find(self, name: str) -> str | Problem:
        """An image's name from the source on, or why there is none."""
        name = PurePosixPath(name).as_posix()
        for key in (name, self.key(self.place + name, self.place)):
            if found := self.whole.get(key) or self.stems.get(key):
                return found
            if key in self.twice:
                return (name, "a name means one image, and there are two", "write its suffix too")
        return (name, "the image of a row is there", "copy it too, or correct the row")
