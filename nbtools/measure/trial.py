"""A plan's own train step at any batch size, on a state that nobody else has: what finders try things on."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from nbtools.data import Card, Pack, batches_left, lengths_of, open_feed
from nbtools.measure import memory
from nbtools.measure.clock import clock_of, finish
from nbtools.train import Batch, Plan, Task, TrainState, attempt, clear_gradients, prepare, release, within_memory


@dataclass(frozen=True)
class Load:
    """A batch to time. samples: how many it stands for; one padded longer than its epoch's mean stands for more."""

    ids: np.ndarray
    samples: float


class Trial:
    """Steps with the plan's network, precision, clipping, optimizer, augmentation and feed. Its lr is so small that no
    weight moves; out of memory comes back as an answer, and leaves a state that can go on."""

    def __init__(self, task: Task, pack: Pack, plan: Plan, device: torch.device):
        self.pack, self.device = pack, device
        self.task = cast(Task, Apart(task))
        self.before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        self.state = TrainState(self.task, pack, still(plan), device)
        self.ids = pack.ids("train")
        self.lengths = lengths_of(pack, self.ids)
        self.order = by_size(pack, self.ids)
        prepare(plan, device, many_shapes=self.lengths is not None)
        self.feed = open_feed(pack, plan, device)
        resident = self.feed.name == "resident"
        self.ahead = 0 if resident else plan.prefetch * max(plan.workers, 1)  # batches made ready: none of them timed
        self.clock, self.clock_name = clock_of(device, self.feed.name)

    def run(self, batches: Sequence[np.ndarray]) -> None:
        for raw in self.feed(batches):
            self.step(raw)

    def step(self, raw: Batch) -> None:
        attempt(self.task, self.state, raw, len(self.ids))
        self.state.skipped = 0  # steps that fp16 leaves out; samples are not counted here either

    def warm(self, batch_size: int) -> str:
        """A step with the largest shapes; what it said where memory ended, else nothing."""
        _, reason = within_memory(lambda: self.run([self.largest(batch_size)]))
        return self.recovered(reason)

    def measure(self, batch_size: int) -> tuple[int | None, str]:
        """(bytes, "") that training at this batch size takes in all at its peak, from a step with the largest shapes;
        (None, why) where memory ended."""
        clear_gradients(self.state.parameters)
        kept = self.held()
        found, reason = within_memory(lambda: self.peak(batch_size))
        return (None if found is None else kept + found), self.recovered(reason)

    def peak(self, batch_size: int) -> int:
        with memory.peak(self.device) as peak:
            self.run([self.largest(batch_size)])
        return peak.bytes

    def held(self) -> int:
        """Bytes taken between steps."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device) - self.before
        return memory.held(self.state)

    def rate(self, loads: Sequence[Load], steps: int, lead: int) -> tuple[float | None, str]:
        """(samples/s, "") over so many steps through the loads in turn, after `lead` untimed ones, to the device's end;
        (None, why) where memory ended."""
        lead = max(lead, self.ahead)
        loads = [loads[i % len(loads)] for i in range(lead + steps)]
        found, reason = within_memory(lambda: self.timed(loads, lead))
        return found, self.recovered(reason)

    def timed(self, loads: Sequence[Load], lead: int) -> float:
        stream = iter(self.feed([load.ids for load in loads]))
        for _ in range(lead):
            self.step(next(stream))
        finish(self.device)
        start = self.clock()
        for raw in stream:
            self.step(raw)
        finish(self.device)
        return sum(load.samples for load in loads[lead:]) / max(self.clock() - start, 1e-9)

    def recovered(self, reason: str) -> str:
        """After running out of memory, keep nothing of the failed step."""
        if reason:
            release(self.state)
        return reason

    def largest(self, batch_size: int) -> np.ndarray:
        """Ids of the samples that make the largest batch."""
        return self.order[:batch_size]

    def typical(self, batch_size: int, count: int = 4) -> list[Load]:
        """Whole batches of the plan's first epoch as the feed groups them; of ragged ones those whose padded length is
        nearest to the epoch's mean a sample, so that few stand for all."""
        groups = batches_left(self.ids, self.lengths, self.state.plan.seed, 0, [[batch_size, 0]])
        column = self.state.card.bucket_by
        whole = [ids for ids in groups if len(ids) == batch_size] or groups
        if column is None:
            return [Load(ids, len(ids)) for ids in whole[:count]]
        padded = [float(self.pack.lengths(column, ids).max()) for ids in groups]
        mean = sum(length * len(ids) for length, ids in zip(padded, groups, strict=True)) / len(self.ids)
        near = sorted((abs(length - mean), i) for i, length in enumerate(padded) if len(groups[i]) == len(whole[0]))
        return [Load(groups[i], len(groups[i]) * padded[i] / mean) for _, i in near[:count]]


class Apart:
    """The task, but for a model of its own: one that hands out the same module each time does not see it trained."""

    def __init__(self, task: Task):
        self.task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def model(self, card: Card, plan: Any) -> nn.Module:
        return copy.deepcopy(self.task.model(card, plan))


def still(plan: Plan) -> Plan:
    """The same work a step, and no progress: whole batches, no end, an lr of nothing. Not compiled: each batch size
    would be compiled anew, and beyond 8 of them dynamo gives up."""
    endless = plan.replace(epochs=10**6, eval_every=10**6, warmup_epochs=0.0, early_stop=None, micro_batch_size=None)
    endless = endless.replace(compile=False, graph=False)
    return endless.replace(schedule="constant", lr=1e-12, min_lr=0.0)


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
