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
from typing import TYPE_CHECKING, Any

from nbtools.live import samples
from nbtools.live.plot import GREEN, VERMILLION, Chart, Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 144  # two pixels a px, and 72 px an inch: a point of matplotlib is a px here
GREY = "#7d7d7d"  # contrast 4.1 on white and 4.6 on the black of JupyterLab's dark theme
WIDE, PLOT, ROW, LETTER = 760, 225, 16, 7.3  # px: width, of a cell in a window of 900; a row of charts; text; a letter
SAMPLES, IMAGE, LINE = 4, 100, 48  # samples in a row; px: height of one, of a long line of text, which has its own row


@dataclass(frozen=True)
class Still:
    """A PNG as a notebook shows it, two pixels a px; alt: what it shows in words, its text and alternative text."""

    image: bytes
    alt: str

    @property
    def pixels(self) -> tuple[int, int]:
        """Return its width and height."""
        width, height = (int.from_bytes(self.image[i : i + 4]) for i in (16, 20))  # of its first chunk
        return width, height

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        width, height = (pixels // 2 for pixels in self.pixels)
        data = {"image/png": base64.b64encode(self.image).decode(), "text/plain": self.alt}
        return data, {"image/png": {"width": width, "height": height, "alt": self.alt}}


def draw(shown: Picture, facts: Sequence[str] = (), previews: Sequence[samples.Preview] = ()) -> bytes:
    """Return the facts, a grid of charts, and below them the samples."""
    from matplotlib.figure import Figure

    from nbtools.figures import look

    head = textwrap.wrap(" · ".join(fact.replace(" ", "\xa0") for fact in facts), 100)
    rows, across = math.ceil(len(shown.charts) / 2), 1 if samples.long([each.image for each in previews]) else SAMPLES
    texts = [samples.text(each, int(WIDE / across / LETTER) - 4) for each in previews]
    high = (LINE if across == 1 else IMAGE) + ROW * (max(map(len, texts), default=0) + 1)
    heights = [ROW * len(head) + 8, rows * PLOT, math.ceil(len(previews) / across) * high]
    figure = Figure(figsize=(WIDE / 72, sum(heights) / 72), dpi=DPI, facecolor="none", layout="constrained")
    parts: Any = figure.subfigures(3, 1, height_ratios=[max(height, 1) for height in heights])
    top, middle, bottom = parts
    top.text(0.01, 0.98, "\n".join(head), color=GREY, va="top", **look(13))
    for part in parts:
        part.set_facecolor("none")
    for i, chart in enumerate(shown.charts):
        draw_chart(middle.add_subplot(rows, 2, i + 1), chart, shown)
    for i, (preview, text) in enumerate(zip(previews, texts, strict=True)):
        axes = bottom.add_subplot(math.ceil(len(previews) / across), across, i + 1, xticks=[], yticks=[])
        axes.imshow(preview.image, cmap="gray", vmin=0, vmax=255)
        axes.set(anchor="NW", facecolor="none")
        axes.spines[:].set_visible(False)
        colour = GREEN if preview.right else VERMILLION if preview.truth else GREY
        axes.set_xlabel("\n".join(text), loc="left", color=colour, linespacing=1.3, **look(12, mono=True))
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing|constrained_layout not applied")  # a box; little room
        figure.savefig(stream, format="png", dpi=DPI)
    return stream.getvalue()


def draw_chart(axes: Axes, chart: Chart, shown: Picture) -> None:
    for line in chart.lines:
        label = "_" if line.faint else f"{line.name} {line.value}".strip().replace("$", r"\$")
        look: dict[str, Any] = {"linewidth": 1.0, "alpha": 0.5} if line.faint else {"linewidth": 1.8}
        marker = {"marker": "o" if line.dotted else "", "markersize": 5, "clip_on": not line.dotted}
        axes.plot(line.x, line.y, color=line.colour, label=label, **look, **marker)
    for x, _ in shown.marks:
        axes.axvline(x, color=GREY, linewidth=1, linestyle=(0, (3, 3)))
    if chart.legend:
        axes.legend(frameon=False, fontsize=12, labelcolor=GREY, handlelength=1.3, labelspacing=0.25)
    title = f"{chart.title}  {chart.about}".strip()
    axes.set_title(title, loc="left", pad=10, size=13, color=GREY, weight="bold", parse_math=False)
    axes.set(yscale="log" if chart.scale.log else "linear", facecolor="none")
    axes.set(xlim=(shown.axis.low, shown.axis.high), ylim=(chart.scale.low, chart.scale.high))
    axes.set_xticks(*shown.axis.ticks())
    axes.set_yticks(*chart.scale.ticks())
    axes.set_yticks([], minor=True)
    axes.set_xlabel(shown.x, loc="right", size=12, color=GREY)
    axes.grid(axis="y", color=GREY, alpha=0.25, linewidth=1)
    axes.tick_params(length=0, labelsize=12, colors=GREY, pad=6)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
