"""Draws a Picture as a PNG, for what stays: transparent, in greys that read on white and on black."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nbtools.live import samples
from nbtools.live.chart import GREEN, VERMILLION, Chart, Line, Picture, Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nbtools.letters import Letters

DPI = 144  # two pixels a px, and 72 px an inch: a point of matplotlib is a px here
GREY = "#7d7d7d"  # contrast 4.1 on white and 4.6 on the black of JupyterLab's dark theme
WIDE, COLUMNS = 960, 3  # px; charts in a row at most
LEFT, RIGHT, BETWEEN = 46, 36, 64  # px next to the charts, and between two of them
PLOT, TITLE, ROW, AXIS, NAME = 150, 24, 16, 48, 14  # px: heights of a plot, a title, a row of a legend, an axis, a name
LETTER = 0.602  # of its size: the width of a letter of matplotlib's monospaced font
SMALL = 11


def draw(shown: Picture, previews: Sequence[samples.Preview] = ()) -> bytes:
    """Header, a grid of charts, and below them the samples."""
    from matplotlib.figure import Figure

    from nbtools.letters import Letters

    head, key = header(shown), [line for line in shown.key if line.name]
    columns = max(1, min(COLUMNS, len(shown.charts)))
    above = [TITLE + ROW * math.ceil(sum(bool(line.name) for line in chart.lines) / 2) for chart in shown.charts]
    heights = [max(above[i : i + columns]) + PLOT + AXIS for i in range(0, len(above), columns)]
    heights[:1] = [height + NAME * shown.names for height in heights[:1]]
    top = 16 + 20 * len(head) + ROW * math.ceil(len(key) / 2)
    letters = Letters.of("✓ " + "".join(each.truth + each.predicted for each in previews), mono=True)
    cards, below = placed(previews, letters)
    tall = top + sum(heights) + below
    figure = Figure(figsize=(WIDE / 72, tall / 72), dpi=DPI, facecolor="none")
    look = {
        "color": GREY,
        "parse_math": False,
        "family": Letters.of("".join(t for line in head for t in line)).families,
    }
    for i, (words, colour) in enumerate(head):
        ground = {"boxstyle": "round,pad=0.3", "facecolor": colour, "edgecolor": "none"} if colour else None
        weight = "bold" if i == 0 and shown.title else "normal"
        here = {**look, "color": "#000"} if colour else look
        figure.text(LEFT / WIDE, 1 - (22 + 20 * i) / tall, words, size=13, weight=weight, bbox=ground, **here)
    if key:
        handles = [handle(line) for line in key]
        place = {"loc": "upper left", "bbox_to_anchor": (LEFT / WIDE, 1 - (8 + 20 * len(head)) / tall)}
        figure.legend(handles, [line.name for line in key], ncols=2, frameon=False, labelcolor=GREY, **place)
    width = (WIDE - LEFT - RIGHT - BETWEEN * (columns - 1)) / columns
    for i, chart in enumerate(shown.charts):
        row = i // columns
        base = top + sum(heights[: row + 1]) - AXIS - PLOT
        left = LEFT + (width + BETWEEN) * (i % columns)
        axes = figure.add_axes((left / WIDE, 1 - (base + PLOT) / tall, width / WIDE, PLOT / tall))
        draw_chart(axes, chart, shown, named=i == 0)
    for card in cards:
        draw_card(figure, *card, top + sum(heights), tall, letters)
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a letter without a font is a box: no news
        figure.savefig(stream, format="png", dpi=DPI)
    return stream.getvalue()


def header(shown: Picture) -> list[tuple[str, str]]:
    """(text, colour of its ground, "" for none) of the lines above the charts: title, badges, facts."""
    facts = textwrap.wrap("  ·  ".join(f"{label} {value}".replace(" ", "\xa0") for label, value in shown.facts), 120)
    titles = [(shown.title, "")] if shown.title else []
    return titles + [(badge.text, badge.colour) for badge in shown.badges] + [(line, "") for line in facts]


def draw_chart(axes: Axes, chart: Chart, shown: Picture, named: bool) -> None:
    """named: write above the marks what changed there."""
    second = axes.twinx() if chart.right else axes
    for line in chart.lines:
        draw_line(second if line.right else axes, line)
    up = NAME * shown.names / PLOT if named else 0.0
    for mark in shown.marks:
        tall = 1 + NAME * (mark.row + 1) / PLOT if named and mark.name else 1
        look = {"color": GREY, "linewidth": 1, "linestyle": (0, (3, 3)), "clip_on": False}
        axes.axvline(mark.x, 0.95 if mark.short else 0, tall, **look)
        if named and mark.name:
            offset, side = (4 * mark.side, NAME * mark.row + 7), "left" if mark.side > 0 else "right"
            look = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "center"}
            write = {"size": SMALL, "color": GREY, "parse_math": False}
            axes.annotate(mark.name, (mark.x, 1), offset, ha=side, **look, **write)
    if chart.note:
        axes.text(0.5, 0.5, chart.note, transform=axes.transAxes, ha="center", color=GREY, size=12, parse_math=False)
    handles = {f"{line.name} {line.value}".strip(): handle(line) for line in chart.lines if line.name}
    if handles:
        place = {"loc": "lower left", "bbox_to_anchor": (-0.03, 1 + up), "borderaxespad": 0.2, "columnspacing": 1}
        look = {"ncols": 2, "frameon": False, "fontsize": SMALL, "labelcolor": GREY, "handlelength": 1.3}
        axes.legend(handles.values(), handles, **place, **look)
    higher = ROW * math.ceil(len(handles) / 2) + 8
    look = {"size": 13, "color": GREY, "weight": "bold", "parse_math": False}
    place = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(f"{chart.title}  {chart.units}".strip(), (0, 1 + up), (0, higher), **place, **look)
    scaled(axes, chart.scale)
    if chart.right:
        scaled(second, chart.right)
    axes.set_xlim(0, shown.last)
    axes.set_xticks(*shown.ticks())
    axes.set_xlabel(shown.x, loc="right", color=GREY, size=SMALL)
    axes.grid(axis="y", color=GREY, alpha=0.25, linewidth=1)
    axes.set_axisbelow(True)
    axes.spines["bottom"].set_color(GREY)


def draw_line(axes: Axes, line: Line) -> None:
    dots = {"marker": "o", "markersize": 5, "clip_on": False} if line.dotted else {}
    axes.plot(line.x, line.y, color=line.colour, **dots, **stroke(line))
    if line.ring is not None:
        hollow = {"markersize": 10, "markeredgewidth": 2, "fillstyle": "none", "clip_on": False}
        axes.plot([line.ring[0]], [line.ring[1]], "o", color=line.colour, **hollow)


def handle(line: Line) -> Any:
    """A piece of a line as it is drawn, for a legend."""
    from matplotlib.lines import Line2D

    dot = {"marker": "o", "markersize": 5} if line.look == "points" else {}
    return Line2D([], [], color=line.colour, **dot, **stroke(line))


def stroke(line: Line) -> dict[str, Any]:
    """The look of a line in matplotlib's words."""
    faint = line.look == "faint"
    width = 1.0 if faint else 1.8
    dash = (0, tuple(part / width for part in line.dash)) if line.dash else "-"  # matplotlib counts in line widths
    return {"linewidth": width, "linestyle": dash, "alpha": 0.5 if faint else 1.0}


def scaled(axes: Axes, scale: Scale) -> None:
    axes.set_yscale("log" if scale.log else "linear")
    axes.set_ylim(scale.low, scale.high)
    axes.set_yticks(*scale.ticks(), minor=False)
    axes.set_yticks([], minor=True)
    axes.tick_params(length=0, labelsize=SMALL, colors=GREY, pad=6)
    axes.set_facecolor("none")
    axes.spines[["left", "right", "top"]].set_visible(False)


Card = tuple[samples.Preview, tuple[float, float, float, float], list[str]]
"""A sample, its (left, top, width, height) in px below the charts, and its lines of text."""


def placed(previews: Sequence[samples.Preview], letters: Letters) -> tuple[list[Card], float]:
    """(cards, px that they take)."""
    room = WIDE - LEFT - RIGHT
    found, tops = [], [0.0]
    for preview, (width, height), (left, row) in samples.chosen(previews, room):
        if row == len(tops):
            tops.append(max(top + high + 24 + ROW * len(lines) for _, (_, top, _, high), lines in found))
        shrunk = min(1.0, room / width)
        letter = max(10, int(max(width * shrunk, samples.LEAST) / (LETTER * SMALL)))
        lines = samples.block(preview, letter, letters.plain) if preview.truth or preview.predicted else []
        found.append((preview, (LEFT + left, tops[row], width * shrunk, height * shrunk), lines))
    return found, max((top + high + 24 + ROW * len(lines) for _, (_, top, _, high), lines in found), default=0.0)


def draw_card(
    figure: Figure,
    preview: samples.Preview,
    place: tuple[float, float, float, float],
    lines: list[str],
    top: float,
    tall: float,
    letters: Letters,
) -> None:
    left, start, width, height = place
    low = top + start + height
    axes = figure.add_axes((left / WIDE, 1 - low / tall, width / WIDE, height / tall))
    axes.imshow(preview.image, cmap="gray", vmin=0, vmax=255, aspect="auto")
    axes.set_axis_off()
    colour = GREEN if preview.right else VERMILLION if preview.truth else GREY
    look = {"size": SMALL, "family": letters.families, "parse_math": False, "va": "top"}
    for i, line in enumerate(lines):
        here = GREY if line.startswith("TRU") else colour
        figure.text(left / WIDE, 1 - (low + 4 + ROW * i) / tall, line, color=here, **look)
