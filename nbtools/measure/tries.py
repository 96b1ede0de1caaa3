"""Changes of a plan, each trained in turns with it: what no arithmetic tells is tried, where a profile suggests it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Sequence
from time import perf_counter
from typing import Any

import torch

from nbtools.device import within_memory
from nbtools.feed import Feed
from nbtools.gpu import cores
from nbtools.measure import memory
from nbtools.measure.figures import StepProfile, Tried
from nbtools.measure.pace import WARMUP_STEPS, Pace
from nbtools.pack import Pack
from nbtools.plan import Plan
from nbtools.state import Task

ROUNDS = 16
LEAST_ROUNDS = 3  # where a step takes long
AHEAD_ROUNDS = 7  # where workers are tried: a round must outlast what they made ready
WAIT_SHARE = 0.1  # of a step: from here another feed is tried
AUGMENT_SHARE = 0.1  # of a step: from here the step is tried without augmentation
FIXED_SHARE = 0.2  # of a step that does not grow with the batch: from here a larger batch is tried
COMPILE_PAYS = 1800.0  # seconds of training planned from which compiling is tried: it took 69 s here, on two busy cores
SHAPES = 8  # programs of one function that dynamo keeps before it gives up
LEAST_STEPS = 20  # optimizer steps an epoch below which a larger batch is not tried: rule of thumb (ours)
FEEDING = {"feed", "workers", "prefetch"}


def worth_trying(
    profile: StepProfile, plan: Plan, modules: Sequence[torch.nn.Module], fixed: Collection[str]
) -> list[dict[str, Any]]:
    """Changes whose gain no arithmetic tells, so that they are tried; none of a compiled plan, where each would be
    compiled first."""
    changes: list[dict[str, Any]] = []
    if plan.compile or plan.graph:
        return changes
    if profile.wait >= WAIT_SHARE:
        changes.append(other_feed(profile, plan, fixed))
    if profile.wait >= max(profile.host, profile.device):
        return [change for change in changes if change]
    if profile.small_s >= FIXED_SHARE * profile.cached_s:
        most = profile.train_samples // LEAST_STEPS
        larger = [{"batch_size": k * plan.batch_size} for k in (2, 4) if k * plan.batch_size <= most]
        changes += [{"micro_batch_size": None}] if plan.parted else larger
    if profile.augmentation >= AUGMENT_SHARE:
        changes.append(without_augmentation(plan))
    if profile.device > profile.host:
        convolves = any(isinstance(module, torch.nn.Conv2d) for module in modules)
        if convolves and not plan.channels_last:
            changes.append({"channels_last": True})
        if plan.amp == "off" and profile.device_type == "cuda":
            changes.append({"amp": "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"})
    return [change for change in changes if change and not set(change) & set(fixed)]


def worth_compiling(
    profile: StepProfile, plan: Plan, modules: Sequence[torch.nn.Module], fixed: Collection[str], asked: bool = False
) -> list[dict[str, Any]]:
    """torch.compile, and on a GPU that waits for its host a CUDA graph, where that is asked for, or training lasts long
    enough to earn the compiler's time back; not for more shapes than dynamo compiles (a task's `bucket` makes them
    few), nor for recurrent layers, which break the graph."""
    lasting = asked or plan.epochs * profile.epoch_s >= COMPILE_PAYS
    recurrent = any(isinstance(module, torch.nn.RNNBase) for module in modules)
    if not lasting or recurrent or profile.shapes > SHAPES or plan.compile or plan.graph:
        return []
    launch_bound = profile.device_type == "cuda" and profile.host >= profile.device and not profile.syncs
    changes = [{"compile": True}, *([{"graph": True}] if launch_bound and not plan.parted else [])]
    return [change for change in changes if not set(change) & set(fixed)]


def without_augmentation(plan: Plan) -> dict[str, Any]:
    """The knobs of the task's own whose help speaks of augmentation, and that 0 turns off."""
    own = [f for f in dataclasses.fields(plan) if f.name in own_knobs(plan)]
    knobs = [f.name for f in own if "augment" in f.metadata.get("help", "") and f.metadata["least"] == 0]
    return {name: 0.0 for name in knobs if getattr(plan, name)}


def own_knobs(plan: Plan) -> set[str]:
    """Those that the task added."""
    return {f.name for f in dataclasses.fields(plan)} - {f.name for f in dataclasses.fields(Plan)}


def other_feed(profile: StepProfile, plan: Plan, fixed: Collection[str]) -> dict[str, Any]:
    """The pack instead of the files, more workers where it has to be files, or the pack by the other way; {}: none."""
    if "feed" not in fixed:
        if profile.feed == "workers":
            return {"feed": profile.packed}
        other = "streamed" if profile.feed == "resident" else profile.packed
        return {"feed": other} if other != profile.feed else {}
    more = profile.feed == "workers" and "workers" not in fixed and plan.workers < cores()
    return {"workers": cores()} if more else {}


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
            other = begun(task, pack, plan, pace.state.device, shared)
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


def begun(task: Task, pack: Pack, plan: Plan, device: torch.device, feed: Feed | None) -> Pace | None:
    """A plan in training; None where memory ends, or its model cannot be compiled here."""
    try:
        return within_memory(lambda: Pace(task, pack, plan, device, feed))[0]
    except RuntimeError:  # all of dynamo's and inductor's derive from it
        if not (plan.compile or plan.graph):
            raise
    return None


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
