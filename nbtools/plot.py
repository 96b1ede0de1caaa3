"""Draws a History, and is the only module that draws one: SVG while a run lasts, matplotlib for the picture that stays.

SVG in a core HTML widget takes about 1 ms a frame where a matplotlib figure takes 50 or more, but it does not survive
saving; so the last frame is a PNG in the cell's output, which GitHub and every reader of notebooks shows.
"""

from __future__ import annotations

import io
import math
import os
import sys
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nbtools import axis, disk
from nbtools.chart import About, Chart, Line, Picture, picture
from nbtools.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# px in the viewBox of one chart; it scales with the cell
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 226, 44, 12, 46, 34
GREY = "#7d7d7d"  # of the PNG: contrast 4.1 on white and 4.6 on the black of JupyterLab's dark theme
PERIOD = 0.25  # seconds between frames: quicker ones hang a Colab tab (lightning#2517)
COST = 0.01  # share of the time that drawing may take


def svg(history: History, about: About | None = None, status: str = "") -> str:
    """One live frame as HTML: facts, a bar of progress and a responsive grid of SVG charts. All text is escaped.

    Text takes the colour of its surroundings (currentColor), which is right in every theme of every front end.
    """
    shown = picture(history, about)
    charts = "".join(svg_chart(chart, shown, named=i == 0) for i, chart in enumerate(shown.charts))
    grid = "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr));gap:10px 18px"
    return (
        '<div style="max-width:1040px;padding:4px 2px;line-height:1.4;'
        'font-family:var(--jp-ui-font-family,system-ui,sans-serif);font-size:13px">'
        f'{header(shown, status)}<div style="{grid}">{charts}</div></div>'
    )


def header(shown: Picture, status: str) -> str:
    """Title, facts and status in a row that wraps, above the bar of progress."""
    title = f'<b style="font-size:15px">{escape(shown.title)}</b>' if shown.title else ""
    facts = "".join(
        f'<span style="white-space:nowrap"><span style="opacity:.65">{escape(label)}</span> '
        f"<b>{escape(value)}</b></span>"
        for label, value in shown.facts or (("", "waiting for the first step"),)
    )
    said = f"<span>{escape(status)}</span>" if status else ""
    row = f'<div style="display:flex;flex-wrap:wrap;gap:2px 18px;align-items:baseline">{title}{facts}{said}</div>'
    done = f"{100 * (shown.share or 0):.1f}%"
    return row + (
        '<div style="height:3px;margin:6px 0 10px;border-radius:2px;background:rgba(128,128,128,.25)">'
        f'<div style="height:3px;border-radius:2px;width:{done};background:#0072B2"></div></div>'
    )


def svg_chart(chart: Chart, shown: Picture, named: bool) -> str:
    """One chart; `named` writes what changed beside the marks."""
    down = vertical(chart)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" fill="currentColor" font-size="12" '
        'style="width:100%;max-width:520px;height:auto;display:block;overflow:visible">',
        f'<text x="{LEFT}" y="14" font-weight="600" font-size="13">{escape(chart.title)}</text>',
        legend(chart),
        '<g stroke="currentColor" stroke-opacity=".13">',
    ]
    places, labels = y_axis(chart)
    heights = down(np.array(places)).tolist()
    parts += [f'<path d="M{LEFT} {y:.1f}H{right}"/>' for y in heights]
    parts.append(f'</g><path d="M{LEFT} {bottom}H{right}" stroke="currentColor" stroke-opacity=".5"/>')
    parts.append('<g opacity=".7" font-size="11">')
    parts += [
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        for y, label in zip(heights, labels, strict=True)
    ]
    places, labels = x_axis(shown)
    parts += [
        f'<text x="{across(place, shown):.1f}" y="{bottom + 15}" text-anchor="middle">{label}</text>'
        for place, label in zip(places, labels, strict=True)
    ]
    parts.append(f'<text x="{right}" y="{bottom + 29}" text-anchor="end">step</text></g>')
    parts += [svg_mark(i, shown, named) for i in range(len(shown.marks))]
    parts.append('<g transform="scale(.1)">')
    parts += [svg_line(line, shown, down) for line in chart.lines]
    if chart.note:
        parts.append(
            f'</g><g><text x="{(LEFT + right) / 2}" y="{(TOP + bottom) / 2}" text-anchor="middle" opacity=".6">'
        )
        parts.append(f"{escape(chart.note)}</text>")
    return "".join(parts) + "</g></svg>"


def legend(chart: Chart) -> str:
    """Names and last values in one flowing line: SVG cannot measure text, but it can let it flow."""
    entries = [
        f'<tspan dx="{0 if i == 0 else 12}" fill="{line.colour}">●</tspan>'
        f'<tspan dx="4" fill-opacity=".7">{escape(line.name)}</tspan>'
        f'<tspan dx="4" font-weight="600">{escape(line.value)}</tspan>'
        for i, line in enumerate(line for line in chart.lines if line.name)
    ]
    return f'<text x="{LEFT}" y="32">{"".join(entries)}</text>'


def svg_line(line: Line, shown: Picture, down: Callable[[np.ndarray], np.ndarray]) -> str:
    """A polyline in whole tenths of a pixel: a list of int becomes text ten times as fast as formatted floats."""
    points = np.empty((len(line.steps), 2), np.int64)
    points[:, 0] = 10 * across(line.steps, shown)
    points[:, 1] = 10 * down(line.values)
    stroke, opacity = (10, 0.5) if line.look == "faint" else (18, 1)
    drawn = (
        f'<polyline points="{str(points.ravel().tolist())[1:-1]}" fill="none" stroke="{line.colour}" '
        f'stroke-width="{stroke}" stroke-opacity="{opacity}" stroke-linejoin="round"/>'
    )
    if line.dotted:
        drawn += "".join([f'<circle cx="{x}" cy="{y}" r="26" fill="{line.colour}"/>' for x, y in points.tolist()])
    if line.ring is not None:
        x, y = points[line.ring].tolist()
        drawn += f'<circle cx="{x}" cy="{y}" r="55" fill="none" stroke="{line.colour}" stroke-width="15"/>'
    return drawn


def svg_mark(i: int, shown: Picture, named: bool) -> str:
    """A dashed line where a knob was turned, and what was turned."""
    step, what = shown.marks[i]
    x = across(step, shown)
    text = ""
    if named:
        side, row = mark_place(i, shown)
        text = (
            f'<text x="{x + 4 * side:.1f}" y="{TOP + 8 + 13 * row}" font-size="10" '
            f'text-anchor="{"start" if side > 0 else "end"}">{escape(shortened(what))}</text>'
        )
    return (
        f'<g opacity=".75"><title>{escape(what)}</title><path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" '
        f'stroke="currentColor" stroke-dasharray="3 3" stroke-opacity=".8"/>{text}</g>'
    )


def mark_place(i: int, shown: Picture) -> tuple[int, int]:
    """(side: 1 right, -1 left; row) of a mark's text: away from the next mark and from the chart's end."""
    steps = [step for step, _ in shown.marks]
    room = ([*steps, shown.last][i + 1] - steps[i]) / shown.last
    return (1 if room > 0.4 or steps[i] < 0.4 * shown.last else -1), i % 3


def shortened(text: str, most: int = 34) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def across(steps: Any, shown: Picture) -> Any:
    return LEFT + steps * ((WIDTH - LEFT - RIGHT) / shown.last)


def vertical(chart: Chart) -> Callable[[np.ndarray], np.ndarray]:
    """The function from values to y; values beyond the axis stay at its edge."""
    bottom, height = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP
    if chart.log:
        low, scale = math.log(chart.low), height / math.log(chart.high / chart.low)
        return lambda values: np.clip(bottom - scale * (np.log(values) - low), TOP, bottom)
    scale = height / (chart.high - chart.low)
    return lambda values: np.clip(bottom - scale * (values - chart.low), TOP, bottom)


def y_axis(chart: Chart) -> tuple[list[float], list[str]]:
    places = axis.log_ticks(chart.low, chart.high) if chart.log else axis.ticks(chart.low, chart.high, 5)
    return places, axis.tick_labels(places, chart.log)


def x_axis(shown: Picture) -> tuple[list[float], list[str]]:
    places = [place for place in axis.ticks(0, shown.last, 6) if place == int(place)]
    return places, axis.tick_labels(places)


def figure(history: History, about: About | None = None) -> Figure:
    """The same picture as a matplotlib figure, transparent, with greys that read on white and on black."""
    from matplotlib.figure import Figure

    shown = picture(history, about)
    rows = max(1, math.ceil(len(shown.charts) / 2))
    tall = 0.75 + 2.7 * rows  # inches
    drawn = Figure(figsize=(10, tall), facecolor="none")
    said = "   ".join(f"{label} {value}" for label, value in shown.facts) or "no steps yet"
    top = 1 - 0.22 / tall
    if shown.title:
        drawn.text(0.055, top, shown.title, color=GREY, size=13, weight="bold", va="center", parse_math=False)
        top -= 0.26 / tall
    drawn.text(0.055, top, said, color=GREY, size=9, va="center", parse_math=False)
    for i, chart in enumerate(shown.charts):
        left, bottom = (0.055, 0.555)[i % 2], (tall - 0.75 - 2.7 * (i // 2 + 1) + 0.45) / tall
        axes = drawn.add_axes((left, bottom, 0.42, 1.75 / tall))
        draw_chart(axes, chart, shown, named=i == 0)
    return drawn


def draw_chart(axes: Axes, chart: Chart, shown: Picture, named: bool) -> None:
    for line in chart.lines:
        draw_line(axes, line)
    for i, (step, what) in enumerate(shown.marks):
        axes.axvline(step, color=GREY, linewidth=0.9, linestyle=(0, (3, 3)))
        if named:
            side, row = mark_place(i, shown)
            place = {"xy": (step, 1), "xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
            look = {"ha": "left" if side > 0 else "right", "size": 7, "color": GREY, "parse_math": False}
            axes.annotate(shortened(what), xytext=(3 * side, -8 - 10 * row), **place, **look)
    if chart.note:
        axes.text(0.5, 0.5, chart.note, transform=axes.transAxes, ha="center", color=GREY, size=9, parse_math=False)
    axes.set_yscale("log" if chart.log else "linear")
    axes.set_ylim(chart.low, chart.high)
    axes.set_xlim(0, shown.last)
    axes.set_yticks(*y_axis(chart), minor=False)
    axes.set_yticks([], minor=True)
    axes.set_xticks(*x_axis(shown))
    axes.set_xlabel("step", color=GREY, size=8, loc="right", labelpad=1)
    axes.set_title(chart.title, color=GREY, size=10, weight="bold", loc="left", pad=20)
    axes.set_facecolor("none")
    axes.grid(axis="y", color=GREY, alpha=0.22, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=8, colors=GREY)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    if any(line.name for line in chart.lines):
        axes.legend(
            loc="lower left", bbox_to_anchor=(-0.01, 0.985), ncols=4, frameon=False, fontsize=8, labelcolor=GREY,
            handlelength=1.0, handletextpad=0.5, columnspacing=1.4, borderaxespad=0.2, borderpad=0.1,
        )  # fmt: skip


def draw_line(axes: Axes, line: Line) -> None:
    faint = line.look == "faint"
    axes.plot(
        line.steps,
        line.values,
        color=line.colour,
        alpha=0.5 if faint else 1,
        linewidth=0.8 if faint else 1.6,
        marker="o" if line.dotted else None,
        markersize=3.2,
        label=f"{line.name} {line.value}" if line.name else "_faint",
        clip_on=not line.dotted,
    )
    if line.ring is not None:
        at = ([line.steps[line.ring]], [line.values[line.ring]])
        axes.plot(*at, "o", markersize=8, fillstyle="none", color=line.colour, label="_ring", clip_on=False)


def png(drawn: Figure) -> bytes:
    stream = io.BytesIO()
    drawn.savefig(stream, format="png", dpi=144)
    return stream.getvalue()


class LivePlot:
    """The picture of a run in a notebook's output while it lasts; in a terminal it only writes the last one.

    It draws at most 4 times a second, and more rarely where that would take above 1 % of the time.
    """

    def __init__(self, title: str = "", epochs: int | None = None, epoch_samples: int | None = None, best: str = ""):
        self.about = About(title, epochs, epoch_samples, best)
        self.widget = html_widget() if in_notebook() else None
        self.shown = False
        self.due = 0.0

    def update(self, history: History, status: str = "") -> None:
        """Draw when it is time to, the first time into the output of the running cell. Call it as often as you like:
        when it is not time, it costs a look at the clock."""
        if self.widget is None:
            return
        start = time.monotonic()
        if start < self.due:
            return
        if not self.shown:  # still empty: a saved notebook keeps the widget's text, which would be the whole drawing
            display(self.widget)
            self.shown = True
        self.widget.value = svg(history, self.about, status)
        end = time.monotonic()
        self.due = end + max(PERIOD, (end - start) / COST)

    def finish(self, history: History, path: str | os.PathLike[str] | None = None) -> None:
        """Write the last frame to `path` as PNG, and show it in place of the live one. Raises OSError."""
        image = png(figure(history, self.about))
        if path is not None:
            disk.write_atomic(Path(path), image)
        if self.widget is not None:
            from IPython.display import Image

            self.widget.value = ""  # or an executed notebook keeps the live frame beside the picture
            self.widget.close()
            self.widget = None
            display(Image(image, retina=True))


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this: a terminal's IPython has no kernel."""
    core = sys.modules.get("IPython")
    shell = core.get_ipython() if core is not None else None
    return getattr(shell, "kernel", None) is not None


def display(shown: Any) -> None:
    from IPython.display import display

    display(shown)


def html_widget() -> Any:
    """A core HTML widget, or None where ipywidgets does not import: a run goes on without its picture."""
    try:
        from ipywidgets import HTML, Layout
    except ImportError:
        return None
    return HTML(layout=Layout(width="100%"))
