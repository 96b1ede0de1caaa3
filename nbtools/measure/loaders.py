"""Settings of a DataLoader tried one after another on training itself: none has another's processes beside it."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from nbtools import disk
from nbtools.data import Pack, Raw, Workers, cores, require_shared_memory
from nbtools.errors import TrainError
from nbtools.measure.memory import ram
from nbtools.measure.sweep import endless
from nbtools.measure.trial import still
from nbtools.table import plural
from nbtools.train import Plan, Task, TrainState, step
from nbtools.train import device as devices

SLICES = 3  # of a setting's time: its spread
READ = 0.2  # of the time goes before all settings, to read files that the first one would else read for the others
DEEPER = 4  # the other prefetch that is tried, beside the plan's
AHEAD = 2  # times the batches made ready: drawn before the clock starts, so that none of them is timed
GAIN = 1.05  # times the best rate so far: less is none


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


def tried(task: Task, pack: Pack, plan: Plan, device: torch.device, seconds: float) -> list[Setting]:
    """More workers until twice nothing was gained; then the best number with another prefetch."""
    numbers = counts(cores())
    rig = Rig(task, pack, plan, device, seconds / (len(numbers) + 1) / SLICES)
    rig.read(READ * seconds)
    found: list[Setting] = []
    for number in numbers:
        found.append(rig.measure(plan.replace(workers=number)))
        best = max(each.samples_per_s for each in found)
        if number > 2 and max(each.samples_per_s for each in found[:-2]) * GAIN > best:
            break
    pick = max(found, key=lambda each: each.samples_per_s)
    if pick.workers:
        deeper = DEEPER if plan.prefetch != DEEPER else DEEPER // 2
        found.append(rig.measure(plan.replace(workers=pick.workers, prefetch=deeper)))
    return found


def counts(most: int) -> list[int]:
    """0, 1, 2, 4, …, and the number of cores."""
    return [0, *sorted({2**k for k in range(most.bit_length())} | {most})]


class Rig:
    """A model in training whose feeds come and go. slice_s: seconds that a slice lasts; weight: bytes of RAM that a
    worker has for itself, known when the first one runs; epoch: each setting has one of its own, so that it reads
    other files than those before it where there are so many."""

    def __init__(self, task: Task, pack: Pack, plan: Plan, device: torch.device, slice_s: float):
        self.task, self.pack, self.plan, self.slice_s = task, pack, plan, slice_s
        self.state = TrainState(task, pack, still(plan), device)
        devices.prepare(plan, device, many_shapes=self.state.card.bucket_by is not None)
        self.state.restore_rng()
        self.weight = self.epoch = 0

    def open(self, plan: Plan) -> Iterator[Raw]:
        self.epoch += 1
        return endless(self.state, self.pack, Workers(self.pack, self.state.device, plan), self.epoch)

    def read(self, seconds: float) -> None:
        """Train for a while without workers: what a first step costs, and a first reading of a small data set."""
        self.timed(self.open(self.plan.replace(workers=0)), seconds)

    def measure(self, plan: Plan) -> Setting:
        refused = refusal(self.pack, plan, self.state.device, self.weight)
        if refused:
            return Setting(plan.workers, plan.prefetch, skipped=refused)
        others, begun = set(multiprocessing.active_children()), perf_counter()
        stream = self.open(plan)
        next(stream)
        start = perf_counter() - begun
        for _ in range(AHEAD * plan.prefetch * plan.workers):
            next(stream)
        if plan.workers:
            own = set(multiprocessing.active_children()) - others
            self.weight = max([self.weight, *map(private, own)])
        slices = [self.timed(stream, self.slice_s) for _ in range(SLICES)]
        speeds, waits = zip(*slices, strict=True)
        spread = min(speeds), max(speeds), statistics.median(waits)
        return Setting(plan.workers, plan.prefetch, statistics.median(speeds), *spread, start)

    def timed(self, stream: Iterator[Raw], seconds: float) -> tuple[float, float]:
        """(samples/s, share of the time that waited for data) of steps for so long, one at least."""
        samples, waited, device = 0, 0.0, self.state.device
        synchronize(device)
        start = perf_counter()
        while not samples or perf_counter() - start < seconds:
            asked = perf_counter()
            raw = next(stream)
            waited += perf_counter() - asked
            step(self.task, self.state, raw, self.pack.splits["train"])
            samples += len(raw["id"])
        synchronize(device)
        took = perf_counter() - start
        return samples / took, waited / took


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    room = ram()
    batch = pack.bytes / max(len(pack), 1) * plan.batch_size
    need = plan.workers * (weight + plan.prefetch * batch)
    if room is not None and need > room.usable:
        return (
            f"the batches of {plural(plan.workers, 'worker')} need about {disk.human(need)}, and "
            f"{disk.human(room.usable)} of {room.source} can be had"
        )
    return ""


def private(process: Any) -> int:
    """Bytes of RAM that a process has for itself (Linux); 0 where it is not told."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # another system, or the process is gone
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
