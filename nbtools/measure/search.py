"""The search for a batch size: doubled until throughput is flat or something ends, then those about the knee measured
in turns until the choice is clear."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from time import perf_counter

from nbtools import disk
from nbtools.data import require_shared_memory
from nbtools.errors import TrainError
from nbtools.measure.choice import LEAST_TURNS, Choice, between, choose, hopeless, knee, near
from nbtools.measure.memory import Line, Room
from nbtools.measure.trial import Load, Trial
from nbtools.train import Plan

LEAST = 2  # BatchNorm needs two samples
RISING = 1.03  # a doubling that gives less than this twice in a row is flat
GLANCES = 3  # turns at first sight, of which the best counts: a busy machine makes steps slower, never faster
MOST_TURNS = 60
FLAT, LATE = "throughput no longer rises", "the time was up"
PATIENCE = 1.4
LONG = (
    1.0  # seconds of a step; a shorter one is not timed just after another batch size, whose memory malloc still holds
)
CLIMB = 0.5  # of the time at most for doubling; the rest is for turns


Cap = tuple[int, str]  # largest batch, why


@dataclass
class Candidate:
    """A batch size under measurement. seconds: of a step; reason: why it does not fit, empty where it does."""

    batch_size: int
    predicted: int | None = None
    measured: int | None = None
    reason: str = ""
    seconds: float = 0.0
    first: float | None = None  # samples/s at first sight, while climbing
    rates: list[float] = field(default_factory=list)  # samples/s of each turn
    loads: list[Load] = field(default_factory=list)


class Search:
    """The candidates and the clock. `start`, `climb`, `turns`, in this order."""

    def __init__(self, trial: Trial, plan: Plan, free: Room | None, cap: Cap, seconds: float):
        self.trial, self.plan, self.free, self.seconds = trial, plan, free, seconds
        self.begin()
        self.cap, self.cap_reason = cap
        self.slice = min(0.2, max(0.01, seconds / 250))  # seconds that a turn lasts at least
        self.candidates: dict[int, Candidate] = {}
        self.ended = ""  # why no larger batch was tried
        self.choice: Choice | None = None

    def begin(self) -> None:
        self.began = perf_counter(), self.trial.clock()

    def elapsed(self) -> float:
        """Seconds of the trial's clock, but a busy machine may stretch them on the wall by PATIENCE at most."""
        wall, clock = perf_counter() - self.began[0], self.trial.clock() - self.began[1]
        return max(clock, wall / PATIENCE)

    @property
    def usable(self) -> float:
        return math.inf if self.free is None else self.free.usable

    def start(self) -> None:
        """A first step, which makes what the optimizer keeps and shows that one fits at all. Raises TrainError."""
        first = min(LEAST, self.cap)
        reason = self.trial.warm(first)
        if not reason and not self.probe(first).reason:
            self.begin()  # a first step may load libraries and choose kernels for seconds
            return
        reason = reason or self.candidates[first].reason
        if first > 1:
            reason = self.alone()
            if not reason:
                return
        raise TrainError(
            f"not even one sample fits ({reason}): take a smaller network or smaller samples, "
            "Plan.amp or Plan.checkpoint_activations, or free memory"
        )

    def alone(self) -> str:
        """Whether one sample fits where two do not; why not, if not. Raises TrainError where the model refuses one."""
        try:
            reason = self.trial.warm(1)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            reason = "two samples do not fit, and BatchNorm cannot train on one"
        if not reason and not self.probe(1).reason:
            self.cap, self.cap_reason = 1, "two samples do not fit"
            return ""
        return reason or self.candidates[1].reason

    def line(self) -> Line | None:
        """Memory through the two largest batches measured so far: a kernel or peak that sets in later then counts."""
        points = sorted((c.batch_size, c.measured) for c in self.candidates.values() if c.measured is not None)
        return Line.through(points[-2], points[-1]) if len(points) > 1 else None

    def probe(self, size: int) -> Candidate:
        """Predict, then do one real step with the largest shapes; it also warms this size up."""
        line = self.line()
        candidate = self.candidates[size] = Candidate(size, None if line is None else line.at(size))
        candidate.reason = self.too_much(candidate.predicted) or self.no_shared_memory(size)
        if not candidate.reason:
            start = perf_counter()
            candidate.measured, candidate.reason = self.trial.measure(size)
            candidate.seconds = perf_counter() - start
            candidate.reason = candidate.reason or self.too_much(candidate.measured)
        return candidate

    def too_much(self, need: int | None) -> str:
        if need is None or self.free is None or need <= self.usable:
            return ""
        free = f"{disk.human(self.free.bytes)} {self.free.source}, {100 * self.free.headroom:.0f} % kept free"
        return f"it takes {disk.human(need)} of {free}"

    def no_shared_memory(self, size: int) -> str:
        if self.trial.feed.name != "workers" or not self.plan.workers:
            return ""
        try:
            require_shared_memory(self.trial.pack, self.plan.replace(batch_size=size, micro_batch_size=None))
        except TrainError as error:
            return str(error)
        return ""

    def time(self, candidate: Candidate) -> float | None:
        """samples/s of one turn; None, and the candidate is out, where memory ended."""
        if not candidate.loads:
            candidate.loads = self.trial.typical(candidate.batch_size)
        steps, lead = max(1, round(self.slice / max(candidate.seconds, 1e-6))), candidate.seconds < LONG
        start = perf_counter()
        rate, candidate.reason = self.trial.rate(candidate.loads, steps, int(lead))
        candidate.seconds = (perf_counter() - start) / (steps + max(lead, self.trial.ahead))
        return rate

    def climb(self) -> None:
        """Double until throughput is flat, or memory, data or time end."""
        best, flat, size = 0.0, 0, min(self.candidates)
        while True:
            candidate = self.candidates.get(size) or self.probe(size)
            glances: list[float | None] = [None]
            if not candidate.reason and (candidate.seconds < self.slice or self.trial.device.type != "cpu"):
                self.time(candidate)  # its speed decides how many steps a turn has; a GPU's first is no measure of it
            while not candidate.reason and len(glances) <= (GLANCES if candidate.seconds < self.slice else 1):
                glances.append(self.time(candidate))
            candidate.first = max((rate for rate in glances if rate is not None), default=None)
            if candidate.reason or candidate.first is None:
                self.ended = f"{size} does not fit: {candidate.reason}"
                return
            flat = flat + 1 if candidate.first < RISING * best else 0
            best = max(best, candidate.first)
            self.ended = self.stop(candidate, flat)
            if self.ended:
                return
            size *= 2

    def stop(self, candidate: Candidate, flat: int) -> str:
        """Why not to double again; empty to go on."""
        if flat >= 2:
            return FLAT
        if candidate.batch_size * 2 > self.cap:
            return self.cap_reason
        if self.elapsed() + 3 * max(self.slice, 2 * candidate.seconds) > CLIMB * self.seconds:
            return LATE
        return ""

    def turns(self) -> None:
        """Measure what is near the best, and sizes between, in turns until the choice is clear or the time is up."""
        firsts = {c.batch_size: c.first for c in self.candidates.values() if c.first is not None and not c.reason}
        if not firsts:
            raise TrainError(f"memory ended while measuring ({self.ended}); free memory and try again")
        live = [self.candidates[size] for size in near(firsts)]
        live += self.added(between(list(self.candidates), *knee(firsts), self.cap))
        for done in range(MOST_TURNS):
            live.sort(key=lambda c: c.batch_size)
            if done and self.elapsed() + sum(max(self.slice, c.seconds) for c in live) > self.seconds:
                break
            live = self.turn(live, first=done % len(live))
            rates = {c.batch_size: c.rates for c in live}
            further = self.further(choose(rates)) if done + 1 == LEAST_TURNS else []
            if not further and choose(rates).clear:
                break
            out = hopeless(rates)
            live = [c for c in live if c.batch_size not in out] + further
        self.choice = choose({c.batch_size: c.rates for c in live if c.rates})

    def further(self, choice: Choice) -> list[Candidate]:
        """What turns show to be worth trying, against first sight: half-way steps about another knee, and twice the
        largest where that is the best."""
        sizes = between(list(self.candidates), choice.batch_size, choice.best, self.cap)
        largest = max(self.candidates)
        if choice.best == largest and self.ended == FLAT and 2 * largest <= self.cap:
            sizes.append(2 * largest)
        return self.added(sizes)

    def added(self, sizes: list[int]) -> list[Candidate]:
        """New candidates, those that fit and that there is time for."""
        longest = max((c.seconds for c in self.candidates.values()), default=0.0)
        return [
            self.candidates[size]
            for size in sizes
            if self.elapsed() + 3 * longest < self.seconds and not self.probe(size).reason
        ]

    def turn(self, live: list[Candidate], first: int) -> list[Candidate]:
        """One turn each, begun by another one every time; those that still fit."""
        for candidate in live[first:] + live[:first]:
            rate = self.time(candidate)
            if rate is not None:
                candidate.rates.append(rate)
        left = [candidate for candidate in live if not candidate.reason]
        if not left:
            raise TrainError(f"memory ended while measuring ({live[0].reason}); free memory and try again")
        return left
