"""Plans side by side, trained in turns within a time limit, so that other work affects each alike; and what they
learn."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from nbtools.data import Feed, Pack, Padding, Raw, Resident, gather, on, tick
from nbtools.errors import NbtoolsError
from nbtools.measure.timing import WARMING, Clock, Stepper, Timing, typical, untouched, wall
from nbtools.show import percent, shown
from nbtools.train import Plan, TaskLike, gradients, meter
from nbtools.train import device as devices

ROUNDS, LEAST_ROUNDS = 12, 3  # of turns
STEPS, BATCHES, SAMPLES = 6, 3, 8  # after which, on which losses and gradients are compared; of a batch at most
PASSES = 20  # that this takes, with what begins it
SAME_LOSS, SAME_GRADIENT = 0.01, 0.99  # relative; cosine: bf16 keeps 8 bits, 0.4 % a number
CONTROL = 3.0  # times what two equal runs differ by
FP16_ROOM = 16  # by which the scale of fp16's gradients is lowered before they are compared


def timed(task: TaskLike, pack: Pack, plan: Plan, seconds: float = 2.0) -> Timing:
    """Return how a plan trains here, measured for about `seconds` when warm. Raises TrainError if it cannot start."""
    with untouched(devices.pick()):
        stepper = Stepper(task, pack, plan, devices.pick()).warm_up()
        in_turns([stepper], seconds)
        with closing(stepper.batches):
            return stepper.timing()  # which on CUDA takes further steps


def in_turns(steppers: Sequence[Stepper], seconds: float) -> None:
    """Train each in rounds for about `seconds` in all: at least three, but one where they take over twice that."""
    start, each = steppers[0].clock(), seconds / ROUNDS / len(steppers)
    for number in range(ROUNDS):
        if number and steppers[0].clock() - start > seconds * (1 if number >= LEAST_ROUNDS else 2):
            break
        for stepper in steppers:
            stepper.turn(each)


def attempt(make: Callable[[], Stepper], steps: int = WARMING) -> Stepper | str:
    """Return what trains, warm; or why it does not: bfloat16 lacks some operations, memory or a compiler."""
    try:
        stepper, why = devices.within_memory(lambda: make().warm_up(steps))
    except (RuntimeError, NbtoolsError, OSError, TypeError) as error:  # NumPy has no bfloat16
        return f"fails ({(str(error).splitlines() or [type(error).__name__])[0].split('. ')[0].rstrip('.')})"
    if stepper is None:
        return f"does not fit into memory ({why})"
    return stepper if math.isfinite(float(stepper.loss)) else f"fails (the loss became {float(stepper.loss)})"


@dataclass(frozen=True)
class Trial:
    """A change of a plan, trained in turns with it. ratios: samples/s over the plan's, one a turn; timing or failed."""

    change: dict[str, Any]
    ratios: tuple[float, ...] = ()
    timing: Timing | None = None
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
        return ", ".join(f"{setting} = {shown(value)}" for setting, value in self.change.items())

    @property
    def spread(self) -> str:
        return f"{self.ratio:.2f}× ({min(self.ratios):.2f}–{max(self.ratios):.2f}, n = {len(self.ratios)})"

    def __str__(self) -> str:
        return f"{self.name}: {self.failed or self.spread}"


def beside(run: Stepper, plan: Plan, seconds: float, warming: int = WARMING) -> Trial:
    """Train another plan in turns with a run, for about `seconds`. Both read the pack in memory at the same place."""
    feed = run.feed.padded(plan) if isinstance(run.feed, Resident) and plan.feed == run.plan.feed else None
    change = {name: getattr(plan, name) for name in plan.changes_from(run.plan)}
    other = attempt(lambda: Stepper(run.task, run.pack, plan, run.device, feed, run.clock), warming)
    if isinstance(other, Stepper) and other.state.graphs is not None:
        other = other.state.graphs.off or other
    if isinstance(other, str):
        return Trial(change, failed=other)
    for stepper in (run, other):
        stepper.turns.clear()
    in_turns([run, other], seconds)
    ratios = tuple(a.samples_per_s / b.samples_per_s for a, b in zip(other.turns, run.turns, strict=True))
    with closing(other.batches):
        return Trial(change, ratios, other.timing())


def objection(task: TaskLike, pack: Pack, plan: Plan, change: Mapping[str, Any], clock: "Deadline", each: float) -> str:
    """Return how loss and gradient of some batches differ with other arithmetic, beyond chance; "" if they do not. At
    the same weights, with dropout off: chaos alone parts two trajectories of hctr by 3.5 % in 20 steps. each: seconds
    of a sample; batches are as large as the time that is left allows."""
    device, still = devices.pick(), {"micro_batch_size": None, "warmup_epochs": 0.0, "schedule": "constant"}
    samples = max(2, min(SAMPLES, int(clock.left() / (PASSES * each))))
    plan = plan.replace(batch_size=min(plan.batch_size, samples), **still)
    try:
        plans = plan, plan.replace(**change)  # no feed: the batches are below
        plain, other = (Stepper(task, pack, p, device, Feed(pack, device, p), clock, learning=True) for p in plans)
        for stepper in (plain, other):
            without_dropout(stepper.state.model)
        batches = [on(device, gather(pack, ids, Padding(pack, plan))) for ids in typical(pack, plan, BATCHES)[0]]
        for number in range(STEPS):  # the gradients of first weights are mostly rounding in bf16
            plain.step(batches[number % len(batches)])
        other.step(batches[0])  # fp16 finds its scale, lowered since later weights may have larger gradients
        for scaler in (plain.state.scaler, other.state.scaler):
            scaler.update(scaler.get_scale() / FP16_ROOM)
        other.state.model.load_state_dict(plain.state.model.state_dict())
        first, again, changed = (differentiate(stepper, batches) for stepper in (plain, plain, other))
    except (RuntimeError, NbtoolsError, TypeError) as error:
        return f"fails ({str(error).partition(chr(10))[0]})"
    (control, alike), (far, cosine) = compare(first, again), compare(first, changed)
    if not far <= max(SAME_LOSS, CONTROL * control):
        return f"is faster, but its loss differs by {percent(far, 1)}"
    if not 1 - cosine <= max(1 - SAME_GRADIENT, CONTROL * (1 - alike)):
        return f"is faster, but its gradient's cosine to the plan's is {cosine:.3f}"
    return ""


def without_dropout(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.p = 0.0
        elif isinstance(getattr(layer, "dropout", None), float):  # of recurrent and attention layers
            vars(layer)["dropout"] = 0.0


def differentiate(stepper: Stepper, batches: Sequence[Raw]) -> tuple[float, Tensor]:
    """Return (mean loss, scaled gradient) of batches, the same random numbers drawn each time."""
    loss, state, dtype = 0.0, stepper.state, meter.sum_dtype(stepper.device)
    gradient = torch.zeros((), dtype=dtype, device=stepper.device)
    torch.manual_seed(state.applied.seed)
    for raw in batches:
        stepper.clock()
        total, count = gradients(state, raw, len(raw["id"]))
        loss += float(total) / (float(count) or 1) / len(batches)
        gradient = gradient + torch.cat([p.grad.to(dtype).flatten() for p in state.parameters if p.grad is not None])
    return loss, gradient


def compare(these: tuple[float, Tensor], those: tuple[float, Tensor]) -> tuple[float, float]:
    """Return (how far the second loss is from the first, the cosine between the gradients)."""
    far = abs(those[0] - these[0]) / max(abs(these[0]), 1e-12)
    return far, float(torch.nn.functional.cosine_similarity(these[1], those[1], 0))


class Late(Exception):
    """The time of a measurement is over."""


class Deadline(AbstractContextManager["Deadline"]):
    """A clock, read by every step, that ends the block that it is the context of: once `seconds` by `clock` are used,
    or `most` by the wall, whatever else the machine does. start: of both, if not now."""

    def __init__(self, seconds: float, most: float = math.inf, clock: Clock = wall, start: Sequence[float] = ()):
        self.seconds, self.most, self.clock, self.start = seconds, most, clock, start or (clock(), wall())

    def __call__(self) -> float:
        tick()
        if self.left() < 0:
            raise Late
        return self.clock()

    def wall(self) -> float:
        self()
        return wall()

    def left(self) -> float:
        own, passed = self.clock() - self.start[0], wall() - self.start[1]
        return min(self.seconds - min(own, passed), self.most - passed)

    def __exit__(self, kind: Any, *_: object) -> bool:
        return kind is Late
