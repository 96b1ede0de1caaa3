"""Where the time of a training step goes on this machine, and what could be gained: measured, in seconds.

On CUDA the host runs ahead of the device, and a trace of its kernels tells the two apart: `host` is the share in which
the device had nothing to do because the host had not launched it yet. On a CPU both are one thread, and no clock
separates them. There the host's part is enclosed from two sides, and the middle is taken: at least the operations of
the step, counted, times what one costs here (`Rates.dispatch`), at most what the same step takes with two samples, less
the arithmetic and memory traffic that are left in that.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection
from time import perf_counter
from typing import cast

import torch

from nbtools.data import Pack, choose, gather, on, open_feed
from nbtools.measure import parts
from nbtools.measure.figures import StepProfile
from nbtools.measure.machine import machine
from nbtools.measure.pace import Pace
from nbtools.measure.rates import count, machine_rates
from nbtools.measure.syncs import syncs
from nbtools.measure.trial import Apart
from nbtools.measure.tries import LEAST_ROUNDS, ROUNDS, affordable, try_out, worth_compiling, worth_trying
from nbtools.measure.untouched import untouched
from nbtools.train import Plan, Task
from nbtools.train import device as devices

SECONDS = 3.0  # a measurement takes two to three times as long, with its warm-up


def step_profile(
    task: Task,
    pack: Pack,
    plan: Plan,
    device: torch.device | None = None,
    seconds: float = SECONDS,
    fixed: Collection[str] = (),
    compiling: bool = False,
) -> StepProfile:
    """Measure a plan for about two to three times `seconds`, or some 20 steps where they take longer, and a minute or
    two more where training is to last so long that compiling is worth trying, or that is asked for by `compiling`;
    fixed: knobs that need not be tried.

    Trains a model of its own; nothing outside changes, no random state, no switch (on CUDA torch's peak memory
    statistics begin anew). Raises TrainError where training could not start.
    """
    device = device or devices.pick()
    with untouched(device):
        return measured(cast(Task, Apart(task)), pack, plan, device, seconds, fixed, compiling)


def measured(
    task: Task, pack: Pack, plan: Plan, device: torch.device, seconds: float, fixed: Collection[str], compiling: bool
) -> StepProfile:
    start, epoch_size = perf_counter(), pack.splits["train"]
    feed = open_feed(pack, plan, device)
    pace = Pace(task, pack, plan, device, feed)
    bench = parts.Bench(task, pace.state, on(device, gather(pack, parts.typical(pack, plan))), epoch_size)
    small, between = parts.Small(bench), parts.Between(task, pace.state, pack, plan, feed)
    take_turns(pace, bench, small, between, seconds)
    rate, ratios = pace.rate(), [a[0] / b for a, b in zip(pace.rates, bench.rates, strict=True)]
    counts, rates = count(task, pace.state, bench.raw, epoch_size), machine_rates(plan, device)
    host_s, device_s = parts.host_and_device(bench, small, counts, rates, seconds / 20)
    found = StepProfile(
        plan=plan.to_dict(),
        device_type=device.type,
        train_samples=epoch_size,
        feed=feed.name,
        packed=choose(pack, plan.replace(feed="auto"), device)[0],
        samples_per_s=rate.samples_per_s,
        least=rate.least,
        most=rate.most,
        rounds=rate.rounds,
        ceiling=statistics.median(bench.rates),
        ceiling_ratio=statistics.median(ratios),
        **shares(bench, rate.data_wait, host_s, device_s),
        host_s=host_s,
        device_s=device_s,
        cached_s=bench.best,
        small_s=small.best,
        evaluation_s=between.evaluation_s,
        checkpoint_s=between.checkpoint_s,
        padding=parts.padding(pack, plan),
        memory=parts.memory_of(bench),
        counts=counts,
        rates=rates,
        trials=(),
        untried=(),
        syncs=syncs(task, pace.state, bench.raw, epoch_size),
        machine=machine(),
        took=0.0,
        shapes=parts.shapes(pack, plan),
    )
    modules = list(pace.state.model.modules())
    changes = worth_trying(found, plan, modules, fixed)
    programs = worth_compiling(found, plan, modules, fixed, asked=compiling)
    trying = [*changes[: affordable(found.step_s, plan, changes, 2 * seconds)], *programs]
    trials = try_out(task, pack, pace, feed, trying, seconds / 2, found.memory["step"] * 2**20)
    untried = tuple(change for change in [*changes, *programs] if change not in [trial.change for trial in trials])
    return dataclasses.replace(found, trials=trials, untried=untried, took=perf_counter() - start)


def take_turns(pace: Pace, bench: parts.Bench, small: parts.Small, between: parts.Between, seconds: float) -> None:
    """All that is timed, a little of each at a time: a machine's speed changes, and ratios are to be of one moment."""
    start = perf_counter()
    for k in range(ROUNDS):
        if k >= LEAST_ROUNDS and perf_counter() - start > seconds:  # a step takes long
            break
        pace.advance(seconds / 4 / ROUNDS, steps=1)
        bench.advance(seconds / 4 / ROUNDS)
        small.advance(seconds / 10 / ROUNDS)
        bench.prepare()
        if k % 4 == 0:
            between.advance(seconds / 40)


def shares(bench: parts.Bench, wait: float, host_s: float, device_s: float) -> dict[str, float]:
    """Of a step: what waits for data, and of the rest the parts of the cached step."""
    busy = 1 - wait
    on_cuda = bench.state.device.type == "cuda"
    host = busy * (max(1 - device_s / bench.mean, 0.0) if on_cuda else host_s / bench.best)
    drawn = min(max(bench.drawn - bench.plain, 0.0), bench.best)
    return {
        "wait": wait,
        "host": host,
        "device": busy - host,
        "batching": busy * bench.plain / bench.best,
        "augmentation": busy * drawn / bench.best,
    }
