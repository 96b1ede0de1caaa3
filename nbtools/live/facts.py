"""The facts above the curves: how far a run has come, when it ends, its best; and the same as lines of text."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from time import localtime, strftime, time
from typing import NamedTuple

import numpy as np

from nbtools.data import Pack, choose
from nbtools.live.plot import Columns, curve_of
from nbtools.measure import machine
from nbtools.show import EMPTY, digits, duration, number, percent, size
from nbtools.train import Record, TrainState, order

STARTING, COMPILING, TRAINING, EVALUATING = "starting", "compiling", "training", "evaluating"
MEASURING, PAUSED = "measuring", "paused"
DONE, STOPPED, DIVERGED, FAILED = "done", "stopped", "diverged", "failed"
OVER = (DONE, STOPPED, DIVERGED, FAILED, "interrupted")
LAST = 200  # logged steps, evaluations between them included, whose pace says how much time is left
NOTABLE = 0.05  # share of the time that a run waits for data, above which it is shown


@dataclass(frozen=True)
class About:
    """Hold what a history does not record about its run: its name, its planned length, which metric is the main one
    (`whole_accuracy`, or `-cer` where lower is better), and since which step this machine trains it."""

    title: str = ""
    epochs: int = 0
    epoch_samples: int = 0
    best: str = ""
    since: int = 0

    @property
    def samples(self) -> int:
        return self.epochs * self.epoch_samples


class Fact(NamedTuple):
    """more: what a hover adds; column: whose values are drawn below it, as a small line from 0."""

    label: str
    value: str
    more: str = ""
    column: str = ""


def facts(columns: Columns, about: About, status: str) -> Iterator[Fact]:
    """Yield state, epoch, time, best, speed and memory, always in the same places; then what is out of the ordinary."""
    yield Fact(about.title, status)
    if columns.newest is None:
        yield Fact("", "figures appear after a few steps")
        return
    yield Fact("epoch", f"{columns.newest['epoch'] + 1} of {about.epochs}", f"step {columns.newest['step']:,}")
    seconds, left = columns.since("wall")[1][-1], time_left(columns, about)
    if status in OVER:
        yield Fact("took", duration(seconds))
    else:
        ends = strftime("; ends at %a %H:%M %Z", localtime(time() + left)) if left and status != PAUSED else ""
        yield Fact("time left", duration(left) if left else EMPTY, f"{duration(seconds)} so far{ends}")
    if about.best:
        yield best(columns, about.best)
    over = status in OVER and seconds > 0  # then both figures are of the whole run, by the clock
    speed = columns.since("samples")[1][-1] / seconds if over else columns.last("samples_per_s")
    yield Fact("samples/s", number(speed or 0.0), "", "samples_per_s")
    gpu = columns.last("gpu_memory_reserved") is not None
    label, memory = ("GPU memory", "gpu_memory_reserved") if gpu else ("memory", "memory")
    yield Fact(label, size((columns.last(memory) or 0) * 2**20), "", memory)
    waits = columns.series("data_wait")[1][0 if over else -20 :]  # what comes and goes moves the charts
    if len(waits) and (waiting := float(waits.mean())) > NOTABLE:
        yield Fact("waiting for data", percent(waiting), "", "data_wait")


def best(columns: Columns, metric: str) -> Fact:
    """Return the best evaluation at an epoch's end so far. metric: with a minus where lower is better."""
    name, sign = metric.lstrip("-"), -1.0 if metric.startswith("-") else 1.0
    column, label = f"val_{name}", f"best {name.replace('_', ' ')}"
    rows = [row for row in columns.epochs if isinstance(row.get(column), (int, float)) and math.isfinite(row[column])]
    if not rows:
        return Fact(label, EMPTY)
    row = max(reversed(rows), key=lambda row: order(row[column], row.get("val_loss"), sign))  # the last of equal ones
    return Fact(label, number(row[column]), f"in epoch {row['epoch'] + 1}")


def time_left(columns: Columns, about: About) -> float | None:
    """Return seconds to the end of the run, at the pace of the last logged steps since the last change."""
    at, wall = columns.series("wall", "step")
    changed = max(columns.changes[-1]["step"] if columns.changes else 0, about.since)
    recent = (np.flatnonzero(at > changed) if (at > changed).any() else np.arange(len(at)))[-LAST:]
    samples, took = np.interp(at, *columns.since("samples"))[recent], np.ptp(wall[recent]) if len(recent) else 0.0
    pace = np.ptp(samples) / took if took > 0 else columns.last("samples_per_s")
    if columns.newest is None or not about.samples or not pace:
        return None
    return float(max(about.samples - columns.newest["samples"], 0) / pace)


def html(columns: Columns, about: About, status: str) -> str:
    """Return the facts and a bar of the run's share that is done, for a page with live.css. All text is escaped."""
    dot, role, each = f'<i class="nbt-{escape(status)}"></i>', ' role="status"', []
    for i, (label, value, more, column) in enumerate(facts(columns, about, status)):
        title = escape(f"{label} {value}; {more}".strip("; "))  # of a long name its cell shows only the beginning
        each.append(
            f'<div title="{title}"{role * (not i)}><span>{escape(label) or "&#160;"}</span>'
            f"<b>{dot * (not i)}{escape(value)}</b>{spark(columns, column) if column else ''}</div>"
        )
    share = min(1.0, columns.newest["samples"] / about.samples) if columns.newest and about.samples else 0.0
    bar = f'<u style="width:{100 * share:.1f}%"></u>'
    return f'<div class="nbt"><div class="nbt-top"><div>{"".join(each)}</div><p>{bar}</p></div></div>'


def spark(columns: Columns, name: str) -> str:
    """Return a column's values over the run as a small line from 0."""
    line = curve_of(name, columns.series(name), "currentColor")
    top, end = float(line.y.max(initial=0.0)) or 1.0, float(line.x[-1]) if len(line.x) else 1.0
    points = np.stack([100 * line.x / end, 15 - 14 * np.maximum(line.y, 0) / top], 1).round(1).ravel().tolist()
    curve = f'<polyline points="{str(points)[1:-1]}" stroke="{line.colour}" stroke-opacity=".6"/>'
    return f'<svg viewBox="0 0 100 16" preserveAspectRatio="none" aria-hidden="true">{curve}</svg>'


def opening(state: TrainState, pack: Pack) -> str:
    """Return what a run starts or resumes with: device, the settings that matter most, and how many steps it takes."""
    plan, processes = state.plan, state.ranks.world
    batch = f"batch {plan.batch_size}{f' on {processes} processes' if processes > 1 else ''}"
    precision, feed = "float32" if plan.amp == "off" else plan.amp, choose(pack, plan, state.device)[0]
    settings = f"{batch}, lr {digits(plan.lr)} ({plan.schedule}), {plan.optimizer}, {precision}, {feed} feed"
    begun = f"; from step {state.step:,}, in epoch {state.epoch + 1} of {plan.epochs}" if state.step else ""
    here = machine(state.device)
    return f"{here['device']}, {here['cores']}: {settings}; {plan.length_of(pack.splits['train'])}{begun}"


def line_of(record: Record, about: About) -> list[str]:
    """Return the fields of an epoch, or of an evaluation between steps, the most important first."""
    names = {"train_loss": "train", "val_loss": "val"}
    shown = [
        f"{names.get(name, name.removeprefix('val_').replace('accuracy', 'acc'))} {number(value)}"
        for name, value in record.values.items()
        if name.startswith(("train_", "val_"))
    ]
    if record.kind == "evaluation":
        return [f"step {record.step:,}", *shown]
    lr, speed = digits(record.values["lr"]), number(record.values["samples_per_s"])
    return [f"epoch {record.epoch + 1} of {about.epochs}", *shown, f"lr {lr}", f"{speed} samples/s"]
