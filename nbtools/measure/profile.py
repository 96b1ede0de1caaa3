"""Where the time of a training step goes on this machine, and what could be gained: measured, in seconds.

On CUDA the host runs ahead of the device, and events tell the two apart: `host` is the share in which the device had
nothing to do because the host had not launched it yet. On a CPU both are one thread, and no clock separates them.
There the host's part is enclosed from two sides, and the middle is taken: at least the operations of the step, counted,
times what one costs here (`Rates.dispatch`), at most what the same step takes with two samples, less the arithmetic and
memory traffic that are left in that.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Self, cast

import torch

from nbtools import device as devices
from nbtools import table
from nbtools.feed import choose, gather, on, open_feed
from nbtools.gpu import cores
from nbtools.measure import parts
from nbtools.measure.pace import Pace, machine
from nbtools.measure.rates import Counts, Rates, count, machine_rates
from nbtools.measure.syncs import syncs
from nbtools.measure.trial import Apart
from nbtools.measure.tries import LEAST_ROUNDS, ROUNDS, Tried, affordable, try_out
from nbtools.measure.untouched import untouched
from nbtools.pack import Pack
from nbtools.plan import Plan
from nbtools.state import Task

SECONDS = 3.0  # a measurement takes two to three times as long, with its warm-up
WAIT_SHARE = 0.1  # of a step: from here another feed is tried
FIXED_SHARE = 0.2  # of a step that does not grow with the batch: from here a larger batch is tried
LEAST_STEPS = 20  # optimizer steps an epoch below which a larger batch is not tried: rule of thumb (ours)


@dataclass(frozen=True)
class StepProfile:
    """How a plan trains here. Shows as a table.

    feed: the plan's; packed: what `feed="auto"` would take.
    samples_per_s: of the plan as it is, with least and most of `rounds`; ceiling: of the same step on one raw batch
    that lies on the device; ceiling_ratio: the first over the second, measured in turns.
    wait, host, device: shares of a step that wait for data, that launch (see the module), and the rest; together 1.
    batching, augmentation: shares of a step in `task.batch` without draws, and what the draws add.
    host_s, device_s, cached_s, small_s: seconds a step, on the cached batch, undisturbed (best of its repeats): of the
    host, of the device, of both, and of forward passes of two samples. device_s is an event's on CUDA, else the rest.
    evaluation_s, checkpoint_s: seconds of one evaluation (some batches, scaled to the split) and of one checkpoint
    (one written to a temporary folder).
    padding: ragged column → share of its elements that are padding, over an epoch of this plan, exact.
    memory: MiB. step: the most that a step takes beyond what is held (see `measure.memory`); held: weights, gradients
    and optimizer; on CUDA allocated and reserved too, of the whole process at that step's peak.
    trials: changes that were tried; untried: those that memory or time (a slow step) did not allow to try.
    syncs: `file:line` where a step makes the host wait (CUDA). took: seconds that all this took.
    """

    plan: dict[str, Any]
    device_type: str
    train_samples: int
    feed: str
    packed: str
    samples_per_s: float
    least: float
    most: float
    rounds: int
    ceiling: float
    ceiling_ratio: float
    wait: float
    host: float
    device: float
    batching: float
    augmentation: float
    host_s: float
    device_s: float
    cached_s: float
    small_s: float
    evaluation_s: float
    checkpoint_s: float
    padding: dict[str, float]
    memory: dict[str, float]
    counts: Counts
    rates: Rates
    trials: tuple[Tried, ...]
    untried: tuple[dict[str, Any], ...]
    syncs: tuple[str, ...]
    machine: dict[str, str]
    took: float

    @property
    def step_s(self) -> float:
        return self.plan["batch_size"] / self.samples_per_s

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch: its steps, and its part of an evaluation and of the checkpoint that may follow it."""
        return self.train_samples / self.samples_per_s + self.between_s / self.plan["eval_every"]

    @property
    def between_s(self) -> float:
        return self.evaluation_s + self.checkpoint_s

    @property
    def evaluation(self) -> float:
        """Share of an epoch."""
        return self.evaluation_s / self.plan["eval_every"] / self.epoch_s

    @property
    def checkpoint(self) -> float:
        """Share of an epoch, where each evaluation is followed by a checkpoint, as that of a better model is."""
        return self.checkpoint_s / self.plan["eval_every"] / self.epoch_s

    @property
    def floors(self) -> dict[str, float]:
        """Seconds below which a step cannot be: host, compute, memory."""
        return {**self.counts.floors(self.rates), "host": self.host_s}

    @property
    def flops_per_s(self) -> float:
        """Model FLOP/s of the plan as it is."""
        return self.counts.flops / self.counts.samples * self.samples_per_s

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        made = {
            "counts": Counts.from_dict(values["counts"]),
            "rates": Rates.from_dict(values["rates"]),
            "trials": tuple(Tried(**trial) for trial in values["trials"]),
            "untried": tuple(values["untried"]),
            "syncs": tuple(values["syncs"]),
        }
        return cls(**{**values, **made})

    def rows(self) -> list[tuple[str, str]]:
        spread = f"{self.least:,.0f}–{self.most:,.0f}, n = {self.rounds}"
        rows = [
            ("samples/s", f"{self.samples_per_s:,.0f} ({spread}) at batch {self.plan['batch_size']}"),
            ("ceiling", f"{self.ceiling:,.0f} samples/s on one cached batch; {self.ceiling_ratio:.0%} of it reached"),
            (
                "a step",
                f"{duration(self.step_s)}: data {self.wait:.0%}, host {self.host:.0%}, {self.device:.0%} device",
            ),
            ("batches", f"{self.batching:.0%} of a step to prepare them, {self.augmentation:.0%} to augment them"),
            ("an epoch", f"evaluation {self.evaluation:.0%}, checkpoint {self.checkpoint:.0%}"),
            ("arithmetic", f"{self.flops_per_s / 1e9:,.3g} of {self.rates.matrix / 1e9:,.3g} GFLOP/s"),
            ("memory", ", ".join(f"{name} {size:,.0f} MiB" for name, size in self.memory.items())),
        ]
        rows += [("padding", f"{share:.1%} of {column}") for column, share in self.padding.items()]
        rows += [("tried", f"{shown(t.change)}: {t.ratio:.2f}× ({t.low:.2f}–{t.high:.2f})") for t in self.trials]
        return [*rows, *(("host waits at", place) for place in self.syncs)]

    def __str__(self) -> str:
        return table.text(("step", "measured"), self.rows())

    def _repr_html_(self) -> str:
        return table.html(("step", "measured"), self.rows(), f"Measured in {self.took:.1f} s")


def shown(change: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in change.items())


def duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def step_profile(
    task: Task,
    pack: Pack,
    plan: Plan,
    device: torch.device | None = None,
    seconds: float = SECONDS,
    fixed: Collection[str] = (),
) -> StepProfile:
    """Measure a plan for about two to three times `seconds`, or some 20 steps where they take longer; fixed: knobs that
    need not be tried.

    Trains a model of its own; nothing outside changes, no random state, no switch (on CUDA torch's peak memory
    statistics begin anew). Raises TrainError where training could not start.
    """
    device = device or devices.pick()
    with untouched(device):
        return measured(cast(Task, Apart(task)), pack, plan, device, seconds, fixed)


def measured(
    task: Task, pack: Pack, plan: Plan, device: torch.device, seconds: float, fixed: Collection[str]
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
    )
    changes = worth_trying(found, plan, list(pace.state.model.modules()), fixed)
    trying = changes[: affordable(found.step_s, plan, changes, 2 * seconds)]
    trials = try_out(task, pack, pace, feed, trying, seconds / 2, found.memory["step"] * 2**20)
    untried = tuple(change for change in changes if change not in [trial.change for trial in trials])
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
        parted = plan.micro_batch_size is not None and plan.micro_batch_size < plan.batch_size
        changes += [{"micro_batch_size": None}] if parted else larger
    if profile.device > profile.host:
        convolves = any(isinstance(module, torch.nn.Conv2d) for module in modules)
        if convolves and not plan.channels_last:
            changes.append({"channels_last": True})
        if plan.amp == "off" and profile.device_type == "cuda":
            changes.append({"amp": "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"})
    return [change for change in changes if change and not set(change) & set(fixed)]


def other_feed(profile: StepProfile, plan: Plan, fixed: Collection[str]) -> dict[str, Any]:
    """The pack instead of the files, more workers where it has to be files, or the pack by the other way; {}: none."""
    if "feed" not in fixed:
        if profile.feed == "workers":
            return {"feed": profile.packed}
        other = "streamed" if profile.feed == "resident" else profile.packed
        return {"feed": other} if other != profile.feed else {}
    more = profile.feed == "workers" and "workers" not in fixed and plan.workers < cores()
    return {"workers": cores()} if more else {}
