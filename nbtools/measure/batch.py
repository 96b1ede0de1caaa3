"""The batch size: the smallest whose throughput is within 5 % of the best, measured on this machine.

The largest batch that fits is not the fastest, and rarely needed: past a knee, throughput is flat. So batch sizes are
doubled until throughput no longer rises, or memory, data or time runs out; those near the best are then timed in turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch

from nbtools.data import Pack
from nbtools.errors import TrainError
from nbtools.measure import memory
from nbtools.measure.report import Report
from nbtools.measure.timing import EAGER, Clock, Stepper, finish, typical, untouched
from nbtools.show import percent, size
from nbtools.train import Plan, TaskLike, readable, release
from nbtools.train import device as devices

WITHIN, NEAR, RISING = 0.95, 0.75, 1.03  # of the best throughput: is chosen; gets turns; of the last: still rises
FIRST, LOOKS, ROUNDS = 8, 3, 8  # the first size; turns of each at first sight, of which the best counts; later ones
CLIMB = 0.5  # of the time at most for doubling
T = TypeVar("T")
LATE, FLAT = "time ran out", "throughput no longer rises"


@dataclass
class Row:
    """What one batch size gave. rates: samples/s of turns; memory: bytes of a run at its peak with the largest samples,
    None where that is not known; reason: why it does not fit, or ""."""

    batch_size: int
    rates: list[float] = field(default_factory=list)
    memory: int | None = None
    reason: str = ""

    @property
    def samples_per_s(self) -> float:
        return median(self.rates) if self.rates else 0.0


@dataclass(frozen=True)
class BatchReport(Report):
    """A batch size and its evidence. Shows as a table.

    micro_batch_size: samples a forward pass for the plan's own batch size where that does not fit at once, else None.
    why: what was measured, in a few words; ended: why no larger size was tried.
    """

    batch_size: int
    micro_batch_size: int | None
    rows: tuple[Row, ...]
    why: str
    ended: str

    def table(self) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        best, rows = max(row.samples_per_s for row in self.rows), []
        for row in self.rows:
            note = f"does not fit: {row.reason}" if row.reason else "chosen" * (row.batch_size == self.batch_size)
            speed: tuple[str | None, ...] = (None, None)
            if row.rates:
                spread = f"{min(row.rates):,.0f}–{max(row.rates):,.0f}, n = {len(row.rates)}"
                speed = f"{row.samples_per_s:,.0f} ({spread})", percent(row.samples_per_s / best)
            rows.append((row.batch_size, *speed, None if row.memory is None else size(row.memory), note))
        return ("batch", "samples/s", "of the best", "memory", ""), rows

    def footer(self) -> str:
        return f"{self.why}; no larger one was timed: {self.ended}"


def find_batch(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    device: torch.device | None = None,
    seconds: float = 20.0,
    most: int | None = None,
    clock: Clock | None = None,
) -> BatchReport:
    """Return the smallest batch within 5 % of the best throughput that fits, for this plan on this machine.

    most: the largest size to consider (never more than the train split). seconds: roughly what the search takes.
    Nothing outside changes. Raises TrainError if not even one sample fits, or the train split has fewer than two.
    """
    device, pack = device or devices.pick(), readable(task, pack, plan)
    train = pack.splits["train"]
    cap = (train, f"the train split has {train:,} samples")
    if most is not None and most < train:
        cap = (max(most, 1), f"no more than {most:,} were requested")
    with untouched(device):
        room = memory.room(device)
        whole = plan.replace(micro_batch_size=None, batch_size=min(plan.batch_size, train), **EAGER)
        stepper = devices.required(lambda: Stepper(task, pack, whole, device, clock=clock, halves=False))
        search = Search(stepper, room, seconds)
        try:
            ended = search.climb(*cap)
        except TrainError as error:  # its traceback would keep the model's memory for as long as a notebook shows it
            refused = error.with_traceback(None)
        else:
            return report(search.rows, ended, plan.batch_size)
    raise refused


class Search:
    """Rows by batch size, in the order in which they were tried."""

    def __init__(self, stepper: Stepper, room: memory.Room | None, seconds: float):
        self.stepper, self.room, self.seconds = stepper, room, seconds
        self.slice = min(0.2, max(0.01, seconds / 250))  # seconds of a turn
        self.rows: dict[int, Row] = {}
        self.order, self.start = largest_first(stepper.pack), stepper.clock()

    def climb(self, cap: int, why: str) -> str:
        """Double from the first size that fits up to `cap`, then time those near the best in turns; return why no
        larger one was tried."""
        now, best, flat, late = min(FIRST, cap), 0.0, 0, False
        while (row := self.probe(now)).reason:
            if now == 1:
                fix = "use a smaller network or smaller samples, Plan.amp or Plan.checkpoint_activations"
                rule = f"not even one sample fits ({row.reason})"
                raise TrainError(f"{rule}: {fix}, or free memory", entry="Out of memory")
            now //= 2
        while True:
            row = self.rows.get(now) or self.probe(now)
            for _ in range(LOOKS):
                self.time(row)
            if row.reason:
                why = f"{now} does not fit: {row.reason}"
                break
            flat, best = (0 if max(row.rates) >= RISING * best else flat + 1), max(best, *row.rates)
            late = self.left(CLIMB) < 2 * LOOKS * now / max(row.rates)
            if flat == 2 or late or now == cap:
                why = FLAT if flat == 2 else LATE if late else why
                break
            now = min(2 * now, cap)
        self.take_turns([row for row in self.rows.values() if row.rates and max(row.rates) >= NEAR * best])
        return why

    def left(self, share: float = 1.0) -> float:
        return self.start + share * self.seconds - self.stepper.clock()

    def take_turns(self, rows: list[Row]) -> None:
        for number in range(ROUNDS if len(rows) > 1 else 0):
            if number and self.left() < 0:
                break
            for row in rows:
                row.rates = row.rates if number else []
                self.time(row)

    def probe(self, now: int) -> Row:
        """Take the largest samples for two steps, of which the first may tune kernels; not where the half shows that
        the system would end the process."""
        row = self.rows[now] = Row(now)
        if self.stepper.device.type == "cpu" and now // 2 in self.rows:
            row.reason = self.too_much(2 * (self.rows[now // 2].memory or 0))
        if not row.reason:
            device, state = self.stepper.device, self.stepper.state

            def peak() -> int:
                taken = [memory.peak(device, lambda: self.step(self.order[:now])) for _ in range(2)]
                return taken[1] + memory.held(state)

            row.memory, row.reason = self.within_memory(peak)
            row.reason = row.reason or self.too_much(row.memory or 0)
        return row

    def step(self, ids: np.ndarray) -> None:
        for raw in self.stepper.feed([ids]):
            self.stepper.step(raw)

    def within_memory(self, act: Callable[[], T]) -> tuple[T | None, str]:
        result, reason = devices.within_memory(act)
        if reason:
            release(self.stepper.state)
        return result, reason

    def too_much(self, need: int) -> str:
        if self.room is None or need <= self.room.usable:
            return ""
        free = f"{size(self.room.bytes)} {self.room.source}, {100 * self.room.headroom:.0f} % kept free"
        return f"it needs {size(need)} of {free}"

    def time(self, row: Row) -> None:
        """Add the samples/s of one turn, or why it ran out of memory."""
        step_s = row.batch_size / row.rates[-1] if row.rates else 0.0
        if row.reason or step_s > self.seconds / 10:
            return
        loads = typical(self.stepper.pack, self.stepper.plan.replace(batch_size=row.batch_size), 4)
        chosen = [loads[k % len(loads)] for k in range(max(1, round(self.slice / step_s) if step_s else 1))]
        stepper = self.stepper

        def turn() -> float:
            self.step(loads[0][0])
            finish(stepper.device)
            start = stepper.clock()
            for raw in stepper.feed([ids for ids, _ in chosen]):
                stepper.step(raw)
            finish(stepper.device)
            return sum(samples for _, samples in chosen) / max(stepper.clock() - start, 1e-9)

        rate, row.reason = self.within_memory(turn)
        row.rates += [] if rate is None else [rate]


def report(by_size: dict[int, Row], ended: str, wanted: int) -> BatchReport:
    rows = [by_size[key] for key in sorted(by_size)]
    best = max(rows, key=lambda row: row.samples_per_s)
    if not best.rates:
        raise TrainError(f"memory ran out while measuring ({ended}); free memory", entry="Out of memory")
    row = next(row for row in rows if row.samples_per_s >= WITHIN * best.samples_per_s and not row.reason)
    why = f"{row.batch_size} is the fastest"
    if row is not best:
        why = f"{row.batch_size} is nearly as fast as the fastest ({best.batch_size})"
    fitting = max(each.batch_size for each in rows if not each.reason)
    full = any(each.reason for each in rows) and wanted > fitting
    return BatchReport(row.batch_size, fitting if full else None, tuple(rows), why, ended)


def largest_first(pack: Pack) -> np.ndarray:
    """Return ids of the train split from the largest sample to the smallest; before them the longest of each ragged
    column, since each pads the whole batch."""
    ids, first = pack.ids("train"), []
    sizes = np.zeros(len(ids))
    for name in pack.offsets:
        lengths, column = pack.lengths(name, ids), pack.columns[name]
        first.append(int(lengths.argmax()))
        sizes += lengths * np.dtype(column.dtype).itemsize * np.prod(column.shape, initial=1)
    return ids[list(dict.fromkeys([*first, *np.argsort(-sizes, kind="stable").tolist()]))]
