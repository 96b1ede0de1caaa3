"""What a run's picture shows: from the columns of a History to charts and marks. `svg` and `png` draw it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nbtools.live.chart import (
    BLUE,
    GREEN,
    NAMED,
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
from nbtools.live.facts import About, facts, progress
from nbtools.show import digits, header, number

SCALES = ("auto", "linear", "log")


@dataclass(frozen=True)
class Look:
    """How curves are drawn. scale: one of SCALES, of loss and lr. smoothing: so many times the usual; 0: none. first,
    last: the part of the run that is shown, in shares of its steps so far."""

    scale: str = "auto"
    smoothing: float = 1.0
    first: float = 0.0
    last: float = 1.0


@dataclass(frozen=True)
class Pen:
    """Draws lines in a look, from the step `first` to `last`; each has one point beyond either, if there is one."""

    look: Look
    first: float
    last: float

    @property
    def whole(self) -> bool:
        return (self.look.first, self.look.last) == (0, 1)

    def cut(self, x: np.ndarray, y: np.ndarray) -> Series:
        inside = slice(max(int(x.searchsorted(self.first)) - 1, 0), int(x.searchsorted(self.last, "right")) + 1)
        return x[inside], y[inside]

    def thinned(self, x: np.ndarray, y: np.ndarray) -> Series:
        return thinned(*self.cut(x, y))

    def calmed(self, x: np.ndarray, y: np.ndarray, part: float = 1 / 50) -> Series:
        share = part * self.look.smoothing
        return calmed(*self.cut(x, y), share) if share else self.thinned(x, y)


def picture(columns: Columns, about: About | None = None, status: str = "", look: Look = Look()) -> Picture:
    """Everything a frame shows; status: the run's state. Without rows there are no charts."""
    about, end = about or About(), max((steps[-1] for steps, _ in columns.found.values()), default=0) or 1.0
    pen = Pen(look, look.first * end, look.last * end)
    scored = metrics if about.best.lstrip("-") in ("", "loss") else awaited
    large = [chart for draw in (loss, scored) for chart in draw(columns, pen)]
    small = [replace(chart, small=True) for draw in (rate, speed, use, memory) for chart in draw(columns, pen)]
    return Picture(
        charts=(*large, *small) if columns.ended else (),
        first=pen.first,
        last=pen.last,
        zoomed=not pen.whole,
        marks=marks(columns.changes, pen.first, pen.last),
        facts=facts(columns, about, status),
        state=status,
        share=progress(columns, about),
        title=about.title,
    )


def loss(columns: Columns, pen: Pen) -> Iterator[Chart]:
    """Train loss as logged (faint) and smoothed, whose end the legend names, and the validation's."""
    lines: list[Line] = []
    logged: list[Series] = []
    x, y = train_loss(columns)
    if len(x):
        smooth = pen.calmed(x, y, 1 / 20)
        logged.append(pen.thinned(x, y))
        lines += [Line("", *logged[0], BLUE, "faint")] if len(x) > 8 and pen.look.smoothing else []
        lines.append(Line("train", *smooth, BLUE, value=number(smooth[1][-1])))
    x, y = columns.evaluated("val_loss")
    if len(x):
        logged.append(pen.thinned(x, y))
        lines.append(Line("validation", *logged[-1], VERMILLION, "points", number(y[-1])))
    if not lines:
        return
    low, peak = extent(y for _, y in logged)
    high = extent(steady(x, y) for x, y in logged)[1] if pen.whole else peak
    yield Chart("loss", tuple(lines), falling(low, high, pen.look.scale), cut=number(peak) if peak > high else "")


def steady(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The values without an early spike, which would press all that follows flat: in the first quarter of the line,
    those three times as high above the lowest as 98 of 100 are. A late one, as when training diverges, stays."""
    low, most = y.min(), np.quantile(y, 0.98, method="lower")
    return y[(y <= most + 2 * max(most - low, abs(most) / 2)) | (x > x[-1] / 4)]


def train_loss(columns: Columns) -> Series:
    """(steps, values) as logged on steps, else on epochs."""
    x, y = columns.series("loss", "step")
    return (x, y) if len(x) else columns.series("train_loss", "epoch")


def falling(low: float, high: float, scale: str = "auto") -> Scale:
    """Of a loss: by itself logarithmic when it falls a lot; a logarithm shows nothing below 0."""
    if scale == "log" and high > 0:
        return airy(max(low, high / 1e6), high, True)
    return airy(low, high, scale == "auto" and low > 0 and high / low > 30)


def metrics(columns: Columns, pen: Pen) -> Iterator[Chart]:
    """Validation metrics in the range that they have: one chart of all that are shares, one of each other, as of an
    error in the target's unit."""
    lines, colours = [], (GREEN, PURPLE, ORANGE, SKY, BLUE, VERMILLION)
    for name in dict.fromkeys(name for _, name in columns.found if name.startswith("val_") and name != "val_loss"):
        x, y = columns.evaluated(name)
        line = Line(
            header(name.removeprefix("val_")), *pen.thinned(x, y), colours[len(lines) % 6], "points", number(y[-1])
        )
        lines.append((line, bool(np.abs(y).min() <= 1)))
    if together := tuple(line for line, share in lines if share):
        yield Chart("validation metrics", together, shares([line.y for line in together]))
    for line, share in lines:
        if not share:
            yield Chart(line.name, (line,), shares([line.y]))


def awaited(columns: Columns, pen: Pen) -> Iterator[Chart]:
    """The metrics, whose chart has its place before the first evaluation: none moves when it comes."""
    found = [*metrics(columns, pen)]
    yield from found or [Chart("validation metrics", (), Scale(0.0, 1.0), "after the first evaluation")]


def shares(values: Sequence[np.ndarray]) -> Scale:
    """Of metrics: their range. Of those that are mostly within 1, what lies beyond -1 and 2, as an error rate before
    training, is not worth the room."""
    low, high = extent(values)
    if np.median(np.abs(np.concatenate(values))) > 1:
        return airy(low, high)
    scale = airy(max(low, -1.0), min(high, 2.0))
    return Scale(scale.low, min(scale.high, 1.0)) if high <= 1 else scale


def rate(columns: Columns, pen: Pen) -> Iterator[Chart]:
    """lr, linear unless asked for: a cosine on a logarithmic axis would be a cliff at its end."""
    log = pen.look.scale == "log"
    x, y = rates(columns) if log else columns.either("lr")
    if not len(x):
        return
    line = Line("lr", *pen.thinned(x, y), VERMILLION, value=digits(columns.newest("lr") or 0.0))
    low, high = extent([line.y])
    yield Chart("learning rate", (line,), decade(low, high) if log else from_zero(low, high))


DECADES = 4  # below the usual lr: a cosine that ends at 0 would otherwise need an infinite axis


def rates(columns: Columns) -> Series:
    """(steps, lr) that a logarithmic axis shows: what lies far below the usual is at its bottom."""
    x, y = columns.either("lr")
    usual = np.median(y[y > 0]) if (y > 0).any() else math.inf
    return (x, np.maximum(y, usual / 10**DECADES)) if math.isfinite(usual) else (x[:0], y[:0])


def decade(low: float, high: float) -> Scale:
    """Of lr: at least one decade, so that a constant lr does not show rounding."""
    return airy(min(low, high / 10), high, True)


def speed(columns: Columns, pen: Pen) -> Iterator[Chart]:
    lines = reading(columns, pen, "samples_per_s", "samples/s", GREEN, number)
    if lines:
        yield Chart("speed", tuple(lines), from_zero(*extent(line.y for line in lines)))


def from_zero(low: float, high: float) -> Scale:
    return Scale(0.0, high * 1.08 or 1.0)


def use(columns: Columns, pen: Pen) -> Iterator[Chart]:
    """How busy the GPU is and how long it waits, in one chart since one explains the other."""
    busy = reading(columns, pen, "gpu_utilisation", "in use", BLUE, "{:.0f} %".format)
    wait = reading(columns, pen, "data_wait", "waiting for data", VERMILLION, "{:.0f} %".format, 100)
    title = "GPU" if busy else "waiting for data"
    if busy or wait:
        yield Chart(title, (*busy, *wait), Scale(0.0, 100.0), "% of the time")


def memory(columns: Columns, pen: Pen) -> Iterator[Chart]:
    """GPU memory where the run had a GPU, else that of the process."""
    labels = {"gpu_memory_allocated": "allocated", "gpu_memory_reserved": "reserved", "gpu_memory_used": "device"}
    found = {name: label for name, label in labels.items() if columns.newest(name) is not None}
    title = "GPU memory" if found else "memory"
    found = found or {"memory": "of the process"}
    top = max(columns.either(name)[1].max(initial=0.0) for name in found)
    gigabytes = top * 2**20 >= 1e9
    scale, unit, write = (2**20 / 1e9, "GB", "{:.1f}".format) if gigabytes else (2**20 / 1e6, "MB", "{:.0f}".format)
    pairs = zip(found.items(), (SKY, PURPLE, ORANGE), strict=False)
    lines = [line for (name, label), c in pairs for line in reading(columns, pen, name, label, c, write, scale)]
    if lines:
        yield Chart(title, tuple(lines), from_zero(0.0, top * scale), unit)


def reading(
    columns: Columns, pen: Pen, name: str, label: str, colour: str, write: Callable[[float], str], scale: float = 1.0
) -> list[Line]:
    """The line of a column that was read off the machine; none without readings."""
    x, y = columns.either(name)
    return [Line(label, *pen.calmed(x, y * scale), colour, value=write(y[-1] * scale))] if len(x) else []


LETTERS, SHORTEST = 40, 6  # of names: letters in a chart's width where it is narrow; room for fewer says nothing
DIGITS = re.compile(r"\d+\.\d{4,}")  # of a lr by rule


def marks(changes: Sequence[Mapping[str, Any]], first: float, last: float) -> tuple[Mark, ...]:
    """A mark for each change from `first` to `last`. The newest NAMED have names, in a row each, all on the side where
    the newest has more room, and the rows rise away from it: so no line crosses another's name."""
    found = [(float(row["step"]), worded(row)) for row in changes if first <= row["step"] <= last]
    old, new = found[:-NAMED], found[-NAMED:]
    left = bool(new) and new[-1][0] > (first + last) / 2
    named = []
    for i, (x, what) in enumerate(new):
        room = int(LETTERS * (x - first if left else last - x) / (last - first)) - 1
        name = what if room >= SHORTEST else ""
        named.append(Mark(x, what, name, -1 if left else 1, i if left else len(new) - 1 - i))
    return (*(Mark(x, what) for x, what in old), *named)


def worded(change: Mapping[str, Any]) -> str:
    """What a row of changed settings says, in three digits; of one that says that the run went back, its mark."""
    return DIGITS.sub(lambda digits: f"{float(digits[0]):.3g}", str(change.get("mark") or change.get("what", "")))
