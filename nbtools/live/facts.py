"""The facts above the curves: the state of a run, how far it is and when it ends, its best so far, what the machine
reads; and the same as lines of text, for a terminal, a notebook and a log file."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

import numpy as np

from nbtools.data import Pack, choose
from nbtools.live.plot import Columns, thinned
from nbtools.measure import machine
from nbtools.show import EMPTY, digits, duration, header, number, percent, size
from nbtools.train import Diverged, Record, TrainState, length_of, order

STARTING, COMPILING, TRAINING, EVALUATING = "starting", "compiling", "training", "evaluating"
MEASURING, PAUSED = "measuring", "paused"
DONE, STOPPED, DIVERGED, FAILED = "done", "stopped", "diverged", "failed"
OVER = (DONE, STOPPED, DIVERGED, FAILED, "interrupted")
LAST = 200  # logged steps, evaluations between them included, whose pace says how much time is left
NOTABLE = 0.05  # share of the time that a run waits for data, above which it is shown


@dataclass(frozen=True)
class About:
    """What a history does not record about its run: its name, its planned length, and which metric is the main one
    (`whole_accuracy`, or `-cer` where lower is better)."""

    title: str = ""
    epochs: int = 0
    epoch_samples: int = 0
    best: str = ""

    @property
    def samples(self) -> int:
        return self.epochs * self.epoch_samples

    def place(self, epoch: int) -> str:
        """Return `3 of 8` for the epoch that counts as 2 from 0."""
        return f"{epoch + 1:,}{f' of {self.epochs}' if self.epochs else ''}"


class Fact(NamedTuple):
    """more: what a hover adds; column: whose values are drawn below it, as a small line from 0."""

    label: str
    value: str
    more: str = ""
    column: str = ""


def ended(error: BaseException | None, stopped: bool) -> str:
    """Return the state of a run whose training has ended: by itself, in an error, or because somebody stopped it."""
    if isinstance(error, Diverged):
        return DIVERGED
    if stopped or isinstance(error, KeyboardInterrupt):
        return STOPPED
    return DONE if error is None else FAILED


def facts(columns: Columns, about: About, status: str) -> Iterator[Fact]:
    """Yield state, epoch, time, best, speed and memory, in places that stay; after them what is out of the ordinary."""
    yield Fact(about.title, status, about.title)
    if columns.ended is None:
        yield Fact("", "waiting for the first step")
        return
    yield Fact("epoch", about.place(columns.ended["epoch"]), f"step {columns.ended['step']:,}")
    yield clock(columns, about, status)
    if about.best:
        top = best(columns, about.best)
        name = f"best {header(about.best.lstrip('-'))}"
        yield Fact(name, number(top[0]), f"in epoch {top[1]}") if top else Fact(name, EMPTY)
    speed = mean_pace(columns) if status in OVER else columns.newest("samples_per_s")
    yield Fact("samples/s", number(speed or 0.0), "", "samples_per_s")
    gpu = columns.newest("gpu_memory_reserved")
    label, memory = ("GPU memory", "gpu_memory_reserved") if gpu is not None else ("memory", "memory")
    yield Fact(label, size((columns.newest(memory) or 0) * 2**20), "", memory)
    if (waiting := columns.newest("data_wait") or 0.0) > NOTABLE:
        yield Fact("waiting for data", percent(waiting), "", "data_wait")


def clock(columns: Columns, about: About, status: str) -> Fact:
    """Return how long the run took, or the time left."""
    took = duration(columns.since("wall")[1][-1])
    if status in OVER or not about.epochs:
        return Fact("took" if status in OVER else "elapsed", took)
    left = time_left(columns, about)
    if not left or status == PAUSED:
        return Fact("time left", duration(left) if left else EMPTY, f"{took} so far")
    ends = time.strftime("%a %H:%M %Z", time.localtime(time.time() + left)).strip()
    return Fact("time left", duration(left), f"{took} so far; ends at {ends}")


def html(columns: Columns, about: About, status: str) -> str:
    """Return the facts and a bar of the run's share that is done, for a page with live.css. All text is escaped."""
    dot, each = f'<i class="nbt-{escape(status)}"></i>', []
    for i, (label, value, more, column) in enumerate(facts(columns, about, status)):
        role = ' role="status"' if not i else ""
        each.append(
            f'<div title="{escape(more or value)}"{role}><span>{escape(label) or "&#160;"}</span>'
            f"<b>{dot * (not i)}{escape(value)}</b>{spark(columns, column) if column else ''}</div>"
        )
    share = min(1.0, columns.ended["samples"] / about.samples) if columns.ended and about.samples else 0.0
    bar = f'<p><u style="width:{100 * share:.1f}%"></u></p>'
    return f'<div class="nbt"><div class="nbt-top"><div>{"".join(each)}</div>{bar}</div></div>'


def spark(columns: Columns, name: str) -> str:
    """Return a column's values over the run as a small line from 0."""
    x, y = thinned(*columns.either(name))
    top, end = float(y.max(initial=0.0)) or 1.0, float(x[-1]) if len(x) else 1.0
    points = np.stack([100 * x / end, 15 - 14 * np.maximum(y, 0) / top], 1).round(1).ravel().tolist()
    line = f'<polyline points="{str(points)[1:-1]}" stroke="currentColor" stroke-opacity=".6"/>'
    return f'<svg viewBox="0 0 100 16" preserveAspectRatio="none" aria-hidden="true">{line}</svg>'


def best(columns: Columns, metric: str) -> tuple[float, int] | None:
    """Return (value, epoch counted from 1) of the best evaluation at an epoch's end so far."""
    at_steps, values = columns.series(f"val_{metric.lstrip('-')}", "epoch")
    losses = dict(zip(*columns.series("val_loss", "epoch"), strict=True))
    if not len(values):
        return None
    sign = -1.0 if metric.startswith("-") else 1.0
    at = max(range(len(values)), key=lambda i: (*order(values[i], losses.get(at_steps[i]), sign), i))
    ends, epochs = columns.series("epoch", "epoch")
    return float(values[at]), int(epochs[np.searchsorted(ends, at_steps[at])]) + 1


def time_left(columns: Columns, about: About) -> float | None:
    """Return seconds to the end of the run, at the pace of the last logged steps since the last change."""
    at, wall = columns.series("wall", "step")
    changed = columns.changes[-1]["step"] if columns.changes else 0
    recent = (np.flatnonzero(at > changed) if (at > changed).any() else np.arange(len(at)))[-LAST:]
    samples, took = np.interp(at, *columns.since("samples"))[recent], np.ptp(wall[recent]) if len(recent) else 0.0
    pace = np.ptp(samples) / took if took > 0 else columns.newest("samples_per_s")
    if columns.ended is None or not about.samples or not pace:
        return None
    return float(max(about.samples - columns.ended["samples"], 0) / pace)


def mean_pace(columns: Columns) -> float | None:
    """Return the samples a second of the whole run by the clock."""
    seconds = columns.since("wall")[1][-1]
    return float(columns.since("samples")[1][-1] / seconds) if seconds > 0 else None


# -- lines of text


def opening(state: TrainState, pack: Pack) -> str:
    """Return what a run starts or resumes with: device, the settings that matter most, and how many steps it takes."""
    plan, micro, processes = state.plan, state.recovery.micro, state.ranks.world
    largest = math.ceil(plan.batch_size / processes)
    parts = f" in {math.ceil(largest / micro)} parts" if micro is not None and micro < largest else ""
    batch = f"batch {plan.batch_size}{f' on {processes} processes' if processes > 1 else ''}{parts}"
    precision = "float32" if plan.amp == "off" else plan.amp
    feed = f"{choose(pack, plan, state.device)[0]} feed"
    settings = ", ".join([batch, f"lr {digits(plan.lr)} ({plan.schedule})", plan.optimizer, precision, feed])
    begun = f"; from step {state.step:,}, in epoch {state.epoch + 1} of {plan.epochs}" if state.step else ""
    here = machine(state.device)
    return f"{here['device']}, {here['cores']}: {settings}; {length_of(plan, pack.splits['train'])}{begun}"


def line_of(record: Record, columns: Columns, about: About) -> list[str]:
    """Return the fields of an epoch, or of an evaluation between steps, the first those that matter most. columns: of
    the history that ends with it."""
    values, names = record.values, {"train_loss": "train", "val_loss": "val"}
    shown = [
        f"{names.get(name, name.removeprefix('val_').replace('accuracy', 'acc'))} {number(value)}"
        for name, value in values.items()
        if name.startswith(("train_", "val_"))
    ]
    if record.kind == "evaluation":
        return [f"step {record.step:,}", *shown]
    left = [f"{duration(seconds)} left" for seconds in [time_left(columns, about)] if seconds]
    peaks = [values[name] for name in ("gpu_memory_peak", "gpu_memory_allocated", "memory") if values.get(name)]
    readings = [f"{number(values['samples_per_s'])} samples/s", *(size(peak * 2**20) for peak in peaks[:1])]
    return [f"epoch {about.place(record.epoch)}", *shown, f"lr {digits(values['lr'])}", *left, *readings]


def fitting(fields: list[str], room: int) -> str:
    """Return as many fields in a line as it has room for, at least the first."""
    while len(fields) > 1 and len("  ".join(fields)) > room:
        fields = fields[:-1]
    return "  ".join(fields)
