"""The parts of a step and of an epoch, each timed by itself: what a profile is made of."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from nbtools.data import Draws, Feed, Pack, batches_left, in_order, lengths_of
from nbtools.measure import memory
from nbtools.measure.clock import clock_of, finish
from nbtools.measure.rates import Counts, Rates, count
from nbtools.train import Batch, Plan, Sums, Task, TrainState, checkpoint, score, step

LEAST = 5  # repeats of what is timed on CUDA
WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what occupies the device in a trace
LONG = 0.2  # seconds: a checkpoint that takes longer is written once


class Bench:
    """The step of a state on one raw batch that lies on the device: what training costs when nothing waits for data.

    rates: samples/s of each round; best: seconds of the fastest step, plain and drawn of `task.batch` in it; mean:
    seconds a step over all rounds, on CUDA with steps queued behind each other."""

    def __init__(self, task: Task, state: TrainState, raw: Batch, epoch_size: int):
        self.task, self.state, self.raw, self.epoch_size = task, state, raw, epoch_size
        self.rates: list[float] = []
        self.clock, _ = clock_of(state.device, "resident")
        self.best = self.plain = self.drawn = float("inf")
        for _ in range(2):
            self.step()
        finish(state.device)

    def step(self) -> None:
        step(self.task, self.state, self.raw, self.epoch_size)

    @property
    def mean(self) -> float:
        return len(self.raw["id"]) / median(self.rates)

    def advance(self, seconds: float) -> None:
        """A round of about so long, at least a step. Steps are counted beforehand: on CUDA their launching takes less
        time than they do."""
        steps = max(1, round(seconds / self.mean)) if self.rates else 1
        start = perf_counter()
        for _ in range(steps):
            before = self.clock()
            self.step()
            if self.state.device.type == "cpu":
                self.best = min(self.best, self.clock() - before)
        finish(self.state.device)
        took = perf_counter() - start
        self.rates.append(steps * len(self.raw["id"]) / took)
        if self.state.device.type != "cpu":
            self.best = min(self.best, took / steps)

    def prepare(self) -> None:
        """Time `task.batch` alone, without draws and with them."""
        plan, clock = self.state.plan, self.clock
        start = clock()
        self.task.batch(self.raw, plan, None)
        finish(self.state.device)
        middle = clock()
        self.task.batch(self.raw, plan, Draws(plan.seed, self.state.epoch, self.raw["id"]))
        finish(self.state.device)
        self.plain, self.drawn = min(self.plain, middle - start), min(self.drawn, clock() - middle)


class Small(Bench):
    """The bench's step with two samples in each forward pass: launched as often, with little to compute. Not compiled:
    another batch size would make the compiler begin anew, for both."""

    def __init__(self, bench: Bench):
        state, size = bench.state, len(bench.raw["id"])
        passes = -(-size // state.micro) if state.micro and state.micro < size else 1
        raw = {name: tensor[: 2 * passes] for name, tensor in bench.raw.items()}
        super().__init__(bench.task, state, raw, bench.epoch_size)

    def step(self) -> None:
        with self.alone():
            super().step()

    def counts(self, of: Counts) -> Counts:
        """Of its step; its arithmetic is the bench's share, by samples."""
        with self.alone():
            flops = of.flops * len(self.raw["id"]) // of.samples
            return count(self.task, self.state, self.raw, self.epoch_size, flops)

    @contextmanager
    def alone(self) -> Iterator[None]:
        state = self.state
        kept = state.micro, state.network
        state.micro, state.network = 2, state.model
        try:
            yield
        finally:
            state.micro, state.network = kept


def host_and_device(bench: Bench, small: Small, counts: Counts, rates: Rates, seconds: float) -> tuple[float, float]:
    """(host, device) seconds of a step on the cached batch."""
    if bench.state.device.type != "cuda":
        floors = small.counts(counts).floors(rates)
        least = min(counts.ops * rates.dispatch, small.best)
        most = max(small.best - max(floors["compute"], floors["memory"]), least)
        host = min((least + most) / 2, bench.best)
        return host, bench.best - host
    return launching(bench, seconds), busy(bench)


def launching(bench: Bench, seconds: float) -> float:
    """Seconds until `step` returns when the device is idle: what the host needs, without waiting for the device."""
    times: list[float] = []
    while len(times) < LEAST or sum(times) < seconds:
        finish(bench.state.device)
        start = perf_counter()
        bench.step()
        times.append(perf_counter() - start)
    finish(bench.state.device)
    return median(times)


def busy(bench: Bench) -> float:
    """Seconds that the device works for a step, by the clock of its own that the profiler reads.

    Events around a step queued behind long products would serve for short steps only: beyond about 1,000 launches the
    queue is full, the host waits, and its launching counts as the device's work.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(LEAST):
            bench.step()
        finish(bench.state.device)
    with tempfile.TemporaryDirectory(prefix="nbtools-profile-") as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        worked = device_seconds(json.loads(path.read_text())["traceEvents"])
    return worked / LEAST or bench.mean  # nothing traced, as when another profiler runs: count all as the device's


def device_seconds(events: Iterable[dict[str, Any]]) -> float:
    """Seconds in which at least one kernel, copy or fill of a trace runs (Kineto's format: ts and dur in µs); they
    overlap where there are several streams. A gpu_user_annotation also spans the gaps between its kernels, and does not
    count."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in WORK)
    total, end = 0.0, float("-inf")
    for start, stop in spans:
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total / 1e6


class Between:
    """What happens between epochs: an evaluation, of which some batches stand for all, and a checkpoint, written with
    its SHA-256 to a temporary folder."""

    def __init__(self, task: Task, state: TrainState, pack: Pack, plan: Plan, feed: Feed):
        self.task, self.state, self.plan, self.feed = task, state, plan, feed
        ids = pack.ids("val")
        self.total = len(ids)
        batches = in_order(ids, lengths_of(pack, ids), plan.micro_batch_size or plan.batch_size)
        self.batches = [batches[i] for i in np.random.default_rng(0).permutation(len(batches))]  # in order: short first
        self.evaluations: list[float] = []
        self.checkpoints: list[float] = []
        self.evaluate(0.0)  # the first batches warm up

    def advance(self, seconds: float) -> None:
        """A round: batches for about so long, two at least; a checkpoint, unless that takes long."""
        self.evaluations.append(self.evaluate(seconds))
        if not self.checkpoints or self.checkpoints[0] < LONG:
            self.checkpoints.append(self.save())

    @property
    def evaluation_s(self) -> float:
        """Seconds of the validation split; 0 where it is empty."""
        return median(self.evaluations)

    @property
    def checkpoint_s(self) -> float:
        return median(self.checkpoints)

    def evaluate(self, seconds: float) -> float:
        """Seconds of the whole split, from those of some batches to the device's end, the feed's start included."""
        sums, start, done, took = Sums(self.state.device), perf_counter(), 0, 0.0
        for k, raw in enumerate(self.feed(self.batches)):
            score(self.task, self.state.evaluated, raw, self.plan, sums)
            finish(self.state.device)
            done, took = done + len(raw["id"]), perf_counter() - start
            if k and took > seconds:
                break
        return self.total * took / max(done, 1)

    def save(self) -> float:
        with tempfile.TemporaryDirectory(prefix="nbtools-profile-") as folder:
            start = perf_counter()
            checkpoint.write(Path(folder), "profile", self.state.tensors(), {"state": self.state.facts()})
            return perf_counter() - start


def memory_of(bench: Bench) -> dict[str, float]:
    """MiB that training takes (see StepProfile.memory)."""
    state = bench.state
    with memory.peak(state.device) as peak:
        bench.step()
    gradients = memory.size_of(p.grad for p in state.parameters if p.grad is not None)
    found = {"step": peak.bytes, "held": memory.held(state) + gradients}
    if state.device.type == "cuda":
        found["allocated"] = torch.cuda.max_memory_allocated(state.device)
        found["reserved"] = torch.cuda.max_memory_reserved(state.device)
    return {name: size / 2**20 for name, size in found.items()}


def typical(pack: Pack, plan: Plan) -> np.ndarray:
    """Ids of a whole batch of middling size, as an epoch of the plan makes it."""
    batches = epoch_batches(pack, plan)
    whole = [batch for batch in batches if len(batch) == plan.batch_size] or batches
    if not pack.offsets:
        return whole[0]
    sizes = [sum(int(pack.lengths(column, batch).max(initial=0)) for column in pack.offsets) for batch in whole]
    return whole[int(np.argsort(sizes, kind="stable")[len(sizes) // 2])]


def epoch_batches(pack: Pack, plan: Plan) -> list[np.ndarray]:
    ids = pack.ids("train")
    return batches_left(ids, lengths_of(pack, ids), plan.seed, 0, [[plan.batch_size, 0]])


def padding(pack: Pack, plan: Plan) -> dict[str, float]:
    """Ragged column → share of the elements of an epoch's batches that are padding; from lengths alone."""
    batches = epoch_batches(pack, plan)
    return {column: padded(pack, column, batches) for column in pack.offsets}


def shapes(pack: Pack, plan: Plan) -> int:
    """Different lengths of an epoch's batches, in units of Plan.bucket where a task has that knob."""
    if pack.card.bucket_by is None:
        return 1
    lengths, unit = partial(pack.lengths, pack.card.bucket_by), getattr(plan, "bucket", 1)
    return len({-(-int(lengths(batch).max(initial=0)) // unit) for batch in epoch_batches(pack, plan)})


def random_padding(pack: Pack, column: str, size: int) -> float:
    """The same share where batches of a size are drawn blindly, as a DataLoader with shuffle=True does."""
    ids = np.random.default_rng(0).permutation(pack.ids("train"))
    return padded(pack, column, np.split(ids, range(size, len(ids), size)))


def padded(pack: Pack, column: str, batches: Iterable[np.ndarray]) -> float:
    """Share of padding: batches are as long as their longest sample."""
    lengths = [pack.lengths(column, batch) for batch in batches]
    total = sum(int(each.max(initial=0)) * len(each) for each in lengths)
    return 1 - sum(int(each.sum()) for each in lengths) / max(total, 1)
