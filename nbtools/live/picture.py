"""What a run's picture shows, decided apart from how it is drawn: the rows of a History → charts, marks and facts."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    Badge,
    Chart,
    Line,
    Mark,
    Picture,
    Scale,
    airy,
    averaged,
    duration,
    extent,
    number,
    scientific,
    smoothed,
    thinned,
)
from nbtools.measure import REASONS
from nbtools.train import History


@dataclass(frozen=True)
class About:
    """What a history does not say of its run: its name, how long it shall be, and which metric is the best one
    (`whole_accuracy`, or `-cer` where lower is better)."""

    title: str = ""
    epochs: int | None = None
    epoch_samples: int | None = None
    best: str = ""


XS = ("step", "samples", "minutes")

Series = tuple[np.ndarray, np.ndarray]
"""(steps, values), both (n,) float64."""


class Columns:
    """Rows by kind, read by column. names: of all numeric columns, in the order of their first row. changes: rows of
    turned knobs. ended: the newest step or epoch row."""

    def __init__(self, history: History | None = None):
        self.clear()
        if history is not None:
            self.follow(history)

    def clear(self) -> None:
        self.count, self.seen = 0, None
        self.found: dict[tuple[str, str], tuple[array[float], array[float]]] = {}
        self.names: dict[str, None] = {}
        self.changes: list[Mapping[str, Any]] = []
        self.ended: Mapping[str, Any] | None = None

    def follow(self, history: History) -> Self:
        """Take over the rows that are new; all of them anew where rows were cut off."""
        rows = history.rows
        if self.count > len(rows) or (self.count and rows[self.count - 1] is not self.seen):
            self.clear()
        for i in range(self.count, len(rows)):
            self.take(rows[i])
        if rows:
            self.count, self.seen = len(rows), rows[-1]
        return self

    def take(self, row: Mapping[str, Any]) -> None:
        kind, step = row["kind"], row["step"]
        if kind == "change":
            self.changes.append(row)
        elif kind in ("step", "epoch"):
            self.ended = row
        for name, value in row.items():
            if isinstance(value, (int, float)) and math.isfinite(value):  # a file edited by hand may hold text
                pair = self.found.get((kind, name))
                if pair is None:
                    pair = self.found[kind, name] = (array("d"), array("d"))
                    self.names.setdefault(name)
                pair[0].append(step)
                pair[1].append(value)

    def series(self, kind: str, name: str) -> Series:
        """(steps, values) float64 of the rows that have a finite number there."""
        steps, values = self.found.get((kind, name), EMPTY)
        return np.array(steps), np.array(values)

    def either(self, name: str) -> Series:
        """The column as logged on steps, else on epochs."""
        return self.series("step" if ("step", name) in self.found else "epoch", name)

    def newest(self, name: str) -> float | None:
        """The last number of that column, where there is one."""
        _, values = self.found.get(("step", name)) or self.found.get(("epoch", name)) or EMPTY
        return values[-1] if values else None

    @property
    def train_loss(self) -> float | None:
        """The train loss of a run, the same number wherever it is shown: the mean over the samples of the last epoch
        that ended, each when it was trained on. Before the first epoch ends: the mean since the last log step."""
        _, epochs = self.series("epoch", "train_loss")
        return float(epochs[-1]) if len(epochs) else self.newest("loss")

    def evaluated(self, name: str) -> Series:
        """A metric at the ends of epochs, and where the user asked for it between them."""
        x, y = self.series("epoch", name)
        if ("evaluation", name) not in self.found:
            return x, y
        between_x, between_y = self.series("evaluation", name)
        x, y = np.concatenate((x, between_x)), np.concatenate((y, between_y))
        order = np.argsort(x, kind="stable")
        return x[order], y[order]


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
    pairs = [columns.series(kind, "samples") for kind in ("step", "epoch", "evaluation")]
    steps, samples = (np.concatenate([[0.0], *parts]) for parts in zip(*pairs, strict=True))
    order = np.argsort(steps, kind="stable")
    return steps[order], samples[order]


def spent(columns: Columns) -> Series:
    """(steps, seconds of training until then): at the epochs' ends, and at the steps logged since the last of them."""
    ends, seconds = columns.series("epoch", "epoch_time")
    steps, speed = columns.series("step", "samples_per_s")
    last = ends[-1] if len(ends) else 0.0
    steps, speed = steps[steps > last], speed[steps > last]
    samples = np.interp(np.concatenate(([last], steps)), *taken(columns))
    since = np.diff(samples) / np.maximum(speed, 1e-9)
    return np.concatenate(([0.0], ends, steps)), np.cumsum(np.concatenate(([0.0], seconds, since)))


METRIC_COLOURS = (GREEN, PURPLE, ORANGE, SKY, BLUE, VERMILLION)
DECADES = 4  # of a logarithmic axis at most: a cosine that ends at 0 would else go on for ever
LR = re.compile(r"(^|, )lr ")  # among the knobs that a change names


def picture(table: Columns, about: About | None = None, status: str = "", over: bool = False) -> Picture:
    """All that a frame shows; over: of a run that nobody trains any more. Without rows there are no charts."""
    about = about or About()
    found = [loss(table), metrics(table, about.best), rate(table), speed(table), use(table), memory(table)]
    charts = tuple(chart for chart in found if chart) if table.ended else ()
    ends = [line.x[-1] for chart in charts for line in chart.lines] + [row["step"] for row in table.changes[-1:]]
    last = float(max(ends, default=1.0)) or 1.0
    return Picture(
        charts=charts,
        last=last,
        marks=marks(table.changes, last),
        facts=facts(table, about, over),
        badges=badges(table, status),
        share=progress(table, about),
        title=about.title,
    )


def loss(table: Columns) -> Chart | None:
    """Train loss as logged (faint) and smoothed, and the validation's; logarithmic when it falls a lot. The number in
    the legend is that of the last epoch, as everywhere, and not the end of the smoothed curve."""
    x, y = train_loss(table)
    at, smooth = calmed(x, y, 1 / 20)
    lines = [Line("", *thinned(x, y), BLUE, "faint")] if len(x) > 8 else []
    if len(x):
        label = "train, last epoch" if ("epoch", "train_loss") in table.found else "train"
        lines.append(Line(label, at, smooth, BLUE, value=number(table.train_loss or 0.0)))
    vx, vy = table.evaluated("val_loss")
    if len(vx):
        lines.append(Line("validation", *thinned(vx, vy), VERMILLION, "points", number(vy[-1])))
    if not lines:
        return None
    return Chart("loss", tuple(lines), falling(*extent(line.y for line in lines)))


def train_loss(table: Columns) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) as logged on steps, else on epochs."""
    x, y = table.series("step", "loss")
    return (x, y) if len(x) else table.series("epoch", "train_loss")


def falling(low: float, high: float) -> Scale:
    """Of a loss: logarithmic when it falls a lot."""
    return airy(low, high, low > 0 and high / low > 30)


def metrics(table: Columns, chosen: str) -> Chart:
    """Every validation metric, 0 to 1 and beyond where one goes there; the best point of the one that counts ringed."""
    lines, top = [], best(table, chosen)
    for name in (n for n in table.names if n.startswith("val_") and n != "val_loss"):
        x, y = table.evaluated(name)
        short = name.removeprefix("val_")
        ring = (top[2], top[0]) if top and short == chosen.lstrip("-") else None
        colour = METRIC_COLOURS[len(lines) % len(METRIC_COLOURS)]
        lines.append(Line(short, *thinned(x, y), colour, "points", number(y[-1]), ring))
    if not lines:
        return Chart("validation metrics", (), Scale(0.0, 1.0), note="after the first evaluation")
    return Chart("validation metrics", tuple(lines), shares(*extent(line.y for line in lines)))


def shares(low: float, high: float) -> Scale:
    """Of metrics: 0 to 1, and beyond where one goes there."""
    return Scale(min(0.0, max(low, -1.0)), max(1.0, min(high, 2.0)))


def rate(table: Columns) -> Chart | None:
    """The learning rate over at least one decade, so that a constant one is no picture of rounding."""
    x, y = rates(table)
    if not len(x):
        return None
    last = table.newest("lr")
    line = Line("lr", *thinned(x, y), VERMILLION, value=scientific(last) if last else "0")
    return Chart("learning rate", (line,), decade(float(y.min()), float(y.max())))


def rates(table: Columns) -> tuple[np.ndarray, np.ndarray]:
    """(steps, lr) that a logarithmic axis shows. A schedule may end at 0, so the axis ends DECADES below its highest
    lr; a schedule lasts from one change of lr to the next, so whatever value the user sets, what came before and
    after it stays in the picture."""
    x, y = table.either("lr")
    turned = sorted(row["step"] for row in table.changes if LR.search(str(row.get("what", ""))))
    highest = np.zeros(len(turned) + 1)
    np.maximum.at(highest, np.searchsorted(turned, x), y)
    shown = y > highest[highest > 0].min(initial=np.inf) / 10**DECADES
    return x[shown], y[shown]


def decade(low: float, high: float) -> Scale:
    return airy(min(low, high / 10), high, True)


def speed(table: Columns) -> Chart | None:
    x, y = table.either("samples_per_s")
    if not len(x):
        return None
    x, calm = calmed(x, y)
    line = Line("samples/s", x, calm, GREEN, value=samples_per_s(y[-1]))
    return Chart("speed", (line,), Scale(0.0, float(calm.max()) * 1.08 or 1.0))


def use(table: Columns) -> Chart | None:
    """How busy the GPU is and how long it waits, in one chart since one explains the other; its power at the right."""
    lines = []
    for name, label, scale, colour in (
        ("gpu_utilisation", "in use", 1, BLUE),
        ("data_wait", "waiting for data", 100, VERMILLION),
    ):
        x, y = table.either(name)
        if len(x):
            lines.append(Line(label, *calmed(x, y * scale), colour, value=f"{y[-1] * scale:.0f} %"))
    x, y = table.either("gpu_power")
    right = None
    if len(x):
        lines.append(Line("power", *calmed(x, y), ORANGE, value=f"{y[-1]:.0f} W", dash=(6, 3), right=True))
        step = round_up(float(y.max()) / 5)
        right = Scale(0.0, 5 * step, step=step)
    if not lines:
        return None
    alone = [line.name for line in lines] == ["waiting for data"]
    return Chart(
        "waiting for data" if alone else "GPU",
        tuple(lines),
        Scale(0.0, 100.0, step=20.0),
        "% of the time",
        right,
        "W" if right else "",
    )


def calmed(x: np.ndarray, y: np.ndarray, part: float = 1 / 50) -> tuple[np.ndarray, np.ndarray]:
    """Smoothed over a part of the line: readings of an instant flicker, and what lasts is seen."""
    x, y = averaged(x, y)
    return x, smoothed(y, int(len(y) * part / 2))


def round_up(value: float) -> float:
    """The next round number: 1, 1.5, 2, 2.5, 3, 4, 5, 6 or 8 times a power of ten."""
    power = 10.0 ** np.floor(np.log10(value)) if value > 0 else 1.0
    return next(float(s * power) for s in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if s * power >= value * 0.999)


def memory(table: Columns) -> Chart | None:
    """GPU memory where the run had a GPU, else that of the process."""
    named = {"gpu_memory_allocated": "allocated", "gpu_memory_reserved": "reserved", "gpu_memory_used": "device"}
    title, found = "GPU memory", [(label, *table.either(name)) for name, label in named.items()]
    if not any(len(x) for _, x, _ in found):
        title, found = "memory", [("of the process", *table.either("memory"))]
    found = [(label, x, y) for label, x, y in found if len(x)]
    if not found:
        return None
    top = max(float(y.max()) for _, _, y in found)
    scale, unit, digits = (1024, "GiB", 1) if top >= 1024 else (1, "MiB", 0)
    lines = [
        Line(label, *thinned(x, y / scale), colour, value=f"{y[-1] / scale:.{digits}f}")
        for (label, x, y), colour in zip(found, (SKY, PURPLE, ORANGE), strict=False)
    ]
    return Chart(title, tuple(lines), Scale(0.0, top / scale * 1.08 or 1.0), unit)


IDLE, POWER_LIMIT = REASONS[0x1], REASONS[0x4]
ALARMING = {REASONS[bit] for bit in (0x8, 0x20, 0x40, 0x80)}  # heat and hardware: slower than what was paid for


def facts(table: Columns, about: About, over: bool) -> tuple[tuple[str, str], ...]:
    """(label, value) in the order of reading; what is not known is left out."""
    row = table.ended
    if row is None:
        return ()
    total = f" of {about.epochs}" if about.epochs else ""
    shown = [("epoch", f"{row['epoch'] + 1}{total}"), ("step", f"{row['step']:,}")]
    left = time_left(table, about)
    if left and not over:
        shown.append(("time left", duration(left)))
    elif over or left == 0:
        shown.append(("took", duration(sum(float(table.series("epoch", n)[1].sum()) for n in TIMES))))
    shown += measured(table)
    found = best(table, about.best)
    if found:
        shown.append((f"best {about.best.lstrip('-')}", f"{number(found[0])} in epoch {found[1]}"))
    return tuple(shown)


TIMES = ("epoch_time", "eval_time")


def measured(table: Columns) -> Iterator[tuple[str, str]]:
    """The newest readings."""
    known = table.newest
    if (speed := known("samples_per_s")) is not None:
        yield "samples/s", samples_per_s(speed)
    if (wait := known("data_wait")) is not None:
        yield "waiting for data", f"{100 * wait:.0f} %"
    if (reserved := known("gpu_memory_reserved")) is not None:
        yield "GPU memory", mebibytes(reserved)
    elif (resident := known("memory")) is not None:
        yield "memory", mebibytes(resident)
    if (use := known("gpu_utilisation")) is not None:
        yield "GPU use", f"{use:.0f} %"
    if (power := known("gpu_power")) is not None:
        yield "power", f"{power:.0f} W"
    if (energy := known("gpu_energy")) is not None:
        yield "energy", watt_hours(energy)


def samples_per_s(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"


def mebibytes(count: float) -> str:
    return f"{count / 1024:.1f} GiB" if count >= 1024 else f"{count:.0f} MiB"


def watt_hours(energy: float) -> str:
    return f"{energy / 1000:.2f} kWh" if energy >= 1000 else f"{energy:.3g} Wh"


def badges(table: Columns, status: str) -> tuple[Badge, ...]:
    """What the run does, and what holds its GPU's clocks back: a GPU that has nothing to do is no trouble."""
    found = [Badge(status)] if status else []
    said = str((table.ended or {}).get("gpu_throttle") or "")
    for reason in (part.strip() for part in said.split(",")):
        if reason and reason != IDLE:
            colour = VERMILLION if reason in ALARMING else ORANGE if reason == POWER_LIMIT else ""
            found.append(Badge(f"GPU held back: {reason}", colour))
    return tuple(found)


def best(table: Columns, metric: str) -> tuple[float, int, float] | None:
    """(value, epoch counted from 1, step) of the best evaluation at an epoch's end so far."""
    steps, values = table.series("epoch", f"val_{metric.lstrip('-')}")
    if not len(values):
        return None
    at = int(values.argmin() if metric.startswith("-") else values.argmax())
    ends, epochs = table.series("epoch", "epoch")
    return float(values[at]), int(epochs[np.searchsorted(ends, steps[at])]) + 1, float(steps[at])


def progress(table: Columns, about: About) -> float | None:
    """The share of the run's samples that is done, once the length of the run is known."""
    if table.ended is None or not about.epochs or not about.epoch_samples:
        return None
    return min(1.0, table.ended["samples"] / (about.epochs * about.epoch_samples))


def time_left(table: Columns, about: About) -> float | None:
    """Seconds to the end: what is left of samples at the recent pace, which starts anew after a change of settings, and
    the evaluations at what they took so far."""
    done = progress(table, about)
    steps, pace = table.series("step", "samples_per_s")
    steps, pace = steps[pace > 0][-40:], pace[pace > 0][-40:]
    since = steps > table.changes[-1]["step"] if table.changes else np.zeros(len(steps), bool)
    pace = pace[since] if since.any() else pace
    if done is None or not len(pace):
        return None
    epochs = (1 - done) * (about.epochs or 0)
    evaluations = table.series("epoch", "eval_time")[1]
    ended = max(len(table.series("epoch", "step")[0]), 1)
    return epochs * ((about.epoch_samples or 0) / float(np.median(pace)) + float(evaluations.sum()) / ended)


CHARACTER = 1 / 40  # of a chart's width, where it is as narrow as it gets
LINES = 12  # marks at most that are whole lines: behind more, the curves would be lost
DIGITS = re.compile(r"\d+\.\d{4,}")  # of a lr by rule
SHORTEST, ROWS, NAMES = 14, 3, 6  # of the names of marks: characters of one, rows, and how many


def marks(changes: Sequence[Mapping[str, Any]], last: float) -> tuple[Mark, ...]:
    """A mark a turned knob; the last ones with names as stairs that rise to the right or to the left, whichever says
    more, so that no mark's line crosses another one's name."""
    turned = [(float(row["step"]), DIGITS.sub(rounded, str(row.get("what", "")))) for row in changes]
    rising, falling = arranged(turned[-NAMES:], last, -1), arranged(turned[: -NAMES - 1 : -1], last, 1)[::-1]
    places = max(rising, falling, key=lambda stairs: sum(len(place.name) for place in stairs))
    found = [Mark(x, what, short=len(turned) > LINES) for x, what in turned[:-NAMES]]
    for (x, what), place in zip(turned[-NAMES:], places, strict=True):
        found.append(Mark(x, what, place.name, place.side, place.row))
    return tuple(found)


def rounded(digits: re.Match[str]) -> str:
    return f"{float(digits[0]):.3g}"


def arranged(turned: Sequence[tuple[float, str]], last: float, side: int) -> list[Place]:
    """Places one after another, the names on one side where they fit there."""
    places: list[Place] = []
    for x, what in turned:
        places.append(placed(x / last, what, [place for place in places if place.name], side))
    return places


@dataclass(frozen=True)
class Place:
    """Of a mark's name: at and what it covers, low … high, in shares of the width."""

    at: float
    low: float
    high: float
    row: int = 0
    side: int = 1
    name: str = ""


def placed(at: float, what: str, taken: Sequence[Place], first: int) -> Place:
    """The lowest row and the side where a name fits whole between what is taken, else where most of it does."""
    found = Place(at, at, at)
    for row in range(ROWS):
        if any(other.row <= row and other.low <= at <= other.high for other in taken):
            break  # its line would cross that name
        walls = [0.0, 1.0, *(other.at for other in taken if other.row >= row)]
        walls += [edge for other in taken if other.row == row for edge in (other.low, other.high)]
        for side in (first, -first):
            room = min(abs(wall - at) for wall in walls if (wall - at) * side >= 0)
            most = int(room / CHARACTER) - 1
            if most >= min(len(what), SHORTEST) and most > len(found.name):
                name = what if len(what) <= most else what[: most - 1] + "…"
                end = at + side * (len(name) + 1) * CHARACTER
                found = Place(at, min(at, end), max(at, end), row, side, name)
            if found.name == what:
                return found
    return found
