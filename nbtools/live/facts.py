"""The facts above the curves: the state of a run, how far it is and when it ends, its best so far, what the machine
reads."""

from __future__ import annotations

import time
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

import numpy as np

from nbtools.data import batches_in
from nbtools.live.chart import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION, Picture
from nbtools.live.columns import Columns, spent, taken
from nbtools.measure import REASONS
from nbtools.show import EMPTY, duration, header, number, percent, size
from nbtools.train import Diverged, order

IDLE = REASONS[0x1]
STARTING = "starting"
COMPILING, TRAINING, EVALUATING, MEASURING, PAUSED = "compiling", "training", "evaluating", "measuring", "paused"
DONE, STOPPED, DIVERGED, FAILED = "done", "stopped", "diverged", "failed"
OVER = (DONE, STOPPED, DIVERGED, FAILED, "interrupted")
HUES = {
    COMPILING: PURPLE,
    TRAINING: BLUE,
    EVALUATING: SKY,
    MEASURING: PURPLE,
    PAUSED: ORANGE,
    DONE: GREEN,
    DIVERGED: VERMILLION,
    FAILED: VERMILLION,
}
GREY = "#7d7d7d"  # of any other state

AGAIN = {
    STOPPED: "run {it} again to continue; ",
    "interrupted": "run {it} again to continue; ",
    DIVERGED: "change what the error says and run {it} again to continue; ",
    FAILED: "mend what the error says and run {it} again to continue; ",
}
"""What to do after a run has ended so, before it is said where its model is. it: what ran it."""

CELLS = 7  # the state, and as many as `facts` returns
STYLE = f"""
.nbt-top>div{{display:grid;grid-template-columns:repeat(auto-fill,minmax(126px,1fr));gap:0 18px;white-space:nowrap}}
.nbt-top>div>div{{height:36px;overflow:hidden}}
.nbt-top span,.nbt-top b{{display:block;line-height:18px;overflow:hidden;text-overflow:ellipsis}}
.nbt-top span{{font-size:11px;opacity:.75}}
.nbt-top b{{font-size:14px}}
.nbt-top i{{display:inline-block;width:9px;height:9px;border-radius:5px;margin-right:6px}}
.nbt-top>p{{height:4px;margin:5px 0 6px;border-radius:2px;background:rgba(128,128,128,.25);overflow:hidden}}
.nbt-top>p>u{{display:block;height:4px;background:{BLUE}}}
"""
"""Places of equal width, the last one for what is out of the ordinary: nothing moves when it comes."""


@dataclass(frozen=True)
class About:
    """What a history does not record about its run: its name, its planned length, and which metric is the main one
    (`whole_accuracy`, or `-cer` where lower is better); warmup in epochs."""

    title: str = ""
    epochs: int | None = None
    epoch_samples: int | None = None
    best: str = ""
    warmup: float = 0.0


def ended(error: BaseException | None, stopped: bool) -> str:
    """The state of a run whose training has ended: by itself, in an error, or because somebody stopped it."""
    if isinstance(error, Diverged):
        return DIVERGED
    if stopped or isinstance(error, KeyboardInterrupt):
        return STOPPED
    return DONE if error is None else FAILED


class Fact(NamedTuple):
    """What stands above the curves; more: what a hover adds."""

    label: str
    value: str
    more: str = ""


def facts(columns: Columns, about: About, status: str, now: float | None = None) -> tuple[Fact, ...]:
    """Return epoch, time, best, speed and memory, in places that stay; after them what is out of the ordinary. now:
    seconds since 1970."""
    if columns.ended is None:
        return ()
    memory = next((name for name in MEMORY if columns.newest(name) is not None), "memory")
    shown = (
        epoch(columns, about),
        clock(columns, about, status, time.time() if now is None else now),
        *([record(columns, about.best)] if about.best else []),
        Fact("samples/s", number(mean_pace(columns) if status in OVER else columns.newest("samples_per_s") or 0.0)),
        Fact(MEMORY[memory], size((columns.newest(memory) or 0.0) * 2**20)),
    )
    return (*shown, unusual(columns))


def unusual(columns: Columns) -> Fact:
    """Return what limits the run, if anything does."""
    waiting, reasons = columns.newest("data_wait") or 0.0, throttled(columns)
    if waiting > NOTABLE:
        return Fact("waiting for data", percent(waiting))
    return Fact("GPU throttled by", reasons) if reasons else Fact("", "")


def epoch(columns: Columns, about: About) -> Fact:
    row, total = columns.ended or {}, steps(columns, about)
    of, step = f" of {about.epochs}" if about.epochs else "", f"step {row['step']:,}"
    return Fact("epoch", f"{row['epoch'] + 1}{of}", f"{step} of {total:,}" if total else step)


def clock(columns: Columns, about: About, status: str, now: float) -> Fact:
    """Return how long the run took, or the time left."""
    took = duration(spent(columns)[1][-1])
    if status in OVER or not about.epochs:
        return Fact("took" if status in OVER else "elapsed", took)
    left = time_left(columns, about)
    if not left:
        return Fact("time left", EMPTY, f"{took} so far")
    day = "%a " if left > 20 * 3600 else ""
    ends = time.strftime(f"{day}%H:%M %Z", time.localtime(now + left)).strip()
    return Fact("time left", duration(left), f"{took} so far" + ("" if status == PAUSED else f"; ends at {ends}"))


def record(columns: Columns, metric: str) -> Fact:
    """Return the best evaluation so far."""
    so_far, name = best(columns, metric), f"best {header(metric.lstrip('-'))}"
    return Fact(name, number(so_far[0]), f"in epoch {so_far[1]}") if so_far else Fact(name, EMPTY)


def html(shown: Picture) -> str:
    """Return name and state, the facts, and a bar of the run's share that is done; a page needs STYLE once. All text
    is escaped."""
    dot = f'<i style="background:{HUES.get(shown.state, GREY)}"></i>' if shown.state else ""
    cells = [(shown.title, shown.state, shown.title), *(shown.facts or [Fact("", "waiting for the first step")])]
    cells += [Fact("", "")] * (CELLS - len(cells))
    each = [
        f'<div title="{escape(more or value)}"><span>{escape(label) or "&#160;"}</span>'
        f"<b>{dot * (i == 0)}{escape(value)}</b></div>"
        for i, (label, value, more) in enumerate(cells)
    ]
    bar = f'<p><u style="width:{100 * (shown.share or 0):.1f}%"></u></p>'
    return f'<div class="nbt"><div class="nbt-top"><div>{"".join(each)}</div>{bar}</div></div>'


def steps(columns: Columns, about: About) -> int | None:
    """Steps of the whole run, those that are left with the present batch size; None where its length is unknown."""
    row, batch, count = columns.ended, columns.newest("batch_size"), about.epoch_samples
    if row is None or not batch or not count or not about.epochs:
        return None
    left = max(about.epochs * count - row["samples"], 0)
    return row["step"] + batches_in(left % count, int(batch)) + left // count * batches_in(count, int(batch))


MEMORY = {"gpu_memory_reserved": "GPU memory", "memory": "memory"}  # the first that is known
NOTABLE = 0.05  # share of the time that a run waits for data, above which it is shown


def throttled(columns: Columns) -> str:
    """What limits the GPU's clocks; idle does not count."""
    reasons = str((columns.ended or {}).get("gpu_throttle") or "").split(", ")
    return ", ".join(reason for reason in reasons if reason and reason != IDLE)


def best(columns: Columns, metric: str) -> tuple[float, int] | None:
    """(value, epoch counted from 1) of the best evaluation at an epoch's end so far."""
    steps, values = columns.series(f"val_{metric.lstrip('-')}", "epoch")
    losses = dict(zip(*columns.series("val_loss", "epoch"), strict=True))
    if not len(values):
        return None
    sign = -1.0 if metric.startswith("-") else 1.0
    at = max(range(len(values)), key=lambda i: (*order(values[i], losses.get(steps[i]), sign), i))
    ends, epochs = columns.series("epoch", "epoch")
    return float(values[at]), int(epochs[np.searchsorted(ends, steps[at])]) + 1


def progress(columns: Columns, about: About) -> float | None:
    """The share of the run's samples that is done, once the length of the run is known."""
    if columns.ended is None or not about.epochs or not about.epoch_samples:
        return None
    return min(1.0, columns.ended["samples"] / (about.epochs * about.epoch_samples))


def time_left(columns: Columns, about: About) -> float | None:
    """Seconds to the end by the clock: the samples left at the recent pace, watchers included, measured anew after a
    change of settings, and the evaluations at their mean time so far."""
    done, pace = progress(columns, about), recent_pace(columns)
    if done is None or not pace:
        return None
    epochs = (1 - done) * (about.epochs or 0)
    evaluations = columns.series("eval_time", "epoch")[1]
    ended = max(len(columns.series("step", "epoch")[0]), 1)
    return epochs * ((about.epoch_samples or 0) / pace + float(evaluations.sum()) / ended)


def mean_pace(columns: Columns) -> float:
    """Return the samples a second by the clock, without evaluations, of the whole run."""
    steps, wall = columns.series("wall", "step")
    seconds = wall[-1] - evaluated(columns, steps)[-1] if len(wall) else 0.0
    return float(taken(columns)[1][-1] / seconds) if seconds > 0 else columns.newest("samples_per_s") or 0.0


def recent_pace(columns: Columns) -> float | None:
    """Samples a second by the clock, without evaluations, over the last logged steps: those after the last change, if
    there are two; from a single one its own speed."""
    (steps, wall), (_, speed) = columns.series("wall", "step"), columns.series("samples_per_s", "step")
    if len(steps) < 2:
        return float(speed[-1]) or None if len(speed) else None
    samples, seconds = np.interp(steps, *taken(columns)), wall - evaluated(columns, steps)
    changed = columns.changes[-1]["step"] if columns.changes else 0
    recent = np.flatnonzero(steps > changed)[-40:] if (steps > changed).any() else np.arange(len(steps))[-40:]
    first, last = recent[0], recent[-1]
    if first == last or seconds[last] <= seconds[first]:
        return float(speed[-1]) or None
    return float((samples[last] - samples[first]) / (seconds[last] - seconds[first]))


def evaluated(columns: Columns, steps: np.ndarray) -> np.ndarray:
    """Seconds of the evaluations before each of the steps."""
    ends, seconds = columns.series("eval_time", "epoch", "evaluation")
    return np.concatenate(([0.0], np.cumsum(seconds)))[np.searchsorted(ends, steps, side="left")]
