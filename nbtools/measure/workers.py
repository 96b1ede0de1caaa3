"""How many DataLoader processes pay on this machine, and how many batches ahead: measured on training itself.

One setting after another, so that none has another's processes beside it; only for `feed="workers"`.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import statistics
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import torch

from nbtools import device as devices
from nbtools import disk, table
from nbtools.errors import TrainError
from nbtools.feed import Workers, choose, require_shared_memory
from nbtools.gpu import cores
from nbtools.loop import require_sizes
from nbtools.measure.memory import ram
from nbtools.measure.pace import machine
from nbtools.measure.sweep import endless
from nbtools.measure.trial import still
from nbtools.measure.untouched import untouched
from nbtools.pack import Pack
from nbtools.plan import Plan
from nbtools.state import Task, TrainState
from nbtools.step import step

SECONDS = 8.0  # of measuring, the starts of workers aside
SLICES = 3  # of a setting's time: its spread
DEEPER = 4  # the other prefetch that is tried, beside the plan's
CLOSE = 0.95  # of the best rate: fewer processes that reach it are chosen
AHEAD = 2  # times the batches made ready: drawn before the clock starts, so that none of them is timed


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
class WorkersFinding:
    """The fewest workers, and batches ahead, within 5 % of the best rate; settings: the evidence, in the order tried.
    seconds: of the whole search."""

    workers: int
    prefetch: int
    reason: str
    settings: tuple[Setting, ...] = ()
    seconds: float = 0.0
    machine: dict[str, str] = dataclasses.field(default_factory=machine)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(**{**values, "settings": tuple(Setting(**each) for each in values["settings"])})

    def table(self) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        headers = ("workers", "prefetch", "samples/s", "spread", "waiting for data", "start", "")
        return headers, [row(each, self) for each in self.settings]

    def footer(self) -> str:
        return ", ".join([f"{SLICES} slices a setting, {self.seconds:.1f} s in all", *self.machine.values()])

    def __str__(self) -> str:
        if not self.settings:
            return self.reason
        return f"{self.reason}\n{table.text(*self.table())}\n{self.footer()}"

    def _repr_html_(self) -> str:
        if not self.settings:
            return table.html(("workers",), [(self.reason,)])
        return table.html(*self.table(), self.reason) + table.html(("measured on",), [(self.footer(),)])


def row(each: Setting, finding: WorkersFinding) -> tuple[Any, ...]:
    if each.skipped:
        return each.workers, each.prefetch, None, None, None, None, each.skipped
    chosen = (each.workers, each.prefetch) == (finding.workers, finding.prefetch)
    spread = f"{each.least:,.0f}–{each.most:,.0f}"
    rate, wait, start = f"{each.samples_per_s:,.0f}", f"{each.data_wait:.0%}", f"{each.start:.1f} s"
    return each.workers, each.prefetch, rate, spread, wait, start, "chosen" if chosen else ""


def find_workers(
    task: Task, pack: Pack, plan: Plan, device: torch.device | str | None = None, seconds: float = SECONDS
) -> WorkersFinding:
    """Measure a few settings, where the plan's feed has workers at all; otherwise say at once why there is nothing to.

    No setting is tried for which there are too few cores, too little RAM, or too small a /dev/shm: the last would end
    in a bus error. Raises TrainError where training, or this feed, cannot start.
    """
    where = torch.device(device) if device is not None else devices.pick()
    name, why = choose(pack, plan, where)
    if name != "workers":
        reason = f"the feed is {name} ({why}): no workers take part in it, there is nothing to measure"
        return WorkersFinding(plan.workers, plan.prefetch, reason)
    require_sizes(pack, plan)
    begun = perf_counter()
    with untouched(where):
        settings = tried(task, pack, plan, where, seconds)
    workers, prefetch, reason = chosen(settings)
    return WorkersFinding(workers, prefetch, reason, tuple(settings), perf_counter() - begun)


def counts(most: int) -> list[int]:
    """0, 1, 2, 4, …, and the number of cores."""
    return [0, *sorted({2**k for k in range(most.bit_length())} | {most})]


def tried(task: Task, pack: Pack, plan: Plan, device: torch.device, seconds: float) -> list[Setting]:
    """More workers until twice nothing was gained; then the best number with another prefetch."""
    numbers = counts(cores())
    state = TrainState(task, pack, still(plan), device)
    devices.prepare(plan, device, many_shapes=state.card.bucket_by is not None)
    state.restore_rng()
    each = seconds / (len(numbers) + 1) / SLICES
    found: list[Setting] = []
    weight = 0  # bytes of RAM a worker, known when the first one runs
    for number in numbers:
        setting, weighed = measured(task, pack, plan.replace(workers=number), state, each, weight)
        found.append(setting)
        weight = weight or weighed
        if number > 2 and not any(gains(found[:-k], found[-k]) for k in (1, 2)):
            break
    best = max(found, key=lambda setting: setting.samples_per_s)
    if best.workers:
        other = plan.replace(workers=best.workers, prefetch=DEEPER if plan.prefetch != DEEPER else 2)
        found.append(measured(task, pack, other, state, each, weight)[0])
    return found


def gains(before: list[Setting], setting: Setting) -> bool:
    return setting.samples_per_s * CLOSE > max(each.samples_per_s for each in before)


def measured(task: Task, pack: Pack, plan: Plan, state: TrainState, seconds: float, weight: int) -> tuple[Setting, int]:
    """(what a setting gave, bytes of RAM that a worker took)."""
    refused = refusal(pack, plan, state.device, weight)
    if refused:
        return Setting(plan.workers, plan.prefetch, skipped=refused), 0
    begun = perf_counter()
    stream = endless(state, pack, Workers(pack, state.device, plan))
    next(stream)
    start = perf_counter() - begun
    for _ in range(AHEAD * plan.prefetch * plan.workers):
        next(stream)
    step(task, state, next(stream), pack.splits["train"])
    weight = max(map(private, multiprocessing.active_children()), default=0) if plan.workers else 0
    slices = [timed(task, state, stream, pack, seconds) for _ in range(SLICES)]
    stream.close()
    speeds, waits = zip(*slices, strict=True)
    spread = min(speeds), max(speeds), statistics.median(waits)
    return Setting(plan.workers, plan.prefetch, statistics.median(speeds), *spread, start), weight


def timed(task: Task, state: TrainState, stream: Any, pack: Pack, seconds: float) -> tuple[float, float]:
    """(samples/s, share of the time that waited for data) of steps for so long, one at least."""
    samples, waited = 0, 0.0
    synchronize(state.device)
    start = perf_counter()
    while not samples or perf_counter() - start < seconds:
        asked = perf_counter()
        raw = next(stream)
        waited += perf_counter() - asked
        step(task, state, raw, pack.splits["train"])
        samples += len(raw["id"])
    synchronize(state.device)
    took = perf_counter() - start
    return samples / took, waited / took


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def refusal(pack: Pack, plan: Plan, device: torch.device, weight: int) -> str:
    """Why a setting is not to be tried here, or ""."""
    if not plan.workers:
        return ""
    method = "forkserver" if device.type == "cuda" else multiprocessing.get_start_method()
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
            f"{plan.workers} workers and their batches need about {disk.human(need)}, and {disk.human(room.usable)} of "
            f"{room.source} can be had"
        )
    return ""


def private(process: Any) -> int:
    """Bytes of RAM that a process has for itself (Linux); 0 where it is not told."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # another system, or the process is gone
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def chosen(settings: list[Setting]) -> tuple[int, int, str]:
    """(workers, prefetch, reason): pure."""
    best = max(settings, key=lambda each: each.samples_per_s)
    near = [each for each in settings if each.samples_per_s >= CLOSE * best.samples_per_s and not each.skipped]
    pick = min(near, key=lambda each: (each.workers, each.prefetch))
    none = settings[0].samples_per_s
    share = "the best rate" if pick is best else f"{pick.samples_per_s / best.samples_per_s:.0%} of the best"
    if not pick.workers:
        return 0, pick.prefetch, f"no workers: {none:,.0f} samples/s without them is {share}"
    gain = f"{pick.samples_per_s:,.0f} samples/s is {share}, {pick.samples_per_s / none:.1f}× that without workers"
    wait = f"training still waits {pick.data_wait:.0%} of the time for data"
    return pick.workers, pick.prefetch, f"{pick.workers} workers, {pick.prefetch} batches ahead of each: {gain}; {wait}"
