"""What a run's charts show, from the columns of a History to lines, marks and axes: `svg` and `png` draw it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nbtools.live.columns import Columns, Series
from nbtools.show import digits, exponent, header, number

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
"""Okabe & Ito (2008): distinguishable with every kind of colour vision, on white and on black."""
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
SCALES = ("auto", "linear", "log")
TICKS, POINTS = 5, 150  # of an axis, about; a line has two points in each of so many columns at most
DIGITS = re.compile(r"\d+\.\d{4,}")  # of a lr by rule


@dataclass(frozen=True)
class Look:
    """How curves are drawn. x: one of XS; scale: of SCALES, for the loss; smoothing: so many times the usual."""

    x: str = "step"
    scale: str = "auto"
    smoothing: float = 1.0


@dataclass(frozen=True)
class Scale:
    """An axis from low to high."""

    low: float
    high: float
    log: bool = False

    def places(self, values: np.ndarray) -> np.ndarray:
        """Return (n,) → (n,): 0 at low, 1 at high; values beyond stay at the edge."""
        inside = np.minimum(np.maximum(values, self.low), self.high)
        if self.log:
            return np.log(inside / self.low) / math.log(self.high / self.low)
        return (inside - self.low) / (self.high - self.low)

    def ticks(self) -> tuple[list[float], list[str]]:
        """Return (values, labels) from low to high."""
        from matplotlib.ticker import LogLocator, MaxNLocator

        values = MaxNLocator(TICKS, steps=[1, 2, 2.5, 5, 10]).tick_values(self.low, self.high)
        if self.log and self.high > 10 * self.low:
            values = LogLocator(numticks=TICKS + 1).tick_values(self.low, self.high)
        inside = [float(value) for value in values if self.low <= value <= self.high]
        return inside, tick_labels(inside, self.log)


@dataclass(frozen=True)
class Line:
    """One curve: x and y (n,) float64. faint: as logged, behind the smoothed one of this name. points: of few values,
    each a dot. value: the last one, as text for the legend."""

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: str
    value: str = ""
    faint: bool = False
    points: bool = False

    @property
    def dotted(self) -> bool:
        return len(self.x) == 1 or (self.points and len(self.x) <= 60)


@dataclass(frozen=True)
class Chart:
    """Lines over the picture's x axis. about: next to the title. small: drawn small, as of the schedule."""

    title: str
    lines: tuple[Line, ...]
    scale: Scale
    about: str = ""
    small: bool = False

    @property
    def legend(self) -> list[Line]:
        return [line for line in self.lines if not line.faint]

    @property
    def alt(self) -> str:
        """Return it in words: `loss: train 0.231, validation 0.305`."""
        values = ", ".join(f"{line.name} {line.value}".strip() for line in self.legend)
        return f"{self.title}: {values}" if values else self.title


@dataclass(frozen=True)
class Picture:
    """Charts that share an x axis; marks: (x, what was changed there), the newest named above the first chart."""

    charts: tuple[Chart, ...] = ()
    axis: Scale = Scale(0.0, 1.0)
    x: str = "step"
    marks: tuple[tuple[float, str], ...] = ()

    @property
    def alt(self) -> str:
        return "; ".join(chart.alt for chart in self.charts)

    def ticks(self) -> tuple[list[float], list[str]]:
        """Return (values, labels) of the x axis; a half step or sample is none."""
        values = [x for x in self.axis.ticks()[0] if self.x == "minutes" or x == int(x)]
        return values, tick_labels(values)


def picture(columns: Columns, best: str = "", look: Look = Look()) -> Picture:
    """Return everything a frame draws: loss, metrics and lr. best: the metric that counts; a loss has no chart of
    metrics before the first evaluation."""
    if columns.ended is None:
        return Picture()
    made = [*loss(columns, look), *metrics(columns, look)]
    if len(made) == 1 and best.lstrip("-") not in ("", "loss"):  # its place, so that nothing moves when it comes
        made.append(Chart("validation metrics", (), Scale(0.0, 1.0), "after the first evaluation"))
    made += rate(columns, look)
    end = max(steps[-1] for steps, _ in columns.columns.values())
    last = float(columns.along(look.x, np.array([end]))[0])
    places = columns.along(look.x, np.array([float(row["step"]) for row in columns.changes]))
    marks = tuple((float(x), said(row)) for x, row in zip(places, columns.changes, strict=True))
    return Picture(tuple(made), Scale(0.0, last or 1.0), look.x, marks)


def compared(runs: Mapping[str, Columns], metric: str) -> Picture:
    """Return the validation loss, the metric that counts and the lr of several runs, a colour each."""
    charts = []
    for title, name in (("validation loss", "val_loss"), (header(metric), f"val_{metric}"), ("learning rate", "lr")):
        lines = []
        for k, (run, columns) in enumerate(runs.items()):
            x, y = columns.series(name, "step") if name == "lr" else evaluated(columns, name)
            if len(x):
                lines.append(Line(run, *thinned(x, y), COLOURS[k % 6], number(y[-1]), points=name != "lr"))
        if lines and title not in {chart.title for chart in charts}:
            low, high = extent(line.y for line in lines)
            scale = Scale(0.0, high * 1.08) if name == "lr" else falling(low, high, "auto")
            charts.append(Chart(title, tuple(lines), scale, small=name == "lr"))
    ends = [line.x[-1] for chart in charts for line in chart.lines]
    return Picture(tuple(charts), Scale(0.0, float(max(ends, default=1.0)) or 1.0))


def loss(columns: Columns, look: Look) -> Iterator[Chart]:
    """Yield the train loss as logged (faint) and smoothed, whose end the legend names, and the validation's."""
    lines: list[Line] = []
    x, y = columns.series("loss", "step")
    x, y = (x, y) if len(x) else columns.series("train_loss", "epoch")
    logged = [(x, y)] if len(x) else []
    if len(x):
        smooth = calmed(x, y, look.smoothing / 20)
        if len(x) > 8 and look.smoothing:
            lines.append(Line("train", *placed(columns, look, thinned(x, y)), BLUE, faint=True))
        lines.append(Line("train", *placed(columns, look, smooth), BLUE, number(smooth[1][-1])))
    x, y = evaluated(columns, "val_loss")
    if len(x):
        logged.append((x, y))
        line = placed(columns, look, thinned(x, y))
        lines.append(Line("validation", *line, VERMILLION, number(y[-1]), points=True))
    if lines:
        low, peak = extent(y for _, y in logged)
        high = extent(steady(x, y) for x, y in logged)[1]
        cut = f"peak {number(peak)} cut off" if peak > high else ""
        scale = falling(low, high, look.scale)
        yield Chart("loss", tuple(lines), scale, " · ".join(filter(None, ["log scale" * scale.log, cut])))


def metrics(columns: Columns, look: Look) -> Iterator[Chart]:
    """Yield one chart of all metrics that are shares, and one of each other, as of an error in the target's unit."""
    shares, others = [], []
    names = dict.fromkeys(name for _, name in columns.columns if name.startswith("val_") and name != "val_loss")
    for k, name in enumerate(names):
        x, y = evaluated(columns, name)
        colour, value = (GREEN, PURPLE, ORANGE, SKY, BLUE, VERMILLION)[k % 6], number(y[-1])
        each = placed(columns, look, thinned(x, y))
        line = Line(header(name.removeprefix("val_")), *each, colour, value, points=True)
        (shares if np.abs(y).min() <= 1 else others).append(line)
    if shares:
        yield Chart("validation metrics", tuple(shares), airy(*extent(line.y for line in shares)))
    for line in others:
        yield Chart(line.name, (line,), airy(*extent([line.y])))


def rate(columns: Columns, look: Look) -> Iterator[Chart]:
    """Yield lr, linear: a cosine on a logarithmic axis would be a cliff at its end."""
    x, y = columns.either("lr")
    if len(x):
        value = digits(columns.newest("lr") or 0.0)
        line = Line("lr", *placed(columns, look, thinned(x, y)), VERMILLION, value)
        yield Chart("learning rate", (line,), Scale(0.0, float(y.max()) * 1.08 or 1.0), small=True)


def evaluated(columns: Columns, name: str) -> Series:
    """Return a metric at the ends of epochs, and wherever the user requested it in between."""
    return columns.series(name, "epoch", "evaluation")


def placed(columns: Columns, look: Look, line: Series) -> Series:
    return columns.along(look.x, line[0]), line[1]


def said(change: Mapping[str, object]) -> str:
    """Return what a row of changed settings says, in three digits; of one that says that the run went back, its
    mark."""
    return DIGITS.sub(lambda text: f"{float(text[0]):.3g}", str(change.get("mark") or change.get("what", "")))


# -- axes


def steady(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the values without an early spike, which would press all that follows flat: in the first quarter of the
    line, those three times as high above the lowest as 98 of 100 are. A late one, as when training diverges, stays."""
    low, most = y.min(), np.quantile(y, 0.98, method="lower")
    return y[(y <= most + 2 * max(most - low, abs(most) / 2)) | (x > x[-1] / 4)]


def falling(low: float, high: float, scale: str) -> Scale:
    """Return the scale of a loss: by itself logarithmic when it falls to a thirtieth; a logarithm shows nothing below
    0."""
    if scale == "log" and high > 0:
        return airy(max(low, high / 1e6), high, True)
    return airy(low, high, scale == "auto" and low > 0 and high / low > 30)


def extent(values: Iterable[np.ndarray]) -> tuple[float, float]:
    pairs = [(float(v.min()), float(v.max())) for v in values]
    return min(low for low, _ in pairs), max(high for _, high in pairs)


def airy(low: float, high: float, log: bool = False) -> Scale:
    """Return a scale with a little air above and below low … high."""
    if log:
        air = max((high / low) ** 0.06, 1.12)
        return Scale(low / air, high * air, True)
    air = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Scale(max(0.0, low - air) if low >= 0 else low - air, high + air)


def tick_labels(values: Sequence[float], log: bool = False) -> list[str]:
    """Return labels of one axis with equal decimals; thousands as 2k, 2.5M."""
    if log:
        return [f"{v:g}" if 0.01 <= v < 1e4 else exponent(f"{v:.0e}") for v in values]
    top = max(map(abs, values), default=0.0)
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if top >= 2 * scale:
            return [f"{v / scale:g}{suffix}" if v else "0" for v in values]
    if 0 < top < 0.01:  # 2.5e-4 is as short as the room on the left
        return [re.sub(r"\.?0+e", "e", exponent(f"{v:.3e}")) if v else "0" for v in values]
    decimals = next((d for d in range(12) if all(abs(round(v, d) - v) <= 1e-9 * top for v in values)), 12)
    return [f"{v + 0.0:.{decimals}f}" for v in values]


# -- lines of few points


def calmed(x: np.ndarray, y: np.ndarray, part: float) -> Series:
    """Return means of a part of the line around each point: a mean of both sides does not lag."""
    half, total, at = int(len(y) * part / 2), np.concatenate(([0.0], np.cumsum(y))), np.arange(len(y))
    first, last = np.maximum(at - half, 0), np.minimum(at + half + 1, len(y))
    return thinned(x, (total[last] - total[first]) / (last - first))


def thinned(x: np.ndarray, y: np.ndarray) -> Series:
    """Return at most two points per column, its lowest and its highest: no peak is lost, unlike with every n-th
    point."""
    size = math.ceil(len(x) / POINTS)
    if size <= 2:
        return x, y
    columns = np.concatenate((y, y[-1:].repeat(-len(y) % size))).reshape(-1, size)
    starts = np.arange(0, len(y), size)
    keep = np.zeros(len(y), bool)
    keep[starts + columns.argmin(1)] = keep[starts + columns.argmax(1)] = keep[0] = keep[-1] = True
    return x[keep], y[keep]
