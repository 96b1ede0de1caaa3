"""The facts above the curves: the state of a run, how far it is and when it ends, its best so far, what the machine
reads; and the same as lines of text, for a terminal, a notebook and a log file."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

import numpy as np

from nbtools.data import Pack, choose
from nbtools.live.columns import Columns
from nbtools.live.plot import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION, thinned
from nbtools.measure import described
from nbtools.show import EMPTY, digits, duration, header, number, percent, size
from nbtools.train import Diverged, Record, TrainState, length_of, order

STARTING, COMPILING, TRAINING, EVALUATING = "starting", "compiling", "training", "evaluating"
MEASURING, PAUSED = "measuring", "paused"
DONE, STOPPED, DIVERGED, FAILED = "done", "stopped", "diverged", "failed"
OVER = (DONE, STOPPED, DIVERGED, FAILED, "interrupted")
HUES = {TRAINING: BLUE, EVALUATING: SKY, COMPILING: PURPLE, MEASURING: PURPLE, PAUSED: ORANGE, DONE: GREEN}
HUES |= {DIVERGED: VERMILLION, FAILED: VERMILLION}
GREY = "#7d7d7d"  # of any other state
OPENING = "opening"  # marks the event with these lines, where the process that trains is not the one that shows them
LAST = 200  # logged steps, evaluations between them included, whose pace says how much time is left
NOTABLE = 0.05  # share of the time that a run waits for data, above which it is shown
STYLE = f"""
.nbt-top>div{{display:grid;grid-template-columns:repeat(auto-fill,minmax(118px,1fr));gap:0 18px;white-space:nowrap}}
.nbt-top>div>div{{height:54px;overflow:hidden}}
.nbt-top span,.nbt-top b{{display:block;line-height:18px;overflow:hidden;text-overflow:ellipsis}}
.nbt-top span{{font-size:11px;opacity:.75}}
.nbt-top b{{font-size:14px}}
.nbt-top i{{display:inline-block;width:9px;height:9px;border-radius:5px;margin-right:6px}}
.nbt .nbt-top svg{{width:100%;height:16px;display:block}}
.nbt-top>p{{height:4px;margin:2px 0 6px;border-radius:2px;background:rgba(128,128,128,.25);overflow:hidden}}
.nbt-top>p>u{{display:block;height:4px;background:{BLUE}}}
"""


@dataclass(frozen=True)
class About:
    """What a history does not record about its run: its name, its planned length, and which metric is the main one
    (`whole_accuracy`, or `-cer` where lower is better); warmup in epochs."""

    title: str = ""
    epochs: int | None = None
    epoch_samples: int | None = None
    best: str = ""
    warmup: float = 0.0


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


def facts(columns: Columns, about: About, status: str, now: float | None = None) -> tuple[Fact, ...]:
    """Return state, epoch, time, best, speed and memory, in places that stay; after them what is out of the ordinary.
    now: seconds since 1970."""
    state = Fact(about.title, status, about.title)
    if columns.ended is None:
        return state, Fact("", "waiting for the first step")
    memory = "gpu_memory_reserved" if columns.newest("gpu_memory_reserved") is not None else "memory"
    speed = mean_pace(columns) if status in OVER else columns.newest("samples_per_s") or 0.0
    waiting, of = columns.newest("data_wait") or 0.0, f" of {about.epochs}" if about.epochs else ""
    unusual = [Fact("waiting for data", percent(waiting), "", "data_wait")] if waiting > NOTABLE else []
    top = best(columns, about.best)
    so_far = (number(top[0]), f"in epoch {top[1]}") if top else (EMPTY,)
    return (
        state,
        Fact("epoch", f"{columns.ended['epoch'] + 1}{of}", f"step {columns.ended['step']:,}"),
        clock(columns, about, status, time.time() if now is None else now),
        *([Fact(f"best {header(about.best.lstrip('-'))}", *so_far)] if about.best else []),
        Fact("samples/s", number(speed), "", "samples_per_s"),
        Fact(
            memory.split("_")[0].replace("gpu", "GPU memory"), size((columns.newest(memory) or 0) * 2**20), "", memory
        ),
        *unusual,
    )


def clock(columns: Columns, about: About, status: str, now: float) -> Fact:
    """Return how long the run took, or the time left."""
    took = duration(columns.seconds()[1][-1])
    if status in OVER or not about.epochs:
        return Fact("took" if status in OVER else "elapsed", took)
    left = time_left(columns, about)
    if not left:
        return Fact("time left", EMPTY, f"{took} so far")
    day = "%a " if left > 20 * 3600 else ""
    ends = time.strftime(f"{day}%H:%M %Z", time.localtime(now + left)).strip()
    return Fact("time left", duration(left), f"{took} so far" + ("" if status == PAUSED else f"; ends at {ends}"))


def html(columns: Columns, about: About, status: str) -> str:
    """Return the facts and a bar of the run's share that is done; a page needs STYLE once. All text is escaped."""
    dot, each = f'<i style="background:{HUES.get(status, GREY)}"></i>' if status else "", []
    for i, (label, value, more, column) in enumerate(facts(columns, about, status)):
        role = ' role="status"' if not i else ""
        each.append(
            f'<div title="{escape(more or value)}"{role}><span>{escape(label) or "&#160;"}</span>'
            f"<b>{dot * (not i)}{escape(value)}</b>{spark(columns, column) if column else ''}</div>"
        )
    row, total = columns.ended, (about.epochs or 0) * (about.epoch_samples or 0)
    share = min(1.0, row["samples"] / total) if row and total else 0.0
    bar = f'<p><u style="width:{100 * share:.1f}%"></u></p>'
    return f'<div class="nbt"><div class="nbt-top"><div>{"".join(each)}</div>{bar}</div></div>'


def spark(columns: Columns, name: str) -> str:
    """Return a column's values over the run as a small line from 0."""
    x, y = thinned(*columns.either(name))
    top, end = float(y.max(initial=0.0)) or 1.0, float(x[-1]) if len(x) else 1.0
    points = " ".join(
        f"{100 * at / end:.1f},{15 - 14 * max(value, 0) / top:.1f}" for at, value in zip(x, y, strict=True)
    )
    line = f'<polyline points="{points}" stroke="currentColor" stroke-opacity=".6"/>'
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


# -- how long it takes


def time_left(columns: Columns, about: About) -> float | None:
    """Return seconds to the end of the run, at the pace of the last logged steps since the last change."""
    total = (about.epochs or 0) * (about.epoch_samples or 0)
    at, wall = columns.series("wall", "step")
    samples, changed = np.interp(at, *columns.samples()), columns.changes[-1]["step"] if columns.changes else 0
    recent = (np.flatnonzero(at > changed) if (at > changed).any() else np.arange(len(at)))[-LAST:]
    took = wall[recent[-1]] - wall[recent[0]] if len(recent) > 1 else 0.0
    pace = (samples[recent[-1]] - samples[recent[0]]) / took if took > 0 else columns.newest("samples_per_s")
    if columns.ended is None or not total or not pace:
        return None
    return float(max(total - columns.ended["samples"], 0) / pace)


def mean_pace(columns: Columns) -> float:
    """Return the samples a second of the whole run by the clock."""
    seconds = columns.seconds()[1][-1]
    return float(columns.samples()[1][-1] / seconds) if seconds > 0 else columns.newest("samples_per_s") or 0.0


# -- lines of text


def opening(state: TrainState, pack: Pack) -> list[str]:
    """Return what a run starts or resumes with: device, the settings that matter most, and how many steps it takes."""
    plan, micro, processes = state.plan, state.recovery.micro, state.ranks.world
    largest = math.ceil(plan.batch_size / processes)
    parts = f" in {math.ceil(largest / micro)} parts" if micro is not None and micro < largest else ""
    on = f" on {processes} processes" if processes > 1 else ""
    precision = "float32" if plan.amp == "off" else plan.amp
    settings = [f"batch {plan.batch_size}{on}{parts}", f"lr {digits(plan.lr)} ({plan.schedule})", plan.optimizer]
    rows = [
        ("GPU" if state.device.type == "cuda" else "device", described(state.device)),
        ("plan", ", ".join([*settings, precision, f"{choose(pack, plan, state.device)[0]} feed"])),
        ("length", length_of(plan, pack.splits["train"])),
    ]
    if state.step:
        rows.append(("resumed", f"from step {state.step:,}, in epoch {state.epoch + 1} of {plan.epochs}"))
    return [f"{name:<11}{text}" for name, text in rows]


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
    of = f" of {about.epochs}" if about.epochs else ""
    middle = record.epoch + 1 - values["batch_size"] / max(2 * (about.epoch_samples or 0), 1)  # of the last step
    lr = f"lr {digits(values['lr'])}{' (warmup)' if middle < about.warmup else ''}"
    left = [f"{duration(seconds)} left" for seconds in [time_left(columns, about)] if seconds]
    peaks = [values[name] for name in ("gpu_memory_peak", "gpu_memory_allocated", "memory") if values.get(name)]
    readings = [f"{number(values['samples_per_s'])} samples/s", *(size(peak * 2**20) for peak in peaks[:1])]
    return [f"epoch {record.epoch + 1:,}{of}", *shown, lr, *left, *readings]


def fitting(fields: list[str], room: int) -> str:
    """Return as many fields in a line as it has room for, at least the first."""
    while len(fields) > 1 and len("  ".join(fields)) > room:
        fields = fields[:-1]
    return "  ".join(fields)
