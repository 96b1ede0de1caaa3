"""The batch size: the smallest whose throughput is within 5 % of the best, measured on this machine.

The largest batch that fits is not the fastest, and rarely needed: past a knee throughput is flat. So batch sizes are
doubled until throughput no longer rises, memory, data or time end; then those about the knee, and sizes between, are
measured in turns (neighbours and clocks change a machine's speed by more than 5 %), until the choice is clear.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Self

import torch

from nbtools import device as devices
from nbtools import disk, table
from nbtools.errors import TrainError
from nbtools.feed import require_shared_memory
from nbtools.measure.memory import HEADROOM, Line, Room, room, tried
from nbtools.measure.noise import Noise, noise_scale
from nbtools.measure.trial import Load, Trial
from nbtools.measure.untouched import untouched
from nbtools.pack import Pack
from nbtools.plan import Plan
from nbtools.state import Task

WITHIN = 0.95  # of the best throughput
RISING = 1.03  # a doubling that gives less than this twice in a row is flat
NEAR = 0.75  # of the best at first sight: worth measuring again
GLANCES = 3  # turns at first sight, of which the best counts: a busy machine makes steps slower, never faster
CLEAR = 2.0  # standard errors between a ratio and WITHIN
OUT = 3.0  # standard errors below NEAR: measured no longer
ROUNDS = (5, 60)  # fewest and most turns
CLIMB = 0.5  # of the time at most for doubling; the rest is for turns
LEAST = 2  # BatchNorm needs two samples


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
class Finding:
    """A batch size and its evidence. Shows as a table.

    micro_batch_size: samples a forward pass for the plan's own batch size where that does not fit at once, else None.
    limit: bytes that a run may take, 10 % headroom off; None where nobody knows. seconds: what it all took.
    clock: CPU time or wall-clock time. noise: the gradient noise scale, where it was asked for.
    """

    batch_size: int
    micro_batch_size: int | None
    rows: tuple[Row, ...]
    limit: int | None
    limit_source: str
    seconds: float
    clock: str
    why: str
    noise: Noise | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        noise = values["noise"]
        parts = {"rows": tuple(Row(**row) for row in values["rows"]), "noise": noise and Noise.from_dict(noise)}
        return cls(**{**values, **parts})

    def table_rows(self) -> list[tuple[Any, ...]]:
        best = max((row.samples_per_s or 0 for row in self.rows), default=0)
        return [
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

    def __str__(self) -> str:
        return f"{table.text(HEADERS, self.table_rows())}\n{self.why}"

    def _repr_html_(self) -> str:
        return table.html(HEADERS, self.table_rows(), self.why)


HEADERS = ("batch", "samples/s", "of the best", "memory predicted", "measured", "")


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

    def row(self) -> Row:
        rates = self.rates or ([] if self.first is None else [self.first])
        shown = (statistics.median(rates), min(rates), max(rates)) if rates else (None, None, None)
        return Row(self.batch_size, *shown, len(rates), self.predicted, self.measured, not self.reason)


@dataclass(frozen=True)
class Choice:
    """The smallest batch size within 5 % of the best; clear: whether more turns could hardly change it."""

    batch_size: int
    best: int
    ratio: float
    clear: bool


def choose(rates: Mapping[int, Sequence[float]]) -> Choice:
    """Pure: samples/s of each turn by batch size → the choice. All sizes had the same turns, so that ratios are taken
    within a turn; a size is within 5 % when its median ratio is, less its standard error."""
    best = max(rates, key=lambda size: statistics.median(rates[size]))
    chosen, ratio, clear = best, 1.0, len(rates[best]) >= ROUNDS[0]
    for size in sorted((size for size in rates if size < best), reverse=True):
        middle, error = compared(rates[size], rates[best])
        if middle - error >= WITHIN:
            chosen, ratio = size, middle
        clear = clear and abs(middle - WITHIN) > CLEAR * error
    return Choice(chosen, best, ratio, clear)


def compared(rates: Sequence[float], best: Sequence[float]) -> tuple[float, float]:
    """(median ratio to the best within a turn, its standard error), by median deviation: neighbours make outliers."""
    ratios = [a / b for a, b in zip(rates, best, strict=True)]
    middle = statistics.median(ratios)
    spread = 1.48 * statistics.median(abs(r - middle) for r in ratios)  # of a normal distribution: its σ
    return middle, 1.25 * spread / math.sqrt(len(ratios))


def hopeless(rates: Mapping[int, Sequence[float]]) -> list[int]:
    """Pure: sizes so clearly below the best that more turns are wasted on them."""
    best = max(rates, key=lambda size: statistics.median(rates[size]))
    if len(rates[best]) < ROUNDS[0]:
        return []
    pairs = {size: compared(values, rates[best]) for size, values in rates.items()}
    return [size for size, (middle, error) in pairs.items() if middle + OUT * error < NEAR]


def between(sizes: Sequence[int], firsts: Mapping[int, float], cap: int) -> list[int]:
    """Sizes to try besides the powers of two: half-way steps about the knee, and above the last one where it is best
    and there is room."""
    best = max(firsts, key=lambda size: firsts[size])
    knee = next(size for size in sizes if firsts[size] >= WITHIN * firsts[best])
    found = {knee * 3 // 4, knee * 3 // 2}
    if best == sizes[-1]:
        found.add(min(cap, best * 3 // 2))
    return sorted(size for size in found - set(sizes) if sizes[0] < size <= cap)


def find_batch(
    task: Task,
    pack: Pack,
    plan: Plan,
    device: torch.device | str | None = None,
    seconds: float = 20.0,
    most: int | None = None,
    noise: bool = False,
    limit: int | None = None,
) -> Finding:
    """The smallest batch within 5 % of the best throughput that fits, for this plan on this machine.

    most: no larger one is considered (never one larger than the train split). noise: nor one above the gradient noise
    scale at the first weights, which takes up to a quarter more time. limit: bytes to stay below instead of what is
    free now. seconds: about so long, plus the first step and one or two of the largest batch. Nothing outside changes.
    Raises TrainError where not even one sample fits, or the train split has fewer than two.
    """
    device = torch.device(device) if device is not None else devices.pick()
    began = perf_counter()
    if pack.splits["train"] < 2:
        raise TrainError(f"{pack.folder}: the train split has {pack.splits['train']} sample(s); pack at least 2")
    scale = noise_scale(task, pack, plan, device, seconds / 4) if noise else None
    with untouched(device):
        free = room(device) if limit is None else Room(limit, "the limit given")
        trial, reason = tried(lambda: Trial(task, pack, plan, device))
        if trial is None:
            raise TrainError(f"out of memory before the first step ({reason}); take a smaller network, or free memory")
        search = Search(trial, plan, free, caps(pack, most, scale), seconds)
        search.start()
        search.climb()
        search.turns()
        finding = report(search, scale, perf_counter() - began)
        del trial, search
    return finding


def caps(pack: Pack, most: int | None, noise: Noise | None) -> list[tuple[int, str]]:
    """(largest batch, why) by each rule that is no measurement of time or memory."""
    train = pack.splits["train"]
    found = [(train, f"the train split has {train:,} samples")]
    if most is not None:
        found.append((max(most, 1), f"no more than {most:,} were asked for"))
    if noise is not None and noise.value is not None:
        found.append((max(LEAST, int(noise.value)), f"the gradient noise scale is {noise.words()}"))
    return found


class Search:
    """The candidates and the clock. `start`, `climb`, `turns`, in this order."""

    def __init__(self, trial: Trial, plan: Plan, free: Room | None, capped: list[tuple[int, str]], seconds: float):
        self.trial, self.plan, self.free, self.seconds = trial, plan, free, seconds
        self.began = perf_counter()
        self.cap, self.cap_reason = min(capped, key=lambda c: c[0])
        self.slice = min(0.2, max(0.01, seconds / 400))  # seconds that a turn lasts at least
        self.candidates: dict[int, Candidate] = {}
        self.ended = ""  # why no larger batch was tried
        self.choice: Choice | None = None

    def elapsed(self) -> float:
        return perf_counter() - self.began

    @property
    def usable(self) -> float:
        return math.inf if self.free is None else self.free.usable

    def start(self) -> None:
        """A first step, which makes what the optimizer keeps and shows that one fits at all. Raises TrainError."""
        first = min(LEAST, self.cap)
        reason = self.trial.warm(first)
        if not reason and not self.probe(first).reason:
            self.began = perf_counter()  # a first step may load libraries and choose kernels for seconds
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
        return (
            f"it takes {disk.human(need)} of {disk.human(self.free.bytes)} {self.free.source}, {HEADROOM:.0%} kept free"
        )

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
        steps = max(1, round(self.slice / max(candidate.seconds, 1e-6)))
        start = perf_counter()
        rate, candidate.reason = self.trial.rate(candidate.loads, steps)
        candidate.seconds = (perf_counter() - start) / (steps + self.trial.ahead)
        return rate

    def climb(self) -> None:
        """Double until throughput is flat, or memory, data or time end."""
        best, flat, size = 0.0, 0, min(self.candidates)
        while True:
            candidate = self.candidates.get(size) or self.probe(size)
            glances: list[float | None] = [None]
            if not candidate.reason and candidate.seconds < self.slice:
                self.time(candidate)  # its speed decides how many steps a turn has
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
            return "throughput no longer rises"
        if candidate.batch_size * 2 > self.cap:
            return self.cap_reason
        if self.elapsed() + 3 * max(self.slice, 2 * candidate.seconds) > CLIMB * self.seconds:
            return "the time was up"
        return ""

    def turns(self) -> None:
        """Measure what is near the best, and sizes between, in turns until the choice is clear or the time is up."""
        firsts = {c.batch_size: c.first for c in self.candidates.values() if c.first is not None and not c.reason}
        if not firsts:
            raise TrainError(f"memory ended while measuring ({self.ended}); free memory and try again")
        best = max(firsts.values())
        live = [self.candidates[size] for size, rate in firsts.items() if rate >= NEAR * best]
        for size in between(sorted(firsts), firsts, self.cap):
            if self.elapsed() + 2 * max(c.seconds for c in live) < self.seconds and not self.probe(size).reason:
                live.append(self.candidates[size])
        live.sort(key=lambda c: c.batch_size)
        for done in range(ROUNDS[1]):
            cost = sum(max(self.slice, c.seconds) for c in live)
            if done and self.elapsed() + cost > self.seconds:
                break
            live = self.turn(live, first=done % len(live))
            rates = {c.batch_size: c.rates for c in live}
            if choose(rates).clear:
                break
            out = hopeless(rates)
            live = [c for c in live if c.batch_size not in out]
        self.choice = choose({c.batch_size: c.rates for c in live})

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


def report(search: Search, noise: Noise | None, seconds: float) -> Finding:
    """The search as a value."""
    assert search.choice is not None
    size, wanted, line = search.choice.batch_size, search.plan.batch_size, search.line()
    micro = None
    if wanted > size and line is not None and search.too_much(line.at(wanted)):
        micro = size
    return Finding(
        batch_size=size,
        micro_batch_size=micro,
        rows=tuple(search.candidates[size].row() for size in sorted(search.candidates)),
        limit=None if search.free is None else search.free.usable,
        limit_source="" if search.free is None else search.free.source,
        seconds=seconds,
        clock=search.trial.clock_name,
        why=reason_of(search, micro, seconds),
        noise=noise,
    )


def reason_of(search: Search, micro: int | None, seconds: float) -> str:
    """One sentence with the figures."""
    choice, candidates = search.choice, search.candidates
    assert choice is not None
    chosen, best = candidates[choice.batch_size], candidates[choice.best]
    rate = statistics.median(chosen.rates)
    if choice.batch_size == choice.best:
        said = f"batch {choice.batch_size}: the best rate found, {rate:,.0f} samples/s"
    else:
        said = f"batch {choice.batch_size}: {choice.ratio:.0%} of the best rate, that at {choice.best}"
        if chosen.measured and best.measured:
            said += f", with {chosen.measured / best.measured:.0%} of its memory"
    largest = max(c.batch_size for c in candidates.values() if c.first or c.rates)
    said += f"; none above {largest} was timed: {search.ended}"
    if micro is not None:
        said += f"; the plan's {search.plan.batch_size} does not fit at once: forward passes of {micro}, lr unchanged"
    if not choice.clear:
        said += "; close: another measurement may choose a neighbour"
    if search.plan.compile or search.plan.graph:
        said += "; measured without compiling"
    return f"{said}; measured {seconds:.1f} s"
