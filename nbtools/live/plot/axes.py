"""One Chart on matplotlib's axes. A point of matplotlib is a px of the page, so sizes are those of the live frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbtools.live.plot.axis import Scale
from nbtools.live.plot.chart import Chart, Line, Mark, Picture
from nbtools.live.plot.page import GREY, stroke

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT, SMALL, NAME = 150, 11, 14  # px: height of a plot, size of text, height of a mark's name


def draw(axes: Axes, chart: Chart, shown: Picture, named: bool) -> None:
    """Draw on empty axes; `named` writes what changed above the marks."""
    second = axes.twinx() if chart.right else axes
    for line in chart.lines:
        draw_line(second if line.right else axes, line)
    for mark in shown.marks:
        tall = 1 + NAME * (mark.row + 1) / PLOT if named and mark.name else 1
        axes.axvline(
            mark.x, 0.95 if mark.short else 0, tall, color=GREY, linewidth=1, linestyle=(0, (3, 3)), clip_on=False
        )
        if named and mark.name:
            name(axes, mark)
    if chart.note:
        axes.text(0.5, 0.5, chart.note, transform=axes.transAxes, ha="center", color=GREY, size=12, parse_math=False)
    scaled(axes, chart.scale)
    if chart.right:
        scaled(second, chart.right)
    axes.set_xlim(0, shown.last)
    axes.set_xticks(*shown.ticks())
    axes.grid(axis="y", color=GREY, alpha=0.25, linewidth=1)
    axes.set_axisbelow(True)
    axes.spines["bottom"].set_color(GREY)
    look = {"textcoords": "offset points", "color": GREY, "parse_math": False, "size": SMALL}
    corner, offset = ((0, 0), (-8, -6)) if len(shown.x) < 5 else ((1, 0), (0, -21))  # a long name has no room beside 0
    axes.annotate(shown.x, corner, offset, xycoords="axes fraction", ha="right", va="top", **look)


def draw_line(axes: Axes, line: Line) -> None:
    dots = {"marker": "o", "markersize": 5, "clip_on": False} if line.dotted else {}
    axes.plot(line.x, line.y, color=line.colour, **dots, **stroke(line))
    if line.ring is not None:
        hollow = {"markersize": 10, "markeredgewidth": 2, "fillstyle": "none", "clip_on": False}
        axes.plot([line.ring[0]], [line.ring[1]], "o", color=line.colour, **hollow)


def name(axes: Axes, mark: Mark) -> None:
    place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "center"}
    offset, side = (4 * mark.side, NAME * mark.row + 7), "left" if mark.side > 0 else "right"
    look = {"size": SMALL, "color": GREY, "parse_math": False}
    axes.annotate(mark.name, (mark.x, 1), offset, ha=side, **place, **look)


def scaled(axes: Axes, scale: Scale) -> None:
    axes.set_yscale("log" if scale.log else "linear")
    axes.set_ylim(scale.low, scale.high)
    axes.set_yticks(*scale.ticks(), minor=False)
    axes.set_yticks([], minor=True)
    axes.tick_params(length=0, labelsize=SMALL, colors=GREY, pad=6)
    axes.set_facecolor("none")
    axes.spines[["left", "right", "top"]].set_visible(False)
