"""The batch size: the smallest whose throughput is within 5 % of the best, measured on this machine.

The largest batch that fits is not the fastest, and rarely needed: past a knee throughput is flat. So batch sizes are
doubled until throughput no longer rises, or memory, data or time end; then those about the knee, and sizes between, are
measured in turns (neighbours and clocks change a machine's speed by more than 5 %), until the choice is clear.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch

from nbtools import disk
from nbtools.data import Pack, batches_left, choose, require_shared_memory
from nbtools.errors import TrainError
from nbtools.measure import memory
from nbtools.measure.memory import Line, Room
from nbtools.measure.report import Report
from nbtools.measure.stepper import EAGER, Clock, Stepper, clock_of, untouched
from nbtools.train import Plan, TaskLike, attempt, clear_gradients, release, within_memory
from nbtools.train import device as devices

WITHIN = 0.95  # of the best throughput
NEAR = 0.75  # of the best: worth measuring again
CLEAR = 2.0  # standard errors between a ratio and WITHIN
OUT = 3.0  # standard errors below NEAR: measured no longer
LEAST_TURNS, MOST_TURNS = 8, 60  # fewer say nothing
LEAST = 2  # BatchNorm needs two samples
RISING = 1.03  # a doubling that gives less than this twice in a row is flat
GLANCES = 3  # turns at first sight, of which the best counts: a busy machine makes steps slower, never faster
FLAT, LATE = "throughput no longer rises", "the time was up"
PATIENCE = 1.4  # times the seconds asked for that a busy machine may stretch a search to
LONG = 1.0  # seconds of a step: a shorter one is not timed just after another size, whose memory malloc still holds
CLIMB = 0.5  # of the time at most for doubling; the rest is for turns


@dataclass(frozen=True)
class Row:
    """What was found about one batch size. samples_per_s: the median over n turns, with their least and most; None: it
    was not timed. predicted, measured: bytes of a run at its peak with the largest samples; predicted from the two
    sizes measured before it, None for those two."""

    batch_size: int
    samples_per_s: float | None
    least: float | None
    most: float | None
    n: int
    predicted: int | None
    measured: int | None
    fits: bool


@dataclass(frozen=True)
class BatchReport(Report):
    """A batch size and its evidence. Shows as a table.

    micro_batch_size: samples a forward pass for the plan's own batch size where that does not fit at once, else None.
    limit: bytes that a run may take, headroom off (10 %, of RAM 20 %); None where nobody knows. seconds: what that
    took. clock: CPU time or wall-clock time. complete: whether something else than the time ended the search for larger
    sizes.
    """

    batch_size: int
    micro_batch_size: int | None
    rows: tuple[Row, ...]
    limit: int | None
    limit_source: str
    seconds: float
    clock: str
    why: str
    complete: bool

    def table(self) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        best = max((row.samples_per_s or 0 for row in self.rows), default=0)
        return ("batch", "samples/s", "of the best", "memory predicted", "measured", ""), [
            (
                row.batch_size,
                f"{row.samples_per_s:,.0f} ({row.least:,.0f}–{row.most:,.0f}, n={row.n})" if row.n else None,
                f"{row.samples_per_s / best:.0%}" if row.samples_per_s else None,
                None if row.predicted is None else disk.human(row.predicted),
                None if row.measured is None else disk.human(row.measured),
                ("fits" if row.fits else "does not fit") + (" ← chosen" if row.batch_size == self.batch_size else ""),
            )
            for row in self.rows
        ]

    def footer(self) -> str:
        return self.why


def find_batch(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    device: torch.device | str | None = None,
    seconds: float = 20.0,
    most: int | None = None,
    limit: int | None = None,
    clock: Clock | None = None,
) -> BatchReport:
    """The smallest batch within 5 % of the best throughput that fits, for this plan on this machine.

    most: no larger one is considered (never one larger than the train split). limit: bytes to stay below instead of
    what is free now. seconds: about so long (up to 1.4 times on a busy machine), plus the first step and one or two of
    the largest batch. clock: as of a Stepper; None: CPU time where that tells the work. Nothing outside changes.
    Raises TrainError where not even one sample fits, or the train split has fewer than two.
    """
    where = torch.device(device) if device is not None else devices.pick()
    train = pack.splits["train"]
    if train < 2:
        raise TrainError(f"{pack.folder}: the train split has {train} sample(s); pack at least 2")
    cap = train, f"the train split has {train:,} samples"
    if most is not None and most < train:
        cap = max(most, 1), f"no more than {most:,} were asked for"
    with untouched(where):
        free = memory.room(where) if limit is None else Room(limit, "the limit given")
        found = searched(task, pack, plan, where, free, cap, seconds, clock)
    if isinstance(found, TrainError):
        raise found
    return found


def searched(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    device: torch.device,
    free: Room | None,
    cap: tuple[int, str],
    seconds: float,
    clock: Clock | None,
) -> BatchReport | TrainError:
    """The report or why there is none: an error that was raised would keep the trial and its memory for as long as a
    notebook shows it."""
    began = perf_counter()
    trial, reason = within_memory(lambda: Trial(task, pack, plan, device, clock))
    if trial is None:
        return TrainError(f"out of memory before the first step ({reason}); use a smaller network, or free memory")
    try:
        search = Search(trial, plan, free, cap, seconds)
        search.start()
        search.climb()
        choice = search.turns()
    except TrainError as error:
        return error.with_traceback(None)
    return search.report(choice, perf_counter() - began)


@dataclass(frozen=True)
class Choice:
    """The smallest batch size within 5 % of the best; clear: whether more turns could hardly change it."""

    batch_size: int
    best: int
    ratio: float
    clear: bool


def chosen(rates: Mapping[int, Sequence[float]]) -> Choice:
    """samples/s of each turn by batch size → the choice. A size is within 5 % of the best when its median ratio is,
    less its standard error."""
    best, turns, ratios = to_the_best(rates)
    found, ratio, clear = best, 1.0, turns >= LEAST_TURNS
    for size in sorted((size for size in rates if size < best), reverse=True):
        middle, error = ratios[size]
        if middle - error >= WITHIN:
            found, ratio = size, middle
        clear = clear and abs(middle - WITHIN) > CLEAR * error
    return Choice(found, best, ratio, clear)


def hopeless(rates: Mapping[int, Sequence[float]]) -> list[int]:
    """Sizes so clearly below the best that more turns are wasted on them."""
    _, turns, ratios = to_the_best(rates)
    return [size for size, (middle, error) in ratios.items() if turns >= LEAST_TURNS and middle + OUT * error < NEAR]


def to_the_best(rates: Mapping[int, Sequence[float]]) -> tuple[int, int, dict[int, tuple[float, float]]]:
    """(the best size, turns, size → (median ratio to the best, its standard error)), within the last turns, those that
    all sizes had together: a machine's speed changes from turn to turn."""
    turns = min(map(len, rates.values()))
    best = max(rates, key=lambda size: statistics.median(rates[size][-turns:]))
    return best, turns, {size: compared(values[-turns:], rates[best][-turns:]) for size, values in rates.items()}


def compared(rates: Sequence[float], best: Sequence[float]) -> tuple[float, float]:
    """(median ratio to the best within a turn, its standard error), by median deviation: neighbours make outliers."""
    ratios = [a / b for a, b in zip(rates, best, strict=True)]
    middle = statistics.median(ratios)
    spread = 1.48 * statistics.median(abs(r - middle) for r in ratios)  # of a normal distribution: its σ
    return middle, 1.25 * spread / math.sqrt(len(ratios))


def near(firsts: Mapping[int, float]) -> list[int]:
    """Sizes worth turns after a first sight, which may deceive: those near the best, and its neighbours in any case."""
    best = max(firsts, key=lambda size: firsts[size])
    return sorted(s for s, rate in firsts.items() if rate >= NEAR * firsts[best] or s in (best // 2, best * 2))


def between(sizes: Sequence[int], knee: int, best: int, cap: int) -> list[int]:
    """Sizes to try besides the powers of two: half-way steps about the knee and the best, for throughput is no smooth
    function of the batch size (on one CPU 96 was 10 % above 64 and 128)."""
    powers = [size for size in (knee, best) if size & (size - 1) == 0]
    found = {size * k // 4 for size in powers for k in (3, 6)} | ({cap} if cap < 1.5 * best else set())
    return sorted(size for size in found - set(sizes) if min(sizes) < size <= cap)


@dataclass
class Candidate:
    """A batch size under measurement. loads: [(ids, samples that they stand for)] to time; reason: why it does not fit,
    empty where it does; seconds: of a step; first: samples/s at first sight, while climbing; rates: of each turn."""

    batch_size: int
    predicted: int | None = None
    measured: int | None = None
    reason: str = ""
    seconds: float = 0.0
    first: float | None = None
    rates: list[float] = field(default_factory=list)
    loads: list[tuple[np.ndarray, float]] = field(default_factory=list)


class Trial(Stepper):
    """The plan's train step at any batch size. Out of memory comes back as an answer, and leaves a state that can go
    on."""

    def __init__(self, task: TaskLike, pack: Pack, plan: Plan, device: torch.device, clock: Clock | None = None):
        self.before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        timed, name = clock_of(device, choose(pack, plan, device)[0])
        timed, self.clock_name = (timed, name) if clock is None else (clock, "the clock given")
        smaller = min(plan.batch_size, pack.splits["train"])
        whole = plan.replace(micro_batch_size=None, **EAGER).replace(batch_size=smaller)
        super().__init__(task, pack, whole, device, clock=timed, act=attempt)
        self.ids = pack.ids("train")
        self.order = by_size(pack, self.ids)
        resident = self.feed.name == "resident"
        self.ahead = 0 if resident else plan.prefetch * max(plan.workers, 1)  # batches made ready: none of them timed

    def largest(self, size: int) -> None:
        """A step with the samples that make the largest batch."""
        for raw in self.feed([self.order[:size]]):
            self.step(raw)

    def warm(self, size: int) -> str:
        """A step with the largest shapes; why not, where memory ended."""
        return self.recovered(within_memory(lambda: self.largest(size))[1])

    def measure(self, size: int) -> tuple[int | None, str]:
        """(bytes, "") that training at this batch size takes in all at its peak, from a step with the largest shapes;
        (None, why) where memory ended."""
        clear_gradients(self.state.parameters)
        cuda = self.device.type == "cuda"
        kept = torch.cuda.memory_allocated(self.device) - self.before if cuda else memory.held(self.state)

        def peak() -> int:
            with memory.peak(self.device) as peak:
                self.largest(size)
            return peak.bytes

        found, reason = within_memory(peak)
        return (None if found is None else kept + found), self.recovered(reason)

    def rate(self, loads: Sequence[tuple[np.ndarray, float]], steps: int, lead: int) -> tuple[float | None, str]:
        """(samples/s, "") over so many steps through the loads in turn, after `lead` untimed ones; (None, why) where
        memory ended."""
        lead = max(lead, self.ahead)
        loads = [loads[i % len(loads)] for i in range(lead + steps)]

        def timed() -> float:
            turn = self.on(iter(self.feed([ids for ids, _ in loads])))
            for _ in range(lead):
                turn.step(next(turn.batches))
            seconds = turn.advance(steps=steps).seconds
            return sum(samples for _, samples in loads[lead:]) / max(seconds, 1e-9)

        found, reason = within_memory(timed)
        return found, self.recovered(reason)

    def recovered(self, reason: str) -> str:
        """After running out of memory, keep nothing of the failed step."""
        if reason:
            release(self.state)
        return reason

    def typical(self, size: int, count: int = 4) -> list[tuple[np.ndarray, float]]:
        """[(ids, samples that they stand for)]: whole batches of the plan's first epoch as the feed groups them; of
        ragged ones those whose padded length is nearest to the epoch's mean a sample, so that few stand for all."""
        column = self.state.card.bucket_by
        lengths = self.pack.lengths(column, self.ids) if column else None
        groups = batches_left(self.ids, lengths, self.plan.seed, 0, [[size, 0]])
        whole = [ids for ids in groups if len(ids) == size] or groups
        if column is None:
            return [(ids, len(ids)) for ids in whole[:count]]
        padded = [float(self.pack.lengths(column, ids).max()) for ids in groups]
        mean = sum(length * len(ids) for length, ids in zip(padded, groups, strict=True)) / len(self.ids)
        like = sorted((abs(length - mean), i) for i, length in enumerate(padded) if len(groups[i]) == len(whole[0]))
        return [(groups[i], len(groups[i]) * padded[i] / mean) for _, i in like[:count]]


def by_size(pack: Pack, ids: np.ndarray) -> np.ndarray:
    """Ids from the largest sample to the smallest; the longest of each ragged column come first, since each pads the
    whole batch."""
    if not pack.offsets:
        return ids
    sizes, first = np.zeros(len(ids)), []
    for name in pack.offsets:
        lengths, column = pack.lengths(name, ids), pack.columns[name]
        first.append(int(lengths.argmax()))
        sizes += lengths * np.dtype(column.dtype).itemsize * np.prod(column.shape, initial=1)
    order = [*dict.fromkeys(first), *np.argsort(-sizes, kind="stable").tolist()]
    return ids[list(dict.fromkeys(order))]


class Search:
    """The candidates and the clock: `start`, `climb`, `turns`, `report`, in this order. cap: (largest batch, why)."""

    def __init__(self, trial: Trial, plan: Plan, free: Room | None, cap: tuple[int, str], seconds: float):
        self.trial, self.plan, self.free, self.seconds = trial, plan, free, seconds
        self.cap, self.cap_reason = cap
        self.slice = min(0.2, max(0.01, seconds / 250))  # seconds that a turn lasts at least
        self.candidates: dict[int, Candidate] = {}
        self.ended = ""  # why no larger batch was tried
        self.began = perf_counter(), trial.clock()

    def elapsed(self) -> float:
        """Seconds of the trial's clock, but a busy machine may stretch them on the wall by PATIENCE at most."""
        wall, clock = perf_counter() - self.began[0], self.trial.clock() - self.began[1]
        return max(clock, wall / PATIENCE)

    def start(self) -> None:
        """A first step, which makes what the optimizer keeps and shows that one fits at all. Raises TrainError."""
        first = min(LEAST, self.cap)
        reason = self.trial.warm(first) or self.probe(first).reason
        if reason and first > 1:
            try:
                reason = self.trial.warm(1) or self.probe(1).reason
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                reason = "two samples do not fit, and BatchNorm cannot train on one"
            self.cap, self.cap_reason = 1, "two samples do not fit"
        if reason:
            raise TrainError(
                f"not even one sample fits ({reason}): use a smaller network or smaller samples, "
                "Plan.amp or Plan.checkpoint_activations, or free memory"
            )
        self.began = (
            perf_counter(),
            self.trial.clock(),
        )  # the first step may load libraries for seconds

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
            start = self.trial.clock()
            candidate.measured, candidate.reason = self.trial.measure(size)
            candidate.seconds = self.trial.clock() - start
            candidate.reason = candidate.reason or self.too_much(candidate.measured)
        return candidate

    def too_much(self, need: int | None) -> str:
        if need is None or self.free is None or need <= self.free.usable:
            return ""
        free = f"{disk.human(self.free.bytes)} {self.free.source}, {100 * self.free.headroom:.0f} % kept free"
        return f"it takes {disk.human(need)} of {free}"

    def no_shared_memory(self, size: int) -> str:
        if self.trial.feed.name != "workers" or not self.plan.workers:
            return ""
        try:
            require_shared_memory(self.trial.pack, self.plan.replace(micro_batch_size=None).replace(batch_size=size))
        except TrainError as error:
            return str(error)
        return ""

    def time(self, candidate: Candidate) -> float | None:
        """samples/s of one turn; None, and the candidate is out, where memory ended."""
        candidate.loads = candidate.loads or self.trial.typical(candidate.batch_size)
        steps, lead = max(1, round(self.slice / max(candidate.seconds, 1e-6))), candidate.seconds < LONG
        start = self.trial.clock()
        rate, candidate.reason = self.trial.rate(candidate.loads, steps, int(lead))
        candidate.seconds = (self.trial.clock() - start) / (steps + max(lead, self.trial.ahead))
        return rate

    def climb(self) -> None:
        """Double until throughput is flat, or memory, data or time end."""
        best, flat, size = 0.0, 0, min(self.candidates)
        while not self.ended:
            candidate = self.candidates.get(size) or self.probe(size)
            if not candidate.reason and (candidate.seconds < self.slice or self.trial.device.type != "cpu"):
                self.time(candidate)  # its speed decides how many steps a turn has; a GPU's first is no measure of it
            glances: list[float] = []
            while not candidate.reason and len(glances) < (GLANCES if candidate.seconds < self.slice else 1):
                glances.append(self.time(candidate) or 0.0)
            if candidate.reason:
                self.ended = f"{size} does not fit: {candidate.reason}"
                return
            candidate.first = max(glances)
            flat = flat + 1 if candidate.first < RISING * best else 0
            best = max(best, candidate.first)
            late = self.elapsed() + 3 * max(self.slice, 2 * candidate.seconds) > CLIMB * self.seconds
            self.ended = FLAT if flat >= 2 else self.cap_reason if size * 2 > self.cap else LATE if late else ""
            size *= 2

    def turns(self) -> Choice:
        """Measure what is near the best, and sizes between, in turns until the choice is clear or the time is up."""
        firsts = {c.batch_size: c.first for c in self.candidates.values() if c.first is not None and not c.reason}
        if not firsts:
            raise TrainError(f"memory ended while measuring ({self.ended}); free memory and try again")
        best = max(firsts, key=lambda size: firsts[size])
        knee = min(size for size in firsts if firsts[size] >= WITHIN * firsts[best])
        live = [self.candidates[size] for size in near(firsts)]
        live += self.added(between(list(self.candidates), knee, best, self.cap))
        for done in range(MOST_TURNS):
            live.sort(key=lambda c: c.batch_size)
            if done and self.elapsed() + sum(max(self.slice, c.seconds) for c in live) > self.seconds:
                break
            live = self.turn(live, first=done % len(live))
            rates = {c.batch_size: c.rates for c in live}
            further = self.further(chosen(rates)) if done + 1 == LEAST_TURNS else []
            if not further and chosen(rates).clear:
                break
            out = hopeless(rates)
            live = [c for c in live if c.batch_size not in out] + further
        return chosen({c.batch_size: c.rates for c in live if c.rates})

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

    def report(self, choice: Choice, seconds: float) -> BatchReport:
        size, wanted, line = choice.batch_size, self.plan.batch_size, self.line()
        micro = size if wanted > size and line is not None and self.too_much(line.at(wanted)) else None
        return BatchReport(
            batch_size=size,
            micro_batch_size=micro,
            rows=tuple(row_of(self.candidates[size]) for size in sorted(self.candidates)),
            limit=None if self.free is None else self.free.usable,
            limit_source="" if self.free is None else self.free.source,
            seconds=seconds,
            clock=self.trial.clock_name,
            why=f"{self.why(choice, micro)}; measured {seconds:.1f} s",
            complete=self.ended != LATE,
        )

    def why(self, choice: Choice, micro: int | None) -> str:
        """One sentence with the figures."""
        best, size = self.candidates[choice.best], choice.batch_size
        rate, needed = statistics.median(self.candidates[size].rates), self.candidates[size].measured
        if size == choice.best:
            text = f"batch {size}: the best rate found, {rate:,.0f} samples/s"
        else:
            text = f"batch {size}: {choice.ratio:.0%} of the best rate, that at {choice.best}"
            text += f", with {needed / best.measured:.0%} of its memory" if needed and best.measured else ""
        largest = max(c.batch_size for c in self.candidates.values() if c.first or c.rates)
        text += f"; none above {largest} was timed: {self.ended}"
        if micro is not None:
            wanted = self.plan.batch_size
            text += f"; the plan's {wanted} does not fit at once: forward passes of {micro}, lr unchanged"
        text += "" if choice.clear else "; close: another measurement may choose a neighbour"
        return text + ("; measured without compiling" if self.plan.compile or self.plan.graph else "")


def row_of(candidate: Candidate) -> Row:
    rates = candidate.rates or ([] if candidate.first is None else [candidate.first])
    shown = (statistics.median(rates), min(rates), max(rates)) if rates else (None, None, None)
    fits = not candidate.reason
    return Row(candidate.batch_size, *shown, len(rates), candidate.predicted, candidate.measured, fits)
