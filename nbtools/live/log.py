"""A run in lines of text, the same in a terminal, in a notebook and in a log file: a block before its first step, and
a line after each epoch."""

from __future__ import annotations

import math
from itertools import pairwise

from nbtools.data import Pack, choose
from nbtools.live.columns import Columns
from nbtools.live.facts import About, time_left
from nbtools.measure import described, expected
from nbtools.show import digits, duration, number, size
from nbtools.train import Plan, Record, TrainState, length_of, shares

OPENING = "opening"  # marks the event with these lines, where the process that trains is not the one that shows them
NAMES = {"train_loss": "train", "val_loss": "val"}
INDENT = 11  # letters before what an opening's line says
LETTERS = 104  # of an epoch's line: what a cell of Jupyter Notebook has room for in a window of 900 px
MEMORY = ("gpu_memory_peak", "gpu_memory_allocated", "memory")  # the first that is known: the most that an epoch took


def opening(state: TrainState, pack: Pack) -> list[str]:
    """What a run starts with, or resumes with: device, batch, lr, optimizer, feed, how many steps it takes, and how
    long where that was measured."""
    plan, count = state.plan, pack.splits["train"]
    feed, why = choose(pack, plan, state.device)
    takes = expected(state.task, pack, plan)
    rows = [
        ("GPU" if state.device.type == "cuda" else "device", described(state.device)),
        ("batch", batch_of(plan, state.recovery.micro, state.ranks.world)),
        ("lr", lr_of(plan)),
        ("optimizer", optimizer_of(plan)),
        ("feed", f"{feed}: {f'{plan.workers} processes' if feed == 'workers' else why}"),
        ("length", length_of(plan, count)),
        *([("expected", takes)] if takes else []),
    ]
    if state.step:
        rows.append(("resumed", f"from step {state.step:,}, in epoch {state.epoch + 1} of {plan.epochs}"))
    return [f"{name:<{INDENT}}{text}" for name, text in rows]


def batch_of(plan: Plan, micro: int | None, processes: int = 1) -> str:
    """The batch, the shares of the processes, and the forward passes that they take."""
    own = [end - start for start, end in pairwise(shares(plan.batch_size, processes))]
    text = f"{plan.batch_size} per step"
    if processes > 1:
        text += f": {' + '.join(map(str, own))} on {processes} processes"
    if micro is not None and micro < max(own):
        text += f", accumulated over {math.ceil(max(own) / micro)} forward passes of at most {micro}"
    return text


def lr_of(plan: Plan) -> str:
    """The peak, what leads to it and what follows."""
    epochs = f"{plan.warmup_epochs:g} epoch{'' if plan.warmup_epochs == 1 else 's'}"
    lowest = f" to {digits(plan.min_lr)}" if plan.schedule != "constant" else ""
    return f"{digits(plan.lr)}, {f'warmup over {epochs}, ' if plan.warmup_epochs else ''}{plan.schedule}{lowest}"


def optimizer_of(plan: Plan) -> str:
    clip = f", gradient norm at most {plan.clip_norm:g}" if plan.clip_norm is not None else ""
    precision = "float32" if plan.amp == "off" else plan.amp
    return f"{plan.optimizer}, weight decay {plan.weight_decay:g}{clip}, {precision}"


def line_of(record: Record, columns: Columns, about: About) -> str:
    """An epoch, or an evaluation between steps; memory, then the speed are left out where it would exceed LETTERS.
    columns: of the history that ends with it."""
    values = record.values
    scores = {n: number(v) for n, v in values.items() if n.startswith(("train_", "val_"))}
    named = {name: NAMES.get(name, name.removeprefix("val_").replace("accuracy", "acc")) for name in scores}
    shown = [f"{named[name]} {score}" for name, score in scores.items()]
    if record.kind == "evaluation":
        return "  ".join([f"step {record.step:,}", *shown])
    of = f" of {about.epochs}" if about.epochs else ""
    middle = record.epoch + 1 - values["batch_size"] / max(2 * (about.epoch_samples or 0), 1)  # of the last step
    warmup = " (warmup)" if middle < about.warmup else ""
    lr, speed = digits(values["lr"]) + warmup, number(values["samples_per_s"])
    parts, readings = [f"epoch {record.epoch + 1:,}{of}", *shown, f"lr {lr}"], [f"{speed} samples/s"]
    if (memory := next((values[name] for name in MEMORY if values.get(name)), None)) is not None:
        readings.append(size(memory * 2**20))
    left = [f"{duration(seconds)} left" for seconds in [time_left(columns, about)] if seconds]
    while readings and len("  ".join([*parts, *readings, *left])) > LETTERS:
        readings.pop()
    return "  ".join([*parts, *readings, *left])
