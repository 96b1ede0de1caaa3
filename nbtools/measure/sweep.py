"""The learning-rate range test (Smith, arXiv 1506.01186): lr rises geometrically step by step until the loss is lost.

The steps are those of training: one lr a step, in however many micro-batches; one that fp16 leaves out is made again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch

from nbtools import table
from nbtools.data import Feed, Pack, Raw, batches_left, lengths_of, open_feed
from nbtools.errors import TrainError
from nbtools.measure.curve import KEPT, LEAST_STEPS, judge, smooth
from nbtools.measure.machine import machine
from nbtools.measure.untouched import untouched
from nbtools.train import Plan, Task, TrainState, require_sizes, step
from nbtools.train import device as devices

STEPS, SECONDS = 100, 60.0
WARMUP_STEPS = 3  # at the lowest lr: what a step costs, and the loss to start from
LOST = 4.0  # times the least smoothed loss: there the sweep ends (as fastai's and Lightning's do)
MOST_SKIPS = 30  # steps that fp16 may leave out one after another while its scaler looks for a scale


@dataclass(frozen=True)
class Sweep:
    """The curve of a range test. Shows as a table.

    losses[k]: mean loss of the batch that came after the update with lrs[k]; start: before any; None: no number.
    smoothed: running averages from both sides, so that the curve does not lag. lost: the lr after which the loss was no
    number, or LOST times its least; None where it never was. suggestion: None where none is sensible. reason: one
    sentence for either. skipped: steps that fp16 left out and that were made again. seconds: of the whole sweep.
    """

    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    start: float | None
    lost: float | None
    suggestion: float | None
    reason: str
    batch_size: int
    skipped: int
    seconds: float
    machine: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(**{**values, **{name: tuple(values[name]) for name in ("lrs", "losses", "smoothed")}})

    def rows(self) -> list[tuple[str, str, str, str]]:
        """About a dozen points of the curve, its least one among them."""
        if not self.lrs:
            return []
        least = int(np.argmin(self.smoothed))
        every = math.ceil(len(self.lrs) / 12)
        shown = sorted({*range(0, len(self.lrs), every), least, len(self.lrs) - 1})
        return [
            (f"{self.lrs[k]:.2g}", f"{self.losses[k]:.4g}", f"{self.smoothed[k]:.4g}", "least" if k == least else "")
            for k in shown
        ]

    def caption(self) -> str:
        return f"lr {self.suggestion:.2g}: {self.reason}" if self.suggestion else f"no suggestion: {self.reason}"

    def footer(self) -> str:
        skipped = f", {self.skipped} that fp16 left out" if self.skipped else ""
        how = f"{len(self.lrs)} steps of {self.batch_size} samples{skipped}, {self.seconds:.1f} s"
        return ", ".join([how, *self.machine.values()])

    def __str__(self) -> str:
        rows = table.text(("lr", "loss", "smoothed", ""), self.rows())
        return f"{self.caption()}\n{rows}\n{self.footer()}"

    def _repr_html_(self) -> str:
        rows = table.html(("lr", "loss", "smoothed", ""), self.rows(), self.caption())
        return rows + table.html(("measured on",), [(self.footer(),)])


def lr_sweep(
    task: Task,
    pack: Pack,
    plan: Plan,
    device: torch.device | str | None = None,
    low: float = 1e-6,
    high: float = 1.0,
    steps: int = STEPS,
    seconds: float = SECONDS,
) -> Sweep:
    """Train a model of its own, made from the plan's seed, with lr from low to high; what it touched is as it was.

    seconds: where the steps would take longer, fewer are made, but at least LEAST_STEPS. Raises TrainError for a range
    that is none, and where training cannot start.
    """
    if not 0 < low < high < math.inf:
        raise TrainError(f"lr_sweep needs 0 < low < high, got low={low:g}, high={high:g}; the defaults suit most tasks")
    if steps < LEAST_STEPS:
        raise TrainError(f"lr_sweep's steps must be ≥ {LEAST_STEPS} to draw a curve through noise, got {steps}")
    require_sizes(pack, plan)
    where = torch.device(device) if device is not None else devices.pick()
    begun = perf_counter()
    with untouched(where):
        start, lrs, losses, skipped = swept(task, pack, plan, where, (low, high), steps, seconds)
    lost = lrs[len(losses)] if len(losses) < len(lrs) else None
    kept, curve = lrs[: len(losses)], smooth(losses)
    suggestion, reason = judge(kept, losses, curve, lost, (low, high))
    if start is None:
        lost, reason = None, "the loss was no number before any update; look at data and loss, or set amp=off"
    took = perf_counter() - begun
    values = tuple(kept), tuple(losses), tuple(curve), start, lost, suggestion, reason
    return Sweep(*values, plan.batch_size, skipped, took, machine())


def swept(
    task: Task,
    pack: Pack,
    plan: Plan,
    device: torch.device,
    ends: tuple[float, float],
    steps: int,
    seconds: float,
) -> tuple[float | None, list[float], list[float], int]:
    """(loss before, lrs, losses, steps left out). Where the loss is lost, losses end before lrs do."""
    climb = Climb(task, pack, plan, device)
    start, begun = climb.advance(ends[0]), perf_counter()  # the first step warms the device up, and is not timed
    if not math.isfinite(start):
        return None, list(ends), [], climb.skipped
    for _ in range(WARMUP_STEPS):
        climb.advance(ends[0])
    each = (perf_counter() - begun) / WARMUP_STEPS
    number = max(LEAST_STEPS, min(steps, int(seconds / max(each, 1e-9))))
    lrs = np.geomspace(*ends, number).tolist()
    losses: list[float] = []
    running, least = 0.0, start
    climb.advance(lrs[0])
    for k, lr in enumerate([*lrs[1:], lrs[-1]], 1):  # the loss after an update is that of the next batch
        loss = climb.advance(lr)
        running = KEPT * running + (1 - KEPT) * loss
        mean = running / (1 - KEPT**k)
        if not math.isfinite(loss) or mean > lost_above(least):
            break
        losses.append(loss)
        least = min(least, mean)
    climb.close()
    return start, lrs, losses, climb.skipped


def lost_above(least: float) -> float:
    return least + (LOST - 1) * abs(least)  # LOST times it, and right for a loss below zero


class Climb:
    """A model trained step by step, each with an lr of its own."""

    def __init__(self, task: Task, pack: Pack, plan: Plan, device: torch.device):
        plain = {"schedule": "constant", "warmup_epochs": 0.0, "min_lr": 0.0, "ema": None}
        eager = {"compile": False, "graph": False}  # the same arithmetic, without minutes of compilation
        self.plan = plan.replace(**plain, **eager)
        self.task, self.pack = task, pack
        self.state = TrainState(task, pack, self.plan, device)
        devices.prepare(self.plan, device, many_shapes=self.state.card.bucket_by is not None)
        self.stream = endless(self.state, pack, open_feed(pack, self.plan, device))
        self.skipped = 0
        self.state.restore_rng()

    def advance(self, lr: float) -> float:
        """One optimizer step with this lr; its mean loss, nan where fp16 finds no scale. A step that fp16 leaves out
        is made again on the next batch, and its loss does not count. Reading the loss waits for the device."""
        state = self.state
        state.plan = self.plan.replace(lr=lr)
        for _ in range(MOST_SKIPS):
            raw, before = next(self.stream), state.skipped
            loss_sum, number = step(self.task, state, raw, self.pack.splits["train"])
            state.step += 1
            state.samples += len(raw["id"])
            loss = float(loss_sum) / max(float(number), 1)
            if state.skipped == before or not math.isfinite(loss):
                return loss
            self.skipped += 1
        return math.nan

    def close(self) -> None:
        self.stream.close()  # its feed's workers end


def endless(state: TrainState, pack: Pack, feed: Feed, first: int = 0) -> Generator[Raw, None, None]:
    """Batches of one epoch after another, in the order in which training sees them; moves the state's epoch."""
    ids, plan = pack.ids("train"), state.plan
    lengths = lengths_of(pack, ids)
    for epoch in count(first):
        state.epoch = epoch
        yield from feed(batches_left(ids, lengths, plan.seed, epoch, [[plan.batch_size, 0]]))
