"""What a run's picture shows: from the rows of a History to charts, marks and facts. `svg` and `png` draw it."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

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
    number,
    scientific,
    thinned,
)
from nbtools.measure import REASONS
from nbtools.table import duration
from nbtools.train import History

IDLE = REASONS[0x1]

XS = ("step", "samples", "minutes")

Series = tuple[np.ndarray, np.ndarray]
"""(steps, values), both (n,) float64."""


@dataclass(frozen=True)
class About:
    """What a history does not record about its run: its name, its planned length, and which metric is the main one
    (`whole_accuracy`, or `-cer` where lower is better); the plan's schedule and its warmup, in epochs."""

    title: str = ""
    epochs: int | None = None
    epoch_samples: int | None = None
    best: str = ""
    schedule: str = ""
    warmup: float = 0.0

    def phase(self, progress: float) -> str:
        """What lr does at a point of the run, in epochs: `warmup`, or the name of the schedule."""
        return "warmup" if progress < self.warmup else self.schedule


class Columns:
    """The finite numbers of a history, by kind of row and column. `follow` reads new rows only: a frame of a long run
    costs no more than one of a short run.

    changes: rows of changed settings. ended: the newest step or epoch row.
    """

    def __init__(self, history: History | None = None):
        self.clear()
        if history is not None:
            self.follow(history)

    def clear(self) -> None:
        self.count, self.seen = 0, None
        self.found: dict[tuple[str, str], tuple[array[float], array[float]]] = {}
        self.changes: list[Mapping[str, Any]] = []
        self.ended: Mapping[str, Any] | None = None

    def follow(self, history: History) -> Self:
        """Read the new rows; all of them again where rows were cut off."""
        rows = history.rows
        if self.count > len(rows) or (self.count and rows[self.count - 1] is not self.seen):
            self.clear()
        for row in rows[self.count :]:
            kind, step = row["kind"], row["step"]
            if kind == "change":
                self.changes.append(row)
            elif kind in ("step", "epoch"):
                self.ended = row
            for name, value in row.items():
                if isinstance(value, (int, float)) and math.isfinite(value):  # a file edited by hand may hold text
                    if (kind, name) not in self.found:
                        self.found[kind, name] = (array("d"), array("d"))
                    steps, values = self.found[kind, name]
                    steps.append(step)
                    values.append(value)
        if rows:
            self.count, self.seen = len(rows), rows[-1]
        return self

    def series(self, name: str, *kinds: str) -> Series:
        """The column in rows of these kinds, in order of steps."""
        found = [self.found[kind, name] for kind in kinds if (kind, name) in self.found] or [EMPTY]
        steps, values = np.array(found[0][0]), np.array(found[0][1])
        for more in found[1:]:
            steps, values = np.append(steps, more[0]), np.append(values, more[1])
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
        return steps, values

    def either(self, name: str) -> Series:
        """The column as logged on steps, else on epochs."""
        return self.series(name, "step" if ("step", name) in self.found else "epoch")

    def evaluated(self, name: str) -> Series:
        """A metric at the ends of epochs, and wherever the user requested it in between."""
        return self.series(name, "epoch", "evaluation")

    def newest(self, name: str) -> float | None:
        """The last number of a column."""
        _, values = self.found.get(("step", name)) or self.found.get(("epoch", name)) or EMPTY
        return values[-1] if values else None

    @property
    def train_loss(self) -> float | None:
        """The train loss of a run, the same number wherever it is shown: the mean over the samples of the last epoch
        that ended, each when it was trained on. Before the first epoch ends: the mean since the last log step."""
        _, epochs = self.found.get(("epoch", "train_loss"), EMPTY)
        return epochs[-1] if epochs else self.newest("loss")


EMPTY: tuple[array[float], array[float]] = (array("d"), array("d"))


def along(columns: Columns, x: str) -> Callable[[np.ndarray], np.ndarray]:
    """The function from steps to places on an axis of XS."""
    if x == "step":
        return lambda steps: steps
    steps, values = taken(columns) if x == "samples" else spent(columns)
    scale = 60 if x == "minutes" else 1
    return lambda wanted: np.interp(wanted, steps, values) / scale


def taken(columns: Columns) -> Series:
    """(steps, samples taken until then) of every row, in order, from (0, 0)."""
    steps, samples = columns.series("samples", "step", "epoch", "evaluation")
    return np.concatenate(([0.0], steps)), np.concatenate(([0.0], samples))


def spent(columns: Columns) -> Series:
    """(steps, seconds of training until then): at the epochs' ends, and at the steps logged since the last of them."""
    ends, seconds = columns.series("epoch_time", "epoch")
    steps, speed = columns.series("samples_per_s", "step")
    last = ends[-1] if len(ends) else 0.0
    steps, speed = steps[steps > last], speed[steps > last]
    samples = np.interp(np.concatenate(([last], steps)), *taken(columns))
    since = np.diff(samples) / np.maximum(speed, 1e-9)
    return np.concatenate(([0.0], ends, steps)), np.cumsum(np.concatenate(([0.0], seconds, since)))


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
    line = Line("lr", *thinned(x, y), VERMILLION, value=scientific(last) if last else "0")
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
    lines = reading(columns, "samples_per_s", "samples/s", GREEN, samples_per_s)
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
    scale, unit, write = (1 / 1024, "GiB", "{:.1f}".format) if top >= 1024 else (1.0, "MiB", "{:.0f}".format)
    pairs = zip(found.items(), (SKY, PURPLE, ORANGE), strict=False)
    lines = [line for (name, label), c in pairs for line in reading(columns, name, label, c, write, scale)]
    return Chart(title, tuple(lines), from_zero(0.0, top * scale), unit) if lines else None


def reading(
    columns: Columns, name: str, label: str, colour: str, write: Callable[[float], str], scale: float = 1.0
) -> list[Line]:
    """The line of a column that was read off the machine; none without readings."""
    x, y = columns.either(name)
    return [Line(label, *calmed(x, y * scale), colour, value=write(y[-1] * scale))] if len(x) else []


def facts(columns: Columns, about: About, over: bool) -> tuple[tuple[str, str], ...]:
    """(label, value) in the order of reading; unknown ones are omitted."""
    row = columns.ended
    if row is None:
        return ()
    total = f" of {about.epochs}" if about.epochs else ""
    shown = [("epoch", f"{row['epoch'] + 1}{total}"), ("step", f"{row['step']:,}")]
    left = time_left(columns, about)
    if left and not over:
        shown.append(("time left", duration(left)))
    elif over or left == 0:
        spent = sum(float(columns.series(name, "epoch")[1].sum()) for name in ("epoch_time", "eval_time"))
        shown.append(("took", duration(spent)))
    readings = ((label, write, columns.newest(name)) for name, label, write in READINGS)
    shown += [(label, write(value)) for label, write, value in readings if value is not None]
    if found := best(columns, about.best):
        shown.append((f"best {about.best.lstrip('-')}", f"{number(found[0])} in epoch {found[1]}"))
    return tuple(shown)


def samples_per_s(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"


def mebibytes(count: float) -> str:
    return f"{count / 1024:.1f} GiB" if count >= 1024 else f"{count:.0f} MiB"


def watt_hours(energy: float) -> str:
    return f"{energy / 1000:.2f} kWh" if energy >= 1000 else f"{energy:.3g} Wh"


READINGS = (
    ("samples_per_s", "samples/s", samples_per_s),
    ("data_wait", "waiting for data", "{:.0%}".format),
    ("gpu_memory_reserved", "GPU memory", mebibytes),
    ("memory", "memory", mebibytes),
    ("gpu_utilisation", "GPU use", "{:.0f} %".format),
    ("gpu_power", "power", "{:.0f} W".format),
    ("gpu_energy", "energy", watt_hours),
)
"""(column, label, how its newest value is written)."""


def badges(columns: Columns, status: str) -> tuple[str, ...]:
    """The run's state, and what limits its GPU's clocks; idle does not count."""
    reasons = str((columns.ended or {}).get("gpu_throttle") or "").split(", ")
    held = tuple(f"GPU held back: {reason}" for reason in reasons if reason and reason != IDLE)
    return (status, *held) if status else held


def best(columns: Columns, metric: str) -> tuple[float, int] | None:
    """(value, epoch counted from 1) of the best evaluation at an epoch's end so far."""
    steps, values = columns.series(f"val_{metric.lstrip('-')}", "epoch")
    if not len(values):
        return None
    at = int(values.argmin() if metric.startswith("-") else values.argmax())
    ends, epochs = columns.series("epoch", "epoch")
    return float(values[at]), int(epochs[np.searchsorted(ends, steps[at])]) + 1


def progress(columns: Columns, about: About) -> float | None:
    """The share of the run's samples that is done, once the length of the run is known."""
    if columns.ended is None or not about.epochs or not about.epoch_samples:
        return None
    return min(1.0, columns.ended["samples"] / (about.epochs * about.epoch_samples))


def time_left(columns: Columns, about: About) -> float | None:
    """Seconds to the end: the samples left at the recent speed, measured anew after a change of settings, and the
    evaluations at their mean time so far."""
    done = progress(columns, about)
    steps, pace = columns.series("samples_per_s", "step")
    steps, pace = steps[pace > 0][-40:], pace[pace > 0][-40:]
    since = steps > columns.changes[-1]["step"] if columns.changes else np.zeros(len(steps), bool)
    pace = pace[since] if since.any() else pace
    if done is None or not len(pace):
        return None
    epochs = (1 - done) * (about.epochs or 0)
    evaluations = columns.series("eval_time", "epoch")[1]
    ended = max(len(columns.series("step", "epoch")[0]), 1)
    return epochs * ((about.epoch_samples or 0) / float(np.median(pace)) + float(evaluations.sum()) / ended)


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
