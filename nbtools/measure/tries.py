"""Changes of a plan, each trained in turns with it: what no arithmetic tells is tried."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from nbtools.feed import Feed
from nbtools.measure import memory
from nbtools.measure.pace import WARMUP_STEPS, Pace
from nbtools.pack import Pack
from nbtools.plan import Plan
from nbtools.state import Task

ROUNDS = 16
LEAST_ROUNDS = 3  # where a step takes long
AHEAD_ROUNDS = 7  # where workers are tried: a round must outlast what they made ready
FEEDING = {"feed", "workers", "prefetch"}


@dataclass(frozen=True)
class Tried:
    """A change of the plan. ratio: its samples/s over the plan's, the median over rounds; low, high: the quartiles."""

    change: dict[str, Any]
    ratio: float
    low: float
    high: float
    rounds: int


def try_out(
    task: Task, pack: Pack, pace: Pace, feed: Feed, changes: Sequence[dict[str, Any]], seconds: float, step: float
) -> tuple[Tried, ...]:
    """Each change in turns with the plan of `pace`, all for so many seconds. step: bytes that a step takes now; a
    change whose steps do not fit is left out."""
    others = []
    for change in changes:
        plan = pace.plan.turn(**change)
        shared = None if FEEDING & set(change) else feed
        if fits(step * grown(pace.plan, plan), pace):
            other, _ = memory.tried(lambda plan=plan, shared=shared: Pace(task, pack, plan, pace.state.device, shared))
            others += [(change, other)] if other else []
    if not others:
        return ()
    pace.rates.clear()
    ahead = max(made_ready(other.plan) for _, other in others)
    rounds, start = AHEAD_ROUNDS if ahead else ROUNDS, perf_counter()
    for k in range(rounds):
        if k >= LEAST_ROUNDS and perf_counter() - start > 2 * seconds:
            break
        for one in (pace, *(other for _, other in others)):
            one.advance(seconds / rounds / (1 + len(others)), steps=1 + 2 * made_ready(one.plan))
    whole = [(change, other) for change, other in others if other.state.micro == other.plan.micro_batch_size]
    return tuple(compared(change, pace, other) for change, other in whole)  # of the rest, steps went on in parts


def affordable(step_s: float, plan: Plan, changes: Sequence[dict[str, Any]], seconds: float) -> int:
    """How many of the changes can be tried in the time, with the fewest rounds; step_s: of the plan."""
    spent = LEAST_ROUNDS * step_s  # the plan's own turns
    for n, change in enumerate(changes):
        spent += (WARMUP_STEPS + LEAST_ROUNDS) * step_s * plan.turn(**change).batch_size / plan.batch_size
        if spent > seconds:
            return n
    return len(changes)


def compared(change: dict[str, Any], pace: Pace, other: Pace) -> Tried:
    ratios = [b[0] / a[0] for a, b in zip(pace.rates, other.rates, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Tried(change, middle, low, high, len(ratios))


def grown(old: Plan, new: Plan) -> float:
    """How many times as many samples a forward pass has."""
    return (new.micro_batch_size or new.batch_size) / (old.micro_batch_size or old.batch_size)


def fits(size: float, pace: Pace) -> bool:
    room = memory.room(pace.state.device)
    return room is None or size <= room.usable


def made_ready(plan: Plan) -> int:
    """Batches that workers made while another plan had its turn: they say nothing of how fast they are."""
    return plan.workers * plan.prefetch if plan.feed == "workers" else 0
