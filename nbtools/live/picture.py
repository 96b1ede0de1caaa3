"""What a run's picture shows: from the columns of a History to charts and marks. `svg` and `png` draw it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nbtools.live.chart import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    Chart,
    Line,
    Mark,
    Picture,
    Scale,
    airy,
    calmed,
    extent,
    thinned,
)
from nbtools.live.columns import Columns, Series
from nbtools.live.facts import About, badges, facts, progress
from nbtools.table import digits, number


def picture(columns: Columns, about: About | None = None, status: str = "", over: bool = False) -> Picture:
    """Everything a frame shows; over: the run is no longer training. Without rows there are no charts."""
    about = about or About()
    found = [loss(columns), metrics(columns), rate(columns), speed(columns), use(columns), memory(columns)]
    charts = tuple(chart for chart in found if chart) if columns.ended else ()
    ends = [line.x[-1] for chart in charts for line in chart.lines] + [row["step"] for row in columns.changes[-1:]]
    last = float(max(ends, default=1.0)) or 1.0
    return Picture(
        charts=charts,
        last=last,
        marks=marks(columns.changes, last),
        facts=facts(columns, about, over),
        badges=badges(columns, status),
        share=progress(columns, about),
        title=about.title,
    )


def loss(columns: Columns) -> Chart | None:
    """Train loss as logged (faint) and smoothed, and the validation's. The number in the legend is that of the last
    epoch, as everywhere, and not the end of the smoothed curve."""
    lines, (x, y) = [], train_loss(columns)
    if len(x):
        label = "train, last epoch" if ("epoch", "train_loss") in columns.found else "train"
        lines += [Line("", *thinned(x, y), BLUE, "faint")] if len(x) > 8 else []
        lines.append(Line(label, *calmed(x, y, 1 / 20), BLUE, value=number(columns.train_loss or 0.0)))
    x, y = columns.evaluated("val_loss")
    if len(x):
        lines.append(Line("validation", *thinned(x, y), VERMILLION, "points", number(y[-1])))
    return Chart("loss", tuple(lines), falling(*extent(line.y for line in lines))) if lines else None


def train_loss(columns: Columns) -> Series:
    """(steps, values) as logged on steps, else on epochs."""
    x, y = columns.series("loss", "step")
    return (x, y) if len(x) else columns.series("train_loss", "epoch")


def falling(low: float, high: float) -> Scale:
    """Of a loss: logarithmic when it falls a lot."""
    return airy(low, high, low > 0 and high / low > 30)


def metrics(columns: Columns) -> Chart | None:
    """Every validation metric."""
    lines, colours = [], (GREEN, PURPLE, ORANGE, SKY, BLUE, VERMILLION)
    for name in dict.fromkeys(name for _, name in columns.found if name.startswith("val_") and name != "val_loss"):
        x, y = columns.evaluated(name)
        colour = colours[len(lines) % len(colours)]
        lines.append(Line(name.removeprefix("val_"), *thinned(x, y), colour, "points", number(y[-1])))
    scale = shares(*extent(line.y for line in lines)) if lines else Scale(0.0, 1.0)
    return Chart("validation metrics", tuple(lines), scale) if lines else None


def shares(low: float, high: float) -> Scale:
    """Of metrics: 0 to 1, and beyond if one exceeds that."""
    return Scale(min(0.0, max(low, -1.0)), max(1.0, min(high, 2.0)))


def rate(columns: Columns) -> Chart | None:
    x, y = rates(columns)
    if not len(x):
        return None
    last = columns.newest("lr")
    line = Line("lr", *thinned(x, y), VERMILLION, value=digits(last or 0.0))
    return Chart("learning rate", (line,), decade(float(y.min()), float(y.max())))


DECADES = 4  # below the usual lr: a cosine that ends at 0 would otherwise need an infinite axis


def rates(columns: Columns) -> Series:
    """(steps, lr) that a logarithmic axis shows: what lies far below the usual is at its bottom."""
    x, y = columns.either("lr")
    usual = np.median(y[y > 0]) if (y > 0).any() else math.inf
    return (x, np.maximum(y, usual / 10**DECADES)) if math.isfinite(usual) else (x[:0], y[:0])


def decade(low: float, high: float) -> Scale:
    """Of lr: at least one decade, so that a constant lr does not show rounding."""
    return airy(min(low, high / 10), high, True)


def speed(columns: Columns) -> Chart | None:
    lines = reading(columns, "samples_per_s", "samples/s", GREEN, number)
    return Chart("speed", tuple(lines), from_zero(*extent(line.y for line in lines))) if lines else None


def from_zero(low: float, high: float) -> Scale:
    return Scale(0.0, high * 1.08 or 1.0)


def use(columns: Columns) -> Chart | None:
    """How busy the GPU is and how long it waits, in one chart since one explains the other."""
    busy = reading(columns, "gpu_utilisation", "in use", BLUE, "{:.0f} %".format)
    wait = reading(columns, "data_wait", "waiting for data", VERMILLION, "{:.0f} %".format, 100)
    title = "GPU" if busy else "waiting for data"
    return Chart(title, (*busy, *wait), Scale(0.0, 100.0), "% of the time") if busy or wait else None


def memory(columns: Columns) -> Chart | None:
    """GPU memory where the run had a GPU, else that of the process."""
    labels = {"gpu_memory_allocated": "allocated", "gpu_memory_reserved": "reserved", "gpu_memory_used": "device"}
    found = {name: label for name, label in labels.items() if columns.newest(name) is not None}
    title = "GPU memory" if found else "memory"
    found = found or {"memory": "of the process"}
    top = max(columns.either(name)[1].max(initial=0.0) for name in found)
    gigabytes = top * 2**20 >= 1e9
    scale, unit, write = (2**20 / 1e9, "GB", "{:.1f}".format) if gigabytes else (2**20 / 1e6, "MB", "{:.0f}".format)
    pairs = zip(found.items(), (SKY, PURPLE, ORANGE), strict=False)
    lines = [line for (name, label), c in pairs for line in reading(columns, name, label, c, write, scale)]
    return Chart(title, tuple(lines), from_zero(0.0, top * scale), unit) if lines else None


def reading(
    columns: Columns, name: str, label: str, colour: str, write: Callable[[float], str], scale: float = 1.0
) -> list[Line]:
    """The line of a column that was read off the machine; none without readings."""
    x, y = columns.either(name)
    return [Line(label, *calmed(x, y * scale), colour, value=write(y[-1] * scale))] if len(x) else []


NAMED = 3  # of the newest changes, which are whole lines; older ones are ticks, or the curves would be lost behind them
LETTERS, SHORTEST = 40, 6  # of names: letters in a chart's width where it is narrow; fewer say nothing
DIGITS = re.compile(r"\d+\.\d{4,}")  # of a lr by rule


def marks(changes: Sequence[Mapping[str, Any]], last: float) -> tuple[Mark, ...]:
    """A mark for each change. Names are in a row each, all on the side where the newest has more room, and the rows
    rise away from it: so no line crosses another's name."""
    found = [(float(row["step"]), DIGITS.sub(rounded, str(row.get("what", "")))) for row in changes]
    old, new = found[:-NAMED], found[-NAMED:]
    left = bool(new) and new[-1][0] > last / 2
    named = []
    for i, (x, what) in enumerate(new):
        room = int(LETTERS * (x if left else last - x) / last) - 1
        name = "" if room < SHORTEST else what if len(what) <= room else f"{what[: room - 1]}…"
        named.append(Mark(x, what, name, -1 if left else 1, i if left else len(new) - 1 - i))
    return (*(Mark(x, what) for x, what in old), *named)


def rounded(digits: re.Match[str]) -> str:
    return f"{float(digits[0]):.3g}"
