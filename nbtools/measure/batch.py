"""The batch size: the smallest whose throughput is within 5 % of the best, measured on this machine.

The largest batch that fits is not the fastest, and rarely needed: past a knee, throughput is flat. So batch sizes are
doubled until throughput no longer rises, or memory, data or time runs out; those near the best are then timed in turns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from nbtools.data import Pack
from nbtools.errors import TrainError
from nbtools.measure.machine import HEADROOM, held, peak, room
from nbtools.measure.report import Report
from nbtools.measure.timing import EAGER, Clock, Stepper, finish, typical, untouched, wall
from nbtools.show import percent, size
from nbtools.train import Plan, TaskLike, readable, release
from nbtools.train import device as devices

WITHIN, NEAR, RISING = 0.95, 0.75, 1.03  # of the best throughput: is chosen; gets turns; of the last: still rises
FIRST, LOOKS, ROUNDS = 8, 3, 8  # the first size; turns of each at first sight, of which the best counts; later ones
CLIMB = 0.5  # of the time at most for doubling
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
    seconds: float = 20.0,
    most: int | None = None,
    clock: Clock = wall,
) -> BatchReport:
    """Return the smallest batch within 5 % of the best throughput that fits, for this plan on this machine.

    most: the largest size to consider (never more than the train split). seconds: roughly what the search takes.
    Nothing outside changes. Raises TrainError if not even one sample fits, or the train split has fewer than two.
    """
    device, pack = devices.pick(), readable(task, pack, plan)
    train = pack.splits["train"]
    cap, ended = train, f"the train split has {train:,} samples"
    if most is not None and most < train:
        cap, ended = max(most, 1), f"no more than {most:,} were requested"
    whole = plan.replace(micro_batch_size=None, batch_size=min(plan.batch_size, train), **EAGER)
    with untouched(device):  # no local name outlives it that would keep the model in memory
        search = Search(
            devices.required(lambda: Stepper(task, pack, whole, device, clock=clock, halves=False)), seconds
        )
        rows, ended = search.climb(cap, ended)
        del search
    best, smallest = max(rows, key=lambda row: row.samples_per_s), rows[0]
    if not best.rates:
        fix = "use a smaller network or smaller samples, Plan.amp or Plan.checkpoint_activations"
        rule = f"not even one sample fits ({smallest.reason or ended})"
        raise TrainError(f"{rule}: {fix}, or free memory", entry="Out of memory")
    row = next(row for row in rows if row.samples_per_s >= WITHIN * best.samples_per_s and not row.reason)
    why = f"{row.batch_size} is the fastest"
    if row is not best:
        why = f"{row.batch_size} is nearly as fast as the fastest ({best.batch_size})"
    fitting = max(each.batch_size for each in rows if not each.reason)
    full = any(each.reason for each in rows) and plan.batch_size > fitting
    return BatchReport(row.batch_size, fitting if full else None, tuple(rows), why, ended)


class Search:
    """Rows by batch size, in the order in which they were tried."""

    def __init__(self, stepper: Stepper, seconds: float):
        self.stepper, self.seconds, self.free = stepper, seconds, room(stepper.device)
        self.slice = min(0.2, max(0.01, seconds / 250))  # seconds of a turn
        self.rows: dict[int, Row] = {}
        self.order, self.start = largest_first(stepper.pack), stepper.clock()

    def left(self, share: float = 1.0) -> float:
        return self.start + share * self.seconds - self.stepper.clock()

    def climb(self, cap: int, ended: str) -> tuple[list[Row], str]:
        """Double from the first size that fits up to `cap`, then time those near the best in turns; return (the rows by
        size, why no larger one was tried)."""
        now, best, flat = min(FIRST, cap), 0.0, 0
        while self.probe(now).reason and now > 1:
            now //= 2
        while not self.rows[now].reason:
            row = self.rows[now]
            for _ in range(LOOKS):
                self.time(row)
            if row.reason:
                break
            flat, best = (0 if max(row.rates) >= RISING * best else flat + 1), max(best, *row.rates)
            late = self.left(CLIMB) < 2 * LOOKS * now / max(row.rates)
            if flat == 2 or late or now == cap:
                ended = FLAT if flat == 2 else LATE if late else ended
                break
            now = min(2 * now, cap)
            if now not in self.rows:
                self.probe(now)
        if why := self.rows[now].reason:
            ended = f"{now} does not fit: {why}"
        near = [row for row in self.rows.values() if row.rates and max(row.rates) >= NEAR * best]
        for number in range(ROUNDS if len(near) > 1 else 0):
            for row in near if self.left() > 0 or not number else ():
                row.rates = row.rates if number else []
                self.time(row)
        return [self.rows[key] for key in sorted(self.rows)], ended

    def probe(self, now: int) -> Row:
        """Take the largest samples for two steps, of which the first may tune kernels; not where the half shows that
        the system would end the process."""
        row, device = Row(now), self.stepper.device
        self.rows[now] = row
        if device.type == "cpu" and (half := self.rows.get(now // 2)):
            row.reason = self.too_much(2 * (half.memory or 0))
        if not row.reason:
            two = [self.within_memory(row, lambda: peak(device, lambda: self.step(self.order[:now]))) for _ in range(2)]
            row.memory = None if row.reason else (two[1] or 0) + held(self.stepper.state)
            row.reason = row.reason or self.too_much(row.memory or 0)
        return row

    def step(self, ids: np.ndarray) -> None:
        for raw in self.stepper.feed([ids]):
            self.stepper.step(raw)

    def within_memory(self, row: Row, act: Any) -> Any:
        result, reason = (None, row.reason) if row.reason else devices.within_memory(act)
        if reason and not row.reason:
            release(self.stepper.state)
            row.reason = reason
        return result

    def too_much(self, need: int) -> str:
        share = HEADROOM.get(self.stepper.device.type, 0.1)
        if self.free is None or need <= (1 - share) * self.free:
            return ""
        return f"it needs {size(need)} of {size(self.free)} free memory, {percent(share)} kept free"

    def time(self, row: Row) -> None:
        """Add the samples/s of one turn, or why it ran out of memory; not of steps that take too long."""
        step_s, stepper = (row.batch_size / row.rates[-1] if row.rates else 0.0), self.stepper
        if row.reason or step_s > self.seconds / 10:
            return
        loads = typical(stepper.pack, stepper.plan.replace(batch_size=row.batch_size), 4)
        chosen = [loads[k % len(loads)] for k in range(max(1, round(self.slice / step_s) if step_s else 1))]

        def turn() -> float:
            self.step(loads[0][0])
            finish(stepper.device)
            start = stepper.clock()
            for raw in stepper.feed([ids for ids, _ in chosen]):
                stepper.step(raw)
            finish(stepper.device)
            return sum(samples for _, samples in chosen) / max(stepper.clock() - start, 1e-9)

        rate = self.within_memory(row, turn)
        row.rates += [] if rate is None else [rate]


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
