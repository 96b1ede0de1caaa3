"""The parts of a step and of an epoch, each timed by itself: what a profile is made of."""

from __future__ import annotations

import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from types import FrameType
from typing import Any

import torch

from nbtools import checkpoint
from nbtools.device import memory
from nbtools.draws import Draws
from nbtools.feed import Feed, choose, open_feed
from nbtools.measure.rates import Counts, Rates, clock_of, count, finish
from nbtools.metrics import Sums
from nbtools.pack import Pack
from nbtools.plan import Plan
from nbtools.scoring import evaluation
from nbtools.state import Batch, Task, TrainState
from nbtools.step import backward, step

LEAST = 5  # repeats of whatever is timed


class Bench:
    """The step of a state on one raw batch that lies on the device: what training costs when nothing waits for data.

    rates: samples/s of each round; best: seconds of the fastest step, plain and drawn of `task.batch` in it; mean:
    seconds a step over all rounds, on CUDA with steps queued behind each other."""

    def __init__(self, task: Task, state: TrainState, raw: Batch, epoch_size: int):
        self.task, self.state, self.raw, self.epoch_size = task, state, raw, epoch_size
        self.rates: list[float] = []
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
        begun, done, clock = perf_counter(), 0, clock_of(self.state.device)
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
        plan, clock = self.state.plan, clock_of(self.state.device)
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

    def counts(self) -> Counts:
        micro, self.state.micro = self.state.micro, 2
        try:
            return count(self.task, self.state, self.raw, self.epoch_size)
        finally:
            self.state.micro = micro


def apart(bench: Bench, small: Small, counts: Counts, rates: Rates, seconds: float) -> tuple[float, float]:
    """(host, device) seconds of a step on the cached batch."""
    if bench.state.device.type != "cuda":
        floors = small.counts().floors(rates)
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


def evaluation_seconds(task: Task, state: TrainState, pack: Pack, plan: Plan, seconds: float) -> float:
    """One evaluation of the validation split: some batches after the first, scaled to all samples; 0 without any."""
    total = len(pack.ids("val"))
    if not total:
        return 0.0
    name, _ = choose(pack, plan, state.device)
    streamed = name == "resident" and state.device.type == "cuda"  # a second resident pack would take its memory
    feed = open_feed(pack, plan.replace(feed="streamed") if streamed else plan, state.device)
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


class Memory:
    """What training takes, in MiB (see StepProfile.memory)."""

    def __init__(self, device: torch.device):
        self.device = device
        self.held = memory(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def read(self, task: Task, state: TrainState, raw: Batch) -> dict[str, float]:
        if self.device.type != "cuda":
            return {"saved": saved_bytes(task, state, raw) / 2**20, "state": state_bytes(state) / 2**20}
        peaks = {
            "allocated": torch.cuda.max_memory_allocated(self.device),
            "reserved": torch.cuda.max_memory_reserved(self.device),
        }
        return {f"peak_{name}": size / 2**20 - self.held[f"gpu_memory_{name}"] for name, size in peaks.items()}


def saved_bytes(task: Task, state: TrainState, raw: Batch) -> int:
    """Bytes of the tensors that forward keeps for backward, each storage once, the weights not among them."""
    held = {p.untyped_storage().data_ptr() for p in state.parameters}
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided and (storage := tensor.untyped_storage()).data_ptr() not in held:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    part = {name: tensor[: state.micro] for name, tensor in raw.items()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        backward(task, state, part)
    return sum(sizes.values())


def state_bytes(state: TrainState) -> int:
    kept = [t for name, t in state.tensors().items() if name.startswith(("model.", "ema.", "optimizer."))]
    return sum(t.numel() * t.element_size() for t in [*kept, *state.parameters])  # a gradient is as large as its weight


def syncs(task: Task, state: TrainState, raw: Batch, epoch_size: int) -> tuple[str, ...]:
    """`file:line` of the code that makes the host wait for the device in a step; () without CUDA."""
    if state.device.type != "cuda":
        return ()
    before = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("warn")
        return synchronizing(lambda: step(task, state, raw, epoch_size))
    finally:
        torch.cuda.set_sync_debug_mode(before)


def synchronizing(call: Callable[[], Any]) -> tuple[str, ...]:
    """`file:line` below a call from where torch warned of a synchronizing operation, outside torch where there is."""
    places: dict[str, None] = {}

    def caught(message: Warning | str, *rest: Any, **more: Any) -> None:
        if "synchronizing" in str(message):
            places[place(sys._getframe(1))] = None

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = caught
        call()
    return tuple(places)


def place(frame: FrameType | None) -> str:
    """The innermost line of a stack that is neither torch's nor that of the machinery of warnings."""
    stack: Sequence[tuple[FrameType, int]] = list(traceback.walk_stack(frame))
    own = Path(torch.__file__).parent
    for each, line in stack:
        file = Path(each.f_code.co_filename)
        if own not in file.parents and file.name != "warnings.py":
            return f"{file}:{line}"
    return f"{stack[0][0].f_code.co_filename}:{stack[0][1]}"
