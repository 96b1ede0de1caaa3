"""What a run's picture shows, decided apart from how it is drawn: columns of a History → charts, marks and facts."""

from __future__ import annotations

import re

import numpy as np

from nbtools.live.plot.axis import Scale, number, scientific
from nbtools.live.plot.chart import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    About,
    Chart,
    Line,
    Picture,
    airy,
    averaged,
    extent,
    smoothed,
    thinned,
)
from nbtools.live.plot.columns import Columns
from nbtools.live.plot.facts import badges, best, facts, progress, samples_per_s
from nbtools.live.plot.marks import marks

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
