"""Draws a Picture as HTML: SVG for the curves and text next to it, so that only the curves stretch with the window.

Text takes the colour of its surroundings (currentColor), which is right in every theme of every front end.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import numpy as np

from nbtools.live.chart import NAMED, Chart, Line, Mark, Picture

WIDTH, HEIGHT = 2000, 10_000  # units of a plot: whole numbers become text ten times as fast as formatted floats
NARROW, GAP = 700, 22  # px: width of a page with one large chart in a row; between two
TALL, SMALL, NAME, HEAD = 240, 84, 13, 36  # px: heights of a plot, a small one, a mark's name, a title with its legend
BESIDE = 3  # lines that a legend names next to each other

STYLE = f"""
.nbt{{font:13px/1.4 var(--jp-ui-font-family,system-ui,-apple-system,"Segoe UI",sans-serif);
 font-variant-numeric:tabular-nums;max-width:1500px;padding:4px 2px}}
.nbt b{{font-weight:600}}
.nbt summary{{display:list-item}}
.jp-RenderedHTMLCommon>.nbtools-kept{{margin-right:-20px}}
.nbt *{{box-sizing:content-box}}
.nbt-charts{{container-type:inline-size}}
.nbt-grid{{display:grid;gap:0 {GAP}px;grid-template-columns:repeat(12,minmax(0,1fr))}}
.nbt-grid>div{{display:grid;grid-column:span 6;grid-row:span 2;grid-template:subgrid/minmax(0,1fr);
 margin-bottom:10px}}
.nbt-grid>.nbt-small{{grid-column:span 3}}
.nbt-small>.nbt-plot{{height:{SMALL}px}}
@container (max-width:{NARROW}px){{.nbt-grid>div{{grid-column:span 12}}.nbt-grid>.nbt-small{{grid-column:span 6}}}}
.nbt-head{{font-size:12px;white-space:nowrap;height:{HEAD}px;line-height:{HEAD // 2}px}}
.nbt-head>b{{display:block;font-size:13px;overflow:hidden;text-overflow:ellipsis}}
.nbt-head>b span{{font-weight:400;opacity:.65;font-size:12px}}
.nbt-key{{display:flex;gap:0 8px;font-size:11px}}
.nbt-many{{display:grid;grid-template-columns:repeat({BESIDE},minmax(0,max-content))}}
.nbt-key span{{display:flex;align-items:center;min-width:0}}
.nbt-key i{{font-style:normal;opacity:.75;margin:0 4px;overflow:hidden;text-overflow:ellipsis}}
.nbt .nbt-key svg{{width:14px;height:8px;flex:none;overflow:visible}}
.nbt-plot{{position:relative;align-self:end;height:{TALL}px;margin:0 14px 22px 46px}}
.nbt .nbt-plot>svg{{position:absolute;left:0;top:0;width:100%;height:100%;overflow:visible}}
.nbt svg *{{vector-effect:non-scaling-stroke;fill:none;stroke-linejoin:round}}
.nbt-plot>span{{position:absolute;font-size:11px;line-height:14px;white-space:nowrap;opacity:.72}}
.nbt-y{{right:100%;margin:-7px 8px 0 0}}
.nbt-x{{top:100%;margin-top:5px;transform:translateX(-50%)}}
.nbt-plot>.nbt-name{{opacity:.9;padding:0 4px;box-sizing:border-box;overflow:hidden;text-overflow:ellipsis}}
.nbt-at{{position:absolute;top:0;bottom:0;border-left:1px solid;pointer-events:none;z-index:1}}
.nbt-at>div{{position:absolute;top:2px;left:5px;padding:2px 7px;border-radius:4px;font-size:11px;line-height:16px;
 white-space:nowrap;background:rgba(128,128,128,.16);backdrop-filter:blur(5px)}}
.nbt-left>div{{left:auto;right:6px}}
.nbt-at i{{display:inline-block;width:7px;height:7px;border-radius:4px;margin-right:5px}}
"""
SMALLER = ' class="nbt-small"'
SCRIPT = Path(__file__).with_name("pointer.js").read_text("utf-8")


def head(*styles: str) -> str:
    """The <style> that a page needs once. It brings the script too, since the markup of a widget cannot run a
    <script>."""
    return f'<style onload="{escape(SCRIPT)}">{STYLE}{"".join(styles)}</style>'


def frame(shown: Picture) -> str:
    """One live frame: the charts, large ones two in a row, small ones four; what pointer.js reads are their data-. All
    text is escaped. A page needs `head` once."""
    below = x_axis(shown)
    charts = "".join([panel(chart, shown, below, i == 0) for i, chart in enumerate(shown.charts)])
    axis = f'data-x="{escape(shown.x)}" data-first="{shown.first:.6g}" data-last="{shown.last:.6g}"'
    return f'<div class="nbt nbt-charts"><div class="nbt-grid" {axis}>{charts}</div></div>'


def panel(chart: Chart, shown: Picture, below: str, first: bool) -> str:
    """One chart under its title and legend; the first has the names of marks above it. below: the x axis."""
    above = 5 + NAME * NAMED * first  # also before there are any: nothing below moves when one comes
    above += max(chart.named - 1, 0) // BESIDE * HEAD // 2  # further lines of its legend, next to the names of marks
    places, labels = chart.scale.ticks()
    heights = chart.scale.heights(np.array(places)).tolist()
    levels = "".join([f"M0 {HEIGHT - HEIGHT * height:.0f}h{WIDTH}" for height in heights])
    texts = [
        f'<span class="nbt-y" style="top:{100 - 100 * height:.1f}%">{label}</span>'
        for height, label in zip(heights, labels, strict=True)
    ]
    texts += [name(mark, shown) for mark in shown.marks if first and mark.name]
    curves = "".join([curve(line, chart, shown) for line in chart.lines])
    if shown.zoomed:
        curves = f'<svg width="{WIDTH}" height="{HEIGHT}">{curves}</svg>'  # drawn as far as it goes
    log = ' data-log=""' if chart.scale.log else ""
    reach = f'data-low="{chart.scale.low:.6g}" data-high="{chart.scale.high:.6g}"{log}'
    return (
        f'<div{SMALLER * chart.small}>{heading(chart)}<div class="nbt-plot" style="margin-top:{above}px" {reach}>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(chart.alt)}">'
        f'<path d="{levels}" stroke="currentColor" stroke-opacity=".14"/>'
        f'<path d="M0 {HEIGHT}h{WIDTH}" stroke="currentColor" stroke-opacity=".5"/>'
        f"{''.join([stroke(mark, shown, first) for mark in shown.marks])}"
        f"{curves}</svg>{below}{''.join(texts)}</div></div>"
    )


def heading(chart: Chart) -> str:
    """Title and legend."""
    title, about = escape(chart.title), f" <span>{escape(chart.about)}</span>" if chart.about else ""
    key = [entry(line) for line in chart.lines if line.name]
    many = " nbt-many" * (len(key) > BESIDE)
    return f'<div class="nbt-head"><b>{title}{about}</b><div class="nbt-key{many}">{"".join(key)}</div></div>'


def entry(line: Line) -> str:
    """A piece of the line as it is drawn, its name and its last value."""
    path = f'<path d="M0 4h16" stroke="{line.colour}" stroke-width="2"/>'
    if line.look == "points":
        path += f'<path d="M8 4h.1" stroke="{line.colour}" stroke-width="6" stroke-linecap="round"/>'
    text = f"<i>{escape(line.name)}</i><b>{escape(line.value)}</b>"
    return f'<span title="{escape(line.name)}"><svg viewBox="0 0 16 8">{path}</svg>{text}</span>'


def curve(line: Line, chart: Chart, shown: Picture) -> str:
    """A polyline without the points in the middle of level stretches, and a round dot a point where they are few."""
    points = np.empty((len(line.x), 2), np.int64)
    points[:, 0] = (line.x - shown.first) * (WIDTH / (shown.last - shown.first))
    points[:, 1] = HEIGHT - HEIGHT * chart.scale.heights(line.y)
    drawn = ""
    if line.dotted:
        dots = "".join([f"M{x} {y}h1" for x, y in points.tolist()])
        drawn = f'<path d="{dots}" stroke="{line.colour}" stroke-width="6" stroke-linecap="round"/>'
    if len(points) > 2:
        turns = points[1:, 1] != points[:-1, 1]
        points = points[np.concatenate(([True], turns[1:] | turns[:-1], [True]))]
    look = 'stroke-width="1" stroke-opacity=".5"' if line.look == "faint" else 'stroke-width="1.8"'
    name = f' data-name="{escape(line.name)}"' if line.name else ""
    return f'<polyline points="{str(points.ravel().tolist())[1:-1]}" stroke="{line.colour}" {look}{name}/>{drawn}'


def stroke(mark: Mark, shown: Picture, first: bool) -> str:
    """A dashed line where a setting was changed, up to its name; a tick where that was long ago."""
    x, row = WIDTH * shown.share_of(mark.x), -1 if mark.row is None else mark.row
    top = NAME * (row + 1) * HEIGHT // TALL if first else 0
    foot = HEIGHT // 20 if mark.row is None else HEIGHT
    return (
        f'<path d="M{x:.0f} {foot}V-{top}" stroke="currentColor" stroke-opacity=".6" '
        f'stroke-dasharray="3 3"><title>{escape(mark.what)}</title></path>'
    )


def name(mark: Mark, shown: Picture) -> str:
    """As much of a mark's name as fits between it and the chart's edge, however wide the chart is."""
    at = shown.share_of(mark.x)
    side, share = ("left", at) if mark.side > 0 else ("right", 1 - at)
    place = f"{side}:{100 * share:.1f}%;max-width:{100 - 100 * share:.1f}%;top:-{NAME * ((mark.row or 0) + 1)}px"
    return f'<span class="nbt-name" style="{place}">{escape(mark.name)}</span>'


def x_axis(shown: Picture) -> str:
    """The labels of the x axis, its name before them; one at its start begins there, one at its end ends there."""
    ticks = []
    for place, label in zip(*shown.ticks(), strict=True):
        share = shown.share_of(place)
        at = f"left:{100 * share:.1f}%" if share < 0.95 else f"right:{100 - 100 * share:.1f}%"
        edge = ";transform:none" * (share < 0.02 or share >= 0.95)
        ticks.append(f'<span class="nbt-x" style="{at}{edge}">{label}</span>')
    return f'<span class="nbt-y" style="top:100%;margin-top:5px">{escape(shown.x)}</span>{"".join(ticks)}'
