"""Figures that a notebook shows by itself: grids of captioned pictures, confusion tables, and the colours of both.

They have no ground of their own, and a grey that is readable on white and on the black of dark themes: a PNG cannot
know which it lies on, and the same notebook is opened on both.
Places on a canvas are px from its top left, at 100 px an inch.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from nbtools.fonts import Fonts
from nbtools.table import plural

if TYPE_CHECKING:
    import pandas as pd

RIGHT, WRONG = "#0072b2", "#d55e00"  # blue and vermilion of the colour-blind-safe palette (Okabe & Ito)
GREY = "#7d7d7d"  # of text: contrast 4.1 on white, 4.6 on the black of JupyterLab's dark theme
WIDE, MARGIN, TITLE = 1200, 8, 22  # px: a canvas; around pictures; the line of text above one
TALL = 340  # px: a picture at most
SIZE = 9  # points of a caption
ALT = 300  # letters that stand for a picture at most
WRITTEN, NAMED = 24, 120  # classes up to which a confusion figure writes its numbers; its names


class Sheet(Figure):
    """A Figure without pyplot, whose state leaks from cell to cell: IPython by itself cannot show one. note: the
    sentence that a notebook shows in place of an empty strip where there is nothing to draw. alt: what it shows, in
    words; by default the words in it."""

    note = alt = ""

    def __init__(self, **look: Any):
        super().__init__(**{"facecolor": "none", **look})

    def add_subplot(self, *given: Any, **look: Any) -> Axes:
        axes = super().add_subplot(*given, facecolor="none", **look)
        axes.tick_params(colors=GREY)
        axes.spines[:].set_color(GREY)
        for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
            text.set_color(GREY)
        return axes

    def __repr__(self) -> str:
        return self.note or f"<Figure: {self.alt or self.words()}>"

    def words(self) -> str:
        """The first words in the figure, in the order of drawing."""
        words = ", ".join(text.get_text().replace("\n", " ") for text in self.findobj(Text) if text.get_text().strip())
        return textwrap.shorten(words, ALT, placeholder=" …")

    def _repr_png_(self) -> bytes | None:
        if self.note:
            return None  # IPython then shows the text
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        """The picture and, as text and as its alternative text, what it shows."""
        image = self._repr_png_()
        if image is None:
            return {"text/plain": self.note}
        about = {"alt": self.alt or self.words(), "width": round(100 * self.get_figwidth())}
        return {"image/png": image, "text/plain": repr(self)}, {"image/png": about}


def blank(note: str = "No samples to show: the list of ids is empty.") -> Sheet:
    """The figure for no samples, for instance of wrong answers when none is wrong."""
    sheet = Sheet(figsize=(4, 0.5))
    sheet.note = note
    return sheet


def canvas(width: float, height: float) -> tuple[Sheet, Axes]:
    """A figure with one pair of axes whose units are px from its top left."""
    sheet = Sheet(figsize=(width / 100, height / 100), dpi=100)
    axes = sheet.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0), autoscale_on=False)
    axes.set_axis_off()
    return sheet, axes


@dataclass(frozen=True, eq=False)
class Picture:
    """An image (H, W) grey, (H, W, 3) or (H, W, 4), uint8, with a caption above it, and a remark at its right end."""

    image: np.ndarray
    caption: str = ""
    colour: str = GREY
    remark: str = ""


@dataclass(frozen=True)
class Box:
    """The position of a picture on a canvas."""

    left: float
    top: float
    width: float
    height: float


def gallery(pictures: Sequence[Picture], columns: int = 4, below: float = 0) -> tuple[Sheet, Axes, list[Box]]:
    """Pictures in rows, each scaled to the width of its column or to TALL; and the position of each, to draw on it.

    below: px left free under the last row, for a legend.
    """
    cell = (WIDE - (columns + 1) * MARGIN) // columns
    sizes = [scaled(picture.image, cell) for picture in pictures]
    rows = [max(height for _, height in sizes[i : i + columns]) + TITLE for i in range(0, len(sizes), columns)]
    sheet, axes = canvas(WIDE, sum(rows) + MARGIN + below)
    fonts = Fonts.of("".join(picture.caption + picture.remark for picture in pictures))
    boxes = []
    for n, (picture, (width, height)) in enumerate(zip(pictures, sizes, strict=True)):
        row, column = divmod(n, columns)
        box = Box(MARGIN + column * (cell + MARGIN), sum(rows[:row]) + TITLE, width, height)
        place = (box.left, box.left + width, box.top + height, box.top)
        axes.imshow(picture.image, cmap="gray", vmin=0, vmax=255, extent=place, aspect="auto")
        caption = fonts.shortened(picture.caption, SIZE, cell)
        axes.text(box.left, box.top - 6, caption, color=picture.colour, **fonts.look(SIZE))
        remark = {"color": GREY, "ha": "right", **fonts.look(SIZE)}
        axes.text(box.left + cell, box.top - 6, fonts.plain(picture.remark), **remark)
        boxes.append(box)
    return sheet, axes, boxes


def scaled(image: np.ndarray, width: float, height: float = TALL) -> tuple[int, int]:
    """The (width, height) in px of an image that fills one of two limits and exceeds neither."""
    scale = min(width / image.shape[1], height / image.shape[0])
    return max(1, round(scale * image.shape[1])), max(1, round(scale * image.shape[0]))


def judged(truth: str, predicted: str | None) -> tuple[str, str]:
    """(caption, colour) of a sample: its truth, with what was predicted where that is wrong."""
    if predicted is None:
        return truth, GREY
    return (truth, RIGHT) if predicted == truth else (f"{truth} ≠ {predicted}", WRONG)


def confusion_figure(table: pd.DataFrame, note: str = "", percent: bool = False) -> Sheet:
    """A table of `confusion`: each true class's samples by what was predicted, blue on the diagonal, where that is
    right. percent: write shares of the row and not counts."""
    counts = table.to_numpy()
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    fonts = Fonts.of("".join(map(str, (*table.index, *table.columns))))
    size = 7 if len(table) <= 60 else 4
    side = min(max(4.5, 0.3 * len(table) + 2.5), 16)
    sheet = Sheet(figsize=(side, side), layout="constrained")
    axes = sheet.add_subplot(xlabel=table.columns.name or "", ylabel=table.index.name or "", xticks=[], yticks=[])
    axes.set_title(note, fontsize=8, color=GREY, loc="right")
    right = counts.trace() / max(counts.sum(), 1)
    sheet.alt = f"Confusion of {plural(len(table), 'class')}: {100 * right:.0f} % on the diagonal, where they are right"
    axes.imshow(tinted(shares), interpolation="nearest")
    if len(table) <= NAMED:
        columns, rows = ([fonts.shortened(str(name), size, 260) for name in names] for names in (table, table.index))
        axes.set_xticks(range(len(table)), columns, rotation=90, **fonts.look(size))
        axes.set_yticks(range(len(table)), rows, **fonts.look(size))
    if len(table) <= WRITTEN:
        for row, column in zip(*np.nonzero(shares >= 0.005 if percent else counts), strict=True):
            text = f"{100 * shares[row, column]:.0f}" if percent else f"{counts[row, column]:,}"
            ink = "white" if shares[row, column] > 0.45 else "black"
            axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=ink)
    return sheet


def tinted(shares: np.ndarray) -> np.ndarray:
    """(K, K, 4): from white for few to the colour of right on the diagonal, of wrong next to it; by the root of the
    share, so that one sample in a hundred is still seen. None is transparent."""
    right, wrong = (np.array([int(ink[i : i + 2], 16) / 255 for i in (1, 3, 5)]) for ink in (RIGHT, WRONG))
    ink = np.where(np.eye(len(shares), dtype=bool)[..., None], right, wrong)
    return np.concatenate((1 - np.sqrt(shares)[..., None] * (1 - ink), shares[..., None] > 0), -1)


def finish(axes: Axes) -> None:
    """The legend above a chart, and no frame on the right and at the top."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(
            frameon=False,
            fontsize=8,
            ncols=3,
            labelcolor=GREY,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            borderaxespad=0.2,
        )
    axes.spines[["top", "right"]].set_visible(False)
