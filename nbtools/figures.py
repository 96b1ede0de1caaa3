"""Figures that a notebook shows by itself: grids of captioned pictures, confusion tables, and the colours of both.

Places on a canvas are px from its top left, at 100 px an inch.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from nbtools.fonts import Fonts

if TYPE_CHECKING:
    import pandas as pd

RIGHT, WRONG = "#0072b2", "#d55e00"  # blue and vermilion of the colour-blind-safe palette (Okabe & Ito)
GREY = "#6b6b6b"  # of text
WIDE, MARGIN, TITLE = 1200, 8, 22  # px: a canvas; around pictures; the line of text above one
TALL = 340  # px: a picture at most
SIZE = 9  # points of a caption
ALT = 300  # letters that stand for a picture at most
DASHES, FALL = ("-", "--", ":"), 30  # of ten lines each; largest over least of a loss that has a logarithmic scale
WRITTEN, NAMED = 24, 120  # classes up to which a confusion figure writes its numbers; its names


class Sheet(Figure):
    """A Figure without pyplot, whose state leaks from cell to cell: IPython by itself cannot show one. note: the
    sentence that a notebook shows where there is nothing to draw."""

    note = ""

    def __repr__(self) -> str:
        """Return the first words in the figure."""
        words = ", ".join(text.get_text() for text in self.findobj(Text) if text.get_text().strip())
        return self.note or f"<Figure: {textwrap.shorten(words, ALT, placeholder=' …')}>"

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        """Return the picture and, for who cannot see it, its words."""
        if self.note:
            return {"text/plain": self.note}
        return {"image/png": self._repr_png_(), "text/plain": repr(self)}, {"image/png": {"alt": repr(self)}}


def blank(note: str = "No samples to show: the list of ids is empty.") -> Sheet:
    """Return the figure for no samples, for instance of wrong answers when none is wrong."""
    sheet = Sheet(figsize=(4, 0.5))
    sheet.note = note
    return sheet


def canvas(width: float, height: float) -> tuple[Sheet, Axes]:
    """Return a figure with one pair of axes whose units are px from its top left."""
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


def gallery(
    pictures: Sequence[Picture], columns: int = 4, below: float = 0
) -> tuple[Sheet, Axes, list[tuple[float, float]]]:
    """Draw pictures in rows, each scaled to the width of its column or to TALL; return also (left, top) of each, to
    draw on it.

    below: px left free under the last row, for a legend.
    """
    cell = (WIDE - (columns + 1) * MARGIN) // columns
    sizes = [scaled(picture.image, cell) for picture in pictures]
    rows = [max(height for _, height in sizes[i : i + columns]) + TITLE for i in range(0, len(sizes), columns)]
    sheet, axes = canvas(WIDE, sum(rows) + MARGIN + below)
    fonts = Fonts.of("".join(picture.caption + picture.remark for picture in pictures))
    places = []
    for n, (picture, (width, height)) in enumerate(zip(pictures, sizes, strict=True)):
        left, top = MARGIN + n % columns * (cell + MARGIN), sum(rows[: n // columns]) + TITLE
        extent = (left, left + width, top + height, top)
        axes.imshow(picture.image, cmap="gray", vmin=0, vmax=255, extent=extent, aspect="auto")
        caption = fonts.shortened(picture.caption, SIZE, cell)
        axes.text(left, top - 6, caption, color=picture.colour, **fonts.look(SIZE))
        remark = fonts.plain(picture.remark)
        axes.text(left + cell, top - 6, remark, color=GREY, ha="right", **fonts.look(SIZE))
        places.append((left, top))
    return sheet, axes, places


def scaled(image: np.ndarray, width: float, height: float = TALL) -> tuple[int, int]:
    """Return the (width, height) in px of an image that fills one of two limits and exceeds neither."""
    scale = min(width / image.shape[1], height / image.shape[0])
    return max(1, round(scale * image.shape[1])), max(1, round(scale * image.shape[0]))


def judged(truth: str, predicted: str | None) -> tuple[str, str]:
    """Return (caption, colour) of a sample: its truth, with what was predicted where that is wrong."""
    if predicted is None:
        return truth, GREY
    return (truth, RIGHT) if predicted == truth else (f"{truth} ≠ {predicted}", WRONG)


def confusion_figure(table: pd.DataFrame, note: str = "", percent: bool = False) -> Sheet:
    """Draw a table of `confusion`: the samples of each true class by what was predicted; the diagonal is right.

    percent: write shares of the row and not counts. The colour is the root of the share, so that one sample in a
    hundred is still seen.
    """
    counts = table.to_numpy()
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    fonts = Fonts.of("".join(map(str, (*table.index, *table.columns))))
    size = 7 if len(table) <= 60 else 4
    side = min(max(4.5, 0.3 * len(table) + 2.5), 16)
    sheet = Sheet(figsize=(side, side), layout="constrained")
    axes = sheet.add_subplot(xlabel=table.columns.name or "", ylabel=table.index.name or "", xticks=[], yticks=[])
    axes.set_title(note, fontsize=8, color=GREY, loc="right")
    axes.imshow(np.sqrt(shares), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
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


def curves(charts: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]], names: Sequence[str], x: str) -> Sheet:
    """Draw charts, two next to each other, that share an x axis: title → the (x, y) of each name. A chart without a
    point is left out; a loss that falls a lot has a logarithmic scale."""
    charts = {title: lines for title, lines in charts.items() if any(len(y) for _, y in lines)}
    rows = -(-len(charts) // 2)
    sheet = Sheet(figsize=(8, 0.6 + 2.4 * rows), dpi=120, layout="constrained")
    handles = []
    for k, (title, lines) in enumerate(charts.items(), 1):
        axes = sheet.add_subplot(rows, 2, k, xlabel=x)
        axes.set_title(title, loc="left", fontsize=10)
        handles = [
            axes.plot(*line, DASHES[n // 10 % 3], marker="." * (len(line[0]) < 2))[0] for n, line in enumerate(lines)
        ]
        every = np.concatenate([y for _, y in lines])
        if title.endswith("loss") and 0 < FALL * every.min() < every.max():
            axes.set_yscale("log")
    fonts = Fonts.of("".join(names))
    look = {"loc": "outside upper left", "ncols": 4, "frameon": False, "prop": fonts.look(SIZE)["fontproperties"]}
    for text in sheet.legend(handles, [*map(fonts.plain, names)][: len(handles)], **look).get_texts():
        text.set_parse_math(False)
    return sheet


def finish(axes: Axes) -> None:
    """Put the legend above a chart, and take the frame on the right and at the top away."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    axes.spines[["top", "right"]].set_visible(False)
