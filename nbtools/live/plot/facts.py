"""What stands above the charts: how far a run is, how fast, what it uses, what holds it back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nbtools.live.plot.axis import duration, number
from nbtools.live.plot.chart import ORANGE, VERMILLION, About, Badge
from nbtools.live.plot.columns import Columns
from nbtools.measure import REASONS

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
    """Seconds to the end: what is left of samples at the recent pace, which counts anew where a knob was turned, and
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
