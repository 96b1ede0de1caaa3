"""What a run's charts show: from the rows of a History to lines, scales and marks, which draw.py draws."""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from nbtools.show import digits, exponent, number
from nbtools.train import History

COLOURS = BLUE, VERMILLION, GREEN, *_ = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
"""Okabe & Ito (2008): distinguishable with every kind of colour vision, on white and on black."""
XS, SCALES = ("step", "samples", "minutes"), ("auto", "linear", "log")
TICKS, POINTS, DOTS = 5, 150, 30  # of an axis, about; parts of a line with two points each; values that are dots
FALL = 25  # a loss that falls to a part as small as this is drawn on a logarithmic axis
EVALUATED = ("epoch", "evaluation")  # kinds of rows with metrics: ends of epochs, and where the user requested it
Series = tuple[np.ndarray, np.ndarray]  # (steps, values), both (n,) float64


class Columns:
    """The finite numbers of a history, by kind of row and column. `follow` reads new rows only: a frame of a long run
    costs no more than one of a short run. changes: rows of changed settings, and those that say that the run went back;
    epochs: rows of their ends; newest: the last step or epoch row."""

    def __init__(self) -> None:
        self.count, self.seen = 0, None
        self.columns: dict[tuple[str, str], tuple[array[float], array[float]]] = {}
        self.changes, self.epochs = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
        self.newest: Mapping[str, Any] | None = None

    def follow(self, history: History) -> Self:
        """Read the new rows; all of them again where rows were cut off."""
        rows = history.rows
        if self.count > len(rows) or (self.count and rows[self.count - 1] is not self.seen):
            Columns.__init__(self)
        for row in rows[self.count :]:
            if row["kind"] == "change" or row.get("mark"):
                self.changes.append(row)
            elif row["kind"] in ("step", "epoch"):
                self.newest = row
                self.epochs += [row] * (row["kind"] == "epoch")
            for name, value in row.items():
                if isinstance(value, (int, float)) and math.isfinite(value):  # a file edited by hand may hold text
                    steps, values = self.columns.setdefault((row["kind"], name), (array("d"), array("d")))
                    steps.append(row["step"])
                    values.append(value)
            self.count, self.seen = self.count + 1, row
        return self

    def series(self, name: str, *kinds: str) -> Series:
        """Return the column in rows of these kinds, by steps; by default as logged on steps, else on epochs."""
        kinds = kinds or (("step",) if ("step", name) in self.columns else ("epoch",))
        parts = [self.columns.get((kind, name), ((), ())) for kind in kinds]
        steps, values = (np.concatenate([np.array(part[side], float) for part in parts]) for side in (0, 1))
        order = np.argsort(steps, kind="stable")
        return steps[order], values[order]

    def last(self, name: str) -> float | None:
        values = self.series(name)[1]
        return float(values[-1]) if len(values) else None

    def since(self, name: str) -> Series:
        """Return a column that counts from (0, 0): `samples`, or `wall`, the seconds by the clock without pauses."""
        steps, values = self.series(name, "step", "epoch")
        return np.insert(steps, 0, 0.0), np.insert(values, 0, 0.0)

    def along(self, x: str, steps: np.ndarray) -> np.ndarray:
        """Return the places of steps on an axis of XS."""
        if x == "step":
            return steps
        return np.interp(steps, *self.since("wall" if x == "minutes" else x)) / (60 if x == "minutes" else 1)


@dataclass(frozen=True)
class Scale:
    """An axis from low to high. whole: only whole numbers are ticks."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def places(self, values: Any) -> np.ndarray:
        """Return (n,) → (n,): 0 at low, 1 at high; values beyond stay at the edge."""
        inside = np.clip(values, self.low, self.high)
        if self.log:
            return np.log(inside / self.low) / math.log(self.high / self.low)
        return (inside - self.low) / (self.high - self.low)

    def ticks(self) -> tuple[list[float], list[str]]:
        from matplotlib.ticker import LogLocator, MaxNLocator

        wide = self.log and self.high > 10 * self.low
        even: Any = {"steps": [1, 2, 2.5, 5, 10], "integer": self.whole}
        locator = LogLocator(numticks=TICKS + 1) if wide else MaxNLocator(TICKS, **even)
        values = [float(v) for v in locator.tick_values(self.low, self.high) if self.low <= v <= self.high]
        return values, [exponent(f"{round(value, 12):g}") for value in values]


@dataclass
class Line:
    """One curve: x, y (n,) float64. value: the last one, for the legend. faint: as logged, behind the smoothed one."""

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: str
    value: str = ""
    faint: bool = False

    @property
    def dotted(self) -> bool:
        return len(self.x) <= DOTS and not self.faint


@dataclass(frozen=True)
class Chart:
    """Lines over the picture's x axis. about: next to the title. small: drawn small, as of the schedule."""

    title: str
    lines: Sequence[Line]
    scale: Scale
    about: str = ""
    small: bool = False

    @property
    def legend(self) -> list[Line]:
        return [line for line in self.lines if not line.faint]


@dataclass(frozen=True)
class Picture:
    """Charts that share an x axis; marks: (x, what was changed there)."""

    charts: Sequence[Chart] = ()
    axis: Scale = Scale(0.0, 1.0)
    x: str = "step"
    marks: Sequence[tuple[float, str]] = ()


def picture(columns: Columns, best: str = "", x: str = "step", scale: str = "auto", smoothing: float = 1.0) -> Picture:
    """Return everything a frame draws: loss, metrics and lr. best: the metric that counts; if it is the loss, there is
    no chart of metrics before the first evaluation. x, scale (of the loss): of XS, SCALES; smoothing: a multiple."""
    if columns.newest is None:
        return Picture()
    charts = [*loss(columns, scale, smoothing), *metrics(columns)]
    if len(charts) == 1 and best.lstrip("-") not in ("", "loss"):  # its place, so that nothing moves when it comes
        charts.append(Chart("validation metrics", (), Scale(0.0, 1.0), "after the first evaluation"))
    if ("step", "lr") in columns.columns or ("epoch", "lr") in columns.columns:
        charts.append(learning_rate([curve_of("lr", columns.series("lr"), VERMILLION, digits)]))
    for line in (line for chart in charts for line in chart.lines):
        line.x = columns.along(x, line.x)
    steps = [row["step"] for row in columns.changes] + [max(steps[-1] for steps, _ in columns.columns.values())]
    *places, end = columns.along(x, np.array(steps, float)).tolist()
    changes = [str(row.get("mark") or row.get("what", "")) for row in columns.changes]
    return Picture(charts, Scale(0.0, end or 1.0, whole=x != "minutes"), x, [*zip(places, changes, strict=True)])


def loss(columns: Columns, axis: str, smoothing: float) -> list[Chart]:
    """Return the train loss as logged (faint) and smoothed, whose end the legend names, and the validation's."""
    train = columns.series("loss", "step") if ("step", "loss") in columns.columns else columns.series("train_loss")
    validation, lines = columns.series("val_loss", *EVALUATED), []
    if len(train[0]) > 8 and smoothing:
        lines.append(curve_of("train", train, BLUE, faint=True))
    if len(train[0]):
        lines.append(curve_of("train", smooth(*train, smoothing / 20), BLUE))
    if len(validation[0]):
        lines.append(curve_of("validation", validation, VERMILLION))
    return [make_chart("loss", lines, axis)] if lines else []


def metrics(columns: Columns) -> list[Chart]:
    """Return one chart of all metrics that are shares, and one of each other, as of an error in the target's unit."""
    shares, others = [], []
    names = dict.fromkeys(name for _, name in columns.columns if name.startswith("val_") and name != "val_loss")
    for k, name in enumerate(names):
        line = curve_of(name[4:].replace("_", " "), columns.series(name, *EVALUATED), COLOURS[(k + 2) % 6])
        (shares if np.abs(line.y).min() <= 1 else others).append(line)
    charts = [("validation metrics", shares)] * bool(shares) + [(line.name, [line]) for line in others]
    return [make_chart(title, lines) for title, lines in charts]


def learning_rate(lines: list[Line]) -> Chart:
    """Return the chart of the schedule: linear, since a cosine on a logarithmic axis would be a cliff at its end."""
    high = max(float(line.y.max()) for line in lines)
    return Chart("learning rate", lines, Scale(0.0, high * 1.08 or 1.0), small=True)


def comparison(runs: Mapping[str, Columns], metric: str) -> Picture:
    """Return the validation loss, the metric that counts and the lr of several runs, a colour each."""

    def lines(name: str, *kinds: str, text: Any = number) -> list[Line]:
        series = [(run, columns.series(name, *kinds), COLOURS[k % 6]) for k, (run, columns) in enumerate(runs.items())]
        return [curve_of(*each, text) for each in series if len(each[1][0])]

    titles = {"val_loss": "validation loss", f"val_{metric}": metric.replace("_", " ")}
    drawn = {name: made for name in titles if (made := lines(name, *EVALUATED))}
    charts = [make_chart(titles[n], made, "auto" if n == "val_loss" else "linear") for n, made in drawn.items()]
    charts += [learning_rate(made)] if (made := lines("lr", text=digits)) else []
    ends = [line.x[-1] for chart in charts for line in chart.lines]
    return Picture(charts, Scale(0.0, float(max(ends, default=1.0)) or 1.0, whole=True))


def make_chart(title: str, lines: list[Line], axis: str = "linear") -> Chart:
    """Return lines on a scale with a little air above and below them. axis: one of SCALES."""
    every = np.concatenate([line.y for line in lines])
    low, high = float(every.min()), float(every.max())
    if (axis == "log" and high > 0) or (axis == "auto" and 0 < FALL * low < high):
        low = max(low, high / 1e6)
        air = max((high / low) ** 0.06, 1.12)
        return Chart(title, lines, Scale(low / air, high * air, log=True), "log scale")
    air = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Chart(title, lines, Scale(max(0.0, low - air) if low >= 0 else low - air, high + air))


def smooth(x: np.ndarray, y: np.ndarray, part: float) -> Series:
    """Return means of a part of the line around each point: a mean of both sides does not lag."""
    half, total, at = int(len(y) * part / 2), np.concatenate(([0.0], np.cumsum(y))), np.arange(len(y))
    first, last = np.maximum(at - half, 0), np.minimum(at + half + 1, len(y))
    return x, (total[last] - total[first]) / (last - first)


def curve_of(name: str, values: Series, colour: str, text: Any = number, faint: bool = False) -> Line:
    """Return the line of a column over its steps, in the legend with its last value. Of many points two of each part,
    its lowest and its highest: no peak is lost, unlike with every n-th point."""
    (x, y), size = values, math.ceil(len(values[0]) / POINTS)
    if size > 2:
        parts = np.concatenate((y, y[-1:].repeat(-len(y) % size))).reshape(-1, size)
        starts = np.arange(0, len(y), size)
        keep = np.unique(np.concatenate(([0, len(y) - 1], starts + parts.argmin(1), starts + parts.argmax(1))))
        x, y = x[keep], y[keep]
    return Line(name, x, y, colour, text(float(y[-1])) if len(y) else "", faint)
