"""The classes of a data set with the colours that they have in every picture; and the sheet that pictures are laid on,
whose units are px from its top left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from nbtools.data import Card, Pack
from nbtools.letters import INCH, Letters
from nbtools.tasks.common.figures import Sheet
from nbtools.tasks.segment.looking.overlay import colours_of, hatched
from nbtools.tasks.segment.masks.classes import IGNORE

WIDE, MARGIN = 1200, 8  # px: of a sheet; at its sides and between pictures
BOX, ROW, GAP, LONGEST = 14, 22, 18, 300  # px: a class's colour; a row; between two classes; a name, at most
SIZE, GREY = 8.5, "#6b6b6b"


@dataclass(frozen=True)
class Item:
    """A class at its place: px of the left edge, and the row."""

    place: int
    text: str
    left: float
    row: int


def classes_legend(pack: Card | Pack, places: Iterable[int] | None = None) -> Sheet:
    """The classes with their colours and numbers, all or those given; IGNORE stands for pixels that have none."""
    chosen = range(len(pack.classes)) if places is None else sorted(places)
    names = [named(pack, place) for place in chosen]
    letters = Letters.of("…".join(names))
    items = placed(dict(zip(chosen, names, strict=True)), letters)
    sheet, axes = canvas(rows(items) * ROW + 2 * MARGIN)
    draw(axes, pack, items, letters, MARGIN)
    return sheet


def named(pack: Card | Pack, place: int) -> str:
    return "ignored" if place == IGNORE else f"{place} {pack.classes[place]}"


def placed(names: dict[int, str], letters: Letters) -> list[Item]:
    """Classes one behind the other, in as many rows as they need; a name that is too long loses its middle."""
    items, left, row = [], float(MARGIN), 0
    for place, name in names.items():
        text = letters.shortened(name, SIZE, LONGEST)
        wide = BOX + 6 + letters.width(text, SIZE)
        if left > MARGIN and left + wide > WIDE - MARGIN:
            left, row = float(MARGIN), row + 1
        items.append(Item(place, text, left, row))
        left += wide + GAP
    return items


def rows(items: list[Item]) -> int:
    return 1 + max((item.row for item in items), default=0)


def draw(axes: Axes, pack: Card | Pack, items: list[Item], letters: Letters, top: float) -> None:
    """The items below `top`."""
    colours = colours_of(pack)
    for item in items:
        high = top + ROW * item.row + (ROW - BOX) / 2
        box = hatched(np.full((BOX, BOX, 3), 200.0)) / 255 if item.place == IGNORE else colours[[[item.place]]]
        axes.imshow(box, extent=(item.left, item.left + BOX, high + BOX, high), aspect="auto", interpolation="none")
        edge = Rectangle((item.left, high), BOX, BOX, fill=False, edgecolor=GREY, linewidth=0.5)
        axes.add_patch(edge)  # a colour may be the paper's
        text = letters.plain(item.text)
        axes.text(item.left + BOX + 6, high + BOX - 3, text, color="black", **letters.look(SIZE))


def canvas(height: float) -> tuple[Sheet, Axes]:
    sheet = Sheet(figsize=(WIDE / INCH, height / INCH), dpi=INCH, facecolor="white")
    axes = sheet.add_axes((0, 0, 1, 1), xlim=(0, WIDE), ylim=(height, 0), autoscale_on=False)
    axes.set_axis_off()
    return sheet, axes
