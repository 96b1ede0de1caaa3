"""A run in lines of text, the same in a terminal, in a notebook and in a log file: a block before its first step, and
a line after each epoch."""

from __future__ import annotations

import math

from nbtools.data import Pack, choose
from nbtools.live.columns import Columns
from nbtools.live.facts import About, time_left
from nbtools.measure import described, expected
from nbtools.show import digits, duration, number, size
from nbtools.train import Record, TrainState, length_of

OPENING = "opening"  # marks the event with these lines, where the process that trains is not the one that shows them
NAMES = {"train_loss": "train", "val_loss": "val"}
INDENT = 11  # letters before what an opening's line says
LETTERS = 104  # of an epoch's line: what a cell of Jupyter Notebook has room for in a window of 900 px
MEMORY = ("gpu_memory_peak", "gpu_memory_allocated", "memory")  # the first that is known: the most that an epoch took


def opening(state: TrainState, pack: Pack) -> list[str]:
    """Return what a run starts with, or resumes with: device, settings, how many steps it takes, and how long where
    that was measured."""
    plan, takes = state.plan, expected(state.task, pack, state.plan)
    rows = [
        ("GPU" if state.device.type == "cuda" else "device", described(state.device)),
        ("plan", settings(state, choose(pack, plan, state.device)[0])),
        ("length", length_of(plan, pack.splits["train"])),
        *([("expected", takes)] if takes else []),
    ]
    if state.step:
        rows.append(("resumed", f"from step {state.step:,}, in epoch {state.epoch + 1} of {plan.epochs}"))
    return [f"{name:<{INDENT}}{text}" for name, text in rows]


def settings(state: TrainState, feed: str) -> str:
    """Return the settings that matter most, the batch as it is computed."""
    plan, micro, processes = state.plan, state.recovery.micro, state.ranks.world
    largest = math.ceil(plan.batch_size / processes)
    parts = f" in {math.ceil(largest / micro)} parts" if micro is not None and micro < largest else ""
    on = f" on {processes} processes" if processes > 1 else ""
    precision = "float32" if plan.amp == "off" else plan.amp
    batch, lr = f"batch {plan.batch_size}{on}{parts}", f"lr {digits(plan.lr)} ({plan.schedule})"
    return ", ".join([batch, lr, plan.optimizer, precision, f"{feed} feed"])


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
