"""The facts above the curves: the state of a run, how far it is and when it ends, its best so far, what the machine
reads."""

from __future__ import annotations

import time
from dataclasses import dataclass
from html import escape

import numpy as np

from nbtools.data import batches_in
from nbtools.live.chart import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION, Picture
from nbtools.live.columns import Columns, spent
from nbtools.measure import REASONS
from nbtools.table import duration, number, percent, size

IDLE = REASONS[0x1]
COMPILING, TRAINING, EVALUATING, PAUSED = "compiling", "training", "evaluating", "paused"
DONE, STOPPED, DIVERGED = "done", "stopped", "diverged"
OVER = (DONE, STOPPED, DIVERGED, "interrupted")
HUES = {COMPILING: PURPLE, TRAINING: BLUE, EVALUATING: SKY, PAUSED: ORANGE, DONE: GREEN, DIVERGED: VERMILLION}
GREY = "#7d7d7d"  # of any other state

ROW, GAP = 36, 18  # px: height of the facts in one row, between two of them
STYLE = f"""
.nbt-top{{container-type:inline-size;overflow:hidden}}
.nbt-top>div{{height:{ROW}px;overflow:hidden;display:flex;flex-wrap:wrap;gap:0 {GAP}px;white-space:nowrap}}
.nbt-top>div>div{{height:{ROW}px}}
.nbt-top span,.nbt-top b{{display:block;line-height:18px;max-width:260px;overflow:hidden;text-overflow:ellipsis}}
.nbt-top span{{font-size:11px;opacity:.65}}
.nbt-top b{{font-size:14px}}
.nbt-top i{{display:inline-block;width:9px;height:9px;border-radius:5px;margin-right:6px}}
.nbt-top>p{{height:4px;margin:5px 0 6px;border-radius:2px;background:rgba(128,128,128,.25);overflow:hidden}}
.nbt-top>p>u{{display:block;height:4px;background:{BLUE}}}
@container (max-width:960px){{.nbt-top>div{{height:{2 * ROW}px}}}}
@container (max-width:480px){{.nbt-top>div{{height:{4 * ROW}px}}}}
"""
"""As high for one fact as for all of them: what has no room, the least important, is left out."""


@dataclass(frozen=True)
class About:
    """What a history does not record about its run: its name, its planned length, and which metric is the main one
    (`whole_accuracy`, or `-cer` where lower is better); warmup in epochs; what follows training, and is not in the time
    left."""

    title: str = ""
    epochs: int | None = None
    epoch_samples: int | None = None
    best: str = ""
    warmup: float = 0.0
    then: str = ""


def facts(columns: Columns, about: About, status: str, now: float | None = None) -> tuple[tuple[str, str], ...]:
    """(label, value), the most important first; unknown ones are omitted. now: seconds since 1970."""
    row = columns.ended
    if row is None:
        return ()
    total, epochs = steps(columns, about), f" of {about.epochs}" if about.epochs else ""
    shown = [("step", f"{row['step']:,}{f' of {total:,}' if total else ''}"), ("epoch", f"{row['epoch'] + 1}{epochs}")]
    evaluation = float(columns.series("eval_time", "epoch")[1].sum())
    shown.append(("took" if status in OVER else "elapsed", duration(spent(columns)[1][-1] + evaluation)))
    left = time_left(columns, about)
    if left and status not in OVER:
        then = f" + {about.then}" if about.then else ""
        shown.append(("left, with evaluation" if evaluation else "left", duration(left) + then))
    if left and status not in (*OVER, PAUSED):
        at = (time.time() if now is None else now) + left
        day = "%a " if left > 20 * 3600 else ""
        shown.append(("training ends", time.strftime(f"{day}%H:%M %Z", time.localtime(at)).strip()))
    if found := best(columns, about.best):
        shown.append((f"best {about.best.lstrip('-')}", f"{number(found[0])} in epoch {found[1]}"))
    if reasons := throttled(columns):
        shown.append(("GPU held back", reasons))
    readings = ((label, write, columns.newest(name)) for name, label, write in READINGS)
    return (*shown, *((label, write(value)) for label, write, value in readings if value is not None))


def html(shown: Picture) -> str:
    """Name and state, the facts, and a bar of the run's share that is done; a page needs STYLE once. All text is
    escaped."""
    dot = f'<i style="background:{HUES.get(shown.state, GREY)}"></i>' if shown.state else ""
    pairs = [(shown.title, f"{dot}{escape(shown.state)}")] + [(label, escape(value)) for label, value in shown.facts]
    if not shown.facts:
        pairs.append(("", "waiting for the first step"))
    each = [
        f'<div><span title="{escape(label)}">{escape(label) or "&#160;"}</span><b>{value}</b></div>'
        for label, value in pairs
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


def throttled(columns: Columns) -> str:
    """What limits the GPU's clocks; idle does not count."""
    reasons = str((columns.ended or {}).get("gpu_throttle") or "").split(", ")
    return ", ".join(reason for reason in reasons if reason and reason != IDLE)


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
