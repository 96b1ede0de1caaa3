"""The facts above the curves: how far a run is, how long it takes, what the machine reads, its state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nbtools.live.columns import Columns
from nbtools.measure import REASONS
from nbtools.table import duration, number, percent, size

IDLE = REASONS[0x1]


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


def mebibytes(count: float) -> str:
    return size(count * 2**20)


def watt_hours(energy: float) -> str:
    return f"{energy / 1000:.2f} kWh" if energy >= 1000 else f"{energy:.3g} Wh"


READINGS = (
    ("samples_per_s", "samples/s", number),
    ("data_wait", "waiting for data", percent),
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
