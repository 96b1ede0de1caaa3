"""What a run's picture shows, decided apart from how it is drawn: a History → charts of lines, marks and figures.

Everything here is arithmetic on rows, cheap enough to be done anew for every frame of a live plot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbtools.axis import duration, number, scientific
from nbtools.history import History

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
METRIC_COLOURS = (GREEN, PURPLE, ORANGE, SKY, BLUE, VERMILLION)
"""Okabe & Ito (2008): told apart with every kind of colour vision, and on white as on black."""

DECADES = 4  # of a logarithmic axis at most: a cosine that ends at 0 would else go on for ever
COLUMNS = 150  # a line has two points in each at most: its lowest and its highest


@dataclass(frozen=True)
class About:
    """What a history does not say of its run: its name, how long it shall be, and which metric is the best one
    (`whole_accuracy`, or `-cer` where lower is better)."""

    title: str = ""
    epochs: int | None = None
    epoch_samples: int | None = None
    best: str = ""


@dataclass(frozen=True)
class Line:
    """One curve: steps and values (n,) float64.

    look: `line`, `faint` (behind another, not in the legend) or `points`. value: its last one, as text for the legend.
    ring: the index of a point to point out.
    """

    name: str
    steps: np.ndarray
    values: np.ndarray
    colour: str
    look: str = "line"
    value: str = ""
    ring: int | None = None

    @property
    def dotted(self) -> bool:
        """Whether its points are drawn one by one."""
        return len(self.steps) == 1 or (self.look == "points" and len(self.steps) <= 60)


@dataclass(frozen=True)
class Chart:
    """One panel: lines over steps on an axis that covers low … high; note: said in its middle when there is no line."""

    title: str
    lines: tuple[Line, ...]
    low: float
    high: float
    log: bool = False
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """Charts that share a step axis from 0 to `last`, marks (step, what changed) on it, facts (label, value) above, and
    the share of the run that is done."""

    charts: tuple[Chart, ...] = ()
    last: float = 1.0
    marks: tuple[tuple[float, str], ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    share: float | None = None
    title: str = ""


def picture(history: History, about: About | None = None) -> Picture:
    """All that a frame shows. A history without rows gives a picture without charts."""
    about = about or About()
    table = Columns(history)
    found = [loss(table), metrics(table, about.best), rate(table), memory(table)] if table.ended else []
    return Picture(
        charts=tuple(chart for chart in found if chart),
        last=float(max((line.steps[-1] for chart in found if chart for line in chart.lines), default=1.0)),
        marks=tuple((float(row["step"]), str(row.get("what", ""))) for row in history.of("change")),
        facts=facts(table, about),
        share=progress(table, about),
        title=about.title,
    )


class Columns:
    """The rows of a history by kind, read by column."""

    def __init__(self, history: History):
        self.known = history.columns
        self.rows = {kind: history.of(kind) for kind in ("step", "epoch")}
        self.steps = {kind: np.array([row["step"] for row in rows], np.float64) for kind, rows in self.rows.items()}
        self.ended = max((rows[-1] for rows in self.rows.values() if rows), key=lambda row: row["step"], default=None)

    def series(self, kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) float64 of the rows that have a finite number there."""
        if name not in self.known:
            return np.empty(0), np.empty(0)
        rows = self.rows[kind]
        try:
            try:
                values = np.array([row[name] for row in rows], np.float64)
            except KeyError:  # the rarer case is the slower one: get costs twice as much
                values = np.array([row.get(name) for row in rows], np.float64)  # None becomes NaN
        except (TypeError, ValueError):  # text in a column of numbers: a file edited by hand
            return np.empty(0), np.empty(0)
        finite = np.isfinite(values)
        return self.steps[kind][finite], values[finite]

    def either(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The column as logged on steps, else on epochs."""
        x, y = self.series("step", name)
        return (x, y) if len(x) else self.series("epoch", name)


def loss(table: Columns) -> Chart | None:
    """Train loss as logged (faint) and smoothed, and the validation's; logarithmic when it falls a lot."""
    x, y = table.series("step", "loss")
    if not len(x):
        x, y = table.series("epoch", "train_loss")
    lines, smooth = [], y
    if len(x) > 8:
        lines.append(Line("", *thinned(x, y), SKY, "faint"))
        smooth = smoothed(y, max(1, len(y) // 40))
    if len(x):
        lines.append(Line("train", *thinned(x, smooth), BLUE, value=number(smooth[-1])))
    vx, vy = table.series("epoch", "val_loss")
    if len(vx):
        lines.append(Line("validation", *thinned(vx, vy), VERMILLION, "points", number(vy[-1])))
    if not lines:
        return None
    low, high = extent(line.values for line in lines)
    log = low > 0 and high / low > 30
    return chart("loss, logarithmic" if log else "loss", lines, low, high, log)


def metrics(table: Columns, best: str) -> Chart:
    """Every validation metric, 0 to 1 and beyond where one goes there; the best point of the one that counts ringed."""
    lines = []
    for name in table.known:
        x, y = table.series("epoch", name) if name.startswith("val_") and name != "val_loss" else (np.empty(0),) * 2
        if len(x):
            short = name.removeprefix("val_")
            ring = None
            if short == best.lstrip("-"):
                ring = int(np.argmin(y) if best.startswith("-") else np.argmax(y))
            colour = METRIC_COLOURS[len(lines) % len(METRIC_COLOURS)]
            lines.append(Line(short, x, y, colour, "points", number(y[-1]), ring))
    if not lines:
        return Chart("validation metrics", (), 0.0, 1.0, note="after the first evaluation")
    low, high = extent(line.values for line in lines)
    return Chart("validation metrics", tuple(lines), min(0.0, max(low, -1.0)), max(1.0, min(high, 2.0)))


def rate(table: Columns) -> Chart | None:
    """The learning rate over at least one decade, so that a constant one is no picture of rounding."""
    x, y = table.either("lr")
    high = float(y.max(initial=0))
    shown = y > high / 10**DECADES
    if not shown.any():
        return None
    line = Line("lr", *thinned(x[shown], y[shown]), VERMILLION, value=scientific(y[-1]) if y[-1] else "0")
    return chart("learning rate", [line], min(float(y[shown].min()), high / 10), high, True)


def memory(table: Columns) -> Chart | None:
    """GPU memory where the run had a GPU, else that of the process."""
    named = {"gpu_memory_allocated": "allocated", "gpu_memory_reserved": "reserved", "gpu_memory_used": "device"}
    title, found = "GPU memory", [(label, *table.either(name)) for name, label in named.items()]
    if not any(len(x) for _, x, _ in found):
        title, found = "memory of the process", [("resident", *table.either("memory"))]
    found = [(label, x, y) for label, x, y in found if len(x)]
    if not found:
        return None
    top = max(float(y.max()) for _, _, y in found)
    scale, unit, digits = (1024, "GiB", 1) if top >= 1024 else (1, "MiB", 0)
    lines = [
        Line(label, *thinned(x, y / scale), colour, value=f"{y[-1] / scale:.{digits}f}")
        for (label, x, y), colour in zip(found, (SKY, PURPLE, ORANGE), strict=False)
    ]
    return Chart(f"{title} ({unit})", tuple(lines), 0.0, top / scale * 1.08 or 1.0)


def chart(title: str, lines: list[Line], low: float, high: float, log: bool) -> Chart:
    """A chart with a little air above and below its lines."""
    if log:
        air = max((high / low) ** 0.06, 1.12)
        return Chart(title, tuple(lines), low / air, high * air, True)
    air = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Chart(title, tuple(lines), max(0.0, low - air) if low >= 0 else low - air, high + air)


def extent(values: Any) -> tuple[float, float]:
    pairs = [(float(v.min()), float(v.max())) for v in values]
    return min(low for low, _ in pairs), max(high for _, high in pairs)


def smoothed(values: np.ndarray, half: int) -> np.ndarray:
    """(n,) → (n,): the mean of the 2·half + 1 points around each, fewer at the ends; it does not lag."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def thinned(x: np.ndarray, y: np.ndarray, columns: int = COLUMNS) -> tuple[np.ndarray, np.ndarray]:
    """At most two points a column, its lowest and its highest in their order: no peak is lost, as with every n-th."""
    size = math.ceil(len(x) / columns)
    if size <= 2:
        return x, y
    whole = len(x) // size * size
    blocks, rest = y[:whole].reshape(-1, size), y[whole:]
    start = np.arange(0, whole, size)
    pairs = np.sort(np.stack((blocks.argmin(1) + start, blocks.argmax(1) + start), axis=1), axis=1).ravel()
    tail = sorted((whole + rest.argmin(), whole + rest.argmax())) if len(rest) else []
    keep = np.concatenate(([0], pairs, tail, [len(x) - 1])).astype(int)
    keep = keep[np.concatenate(([True], keep[1:] > keep[:-1]))]
    return x[keep], y[keep]


def facts(table: Columns, about: About) -> tuple[tuple[str, str], ...]:
    """(label, value) for the line above the charts; what is not known is left out."""
    row = table.ended
    if row is None:
        return ()
    total = f" of {about.epochs}" if about.epochs else ""
    shown = [("epoch", f"{row['epoch'] + 1}{total}"), ("step", f"{row['step']:,}")]
    if "samples_per_s" in row:
        shown.append(("samples/s", f"{row['samples_per_s']:,.0f}"))
    if "data_wait" in row:
        shown.append(("waiting for data", f"{100 * row['data_wait']:.0f} %"))
    used = row.get("gpu_memory_reserved", row.get("memory"))
    if used is not None:
        shown.append(("memory", f"{used / 1024:.1f} GiB" if used >= 1024 else f"{used:.0f} MiB"))
    left = time_left(table, about)
    if left:
        shown.append(("left", duration(left)))
    elif left == 0:
        shown.append(
            ("took", duration(sum(r.get("epoch_time", 0) + r.get("eval_time", 0) for r in table.rows["epoch"])))
        )
    found = best(table, about.best)
    if found:
        shown.append((f"best {about.best.lstrip('-')}", f"{number(found[0])} in epoch {found[1]}"))
    return tuple(shown)


def best(table: Columns, metric: str) -> tuple[float, int] | None:
    """(value, epoch counted from 1) of the best evaluation so far."""
    name, sign = f"val_{metric.lstrip('-')}", -1 if metric.startswith("-") else 1
    rows = [row for row in table.rows["epoch"] if isinstance(row.get(name), (int, float)) and math.isfinite(row[name])]
    top = max(rows, key=lambda row: sign * row[name], default=None)
    return None if top is None else (top[name], top["epoch"] + 1)


def progress(table: Columns, about: About) -> float | None:
    """The share of the run's samples that is done, once the length of the run is known."""
    if table.ended is None or not about.epochs or not about.epoch_samples:
        return None
    return min(1.0, table.ended["samples"] / (about.epochs * about.epoch_samples))


def time_left(table: Columns, about: About) -> float | None:
    """Seconds to the end: what is left of samples at the recent pace, and the evaluations at what they took so far."""
    done = progress(table, about)
    pace = [row["samples_per_s"] for row in table.rows["step"][-40:] if row.get("samples_per_s")]
    if done is None or not pace:
        return None
    epochs = (1 - done) * (about.epochs or 0)
    ended = table.rows["epoch"]
    evaluation = sum(row.get("eval_time", 0) for row in ended) / max(len(ended), 1)
    return epochs * ((about.epoch_samples or 0) / float(np.median(pace)) + evaluation)
