"""Time a plan: a copy of the task trains whole steps on the plan's own batches; nothing outside changes.

    timing = timed(task, pack, plan)                  # a Timing: samples/s, and what a step consists of

A step takes the longer of what the host launches and what the device computes; on a CPU both are one. Plans that are
compared take turns, since a machine's speed changes meanwhile.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import random
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from nbtools.data import Feed, Pack, Padding, Raw, batches_left, lengths_of, open_feed, phase, tick
from nbtools.errors import NbtoolsError
from nbtools.train import Plan, Task, TaskLike, TrainState, bound, meter, readable, require_sizes, train_step
from nbtools.train import device as devices

Clock = Callable[[], float]  # seconds since some moment

FULL = 60.0  # seconds of a run from which it is measured as long as any

STILL = {"schedule": "constant", "warmup_epochs": 0.0, "lr": 1e-12, "min_lr": 0.0}
"""The same work per step, and no progress: a full lr without its warmup may lose the loss."""
EAGER = {"compile": False, "graph": False}
"""The same arithmetic, without minutes of compilation."""

ROUNDS, LEAST_ROUNDS = 12, 3  # of turns
STEADY = 0.1  # two steps this close are steady
MOST_WARMING, MOST_WARMING_S = 8, 10.0  # steps and seconds of warming up
LONG = 0.2  # seconds of a step, of which two suffice
TRACED = 5  # steps in a trace of the device
WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what occupies the device in a trace
REDRAWN = 0.1  # seconds between two looks at the bar


@dataclass(frozen=True)
class Timing:
    """How a plan trains here, the median over `turns` turns.

    samples_per_s: by the wall, with least and most; waited: the share of the time in which the device waited for data,
    0–1. Seconds of a step: device_s, that the device works; host_s, that launching it takes the host (on a CPU both are
    the step). cold_s: of the first steps, beyond what steady ones take: kernels loaded and tuned, code compiled.
    """

    plan: dict[str, Any]
    samples_per_s: float
    least: float
    most: float
    turns: int
    waited: float
    device_s: float
    host_s: float
    cold_s: float

    @property
    def step_s(self) -> float:
        return self.plan["batch_size"] / self.samples_per_s


def wall() -> float:
    return perf_counter()


def own_time() -> float:
    """Return the seconds that this process has computed for, on all cores together."""
    return process_time()


class Late(Exception):
    """The time of a measurement is over."""


class Deadline:
    """A clock that ends what takes too long: within `until`, the first reading after the end raises Late, and every
    step reads it. seconds: by `clock`, in all; most: by the wall, whatever else the machine does."""

    def __init__(self, seconds: float, most: float = math.inf, clock: Clock = wall):
        self.seconds, self.most, self.clock = seconds, most, clock
        self.start, self.drawn, self.share = (clock(), wall()), 0.0, math.inf

    def __call__(self) -> float:
        if (now := wall()) - self.drawn > REDRAWN:
            self.drawn = now
            tick()
        if self.left(self.share) < 0:
            raise Late
        return self.clock()

    def left(self, share: float) -> float:
        """Return the seconds until this share of the time is used. What other programs take does not count, but for
        `most`."""
        own, passed = self.clock() - self.start[0], wall() - self.start[1]
        return min(share * self.seconds - min(own, passed), share * self.most - passed)

    def grant(self, seconds: float) -> None:
        """Leave out what something took that is not of this time."""
        self.start = self.start[0] + seconds, self.start[1] + seconds

    @contextmanager
    def until(self, share: float = 1.0, doing: str = "") -> Iterator[None]:
        """Do what the block does until this share of the time is used, and show it as a phase of the work."""
        if doing:
            phase(doing, max(self.left(share), 0.0))
        self.share = share
        try:
            with suppress(Late):
                yield
        finally:
            self.share = math.inf


@dataclass(frozen=True)
class Turn:
    """Some steps. waited: seconds of them that waited for data; host_s: of the fastest, by the host's clock."""

    samples: int
    seconds: float
    waited: float
    steps: int
    host_s: float

    @property
    def samples_per_s(self) -> float:
        return self.samples / max(self.seconds, 1e-9)


class Stepper:
    """A separate model in training, at an lr that moves no weight unless it is `learning`.

    feed: an open one, for several to share; None: the plan's. halves: whether a step that does not fit into memory is
    taken in smaller parts. Raises TrainError if training could not start.
    """

    def __init__(
        self,
        task: TaskLike,
        pack: Pack,
        plan: Plan,
        device: torch.device,
        feed: Feed | None = None,
        clock: Clock = wall,
        learning: bool = False,
        halves: bool = True,
    ):
        pack = readable(task, pack, plan)
        require_sizes(pack, plan)
        self.task, self.pack, self.plan, self.device = bound(task, pack.card), pack, plan, device
        self.clock, self.halves = clock, halves
        self.state = TrainState(apart(self.task), pack, plan if learning else plan.replace(**STILL), device)
        devices.prepare(plan, device)
        self.feed = feed or open_feed(pack, plan, device)
        self.lanes = {"resident": 0, "streamed": 1}.get(self.feed.name, plan.workers)  # threads or processes
        self.ahead = self.lanes * plan.prefetch  # batches that they prepare
        self.epoch_size: float = pack.splits["train"]  # samples from one epoch of the schedule to the next
        self.batches: Iterator[Raw] = self.epochs()
        self.turns: list[Turn] = []
        self.cold_s = 0.0
        self.loss: Tensor | float = 0.0  # sum over the samples of the last step
        self.state.restore_rng()

    def epochs(self) -> Generator[Raw, None, None]:
        """Yield the batches of one epoch after another, in the order in which training sees them."""
        for epoch in count():
            self.state.epoch = epoch
            yield from self.feed(epoch_batches(self.pack, self.plan, epoch))

    def step(self, raw: Raw) -> tuple[Tensor, Tensor | float]:
        """Train on one batch; returns its (loss sum, count)."""
        self.clock()  # a Deadline ends here
        state = self.state
        self.loss, number = train_step(state, raw, self.epoch_size, halves=self.halves)
        state.step += 1
        state.samples += len(raw["id"])
        state.events.clear()
        return self.loss, number

    def advance(self, seconds: float = 0.0, steps: int = 1) -> Turn:
        """Train for at least this long and this many steps, until the device has finished. On CUDA, where launching
        takes less time than the steps do, their number follows from the turn before."""
        torch.set_num_threads(self.plan.threads or devices.threads())
        if self.device.type == "cuda" and self.turns:
            steps, seconds = max(steps, round(seconds / self.turns[-1].seconds * self.turns[-1].steps)), 0.0
        finish(self.device)
        start, watch = self.clock(), meter.Stopwatch(self.device, self.clock)
        samples, host = 0, []
        while len(host) < steps or self.clock() - start < seconds:
            begin = watch.mark()
            raw = next(self.batches)
            got = watch.mark()
            launching = self.clock()
            self.step(raw)
            host.append(self.clock() - launching)
            watch.spans.append([begin, got, watch.mark()])
            samples += len(raw["id"])
        finish(self.device)
        took, (_, waited) = self.clock() - start, meter.seconds(watch.spans)
        self.turns.append(Turn(samples, took, waited, len(host), min(host)))
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

    def warm_up(self, most: int = MOST_WARMING) -> Self:
        """Train until steps take as long as the ones before; what they took beyond that is `cold_s`."""
        times = [self.advance().seconds]
        while len(times) < most and sum(times) < MOST_WARMING_S:
            times.append(self.advance().seconds)
            steady = abs(times[-1] - times[-2]) < STEADY * times[-1]
            if steady and (len(times) > 2 or times[-1] > LONG):
                break
        self.cold_s = sum(times) - len(times) * min(times)
        self.turns.clear()
        return self

    @property
    def lost(self) -> bool:
        """Return whether the last loss is not a number. Waits for the device."""
        return not math.isfinite(float(self.loss))

    def device_s(self) -> float:
        """Return the seconds that the device works for a step: on CUDA by a trace, elsewhere the fastest step's."""
        if self.device.type != "cuda":
            return min(turn.host_s for turn in self.turns)
        return busy(trace(self)) / TRACED or median(turn.seconds / turn.steps for turn in self.turns)

    def over(self, other: Stepper) -> list[float]:
        """Return how many times as fast as another one it was, turn by turn."""
        return [a.samples_per_s / b.samples_per_s for a, b in zip(self.turns, other.turns, strict=True)]

    def timing(self) -> Timing:
        """Return what its turns showed."""
        speeds = [turn.samples_per_s for turn in self.turns]
        waited = median(turn.waited / max(turn.seconds, 1e-9) for turn in self.turns)
        spread, host = (median(speeds), min(speeds), max(speeds), len(speeds)), min(turn.host_s for turn in self.turns)
        return Timing(self.plan.to_dict(), *spread, waited, self.device_s(), host, self.cold_s)

    def close(self) -> None:
        """End the feed's workers."""
        if isinstance(self.batches, Generator):
            self.batches.close()


def timed(task: TaskLike, pack: Pack, plan: Plan, seconds: float = 2.0) -> Timing:
    """Return how a plan trains here, measured for about `seconds` after warming up. Raises TrainError if training could
    not start."""
    device = devices.pick()
    with untouched(device):
        stepper = Stepper(task, pack, plan, device).warm_up()
        in_turns([stepper], seconds)
        stepper.close()
        return stepper.timing()


def share_of(run_s: float | None) -> float:
    """Return what share of its usual time a measurement after a run of so many seconds gets: who trained for a few
    seconds waits no longer than that for a receipt."""
    return 1.0 if run_s is None else min(max(run_s / FULL, 0.1), 1.0)


def attempt(make: Callable[[], Stepper], steps: int = MOST_WARMING) -> Stepper | str:
    """Return what trains, warm; or why it does not: bfloat16 lacks some operations, memory ends, there is no
    compiler."""
    try:
        stepper, why = devices.within_memory(lambda: make().warm_up(steps))
    except (RuntimeError, NbtoolsError, OSError) as error:
        return f"fails ({(str(error).splitlines() or [type(error).__name__])[0].split('. ')[0].rstrip('.')})"
    if stepper is None:
        return f"does not fit into memory ({why})"
    return f"fails (the loss became {float(stepper.loss)})" if stepper.lost else stepper


def in_turns(steppers: Sequence[Stepper], seconds: float) -> None:
    """Train each for a while, round after round, for about `seconds` in all: at least three rounds, but one where these
    would take more than twice as long."""
    clock = steppers[0].clock
    start, each = clock(), seconds / ROUNDS / len(steppers)
    for number in range(ROUNDS):
        if number and clock() - start > seconds * (1 if number >= LEAST_ROUNDS else 2):
            break
        for stepper in steppers:
            stepper.turn(each)


def trace(stepper: Stepper) -> list[dict[str, Any]]:
    """Return the events of some steps on a GPU, by its own clock (Kineto's format: ts and dur in µs).

    Events around a step queued behind long products would serve for short steps only: beyond about 1,000 launches the
    queue is full, the host waits, and its launching counts as the device's work.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(TRACED):
            stepper.step(next(stepper.batches))
        finish(stepper.device)
    with tempfile.TemporaryDirectory(prefix="nbtools-profile-") as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") in WORK]


def busy(events: Iterable[dict[str, Any]]) -> float:
    """Return the seconds in which at least one kernel, copy or fill of a trace runs: streams overlap."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total / 1e6


def apart(task: Task) -> Task:
    """Return the task with a separate model: one that returns the same module each time does not see it trained.
    `build` sees to that where `nb.pack` made the pack."""
    if task.card is not None:
        return task
    own = copy.copy(task)
    vars(own)["model"] = lambda card, plan: copy.deepcopy(task.model(card, plan))
    return own


def epoch_batches(pack: Pack, plan: Plan, epoch: int = 0) -> list[np.ndarray]:
    """Return the ids of an epoch's training batches."""
    ids = pack.ids("train")
    return batches_left(ids, lengths_of(pack, ids), plan.seed, epoch, [[plan.batch_size, 0]])


def typical(pack: Pack, plan: Plan, number: int = 1) -> list[tuple[np.ndarray, float]]:
    """Return [(ids, samples that they stand for)]: whole batches of the plan's first epoch; where lengths differ, those
    whose padded length is nearest to the epoch's mean a sample, so that few stand for all."""
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
    """Training inside changes nothing outside: random states, threads, determinism, cuDNN's autotuner, TF32; what was
    created inside is freed, its memory returned."""
    numbers = random.getstate(), np.random.get_state()
    threads = torch.get_num_threads()
    mode, tuning, precision = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark, None
    with suppress(RuntimeError):  # torch does not tell it where the user set `fp32_precision` (torch ≥ 2.9)
        precision = torch.get_float32_matmul_precision()
    gc.collect()
    devices.give_back(device)  # what an earlier run left is free, though allocators may keep it
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        try:
            yield
        finally:
            random.setstate(numbers[0])
            np.random.set_state(numbers[1])
            torch.set_num_threads(threads)
            torch.set_deterministic_debug_mode(mode)
            torch.backends.cudnn.benchmark = tuning
            if precision is not None:
                torch.set_float32_matmul_precision(precision)
            gc.collect()
            devices.give_back(device)
