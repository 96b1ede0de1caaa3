"""The class table: which raw id, name and colour of the labels is which class, and which are ignored."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from nbtools.errors import PackError

IGNORE = 255  # in packed labels
UNKNOWN = 254  # in a look-up only: an id that is in no table
MOST_CLASSES = 254  # what a byte holds beside the two
MOST_ID = 65_535  # of 16-bit labels

OF_TWO = (
    "A mask of 0 and 255 is read by classes={0: 'background', 255: 'object'}, or a file of the lines 0,background and "
    "255,object"
)

Colour = tuple[int, int, int]

# Okabe and Ito's, then each the farthest from all before it and from black in CIELAB, also as protanopes and
# deuteranopes see them (Machado et al. 2009).
PALETTE: tuple[Colour, ...] = (
    *((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167)),
    *((0, 0, 255), (0, 0, 102), (255, 255, 204), (102, 102, 255), (102, 51, 0), (153, 255, 255), (102, 51, 102)),
    *((0, 204, 102), (102, 153, 255)),
)
BACKGROUND = ("background", "_background_", "bg")  # black, and what no drawn shape covers


@dataclass(frozen=True)
class Class:
    """id: in the raw labels; colour: None where nobody gave one."""

    id: int
    name: str
    colour: Colour | None = None


@dataclass(frozen=True)
class Table:
    """classes: in order of their places; ignored: raw ids that count as no class, 255 among them unless it is one."""

    classes: tuple[Class, ...]
    ignored: tuple[Class, ...]

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.classes]

    @cached_property
    def lookup(self) -> np.ndarray:
        """(65536,) uint8: raw id → place, IGNORE, or UNKNOWN."""
        places = np.full(MOST_ID + 1, UNKNOWN, np.uint8)
        places[[one.id for one in self.ignored]] = IGNORE
        places[[one.id for one in self.classes]] = np.arange(len(self.classes))
        return places

    @property
    def by_name(self) -> dict[str, int]:
        """Name → raw id."""
        return {one.name: one.id for one in (*self.classes, *self.ignored) if one.name}

    @property
    def by_colour(self) -> dict[Colour, int]:
        """Colour → raw id, of the colours that were given."""
        return {one.colour: one.id for one in (*self.classes, *self.ignored) if one.colour is not None}

    @property
    def background(self) -> int:
        """The place of what no shape covers: the class of that name, else it is ignored."""
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


def table_of(entries: Iterable[Class], ignore: Sequence[int | str] = ()) -> Table:
    """The table of these classes without what is ignored, by raw id or name.

    Raises PackError where the classes cannot be told apart, are fewer than 2 or more than 254.
    """
    entries = list(entries)
    require_different(entries)
    ignored = ignored_ids(entries, ignore)
    if IGNORE not in {one.id for one in entries}:
        ignored = [*ignored, IGNORE]
    known = {one.id: one for one in entries}
    classes = tuple(one for one in entries if one.id not in ignored)
    if not 2 <= len(classes) <= MOST_CLASSES:
        some = ", ".join(one.name for one in classes[:8]) or "none"
        raise PackError(
            f"a class table has 2 to {MOST_CLASSES} classes, got {len(classes)} beside those ignored ({some}); "
            f"give classes=, names or a file of them. {OF_TWO}"
        )
    return Table(classes, tuple(known.get(i, Class(i, "")) for i in dict.fromkeys(ignored)))


def require_different(entries: Sequence[Class]) -> None:
    for one in entries:
        if type(one.id) is not int or not 0 <= one.id <= MOST_ID:
            raise PackError(f"classes: an id is a whole number from 0 to {MOST_ID}, got {one.id!r} of {one.name!r}")
        if not isinstance(one.name, str) or not one.name.strip():
            raise PackError(f"classes: a class has a name, got {one.name!r} for id {one.id}")
    for what in ("id", "name", "colour"):
        values = [value for one in entries if (value := getattr(one, what)) is not None]
        if twice := [value for value in values if values.count(value) > 1]:
            raise PackError(f"classes: each {what} stands once, got {twice[0]!r} twice; rename one, or delete its line")


def ignored_ids(entries: Sequence[Class], ignore: Sequence[int | str]) -> list[int]:
    names = {one.name: one.id for one in entries}
    found = [names.get(one, -1) if isinstance(one, str) else one for one in ignore]
    for one, raw in zip(ignore, found, strict=True):
        if not 0 <= raw <= MOST_ID:
            known = ", ".join(names)
            raise PackError(f"ignore holds raw ids from 0 to {MOST_ID}, or names of classes ({known}), got {one!r}")
    return found


def colours(classes: Sequence[Class]) -> list[Colour]:
    """A colour of each class: the one given, black for the background, else the next of the palette that is free."""
    taken = {one.colour for one in classes}
    free = (colour for colour in palette() if colour not in taken)
    black = (0, 0, 0)
    return [
        one.colour or (black if one.name.casefold() in BACKGROUND and black not in taken else next(free))
        for one in classes
    ]


def palette() -> Iterator[Colour]:
    """Colours without end and without repetition among the first few hundred."""
    yield from PALETTE
    k = 0
    while True:  # hues by the golden ratio are far from all before them
        red, green, blue = colorsys.hsv_to_rgb(
            k * 0.6180339887 % 1, (0.55, 0.95, 0.75)[k % 3], (0.95, 0.7, 0.45)[k % 3]
        )
        yield round(red * 255), round(green * 255), round(blue * 255)
        k += 1
