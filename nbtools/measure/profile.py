"""Where the time of a training step goes on this machine: the plan as it trains, the same step on a cached batch, and
each part by itself.

On CUDA the host runs ahead of the device, and a trace of its kernels tells the two apart: `host` is the share in which
the device had nothing to do because the host had not launched it yet. On a CPU both are one thread; there the host's
part is what does not grow with the batch, by the line through the times of a step with two samples and with all.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from nbtools.data import Draws, Pack, Padding, gather, in_order, lengths_of, on
from nbtools.measure import memory
from nbtools.measure.machine import machine
from nbtools.measure.report import Report
from nbtools.measure.stepper import Stepper, epoch_batches, finish, typical
from nbtools.show import percent, size, timing
from nbtools.train import (
    DTYPES,
    Batch,
    Plan,
    Sums,
    TrainState,
    evaluation,
    gradients,
    train_step,
)

ROUNDS = 16
LEAST_ROUNDS = 3  # where a step takes long
LEAST = 5  # repeats of what is timed on CUDA
LONG = 0.2  # seconds of a step, which then warms up but once
AGREES = 0.02  # bf16 keeps 8 bits, 0.4 % a number; measured: at most 0.6 % (four tasks, three seeds each)
WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what occupies the device in a trace


@dataclass(frozen=True)
class Tried:
    """A change of the plan. ratio: its samples/s over the plan's, the median over rounds; low, high: the quartiles.

    drift: of a faster precision, how far its first losses are from float32's, relative (see `trials.drift`), infinite
    where one of them is not a number; None if they were not compared. failed: why the model cannot be trained with
    it at all; the ratio is then 0.
    """

    change: dict[str, Any]
    ratio: float
    low: float
    high: float
    rounds: int
    drift: float | None = None
    failed: str = ""

    @property
    def agrees(self) -> bool:
        """Whether its losses agree, as far as that was checked."""
        return not self.failed and (self.drift is None or self.drift <= AGREES)

    @property
    def objection(self) -> str:
        """Why not to use it, however fast it is; or ""."""
        if self.failed:
            return f", it fails ({self.failed})"
        if self.agrees or self.drift is None:
            return ""
        far = f"differs by {percent(self.drift)}" if math.isfinite(self.drift) else "is not a number"
        return f", but its loss {far}"


@dataclass(frozen=True)
class StepProfile(Report):
    """How a plan trains here. Shows as a table.

    feed: the plan's. samples_per_s: of the plan as it is, with least and most of
    `rounds`; ceiling: of the same step on one raw batch that lies on the device; ceiling_ratio: the first over the
    second, measured in turns.
    wait, host, device: shares of a step that wait for data, that launch (see above), and the rest; together 1. fixed:
    the share of the cached step that does not grow with the batch. batching, augmentation: shares of a step in
    `task.batch` without draws, and what the draws add.
    flops_per_s: of matrix products, convolutions and attention, forward and backward; matrix: what a large matrix
    product reaches here in the plan's precision.
    between_s: seconds of one evaluation (some batches, scaled to the split).
    shapes: how many different lengths its batches have, as they are padded.
    memory: MiB. step: the most that a step takes beyond what is held; held: weights, gradients and optimizer.
    trials: changes that were tried. took: seconds for the whole profile.
    """

    plan: dict[str, Any]
    device_type: str
    train_samples: int
    feed: str
    samples_per_s: float
    least: float
    most: float
    rounds: int
    ceiling: float
    ceiling_ratio: float
    wait: float
    host: float
    device: float
    batching: float
    augmentation: float
    between_s: float
    memory: dict[str, float]
    trials: tuple[Tried, ...]
    machine: dict[str, str]
    took: float
    shapes: int
    fixed: float
    flops_per_s: float
    matrix: float

    @property
    def step_s(self) -> float:
        return self.plan["batch_size"] / self.samples_per_s

    @property
    def steps_s(self) -> float:
        """Seconds of an epoch's steps."""
        return self.train_samples / self.samples_per_s

    @property
    def epoch_s(self) -> float:
        return self.steps_s + self.between_s / self.plan["eval_every"]

    @property
    def arithmetic(self) -> float:
        """Share of the device's part of a step that its products would need at the matrix rate."""
        return self.flops_per_s / (self.matrix * max(self.device, 1e-9))

    def table(self) -> tuple[tuple[str, str], list[tuple[str, str]]]:
        spread = f"{self.least:,.0f}–{self.most:,.0f}, n = {self.rounds}"
        shares = f"data {percent(self.wait)}, host {percent(self.host)}, device {percent(self.device)}"
        rows = [
            ("samples/s", f"{self.samples_per_s:,.0f} ({spread}) at batch {self.plan['batch_size']}"),
            (
                "ceiling",
                f"{self.ceiling:,.0f} samples/s on one cached batch; {percent(self.ceiling_ratio)} of it reached",
            ),
            ("a step", f"{timing(self.step_s)}: {shares}"),
            (
                "batches",
                f"{percent(self.batching)} of a step to prepare them, {percent(self.augmentation)} to augment them",
            ),
            ("an evaluation", timing(self.between_s)),
            ("arithmetic", f"{self.flops_per_s / 1e9:,.3g} of {self.matrix / 1e9:,.3g} GFLOP/s"),
            ("memory", ", ".join(f"{name} {size(mib * 2**20)}" for name, mib in self.memory.items())),
        ]
        rows += [
            ("tried", f"{shown(t.change)}: {t.ratio:.2f}× ({t.low:.2f}–{t.high:.2f}){t.objection}") for t in self.trials
        ]
        return ("step", "measured"), rows

    def footer(self) -> str:
        return f"Measured in {timing(self.took)}"


def shown(change: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in change.items())


class Bench:
    """A plan in training and its parts, each timed a little at a time: a machine's speed changes, and ratios should be
    of one moment.

    run: as the plan trains; cached: on one raw batch that lies on the device; small: on two samples a forward pass, in
    as many passes, and never compiled, since another batch size would be compiled anew. plain, drawn: seconds of
    `task.batch` without draws and with them.
    """

    def __init__(self, run: Stepper):
        self.run, pack, plan, device = run, run.pack, run.plan, run.device
        self.run.turns.clear()
        self.task, self.state, self.clock = self.run.task, self.run.state, self.run.clock
        self.raw = on(device, gather(pack, typical(pack, plan)[0][0], Padding(pack, plan)))
        self.size, micro = len(self.raw["id"]), plan.micro_batch_size or plan.batch_size
        self.few = 2 * -(-self.size // micro)
        small = {name: tensor[: self.few] for name, tensor in self.raw.items()}
        self.cached, self.small = self.run.on(repeat(self.raw)), self.run.on(repeat(small), act=in_pairs)
        ids = pack.ids("val")
        batches = in_order(ids, lengths_of(pack, ids), micro)
        shuffled = np.random.default_rng(0).permutation(len(batches))  # else the short ones come first
        self.val = [batches[i] for i in shuffled]
        self.evaluations: list[float] = []
        self.plain: list[float] = []
        self.drawn: list[float] = []
        self.evaluate(math.inf, list({len(ids): ids for ids in self.val}.values()))  # the first of their shape warm up
        for stepper in (self.cached, self.small):
            stepper.warm_up(1)

    def advance(self, seconds: float) -> None:
        """Rounds of all parts for about `seconds`, at least three."""
        start = self.clock()
        for k in range(ROUNDS):
            if k >= LEAST_ROUNDS and self.clock() - start > seconds:  # a step takes long
                break
            self.run.advance(seconds / 4 / ROUNDS)
            self.cached.advance(seconds / 4 / ROUNDS)
            self.small.advance(seconds / 10 / ROUNDS)
            self.prepare(None, self.plain)
            self.prepare(Draws(self.run.plan.seed, self.state.epoch, self.raw["id"], self.state.keys), self.drawn)
            if k < LEAST_ROUNDS:
                self.evaluations.append(self.evaluate(seconds / 30))

    def prepare(self, draws: Draws | None, times: list[float]) -> None:
        start = self.clock()
        self.task.batch(self.raw, self.state.plan, draws)
        finish(self.state.device)
        times.append(self.clock() - start)

    def evaluate(self, seconds: float, batches: list[np.ndarray] | None = None) -> float:
        """Seconds of the whole validation split, from those of some batches (None: of all) to the device's end, the
        feed's start included; 0 where it is empty."""
        sums, start, done = Sums(self.state.device), self.clock(), 0
        for k, raw in enumerate(self.run.feed(self.val if batches is None else batches)):
            evaluation.score(self.task, self.state.evaluated, raw, self.run.plan, sums)
            done += len(raw["id"])
            if k and self.clock() - start > seconds:
                break
        finish(self.state.device)
        return sum(map(len, self.val)) * (self.clock() - start) / max(done, 1)

    def profile(self) -> StepProfile:
        """The timings, with all that is counted and derived from them; no trials yet."""
        run, cached, pack, plan, device = self.run, self.cached, self.run.pack, self.run.plan, self.state.device
        rate = run.rate()
        return StepProfile(
            plan=plan.to_dict(),
            device_type=device.type,
            train_samples=pack.splits["train"],
            feed=run.feed.name,
            samples_per_s=rate.samples_per_s,
            least=rate.least,
            most=rate.most,
            rounds=rate.rounds,
            ceiling=cached.rate().samples_per_s,
            ceiling_ratio=median(run.over(cached)),
            **self.shares(rate.data_wait),
            between_s=median(self.evaluations),
            memory=memory_of(cached),
            trials=(),
            machine=machine(),
            took=0.0,
            shapes=shapes(pack, plan),
            flops_per_s=flops(self.state, self.raw) / self.size * rate.samples_per_s,
            matrix=max(matrix_rates(device, DTYPES.get(plan.amp, torch.float32))),
        )

    def shares(self, wait: float) -> dict[str, float]:
        """Of a step: what waits for data, and of the rest the parts of the cached step."""
        best, busy, fixed = self.cached.best_s, 1 - wait, 1.0
        if self.few < self.size:  # else passes of two samples are what the plan makes
            a_sample = max(best - self.small.best_s, 0.0) / (self.size - self.few)
            fixed = max(1 - a_sample * self.size / best, 0.0)
        host = fixed
        if self.state.device.type == "cuda":
            host = max(1 - worked(self.cached) / self.cached.mean_s, 0.0)
        plain, drawn = min(self.plain), min(self.drawn)
        return {
            "wait": wait,
            "host": busy * host,
            "device": busy * (1 - host),
            "fixed": fixed,
            "batching": busy * plain / best,
            "augmentation": busy * min(max(drawn - plain, 0.0), best) / best,
        }


def in_pairs(state: TrainState, raw: Batch, epoch_size: int) -> Any:
    """A train step with two samples in each forward pass, not compiled."""
    kept = state.recovery.micro, state.network
    state.recovery.micro, state.network = 2, state.model
    try:
        return train_step(state, raw, epoch_size)
    finally:
        state.recovery.micro, state.network = kept


def worked(cached: Stepper) -> float:
    """Seconds that a GPU works for a step, by its own clock, which the profiler reads.

    Events around a step queued behind long products would serve for short steps only: beyond about 1,000 launches the
    queue is full, the host waits, and its launching counts as the device's work.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(LEAST):
            cached.step(next(cached.batches))
        finish(cached.device)
    with tempfile.TemporaryDirectory(prefix="nbtools-profile-") as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        found = device_seconds(json.loads(path.read_text())["traceEvents"])
    return found / LEAST or cached.mean_s  # nothing traced, as when another profiler runs: count all as the device's


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


def flops(state: TrainState, raw: Batch) -> int:
    """Floating-point operations of the forward and backward passes of a batch, in its micro-batches: not of elementwise
    ones, fused RNN and CTC."""
    kept, state.network = state.network, state.model  # a compiled network hides its operations
    try:
        with FlopCounterMode(display=False) as counter:
            gradients(state, raw, len(raw["id"]))
        return int(counter.get_total_flops())
    finally:
        state.network = kept


def matrix_side(device: torch.device) -> int:
    return 4096 if device.type == "cuda" else 512  # 512: 5 ms on one CPU core


def matrix_rates(device: torch.device, dtype: torch.dtype, seconds: float = 0.02) -> list[float]:
    """FLOP/s of each square matrix product in about so many seconds."""
    side = matrix_side(device)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    times: list[float] = []
    while sum(times) < seconds or len(times) < LEAST:
        finish(device)
        start = perf_counter()
        torch.mm(a, b)
        finish(device)
        times.append(perf_counter() - start)
    return [2 * side**3 / each for each in times]


def memory_of(cached: Stepper) -> dict[str, float]:
    """MiB that training takes (see StepProfile.memory)."""
    state = cached.state
    found = {"step": memory.peak(state.device, lambda: cached.step(next(cached.batches)))}
    found["held"] = memory.held(state) + memory.size_of(p.grad for p in state.parameters if p.grad is not None)
    return {name: size / 2**20 for name, size in found.items()}


def shapes(pack: Pack, plan: Plan) -> int:
    """Different lengths of an epoch's batches, as they are padded."""
    lengths = Padding(pack, plan).of(pack, epoch_batches(pack, plan))
    return len(set(zip(*lengths.values(), strict=True))) or 1
