"""Plans side by side: trained in turns, so that what else the machine does meanwhile befalls each alike, and within a
time that holds whatever that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Self

from nbtools.data import Feed, Pack, Resident, tick
from nbtools.errors import NbtoolsError
from nbtools.measure.timing import WARMING, Clock, Stepper, Timing, untouched, wall
from nbtools.train import Plan, TaskLike
from nbtools.train import device as devices

ROUNDS, LEAST_ROUNDS = 12, 3  # of turns
FULL = 60.0  # seconds of a run from which it is measured as long as any


def timed(task: TaskLike, pack: Pack, plan: Plan, seconds: float = 2.0) -> Timing:
    """Return how a plan trains here, measured for about `seconds` after warming up. Raises TrainError if training could
    not start."""
    device = devices.pick()
    with untouched(device):
        stepper = Stepper(task, pack, plan, device).warm_up()
        in_turns([stepper], seconds)
        stepper.close()
        return stepper.timing()


def in_turns(steppers: Sequence[Stepper], seconds: float) -> None:
    """Train each for a while, round after round, for about `seconds` in all: at least three rounds, but one where these
    would take more than twice as long."""
    clock = steppers[0].clock
    start, each = clock(), seconds / ROUNDS / len(steppers)
    for number in range(ROUNDS):
        if number and clock() - start > seconds * (1 if number >= LEAST_ROUNDS else 2):
            break
        for stepper in steppers:
            stepper.turn(each)


def share_of(run_s: float | None) -> float:
    """Return what share of its usual time a measurement after a run of so many seconds gets: who trained for a few
    seconds waits no longer than that for a receipt."""
    return 1.0 if run_s is None else min(max(run_s / FULL, 0.1), 1.0)


def attempt(make: Callable[[], Stepper], steps: int = WARMING) -> Stepper | str:
    """Return what trains, warm; or why it does not: bfloat16 lacks some operations, memory ends, there is no
    compiler."""
    try:
        stepper, why = devices.within_memory(lambda: make().warm_up(steps))
    except (RuntimeError, NbtoolsError, OSError) as error:
        return f"fails ({(str(error).splitlines() or [type(error).__name__])[0].split('. ')[0].rstrip('.')})"
    if stepper is None:
        return f"does not fit into memory ({why})"
    return f"fails (the loss became {float(stepper.loss)})" if stepper.lost else stepper


@dataclass(frozen=True)
class Trial:
    """A change of a plan, trained in turns with it. ratios: its samples/s over the plan's, a turn each; timing: how it
    trains, micro_batch_size: in what parts of a batch; or failed: why it does not train."""

    change: dict[str, Any]
    ratios: tuple[float, ...] = ()
    timing: Timing | None = None
    micro_batch_size: int | None = None
    failed: str = ""

    @property
    def ratio(self) -> float:
        return median(self.ratios) if self.ratios else 0.0

    @property
    def faster(self) -> bool:
        """Return whether it was in at least three of four turns."""
        return bool(self.ratios) and sorted(self.ratios)[len(self.ratios) // 4] > 1

    @property
    def name(self) -> str:
        return ", ".join(f"{setting}={value}" for setting, value in self.change.items())

    @property
    def spread(self) -> str:
        return f"{self.ratio:.2f}× ({min(self.ratios):.2f}–{max(self.ratios):.2f}, n = {len(self.ratios)})"

    def __str__(self) -> str:
        return f"{self.name} {self.failed or self.spread}"


def beside(run: Stepper, plan: Plan, seconds: float, warming: int = WARMING) -> Trial:
    """Train another plan in turns with a run, for about `seconds`."""
    change = {name: getattr(plan, name) for name in plan.changes_from(run.plan)}
    other = attempt(lambda: Stepper(run.task, run.pack, plan, run.device, shared(run, plan), run.clock), warming)
    if isinstance(other, Stepper) and other.state.graphs is not None:
        other = other.state.graphs.off or other
    if isinstance(other, str):
        return Trial(change, failed=other)
    for stepper in (run, other):
        stepper.turns.clear()
    in_turns([run, other], seconds)
    other.close()
    ratios = (a.samples_per_s / b.samples_per_s for a, b in zip(other.turns, run.turns, strict=True))
    return Trial(change, tuple(ratios), other.timing(), other.state.recovery.micro)


def shared(run: Stepper, plan: Plan) -> Feed | None:
    """Return the feed of a plan that reads the pack in memory as a run does; None where it has one of its own."""
    return run.feed.padded(plan) if isinstance(run.feed, Resident) and plan.feed == run.plan.feed else None


# -- within a time


class Late(Exception):
    """The time of a measurement is over."""


class Deadline:
    """A clock, read by every step, that ends the block that it is the context of: once `seconds` by `clock` are used,
    or `most` by the wall, whatever else the machine does."""

    def __init__(self, seconds: float, most: float = math.inf, clock: Clock = wall):
        self.seconds, self.most, self.clock = seconds, most, clock
        self.start = clock(), wall()

    def __call__(self) -> float:
        tick()
        if self.left() < 0:
            raise Late
        return self.clock()

    def left(self) -> float:
        own, passed = self.clock() - self.start[0], wall() - self.start[1]
        return min(self.seconds - min(own, passed), self.most - passed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: object) -> bool:
        return kind is Late
