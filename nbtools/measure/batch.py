"""The batch size: the smallest whose throughput is within 5 % of the best, measured on this machine.

The largest batch that fits is not the fastest, and rarely needed: past a knee, throughput is flat. So batch sizes are
doubled until throughput no longer rises, or memory, data or time runs out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nbtools.data import Pack, lengths_of
from nbtools.errors import TrainError
from nbtools.measure.machine import numbers, room
from nbtools.measure.timing import EAGER, Clock, Stepper, untouched, wall
from nbtools.show import percent, size
from nbtools.train import Plan, TaskLike, readable, release
from nbtools.train import device as devices

WITHIN, RISING = 0.95, 1.03  # of the best throughput: is chosen; of the last: still rises
FIRST, LOOKS, TURN = 8, 5, 0.2  # the first size; turns of each, of which the best counts, and their most seconds
HEADROOM = {"cuda": 0.1, "cpu": 0.2}  # of what is free: fragments, others; glibc's malloc kept 14–19 % beyond its use
LATE, FLAT = "time ran out", "throughput no longer rises"


@dataclass(frozen=True)
class Row:
    """Hold what one batch size gave. samples_per_s: 0 where it does not fit, and `reason` says why; memory: bytes that
    a run holds at its peak with the largest samples beyond those in use before, 0 where that is not known."""

    batch_size: int
    samples_per_s: float = 0.0
    memory: int = 0
    reason: str = ""


@dataclass(frozen=True)
class BatchReport:
    """A batch size. rows: what was tried; ended: why no larger one was."""

    batch_size: int
    rows: tuple[Row, ...]
    ended: str

    def __str__(self) -> str:
        best = max(self.rows, key=lambda row: row.samples_per_s).batch_size
        fast = "the fastest" if self.batch_size == best else f"nearly as fast as the fastest ({best})"
        return f"{self.batch_size} is {fast}; no larger one was timed: {self.ended}"


def find_batch(
    task: TaskLike, pack: Pack, plan: Plan, seconds: float = 20.0, most: int | None = None, clock: Clock = wall
) -> BatchReport:
    """Return the smallest batch within 5 % of the best throughput that fits, for this plan on this machine.

    most: the largest size to consider (never more than the train split). seconds: roughly what the search takes.
    Nothing outside changes. Raises TrainError if not even one sample fits, or the train split has fewer than two.
    """
    device, pack = devices.pick(), readable(task, pack, plan)
    train = pack.splits["train"]
    whole = plan.replace(micro_batch_size=None, batch_size=min(plan.batch_size, train), **EAGER)
    with untouched(device):  # no local name outlives it that would keep the model in memory
        stepper = devices.run_or_explain(lambda: Stepper(task, pack, whole, device, clock=clock, halves=False))
        rows, ended = Finder(stepper, seconds).climb(min(most or train, train))
        del stepper
    fitting = [row for row in rows if not row.reason]
    if not fitting:
        fix = "use a smaller network or smaller samples, Plan.amp or Plan.checkpoint_activations"
        raise TrainError(f"not even one sample fits ({ended}): {fix}, or free memory", entry="Out of memory")
    best = max(row.samples_per_s for row in fitting)
    chosen = next(row.batch_size for row in fitting if row.samples_per_s >= WITHIN * best)
    return BatchReport(chosen, tuple(rows), ended)


class Finder:
    """A search by a model in training. rows: size → what it gave."""

    def __init__(self, stepper: Stepper, seconds: float):
        self.stepper, self.device, self.seconds, self.start = stepper, stepper.device, seconds, stepper.clock()
        self.free, self.held, self.rows = room(self.device), peak(self.device, lambda: None), dict[int, Row]()
        ids = stepper.pack.ids("train")
        lengths = lengths_of(stepper.pack, ids)
        self.largest = ids if lengths is None else ids[np.argsort(-lengths, kind="stable")]

    def climb(self, cap: int) -> tuple[list[Row], str]:
        """Double from the first size that fits up to `cap`; return (rows by size, why no larger one was tried)."""
        now, best, flat, ended = min(FIRST, cap), 0.0, 0, ""
        while self.look(now).reason and now > 1:
            now //= 2
        while not ended:
            row = self.rows.get(now) or self.look(now)
            flat, best = (0 if row.samples_per_s >= RISING * best else flat + 1), max(best, row.samples_per_s)
            left = self.start + self.seconds - self.stepper.clock()
            if row.reason:
                ended = f"{now} does not fit: {row.reason}"
            elif flat == 2:
                ended = FLAT
            elif left < 2 * (LOOKS + 3) * now / best:
                ended = LATE
            elif now == cap:
                ended = f"{cap:,} samples are all that the train split has, or that were requested"
            now = min(2 * now, cap)
        return [self.rows[key] for key in sorted(self.rows)], ended

    def look(self, now: int) -> Row:
        """Take the largest samples for two steps, of which the first may tune kernels, and time typical ones; not where
        the half shows that the system would end the process."""
        memory, rate = 2 * self.rows.get(now // 2, Row(0)).memory, None
        reason = self.too_much(memory) if self.device.type == "cpu" else ""
        if not reason:
            most, reason = devices.within_memory(lambda: [self.peak(now) for _ in range(2)][-1])
            memory = max((most or 0) - self.held, 0)
            reason = reason or self.too_much(memory)
        if not reason:
            rate, reason = devices.within_memory(lambda: self.rate(now))
        if reason:
            release(self.stepper.state)
        self.rows[now] = Row(now, rate or 0.0, memory, reason)
        return self.rows[now]

    def peak(self, now: int) -> int:
        """Return the most bytes in use during a step of the largest samples."""

        def act() -> None:
            for raw in self.stepper.feed([self.largest[:now]]):
                self.stepper.step(raw)

        return peak(self.device, act)

    def rate(self, now: int) -> float:
        """Return the samples/s of the fastest of some turns, of one where a step takes long."""
        stands_for = self.stepper.repeat(now, 4)
        looks = LOOKS if self.stepper.advance().seconds < self.seconds / 10 else 1
        seconds = min(TURN, self.seconds / 250)
        return stands_for * max(self.stepper.advance(seconds).samples_per_s for _ in range(looks))

    def too_much(self, need: int) -> str:
        share = HEADROOM.get(self.device.type, 0.1)
        if self.free is None or need <= (1 - share) * self.free:
            return ""
        return f"it needs {size(need)} of {size(self.free)} free memory, {percent(share)} kept free"


def peak(device: torch.device, act: Callable[[], Any]) -> int:
    """Return the most bytes that tensors on CUDA, whose statistics begin anew, or else this process on Linux hold while
    it acts; 0 where that is not said."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        act()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    act()
    return sum(1024 * kilobytes for kilobytes in numbers("/proc/self/status", "VmHWM:"))
