"""Draws a Picture: as HTML for a page, SVG for the curves and text next to it, so that only the curves stretch with the
window; and as a PNG for what stays, transparent, in greys that are readable on white and on black."""

import base64
import io
import math
import textwrap
import warnings
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from nbtools.live import samples
from nbtools.live.plot import Chart, Line, Picture

WIDTH, HEIGHT = 2000, 10_000  # units of an SVG plot: whole numbers become text ten times as fast as formatted floats
DPI = 144  # two pixels a px, and 72 px an inch: a point of matplotlib is a px here
GREY, RIGHT, WRONG = "#767676", "#008460", "#c65300"  # of text: contrast 4.5 on white, 4 on JupyterLab's black
WIDE, PLOT, LOW, ROW, LETTER = 760, 225, 130, 16, 7.3  # px: a cell at 900; charts, lr alone; a line of text; a letter
SAMPLES, IMAGE, LINE = 4, 100, 48  # samples in a row; px: height of one, of a long line of text, which has its own row
STYLE, SCRIPT = (Path(__file__).with_name(name).read_text("utf-8") for name in ("live.css", "charts.js"))
HEAD = f'<style onload="{escape(SCRIPT)}">{STYLE}</style>'
"""What a page needs once. The style brings the script, since the markup of a widget cannot run a <script>."""


def page(shown: Picture, head: str = HEAD) -> str:
    """Return charts for a page, which needs HEAD once; charts.js reads their data-. All text is escaped."""
    charts = "".join([panel(chart, shown) for chart in shown.charts])
    axis = f'data-x="{escape(shown.x)}" data-first="{shown.axis.low:.6g}" data-last="{shown.axis.high:.6g}"'
    return f'{head}<div class="nbt nbt-charts"><div class="nbt-grid" {axis}>{charts}</div></div>'


def panel(chart: Chart, shown: Picture) -> str:
    """Return one chart under its title and legend: levels, changes and curves as SVG, labels of the axes next to it."""
    levels, texts, scale = "", f'<span class="nbt-unit">{escape(shown.x)}</span>', chart.scale
    for value, label in zip(*scale.ticks(), strict=True):
        height = 1 - float(scale.places(value))
        levels += f"M0 {HEIGHT * height:.0f}h{WIDTH}"
        texts += f'<span class="nbt-y" style="top:{100 * height:.1f}%">{label}</span>'
    for value, label in zip(*shown.axis.ticks(), strict=True):
        share = float(shown.axis.places(value))
        at = f"left:{100 * share:.1f}%" if share < 0.95 else f"right:{100 - 100 * share:.1f}%;transform:none"
        texts += f'<span class="nbt-x" style="{at}">{label}</span>'
    grey = 'stroke="currentColor" stroke-opacity'
    lines = f'<path d="{levels}" {grey}=".14"/><path d="M0 {HEIGHT}h{WIDTH}" {grey}=".5"/>'
    for x, what in shown.marks:
        place = f"M{WIDTH * float(shown.axis.places(x)):.0f} {HEIGHT}V0"
        lines += f'<path d="{place}" {grey}=".5" stroke-dasharray="3 3"><title>{escape(what)}</title></path>'
    lines += "".join([curve(line, chart, shown) for line in chart.lines])
    log, words = ' data-log=""' * scale.log, escape(describe(chart))
    return (
        f'<div class="{"nbt-small" * chart.small}">{heading(chart)}'
        f'<div class="nbt-plot" data-low="{scale.low:.6g}" data-high="{scale.high:.6g}"{log}>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{words}">'
        f"{lines}</svg>{texts}</div></div>"
    )


def heading(chart: Chart) -> str:
    """Return title and legend: a piece of each line as it is drawn, its name and its last value."""
    about, key = f" <span>{escape(chart.about)}</span>" if chart.about else "", []
    for line in chart.legend:
        path = f'<path d="M0 4h16" stroke="{line.colour}" stroke-width="2"/>{dots("M8 4h.1", line)}'
        name, value = escape(line.name), escape(line.value)
        text = f'<svg viewBox="0 0 16 8">{path}</svg><i>{name}</i><b>{value}</b>'
        key.append(f'<span title="{name}" data-name="{name}">{text}</span>')
    return f'<div class="nbt-head"><b>{escape(chart.title)}{about}</b><div class="nbt-key">{"".join(key)}</div></div>'


def curve(line: Line, chart: Chart, shown: Picture) -> str:
    """Return a polyline, with a round dot a point where they are few."""
    points = np.empty((len(line.x), 2), np.int64)
    points[:, 0] = shown.axis.places(line.x) * WIDTH
    points[:, 1] = HEIGHT - HEIGHT * chart.scale.places(line.y)
    look = 'stroke-width="1" stroke-opacity=".5" class="nbt-faint"' if line.faint else 'stroke-width="1.8"'
    path = f'<polyline points="{str(points.ravel().tolist())[1:-1]}" stroke="{line.colour}" {look}/>'
    marked = dots("".join([f"M{x} {y}h1" for x, y in points.tolist()]) if line.dotted else "", line)
    return f'<g data-name="{escape(line.name)}">{path}{marked}</g>'


def dots(path: str, line: Line) -> str:
    """Return round dots at the places of a path; none for a line of many points."""
    return f'<path d="{path}" stroke="{line.colour}" stroke-width="6" stroke-linecap="round"/>' * line.dotted


def describe(chart: Chart) -> str:
    """Return a chart in words: `loss: train 0.231, validation 0.305`."""
    values = ", ".join(f"{line.name} {line.value}".strip() for line in chart.legend)
    return f"{chart.title}: {values}" if values else chart.title


def png(shown: Picture, facts: Sequence[str] = (), previews: Sequence[samples.Preview] = ()) -> bytes:
    """Return the facts, a grid of charts, and below them the samples."""
    from matplotlib.figure import Figure

    from nbtools.figures import look

    head = textwrap.wrap(" · ".join(fact.replace(" ", "\xa0") for fact in facts), 100)
    alone = [*shown.charts][-1:] * (len(shown.charts) % 2)  # the last one, where its row has no other
    rows = [PLOT] * (len(shown.charts) // 2) + [LOW if chart.small else PLOT for chart in alone]
    across = 1 if samples.long([each.image for each in previews]) else SAMPLES
    texts = [samples.text(each, int(WIDE / across / LETTER) - 4) for each in previews]
    high = (LINE if across == 1 else IMAGE) + ROW * (max(map(len, texts), default=0) + 1)
    heights = [ROW * len(head) + 8, sum(rows), math.ceil(len(previews) / across) * high]
    figure = Figure(figsize=(WIDE / 72, sum(heights) / 72), dpi=DPI, facecolor="none", layout="constrained")
    figure.suptitle("\n".join(head), x=0.01, ha="left", color=GREY, **look(13))
    parts: Any = figure.subfigures(2, 1, height_ratios=[max(height, 1) for height in heights[1:]], facecolor="none")
    grid = parts[0].add_gridspec(max(len(rows), 1), 2, height_ratios=rows or None)
    for i, chart in enumerate(shown.charts):
        draw_chart(parts[0].add_subplot(grid[i // 2, :] if chart in alone else grid[i // 2, i % 2]), chart, shown)
    bare: Any = {"xticks": [], "yticks": [], "anchor": "NW", "frame_on": False}
    for i, (preview, text) in enumerate(zip(previews, texts, strict=True)):
        axes = parts[1].add_subplot(math.ceil(len(previews) / across), across, i + 1, **bare)
        axes.imshow(preview.image, cmap="gray", vmin=0, vmax=255)
        colour = RIGHT if preview.right else WRONG if preview.truth else GREY
        axes.set_xlabel("\n".join(text), loc="left", color=colour, linespacing=1.3, **look(12, mono=True))
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing|constrained_layout not applied")  # a box; little room
        figure.savefig(stream, format="png", dpi=DPI)
    return stream.getvalue()


def as_data(image: bytes, alt: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a PNG as a notebook shows it, two pixels a px: data and metadata by type. alt: what it shows in words."""
    width, height = (int.from_bytes(image[i : i + 4]) // 2 for i in (16, 20))  # of its first chunk
    data = {"image/png": base64.b64encode(image).decode(), "text/plain": alt}
    return data, {"image/png": {"width": width, "height": height, "alt": alt}}


def draw_chart(axes: Any, chart: Chart, shown: Picture) -> None:
    for line in chart.lines:
        label = "_" if line.faint else f"{line.name} {line.value}".strip().replace("$", r"\$")
        look: dict[str, Any] = {"linewidth": 1.0, "alpha": 0.5} if line.faint else {"linewidth": 1.8}
        marker = {"marker": "o" if line.dotted else "", "markersize": 5, "clip_on": not line.dotted}
        axes.plot(line.x, line.y, color=line.colour, label=label, **look, **marker)
    for x, _ in shown.marks:
        axes.axvline(x, color=GREY, linewidth=1, linestyle=(0, (3, 3)))
    if 0 < len(chart.legend) <= (1 if chart.small else 6):  # more would hide the curves
        axes.legend(frameon=False, fontsize=12, labelcolor=GREY, handlelength=1.3, labelspacing=0.25)
    title = f"{chart.title}  {chart.about}".strip()
    axes.set_title(title, loc="left", pad=10, size=13, color=GREY, weight="bold", parse_math=False)
    axes.set(yscale="log" if chart.scale.log else "linear", ylim=(chart.scale.low, chart.scale.high))
    axes.set(xlim=(shown.axis.low, shown.axis.high), facecolor="none")
    axes.set_xticks(*shown.axis.ticks())
    axes.set_yticks(*chart.scale.ticks())
    axes.set_yticks([], minor=True)
    axes.set_xlabel(shown.x, loc="right", size=12, color=GREY)
    axes.grid(axis="y", color=GREY, alpha=0.25, linewidth=1)
    axes.tick_params(length=0, labelsize=12, colors=GREY, pad=6)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
