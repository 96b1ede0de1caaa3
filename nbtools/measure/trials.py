"""Changes of a plan, tried in alternation with it: for gains that cannot be computed from a profile."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Sequence
from typing import Any

import torch

from nbtools.data import Feed, Pack, choose
from nbtools.measure import memory
from nbtools.measure.profile import LEAST_ROUNDS, LONG, ROUNDS, Bench, StepProfile, Tried, shapes
from nbtools.measure.stepper import Clock, Stepper, untouched
from nbtools.train import MOST_GRAPHS, Diverged, Plan, TaskLike, unrecordable
from nbtools.train import device as devices

SECONDS = 3.0  # a measurement takes two to three times as long, with its warm-up
WAIT_SHARE = 0.1  # of a step: from here another feed is tried
FIXED_SHARE = 0.2  # of a step that does not grow with the batch: from here a larger batch is tried
COMPILE_PAYS = 1800.0  # seconds of training planned from which compiling is tried: it took 69 s here, on two busy cores
SHAPES = 8  # programs of one function that dynamo keeps before it gives up
FASTER = 1.05  # lower quartile of the ratio from which a change is used
SURE = 5  # rounds in each of which a change was faster, after which it is
LOSSES = 10  # steps whose losses are compared
RAMP = 30  # steps in which lr rises to the plan's while they are
LEAST_STEPS = 20  # optimizer steps per epoch below which a larger batch starves a small data set: rule of thumb (ours)
LOSS_SECONDS = 4.0  # that these steps may take: where a step is long, they have smaller batches
LEAST_LOSSES = 8  # samples of the smallest: fewer give BatchNorm poor statistics
FEEDING = {"feed", "workers", "prefetch"}
LEVERS = ("amp", "channels_last", "threads", "feed", "compile", "graph")
"""Settings that make a step faster or slower and change nothing that is learned but for rounding, in the order in which
advice tries them: what gains most, and what others depend on, first."""


def step_profile(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    device: torch.device | None = None,
    seconds: float | None = None,
    fixed: Collection[str] = (),
    clock: Clock | None = None,
) -> StepProfile:
    """Measure a plan for about two to three times `seconds` (SECONDS), or some 20 steps where they take longer, and a
    minute or two more if training will last long enough that compiling is worth trying.

    fixed: settings that need not be tried. Trains a separate model; nothing outside changes, no random state, no
    switch (on CUDA torch's peak memory statistics begin anew). Raises TrainError if training could not start.
    """
    device, seconds = device or devices.pick(), seconds or SECONDS
    with untouched(device):
        bench = Bench(Stepper(task, pack, plan, device, clock=clock).warm_up())
        start, run = bench.clock(), bench.run
        bench.advance(seconds)
        found, step_s = bench.profile(), run.mean_s
        changes, over = worth_trying(run, found, fixed), bench.clock() + seconds
        results: list[Tried | None] = []
        for k, change in enumerate(changes):  # what one leaves of its time, the others have
            left = over - bench.clock()
            each = max(left, 0.0) / (len(changes) - k)
            results.append(try_out(run, change, each, left + seconds, step_s, found.memory["step"] * 2**20)[0])
        return dataclasses.replace(found, trials=tuple(filter(None, results)), took=bench.clock() - start)


def worth_trying(run: Stepper, profile: StepProfile, fixed: Collection[str]) -> list[dict[str, Any]]:
    """Changes whose gain cannot be computed, so that they are tried: torch.compile last, where training lasts long
    enough to earn the compiler's time back; none of a compiled plan, where each would be compiled first. CUDA graphs
    are proposed untried: a recording that fails may end the process, and with it a run."""
    plan = run.plan
    if plan.compile:
        return []
    changes = [alternative("feed", run)] if profile.wait >= WAIT_SHARE else []
    if profile.wait < max(profile.host, profile.device):
        changes.append(alternative("amp", run))
        if profile.fixed >= FIXED_SHARE:
            most = profile.train_samples // LEAST_STEPS
            larger = [{"batch_size": k * plan.batch_size} for k in (2, 4) if k * plan.batch_size <= most]
            changes += [{"micro_batch_size": None}] if plan.micro_batch_size else larger
        if profile.device > profile.host:
            changes.append(alternative("channels_last", run))
    if plan.epochs * profile.epoch_s >= COMPILE_PAYS:
        changes.append(alternative("compile", run))
    return [change for change in changes if change and not set(change) & set(fixed)]


def alternative(name: str, run: Stepper) -> dict[str, Any]:
    """Another value of a setting for speed that may be faster here; {}: none. Compiling and CUDA graphs serve few
    shapes only (a task's `bucket` makes them few), and recurrent layers break what is compiled."""
    plan, device, modules = run.plan, run.device, list(run.state.model.modules())
    threads = plan.threads or devices.threads()
    if name == "amp":
        other = devices.reduced(device) if plan.amp == "off" else "off"
    elif name == "feed":
        other = choose(run.pack, plan.replace(feed="auto"), device)[0]
        other = "streamed" if run.feed.name == "resident" else "" if other == run.feed.name else other
    elif name == "threads":
        other = threads // 2 if device.type == "cpu" else 0
    elif name == "channels_last":
        return {name: not plan.channels_last} if any(isinstance(each, torch.nn.Conv2d) for each in modules) else {}
    elif name == "graph":
        other = device.type == "cuda" and replays(plan, shapes(run.pack, plan))
    else:
        recurrent = any(isinstance(each, torch.nn.RNNBase) for each in modules)
        other = not (recurrent or plan.compile or shapes(run.pack, plan) > SHAPES)
    return {name: other} if other and other != getattr(plan, name) else {}


def replays(plan: Plan, shapes: int) -> bool:
    """Whether CUDA graphs may help: not for more shapes than are recorded, nor for fp16, nor again."""
    return not (shapes > MOST_GRAPHS or unrecordable(plan) or plan.graph)


def without_augmentation(plan: Plan) -> dict[str, Any]:
    """The task's own settings whose help mentions augmentation, and that 0 turns off."""
    own = [f for f in dataclasses.fields(plan) if f.name in own_settings(plan)]
    names = [f.name for f in own if "augment" in f.metadata.get("help", "") and f.metadata["least"] == 0]
    return {name: 0.0 for name in names if getattr(plan, name)}


def own_settings(plan: Plan) -> set[str]:
    """The settings that the task added."""
    return {f.name for f in dataclasses.fields(plan)} - {f.name for f in dataclasses.fields(Plan)}


def in_turns(
    run: Stepper, change: dict[str, Any], seconds: float, least: int = LEAST_ROUNDS
) -> tuple[Tried | None, Stepper | None]:
    """Train a change in turns with the plan, for about `seconds`, or until it is clear what it gives: (that, or None if
    memory ran out; the change in training). least: rounds.

    A setting for speed may fail: bfloat16 lacks some operations (CTC), or makes the loss NaN; there is no compiler.
    """
    plan, feed = run.plan.turn(**change), None if FEEDING & set(change) else run.feed
    run.turns.clear()
    start, each = run.clock(), seconds / 2 / ROUNDS
    try:
        other, _ = devices.within_memory(lambda: warmed(Stepper(run.task, run.pack, plan, run.device, feed, run.clock)))
        for k in range(ROUNDS if other is not None else 0):
            assert other is not None
            if k >= least and (run.clock() - start > seconds or clear(other.over(run))):
                break
            run.turn(each)
            other.turn(each)
            if other.lost:
                raise Diverged(f"the loss became {float(other.loss)}", (0, other.state.step))
    except (RuntimeError, Diverged) as error:
        if not set(change) <= set(LEVERS):
            raise
        return Tried(change, 0.0, 0.0, 0.0, 0, failed=str(error).split("\n")[0].split(". ")[0]), None
    if other is None or other.state.recovery.micro != other.plan.micro_batch_size:  # it ran out of memory
        return None, other
    if "graph" in change and other.state.graphs is not None and other.state.graphs.off:
        return Tried(change, 0.0, 0.0, 0.0, 0, failed=other.state.graphs.off), other
    ratios = other.over(run)
    low, middle, high = statistics.quantiles(ratios, n=4)
    far = drift(run, change) if low > 1 and set(change) <= set(LEVERS) else None
    return Tried(change, middle, low, high, len(ratios), far), other


def clear(ratios: Sequence[float]) -> bool:
    """Whether more turns could hardly change what becomes of a change: it was never faster, or always enough."""
    return max(ratios) < 1 or (len(ratios) >= SURE and min(ratios) >= FASTER)


def try_out(
    run: Stepper, change: dict[str, Any], seconds: float, most: float, step_s: float, step_bytes: float = 0.0
) -> tuple[Tried | None, Stepper | None]:
    """Train a change in turns with the plan for about `seconds`: (what that gives, the change in training).

    (None, None) where memory is short, or its fewest rounds would take more than `most`; not if it is compiled, which
    takes minutes in any case. step_s, step_bytes: what a step of the plan takes."""
    plan, room = run.plan.turn(**change), memory.room(run.device)
    larger = plan.batch_size / run.plan.batch_size
    a_pass = (plan.micro_batch_size or plan.batch_size) / (run.plan.micro_batch_size or run.plan.batch_size)
    late = (LEAST_ROUNDS + (1 + LEAST_ROUNDS) * larger) * step_s > most and not plan.compile
    if late or (room is not None and step_bytes * a_pass > room.usable):
        return None, None
    return in_turns(run, change, seconds)


def warmed(stepper: Stepper) -> Stepper:
    """After some steps that do not count: one, where it takes long."""
    turn = stepper.advance()
    return stepper.warm_up() if turn.seconds < LONG else stepper.warm_up(0)


def drift(run: Stepper, change: dict[str, Any]) -> float:
    """How far the first losses with a change are from the plan's (see `apart`).

    lr rises to the plan's within RAMP steps, and so to a third of it: with all of it at once, fresh weights diverge in
    any precision (over ten steps fp32 and bf16 were 13 % apart on one task, with the ramp 0.6 %).
    """
    plan, pace = run.plan, run.mean_s / run.plan.batch_size
    size = min(plan.batch_size, max(round(LOSS_SECONDS / (2 * LOSSES * max(pace, 1e-9))), LEAST_LOSSES))
    warmup = RAMP * size / run.pack.splits["train"]
    still = {"epochs": 10**6, "schedule": "constant", "min_lr": 0.0, "warmup_epochs": warmup}
    ramp = plan.turn(**still, batch_size=size, lr=plan.lr)
    feeds = run.feed, None if FEEDING & set(change) else run.feed
    pairs = zip((ramp, ramp.turn(**change)), feeds, strict=True)
    base, losses = (first_losses(run.task, run.pack, each, run.device, feed) for each, feed in pairs)
    return apart(losses, base)


def apart(these: Sequence[float], those: Sequence[float]) -> float:
    """The mean difference over the mean; infinite where one is not a number."""
    far = sum(abs(a - b) for a, b in zip(these, those, strict=True)) / max(sum(map(abs, those)), 1e-12)
    return far if math.isfinite(far) else math.inf


def first_losses(
    task: TaskLike, pack: Pack, plan: Plan, device: torch.device, feed: Feed | None = None, steps: int = LOSSES
) -> list[float]:
    """The mean loss of each of the first steps from the plan's seed."""
    stepper = Stepper(task, pack, plan, device, feed, learning=True)
    return [stepper.mean_loss() for _ in range(steps)]
