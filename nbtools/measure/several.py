"""Whether several processes are worth it, from measured parts, before anybody rents more GPUs.

All processes share a batch, so that training is the same whatever their number is. A step takes as long as its slowest
share, and the part of the gradients' all-reduce that the backward pass does not hide. If the machine has what is
asked for, torchrun starts the processes for some seconds: they train their shares of a batch at once, in turns with one
of them that trains whole batches alone, and reduce as many bytes as there are gradients. If it does not, the largest
share is timed alone, and the all-reduce takes what others measured over the usual links: rules of thumb.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nbtools import table
from nbtools.data import Pack, Raw, cores, tick
from nbtools.errors import TrainError, sentence
from nbtools.measure.machine import machine
from nbtools.measure.report import Report
from nbtools.measure.stepper import EAGER, Clock, Stepper, finish, typical, untouched
from nbtools.table import digits, duration, percent, plural, timing
from nbtools.train import Plan, TaskLike, Torchrun, import_task, importable, share, train_step
from nbtools.train import device as devices

SECONDS = 6.0  # of measuring, besides the start of the processes
ROUNDS = 5
MOMENT = 0.05  # seconds between two looks at the processes
BATCHES = 4  # that are trained again and again
WORD, WORDS = 8, 3  # bytes of a word, and how many a step takes: what rank 0 wants, if memory was enough, the loss
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes: DistributedDataParallel reduces gradients in buckets of these sizes
BACKWARD = 2 / 3  # of a pass: twice the arithmetic of the forward pass (arXiv 2001.08361)
HALF = 0.5  # of a GPU that each added one should give (ours)
GAIN = 1.05  # times as fast as one process on the same cores (ours)
BUSY = 0.5  # of the cores, by the load before: from here processes wait for cores as much as for each other (ours)
ALIKE = {**EAGER, "threads": None}  # the processes share the cores
PATIENCE = timedelta(minutes=5)  # of a process that waits for the others
THUMB = "rule of thumb"


@dataclass(frozen=True)
class Link:
    """What an all-reduce costs. latency_s: of a small one; bytes_per_s: that each process sends in a large one, which
    nccl-tests calls bus bandwidth."""

    name: str
    latency_s: float
    bytes_per_s: float
    source: str

    def seconds(self, size: int, processes: int) -> float:
        """Of an all-reduce of so many bytes."""
        return self.latency_s + least_bytes(size, processes) / self.bytes_per_s

    def __str__(self) -> str:
        return f"{self.name} {self.bytes_per_s / 1e9:.3g} GB/s and {self.latency_s * 1e6:.0f} µs, {self.source}"


SMALL = 50e-6  # seconds for 8 bytes over nccl: 42–54 µs (NVIDIA/nccl#1530, #1244, #1439)
LINKS = (
    Link("NVLink", SMALL, 208e9, f"{THUMB} (two A100, NVIDIA/nccl-tests#178)"),
    Link("PCIe", SMALL, 20e9, f"{THUMB} (three A100, NVIDIA/nccl-tests#178)"),
    Link("10 Gbit/s Ethernet", SMALL, 1.25e9, f"{THUMB} (the nominal rate)"),
)
"""Between GPUs that are not here."""


def least_bytes(size: int, processes: int) -> float:
    """What each process has to send in an all-reduce of so many bytes (doi 10.1016/j.jpdc.2008.09.002)."""
    return 2 * (processes - 1) / processes * size


@dataclass(frozen=True)
class Row:
    """A batch as processes × micro × passes. micro: samples a forward pass of the largest share. changes: settings that
    differ from the advised plan.

    link: what connects the processes. step_s: seconds of a step, None where none was measured; exposed_s: those of them
    in which only gradients are reduced; speedup: in samples/s, over one process with the advised plan.
    """

    processes: int
    micro: int
    passes: int
    batch_size: int
    lr: float
    changes: dict[str, Any]
    link: str = ""
    step_s: float | None = None
    exposed_s: float = 0.0
    speedup: float = 0.0

    @property
    def samples_per_s(self) -> float | None:
        return self.batch_size / self.step_s if self.step_s else None

    @property
    def efficiency(self) -> float:
        return self.speedup / self.processes

    def cells(self) -> tuple[Any, ...]:
        made = self.processes, self.micro, self.passes, self.batch_size, digits(self.lr)
        if self.step_s is None:
            return *made, None, None, None, None
        reduced = f"{timing(self.exposed_s)} of {timing(self.step_s)}, {self.link}" if self.link else None
        return *made, f"{self.samples_per_s:,.0f}", f"{self.speedup:.2f}×", f"{percent(self.efficiency)}", reduced


@dataclass(frozen=True)
class Scaling(Report):
    """What several processes would give. Shows as a table.

    worth: whether, over one of the links at least, an added GPU gives half of one; on a CPU, whether the same cores do
    more; None where nothing was measured. gradient_bytes: that each step reduces.
    """

    processes: int
    rows: tuple[Row, ...]
    why: str
    worth: bool | None = None
    links: tuple[Link, ...] = ()
    gradient_bytes: int = 0
    note: str = ""

    def caption(self) -> str:
        return self.why

    def table(self) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        headers = "processes", "micro", "passes", "batch", "lr", "samples/s", "speed-up", "efficiency", "all-reduce"
        return headers, [row.cells() for row in self.rows]

    def footer(self) -> str:
        sent = f"{table.size(self.gradient_bytes)} of gradients a step" if self.links else ""
        return "; ".join(filter(None, [sent, *map(str, self.links), self.note]))


@dataclass(frozen=True)
class Parts:
    """Seconds of a step, medians. alone: of one process, with a whole batch of the first plan; shares: [(batch size, of
    the processes until all have trained their shares)]. buckets: bytes of gradients, in the order of the backward
    pass."""

    alone: float
    shares: tuple[tuple[int, float], ...]
    buckets: tuple[int, ...]


def find_scaling(
    task: TaskLike,
    pack: Pack,
    plans: Sequence[Plan],
    processes: int,
    seconds: float = SECONDS,
    clock: Clock | None = None,
) -> Scaling:
    """What so many processes would give for each plan; the first is that of one process.

    Takes about `seconds`, and half a minute to start the processes. Nothing outside changes. Raises TrainError if
    training could not start.
    """
    device, start = devices.pick(), perf_counter()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if device.type not in ("cpu", "cuda"):
        raise TrainError(f"several processes need CUDA or a CPU, but this device is {device.type}; use one process")
    large = [plan.replace(**ALIKE) for plan in plans if plan.batch_size >= 2 * processes]
    if not large:
        why = f"batch {plans[0].batch_size} has fewer than two samples for each of {processes} processes; use fewer"
        return Scaling(processes, tuple(ways(plans, processes)), sentence(why), False)
    asked = [plans[0].replace(**ALIKE), *large]
    links, parts = LINKS, None
    if on_this_machine(device, processes):
        links, parts = launched(task, pack, asked, processes, seconds)
    else:
        with untouched(device):
            parts = timed(task, pack, asked, device, Peers(processes - 1, processes), seconds, None, clock)
    assert parts is not None
    threads = threads_for(processes) if device.type == "cpu" else None
    rows = expected(plans, parts, links, processes, hidden=device.type == "cuda")
    worth, why = judged(rows, plans[0].epochs * pack.splits["train"], threads)
    eager = " without compiling" if plans[0].compile else ""
    took = f"{perf_counter() - start:.0f} s, medians of {ROUNDS} turns"
    note = f"measured{eager} on {', '.join(machine().values())} in {took}"
    if device.type == "cpu" and load > BUSY * cores():
        note += f"; other programs were busy (load {load:.1f}): measure again when they are not"
    return Scaling(processes, tuple(rows), why, worth, tuple(links), sum(parts.buckets), note)


def on_this_machine(device: torch.device, processes: int) -> bool:
    """Whether each process would have a GPU; there may be any number on a CPU."""
    return device.type == "cpu" or torch.cuda.device_count() >= processes


def threads_for(processes: int) -> tuple[int, int]:
    """(of one process, of each of so many)"""
    return torch.get_num_threads(), max(1, cores() // processes)


# -- the model of a step


def ways(plans: Sequence[Plan], processes: int) -> Iterator[Row]:
    """Each plan's batch in one process and in several, without figures."""
    first = plans[0].to_dict()
    for plan in plans:
        changes = {name: value for name, value in plan.to_dict().items() if value != first[name]}
        for count in (1, processes):
            share = -(-plan.batch_size // count)
            passes = -(-share // min(plan.micro_batch_size or share, share))
            yield Row(count, -(-share // passes), passes, plan.batch_size, plan.lr, changes)


def expected(plans: Sequence[Plan], parts: Parts, links: Sequence[Link], processes: int, hidden: bool) -> list[Row]:
    """The rows with figures; of several processes one for each link. One process makes a larger batch in more passes,
    with no more samples/s than the first plan's. hidden: whether gradients are reduced during the backward pass."""
    rate, shares, rows = plans[0].batch_size / parts.alone, dict(parts.shares), []
    for row in ways(plans, processes):
        if row.processes == 1:
            rows.append(dataclasses.replace(row, step_s=row.batch_size / rate, speedup=1.0))
        elif took := shares.get(row.batch_size):
            for link in links:
                alone_s = exposed(link, parts.buckets, processes, took / row.passes if hidden else 0.0)
                figures = {"link": link.name, "step_s": took + alone_s, "exposed_s": alone_s}
                speedup = row.batch_size / (took + alone_s) / rate
                rows.append(dataclasses.replace(row, **figures, speedup=speedup))
    return rows


def exposed(link: Link, buckets: Sequence[int], processes: int, pass_s: float) -> float:
    """Seconds of a step in which gradients are reduced and nothing else is done. On a GPU all but the last bucket are
    reduced during the backward pass, a part of the last forward and backward pass, of `pass_s` seconds; 0: on a CPU,
    where that takes the cores that compute, none."""
    each = [link.seconds(size, processes) for size in buckets]
    return max(sum(each) - BACKWARD * pass_s, each[-1])


def buckets_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Bytes of the buckets in which DistributedDataParallel reduces the gradients of parameters of these bytes: from
    the last to the first, each closed once it is full."""
    found: list[int] = []
    for size in reversed(sizes):
        if not found or found[-1] >= (FIRST_BUCKET if len(found) == 1 else BUCKET):
            found.append(0)
        found[-1] += size
    return tuple(found)


def judged(rows: Sequence[Row], samples: int, threads: tuple[int, int] | None) -> tuple[bool, str]:
    """(whether it is worth it over one of the links, the sentence that says so). samples: of the whole run; threads: on
    a CPU, of one process and of each of several."""
    several = sorted((row for row in rows if row.processes > 1), key=lambda row: row.speedup)
    best = {row.link: row for row in several}  # the fastest of each link
    row = several[-1]
    made = f"batch {row.batch_size:,} as {row.processes} × {row.micro} × {row.passes}"
    if own := [each for each in several if row.changes and not each.changes and each.link == row.link]:
        made += f"; {own[0].speedup:.2f}× with the plan's own batch, which trains the same"
    if threads:
        worth = row.speedup >= GAIN
        one, each = (plural(count, "thread") for count in threads)
        found = f"{row.processes} processes with {each} each train {row.speedup:.2f}× the samples/s of one with {one}"
        return worth, f"{found} ({made}): {'worth it' if worth else 'not worth it'} on this CPU."
    least = 1 + HALF * (row.processes - 1)
    good = [link for link in best if best[link].speedup >= least]
    over = ", ".join(f"{best[link].speedup:.2f}× over {link}" for link in reversed(best))
    verdict = f"worth it over {', '.join(reversed(good))}" if good else "not worth it"
    rule = f"each added GPU should bring at least half a GPU's speed, {least:.3g}× in all (ours)"
    text = f"{row.processes} GPUs against one, in samples/s: {over} ({made}): {verdict}; {rule}."
    alone = samples / (rows[0].samples_per_s or math.inf)
    took = f" The run takes {duration(alone / row.speedup)} instead of {duration(alone)}"
    return bool(good), text + (f"{took}, for {1 / row.efficiency:.2f}× the GPU hours." if good else "")


# -- its parts, measured


@dataclass(frozen=True)
class Peers:
    """This process among so many that measure together. rank: whose share of a batch it trains; group: of all, None for
    one that measures alone."""

    rank: int
    count: int
    group: Any = None

    @property
    def leads(self) -> bool:
        return self.group is None or self.rank == 0

    def agree(self, number: int = 0) -> int:
        """The largest number that any of them gives, once all have."""
        if self.group is None:
            return number
        word = torch.tensor([number])
        dist.all_reduce(word, dist.ReduceOp.MAX, group=self.group)
        return int(word)

    def share(self, ids: np.ndarray) -> np.ndarray:
        return share(ids, self.rank, self.count)

    def step(self, *of: Any) -> Any:
        """A train step that ends when all have made theirs, with as many words as the loop exchanges."""
        found = train_step(*of)
        for _ in range(WORDS):
            self.agree()
        return found


def timed(
    task: TaskLike,
    pack: Pack,
    plans: Sequence[Plan],
    device: torch.device,
    peers: Peers,
    seconds: float,
    threads: int | None,
    clock: Clock | None = None,
) -> Parts | None:
    """Turns, for `seconds` in all: the process that leads trains whole batches of the first plan, with so many threads,
    while the others wait; then all train their shares of the batches of the other plans. None for the others."""
    lone = Stepper(task, pack, plans[0], device, clock=clock)
    whole = lone.on(again(lone, plans[0]))
    parts = [lone.on(again(lone, plan, peers.share), act=peers.step) for plan in plans[1:]]

    def advance(stepper: Stepper, steps: int) -> None:
        if stepper is not whole:
            stepper.advance(steps=steps)
        elif peers.leads:
            with using(threads):
                stepper.advance(steps=steps)
        peers.agree()

    counts = []
    for stepper in (whole, *parts):
        advance(stepper, 1)  # loads what the first step needs
        advance(stepper, 1)
        fits = seconds / ROUNDS / len(plans) / max(stepper.turns[-1].seconds, 1e-9) if stepper.turns else 0
        counts.append(peers.agree(max(1, round(fits))))
        stepper.turns.clear()
    for _ in range(ROUNDS):
        for stepper, steps in zip((whole, *parts), counts, strict=True):
            advance(stepper, steps)
    if not peers.leads:
        return None
    found = tuple((plan.batch_size, part.mean_s) for plan, part in zip(plans[1:], parts, strict=True))
    buckets = buckets_of([parameter.numel() * parameter.element_size() for parameter in lone.state.parameters])
    if plans[0].compress_gradients:
        buckets = tuple(size // 2 for size in buckets)
    return Parts(whole.mean_s, found, buckets)


def again(stepper: Stepper, plan: Plan, part: Callable[[np.ndarray], np.ndarray] = np.asarray) -> Iterator[Raw]:
    """A few batches of a plan, or a part of each, over and over."""
    ids = [part(ids) for ids, _ in typical(stepper.pack, plan, BATCHES)]
    while True:
        yield from stepper.feed(ids)


@contextmanager
def using(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def reduced(size: int, device: torch.device, peers: Peers, seconds: float) -> float:
    """Seconds of an all-reduce of so many bytes, the median over turns of `seconds` in all."""
    tensor = torch.zeros(max(size // 4, 1), device=device)

    def burst(count: int) -> float:
        finish(device)
        peers.agree()
        start = perf_counter()
        for _ in range(count):
            dist.all_reduce(tensor)
        finish(device)
        return (perf_counter() - start) / count

    burst(2)
    count = peers.agree(max(1, round(seconds / ROUNDS / burst(2))))
    return median(burst(count) for _ in range(ROUNDS))


# -- in several processes


def launched(
    task: TaskLike, pack: Pack, plans: Sequence[Plan], processes: int, seconds: float
) -> tuple[tuple[Link, ...], Parts]:
    """Measured by so many processes, started for this. Raises TrainError if one fails."""
    name = importable(task, "nb.advise of several processes")
    with tempfile.TemporaryDirectory(prefix="nbtools-several-") as place:
        found = Path(place, "found.pickle")
        start(place, processes, (name, pack.folder.absolute(), plans, seconds, threads_for(processes), found))
        link, parts = pickle.loads(found.read_bytes())
    return (link,), parts


def start(place: str, processes: int, asked: tuple[Any, ...]) -> None:
    """torchrun, until all have ended. Raises TrainError with the error of the one that failed first."""
    torchrun = Torchrun(Path(place), processes)
    with torchrun.started(take_part, *asked) as agent:
        while agent.poll() is None:
            tick()
            sleep(MOMENT)
    if agent.returncode:
        failure = torchrun.failure(agent.returncode)
        raise TrainError(f"{plural(processes, 'process')} could not be measured: {failure}")


def take_part(
    name: str, folder: Path, plans: Sequence[Plan], seconds: float, threads: tuple[int, int], into: Path
) -> None:
    """What each process does. name: of the task; folder: of the pack; into: the file for what was found."""
    task, pack, device = import_task(name, folder), Pack.open(folder), devices.pick()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(threads[1])
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE)
    peers = Peers(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=PATIENCE))
    parts = timed(task, pack, plans, device, peers, 0.8 * seconds, threads[0])
    size = peers.agree(sum(parts.buckets) if parts else 0)
    small, large = (reduced(each, device, peers, 0.1 * seconds) for each in (WORD, size))
    if parts:
        rate = least_bytes(size, peers.count) / max(large - small, 0.01 * large)
        into.write_bytes(pickle.dumps((Link(backend, small, rate, "measured"), parts)))
    dist.destroy_process_group()
