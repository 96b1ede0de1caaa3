"""Draws a Picture as HTML: SVG for the curves and text next to it, so that only the curves stretch with the window.

Text takes the colour of its surroundings (currentColor), which is right in every theme of every front end.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import numpy as np

from nbtools.live.plot import Chart, Line, Picture

WIDTH, HEIGHT = 2000, 10_000  # units of a plot: whole numbers become text ten times as fast as formatted floats
TALL, SMALL, ABOVE = 240, 84, 16  # px: heights of a plot, of a small one, of a mark's name
STYLE = f"""
.nbt{{font:13px/1.4 var(--jp-ui-font-family,system-ui,-apple-system,"Segoe UI",sans-serif);
 font-variant-numeric:tabular-nums;max-width:1600px;padding:4px 2px}}
.nbt b{{font-weight:600}}
.nbt *{{box-sizing:content-box}}
.jp-RenderedHTMLCommon>.nbtools-kept{{margin-right:-20px}}
.nbt-charts{{container-type:inline-size}}
.nbt-grid{{display:grid;gap:0 22px;grid-template-columns:repeat(2,minmax(0,1fr))}}
.nbt-grid>div{{display:grid;grid-row:span 2;grid-template:subgrid/minmax(0,1fr);margin-bottom:10px}}
.nbt-small>.nbt-plot{{height:{SMALL}px}}
@container (max-width:700px){{.nbt-grid>div{{grid-column:span 2}}}}
@container (min-width:1300px){{.nbt-grid{{grid-template-columns:5fr 5fr 3fr}}.nbt-small>.nbt-plot{{height:{TALL}px}}}}
.nbt-head{{font-size:12px;white-space:nowrap;line-height:18px;min-height:36px}}
.nbt-head>b{{display:block;font-size:13px;overflow:hidden;text-overflow:ellipsis}}
.nbt-head>b span{{font-weight:400;opacity:.75;font-size:12px}}
.nbt-key{{display:flex;flex-wrap:wrap;gap:0 12px;font-size:11px}}
.nbt-key span{{display:flex;align-items:center;min-width:0;cursor:pointer;user-select:none}}
.nbt-key .nbt-off{{opacity:.4;text-decoration:line-through}}
.nbt-plot .nbt-off{{display:none}}
.nbt-key i{{font-style:normal;opacity:.75;margin:0 4px;overflow:hidden;text-overflow:ellipsis}}
.nbt .nbt-key svg{{width:14px;height:8px;flex:none;overflow:visible}}
.nbt-plot{{position:relative;align-self:end;height:{TALL}px;margin:5px 14px 22px 46px;user-select:none}}
.nbt .nbt-plot>svg{{position:absolute;left:0;top:0;width:100%;height:100%;overflow:visible}}
.nbt .nbt-plot.nbt-zoom>svg{{overflow:hidden}}
.nbt svg *{{vector-effect:non-scaling-stroke;fill:none;stroke-linejoin:round}}
.nbt-plot>span{{position:absolute;font-size:11px;line-height:14px;white-space:nowrap;opacity:.75}}
.nbt-y{{right:100%;margin:-7px 8px 0 0}}
.nbt-x{{top:100%;margin-top:5px;transform:translateX(-50%)}}
.nbt-plot>.nbt-name{{bottom:100%;padding:0 4px;box-sizing:border-box;overflow:hidden;text-overflow:ellipsis}}
.nbt-at{{position:absolute;top:0;bottom:0;border-left:1px solid;pointer-events:none;z-index:1}}
.nbt-at>div{{position:absolute;top:2px;left:5px;padding:2px 7px;border-radius:4px;font-size:11px;line-height:16px;
 white-space:nowrap;background:rgba(128,128,128,.16);backdrop-filter:blur(5px)}}
.nbt-left>div{{left:auto;right:6px}}
.nbt-at i{{display:inline-block;width:7px;height:7px;border-radius:4px;margin-right:5px}}
.nbt-drag{{position:absolute;top:0;bottom:0;pointer-events:none;background:rgba(128,128,128,.25)}}
"""
SCRIPT = Path(__file__).with_name("charts.js").read_text("utf-8")


def head(*styles: str) -> str:
    """Return the <style> that a page needs once. It brings the script too, since the markup of a widget cannot run a
    <script>."""
    return f'<style onload="{escape(SCRIPT)}">{STYLE}{"".join(styles)}</style>'


def page(shown: Picture) -> str:
    """Return a frame for a page of its own."""
    return head() + frame(shown)


def frame(shown: Picture) -> str:
    """Return one live frame; charts.js reads its data-. All text is escaped. A page needs `head` once."""
    below = x_axis(shown)
    charts = "".join([panel(chart, shown, below, i == 0) for i, chart in enumerate(shown.charts)])
    axis = f'data-x="{escape(shown.x)}" data-first="{shown.axis.low:.6g}" data-last="{shown.axis.high:.6g}"'
    return f'<div class="nbt nbt-charts"><div class="nbt-grid" {axis}>{charts}</div></div>'


def panel(chart: Chart, shown: Picture, below: str, first: bool) -> str:
    """Return one chart under its title and legend; the first has the name of the newest mark above it. below: the x
    axis."""
    values, labels = chart.scale.ticks()
    heights = chart.scale.places(np.array(values)).tolist()
    levels = "".join([f"M0 {HEIGHT - HEIGHT * height:.0f}h{WIDTH}" for height in heights])
    texts = [
        f'<span class="nbt-y" style="top:{100 - 100 * height:.1f}%">{label}</span>'
        for height, label in zip(heights, labels, strict=True)
    ]
    places = shown.axis.places(np.array([x for x, _ in shown.marks])).tolist()
    marks = "".join([mark(place, what) for place, (_, what) in zip(places, shown.marks, strict=True)])
    if first and places:
        side, at = ("left", places[-1]) if places[-1] < 0.5 else ("right", 1 - places[-1])
        where = f"{side}:{100 * at:.1f}%;max-width:{100 - 100 * at:.1f}%"
        texts.append(f'<span class="nbt-name" style="{where}">{escape(shown.marks[-1][1])}</span>')
    above = f"margin-top:{ABOVE}px" * first
    log = ' data-log=""' if chart.scale.log else ""
    reach = f'data-low="{chart.scale.low:.6g}" data-high="{chart.scale.high:.6g}"{log}'
    return (
        f'<div class="{"nbt-small" * chart.small}">{heading(chart)}<div class="nbt-plot" {reach} style="{above}">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(chart.alt)}">'
        f'<path d="{levels}" stroke="currentColor" stroke-opacity=".14"/>'
        f'<path d="M0 {HEIGHT}h{WIDTH}" stroke="currentColor" stroke-opacity=".5"/>{marks}'
        f"{''.join([curve(line, chart, shown) for line in chart.lines])}</svg>{below}{''.join(texts)}</div></div>"
    )


def heading(chart: Chart) -> str:
    """Return title and legend: a piece of each line as it is drawn, its name and its last value."""
    about, key = f" <span>{escape(chart.about)}</span>" if chart.about else "", []
    for line in chart.legend:
        path = f'<path d="M0 4h16" stroke="{line.colour}" stroke-width="2"/>'
        if line.points:
            path += f'<path d="M8 4h.1" stroke="{line.colour}" stroke-width="6" stroke-linecap="round"/>'
        text = f"<i>{escape(line.name)}</i><b>{escape(line.value)}</b>"
        name = escape(line.name)
        key.append(f'<span title="{name}" data-name="{name}"><svg viewBox="0 0 16 8">{path}</svg>{text}</span>')
    title = f"<b>{escape(chart.title)}{about}</b>"
    return f'<div class="nbt-head">{title}<div class="nbt-key">{"".join(key)}</div></div>'


def curve(line: Line, chart: Chart, shown: Picture) -> str:
    """Return a polyline without the points in the middle of level stretches, and a round dot a point where they are
    few."""
    points = np.empty((len(line.x), 2), np.int64)
    points[:, 0] = shown.axis.places(line.x) * WIDTH
    points[:, 1] = HEIGHT - HEIGHT * chart.scale.places(line.y)
    dots = ""
    if line.dotted:
        path = "".join([f"M{x} {y}h1" for x, y in points.tolist()])
        dots = f'<path d="{path}" stroke="{line.colour}" stroke-width="6" stroke-linecap="round"/>'
    if len(points) > 2:
        turns = points[1:, 1] != points[:-1, 1]
        points = points[np.concatenate(([True], turns[1:] | turns[:-1], [True]))]
    look = 'stroke-width="1" stroke-opacity=".5" class="nbt-faint"' if line.faint else 'stroke-width="1.8"'
    path = f'<polyline points="{str(points.ravel().tolist())[1:-1]}" stroke="{line.colour}" {look}/>'
    return f'<g data-name="{escape(line.name)}">{path}{dots}</g>'


def mark(place: float, what: str) -> str:
    """Return a dashed line where a setting was changed."""
    return (
        f'<path d="M{WIDTH * place:.0f} {HEIGHT}V0" stroke="currentColor" stroke-opacity=".5" '
        f'stroke-dasharray="3 3"><title>{escape(what)}</title></path>'
    )


def x_axis(shown: Picture) -> str:
    """Return the labels of the x axis, its name before them; one at its start begins there, one at its end ends
    there."""
    values, labels = shown.ticks()
    spans = [f'<span class="nbt-y" style="top:100%;margin-top:5px">{escape(shown.x)}</span>']
    for share, label in zip(shown.axis.places(np.array(values)).tolist(), labels, strict=True):
        at = f"left:{100 * share:.1f}%" if share < 0.95 else f"right:{100 - 100 * share:.1f}%"
        edge = ";transform:none" * (share < 0.02 or share >= 0.95)
        spans.append(f'<span class="nbt-x" style="{at}{edge}">{label}</span>')
    return "".join(spans)
