"""How many DataLoader processes pay on this machine, and how many batches ahead: only for `feed="workers"`.

The settings are tried one after another on training itself, so that the processes of one do not slow down another.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nbtools import table
from nbtools.data import Pack, Workers, choose, cores, require_shared_memory
from nbtools.errors import TrainError
from nbtools.measure.memory import ram, read
from nbtools.measure.report import Report
from nbtools.measure.stepper import EAGER, Clock, Stepper, untouched
from nbtools.table import percent, plural
from nbtools.train import Plan, TaskLike
from nbtools.train import device as devices

SECONDS = 8.0  # of measuring, the starts of workers aside
SLICES = 3  # of a setting's time: its spread
READ = 0.2  # of the time goes before all settings, to read files that the first one would else read for the others
DEEPER = 4  # the other prefetch that is tried, besides the plan's
AHEAD = 2  # times the batches made ready: drawn before the clock starts, so that none of them is timed
GAIN = 1.05  # times the best rate so far: less is none
CLOSE = 0.95  # of the best rate: fewer processes that reach it are chosen


@dataclass(frozen=True)
class Setting:
    """What a number of workers gave: samples/s as the median of slices, the share of the time that waited for data, and
    seconds from the opening to the first batch; weight: bytes of private RAM of the largest worker. skipped: why it
    was not tried; everything else is then 0."""

    workers: int
    prefetch: int
    samples_per_s: float = 0.0
    least: float = 0.0
    most: float = 0.0
    data_wait: float = 0.0
    start: float = 0.0
    weight: int = 0
    skipped: str = ""


@dataclass(frozen=True)
class WorkersReport(Report):
    """The fewest workers, and batches ahead, within 5 % of the best rate; settings: the evidence, in the order
    tried."""

    workers: int
    prefetch: int
    reason: str
    settings: tuple[Setting, ...] = ()

    def caption(self) -> str:
        return self.reason

    def table(self) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        rows = []
        for each in self.settings:
            rate = f"{each.samples_per_s:,.0f} ({each.least:,.0f}–{each.most:,.0f})"
            measured = (rate, f"{percent(each.data_wait)}", f"{each.start:.1f} s")
            shown = (None, None, None) if each.skipped else measured
            rows.append((each.workers, each.prefetch, *shown, each.skipped))
        return ("workers", "prefetch", "samples/s", "waiting for data", "start", ""), rows


def find_workers(
    task: TaskLike, pack: Pack, plan: Plan, seconds: float = SECONDS, clock: Clock | None = None
) -> WorkersReport:
    """Measure a few settings, if the plan's feed has workers at all; otherwise report at once that there is nothing to
    measure.

    A setting is not tried if there are too few cores, too little RAM, or too small a /dev/shm: the last would end
    in a bus error. Raises TrainError if training, or this feed, cannot start.
    """
    device = devices.pick()
    name, why = choose(pack, plan, device)
    if name != "workers":
        reason = f"the feed is {name} ({why}): it uses no workers, so there is nothing to measure"
        return WorkersReport(plan.workers, plan.prefetch, reason)
    with untouched(device):
        settings = tried(Stepper(task, pack, plan.replace(workers=0, **EAGER), device, clock=clock), plan, seconds)
    return WorkersReport(*chosen(settings), tuple(settings))


def tried(stepper: Stepper, plan: Plan, seconds: float) -> list[Setting]:
    """More workers until two in a row gain nothing; then the best number with another prefetch."""
    most = cores()
    numbers = [0, *sorted({2**k for k in range(most.bit_length())} | {most})]
    slice_s = seconds / (len(numbers) + 1) / SLICES
    stepper.advance(READ * seconds)
    found: list[Setting] = []
    for number in numbers:
        found.append(measured(stepper, plan.replace(workers=number), slice_s, found))
        best = max(each.samples_per_s for each in found)
        if number > 2 and max(each.samples_per_s for each in found[:-2]) * GAIN > best:
            break
    pick = max(found, key=lambda each: each.samples_per_s)
    if pick.workers:
        other = DEEPER if plan.prefetch != DEEPER else DEEPER // 2
        found.append(measured(stepper, plan.replace(workers=pick.workers, prefetch=other), slice_s, found))
    return found


def measured(stepper: Stepper, plan: Plan, slice_s: float, before: Sequence[Setting]) -> Setting:
    """A plan's setting, measured or refused by what those before it showed."""
    setting = plan.workers, plan.prefetch
    skipped = refusal(stepper.pack, plan, stepper.device, max([each.weight for each in before], default=0))
    if skipped:
        return Setting(*setting, skipped=skipped)
    others, opened = set(multiprocessing.active_children()), stepper.clock()
    # a separate epoch: other files than those before it, if there are enough
    reader = stepper.on(stepper.epochs(len(before) + 1, Workers(stepper.pack, stepper.device, plan)))
    next(reader.batches)
    start = stepper.clock() - opened
    for _ in range(AHEAD * plan.prefetch * plan.workers):
        next(reader.batches)
    weight = max(map(private, set(multiprocessing.active_children()) - others), default=0)
    for _ in range(SLICES):
        reader.advance(slice_s)
    reader.close()
    rate = reader.rate()
    return Setting(*setting, rate.samples_per_s, rate.least, rate.most, rate.data_wait, start, weight)


def chosen(settings: Sequence[Setting]) -> tuple[int, int, str]:
    """(workers, prefetch, reason)."""
    best = max(settings, key=lambda each: each.samples_per_s)
    near = [each for each in settings if each.samples_per_s >= CLOSE * best.samples_per_s and not each.skipped]
    pick = min(near, key=lambda each: (each.workers, each.prefetch))
    none = settings[0].samples_per_s
    share = "the best rate" if pick is best else f"{percent(pick.samples_per_s / best.samples_per_s)} of the best"
    if not pick.workers:
        return 0, pick.prefetch, f"no workers: {none:,.0f} samples/s without them is {share}"
    setting = f"{plural(pick.workers, 'worker')}, {plural(pick.prefetch, 'batch')} ahead of each"
    gain = f"{pick.samples_per_s:,.0f} samples/s is {share}, {pick.samples_per_s / none:.1f}× that without workers"
    wait = f"training still waits {percent(pick.data_wait)} of the time for data"
    return pick.workers, pick.prefetch, f"{setting}: {gain}; {wait}"


def refusal(pack: Pack, plan: Plan, device: torch.device, weight: int) -> str:
    """Why a setting is not to be tried here, or ""."""
    if not plan.workers:
        return ""
    usual = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    method = "forkserver" if device.type == "cuda" else usual
    reader = getattr(pack.raw, "read", None)
    if method != "fork" and getattr(reader, "__module__", "") == "__main__":
        name = getattr(reader, "__qualname__", "the reader")
        return f"{name} is defined in the notebook, where a {method} process cannot import it; put it in a file"
    try:
        if method != "fork":
            pickle.dumps(pack.raw)  # a Dataset that is defined in a notebook raises
        require_shared_memory(pack, plan)
    except TrainError as error:
        return error.args[0]
    room, batch = ram(), pack.bytes / max(len(pack), 1) * plan.batch_size
    need = plan.workers * (weight + plan.prefetch * batch)
    if room is None or need <= room.usable:
        return ""
    who = f"the batches of {plural(plan.workers, 'worker')} need about {table.size(need)}"
    return f"{who}, but only {table.size(room.usable)} of {room.source} is usable"


def private(process: Any) -> int:
    """Bytes of private RAM of a process (Linux); 0 if the system does not report it."""
    lines = read(Path(f"/proc/{process.pid}/smaps_rollup"))
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
