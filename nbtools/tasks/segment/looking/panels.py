"""Pictures of one size hung on a sheet in rows: a text above each, numbers of classes on them, the legend below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from nbtools.data import Pack
from nbtools.letters import Letters
from nbtools.tasks.common.figures import Sheet, blank
from nbtools.tasks.segment.looking import legend
from nbtools.tasks.segment.looking.marking import spots
from nbtools.tasks.segment.looking.overlay import fitted, nearest

COLUMNS, TITLE = 4, 22  # pictures of a row; px of the text above one
CELL = (legend.WIDE - (COLUMNS + 1) * legend.MARGIN) // COLUMNS  # px: as wide is a picture
TALL = 340  # px: unless it were higher than that
NUMBER: dict[str, Any] = {"ha": "center", "va": "center", "color": "white", "size": 7}
OUTLINE = 2  # points of black about a number


@dataclass(frozen=True, eq=False)
class Panel:
    """One picture (h, w, 3) uint8 with the text above it. label (h, w): the classes that are numbered on it, and that
    the legend has."""

    image: np.ndarray
    title: str
    colour: str = "black"
    label: np.ndarray | None = None


def in_cell(image: np.ndarray, *labels: np.ndarray) -> list[np.ndarray]:
    """image (H, W, C) and labels (H, W) as large as they are shown, so that lines drawn on them are one pixel wide."""
    height, width = image.shape[:2]
    scale = min(CELL / width, TALL / height)
    size = max(1, round(scale * width)), max(1, round(scale * height))
    return [fitted(image, *size), *(nearest(label, *size) for label in labels)]


def laid(pack: Pack, panels: Sequence[Panel]) -> Sheet:
    """The sheet of these."""
    if not panels:
        return blank()
    seen = sorted({int(place) for panel in panels if panel.label is not None for place in np.unique(panel.label)})
    names = {place: legend.named(pack, place) for place in seen}
    letters = Letters.of("…".join([*names.values(), *(panel.title for panel in panels)]))
    items = legend.placed(names, letters)
    tall = max(panel.image.shape[0] for panel in panels) + TITLE
    below = -(-len(panels) // COLUMNS) * tall + legend.MARGIN
    sheet, axes = legend.canvas(below + legend.rows(items) * legend.ROW + legend.MARGIN)
    for n, panel in enumerate(panels):
        row, column = divmod(n, COLUMNS)
        hang(axes, panel, letters, legend.MARGIN + column * (CELL + legend.MARGIN), row * tall + TITLE)
    legend.draw(axes, pack, items, letters, below)
    return sheet


def hang(axes: Axes, panel: Panel, letters: Letters, left: int, top: int) -> None:
    height, width = panel.image.shape[:2]
    axes.imshow(panel.image, extent=(left, left + width, top + height, top), aspect="auto", interpolation="nearest")
    title = letters.plain(letters.shortened(panel.title, legend.SIZE, CELL))
    axes.text(left, top - 6, title, color=panel.colour, **letters.look(legend.SIZE))
    for place, x, y in () if panel.label is None else spots(panel.label):
        stroke = [withStroke(linewidth=OUTLINE, foreground="black")]
        axes.text(left + x, top + y, str(place), path_effects=stroke, **NUMBER)
