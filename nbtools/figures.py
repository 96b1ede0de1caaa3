"""Figures that a notebook shows by itself: captioned pictures, confusion tables, curves; and fonts for any text.

Places on a canvas are px from its top left, at 100 px an inch.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, findSystemFonts, fontManager
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text

from nbtools.show import columns

if TYPE_CHECKING:
    import pandas as pd

RIGHT, WRONG = "#0072b2", "#d55e00"  # blue and vermilion of the colour-blind-safe palette (Okabe & Ito)
GREY = "#6b6b6b"  # of text
WIDE, MARGIN, TITLE = 1200, 8, 22  # px: a canvas; around pictures; the line of text above one
TALL = 340  # px: a picture at most
SIZE = 9  # points of a caption
WRITTEN, NAMED = 24, 120  # classes up to which a confusion figure writes its numbers; its names
SANS, MONO = "DejaVu Sans", "DejaVu Sans Mono"  # come with matplotlib
NEVER = "\U0010ffff"  # no character: a font that has it draws one box for all

Picture = tuple[np.ndarray, str, str]
"""An image (H, W) grey, (H, W, 3) or (H, W, 4), uint8; the caption above it, and its colour."""


class Sheet(Figure):
    """A Figure without pyplot, whose state leaks from cell to cell: IPython by itself cannot show one."""

    def __repr__(self) -> str:
        """Return the first words in the figure."""
        words = ", ".join(text.get_text() for text in self.findobj(Text) if text.get_text().strip())
        return f"<Figure: {textwrap.shorten(words, 300, placeholder=' …')}>"

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        """Return the picture and, for who cannot see it, its words."""
        return {"image/png": self._repr_png_(), "text/plain": repr(self)}, {"image/png": {"alt": repr(self)}}


def blank(note: str = "No samples to show: the list of ids is empty.") -> Sheet:
    """Return the figure for no samples, for instance of wrong answers when none is wrong."""
    sheet = Sheet(figsize=(5, 0.4))
    sheet.text(0, 0.5, note, color=GREY, size=SIZE)
    return sheet


def canvas(width: float, height: float) -> tuple[Sheet, Axes]:
    """Return a figure with one pair of axes whose units are px from its top left."""
    sheet = Sheet(figsize=(width / 100, height / 100), dpi=100)
    axes = sheet.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0), autoscale_on=False)
    axes.set_axis_off()
    return sheet, axes


def gallery(pictures: Sequence[Picture], columns: int = 4, below: float = 0) -> Sheet:
    """Draw pictures in rows, each scaled to the width of its column or to TALL. below: px left free under the last row,
    for a legend."""
    if not pictures:
        return blank()
    cell = (WIDE - (columns + 1) * MARGIN) // columns
    sizes = [scaled(image, cell) for image, *_ in pictures]
    rows = [max(height for _, height in sizes[i : i + columns]) + TITLE for i in range(0, len(sizes), columns)]
    sheet, axes = canvas(WIDE, sum(rows) + MARGIN + below)
    fonts = Fonts.of("".join(caption for _, caption, _ in pictures))
    for n, ((image, caption, colour), (width, height)) in enumerate(zip(pictures, sizes, strict=True)):
        left, top = MARGIN + n % columns * (cell + MARGIN), sum(rows[: n // columns]) + TITLE
        extent = (left, left + width, top + height, top)
        axes.imshow(image, cmap="gray", vmin=0, vmax=255, extent=extent, aspect="auto")
        axes.text(left, top - 6, fonts.shortened(caption, SIZE, cell), color=colour, **fonts.look(SIZE))
    return sheet


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
    """Draw a table of counts, the samples of each true class (rows) by what was predicted; the diagonal is right.

    percent: write shares of the row and not counts. The colour is the root of the share, so that one sample in a
    hundred is still seen.
    """
    counts = table.to_numpy()
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    fonts, side = Fonts.of("".join(map(str, (*table.index, *table.columns)))), min(max(4.5, 0.3 * len(table) + 2.5), 16)
    sheet = Sheet(figsize=(side, side), layout="constrained")
    axes = sheet.add_subplot(xlabel=table.columns.name or "", ylabel=table.index.name or "", xticks=[], yticks=[])
    axes.set_title(note, fontsize=8, color=GREY, loc="right")
    axes.imshow(np.sqrt(shares), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    if len(table) <= NAMED:
        size = min(7, 420 / len(table))
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
    point is left out."""
    charts = {title: lines for title, lines in charts.items() if any(len(y) for _, y in lines)}
    rows, fonts, handles = -(-len(charts) // 2), Fonts.of("".join(names)), []
    sheet = Sheet(figsize=(8, 0.6 + 2.4 * rows), dpi=120, layout="constrained")
    for k, (title, lines) in enumerate(charts.items(), 1):
        axes = sheet.add_subplot(rows, 2, k, xlabel=x)
        axes.set_title(title, loc="left", fontsize=10)
        handles = [axes.plot(*line, marker=".")[0] for line in lines]
    names = [fonts.plain(name).replace("$", r"\$") for name in names][: len(handles)]  # a $ is no formula
    font = fonts.look(SIZE)["fontproperties"]
    sheet.legend(handles, names, loc="outside upper left", ncols=4, frameon=False, prop=font)
    return sheet


def finish(axes: Axes) -> None:
    """Put the legend above a chart, and take the frame on the right and at the top away."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    axes.spines[["top", "right"]].set_visible(False)


# -- fonts


@dataclass(frozen=True)
class Fonts:
    """How to draw the characters of a text: matplotlib's own font has no Chinese ones, and would warn about each.

    families: for matplotlib, which falls back from the first to the second; wide: what the first does not have;
    missing: what neither has.
    """

    families: tuple[str, ...]
    wide: frozenset[str]
    missing: frozenset[str]

    @classmethod
    def of(cls, text: str, *, mono: bool = False) -> Fonts:
        """Look for what matplotlib's own font lacks in the system's."""
        first = MONO if mono else SANS
        wide = frozenset(text) - drawable(Path(findfont(FontProperties(family=first))), text)
        had, font = best_of(system(), wide) if wide else (wide, None)
        if font is None:
            return cls((first,), wide, wide)
        if all(entry.fname != str(font) for entry in fontManager.ttflist):
            fontManager.addfont(font)
        return cls((first, FT2Font(str(font)).family_name), wide, wide - had)

    def plain(self, text: str) -> str:
        """Return a text in which what no font has, control characters too, is written U+624B."""
        return "".join(f"U+{ord(letter):04X}" if letter in self.missing else letter for letter in text)

    def look(self, size: float) -> dict[str, Any]:
        """Return the arguments of matplotlib's texts, size in points: a $ is no formula."""
        return {"fontproperties": FontProperties(family=self.families, size=size), "parse_math": False}

    def shortened(self, text: str, size: float, room: float) -> str:
        """Return a text as drawn in about `room` px: a longer one loses its middle, since its ends identify it."""
        drawn, most = self.plain(text), int(room / (0.7 * size * 100 / 72))  # a column is at most about 0.7 em
        if (taken := columns(drawn)) <= most:
            return drawn
        half = most * len(drawn) // taken // 2
        return f"{drawn[:half]}…{drawn[len(drawn) - half + 1 :]}"


def system() -> list[Path]:
    """Return the font files of the system, regular ones first."""
    return sorted(map(Path, findSystemFonts()), key=lambda font: ("regular" not in font.name.lower(), font))


def best_of(fonts: Iterable[Path], needed: Iterable[str]) -> tuple[frozenset[str], Path | None]:
    """Return (what it has of the needed letters, the font): the first with the most. Cost: 0.4 ms a font."""
    had = {font: drawable(font, needed) for font in fonts}
    best = max(had, key=lambda font: len(had[font]), default=None)
    return (had[best], best) if best and had[best] else (frozenset(), None)


def drawable(font: Path, letters: Iterable[str]) -> frozenset[str]:
    """Return the characters that a font has; none if matplotlib cannot draw with it."""
    try:
        face = FT2Font(str(font))
    except (RuntimeError, OSError):
        return frozenset()
    if not face.scalable or face.get_char_index(ord(NEVER)):
        return frozenset()
    return frozenset(letter for letter in letters if face.get_char_index(ord(letter)))
