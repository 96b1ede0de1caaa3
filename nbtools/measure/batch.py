"""The batch size: the smallest whose throughput is within 5 % of the best, measured on this machine.

The largest batch that fits is not the fastest, and rarely needed: past a knee, throughput is flat. So batch sizes are
doubled until throughput no longer rises, or memory, data or time runs out; then those near the best, and sizes
between, are measured in alternation (other programs and clocks change a machine's speed by more than 5 %), until the
choice is clear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter, process_time
from typing import Any, TypeVar

import numpy as np
import torch

from nbtools import show
from nbtools.data import Pack, choose
from nbtools.errors import TrainError
from nbtools.measure import memory
from nbtools.measure.report import Report
from nbtools.measure.stepper import EAGER, Clock, Stepper, typical, untouched
from nbtools.show import percent
from nbtools.train import Plan, TaskLike, readable, release, train_step
from nbtools.train import device as devices

WITHIN = 0.95  # of the best throughput
NEAR = 0.75  # of the best at first sight: worth turns
CLEAR = 2.0  # standard errors between a ratio and WITHIN
LEAST_TURNS, MOST_TURNS = 8, 60  # fewer are inconclusive
RISING = 1.03  # a doubling that gives less than this twice in a row is flat
GLANCES = 3  # turns at first sight, of which the best counts: a busy machine makes steps slower, never faster
CLIMB = 0.5  # of the time at most for doubling; the rest is for turns
LONG = 1.0  # seconds of a step: a shorter one is not timed just after another size, whose memory malloc still holds
FLAT, LATE = "throughput no longer rises", "time ran out"
T = TypeVar("T")


@dataclass
class Row:
    """What was found about one batch size. memory: bytes of a run at its peak with the largest samples; None: not
    measured. reason: why it does not fit, or ""; seconds: of a step; first: samples/s at first sight, rates: of each
    turn."""

    batch_size: int
    memory: int | None = None
    reason: str = ""
    seconds: float = 0.0
    first: float = 0.0
    rates: list[float] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return not self.reason

    @property
    def samples_per_s(self) -> float:
        """0 if it was not timed."""
        return median(self.rates) if self.rates else self.first


@dataclass(frozen=True)
class BatchReport(Report):
    """A batch size and its evidence. Shows as a table.

    why: what was measured, in a few words; details: how far the search went.
    micro_batch_size: samples a forward pass for the plan's own batch size where that does not fit at once, else None.
    complete: whether something other than time ended the search for larger sizes.
    """

    batch_size: int
    micro_batch_size: int | None
    rows: tuple[Row, ...]
    why: str
    complete: bool
    details: str = ""

    def table(self) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        best = max(row.samples_per_s for row in self.rows)
        rows = []
        for row in self.rows:
            rates = row.rates or [row.first]
            spread = f"{row.samples_per_s:,.0f} ({min(rates):,.0f}–{max(rates):,.0f}, n={len(rates)})"
            speed = (spread, f"{percent(row.samples_per_s / best)}") if row.samples_per_s else (None, None)
            note = f"does not fit: {row.reason}" if row.reason else ""
            note = "chosen" if row.batch_size == self.batch_size else note
            rows.append((row.batch_size, *speed, None if row.memory is None else show.size(row.memory), note))
        return ("batch", "samples/s", "of the best", "memory", ""), rows

    def footer(self) -> str:
        return f"{self.why}; {self.details}" if self.details else self.why


def find_batch(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    device: torch.device | None = None,
    seconds: float = 20.0,
    most: int | None = None,
    clock: Clock | None = None,
) -> BatchReport:
    """The smallest batch within 5 % of the best throughput that fits, for this plan on this machine.

    most: the largest size to consider (never more than the train split). seconds: roughly how long the search takes,
    plus the first step and one or two of the largest batch. clock: what times the turns; None: CPU time where one
    thread does all the work, so that other programs matter little, else wall-clock time. Nothing outside changes.
    Raises TrainError if not even one sample fits, or the train split has fewer than two.
    """
    device, pack = device or devices.pick(), readable(task, pack, plan)
    train = pack.splits["train"]
    if train < 2:
        raise TrainError(f"{pack.folder}: the train split has {show.plural(train, 'sample')}; pack at least 2")
    cap = train, f"the train split has {train:,} samples"
    if most is not None and most < train:
        cap = max(most, 1), f"no more than {most:,} were requested"
    with untouched(device):
        free = memory.room(device)
        try:
            trial = partial(Trial, task, pack, plan, device, clock)
            found = Search(devices.required(trial), plan, free, cap, seconds).run()
        except TrainError as error:  # its traceback would keep the trial's memory for as long as a notebook shows it
            found = error.with_traceback(None)
    if isinstance(found, TrainError):
        raise found
    return found


@dataclass(frozen=True)
class Choice:
    """The smallest batch size within 5 % of the best; clear: whether more turns could hardly change it."""

    batch_size: int
    best: int
    ratio: float
    clear: bool


def chosen(rates: Mapping[int, Sequence[float]]) -> Choice:
    """samples/s of each turn by batch size → the choice. A size is within 5 % of the best when its median ratio is,
    less its standard error. Ratios are within a turn: a machine's speed changes from turn to turn."""
    best = max(rates, key=lambda size: median(rates[size]))
    found, ratio, clear = best, 1.0, len(rates[best]) >= LEAST_TURNS
    for size in sorted((size for size in rates if size < best), reverse=True):
        ratios = [a / b for a, b in zip(rates[size], rates[best], strict=True)]
        middle = median(ratios)
        deviation = 1.48 * median(abs(r - middle) for r in ratios)  # σ of a normal distribution; outliers do not count
        error = 1.25 * deviation / math.sqrt(len(ratios))  # of a median
        if middle - error >= WITHIN:
            found, ratio = size, middle
        clear = clear and abs(middle - WITHIN) > CLEAR * error
    return Choice(found, best, ratio, clear)


class Trial(Stepper):
    """The plan's train step at any batch size. Running out of memory is a result, and training can continue after
    it."""

    def __init__(self, task: TaskLike, pack: Pack, plan: Plan, device: torch.device, clock: Clock | None = None):
        self.before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        alone = device.type == "cpu" and torch.get_num_threads() == 1 and choose(pack, plan, device)[0] == "resident"
        size = min(plan.batch_size, pack.splits["train"])
        whole = plan.replace(micro_batch_size=None, batch_size=size, **EAGER)
        clock = clock or (process_time if alone else perf_counter)
        super().__init__(task, pack, whole, device, clock=clock, act=partial(train_step, halves=False))
        self.order = largest_first(pack)

    def tried(self, act: Callable[[], T]) -> tuple[T | None, str]:
        """(its result, ""), or (None, why) if memory ran out; nothing is kept of a failed step."""
        found, reason = devices.within_memory(act)
        if reason:
            release(self.state)
        return found, reason

    def largest(self, size: int) -> None:
        """A step with the samples that make the largest batch."""
        for raw in self.feed([self.order[:size]]):
            self.step(raw)

    def memory(self, size: int) -> tuple[int | None, str]:
        """(bytes, "") that training at this batch size takes at its peak, from a step with the largest samples;
        (None, why) if memory ran out."""
        self.state.optimizer.zero_grad()
        cuda = self.device.type == "cuda"
        kept = torch.cuda.memory_allocated(self.device) - self.before if cuda else memory.held(self.state)
        found, reason = self.tried(lambda: memory.peak(self.device, lambda: self.largest(size)))
        return (None if found is None else kept + found), reason

    def rate(self, loads: Sequence[tuple[np.ndarray, float]], steps: int, lead: int) -> tuple[float | None, str]:
        """(samples/s, "") over `steps` steps through [(ids, samples that they stand for)] in turn, after `lead` untimed
        ones; (None, why) if memory ran out."""
        loads = [loads[i % len(loads)] for i in range(lead + steps)]

        def timed() -> float:
            turn = self.on(iter(self.feed([ids for ids, _ in loads])))
            for _ in range(lead):
                turn.step(next(turn.batches))
            seconds = turn.advance(steps=steps).seconds
            return sum(samples for _, samples in loads[lead:]) / max(seconds, 1e-9)

        return self.tried(timed)


def largest_first(pack: Pack) -> np.ndarray:
    """Ids of the train split from the largest sample to the smallest; before them the longest of each ragged column,
    since each pads the whole batch."""
    ids, first = pack.ids("train"), []
    sizes = np.zeros(len(ids))
    for name in pack.offsets:
        lengths, column = pack.lengths(name, ids), pack.columns[name]
        first.append(int(lengths.argmax()))
        sizes += lengths * np.dtype(column.dtype).itemsize * np.prod(column.shape, initial=1)
    return ids[list(dict.fromkeys([*first, *np.argsort(-sizes, kind="stable").tolist()]))]


def line(first: tuple[int, int], second: tuple[int, int], size: int) -> int:
    """Bytes at a batch size, on the line through two measured (batch size, bytes)."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return round(first[1] + slope * (size - first[0]))


class Search:
    """The rows, by batch size, and the clock. cap: (largest batch, why)."""

    def __init__(self, trial: Trial, plan: Plan, free: memory.Room | None, cap: tuple[int, str], seconds: float):
        self.trial, self.plan, self.free, self.seconds = trial, plan, free, seconds
        self.cap, self.cap_reason = cap
        self.slice = min(0.2, max(0.01, seconds / 250))  # seconds that a turn lasts at least
        self.rows: dict[int, Row] = {}
        self.loads: dict[int, list[tuple[np.ndarray, float]]] = {}  # [(ids, samples that they stand for)] to time
        self.ended = ""  # why no larger batch was tried

    def run(self) -> BatchReport:
        self.start()
        self.began = perf_counter(), self.trial.clock()  # the first step may load libraries for seconds
        self.climb()
        return self.report(self.turns())

    def elapsed(self) -> float:
        return max(perf_counter() - self.began[0], self.trial.clock() - self.began[1])

    def start(self) -> None:
        """A first step, which makes what the optimizer keeps and shows that one fits at all. Raises TrainError."""
        reason = self.refusal(min(2, self.cap))
        if reason and self.cap > 1:
            self.cap, self.cap_reason = 1, "two samples do not fit"
            try:
                reason = self.refusal(1)
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                reason = "two samples do not fit, and BatchNorm cannot train on one"
        if reason:
            raise TrainError(
                f"not even one sample fits ({reason}): use a smaller network or smaller samples, "
                "Plan.amp or Plan.checkpoint_activations, or free memory",
                entry="Out of memory",
            )

    def refusal(self, size: int) -> str:
        return self.trial.tried(lambda: self.trial.largest(size))[1] or self.probe(size).reason

    def probe(self, size: int) -> Row:
        """A batch size, with one real step of the largest samples where it is predicted to fit."""
        row = self.rows[size] = Row(size)
        row.reason = self.too_much(self.predicted(size))
        if not row.reason:
            start = self.trial.clock()
            row.memory, row.reason = self.trial.memory(size)
            row.seconds = self.trial.clock() - start
            row.reason = row.reason or self.too_much(row.memory)
        return row

    def predicted(self, size: int) -> int | None:
        """Bytes, by the two largest batches measured so far: a kernel or peak that sets in later then counts."""
        points = sorted((c.batch_size, c.memory) for c in self.rows.values() if c.memory is not None)
        return line(points[-2], points[-1], size) if len(points) > 1 else None

    def too_much(self, need: int | None) -> str:
        if need is None or self.free is None or need <= self.free.usable:
            return ""
        free = f"{show.size(self.free.bytes)} {self.free.source}, {100 * self.free.headroom:.0f} % kept free"
        return f"it needs {show.size(need)} of {free}"

    def time(self, row: Row) -> float:
        """samples/s of one turn; 0, and the row does not fit, if memory ran out."""
        if row.batch_size not in self.loads:
            plan = self.trial.plan.replace(batch_size=row.batch_size)
            self.loads[row.batch_size] = typical(self.trial.pack, plan, 4)
        steps = max(1, round(self.slice / max(row.seconds, 1e-6)))
        lead = max(int(row.seconds < LONG), self.trial.ahead)
        start = self.trial.clock()
        rate, row.reason = self.trial.rate(self.loads[row.batch_size], steps, lead)
        row.seconds = (self.trial.clock() - start) / (steps + lead)
        return rate or 0.0

    def climb(self) -> None:
        """Double until throughput is flat, or memory, data or time runs out."""
        best, flat, size = 0.0, 0, min(self.rows)
        while not self.ended:
            row = self.rows.get(size) or self.probe(size)
            for _ in range(GLANCES):
                if row.reason or (row.first and row.seconds > self.slice):
                    break
                row.first = max(row.first, self.time(row))
            if row.reason:
                self.ended = f"{size} does not fit: {row.reason}"
                return
            flat = flat + 1 if row.first < RISING * best else 0
            best = max(best, row.first)
            late = self.elapsed() + 3 * max(self.slice, 2 * row.seconds) > CLIMB * self.seconds
            self.ended = FLAT if flat >= 2 else self.cap_reason if size * 2 > self.cap else LATE if late else ""
            size *= 2

    def turns(self) -> Choice:
        """Time promising sizes in turns, each round starting with another one, until the choice is clear or time is
        up."""
        live = self.worth_turns()
        for done in range(MOST_TURNS):
            if done and self.elapsed() + sum(max(self.slice, c.seconds) for c in live) > self.seconds:
                break
            first = done % max(len(live), 1)
            for row in live[first:] + live[:first]:
                row.rates += [rate] if (rate := self.time(row)) else []
            live = [row for row in live if not row.reason]
            if not live:
                rule = f"memory ran out while measuring ({self.ended})"
                raise TrainError(f"{rule}; free memory and try again", entry="Out of memory")
            if chosen({c.batch_size: c.rates for c in live}).clear:
                break
        return chosen({c.batch_size: c.rates for c in live})

    def worth_turns(self) -> list[Row]:
        """Sizes near the best at first sight, which may deceive, so its neighbours in any case; half-way steps about
        the best and the knee: throughput is not smooth (on one CPU 96 was 10 % above 64 and 128)."""
        fitting = [c for c in self.rows.values() if c.first and not c.reason]
        best = max(fitting, key=lambda c: c.first, default=Row(1))
        knee = min((c.batch_size for c in fitting if c.first >= WITHIN * best.first), default=1)
        most, top = best.first, best.batch_size
        found = [c for c in fitting if c.first >= NEAR * most or c.batch_size in (top // 2, 2 * top)]
        between = {min(size * k // 4, self.cap) for size in (knee, top) for k in (3, 6)}
        for size in sorted(between - set(self.rows) - {0, 1}):
            longest = max(c.seconds for c in self.rows.values())
            if self.elapsed() + 3 * longest < self.seconds and not (row := self.probe(size)).reason:
                found.append(row)
        return sorted(found, key=lambda c: c.batch_size)

    def report(self, choice: Choice) -> BatchReport:
        size, wanted = choice.batch_size, self.plan.batch_size
        micro = size if wanted > size and self.too_much(self.predicted(wanted)) else None
        rows = tuple(self.rows[size] for size in sorted(self.rows))
        return BatchReport(size, micro, rows, self.why(choice), self.ended != LATE, self.details(choice, micro))

    def why(self, choice: Choice) -> str:
        best, found = self.rows[choice.best], self.rows[choice.batch_size]
        if found is best:
            return f"{found.batch_size} is the fastest"
        share = f" with {percent(found.memory / best.memory)} of its memory" if found.memory and best.memory else ""
        return f"{found.batch_size} is nearly as fast as the fastest ({best.batch_size}){share}"

    def details(self, choice: Choice, micro: int | None) -> str:
        """How far the search went, and what may be doubted."""
        largest = max(c.batch_size for c in self.rows.values() if c.first or c.rates)
        text = f"no batch above {largest} was timed: {self.ended}"
        if micro is not None:
            text += f"; the plan's {self.plan.batch_size} does not fit at once: forward passes of {micro}, lr unchanged"
        text += "" if choice.clear else "; a close call: another measurement may choose a neighbour"
        text += "; measured without compiling or CUDA graphs" if self.plan.compile or self.plan.graph else ""
        return f"{text}; measured {self.elapsed():.1f} s"
