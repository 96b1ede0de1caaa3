"""A matplotlib figure with places in px from its top left; twice as many pixels, so it is sharp on every screen."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nbtools import table
from nbtools.live.plot.chart import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 144  # two pixels a px, and 72 px an inch
GREY = "#7d7d7d"  # contrast 4.1 on white and 4.6 on the black of JupyterLab's dark theme
LETTER, MONO = 0.63, 0.602  # of the size: about a letter's width, and exactly a monospaced one's (DejaVu)
LEGEND = 16  # px: height of a row of names
CHINESE = ("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Zen Hei", "Microsoft YaHei", "PingFang SC")


class Page:
    """A transparent page, wide and tall in px."""

    def __init__(self, wide: float, tall: float):
        from matplotlib.figure import Figure

        self.wide, self.tall = wide, tall
        self.figure = Figure(figsize=(wide / 72, tall / 72), dpi=DPI, facecolor="none")

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        box = (left / self.wide, 1 - (top + height) / self.tall, width / self.wide, height / self.tall)
        return self.figure.add_axes(box)

    def write(self, left: float, base: float, text: str, size: float, mono: bool = False, **look: Any) -> None:
        """Text by its left end and its base line."""
        look = {"family": families(mono), "color": GREY, "size": size, "parse_math": False, **look}
        self.figure.text(left / self.wide, 1 - base / self.tall, text, **look)

    def rule(self, left: float, top: float, width: float, colour: str, **look: Any) -> None:
        """A level line."""
        from matplotlib.lines import Line2D

        y = 1 - top / self.tall
        places = [(left + width * share) / self.wide for share in (0, 0.5, 1)]
        self.figure.add_artist(Line2D(places, [y] * 3, color=colour, solid_capstyle="butt", **look))

    def png(self) -> bytes:
        stream = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # a letter without a font is a box: no news
            self.figure.savefig(stream, format="png", dpi=DPI)
        return stream.getvalue()


def families(mono: bool = False) -> list[str]:
    """The font that comes with matplotlib, and one with Chinese characters where the machine has one."""
    from matplotlib.font_manager import fontManager

    known = {font.name for font in fontManager.ttflist}
    return ["DejaVu Sans Mono" if mono else "DejaVu Sans", *(name for name in CHINESE if name in known)][:2]


def length(text: str, size: float, weight: str = "normal") -> float:
    """How many px a text is long; about, where it is not ASCII."""
    if not text.isascii():
        return LETTER * size * table.columns(text)
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    return text_to_path.get_text_width_height_descent(text, FontProperties(size=size, weight=weight), ismath=False)[0]


def legend(lines: Sequence[Line], room: float, size: float) -> list[tuple[float, int]]:
    """Places of lines' names in rows that wrap."""
    return flowed([length(line.name, size) + length(line.value, size, "bold") + 36 for line in lines], room + 14)


def explain(
    page: Page, lines: Sequence[Line], places: Sequence[tuple[float, int]], left: float, top: float, size: float
) -> None:
    """A piece of each line as it is drawn, its name and its value."""
    for line, (right, row) in zip(lines, places, strict=True):
        start, base = left + right, top + LEGEND * row + 12
        dot = {"marker": "o", "markersize": 5, "markevery": [1]} if line.look == "points" else {}
        page.rule(start, base - 4, 16, line.colour, **dot, **stroke(line))
        page.write(start + 20, base, line.name, size)
        page.write(start + 24 + length(line.name, size), base, line.value, size, weight="bold")


def stroke(line: Line) -> dict[str, Any]:
    """A line's look in matplotlib's words."""
    faint = line.look == "faint"
    width = 1.0 if faint else 1.8
    dash = (0, tuple(part / width for part in line.dash)) if line.dash else "-"  # matplotlib counts in line widths
    return {"linewidth": width, "linestyle": dash, "alpha": 0.5 if faint else 1.0}


def flowed(widths: Sequence[float], room: float) -> list[tuple[float, int]]:
    """(left, row) of things beside each other that wrap where the room ends."""
    places, left, row = [], 0.0, 0
    for width in widths:
        if left and left + width > room:
            left, row = 0.0, row + 1
        places.append((left, row))
        left += width
    return places


def rows(places: Sequence[tuple[float, int]]) -> int:
    return places[-1][1] + 1 if places else 0
