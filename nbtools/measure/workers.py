"""How many DataLoader processes pay on this machine, and how many batches ahead: only for `feed="workers"`.

The settings are tried one after another on training itself, so that none has another's processes next to it.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nbtools import disk
from nbtools.data import Pack, Workers, choose, cores, require_shared_memory
from nbtools.errors import TrainError
from nbtools.measure.machine import machine
from nbtools.measure.memory import ram
from nbtools.measure.report import Report
from nbtools.measure.stepper import EAGER, Clock, Stepper, untouched
from nbtools.table import plural
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
    seconds from the opening to the first batch, counted apart. skipped: why it was not tried; then all else is 0."""

    workers: int
    prefetch: int
    samples_per_s: float = 0.0
    least: float = 0.0
    most: float = 0.0
    data_wait: float = 0.0
    start: float = 0.0
    skipped: str = ""


@dataclass(frozen=True)
class WorkersReport(Report):
    """The fewest workers, and batches ahead, within 5 % of the best rate; settings: the evidence, in the order tried.
    seconds: of the whole search."""

    workers: int
    prefetch: int
    reason: str
    settings: tuple[Setting, ...] = ()
    seconds: float = 0.0
    machine: dict[str, str] = dataclasses.field(default_factory=machine)

    def caption(self) -> str:
        return self.reason

    def table(self) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        headers = ("workers", "prefetch", "samples/s", "spread", "waiting for data", "start", "")
        return headers, [self.row(each) for each in self.settings]

    def row(self, each: Setting) -> tuple[Any, ...]:
        if each.skipped:
            return each.workers, each.prefetch, None, None, None, None, each.skipped
        chosen = (each.workers, each.prefetch) == (self.workers, self.prefetch)
        rate, spread = f"{each.samples_per_s:,.0f}", f"{each.least:,.0f}–{each.most:,.0f}"
        wait, start = f"{each.data_wait:.0%}", f"{each.start:.1f} s"
        return each.workers, each.prefetch, rate, spread, wait, start, "chosen" if chosen else ""

    def footer(self) -> str:
        parts = [f"{SLICES} slices a setting, {self.seconds:.1f} s in all", *self.machine.values()]
        return ", ".join(parts) if self.settings else ""


def find_workers(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    device: torch.device | str | None = None,
    seconds: float = SECONDS,
    clock: Clock | None = None,
) -> WorkersReport:
    """Measure a few settings, where the plan's feed has workers at all; otherwise say at once that there is nothing to
    measure. clock: as of a Stepper.

    No setting is tried for which there are too few cores, too little RAM, or too small a /dev/shm: the last would end
    in a bus error. Raises TrainError where training, or this feed, cannot start.
    """
    where = torch.device(device) if device is not None else devices.pick()
    name, why = choose(pack, plan, where)
    if name != "workers":
        reason = f"the feed is {name} ({why}): no workers take part in it, there is nothing to measure"
        return WorkersReport(plan.workers, plan.prefetch, reason)
    with untouched(where):
        settings, took = tried(Stepper(task, pack, plan.replace(workers=0, **EAGER), where, clock=clock), plan, seconds)
    return WorkersReport(*chosen(settings), tuple(settings), took)


def tried(stepper: Stepper, plan: Plan, seconds: float) -> tuple[list[Setting], float]:
    """(settings, seconds in all): more workers until twice nothing was gained; then the best number with another
    prefetch."""
    pack, device = stepper.pack, stepper.device
    numbers = counts(cores())
    begun, slice_s = stepper.clock(), seconds / (len(numbers) + 1) / SLICES
    stepper.advance(READ * seconds)
    found: list[Setting] = []
    weight = 0  # bytes of RAM that a worker has for itself, known when the first one runs

    def measure(plan: Plan) -> None:
        nonlocal weight
        skipped = refusal(pack, plan, device, weight)
        if skipped:
            found.append(Setting(plan.workers, plan.prefetch, skipped=skipped))
            return
        others, opened = set(multiprocessing.active_children()), stepper.clock()
        # an epoch of its own: other files than those before it, where there are so many
        reader = stepper.on(stepper.epochs(len(found) + 1, Workers(pack, device, plan)))
        next(reader.batches)
        start = stepper.clock() - opened
        for _ in range(AHEAD * plan.prefetch * plan.workers):
            next(reader.batches)
        own = set(multiprocessing.active_children()) - others
        weight = max([weight, *map(private, own)])
        for _ in range(SLICES):
            reader.advance(slice_s)
        reader.close()
        rate = reader.rate()
        spread = rate.samples_per_s, rate.least, rate.most, rate.data_wait
        found.append(Setting(plan.workers, plan.prefetch, *spread, start))

    for number in numbers:
        measure(plan.replace(workers=number))
        best = max(each.samples_per_s for each in found)
        if number > 2 and max(each.samples_per_s for each in found[:-2]) * GAIN > best:
            break
    pick = max(found, key=lambda each: each.samples_per_s)
    if pick.workers:
        measure(plan.replace(workers=pick.workers, prefetch=DEEPER if plan.prefetch != DEEPER else DEEPER // 2))
    return found, stepper.clock() - begun


def counts(most: int) -> list[int]:
    """0, 1, 2, 4, …, and the number of cores."""
    return [0, *sorted({2**k for k in range(most.bit_length())} | {most})]


def chosen(settings: Sequence[Setting]) -> tuple[int, int, str]:
    """(workers, prefetch, reason): pure."""
    best = max(settings, key=lambda each: each.samples_per_s)
    near = [each for each in settings if each.samples_per_s >= CLOSE * best.samples_per_s and not each.skipped]
    pick = min(near, key=lambda each: (each.workers, each.prefetch))
    none = settings[0].samples_per_s
    share = "the best rate" if pick is best else f"{pick.samples_per_s / best.samples_per_s:.0%} of the best"
    if not pick.workers:
        return 0, pick.prefetch, f"no workers: {none:,.0f} samples/s without them is {share}"
    setting = f"{plural(pick.workers, 'worker')}, {plural(pick.prefetch, 'batch')} ahead of each"
    gain = f"{pick.samples_per_s:,.0f} samples/s is {share}, {pick.samples_per_s / none:.1f}× that without workers"
    wait = f"training still waits {pick.data_wait:.0%} of the time for data"
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
        require_shared_memory(pack, plan)
    except TrainError as error:
        return str(error)
    room, batch = ram(), pack.bytes / max(len(pack), 1) * plan.batch_size
    need = plan.workers * (weight + plan.prefetch * batch)
    if room is None or need <= room.usable:
        return ""
    who = f"the batches of {plural(plan.workers, 'worker')} need about {disk.human(need)}"
    return f"{who}, and {disk.human(room.usable)} of {room.source} can be had"


def private(process: Any) -> int:
    """Bytes of RAM that a process has for itself (Linux); 0 where the system does not say."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # another system, or the process is gone
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
