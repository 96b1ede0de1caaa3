"""Draws a Picture as a PNG, for what stays: transparent, in greys that read on white and on black."""

from __future__ import annotations

from collections.abc import Sequence

from nbtools.live.plot import axes, cards
from nbtools.live.plot.axes import NAME, PLOT, SMALL
from nbtools.live.plot.chart import Badge, Chart, Picture, Preview
from nbtools.live.plot.page import GREY, LEGEND, Page, explain, flowed, legend, length, rows

WIDE, COLUMNS = 960, 3  # px; charts in a row
LEFT, RIGHT, BETWEEN = 46, 36, 64  # px beside the charts, and between two of them
TITLE, HEAD, AXIS = 13, 26, 48  # px: size of a title; heights of its row, and of an axis with the gap to the next
NAMES, FACTS = 26, 42  # px: heights of the header's rows
ROOM = WIDE - LEFT - RIGHT
CHART = (ROOM - BETWEEN * (COLUMNS - 1)) / COLUMNS


def draw(shown: Picture, previews: Sequence[Preview] = ()) -> Page:
    """Header, a grid of charts three in a row, and below them the samples."""
    header, gallery = Header(shown), cards.Gallery(previews, ROOM)
    legends = [legend([line for line in chart.lines if line.name], CHART, SMALL) for chart in shown.charts]
    starts = range(0, len(legends), COLUMNS)
    heads = [HEAD + LEGEND * max(map(rows, legends[i : i + COLUMNS])) for i in starts]
    if heads:
        heads[0] += NAME * shown.names
    tops = [header.tall + sum(heads[:row]) + (PLOT + AXIS) * row for row in range(len(heads) + 1)]
    page = Page(WIDE, tops[-1] + gallery.tall)
    header.draw(page)
    for i, (chart, places) in enumerate(zip(shown.charts, legends, strict=True)):
        left, row = LEFT + (CHART + BETWEEN) * (i % COLUMNS), i // COLUMNS
        headline(page, chart, places, left, tops[row])
        axes.draw(page.axes(left, tops[row] + heads[row], CHART, PLOT), chart, shown, named=i == 0)
    gallery.draw(page, LEFT, tops[-1])
    return page


def headline(page: Page, chart: Chart, places: Sequence[tuple[float, int]], left: float, top: float) -> None:
    """Title, units and legend of a chart."""
    page.write(left, top + 14, chart.title, TITLE, weight="bold")
    page.write(left + length(chart.title, TITLE, "bold") + 6, top + 14, chart.units, SMALL + 1)
    explain(page, [line for line in chart.lines if line.name], places, left, top + 19, SMALL)


class Header:
    """Title and badges, facts, and the key of all charts, each in rows that wrap; tall: px."""

    def __init__(self, shown: Picture):
        self.shown = shown
        self.bold = [Badge(shown.title)] if shown.title else []
        named = [length(badge.text, 15, "bold") + 16 for badge in self.bold]
        self.names = flowed([*named, *(length(badge.text, SMALL) + 20 for badge in shown.badges)], ROOM)
        self.facts = flowed([max(length(a, SMALL), length(b, TITLE, "bold")) + 22 for a, b in shown.facts], ROOM)
        self.keys = legend(shown.key, ROOM, TITLE - 1)
        self.top = 8 + NAMES * rows(self.names)
        self.middle = self.top + FACTS * rows(self.facts)
        self.tall = self.middle + LEGEND * rows(self.keys) + 8

    def draw(self, page: Page) -> None:
        shown = self.shown
        for i, (badge, (left, row)) in enumerate(zip([*self.bold, *shown.badges], self.names, strict=True)):
            base = 24 + NAMES * row
            if i < len(self.bold):
                page.write(LEFT + left, base, badge.text, 15, weight="bold")
            else:
                ground = {"boxstyle": "round,pad=0.3", "facecolor": badge.colour or "#7d7d7d40", "edgecolor": "none"}
                page.write(LEFT + left, base, badge.text, SMALL, bbox=ground, color="#000" if badge.colour else GREY)
        for (label, value), (left, row) in zip(shown.facts, self.facts, strict=True):
            page.write(LEFT + left, self.top + FACTS * row + 13, label, SMALL)
            page.write(LEFT + left, self.top + FACTS * row + 30, value, TITLE, weight="bold")
        explain(page, shown.key, self.keys, LEFT, self.middle, TITLE - 1)
