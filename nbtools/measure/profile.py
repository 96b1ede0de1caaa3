"""Where the time of a training step goes on this machine, in seconds: the plan as it trains, the same step on a cached
batch, and each part by itself.

On CUDA the host runs ahead of the device, and a trace of its kernels tells the two apart: `host` is the share in which
the device had nothing to do because the host had not launched it yet. On a CPU both are one thread, and no clock
separates them. There the host's part is enclosed from two sides, and the middle is taken: at least the operations of
the step, counted, times what one costs here (`Rates.dispatch`), at most what the same step takes with two samples, less
the arithmetic and memory traffic that are left in that.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from nbtools.data import Draws, Pack, batches_left, choose, gather, in_order, lengths_of, on
from nbtools.measure import memory
from nbtools.measure.machine import machine
from nbtools.measure.report import Report
from nbtools.measure.roofline import Counts, Rates, count, syncs
from nbtools.measure.stepper import Clock, Stepper, finish
from nbtools.train import Batch, Plan, Sums, TaskLike, TrainState, checkpoint, score, step

ROUNDS = 16
LEAST_ROUNDS = 3  # where a step takes long
WARMUP_STEPS = 3
LEAST = 5  # repeats of what is timed on CUDA
LONG = 0.2  # seconds: a checkpoint that takes longer is written once
AGREES = 0.02  # bf16 keeps 8 bits, 0.4 % a number; measured: at most 0.6 % (four tasks, three seeds each)
WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what occupies the device in a trace


@dataclass(frozen=True)
class Tried:
    """A change of the plan. ratio: its samples/s over the plan's, the median over rounds; low, high: the quartiles.

    drift: of a faster precision, how far its first losses are from float32's, relative (see `trials.drift`), infinite
    where one of them is not a number; None where they were not compared. failed: why the model cannot be trained with
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
        """Whether it learns the same, as far as that was checked."""
        return not self.failed and (self.drift is None or self.drift <= AGREES)

    @property
    def objection(self) -> str:
        """Why not to take it, however fast it is; or ""."""
        if self.failed:
            return f", it fails ({self.failed})"
        if self.agrees or self.drift is None:
            return ""
        far = f"differs by {self.drift:.0%}" if math.isfinite(self.drift) else "is not a number"
        return f", but its loss {far}"


@dataclass(frozen=True)
class StepProfile(Report):
    """How a plan trains here. Shows as a table.

    feed: the plan's; packed: what `feed="auto"` would take.
    samples_per_s: of the plan as it is, with least and most of `rounds`; ceiling: of the same step on one raw batch
    that lies on the device; ceiling_ratio: the first over the second, measured in turns.
    wait, host, device: shares of a step that wait for data, that launch (see above), and the rest; together 1.
    batching, augmentation: shares of a step in `task.batch` without draws, and what the draws add.
    host_s, device_s, cached_s, small_s: seconds a step, on the cached batch, undisturbed (best of its repeats): of the
    host, of the device, of both, and of forward passes of two samples. device_s is the trace's on CUDA, else the rest.
    evaluation_s, checkpoint_s: seconds of one evaluation (some batches, scaled to the split) and of one checkpoint
    (one written to a temporary folder).
    padding: ragged column → share of its elements that are padding, over an epoch of this plan, exact.
    memory: MiB. step: the most that a step takes beyond what is held (see `measure.memory`); held: weights, gradients
    and optimizer; on CUDA allocated and reserved too, of the whole process at that step's peak.
    trials: changes that were tried; untried: those that memory or time (a slow step) did not allow to try.
    syncs: `file:line` where a step makes the host wait (CUDA). took: seconds that all this took. shapes: different
    lengths of an epoch's batches, after Plan.bucket where a task has that setting; 1 where samples are of one size.
    """

    plan: dict[str, Any]
    device_type: str
    train_samples: int
    feed: str
    packed: str
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
    host_s: float
    device_s: float
    cached_s: float
    small_s: float
    evaluation_s: float
    checkpoint_s: float
    padding: dict[str, float]
    memory: dict[str, float]
    counts: Counts
    rates: Rates
    trials: tuple[Tried, ...]
    untried: tuple[dict[str, Any], ...]
    syncs: tuple[str, ...]
    machine: dict[str, str]
    took: float
    shapes: int = 1

    @property
    def step_s(self) -> float:
        return self.plan["batch_size"] / self.samples_per_s

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch: its steps, and its part of an evaluation and of the checkpoint that may follow it."""
        return self.train_samples / self.samples_per_s + self.between_s / self.plan["eval_every"]

    @property
    def between_s(self) -> float:
        return self.evaluation_s + self.checkpoint_s

    @property
    def evaluation(self) -> float:
        """Share of an epoch."""
        return self.evaluation_s / self.plan["eval_every"] / self.epoch_s

    @property
    def checkpoint(self) -> float:
        """Share of an epoch, where each evaluation is followed by a checkpoint, as that of a better model is."""
        return self.checkpoint_s / self.plan["eval_every"] / self.epoch_s

    @property
    def floors(self) -> dict[str, float]:
        """Seconds below which a step cannot be: host, compute, memory."""
        return {**self.counts.floors(self.rates), "host": self.host_s}

    @property
    def flops_per_s(self) -> float:
        """Model FLOP/s of the plan as it is."""
        return self.counts.flops / self.counts.samples * self.samples_per_s

    def table(self) -> tuple[tuple[str, str], list[tuple[str, str]]]:
        spread = f"{self.least:,.0f}–{self.most:,.0f}, n = {self.rounds}"
        shares = f"data {self.wait:.0%}, host {self.host:.0%}, {self.device:.0%} device"
        rows = [
            ("samples/s", f"{self.samples_per_s:,.0f} ({spread}) at batch {self.plan['batch_size']}"),
            ("ceiling", f"{self.ceiling:,.0f} samples/s on one cached batch; {self.ceiling_ratio:.0%} of it reached"),
            ("a step", f"{duration(self.step_s)}: {shares}"),
            ("batches", f"{self.batching:.0%} of a step to prepare them, {self.augmentation:.0%} to augment them"),
            ("an epoch", f"evaluation {self.evaluation:.0%}, checkpoint {self.checkpoint:.0%}"),
            ("arithmetic", f"{self.flops_per_s / 1e9:,.3g} of {self.rates.matrix / 1e9:,.3g} GFLOP/s"),
            ("memory", ", ".join(f"{name} {size:,.0f} MiB" for name, size in self.memory.items())),
        ]
        rows += [("padding", f"{share:.1%} of {column}") for column, share in self.padding.items()]
        rows += [
            ("tried", f"{shown(t.change)}: {t.ratio:.2f}× ({t.low:.2f}–{t.high:.2f}){t.objection}") for t in self.trials
        ]
        return ("step", "measured"), [*rows, *(("host waits at", line) for line in self.syncs)]

    def footer(self) -> str:
        return f"Measured in {self.took:.1f} s"


def shown(change: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in change.items())


def duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


class Bench:
    """A plan in training and its parts, each timed a little at a time: a machine's speed changes, and ratios are to be
    of one moment.

    run: as the plan trains; cached: on one raw batch that lies on the device; small: on two samples a forward pass,
    launched as often with little to compute, and never compiled, since another batch size would be compiled anew.
    plain, drawn: seconds of `task.batch` without draws and with them; evaluations: of the validation split, of which
    some batches stand for all; checkpoints: written with their SHA-256 to a temporary folder.
    """

    def __init__(self, task: TaskLike, pack: Pack, plan: Plan, device: torch.device, clock: Clock | None):
        self.run = Stepper(task, pack, plan, device, clock=clock)
        self.task, self.state, self.clock = self.run.task, self.run.state, self.run.clock
        self.raw = on(device, gather(pack, typical(pack, plan)))
        size, micro = len(self.raw["id"]), plan.micro_batch_size or plan.batch_size
        self.few = {name: tensor[: 2 * -(-size // micro)] for name, tensor in self.raw.items()}
        self.cached, self.small = self.run.on(repeat(self.raw)), self.run.on(repeat(self.few), act=in_pairs)
        ids = pack.ids("val")
        batches = in_order(ids, lengths_of(pack, ids), micro)
        shuffled = np.random.default_rng(0).permutation(len(batches))  # as they are, the short ones come first
        self.val = [batches[i] for i in shuffled]
        self.plain: list[float] = []
        self.drawn: list[float] = []
        self.checkpoints: list[float] = []
        self.evaluate(0.0)  # the first batches warm up
        self.evaluations: list[float] = []
        for stepper in (self.run, self.cached, self.small):
            stepper.advance(steps=WARMUP_STEPS)
            stepper.turns.clear()

    def advance(self, seconds: float) -> None:
        """Rounds of all parts for about so long, three at least."""
        start = self.clock()
        for k in range(ROUNDS):
            if k >= LEAST_ROUNDS and self.clock() - start > seconds:  # a step takes long
                break
            self.run.advance(seconds / 4 / ROUNDS)
            self.cached.advance(seconds / 4 / ROUNDS)
            self.small.advance(seconds / 10 / ROUNDS)
            self.prepare()
            if k % 4 == 0:
                self.evaluations.append(self.evaluate(seconds / 40))
                if not self.checkpoints or self.checkpoints[0] < LONG:
                    self.checkpoints.append(self.save())

    def prepare(self) -> None:
        """Time `task.batch` alone, without draws and with them."""
        plan, device = self.state.plan, self.state.device
        for draws, times in (
            (None, self.plain),
            (Draws(plan.seed, self.state.epoch, self.raw["id"]), self.drawn),
        ):
            start = self.clock()
            self.task.batch(self.raw, plan, draws)
            finish(device)
            times.append(self.clock() - start)

    def evaluate(self, seconds: float) -> float:
        """Seconds of the whole validation split, from those of some batches to the device's end, the feed's start
        included; 0 where it is empty."""
        sums, start, done, took = Sums(self.state.device), self.clock(), 0, 0.0
        for k, raw in enumerate(self.run.feed(self.val)):
            score(self.task, self.state.evaluated, raw, self.run.plan, sums)
            finish(self.state.device)
            done, took = done + len(raw["id"]), self.clock() - start
            if k and took > seconds:
                break
        return sum(map(len, self.val)) * took / max(done, 1)

    def save(self) -> float:
        with tempfile.TemporaryDirectory(prefix="nbtools-profile-") as folder:
            start = self.clock()
            checkpoint.write(Path(folder), "profile", self.state.tensors(), {"state": self.state.facts()})
            return self.clock() - start

    def profile(self, rates: Rates, seconds: float) -> StepProfile:
        """What was timed, with all that is counted and derived from it; no trials yet."""
        run, cached, pack, plan = self.run, self.cached, self.run.pack, self.run.plan
        rate, device = run.rate(), self.state.device
        counts = count(run, self.raw)
        host_s, device_s = host_and_device(self, counts, rates, seconds / 20)
        return StepProfile(
            plan=plan.to_dict(),
            device_type=device.type,
            train_samples=pack.splits["train"],
            feed=run.feed.name,
            packed=choose(pack, plan.replace(feed="auto"), device)[0],
            samples_per_s=rate.samples_per_s,
            least=rate.least,
            most=rate.most,
            rounds=rate.rounds,
            ceiling=cached.rate().samples_per_s,
            ceiling_ratio=median(
                a.samples_per_s / b.samples_per_s for a, b in zip(run.turns, cached.turns, strict=True)
            ),
            **shares(self, rate.data_wait, host_s, device_s),
            host_s=host_s,
            device_s=device_s,
            cached_s=cached.best_s,
            small_s=self.small.best_s,
            evaluation_s=median(self.evaluations),
            checkpoint_s=median(self.checkpoints),
            padding=padding(pack, plan),
            memory=memory_of(cached),
            counts=counts,
            rates=rates,
            trials=(),
            untried=(),
            syncs=syncs(cached),
            machine=machine(),
            took=0.0,
            shapes=shapes(pack, plan),
        )


def in_pairs(state: TrainState, raw: Batch, epoch_size: int) -> Any:
    """A train step with two samples in each forward pass, not compiled."""
    kept = state.recovery.micro, state.network
    state.recovery.micro, state.network = 2, state.model
    try:
        return step(state, raw, epoch_size)
    finally:
        state.recovery.micro, state.network = kept


def shares(bench: Bench, wait: float, host_s: float, device_s: float) -> dict[str, float]:
    """Of a step: what waits for data, and of the rest the parts of the cached step."""
    busy, best, on_cuda = 1 - wait, bench.cached.best_s, bench.state.device.type == "cuda"
    host = busy * (max(1 - device_s / bench.cached.mean_s, 0.0) if on_cuda else host_s / best)
    plain, drawn = min(bench.plain), min(bench.drawn)
    return {
        "wait": wait,
        "host": host,
        "device": busy - host,
        "batching": busy * plain / best,
        "augmentation": busy * min(max(drawn - plain, 0.0), best) / best,
    }


def host_and_device(bench: Bench, counts: Counts, rates: Rates, seconds: float) -> tuple[float, float]:
    """(host, device) seconds of a step on the cached batch."""
    if bench.state.device.type == "cuda":
        return launching(bench.cached, seconds), busy(bench.cached)
    flops = counts.flops * len(bench.few["id"]) // counts.samples
    floors = count(bench.small, bench.few, flops).floors(rates)
    least = min(counts.ops * rates.dispatch, bench.small.best_s)
    most = max(bench.small.best_s - max(floors["compute"], floors["memory"]), least)
    host = min((least + most) / 2, bench.cached.best_s)
    return host, bench.cached.best_s - host


def launching(cached: Stepper, seconds: float) -> float:
    """Seconds until a step returns when the device is idle: what the host needs, without waiting for the device."""
    times: list[float] = []
    while len(times) < LEAST or sum(times) < seconds:
        finish(cached.device)
        start = cached.clock()
        cached.step(next(cached.batches))
        times.append(cached.clock() - start)
    finish(cached.device)
    return median(times)


def busy(cached: Stepper) -> float:
    """Seconds that the device works for a step, by the clock of its own that the profiler reads.

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
        worked = device_seconds(json.loads(path.read_text())["traceEvents"])
    return worked / LEAST or cached.mean_s  # nothing traced, as when another profiler runs: count all as the device's


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


def memory_of(cached: Stepper) -> dict[str, float]:
    """MiB that training takes (see StepProfile.memory)."""
    state = cached.state
    with memory.peak(state.device) as peak:
        cached.step(next(cached.batches))
    gradients = memory.size_of(p.grad for p in state.parameters if p.grad is not None)
    found = {"step": peak.bytes, "held": memory.held(state) + gradients}
    if state.device.type == "cuda":
        found["allocated"] = torch.cuda.max_memory_allocated(state.device)
        found["reserved"] = torch.cuda.max_memory_reserved(state.device)
    return {name: size / 2**20 for name, size in found.items()}


def epoch_batches(pack: Pack, plan: Plan) -> list[np.ndarray]:
    ids = pack.ids("train")
    return batches_left(ids, lengths_of(pack, ids), plan.seed, 0, [[plan.batch_size, 0]])


def typical(pack: Pack, plan: Plan) -> np.ndarray:
    """Ids of a whole batch of middling size, as an epoch of the plan makes it."""
    batches = epoch_batches(pack, plan)
    whole = [batch for batch in batches if len(batch) == plan.batch_size] or batches
    if not pack.offsets:
        return whole[0]
    sizes = [sum(int(pack.lengths(column, batch).max(initial=0)) for column in pack.offsets) for batch in whole]
    return whole[int(np.argsort(sizes, kind="stable")[len(sizes) // 2])]


def shapes(pack: Pack, plan: Plan) -> int:
    """Different lengths of an epoch's batches, in units of Plan.bucket where a task has that setting."""
    if pack.card.bucket_by is None:
        return 1
    lengths, unit = partial(pack.lengths, pack.card.bucket_by), getattr(plan, "bucket", 1)
    return len({-(-int(lengths(batch).max(initial=0)) // unit) for batch in epoch_batches(pack, plan)})


def padding(pack: Pack, plan: Plan) -> dict[str, float]:
    """Ragged column → share of the elements of an epoch's batches that are padding; from lengths alone."""
    batches = epoch_batches(pack, plan)
    return {column: padded(pack, column, batches) for column in pack.offsets}


def padded(pack: Pack, column: str, batches: Iterable[np.ndarray]) -> float:
    """Share of padding: batches are as long as their longest sample."""
    lengths = [pack.lengths(column, batch) for batch in batches]
    total = sum(int(each.max(initial=0)) * len(each) for each in lengths)
    return 1 - sum(int(each.sum()) for each in lengths) / max(total, 1)
