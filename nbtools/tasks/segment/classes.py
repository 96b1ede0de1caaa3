"""The class table: which raw id, name and colour of the labels is which class, and which are ignored.

It comes from names, a mapping id → name, or a text file, such as classes.txt: one name a line, ids from 0; or lines
`id,name` or `id,name,r,g,b`, with any separator.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from nbtools.errors import PackError
from nbtools.tasks.common.lists import read_rows, read_text

IGNORE = 255  # in packed labels
UNKNOWN = 254  # in `Table.lookup` only: an id that is in no table
MOST_CLASSES = 254  # what a byte holds besides these two
MOST_ID = 65_535  # of 16-bit labels
BACKGROUND = ("background", "_background_", "bg")  # black, and what no drawn shape covers

Colour = tuple[int, int, int]
Given = str | Path | Mapping[int, str] | Sequence[str]

# Okabe and Ito's, then each the farthest from all before it and from black in CIELAB, also as protanopes and
# deuteranopes see them (Machado et al. 2009).
PALETTE: tuple[Colour, ...] = (
    *((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167)),
    *((0, 0, 255), (0, 0, 102), (255, 255, 204), (102, 102, 255), (102, 51, 0), (153, 255, 255), (102, 51, 102)),
    *((0, 204, 102), (102, 153, 255)),
)

FILE = "classes.txt"


@dataclass(frozen=True)
class Class:
    """id: in the raw labels; colour: None if none was given."""

    id: int
    name: str
    colour: Colour | None = None


@dataclass(frozen=True)
class Table:
    """classes: in the order of their indices; ignored: raw ids that are no class, 255 among them unless it is one."""

    classes: tuple[Class, ...]
    ignored: tuple[Class, ...]

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.classes]

    @cached_property
    def lookup(self) -> np.ndarray:
        """(65536,) uint8: raw id → class index, IGNORE, or UNKNOWN."""
        indices = np.full(MOST_ID + 1, UNKNOWN, np.uint8)
        indices[[one.id for one in self.ignored]] = IGNORE
        indices[[one.id for one in self.classes]] = np.arange(len(self.classes))
        return indices

    @property
    def by_name(self) -> dict[str, int]:
        """Name → raw id."""
        return {one.name: one.id for one in (*self.classes, *self.ignored) if one.name}

    @property
    def background(self) -> int:
        """The index for what no shape covers: the class of that name, else it is ignored."""
        return next((k for k, one in enumerate(self.classes) if one.name.casefold() in BACKGROUND), IGNORE)

    @property
    def options(self) -> dict[str, Any]:
        """As a pack's card has it. names, ids, colours: of each class; table: all that `of` needs."""
        every = (*self.classes, *self.ignored)
        return {
            "names": self.names,
            "ids": [one.id for one in self.classes],
            "colours": [list(colour) for colour in colours(self.classes)],
            "ignored": [one.id for one in self.ignored],
            "table": [[one.id, one.name, list(one.colour) if one.colour else None] for one in every],
        }

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        every = [Class(i, name, tuple(c) if c else None) for i, name, c in options["table"]]
        count = len(options["ids"])
        return cls(tuple(every[:count]), tuple(every[count:]))


def class_table(entries: Sequence[Class], ignore: Sequence[int | str] = ()) -> Table:
    """The table of these classes without the ignored ones, which are raw ids or names.

    Raises PackError unless the classes differ, and are from 2 to 254.
    """
    for one in entries:
        if type(one.id) is not int or not 0 <= one.id <= MOST_ID:
            raise PackError(
                f"classes: an id must be a whole number from 0 to {MOST_ID}, got {one.id!r} of {one.name!r}"
            )
        if not isinstance(one.name, str) or not one.name.strip():
            raise PackError(f"classes: a class must have a name, got {one.name!r} for id {one.id}")
    for what in ("id", "name"):
        values = [getattr(one, what) for one in entries]
        if twice := [value for value in values if values.count(value) > 1]:
            raise PackError(
                f"classes: each {what} must be used only once, got {twice[0]!r} twice; rename one, or delete its line"
            )
    known, ids = {one.id: one for one in entries}, {one.name: one.id for one in entries}
    ignored = [ids.get(one, -1) if isinstance(one, str) else one for one in ignore]
    for one, raw in zip(ignore, ignored, strict=True):
        if not 0 <= raw <= MOST_ID:
            names = ", ".join(ids)
            raise PackError(f"ignore must be raw ids from 0 to {MOST_ID}, or names of classes ({names}), got {one!r}")
    if IGNORE not in known:
        ignored.append(IGNORE)
    classes = tuple(one for one in entries if one.id not in ignored)
    if not 2 <= len(classes) <= MOST_CLASSES:
        raise PackError(
            f"a class table must have 2 to {MOST_CLASSES} classes, got {len(classes)} besides those ignored; give "
            "classes=, names or a file of them"
        )
    return Table(classes, tuple(known.get(i, Class(i, "")) for i in dict.fromkeys(ignored)))


def parse_classes(classes: Given) -> list[Class]:
    """The classes of a list of names (or of classes, as `pack_options` has them), a mapping id → name, or a file.
    Raises PackError for anything else."""
    if isinstance(classes, str | Path):
        path = Path(classes).expanduser()
        if not path.is_file():
            raise PackError(
                f"classes must be two names or more, or a text file of them, got {str(classes)!r}: no such file"
            )
        return list(read_classes(read_text(path, "give two names or more, or a text file of them in UTF-8"), path.name))
    if isinstance(classes, Mapping):
        return [Class(int(i) if isinstance(i, np.integer) else i, name) for i, name in classes.items()]
    if not isinstance(classes, Iterable):
        raise PackError(f"classes must be names, a mapping id → name, or a file of them, got {classes!r}")
    return [one if isinstance(one, Class) else Class(i, one) for i, one in enumerate(classes)]


def read_classes(text: str, file: str) -> Iterator[Class]:
    """The classes of a file, whose first line sets the form of all. Raises PackError naming the line that differs."""
    lines = ["" if line.startswith("#") else line.strip() for line in text.splitlines()]
    rows = read_rows("\n".join(lines), file, is_entry, heads=("id",))
    if not rows or not is_entry(rows[0][1]):
        yield from (Class(k, name) for k, name in enumerate(filter(None, lines)))
        return
    for i, cells in rows:
        if not is_entry(cells):
            rule = "a line must have the form of the first"
            raise PackError(f"{file}:{i}: {rule}, {','.join(rows[0][1])!r}, got {','.join(cells)!r}")
        rgb = [int(cell) for cell in cells[2:]]
        if max(rgb, default=0) > 255:
            raise PackError(f"{file}:{i}: a colour must be three numbers from 0 to 255, got {', '.join(cells[2:])}")
        yield Class(int(cells[0]), cells[1], (rgb[0], rgb[1], rgb[2]) if rgb else None)


def is_entry(cells: list[str]) -> bool:
    """Whether cells are id, name, or id, name, r, g, b."""
    return len(cells) in (2, 5) and all(cell.isdecimal() for cell in (cells[0], *cells[2:]))


def colours(classes: Sequence[Class]) -> list[Colour]:
    """A colour for each class: the one given, black for the background, else the next free one of the palette."""
    taken, black = {one.colour for one in classes}, (0, 0, 0)
    free = (colour for colour in palette() if colour not in taken)
    return [
        one.colour or (black if one.name.casefold() in BACKGROUND and black not in taken else next(free))
        for one in classes
    ]


def palette() -> Iterator[Colour]:
    """Endless colours: after PALETTE hues in steps of the golden ratio, each far from all before it."""
    yield from PALETTE
    k = 0
    while True:
        rgb = colorsys.hsv_to_rgb(k * 0.6180339887 % 1, (0.55, 0.95, 0.75)[k % 3], (0.95, 0.7, 0.45)[k % 3])
        red, green, blue = (round(part * 255) for part in rgb)
        yield red, green, blue
        k += 1
