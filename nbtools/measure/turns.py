"""Plans side by side: trained in turns, so that what else the machine does meanwhile befalls each alike, and within a
time that holds whatever that is; and whether they learn the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Self

import torch
from torch import Tensor, nn

from nbtools.data import Feed, Pack, Padding, Raw, Resident, gather, on, tick
from nbtools.errors import NbtoolsError
from nbtools.measure.timing import WARMING, Clock, Stepper, Timing, typical, untouched, wall
from nbtools.show import percent
from nbtools.train import Plan, TaskLike, gradients
from nbtools.train import device as devices

ROUNDS, LEAST_ROUNDS = 12, 3  # of turns
FULL = 60.0  # seconds of a run from which it is measured as long as any
STEPS, BATCHES, SAMPLES = 6, 3, 8  # after which, on which losses and gradients are compared; of a batch at most
SAME_LOSS, SAME_GRADIENT = 0.01, 0.99  # relative; cosine: bf16 keeps 8 bits, 0.4 % a number
CONTROL = 3.0  # times what two equal runs differ by


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
    other = attempt(lambda: Stepper(run.task, run.pack, plan, run.device, share_feed(run, plan), run.clock), warming)
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


def share_feed(run: Stepper, plan: Plan) -> Feed | None:
    """Return the feed of a plan that reads the pack in memory as a run does; None where it has one of its own."""
    return run.feed.padded(plan) if isinstance(run.feed, Resident) and plan.feed == run.plan.feed else None


# -- whether other arithmetic learns the same


def objection(task: TaskLike, pack: Pack, plan: Plan, change: Mapping[str, Any], clock: Clock) -> str:
    """Return how loss and gradient of some batches differ with other arithmetic, beyond what is due to chance; "" if
    they do not. Compared at the same weights with dropout off: two trajectories would say nothing, as chaos alone parts
    those of hctr by 3.5 % in 20 steps."""
    device, size = devices.pick(), min(plan.batch_size, SAMPLES)
    plan = plan.replace(batch_size=size, micro_batch_size=None, warmup_epochs=0.0, schedule="constant")
    padding = Padding(pack, plan)
    try:
        plain, other = (
            without_dropout(Stepper(task, pack, each, device, clock=clock, learning=True))
            for each in (plan, plan.replace(**change))
        )
        batches = [on(device, gather(pack, ids, padding)) for ids, _ in typical(pack, plan, BATCHES)]
        for number in range(STEPS):  # the gradients of first weights are mostly rounding in bf16
            plain.step(batches[number % len(batches)])
        other.state.model.load_state_dict(plain.state.model.state_dict())
        first, again, changed = (gradient(stepper, batches) for stepper in (plain, plain, other))
    except (RuntimeError, NbtoolsError) as error:
        return f"fails ({str(error).partition(chr(10))[0]})"
    (control, alike), (far, cosine) = apart(first, again), apart(first, changed)
    if not far <= max(SAME_LOSS, CONTROL * control):
        return f"is faster, but its loss differs by {percent(far, 1)}"
    if not 1 - cosine <= max(1 - SAME_GRADIENT, CONTROL * (1 - alike)):
        return f"is faster, but its gradient has a cosine of {cosine:.3f} to the plan's"
    return ""


def without_dropout(stepper: Stepper) -> Stepper:
    for layer in stepper.state.model.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.p = 0.0
        elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0
    return stepper


def gradient(stepper: Stepper, batches: Sequence[Raw]) -> tuple[float, Tensor]:
    """Return (mean loss, gradient) of batches, the same random numbers drawn each time."""
    loss, parts, state = 0.0, list[Tensor](), stepper.state
    state.restore_rng()
    for raw in batches:
        stepper.clock()
        total, count = gradients(state, raw, len(raw["id"]))
        loss += float(total) / max(float(count), 1) / len(batches)
        parts.append(torch.cat([p.grad.double().flatten() for p in state.parameters if p.grad is not None]))
        parts[-1] /= state.scaler.get_scale() if state.scaler is not None else 1.0
    return loss, torch.stack(parts).sum(0)


def apart(these: tuple[float, Tensor], those: tuple[float, Tensor]) -> tuple[float, float]:
    """Return (how far the second loss is from the first, the cosine between the gradients)."""
    far = abs(those[0] - these[0]) / max(abs(these[0]), 1e-12)
    return far, float(torch.nn.functional.cosine_similarity(these[1], those[1], 0))


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
