"""The receipt: the task's baseline and a plan, the rungs between them, and the guide's optimised settings, trained in
alternation on the same machine and data. A rung has one more group of settings as the plan has them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from nbtools.data import Pack, Resident, choose, cores, phase
from nbtools.errors import NbtoolsError
from nbtools.measure.machine import machine
from nbtools.measure.report import Report
from nbtools.measure.stepper import Clock, Rate, Stepper, Turn, untouched
from nbtools.measure.trials import own_settings
from nbtools.show import duration, percent, plural, size
from nbtools.train import Plan, TaskLike, as_task, listed, readable, shown
from nbtools.train import device as devices

ROUNDS, SECONDS = 3, 1.5
SHARE = 0.5  # of free GPU memory that the rungs between the ends may take
GROUPS = {
    "+ packed feed": ("feed", "workers", "prefetch"),
    "+ batch and lr": ("batch_size", "micro_batch_size"),
    "+ mixed precision": ("amp",),
    "+ compile, layout, threads": ("compile", "graph", "channels_last", "threads"),
}
"""In the guide's order, each with the settings in which plans must differ for it to be a rung. One more has all others,
by the names of those that differ; ALL is the name of a run without rungs."""

ALL, GUIDE = "this run", "guide's optimised"
SHORT = {"clip_norm": "clipping", "ema": "moving average"}
MOST = 3  # settings that name a rung
WARMING = 4  # steps of a plan before its first turn
ASIDE = 2  # times as long as all else that the guide's settings may take: their batch is large
SILENT = (
    *("epochs", "lr", "lr_rule", "schedule", "warmup_epochs", "min_lr", "weight_decay", "betas"),
    *("eval_every", "early_stop", "patience", "seed"),
)
"""Settings that make no step faster or slower."""


@dataclass(frozen=True)
class Rung:
    """One more group of settings as the run has them. changes: setting → `before → now`. total: samples/s over the
    baseline, the median over rounds of what was measured in turns, with its least and most; factor: over the previous
    rung, so that factors multiply to the total, with the least and most of the rounds."""

    name: str
    changes: dict[str, str]
    rate: Rate
    factor: float
    factor_least: float
    factor_most: float
    total: float
    total_least: float
    total_most: float

    def row(self, baseline: bool = False, rung: bool = True) -> tuple[Any, ...]:
        factor = f"{self.factor:.2f}× ({self.factor_least:.2f}–{self.factor_most:.2f})"
        ratios = None if baseline or not rung else factor, None if baseline else self.over_baseline()
        speed = f"{self.rate.samples_per_s:,.0f} ({self.rate.least:,.0f}–{self.rate.most:,.0f})"
        return self.name, speed, *ratios, f"{percent(self.rate.data_wait)}", listed(self.changes)

    def over_baseline(self) -> str:
        return f"{self.total:.2f}× ({self.total_least:.2f}–{self.total_most:.2f})"


@dataclass(frozen=True)
class Receipt(Report):
    """Before and after on this machine and this data: the same network, trained with two plans, and the rungs between
    them; guide: the guide's optimised settings, over the baseline, None if they were not measured. Shows as a table.

    ratio: the median over rounds of after / before, measured in turns, with its least and most. peak_memory: MiB, of
    the GPU for either; without one, of the whole process for both together. samples: that all epochs train on.
    """

    before: Rate
    after: Rate
    ratio: float
    ratio_least: float
    ratio_most: float
    peak_memory: dict[str, float]
    machine: dict[str, str]
    notes: tuple[str, ...]
    rungs: tuple[Rung, ...]
    guide: Rung | None
    samples: int

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        """(headers, rows): one row per rung, below the first one the guide's, spreads from least to most."""
        headers = ("", "samples/s", "vs previous row", "vs baseline", "waiting for data", "what changes")
        first, *others = self.rungs
        guide = [self.guide.row(rung=False)] if self.guide is not None else []
        return headers, [first.row(baseline=True), *guide, *(rung.row() for rung in others)]

    def caption(self) -> str:
        spread = f"{self.ratio_least:.2f}–{self.ratio_most:.2f}, n = {self.after.rounds}"
        guide = f"; the guide's optimised settings: {self.guide.over_baseline()}" if self.guide is not None else ""
        took, before = (duration(self.samples / rate.samples_per_s) for rate in (self.after, self.before))
        whole = f"all epochs' steps take {took}, with the baseline's settings {before}"
        return f"{self.ratio:.2f}× the baseline's samples/s on this machine ({spread}){guide}; {whole}"

    def footer(self) -> str:
        names = {"before": "baseline", "after": "this run"}
        peaks = [f"{names[side]} {size(peak * 2**20)}" for side, peak in self.peak_memory.items() if side in names]
        memory = [f"Peak GPU memory: {', '.join(peaks)}."] if peaks else []
        guide = [f"{GUIDE.capitalize()}: as the task's speed-up guide recommends."] if self.guide is not None else []
        return " ".join([*guide, *(f"{note}." for note in self.notes), *memory, ", ".join(self.machine.values())])

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)


def receipt(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    device: torch.device | None = None,
    seconds: float | None = None,
    clock: Clock | None = None,
) -> Receipt:
    """Measure the task's BASELINE, a plan, the rungs between them and the first of its PRESETS in turns. seconds: of a
    turn, were there only two (SECONDS); more rungs have shorter ones, so that the whole takes as long."""
    device, pack = device or devices.pick(), readable(task, pack, plan)
    baseline, notes = comparable(as_task(task).BASELINE, plan, pack, device)
    optimised, adapted = optimised_by_guide(task, plan, pack)
    with untouched(device):
        course = Course(task, pack, device, clock)
        notes += adapted + course.run(ladder(baseline, plan, pack, device), seconds or SECONDS, optimised)
        rungs, memory = rungs_of(course.steppers), list(course.peaks.values())  # first of the ends, which came first
        guide = course.aside()
        del course
    peaks = {"before": memory[0], "after": memory[1]} if memory else {"process": devices.resident() / 2**20}
    if not memory:
        notes.append("No GPU: what mixed precision, larger batches and data kept on a GPU would gain was not measured")
    first, last = rungs[0], rungs[-1]
    spread = last.total, last.total_least, last.total_most
    samples = plan.epochs * pack.splits["train"]
    return Receipt(first.rate, last.rate, *spread, peaks, machine(), tuple(notes), rungs, guide, samples)


def comparable(baseline: Plan, plan: Plan, pack: Pack, device: torch.device) -> tuple[Plan, list[str]]:
    """The baseline's settings as they fit here, with the run's own network and loss: a smaller network is no
    speed-up."""
    notes = ["Both train the same network"]
    if pack.raw is None:
        notes.append("The source files are gone: both read the pack, so the data pipeline was not measured")
    return fitting(baseline.replace(**own_values(plan)), pack, device)[0], notes


def own_values(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in own_settings(plan)}


def optimised_by_guide(task: TaskLike, plan: Plan, pack: Pack) -> tuple[Plan | None, list[str]]:
    """(the first of the task's presets with the run's own network, what differs here), (None, why it cannot train
    here), or (None, []) for a task without presets."""
    name = next(iter(as_task(task).PRESETS), None)
    if name is None:
        return None, []
    found, why = preset(task, pack, name, **own_values(plan))
    if found is None:
        return None, [f"The {GUIDE} settings cannot train here: {why.rstrip('.')}"]
    return found, [f"The {GUIDE} settings here: {why}"] if why else []


def ladder(baseline: Plan, plan: Plan, pack: Pack, device: torch.device) -> list[tuple[str, Plan]]:
    """(name, plan) from the baseline to the run, only those in which something differs that costs or saves time.

    A rung is the run's plan with the groups above it still as in the baseline, so each is a plan that can train.
    """
    before, now = costs(baseline, pack, device), costs(plan, pack, device)
    differing = {name for name in {**before, **now} if before.get(name) != now.get(name)}
    grouped = {setting for settings in GROUPS.values() for setting in settings}
    others = [name for name in now if name not in grouped]
    every = {**GROUPS, named([name for name in others if name in differing]): others}
    groups = [(name, settings) for name, settings in every.items() if differing & set(settings)]
    found = [("baseline", baseline)]
    for k, (name, _) in enumerate(groups):
        above = [setting for _, settings in groups[k + 1 :] for setting in settings]
        found.append((name, plan.replace(**{setting: getattr(baseline, setting) for setting in above})))
    return found if groups else [*found, (ALL, plan)]


def named(settings: Sequence[str]) -> str:
    """`+ optimizer, clipping`"""
    words = [SHORT.get(name, name.replace("_", " ")) for name in settings]
    return f"+ {', '.join(words[:MOST])}{' …' if len(words) > MOST else ''}"


def costs(plan: Plan, pack: Pack, device: torch.device) -> dict[str, Any]:
    """The settings that make a step faster or slower, with the feed chosen; workers and prefetch only where that
    has them."""
    name, _ = choose(pack, plan, device)
    unused = {"resident": ("workers", "prefetch"), "streamed": ("workers",)}.get(name, ())
    return {k: v for k, v in {**plan.to_dict(), "feed": name}.items() if k not in (*SILENT, *unused)}


class Course:
    """Plans in training side by side, each with a turn per round. By name: steppers, first, a step of each before the
    turns, and peaks, MiB of GPU memory at most."""

    def __init__(self, task: TaskLike, pack: Pack, device: torch.device, clock: Clock | None = None):
        self.task, self.pack, self.device, self.clock = task, pack, device, clock
        self.shared: Resident | None = None  # the pack in memory, for all that read it there
        self.steppers: dict[str, Stepper] = {}
        self.optimised: Stepper | None = None  # with the guide's settings
        self.first: dict[str, Turn] = {}
        self.peaks: dict[str, float] = {}

    def enter(self, name: str, plan: Plan) -> None:
        cuda, feed, before = self.device.type == "cuda", None, 0
        if choose(self.pack, plan, self.device)[0] == "resident":
            self.shared = self.shared or Resident(self.pack, self.device)
            feed = self.shared.padded(plan)
        if cuda:
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        stepper = self.steppers[name] = Stepper(self.task, self.pack, plan, self.device, feed, self.clock)
        self.first[name] = stepper.warm_up(WARMING - 1).advance()
        stepper.turns.clear()
        if cuda:
            peak = torch.cuda.max_memory_allocated(self.device) - before + (self.pack.bytes if feed else 0)
            self.peaks[name] = peak / 2**20

    def refusal(self, number: int, seconds: float) -> list[str]:
        """Why that many more plans would take too long or too much memory; [] if they do not."""
        step_s = max(turn.step_s for turn in self.first.values())
        if number * (WARMING + ROUNDS) * step_s > 2 * seconds * ROUNDS:
            return [f"A step takes {step_s:.1f} s: only the first and last rows were measured"]
        most = number * max(self.peaks.values(), default=0.0) * 2**20
        if most and most > SHARE * torch.cuda.mem_get_info(self.device)[0]:
            return ["GPU memory has no room for more models: only the first and last rows were measured"]
        return []

    def run(self, wanted: Sequence[tuple[str, Plan]], seconds: float, guide: Plan | None = None) -> list[str]:
        """Enter the ends, the rungs between them and the guide's settings where there is time and memory, and give each
        its turns; returns why not."""
        try:
            for name, plan in (wanted[0], wanted[-1]):
                self.enter(name, plan)
            notes = self.refusal(len(wanted) - 2, seconds)
            for name, plan in () if notes else wanted[1:-1]:
                self.enter(name, plan)
            names = [name for name, _ in wanted if name in self.steppers]
            aside = self.enter_aside(guide, seconds) if guide is not None else []
            each = 2 * seconds / len(self.steppers)
            phase("turns", ROUNDS * sum(max(each, turn.step_s) for turn in self.first.values()))
            for _ in range(ROUNDS):
                for name in names:
                    self.steppers[name].turn(each)
                if GUIDE in self.steppers:
                    aside += self.attempt(lambda: self.steppers[GUIDE].turn(each))
        finally:
            for stepper in self.steppers.values():
                stepper.close()
        if (optimised := self.steppers.pop(GUIDE, None)) is not None:
            self.optimised, micro = optimised, optimised.state.recovery.micro
            if micro != optimised.plan.micro_batch_size:
                aside = [f"Memory ran out with the {GUIDE} settings: measured in passes of {micro} samples"]
        self.steppers = {name: self.steppers[name] for name in names}
        if notes:
            self.steppers[ALL] = self.steppers.pop(names[-1])
        return notes + aside

    def enter_aside(self, plan: Plan, seconds: float) -> list[str]:
        """Enter the guide's settings, which are no rung, unless their steps would take ASIDE times as long as all else;
        returns why not. A step's time is computed from the baseline's: its wait for data is shared by the workers."""
        turn, workers = self.first["baseline"], plan.workers if plan.feed == "workers" else 0
        worked, waited = (turn.seconds - turn.waited) / turn.samples, turn.waited / turn.samples
        step_s = plan.batch_size * (max(worked, waited / workers) if workers else worked + waited)
        number = WARMING + ROUNDS * max(1, 2 * workers)
        if number * step_s > ASIDE * 2 * seconds * ROUNDS:
            likely = f"{number} steps of {plan.batch_size} samples would take about {number * step_s:.0f} s"
            return [f"The {GUIDE} settings were not measured: {likely}"]
        return self.attempt(lambda: self.enter(GUIDE, plan))

    def attempt(self, act: Callable[[], Any]) -> list[str]:
        """Do something with the guide's settings; if that fails they are dropped, since the receipt is complete without
        them. Returns why."""
        try:
            act()
        except (NbtoolsError, RuntimeError, MemoryError, OSError) as error:
            if (failed := self.steppers.pop(GUIDE, None)) is not None:
                failed.close()
            why = next(iter(str(error.args[0]).splitlines()), "") if error.args else ""
            return [f"The {GUIDE} settings cannot train here: {why.rstrip('.') or type(error).__name__}"]
        return []

    def aside(self) -> Rung | None:
        """The guide's settings over the baseline; None if they were not measured."""
        if self.optimised is None:
            return None
        return rungs_of({"baseline": next(iter(self.steppers.values())), GUIDE: self.optimised})[1]


def rungs_of(steppers: Mapping[str, Stepper]) -> tuple[Rung, ...]:
    """By name, from the baseline up. The factors of the rungs multiply to the last total."""
    found: list[Rung] = []
    first = below = next(iter(steppers.values()))
    total = 1.0
    for name, stepper in steppers.items():
        before, now = (costs(each.plan, each.pack, each.device) for each in (below, stepper))
        changed = (setting for setting, value in now.items() if value != before.get(setting))
        changes = {setting: f"{shown(before.get(setting))} → {shown(now[setting])}" for setting in changed}
        ratios = stepper.over(first)
        factor, total = median(ratios) / total, median(ratios)
        steps = [factor, *stepper.over(below)]  # medians may be of different rounds
        spread = min(steps), max(steps), total, min(ratios), max(ratios)
        found.append(Rung(name, changes, stepper.rate(), factor, *spread))
        below = stepper
    return tuple(found)


def preset(task: TaskLike, pack: Pack, name: str, /, **own: Any) -> tuple[Plan | None, str]:
    """(plan, what differs from the task's own and why); (None, why), if it cannot train on this machine or data. own:
    settings in place of the preset's."""
    made, device = as_task(task).PRESETS[name], devices.pick()
    try:
        plan = (made if isinstance(made, Plan) else made(pack.card)).replace(**own)
        pack = readable(task, pack, plan)
        fitted, changes = fitting(plan, pack, device)
        devices.require(fitted, device)
    except NbtoolsError as error:
        return None, error.args[0]
    moved = fitted.changes_from(plan).items()
    return fitted, "; ".join(f"{n} {change}{f' ({changes[n][1]})' if n in changes else ''}" for n, change in moved)


def fitting(plan: Plan, pack: Pack, device: torch.device) -> tuple[Plan, dict[str, tuple[Any, str]]]:
    """(the plan as it fits here, setting → (value, why)): what has to differ. fp16 becomes float32 without a GPU, as
    torch's own autocast for CUDA does there."""
    found: dict[str, tuple[Any, str]] = {}
    if plan.batch_size > (train := pack.splits["train"]):
        found["batch_size"] = train, "the whole train split"
    if plan.amp == "fp16" and device.type not in devices.FP16_DEVICES:
        found["amp"] = "off", "fp16 needs a GPU"
    if plan.feed == "workers" and pack.raw is None:
        found["feed"] = "auto", "the source files are gone"
    if plan.workers > cores():
        found["workers"] = cores(), f"this machine has {plural(cores(), 'core')}"
    return plan.turn(**{setting: value for setting, (value, _) in found.items()}), found
