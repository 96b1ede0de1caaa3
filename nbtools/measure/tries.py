"""Changes of a plan, each trained in turns with it: what no arithmetic tells is tried, where a profile suggests it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Sequence
from time import perf_counter
from typing import Any, cast

import torch

from nbtools.data import Feed, Pack, cores, open_feed
from nbtools.measure import memory
from nbtools.measure.figures import StepProfile, Tried, apart
from nbtools.measure.pace import WARMUP_STEPS, Pace
from nbtools.measure.trial import Apart
from nbtools.measure.untouched import untouched
from nbtools.train import Diverged, Plan, Task, TrainState, train, within_memory
from nbtools.train import device as devices

ROUNDS = 16
LEAST_ROUNDS = 3  # where a step takes long
AHEAD_ROUNDS = 7  # where workers are tried: a round must outlast what they made ready
WAIT_SHARE = 0.1  # of a step: from here another feed is tried
AUGMENT_SHARE = 0.1  # of a step: from here the step is tried without augmentation
FIXED_SHARE = 0.2  # of a step that does not grow with the batch: from here a larger batch is tried
COMPILE_PAYS = 1800.0  # seconds of training planned from which compiling is tried: it took 69 s here, on two busy cores
SHAPES = 8  # programs of one function that dynamo keeps before it gives up
FASTER = 1.05  # lower quartile of the ratio to float32 from which mixed precision is used
LOSSES = 10  # steps whose losses are compared
RAMP = 30  # steps in which lr rises to the plan's while they are
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
    changes.append(other_precision(plan, torch.device(profile.device_type)))
    if profile.small_s >= FIXED_SHARE * profile.cached_s:
        most = profile.train_samples // LEAST_STEPS
        larger = [{"batch_size": k * plan.batch_size} for k in (2, 4) if k * plan.batch_size <= most]
        changes += [{"micro_batch_size": None}] if plan.parted else larger
    if profile.augmentation >= AUGMENT_SHARE:
        changes.append(without_augmentation(plan))
    if profile.device > profile.host:
        convolves = any(isinstance(module, torch.nn.Conv2d) for module in modules)
        changes.append({"channels_last": not plan.channels_last} if convolves else {})
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


def other_precision(plan: Plan, device: torch.device) -> dict[str, Any]:
    """float32 instead of mixed precision, or the one that may be faster here; {}: none."""
    other = devices.reduced(device) if plan.amp == "off" else "off"
    return {"amp": other} if other != plan.amp else {}


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
    others: list[tuple[dict[str, Any], Pace]] = []
    failed: list[Tried] = []
    for change in changes:
        plan = pace.plan.turn(**change)
        shared = None if FEEDING & set(change) else feed
        if fits(step * grown(pace.plan, plan), pace):
            try:
                other = begun(task, pack, plan, pace.state.device, shared)
                others += [(change, other)] if other else []
            except (RuntimeError, Diverged) as error:
                failed.append(failure(change, error))
    if others:
        pace.rates.clear()
        failed += take_turns(pace, others, seconds)
    whole = [(change, other) for change, other in others if other.state.micro == other.plan.micro_batch_size]
    whole = [pair for pair in whole if pair[0] not in [trial.change for trial in failed]]
    found = [compared(change, pace, other) for change, other in whole]  # the rest continued with smaller micro-batches
    return (*(checked(trial, task, pack, pace, feed) for trial in found), *failed)


def failure(change: dict[str, Any], error: Exception) -> Tried:
    """A precision that a model cannot be trained in: bfloat16 lacks some operations (CTC), or makes the loss NaN."""
    if change.get("amp", "off") == "off":
        raise error
    return Tried(change, 0.0, 0.0, 0.0, 0, failed=str(error).split("\n")[0].split(". ")[0])


def take_turns(pace: Pace, others: Sequence[tuple[dict[str, Any], Pace]], seconds: float) -> list[Tried]:
    """Time the plan and its changes round by round; returns those that failed on the way."""
    ahead = max(made_ready(other.plan) for _, other in others)
    rounds, start = AHEAD_ROUNDS if ahead else ROUNDS, perf_counter()
    failed: list[Tried] = []
    for k in range(rounds):
        if k >= LEAST_ROUNDS and perf_counter() - start > 2 * seconds:
            break
        for change, one in (({}, pace), *others):
            if change in [trial.change for trial in failed]:
                continue
            try:
                one.advance(seconds / rounds / (1 + len(others)), steps=1 + 2 * made_ready(one.plan))
            except Diverged as error:
                failed.append(failure(change, error))
    return failed


def checked(trial: Tried, task: Task, pack: Pack, pace: Pace, feed: Feed) -> Tried:
    """The trial; of a faster precision, with the drift of its losses."""
    amp = trial.change.get("amp", "off")
    if amp == "off" or trial.low <= 1:
        return trial
    return dataclasses.replace(trial, drift=drift(task, pack, pace.plan, amp, pace.state.device, feed))


def drift(task: Task, pack: Pack, plan: Plan, amp: str, device: torch.device, feed: Feed) -> float:
    """How far the plan's first losses in a precision are from those in float32: the mean difference over the mean loss,
    infinite where one is not a number."""
    base, losses = (first_losses(task, pack, plan.replace(amp=name), device, feed) for name in ("off", amp))
    far = sum(abs(a - b) for a, b in zip(base, losses, strict=True)) / max(sum(map(abs, base)), 1e-12)
    return far if math.isfinite(far) else math.inf


def first_losses(task: Task, pack: Pack, plan: Plan, device: torch.device, feed: Feed) -> list[float]:
    """Those of the first ten steps. lr rises to the plan's within RAMP steps, and so to a third of it: with all of
    it at once, fresh weights diverge in any precision (over ten steps fp32 and bf16 were 13 % apart on one task, with
    the ramp 0.6 %)."""
    ramp = RAMP * plan.batch_size / pack.splits["train"]
    endless = plan.replace(epochs=10**6, eval_every=10**6, early_stop=None, schedule="constant", min_lr=0.0)
    return losses_of(task, pack, endless.replace(warmup_epochs=ramp), device, feed, LOSSES)


def losses_of(
    task: Task, pack: Pack, plan: Plan, device: torch.device, feed: Feed | None = None, steps: int = LOSSES
) -> list[float]:
    """The mean loss of each of the first steps from the plan's seed; NaN from where training diverged. Reading them
    waits for the device."""
    state = TrainState(task, pack, plan, device)
    losses, before = [], (0.0, 0.0)
    try:
        for record in train(task, state, pack, feed):
            now = float(state.loss_sum), float(state.count)
            if record.kind == "step":
                losses.append((now[0] - before[0]) / max(now[1] - before[1], 1))
            if len(losses) == steps:
                break
            before = now
    except Diverged:
        losses += [math.nan] * (steps - len(losses))
    return losses


def find_precision(
    task: Task, pack: Pack, plan: Plan, device: torch.device | None = None, seconds: float = 3.0
) -> Tried | None:
    """The plan's mixed precision, or the one that may be faster on this device, against float32: trained in turns for
    about so many seconds; where it is faster, 20 more steps compare losses. None where there is nothing to try, or
    memory ran out. Nothing outside changes."""
    device = device or devices.pick()
    base = plan.replace(amp="off", compile=False, graph=False)
    change = {"amp": plan.amp} if plan.amp != "off" else other_precision(base, device)
    if not change:
        return None
    with untouched(device):
        own, feed = cast(Task, Apart(task)), open_feed(pack, base, device)
        pace = begun(own, pack, base, device, feed)
        found = try_out(own, pack, pace, feed, [change], seconds, 0.0) if pace is not None else ()
    return found[0] if found else None


def choose_precision(tried: Tried) -> tuple[str, str]:
    """(Plan.amp, why): the precision that was tried where in three of four rounds it was at least 5 % faster than
    float32, and its first losses are float32's."""
    amp = tried.change["amp"]
    if tried.failed:
        return "off", f"{amp}{apart(tried)}"
    said = f"{amp} {tried.ratio:.2f}× as fast as float32 ({tried.low:.2f}–{tried.high:.2f} in {tried.rounds} rounds)"
    if tried.low < FASTER:
        return "off", f"{said}; used where reliably {FASTER - 1:.0%} faster"
    if not tried.agrees:
        return "off", said + apart(tried)
    same = "" if tried.drift is None else f"; losses of {LOSSES} steps within {tried.drift:.2%}"
    return amp, said + same


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
