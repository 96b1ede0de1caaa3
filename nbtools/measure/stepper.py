"""The stepper: a task training for some steps on given batches, timed, without side effects. Every measurement in
this package consists of its turns.

    with untouched(device):
        stepper = Stepper(task, pack, plan, device)
        turn = stepper.advance(seconds=0.5)       # batches of the plan's own epochs, one epoch after another
        cached = stepper.on(repeat(raw))          # the same model on other batches, its turns counted apart

Steppers of several plans take turns, since a machine's speed changes by more than what is to be measured.
"""

from __future__ import annotations

import copy
import gc
import math
import random
import statistics
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from nbtools.data import Feed, Pack, Padding, Raw, batches_left, lengths_of, open_feed, tick
from nbtools.train import Plan, Task, TaskLike, TrainState, bound, clock, readable, require_sizes, train_step
from nbtools.train import device as devices

Clock = Callable[[], float]  # seconds since some moment; tests give one that they move by hand
Act = Callable[..., tuple[Tensor, Tensor | float]]

STILL = {"schedule": "constant", "warmup_epochs": 0.0, "lr": 1e-12, "min_lr": 0.0}
"""The same work per step, and no progress: a full lr without its warmup may lose the loss."""

EAGER = {"compile": False, "graph": False}
"""The same arithmetic, without minutes of compilation."""


@dataclass(frozen=True)
class Turn:
    """Some steps. waited: seconds of them that waited for data; step_s: seconds of the fastest, without its wait."""

    samples: int
    seconds: float
    waited: float
    steps: int
    step_s: float

    @property
    def samples_per_s(self) -> float:
        return self.samples / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Rate:
    """How a plan trains here: medians over rounds. data_wait: the share of the time that waited for data, 0–1."""

    plan: dict[str, Any]
    samples_per_s: float
    least: float
    most: float
    data_wait: float
    rounds: int


class Stepper:
    """A separate model in training, at an lr that moves no weight unless it is `learning`.

    feed: an open one, for several to share; None: the plan's. act: what makes a step; `train_step` without
    `halves` where running out of memory is an answer. lanes: the feed's threads or
    processes; ahead: batches that they prepare in advance. Raises TrainError if training could not start.
    """

    def __init__(
        self,
        task: TaskLike,
        pack: Pack,
        plan: Plan,
        device: torch.device,
        feed: Feed | None = None,
        clock: Clock | None = None,
        act: Act = train_step,
        learning: bool = False,
    ):
        pack = readable(task, pack, plan)
        require_sizes(pack, plan)
        self.task, self.pack, self.plan, self.device = bound(task, pack.card), pack, plan, device
        self.clock, self.act = clock or perf_counter, act
        self.state = TrainState(apart(self.task), pack, plan if learning else plan.replace(**STILL), device)
        devices.prepare(plan, device)
        self.feed = feed or open_feed(pack, plan, device)
        self.lanes = {"resident": 0, "streamed": 1}.get(self.feed.name, plan.workers)
        self.ahead = self.lanes * plan.prefetch
        self.epoch_size: float = pack.splits["train"]  # samples from one epoch of the schedule to the next
        self.batches: Iterator[Raw] = self.epochs()
        self.turns: list[Turn] = []
        self.loss: Tensor | float = 0.0  # sum over the samples of the last step
        self.state.restore_rng()

    def on(self, batches: Iterator[Raw], act: Act | None = None) -> Self:
        """The same model in training on other batches, with separate turns."""
        other = copy.copy(self)
        other.batches, other.turns, other.act = batches, [], act or self.act
        return other

    def epochs(self, first: int = 0, feed: Feed | None = None) -> Generator[Raw, None, None]:
        """The batches of one epoch after another, in the order in which training sees them."""
        for epoch in count(first):
            self.state.position.epoch = epoch
            yield from (feed or self.feed)(epoch_batches(self.pack, self.plan, epoch))

    def step(self, raw: Raw) -> tuple[Tensor, Tensor | float]:
        """Train on one batch; returns its (loss sum, count)."""
        state = self.state
        self.loss, number = self.act(state, raw, self.epoch_size)
        state.position.step += 1
        state.position.samples += len(raw["id"])
        state.events.clear()
        return self.loss, number

    def mean_loss(self) -> float:
        """Train on the next batch; its mean loss. Reading it waits for the device."""
        loss_sum, number = self.step(next(self.batches))
        return float(loss_sum) / max(float(number), 1)

    def advance(self, seconds: float = 0.0, steps: int = 1) -> Turn:
        """Train for at least this long and this many steps, until the device has finished. On CUDA, where launching
        takes less time than the steps do, their number follows from the turn before."""
        devices.use_threads(self.plan.threads)
        if self.device.type == "cuda" and self.turns:
            steps, seconds = max(steps, round(seconds / self.mean_s)), 0.0
        finish(self.device)
        start, watch = self.clock(), clock.Stopwatch(self.device, self.clock)
        samples = done = 0
        while done < steps or self.clock() - start < seconds:
            watch.begin()
            raw = next(self.batches)
            watch.got()
            self.step(raw)
            watch.end()
            done, samples = done + 1, samples + len(raw["id"])
        finish(self.device)
        took, (_, waited) = self.clock() - start, clock.seconds(watch.spans)
        best = min(clock.between(got, end) for _, got, end in watch.spans) if self.device.type == "cpu" else took / done
        self.turns.append(Turn(samples, took, waited, done, best))
        tick()
        return self.turns[-1]

    def turn(self, seconds: float) -> Turn:
        """`advance`, without what the feed prepared during the turns of other steppers: that is drawn, and the first
        batch of each of its threads or processes trained on, untimed."""
        for _ in range(self.ahead):
            next(self.batches)
        if self.lanes:
            self.advance(steps=self.lanes)
            self.turns.pop()
        return self.advance(seconds, max(1, self.lanes))

    def warm_up(self, steps: int = 3) -> Self:
        """Train for some steps that do not count."""
        if steps:
            self.advance(steps=steps)
        self.turns.clear()
        return self

    @property
    def lost(self) -> bool:
        """Whether the last loss is not a number. Waits for the device."""
        return not math.isfinite(float(self.loss))

    @property
    def best_s(self) -> float:
        """Seconds of the fastest step."""
        return min(turn.step_s for turn in self.turns)

    @property
    def mean_s(self) -> float:
        """Seconds per step, the median over turns."""
        return statistics.median(turn.seconds / turn.steps for turn in self.turns)

    def over(self, other: Stepper) -> list[float]:
        """How many times as fast as another one it was, turn by turn."""
        return [a.samples_per_s / b.samples_per_s for a, b in zip(self.turns, other.turns, strict=True)]

    def rate(self) -> Rate:
        speeds = [turn.samples_per_s for turn in self.turns]
        wait = statistics.median(turn.waited / max(turn.seconds, 1e-9) for turn in self.turns)
        return Rate(self.plan.to_dict(), statistics.median(speeds), min(speeds), max(speeds), wait, len(speeds))

    def close(self) -> None:
        """End the feed's workers."""
        if isinstance(self.batches, Generator):
            self.batches.close()


def apart(task: Task) -> Task:
    """The task with a separate model: one that returns the same module each time does not see it trained. `build` sees
    to that where `nb.pack` made the pack."""
    if task.card is not None:
        return task
    own = copy.copy(task)
    vars(own)["model"] = lambda card, plan: copy.deepcopy(task.model(card, plan))
    return own


def epoch_batches(pack: Pack, plan: Plan, epoch: int = 0) -> list[np.ndarray]:
    """The ids of an epoch's training batches."""
    ids = pack.ids("train")
    return batches_left(ids, lengths_of(pack, ids), plan.seed, epoch, [[plan.batch_size, 0]])


def typical(pack: Pack, plan: Plan, number: int = 1) -> list[tuple[np.ndarray, float]]:
    """[(ids, samples that they stand for)]: whole batches of the plan's first epoch; where lengths differ, those whose
    padded length is nearest to the epoch's mean a sample, so that few stand for all."""
    batches, column = epoch_batches(pack, plan), pack.card.bucket_by
    whole = [ids for ids in batches if len(ids) == plan.batch_size] or batches
    lengths = Padding(pack, plan).of(pack, batches)
    if column not in lengths:
        return [(ids, len(ids)) for ids in whole[:number]]
    padded = list(zip(lengths[column], batches, strict=True))
    mean = sum(length * len(ids) for length, ids in padded) / sum(map(len, batches))
    like = [(length, ids) for length, ids in padded if len(ids) == len(whole[0])]
    like.sort(key=lambda each: abs(each[0] - mean))
    return [(ids, len(ids) * length / mean) for length, ids in like[:number]]


def finish(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Training inside changes nothing outside: the random states of torch, NumPy and Python, determinism,
    cuDNN's and TF32's switches; what was created inside is freed, its memory returned."""
    numbers, switches = (random.getstate(), np.random.get_state()), read_switches()
    gc.collect()
    devices.give_back(device)  # what an earlier run left is free, though allocators may keep it
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        try:
            yield
        finally:
            random.setstate(numbers[0])
            np.random.set_state(numbers[1])
            write_switches(switches)
            gc.collect()
            devices.give_back(device)


def read_switches() -> dict[str, Any]:
    """Those that `nbtools.train.device.prepare` sets. precision: None where torch does not tell it because the user set
    `fp32_precision` (torch ≥ 2.9), which is kept instead."""
    try:
        precision, backends = torch.get_float32_matmul_precision(), []
    except RuntimeError:
        precision, backends = None, [(module, module.fp32_precision) for module in products()]
    return {
        "threads": torch.get_num_threads() if devices.OWN_THREADS else None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "precision": precision,
        "backends": backends,
    }


def write_switches(switches: dict[str, Any]) -> None:
    devices.use_threads(switches["threads"])
    torch.use_deterministic_algorithms(switches["deterministic"], warn_only=switches["warn_only"])
    torch.backends.cudnn.benchmark = switches["benchmark"]
    if switches["precision"] is not None and read_switches()["precision"] != switches["precision"]:
        torch.set_float32_matmul_precision(switches["precision"])
    for module, precision in switches["backends"]:
        module.fp32_precision = precision


def products() -> tuple[Any, ...]:
    """The matrix products that `torch.set_float32_matmul_precision` sets."""
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
