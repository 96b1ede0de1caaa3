"""A plan profiled, and changes of it trained in turns with it: what no arithmetic tells is tried, where the profile
suggests it. A faster precision is also compared by its first losses."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Sequence
from typing import Any

import torch

from nbtools.data import Feed, Pack, cores
from nbtools.measure import memory
from nbtools.measure.profile import LEAST_ROUNDS, ROUNDS, WARMUP_STEPS, Bench, StepProfile, Tried
from nbtools.measure.roofline import Rates, machine_rates
from nbtools.measure.stepper import EAGER, Clock, Stepper, made_ready, untouched
from nbtools.train import Diverged, Plan, TaskLike, within_memory
from nbtools.train import device as devices

SECONDS = 3.0  # a measurement takes two to three times as long, with its warm-up
AHEAD_ROUNDS = 7  # where workers are tried: a round must outlast what they made ready
WAIT_SHARE = 0.1  # of a step: from here another feed is tried
AUGMENT_SHARE = 0.1  # of a step: from here the step is tried without augmentation
FIXED_SHARE = 0.2  # of a step that does not grow with the batch: from here a larger batch is tried
COMPILE_PAYS = 1800.0  # seconds of training planned from which compiling is tried: it took 69 s here, on two busy cores
SHAPES = 8  # programs of one function that dynamo keeps before it gives up
FASTER = 1.05  # lower quartile of the ratio to float32 from which mixed precision is used
LOSSES = 10  # steps whose losses are compared
RAMP = 30  # steps in which lr rises to the plan's while they are
LEAST_STEPS = 20  # optimizer steps an epoch below which a larger batch starves a small data set: rule of thumb (ours)
FEEDING = {"feed", "workers", "prefetch"}


def step_profile(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    device: torch.device | None = None,
    seconds: float | None = None,
    fixed: Collection[str] = (),
    compiling: bool = False,
    clock: Clock | None = None,
    rates: Rates | None = None,
) -> StepProfile:
    """Measure a plan for about two to three times `seconds` (SECONDS), or some 20 steps where they take longer, and a
    minute or two more where training is to last so long that compiling is worth trying, or `compiling` asks for it.

    fixed: settings that need not be tried; clock: as of a Stepper; rates: this machine's, where they are known. Trains
    a model of its own; nothing outside changes, no random state, no switch (on CUDA torch's peak memory statistics
    begin anew). Raises TrainError where training could not start.
    """
    device, seconds = device or devices.pick(), seconds or SECONDS
    with untouched(device):
        bench = Bench(task, pack, plan, device, clock)
        found = profiled(bench, seconds, fixed, compiling, rates)
        del bench
    return found


def profiled(bench: Bench, seconds: float, fixed: Collection[str], compiling: bool, rates: Rates | None) -> StepProfile:
    start, plan, state = bench.clock(), bench.run.plan, bench.state
    bench.advance(seconds)
    found = bench.profile(rates or machine_rates(plan, state.device), seconds)
    modules = list(state.model.modules())
    changes = worth_trying(found, plan, modules, fixed)
    programs = worth_compiling(found, plan, modules, fixed, asked=compiling)
    trying = [*changes[: affordable(found.step_s, plan, changes, 2 * seconds)], *programs]
    trials = try_out(bench.run, trying, seconds / 2, found.memory["step"] * 2**20)
    untried = tuple(change for change in [*changes, *programs] if change not in [trial.change for trial in trials])
    return dataclasses.replace(found, trials=trials, untried=untried, took=bench.clock() - start)


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
    """The settings of the task's own whose help speaks of augmentation, and that 0 turns off."""
    own = [f for f in dataclasses.fields(plan) if f.name in own_settings(plan)]
    names = [f.name for f in own if "augment" in f.metadata.get("help", "") and f.metadata["least"] == 0]
    return {name: 0.0 for name in names if getattr(plan, name)}


def own_settings(plan: Plan) -> set[str]:
    """Those that the task added."""
    return {f.name for f in dataclasses.fields(plan)} - {f.name for f in dataclasses.fields(Plan)}


def other_feed(profile: StepProfile, plan: Plan, fixed: Collection[str]) -> dict[str, Any]:
    """The pack instead of the files, more workers where it has to be files, or the pack by the other feed; {}: none."""
    if "feed" not in fixed:
        if profile.feed == "workers":
            return {"feed": profile.packed}
        other = "streamed" if profile.feed == "resident" else profile.packed
        return {"feed": other} if other != profile.feed else {}
    more = profile.feed == "workers" and "workers" not in fixed and plan.workers < cores()
    return {"workers": cores()} if more else {}


def affordable(step_s: float, plan: Plan, changes: Sequence[dict[str, Any]], seconds: float) -> int:
    """How many of the changes can be tried in the time, with the fewest rounds; step_s: of the plan."""
    spent = LEAST_ROUNDS * step_s  # the plan's own turns
    for n, change in enumerate(changes):
        spent += (WARMUP_STEPS + LEAST_ROUNDS) * step_s * plan.turn(**change).batch_size / plan.batch_size
        if spent > seconds:
            return n
    return len(changes)


def try_out(run: Stepper, changes: Sequence[dict[str, Any]], seconds: float, step_bytes: float) -> tuple[Tried, ...]:
    """Each change in turns with a plan in training, all for so many seconds. step_bytes: what its step takes now; a
    change whose steps do not fit is left out."""
    others: list[tuple[dict[str, Any], Stepper]] = []
    failed: list[Tried] = []
    for change in changes:
        plan = run.plan.turn(**change)
        grown = (plan.micro_batch_size or plan.batch_size) / (run.plan.micro_batch_size or run.plan.batch_size)
        room = memory.room(run.device)
        if room is not None and step_bytes * grown > room.usable:
            continue
        try:
            feed = None if FEEDING & set(change) else run.feed
            if other := begun(run.task, run.pack, plan, run.device, feed, run.clock):
                others.append((change, other))
        except (RuntimeError, Diverged) as error:
            failed.append(failure(change, error))
    if others:
        run.turns.clear()
        failed += take_turns(run, others, seconds)
    over = [trial.change for trial in failed]
    return (
        *(
            checked(compared(change, run, other), run)
            for change, other in others
            if change not in over
            and other.state.recovery.micro == other.plan.micro_batch_size  # else it met the end of memory
        ),
        *failed,
    )


def begun(
    task: TaskLike, pack: Pack, plan: Plan, device: torch.device, feed: Feed | None, clock: Clock | None
) -> Stepper | None:
    """A plan in training, warmed up; None where memory ends, or its model cannot be compiled here."""

    def begin() -> Stepper:
        stepper = Stepper(task, pack, plan, device, feed, clock)
        stepper.advance(steps=WARMUP_STEPS)
        stepper.turns.clear()
        return stepper

    try:
        return within_memory(begin)[0]
    except RuntimeError:  # all of dynamo's and inductor's derive from it
        if not (plan.compile or plan.graph):
            raise
    return None


def take_turns(run: Stepper, others: Sequence[tuple[dict[str, Any], Stepper]], seconds: float) -> list[Tried]:
    """Time the plan and its changes round by round; returns those that failed on the way."""
    ahead = {id(one): made_ready(one.plan, one.pack, one.device) for one in (run, *(other for _, other in others))}
    rounds = AHEAD_ROUNDS if any(one.feed.name == "workers" and ahead[id(one)] for _, one in others) else ROUNDS
    failed: list[Tried] = []
    start = run.clock()
    for k in range(rounds):
        if k >= LEAST_ROUNDS and run.clock() - start > 2 * seconds:
            break
        for change, one in (({}, run), *others):
            if change in [trial.change for trial in failed]:
                continue
            try:
                one.advance(seconds / rounds / (1 + len(others)), steps=1 + 2 * ahead[id(one)])
                if one.lost:
                    raise Diverged(f"the loss became {float(one.loss)}", (0, one.state.step))
            except Diverged as error:
                failed.append(failure(change, error))
    return failed


def failure(change: dict[str, Any], error: Exception) -> Tried:
    """A precision that a model cannot be trained in: bfloat16 lacks some operations (CTC), or makes the loss NaN.
    Raises the error where the change is another."""
    if change.get("amp", "off") == "off":
        raise error
    return Tried(change, 0.0, 0.0, 0.0, 0, failed=str(error).split("\n")[0].split(". ")[0])


def compared(change: dict[str, Any], run: Stepper, other: Stepper) -> Tried:
    ratios = [b.samples_per_s / a.samples_per_s for a, b in zip(run.turns, other.turns, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Tried(change, middle, low, high, len(ratios))


def checked(trial: Tried, run: Stepper) -> Tried:
    """The trial; of a faster precision, with the drift of its losses."""
    amp = trial.change.get("amp", "off")
    return trial if amp == "off" or trial.low <= 1 else dataclasses.replace(trial, drift=drift(run, amp))


def drift(run: Stepper, amp: str) -> float:
    """How far the plan's first losses in a precision are from those in float32: the mean difference over the mean loss,
    infinite where one is not a number.

    lr rises to the plan's within RAMP steps, and so to a third of it: with all of it at once, fresh weights diverge in
    any precision (over ten steps fp32 and bf16 were 13 % apart on one task, with the ramp 0.6 %).
    """
    warmup = RAMP * run.plan.batch_size / run.pack.splits["train"]
    ramp = run.plan.replace(epochs=10**6, schedule="constant", min_lr=0.0, warmup_epochs=warmup)
    base, losses = (first_losses(run.task, run.pack, ramp.replace(amp=x), run.device, run.feed) for x in ("off", amp))
    far = sum(abs(a - b) for a, b in zip(base, losses, strict=True)) / max(sum(map(abs, base)), 1e-12)
    return far if math.isfinite(far) else math.inf


def first_losses(
    task: TaskLike, pack: Pack, plan: Plan, device: torch.device, feed: Feed | None = None, steps: int = LOSSES
) -> list[float]:
    """The mean loss of each of the first steps from the plan's seed. Reading them waits for the device."""
    stepper = Stepper(task, pack, plan, device, feed, learning=True)
    losses = []
    for _ in range(steps):
        loss_sum, number = stepper.step(next(stepper.batches))
        losses.append(float(loss_sum) / max(float(number), 1))
    return losses


def find_precision(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    device: torch.device | None = None,
    seconds: float = SECONDS,
    clock: Clock | None = None,
) -> Tried | None:
    """The plan's mixed precision, or the one that may be faster on this device, against float32: trained in turns for
    about so many seconds; where it is faster, 20 more steps compare losses. None where there is nothing to try, or
    memory ran out. Nothing outside changes."""
    device = device or devices.pick()
    base = plan.replace(amp="off", **EAGER)
    change = {"amp": plan.amp} if plan.amp != "off" else other_precision(base, device)
    if not change:
        return None
    with untouched(device):
        run = begun(task, pack, base, device, None, clock)
        found = try_out(run, [change], seconds, 0.0) if run is not None else ()
        del run
    return found[0] if found else None


def choose_precision(tried: Tried) -> tuple[str, str]:
    """(Plan.amp, why): the precision that was tried where in three of four rounds it was at least 5 % faster than
    float32, and its first losses are float32's."""
    amp = tried.change["amp"]
    if tried.failed:
        return "off", f"{amp}{tried.objection}"
    text = f"{amp} {tried.ratio:.2f}× as fast as float32 ({tried.low:.2f}–{tried.high:.2f} in {tried.rounds} rounds)"
    if tried.low < FASTER:
        return "off", f"{text}; used where reliably {FASTER - 1:.0%} faster"
    if not tried.agrees:
        return "off", text + tried.objection
    same = "" if tried.drift is None else f"; losses of {LOSSES} steps within {tried.drift:.2%}"
    return amp, text + same
