"""Draws a Picture as a PNG with matplotlib, for what stays: transparent, in greys that are readable on white and on
black."""

from __future__ import annotations

import base64
import io
import math
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from nbtools.live import samples
from nbtools.live.chart import GREEN, VERMILLION, Chart, Line, Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


DPI = 144  # two pixels a px, and 72 px an inch: a point of matplotlib is a px here
GREY = "#7d7d7d"  # contrast 4.1 on white and 4.6 on the black of JupyterLab's dark theme
WIDE, LEFT, RIGHT, BETWEEN = 760, 62, 20, 66  # px: width, that of a cell in a window of 900; margins; between charts
HEAD, TITLE, PLOT, AXIS, ROW = 21, 25, 140, 36, 16  # px: heights of a line above, a title, a plot, its axis, small text
IMAGE, LINE = 100, 48  # px: height of a sample, of a long line of text
CHARTS, SAMPLES = 2, 4  # next to each other
LETTER, SMALL, WORDS = 0.602, 12, 95  # width of a monospaced letter of its size; that size; letters of a line above
WIDTH = 0.56  # of a letter of its size, in the names of marks


@dataclass(frozen=True)
class Still:
    """A PNG as a notebook shows it, two pixels a px; alt: what it shows in words, its text and alternative text."""

    image: bytes
    alt: str

    @property
    def pixels(self) -> tuple[int, int]:
        """Its width and height."""
        width, height = (int.from_bytes(self.image[i : i + 4]) for i in (16, 20))  # of its first chunk
        return width, height

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        width, height = (pixels // 2 for pixels in self.pixels)
        data = {"image/png": base64.b64encode(self.image).decode(), "text/plain": self.alt}
        return data, {"image/png": {"width": width, "height": height, "alt": self.alt}}

    def html(self) -> str:
        data, about = self._repr_mimebundle_()
        width = about["image/png"]["width"]
        return f'<img alt="{escape(self.alt)}" width="{width}" src="data:image/png;base64,{data["image/png"]}">'


def draw(shown: Picture, previews: Sequence[samples.Preview] = ()) -> bytes:
    """Header, a grid of charts, and below them the samples."""
    from matplotlib.figure import Figure

    facts, names = (
        [f"{fact.label} {fact.value}" for fact in shown.facts if fact.label],
        list(filter(None, (shown.title, shown.state))),
    )
    lines = [" · ".join(part.replace(" ", "\xa0") for part in parts) for parts in (names, facts)]
    head = [line.strip(" ·") for part in lines for line in textwrap.wrap(part, WORDS)]
    across, high = (1, LINE) if samples.lines([each.image for each in previews]) else (SAMPLES, IMAGE)
    shapes = [each.image.shape for each in previews]
    high = min(high, max((shape[0] * WIDE / across / shape[1] for shape in shapes), default=0))
    texts = [samples.block(each, int(WIDE / across / LETTER / SMALL) - 4) for each in previews]
    text = ROW * (max(map(len, texts), default=0) + 1)
    columns = max(1, min(CHARTS, len(shown.charts)))
    rows, below = math.ceil(len(shown.charts) / columns), math.ceil(len(previews) / across)
    legend = ROW * max((math.ceil(chart.named / 2) for chart in shown.charts), default=0)
    above = TITLE + legend + 3
    top = HEAD * len(head) + ROW * shown.rows + 12
    bottom = below * (high + text)
    tall = top + rows * (above + PLOT + AXIS) + bottom
    figure = Figure(figsize=(WIDE / 72, tall / 72), dpi=DPI, facecolor="none")
    draw_header(figure, head, tall)
    sides = {"left": LEFT / WIDE, "right": 1 - RIGHT / WIDE}
    if rows:
        ends = {"top": 1 - (top + above) / tall, "bottom": (bottom + AXIS) / tall, "hspace": (above + AXIS) / PLOT}
        width = (WIDE - LEFT - RIGHT - BETWEEN * (columns - 1)) / columns
        grid = figure.add_gridspec(rows, columns, wspace=BETWEEN / width, **sides, **ends)
        for i, chart in enumerate(shown.charts):
            over = legend + ROW * shown.rows * (i < columns)
            draw_chart(figure.add_subplot(grid[divmod(i, columns)]), chart, shown, i == 0, over)
    if previews:
        grid = figure.add_gridspec(below, across, top=bottom / tall, bottom=text / tall, hspace=text / high, **sides)
        for i, preview in enumerate(previews):
            draw_sample(figure.add_subplot(grid[divmod(i, across)]), preview, texts[i])
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a character without a font is a box: expected
        figure.savefig(stream, format="png", dpi=DPI)
    return stream.getvalue()


def draw_header(figure: Figure, head: Sequence[str], tall: float) -> None:
    from nbtools.figures import look

    for i, words in enumerate(head):
        figure.text(LEFT / WIDE, 1 - (22 + HEAD * i) / tall, words, color=GREY, **look(13))


def draw_chart(axes: Axes, chart: Chart, shown: Picture, first: bool, over: float) -> None:
    """The first chart has the names of marks above it. over: from the plot to the title, the same in a whole row."""
    small: dict[str, Any] = {"size": SMALL, "color": GREY, "parse_math": False}
    handles = [draw_line(axes, line) for line in chart.lines]
    for mark in shown.marks:
        axes.axvline(mark.x, 0.95 if mark.row is None else 0, color=GREY, linewidth=1, linestyle=(0, (3, 3)))
        if first and mark.name:
            offset, side = (3 * mark.side, ROW * (mark.row or 0) + 3), "left" if mark.side > 0 else "right"
            place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": side}
            share = 1 - shown.share_of(mark.x) if mark.side > 0 else shown.share_of(mark.x)
            room = int(share * axes.get_position().width * WIDE / SMALL / WIDTH)
            name = mark.name if len(mark.name) <= room else f"{mark.name[: room - 1]}…"
            axes.annotate(name, (mark.x, 1), offset, **place, **small)
    if entries := [handle for handle, line in zip(handles, chart.lines, strict=True) if line.name]:
        place = {"loc": "upper left", "bbox_to_anchor": (-0.03, 1 + (over + 7) / PLOT), "borderaxespad": 0.2}
        look = {
            "ncols": 2,
            "frameon": False,
            "fontsize": SMALL,
            "labelcolor": GREY,
            "handlelength": 1.3,
            "labelspacing": 0.25,
        }
        axes.legend(handles=entries, columnspacing=1, **place, **look)
    title = f"{chart.title}  {chart.about}".strip()
    axes.set_title(title, loc="left", pad=over + 11, size=13, color=GREY, weight="bold", parse_math=False)
    axes.set_yscale("log" if chart.scale.log else "linear")
    axes.set(xlim=(0, shown.last), ylim=(chart.scale.low, chart.scale.high), facecolor="none")
    axes.set_xticks(*shown.ticks())
    axes.set_yticks(*chart.scale.ticks())
    axes.set_yticks([], minor=True)
    place = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right", "va": "top"}
    axes.annotate(shown.x, (0, 0), (-8, -6), **place, **small)
    axes.grid(axis="y", color=GREY, alpha=0.25, linewidth=1)
    axes.tick_params(length=0, labelsize=SMALL, colors=GREY, pad=6)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)


def draw_line(axes: Axes, line: Line) -> Any:
    """Draw a line; the handle for a legend."""
    from matplotlib.lines import Line2D

    faint = line.look == "faint"
    width = 1.0 if faint else 1.8
    look = {"color": line.colour, "linewidth": width, "alpha": 0.5 if faint else 1.0}
    axes.plot(line.x, line.y, marker="o" if line.dotted else "", markersize=5, clip_on=not line.dotted, **look)
    marker = "o" if line.look == "points" else ""
    return Line2D([], [], marker=marker, markersize=5, label=f"{line.name} {line.value}".strip(), **look)


def draw_sample(axes: Axes, preview: samples.Preview, text: Sequence[str]) -> None:
    from nbtools.figures import look

    colour = GREEN if preview.right else VERMILLION if preview.truth else GREY
    place = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.imshow(preview.image, cmap="gray", vmin=0, vmax=255)
    axes.set(xticks=[], yticks=[], anchor="NW", facecolor="none")
    axes.spines[:].set_visible(False)
    axes.annotate(
        "\n".join(text), (0, 0), (0, -4), va="top", color=colour, linespacing=1.3, **place, **look(SMALL, mono=True)
    )
