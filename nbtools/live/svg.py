"""Draws a Picture as HTML: SVG for the curves and text next to it, so that only the curves stretch with the window."""

from __future__ import annotations

from html import escape
from pathlib import Path

import numpy as np

from nbtools.live.plot import Chart, Line, Picture

WIDTH, HEIGHT = 2000, 10_000  # units of a plot: whole numbers become text ten times as fast as formatted floats
STYLE, SCRIPT = (Path(__file__).with_name(name).read_text("utf-8") for name in ("live.css", "charts.js"))
HEAD = f'<style onload="{escape(SCRIPT)}">{STYLE}</style>'
"""What a page needs once. The style brings the script, since the markup of a widget cannot run a <script>."""


def page(shown: Picture) -> str:
    """Return a frame for a page of its own."""
    return HEAD + frame(shown)


def frame(shown: Picture) -> str:
    """Return one live frame; charts.js reads its data-. All text is escaped. A page needs HEAD once."""
    charts = "".join([panel(chart, shown) for chart in shown.charts])
    axis = f'data-x="{escape(shown.x)}" data-first="{shown.axis.low:.6g}" data-last="{shown.axis.high:.6g}"'
    return f'<div class="nbt nbt-charts"><div class="nbt-grid" {axis}>{charts}</div></div>'


def panel(chart: Chart, shown: Picture) -> str:
    """Return one chart under its title and legend."""
    values, labels = chart.scale.ticks()
    heights = (1 - chart.scale.places(np.array(values))).tolist()
    levels = "".join([f"M0 {HEIGHT * height:.0f}h{WIDTH}" for height in heights])
    texts = "".join(
        [
            f'<span class="nbt-y" style="top:{100 * height:.1f}%">{label}</span>'
            for height, label in zip(heights, labels, strict=True)
        ]
    )
    places = shown.axis.places(np.array([x for x, _ in shown.marks])).tolist()
    marks = "".join([mark(place, what) for place, (_, what) in zip(places, shown.marks, strict=True)])
    log = ' data-log=""' if chart.scale.log else ""
    return (
        f'<div class="{"nbt-small" * chart.small}">{heading(chart)}'
        f'<div class="nbt-plot" data-low="{chart.scale.low:.6g}" data-high="{chart.scale.high:.6g}"{log}>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(chart.alt)}">'
        f'<path d="{levels}" stroke="currentColor" stroke-opacity=".14"/>'
        f'<path d="M0 {HEIGHT}h{WIDTH}" stroke="currentColor" stroke-opacity=".5"/>{marks}'
        f"{''.join([curve(line, chart, shown) for line in chart.lines])}</svg>{x_axis(shown)}{texts}</div></div>"
    )


def heading(chart: Chart) -> str:
    """Return title and legend: a piece of each line as it is drawn, its name and its last value."""
    about, key = f" <span>{escape(chart.about)}</span>" if chart.about else "", []
    for line in chart.legend:
        path = f'<path d="M0 4h16" stroke="{line.colour}" stroke-width="2"/>{dots("M8 4h.1", line) * line.points}'
        name, value = escape(line.name), escape(line.value)
        text = f'<svg viewBox="0 0 16 8">{path}</svg><i>{name}</i><b>{value}</b>'
        key.append(f'<span title="{name}" data-name="{name}">{text}</span>')
    return f'<div class="nbt-head"><b>{escape(chart.title)}{about}</b><div class="nbt-key">{"".join(key)}</div></div>'


def curve(line: Line, chart: Chart, shown: Picture) -> str:
    """Return a polyline, with a round dot a point where they are few."""
    points = np.empty((len(line.x), 2), np.int64)
    points[:, 0] = shown.axis.places(line.x) * WIDTH
    points[:, 1] = HEIGHT - HEIGHT * chart.scale.places(line.y)
    marked = dots("".join([f"M{x} {y}h1" for x, y in points.tolist()]), line) if line.dotted else ""
    look = 'stroke-width="1" stroke-opacity=".5" class="nbt-faint"' if line.faint else 'stroke-width="1.8"'
    path = f'<polyline points="{str(points.ravel().tolist())[1:-1]}" stroke="{line.colour}" {look}/>'
    return f'<g data-name="{escape(line.name)}">{path}{marked}</g>'


def dots(path: str, line: Line) -> str:
    return f'<path d="{path}" stroke="{line.colour}" stroke-width="6" stroke-linecap="round"/>'


def mark(place: float, what: str) -> str:
    """Return a dashed line where a setting was changed, which says so on hover."""
    return (
        f'<path d="M{WIDTH * place:.0f} {HEIGHT}V0" stroke="currentColor" stroke-opacity=".5" '
        f'stroke-dasharray="3 3"><title>{escape(what)}</title></path>'
    )


def x_axis(shown: Picture) -> str:
    """Return the name of the x axis and its labels; one at its end ends there."""
    values, labels = shown.axis.ticks()
    spans = [f'<span class="nbt-unit">{escape(shown.x)}</span>']
    for share, label in zip(shown.axis.places(np.array(values)).tolist(), labels, strict=True):
        at = f"left:{100 * share:.1f}%" if share < 0.95 else f"right:{100 - 100 * share:.1f}%;transform:none"
        spans.append(f'<span class="nbt-x" style="{at}">{label}</span>')
    return "".join(spans)
