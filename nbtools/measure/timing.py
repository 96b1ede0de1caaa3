"""Time a plan: a copy of the task trains whole steps on the plan's own batches; nothing outside changes."""

import copy
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, repeat
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from nbtools.data import Feed, Pack, Padding, Raw, batches_left, lengths_of, open_feed, tick
from nbtools.train import Plan, TaskLike, TrainState, as_task, bind, meter, require_sizes, train_step
from nbtools.train import device as devices

Clock = Callable[[], float]  # seconds since some moment

STILL = {"schedule": "constant", "warmup_epochs": 0.0, "lr": 1e-12, "min_lr": 0.0}  # a full lr may lose the loss
EAGER = {"compile": False, "graph": False}  # the same arithmetic, without minutes of compilation
STEADY, WARMING, WARMING_S = 0.1, 8, 10.0  # two steps this close are steady; most steps and seconds of warming up
REPEATED = 64  # batches that a feed is given at once
TYPICAL = 4  # batches of samples of different lengths that stand for all
RECORDED = 4  # steps of a shape, after which a graph replays it
TRACED = 5  # steps in a trace of the device
WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what occupies the device in a trace


def wall() -> float:
    return perf_counter()


@dataclass(frozen=True)
class Timing:
    """Hold how fast a plan trains here, the median over `turns` turns.

    samples_per_s: by the wall, with least and most; waited: the share of the time in which the device waited for data.
    Seconds of a step: device_s, that the device works; host_s, that launching it takes the host (on a CPU both are the
    step). cold_s: of the first steps, beyond what steady ones take: kernels loaded and tuned, code compiled.
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


class Turn(NamedTuple):
    """Some steps. waited: the share of the time that waited for data; host_s: of the fastest, by the host's clock."""

    samples_per_s: float
    seconds: float
    waited: float
    steps: int
    host_s: float


def epochs(state: TrainState, feed: Feed, pack: Pack, plan: Plan) -> Generator[Raw, None, None]:
    for epoch in count():
        state.epoch = epoch
        yield from feed(epoch_batches(pack, plan, epoch))


class Stepper:
    """A separate model in training, at an lr that moves no weight unless it is `learning`. feed: an open one, to be
    shared. halves: whether a step that does not fit is taken in smaller parts. Raises TrainError if it cannot start."""

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
        pack = as_task(task).part(pack, plan)
        require_sizes(pack, plan)
        self.task = own = shared = bind(task, pack.card)
        self.pack, self.plan, self.device, self.clock, self.halves = pack, plan, device, clock, halves
        if shared.card is None:  # else `build` sees to it: one that returns the same module each time is not trained
            own = copy.copy(shared)
            vars(own)["model"] = lambda card, plan: copy.deepcopy(shared.model(card, plan))
        self.state = TrainState(own, pack, plan if learning else plan.replace(**STILL), device)
        devices.prepare(plan, device)
        self.feed = feed or open_feed(pack, plan, device)
        self.lanes = {"resident": 0, "streamed": 1}.get(self.feed.name, plan.workers)  # threads or processes
        self.batches: Generator[Raw, None, None] = epochs(self.state, self.feed, pack, plan)
        self.turns, self.cold_s, self.pace = list[Turn](), 0.0, 0.0  # pace: seconds of a step in the last turn
        self.loss: Tensor | float = 0.0  # sum over the samples of the last step
        self.state.restore_rng()

    def repeat(self, batch_size: int, number: int = 1) -> float:
        """Go on with so many typical batches of a size again and again; return how many samples one stands for."""
        plan = self.plan.replace(batch_size=batch_size, micro_batch_size=None)
        ids, stands_for = typical(self.pack, plan, number)
        self.batches = (raw for feed in repeat(self.feed) for raw in feed(ids * REPEATED))  # not of `self`: a cycle
        self.turns.clear()
        return stands_for

    def step(self, raw: Raw) -> tuple[Tensor, Tensor | float]:
        """Train on one batch; return its (loss sum, count)."""
        self.clock()  # a Deadline ends here
        torch.use_deterministic_algorithms(self.plan.deterministic)  # plans in turns may differ in it
        state = self.state
        self.loss, number = train_step(state, raw, halves=self.halves)
        state.step += 1
        state.samples += len(raw["id"])
        state.events.clear()
        return self.loss, number

    def advance(self, seconds: float = 0.0, steps: int = 1) -> Turn:
        """Train for at least this long and this many steps, until the device has finished. On CUDA, where launching
        takes less time than the steps do, their number follows from the turn before."""
        if self.device.type == "cuda" and self.pace:
            steps, seconds = max(steps, round(seconds / self.pace)), 0.0
        finish(self.device)
        start, watch = self.clock(), meter.Stopwatch(self.device, self.clock)
        samples, host = 0, list[float]()
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
        took = max(self.clock() - start, 1e-9)
        self.pace = took / len(host)
        self.turns.append(Turn(samples / took, took, meter.seconds(watch.spans)[1] / took, len(host), min(host)))
        tick()
        return self.turns[-1]

    def turn(self, seconds: float) -> Turn:
        """`advance`, without what the feed prepared during the turns of other steppers: that is drawn, and the first
        batch of each of its threads or processes trained on, untimed."""
        for _ in range(self.lanes * self.plan.prefetch):
            next(self.batches)
        if self.lanes:
            self.advance(steps=self.lanes)
            self.turns.pop()
        return self.advance(seconds, max(1, self.lanes))

    def warm_up(self, most: int = WARMING) -> Self:
        """Train until steps take as long as the ones before; what they took beyond that is `cold_s`. On CUDA samples of
        different lengths are typical batches from here on: each width is slow the first time."""
        if self.device.type == "cuda" and self.pack.offsets:
            self.repeat(self.plan.batch_size, TYPICAL)
        times = [self.advance().seconds for _ in range(3)]
        while len(times) < most and sum(times) < WARMING_S and abs(times[-1] - times[-2]) >= STEADY * times[-1]:
            times.append(self.advance().seconds)
        if self.state.graphs is not None:
            self.advance(steps=RECORDED * max(shapes(self.pack, self.plan), TYPICAL))
        self.cold_s = sum(times) - len(times) * min(times)
        self.turns.clear()
        return self

    def device_s(self) -> float:
        """Return the seconds that the device works for a step: on CUDA by a trace, on a CPU the fastest step's."""
        if self.device.type == "cpu":
            return min(turn.host_s for turn in self.turns)
        traced = sum(trace(self).values()) if self.device.type == "cuda" else 0.0
        return traced or median(turn.seconds / turn.steps for turn in self.turns)

    def timing(self) -> Timing:
        """Return what its turns showed, with the micro-batch that fits into memory."""
        speeds, _, waited, _, host = zip(*self.turns, strict=True)
        settings = {**self.plan.to_dict(), "micro_batch_size": self.state.micro}
        spread = median(speeds), min(speeds), max(speeds), len(speeds)
        return Timing(settings, *spread, median(waited), self.device_s(), min(host), self.cold_s)


def trace(stepper: Stepper) -> Counter[str]:
    """Return name → seconds of a step: of kernels, copies and fills on a GPU by its own clock (from Kineto's trace, ts
    and dur in µs), of operations on a CPU. Events would not do: beyond 1,000 launches in its queue the host waits."""
    activity, times = torch.profiler.ProfilerActivity, Counter[str]()
    cuda = stepper.device.type == "cuda"
    with torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU]) as profiler:
        for _ in range(TRACED if cuda else 1):
            stepper.step(next(stepper.batches))
        finish(stepper.device)
    if not cuda:
        return Counter({event.key: event.self_cpu_time_total / 1e6 for event in profiler.key_averages()})
    with tempfile.TemporaryDirectory(prefix="nbtools-profile-") as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        for event in json.loads(path.read_text())["traceEvents"]:
            if event.get("cat") in WORK:
                times[event["name"].partition("<")[0].removeprefix("void ")] += event["dur"] / 1e6 / TRACED
    return times


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def epoch_batches(pack: Pack, plan: Plan, epoch: int = 0) -> list[np.ndarray]:
    ids = pack.ids("train")
    return batches_left(ids, lengths_of(pack, ids), plan.seed, epoch, [[plan.batch_size, 0]])


def shapes(pack: Pack, plan: Plan) -> int:
    """Return how many different shapes an epoch's batches have, as they are padded."""
    return len(set(zip(*Padding(pack, plan).of(pack, epoch_batches(pack, plan)).values(), strict=True))) or 1


def typical(pack: Pack, plan: Plan, number: int = 1) -> tuple[list[np.ndarray], float]:
    """Return (ids of whole batches of the plan's first epoch, how many samples one of theirs stands for): where lengths
    differ, those whose padded length is nearest to the epoch's mean a sample, so that few stand for all."""
    batches = epoch_batches(pack, plan)
    whole = [ids for ids in batches if len(ids) == plan.batch_size] or batches
    lengths = Padding(pack, plan).of(pack, whole).get(pack.card.bucket_by or "", [1] * len(whole))
    mean = float(np.mean(lengths))
    like = sorted(zip(lengths, whole, strict=True), key=lambda each: abs(each[0] - mean))[:number]
    return [ids for _, ids in like], float(np.mean([length for length, _ in like])) / mean


@contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Training inside changes nothing outside, nor the number of threads; what it created is freed."""
    devices.give_back()  # what an earlier run left is free, though allocators may keep it
    with ExitStack() as back, devices.untouched(device), torch.enable_grad():
        back.callback(devices.give_back)
        back.callback(torch.set_num_threads, torch.get_num_threads())
        yield
