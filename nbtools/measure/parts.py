"""The parts of a step and of an epoch, each timed by itself: what a profile is made of."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch

from nbtools import checkpoint
from nbtools.draws import Draws
from nbtools.feed import Feed, batches_left, lengths_of
from nbtools.measure import memory
from nbtools.measure.rates import Counts, Rates, count, finish
from nbtools.measure.trial import clock_of
from nbtools.metrics import Sums
from nbtools.pack import Pack
from nbtools.plan import Plan
from nbtools.scoring import evaluation
from nbtools.state import Batch, Task, TrainState
from nbtools.step import step

LEAST = 5  # repeats of whatever is timed


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
        begun, done, clock = perf_counter(), 0, self.clock
        while not done or perf_counter() - begun < seconds:
            before = clock()
            self.step()
            done += 1
            if self.state.device.type == "cpu":
                self.best = min(self.best, clock() - before)
        finish(self.state.device)
        took = perf_counter() - begun
        self.rates.append(done * len(self.raw["id"]) / took)
        if self.state.device.type != "cpu":
            self.best = min(self.best, took / done)

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
    """The bench's step with two samples in each forward pass: launched as often, with little to compute."""

    def __init__(self, bench: Bench):
        state, size = bench.state, len(bench.raw["id"])
        passes = -(-size // state.micro) if state.micro and state.micro < size else 1
        raw = {name: tensor[: 2 * passes] for name, tensor in bench.raw.items()}
        super().__init__(bench.task, state, raw, bench.epoch_size)

    def step(self) -> None:
        micro, self.state.micro = self.state.micro, 2
        try:
            super().step()
        finally:
            self.state.micro = micro

    def counts(self, of: Counts) -> Counts:
        """Of its step; its arithmetic is the bench's share, by samples."""
        flops = of.flops * len(self.raw["id"]) // of.samples
        micro, self.state.micro = self.state.micro, 2
        try:
            return count(self.task, self.state, self.raw, self.epoch_size, flops)
        finally:
            self.state.micro = micro


def apart(bench: Bench, small: Small, counts: Counts, rates: Rates, seconds: float) -> tuple[float, float]:
    """(host, device) seconds of a step on the cached batch."""
    if bench.state.device.type != "cuda":
        floors = small.counts(counts).floors(rates)
        least = min(counts.ops * rates.dispatch, small.best)
        most = max(small.best - max(floors["compute"], floors["memory"]), least)
        host = min((least + most) / 2, bench.best)
        return host, bench.best - host
    host = launching(bench, seconds)
    return host, busy(bench, host)


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


def busy(bench: Bench, host: float) -> float:
    """Seconds that the device works for a step: its kernels queued behind a long product, so that none is awaited.

    A step that synchronises empties the queue, and then the host's part shows in it too.
    """
    device = bench.state.device
    a = torch.randn(4096, 4096, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.mm(a, a)
    start.record()
    torch.mm(a, a)
    end.record()
    end.synchronize()
    products = 1 + int(2 * host / (start.elapsed_time(end) / 1e3))
    times = []
    for _ in range(LEAST):
        finish(device)
        for _ in range(products):
            torch.mm(a, a)
        start.record()
        bench.step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)


def evaluation_seconds(task: Task, state: TrainState, pack: Pack, plan: Plan, feed: Feed, seconds: float) -> float:
    """One evaluation of the validation split: some batches after the first, scaled to all samples; 0 without any."""
    total = len(pack.ids("val"))
    if not total:
        return 0.0
    rates: list[float] = []
    started = perf_counter()
    while len(rates) < 2 or (len(rates) < LEAST and perf_counter() - started < seconds):
        rates += evaluated(task, state, pack, plan, feed, started + seconds)
    return total * median(rates[1:])


def evaluated(task: Task, state: TrainState, pack: Pack, plan: Plan, feed: Feed, until: float) -> list[float]:
    """Seconds a sample of each batch of an evaluation, which is left when the time is up."""
    rates, before, start = [], 0, perf_counter()
    for done in evaluation(task, state.evaluated, pack, plan, "val", Sums(state.device), feed):
        finish(state.device)
        now = perf_counter()
        rates.append((now - start) / (done - before))
        if now > until and len(rates) > 1:
            break
        before, start = done, now
    return rates


def checkpoint_seconds(state: TrainState) -> float:
    """One checkpoint of the state, written with its SHA-256 to a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="nbtools-profile-") as folder:
        start = perf_counter()
        checkpoint.write(Path(folder), "profile", state.tensors(), {"state": state.facts()})
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
    found = {}
    for column in pack.offsets:
        lengths = [pack.lengths(column, batch) for batch in batches]
        padded = sum(int(each.max(initial=0)) * len(each) for each in lengths)
        found[column] = 1 - sum(int(each.sum()) for each in lengths) / max(padded, 1)
    return found
