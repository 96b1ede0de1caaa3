"""Where the time of a training step goes on this machine, what changes of the plan give, each measured, and the
verdict: what the plan is bound by, and the one change most worth making.

On CUDA the host runs ahead of the device, and a trace of its kernels tells the two apart: `host` is the share in which
the device had nothing to do because the host had not launched it yet. On a CPU both are one, `device`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

from nbtools.data import Pack, Padding, choose, gather, in_order, lengths_of, on
from nbtools.measure.report import Report
from nbtools.measure.timing import (
    Stepper,
    Timing,
    attempt,
    busy,
    epoch_batches,
    finish,
    in_turns,
    share_of,
    trace,
    typical,
    untouched,
)
from nbtools.show import percent, timing
from nbtools.train import DTYPES, MOST_GRAPHS, Plan, Sums, TaskLike, evaluation, gradients, synchronizing, unrecordable
from nbtools.train import device as devices

SECONDS = 3.0  # of the turns of the plan; all changes together get as long again
KERNELS = 5  # that are listed by name
WAIT_SHARE = 0.1  # of a step: from here another feed is tried
COMPILE_PAYS = 1800.0  # seconds of training planned from which compiling is tried: it took 69 s here, on two busy cores
LEAST_STEPS = 20  # optimizer steps per epoch below which a larger batch starves a small data set: rule of thumb (ours)
WORTH = 1.1  # a smaller gain is within the noise of such a measurement: rule of thumb (ours)
UNSTEADY = 3.0  # the fastest turn over the slowest: something else ran


@dataclass(frozen=True)
class Trial:
    """A change of the plan. ratio: its samples/s over the plan's, the median of `rounds` turns, with least and most;
    failed: why it cannot be trained at all, the ratio is then 0."""

    change: dict[str, Any]
    ratio: float = 0.0
    least: float = 0.0
    most: float = 0.0
    rounds: int = 0
    failed: str = ""

    @property
    def name(self) -> str:
        return ", ".join(f"{setting}={value}" for setting, value in self.change.items())

    def __str__(self) -> str:
        spread = f"{self.ratio:.2f}× ({self.least:.2f}–{self.most:.2f}, n = {self.rounds})"
        return f"{self.name} {self.failed or spread}"


@dataclass(frozen=True)
class StepProfile(Report):
    """How a plan trains here. Shows as a table.

    wait, host, device: shares of a step that wait for data, that wait for the host to launch, and in which the device
    works; together 1. products: the share of the device's part that matrix products, convolutions and attention would
    need at the rate of a large product in the plan's precision. kernels: (name, share of the device's time), the
    longest ones. evaluation_s: seconds of one evaluation. waits: `file:line` at which the host waits for the GPU in a
    step. trials: of changes.
    """

    timing: Timing
    device_type: str
    train_samples: int
    wait: float
    host: float
    device: float
    products: float
    kernels: tuple[tuple[str, float], ...]
    evaluation_s: float
    waits: tuple[str, ...]
    trials: tuple[Trial, ...] = ()

    @property
    def steps_s(self) -> float:
        """Seconds of an epoch's steps."""
        return self.train_samples / self.timing.samples_per_s

    @property
    def epoch_s(self) -> float:
        return self.steps_s + self.evaluation_s / self.timing.plan["eval_every"]

    def table(self) -> tuple[tuple[str, str], list[tuple[str, str]]]:
        here = self.timing
        spread = f"{here.least:,.0f}–{here.most:,.0f}, n = {here.turns}"
        shares = f"data {percent(self.wait)}, host {percent(self.host)}, device {percent(self.device)}"
        rows = [
            ("samples/s", f"{here.samples_per_s:,.0f} ({spread}) at batch {here.plan['batch_size']}"),
            ("a step", f"{timing(here.step_s)}: {shares}"),
            ("first steps", f"{timing(here.cold_s)} more than steady ones"),
            ("matrix products", f"{percent(self.products)} of the device's part; the rest reads and writes tensors"),
            ("longest kernels", ", ".join(f"{name} {percent(share)}" for name, share in self.kernels)),
            ("an evaluation", timing(self.evaluation_s)),
            *(("host waits at", line) for line in self.waits),
            *(("tried", str(trial)) for trial in self.trials),
        ]
        return ("step", "measured"), rows


def step_profile(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    seconds: float | None = None,
    fixed: Collection[str] = (),
    run_s: float | None = None,
) -> StepProfile:
    """Measure a plan, and what changes of it give, for about twice `seconds` (SECONDS) after warming up; compiling,
    which is tried where training will last long enough, takes a minute or two more.

    fixed: settings that may not change (a run that has started keeps some). run_s: seconds that the run took, if it
    did; after a short one, less time. Nothing outside changes. Raises TrainError
    if training could not start.
    """
    device, seconds = devices.pick(), seconds or SECONDS * share_of(run_s)
    with untouched(device):
        run = Stepper(task, pack, plan, device).warm_up()
        in_turns([run], seconds)
        profile = profile_of(run)
        changes = [change for change in worth_trying(run, profile) if not set(change) & set(fixed)]
        over, trials = run.clock() + seconds, []
        for number, change in enumerate(changes):  # what one leaves of its time, the others have
            if (left := over - run.clock()) > 0:
                trials.append(try_change(run, change, left / (len(changes) - number)))
        run.close()
    return replace(profile, trials=tuple(trials))


def profile_of(run: Stepper) -> StepProfile:
    """Return what the turns of a plan showed, and what a step consists of; nothing is tried yet."""
    here, pack, plan = run.timing(), run.pack, run.plan
    raw = on(run.device, gather(pack, typical(pack, plan)[0][0], Padding(pack, plan)))
    device = 1 - here.waited
    if run.device.type == "cuda":
        device *= min(1.0, here.device_s / max(here.step_s * device, 1e-9))
    rate = matrix_rates(run.device, DTYPES.get(plan.amp, torch.float32))
    products = flops(run, raw) / len(raw["id"]) * here.samples_per_s / max(rate)
    return StepProfile(
        timing=here,
        device_type=run.device.type,
        train_samples=pack.splits["train"],
        wait=here.waited,
        host=max(1 - here.waited - device, 0.0),
        device=device,
        products=min(products / max(device, 1e-9), 1.0),
        kernels=kernels(run),
        evaluation_s=evaluation_seconds(run),
        waits=tuple(synchronizing(lambda: run.step(raw))[1]),
    )


def worth_trying(run: Stepper, profile: StepProfile) -> list[dict[str, Any]]:
    """Return changes for what a step is bound by: another feed; graphs and a larger batch; precision and layout, and
    the compiler where training lasts long enough to earn its time back."""
    plan, device = run.plan, run.device
    changes: list[dict[str, Any]] = []
    if profile.wait >= WAIT_SHARE:
        feed = choose(run.pack, plan.replace(feed="auto"), device)[0]
        changes.append({"feed": feed if feed != run.feed.name else "streamed"})
    if bound_by(profile) == "data" or plan.compile:
        return changes
    if profile.host > profile.device and replays(plan, device, shapes(run.pack, plan)):
        changes.append({"graph": True})
    if 2 * plan.batch_size <= profile.train_samples // LEAST_STEPS:
        changes.append({"batch_size": 2 * plan.batch_size})
    if profile.device > profile.host:
        reduced, images = devices.reduced(device), any(isinstance(x, nn.Conv2d) for x in run.state.model.modules())
        changes += [{"amp": reduced}] if plan.amp == "off" != reduced else []
        changes += [{"channels_last": True}] if images and not plan.channels_last else []
        changes += [{"compile": True}] if compiles(run, plan.epochs * profile.epoch_s) else []
    return changes


def replays(plan: Plan, device: torch.device, shapes: int) -> bool:
    """Return whether CUDA graphs may help: not for more shapes than are recorded, nor again."""
    return device.type == "cuda" and not (shapes > MOST_GRAPHS or unrecordable(plan) or plan.graph)


def compiles(run: Stepper, training_s: float) -> bool:
    """Return whether compiling may pay in so many seconds of training; at a recurrent layer the compiler gives up."""
    return training_s >= COMPILE_PAYS and not any(isinstance(x, nn.RNNBase) for x in run.state.model.modules())


def try_change(run: Stepper, change: dict[str, Any], seconds: float) -> Trial:
    """Train a change in turns with the plan."""
    plan, feed = run.plan.turn(**change), None if "feed" in change else run.feed
    other = attempt(lambda: Stepper(run.task, run.pack, plan, run.device, feed, halves=False))
    if isinstance(other, str):
        return Trial(change, failed=other)
    run.turns.clear()
    in_turns([run, other], seconds)
    ratios = other.over(run)
    other.close()
    return Trial(change, median(ratios), min(ratios), max(ratios), len(ratios))


# -- parts of a step


def evaluation_seconds(run: Stepper) -> float:
    """Return the seconds of an evaluation, from those of at most some batches in the middle; 0 without one."""
    pack, plan, sums = run.pack, run.plan, Sums(run.device)
    ids = pack.ids("val")
    batches = in_order(ids, lengths_of(pack, ids), plan.micro_batch_size or plan.batch_size)
    middle = len(batches) // 2
    some = batches[max(middle - 2, 0) : middle + 3]
    start = run.clock()
    for number in range(2):  # the first of their shape warm up
        start = run.clock() if number else start
        for raw in run.feed(some):
            evaluation.score(run.task, run.state.evaluated, raw, plan.while_training(), sums)
        finish(run.device)
    return (run.clock() - start) * len(ids) / max(sum(map(len, some)), 1)


def kernels(run: Stepper) -> tuple[tuple[str, float], ...]:
    """Return (name, share of the device's time) of what takes it longest in a step: kernels, operations on a CPU."""
    times: Counter[str] = Counter()
    if run.device.type == "cuda":
        events = trace(run)
        for event in events:
            times[event["name"].partition("<")[0].removeprefix("void ")] += event["dur"] / 1e6
        whole = busy(events)
    else:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            run.step(next(run.batches))
        for event in profiler.key_averages():
            times[event.key] += event.self_cpu_time_total
        whole = sum(times.values())
    return tuple((name, seconds / max(whole, 1e-9)) for name, seconds in times.most_common(KERNELS))


def flops(run: Stepper, raw: Any) -> int:
    """Return the floating-point operations of the forward and backward passes of a batch: not of elementwise ones,
    fused RNN and CTC."""
    state = run.state
    network, state.network = state.network, state.model  # a compiled network hides its operations
    try:
        with FlopCounterMode(display=False) as counter:
            gradients(state, raw, len(raw["id"]))
        return int(counter.get_total_flops())
    finally:
        state.network = network


def matrix_side(device: torch.device) -> int:
    return 4096 if device.type == "cuda" else 512  # 512: 5 ms on one CPU core


def matrix_rates(device: torch.device, dtype: torch.dtype, seconds: float = 0.02) -> list[float]:
    """Return the FLOP/s of each of some rounds of square matrix products, in about so many seconds."""
    side, threads = matrix_side(device), torch.get_num_threads()
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    timer = Timer("torch.mm(a, b)", globals={"torch": torch, "a": a, "b": b}, num_threads=threads)
    return [2 * side**3 / each for each in timer.blocked_autorange(min_run_time=seconds).times]


def shapes(pack: Pack, plan: Plan) -> int:
    """Return how many different shapes an epoch's batches have, as they are padded."""
    lengths = Padding(pack, plan).of(pack, epoch_batches(pack, plan))
    return len(set(zip(*lengths.values(), strict=True))) or 1


# -- the verdict


@dataclass(frozen=True)
class Verdict(Report):
    """bound: data, launch, compute or memory. change: settings for `plan.turn`, None if no change is worth making;
    factor: the samples/s that it gave over the plan's. Shows as its sentence."""

    bound: str
    sentence: str
    change: dict[str, Any] | None
    factor: float | None

    def caption(self) -> str:
        return self.sentence


def verdict(profile: StepProfile) -> Verdict:
    """Return the bound and the one change, decided from figures that were all measured."""
    bound, here = bound_by(profile), profile.timing
    step, device = f"of each {timing(here.step_s)} step", "processor" if profile.device_type == "cpu" else "GPU"
    products = profile.products * profile.device
    text = {
        "data": f"Loading data is the limit: training waits for it {percent(profile.wait)} {step}.",
        "launch": f"Kernel launches are the limit: the {device} waits for them {percent(profile.host)} {step}.",
        "compute": f"The {device} is the limit: busy {percent(profile.device)} {step}.",
        "memory": f"Memory bandwidth is the limit: {percent(profile.device - products)} {step} goes into reading and "
        f"writing tensors, {percent(products)} into matrix products.",
    }[bound]
    if bound == "launch" and profile.waits:
        text += f" The host waits for it at {profile.waits[0]}; do without that line."
    worth = [trial for trial in profile.trials if trial.ratio >= WORTH and trial.least > 1]
    best = max(worth, key=lambda trial: trial.ratio, default=None)
    if best is not None:
        spread = f"{best.least:.2f}–{best.most:.2f}× in {best.rounds} turns with the plan"
        text += f" {best.name} makes training {best.ratio:.2g}× as fast (measured: {spread})."
    else:
        text += f" Tried: {'; '.join(map(str, profile.trials))}." if profile.trials else ""
    if here.most > UNSTEADY * here.least:
        spread = f"{here.least:,.0f} to {here.most:,.0f} samples/s"
        text += f" Turns varied from {spread}: measure again on a quiet machine."
    return Verdict(bound, text, best and best.change, best and best.ratio)


def bound_by(profile: StepProfile) -> str:
    """Return waiting, launching or the device, whichever takes most; the device computes where its matrix products need
    more than half of its time at the rate measured here, else it moves tensors."""
    if profile.wait >= max(profile.host, profile.device):
        return "data"
    if profile.host >= profile.device:
        return "launch"
    return "compute" if profile.products >= 0.5 else "memory"
