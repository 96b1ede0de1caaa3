"""The receipt: the task's baseline and a plan, and the rungs between them, trained in turns on the same machine and
data. A rung has one more group of settings as the plan has them."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nbtools.data import Pack, Resident, choose
from nbtools.measure.machine import machine
from nbtools.measure.profile import padded, padding
from nbtools.measure.report import Report
from nbtools.measure.stepper import Clock, Rate, Stepper, made_ready, untouched
from nbtools.train import Plan, TaskLike, as_task, shown
from nbtools.train import device as devices

ROUNDS, SECONDS = 3, 1.5
WARMUP_STEPS = 3
BLIND = 64  # the guides' batch, for what batches that are not grouped by length would pad
SHARE = 0.5  # of free GPU memory that the rungs between the ends may take
GROUPS = {
    "+ packed feed": ("feed", "workers", "prefetch"),
    "+ batch and lr": ("batch_size", "micro_batch_size"),
    "+ mixed precision": ("amp",),
    "+ compile, graph, layout": ("compile", "graph", "channels_last"),
}
"""In the guide's order, each with the settings in which plans must differ for it to be a rung; OTHERS is one more, and
ALL is what a run is called that has no rungs."""

OTHERS, ALL = "+ the rest", "this run"
SILENT = (
    *("epochs", "lr", "lr_rule", "schedule", "warmup_epochs", "min_lr", "weight_decay", "betas"),
    *("eval_every", "early_stop", "patience", "seed"),
)
"""Settings that make no step faster or slower."""


@dataclass(frozen=True)
class Rung:
    """One more group of settings as the run has them. changes: setting → `before → now`. total: samples/s over the
    baseline, the median over rounds of what was measured in turns, with its least and most; factor: over the rung
    before, so that factors multiply to the total, with the least and most of the rounds."""

    name: str
    changes: dict[str, str]
    rate: Rate
    factor: float
    factor_least: float
    factor_most: float
    total: float
    total_least: float
    total_most: float


@dataclass(frozen=True)
class Receipt(Report):
    """Before and after on this machine and this data: the same network, two ways to train it, and the rungs between
    them, () in receipts of older versions. Shows as a table.

    ratio: the median over rounds of after / before, measured in turns, with its least and most. peak_memory: MiB, of
    the GPU for either; without one, of the whole process for both together.
    """

    before: Rate
    after: Rate
    ratio: float
    ratio_least: float
    ratio_most: float
    peak_memory: dict[str, float]
    machine: dict[str, str]
    notes: tuple[str, ...]
    rungs: tuple[Rung, ...] = ()

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        """(headers, rows): one row per rung, spreads from least to most; without rungs, the two ends side by side."""
        if self.rungs:
            return HEADERS, [row(rung, first=not k) for k, rung in enumerate(self.rungs)]
        pair = (self.before, self.after)
        rows: list[tuple[str, ...]] = [
            ("samples/s", *(f"{r.samples_per_s:,.0f} ({r.least:,.0f}–{r.most:,.0f})" for r in pair)),
            ("waiting for data", *(f"{r.data_wait:.0%}" for r in pair)),
        ]
        changes = changed(self.before.plan, self.after.plan)
        rows += [(name, *change.split(" → ", 1)) for name, change in changes.items()]
        return ("", "baseline", "this run"), rows

    def caption(self) -> str:
        spread = f"{self.ratio_least:.2f}–{self.ratio_most:.2f}, n = {self.after.rounds}"
        return f"{self.ratio:.2f}× the baseline's samples/s on this machine ({spread})"

    def footer(self) -> str:
        names = {"before": "baseline", "after": "this run"}
        peaks = [f"{names[side]} {peak:,.0f} MiB" for side, peak in self.peak_memory.items() if side in names]
        memory = [f"Peak GPU memory: {', '.join(peaks)}."] if peaks else []
        return " ".join([*(f"{note}." for note in self.notes), *memory, ", ".join(self.machine.values())])

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)


HEADERS = ("", "samples/s", "over the rung before", "over the baseline", "waiting for data", "what changes")


def row(rung: Rung, first: bool) -> tuple[Any, ...]:
    """In the order of HEADERS."""
    rate = rung.rate
    factor = f"{rung.factor:.2f}× ({rung.factor_least:.2f}–{rung.factor_most:.2f})"
    total = f"{rung.total:.2f}× ({rung.total_least:.2f}–{rung.total_most:.2f})"
    ratios = (None, None) if first else (factor, total)
    changes = ", ".join(f"{name} {change}" for name, change in rung.changes.items())
    speed = f"{rate.samples_per_s:,.0f} ({rate.least:,.0f}–{rate.most:,.0f})"
    return rung.name, speed, *ratios, f"{rate.data_wait:.0%}", changes


def receipt(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    device: torch.device | None = None,
    seconds: float | None = None,
    clock: Clock | None = None,
) -> Receipt:
    """Measure the task's BASELINE, a plan and the rungs between them in turns. seconds: of a turn, were there only two
    (SECONDS); more rungs have shorter ones, so that the whole takes as long. clock: as of a Stepper."""
    where = device or devices.pick()
    baseline, notes = comparable(as_task(task).BASELINE, plan, pack)
    with untouched(where):
        rungs, peaks, more = measured(Course(task, pack, where, clock), baseline, plan, seconds or SECONDS)
    notes += [*more, *padding_of(pack, plan)]
    if "process" in peaks:
        notes.append("No GPU: what mixed precision, larger batches and resident data gain on one was not measured")
    first, last = rungs[0], rungs[-1]
    spread = last.total, last.total_least, last.total_most
    return Receipt(first.rate, last.rate, *spread, peaks, machine(), tuple(notes), rungs)


def comparable(baseline: Plan, plan: Plan, pack: Pack) -> tuple[Plan, list[str]]:
    """The baseline's way to train, with the run's own network and loss: a smaller network is no speed-up."""
    own = {f.name for f in dataclasses.fields(plan)} - {f.name for f in dataclasses.fields(Plan)}
    changes: dict[str, Any] = {name: getattr(plan, name) for name in own}
    changes["batch_size"] = min(baseline.batch_size, pack.splits["train"])
    notes = ["Both train the same network"]
    if pack.raw is None:
        changes["feed"] = "auto"
        notes.append("The source files are gone: both read the pack, and the data pipeline was not measured")
    return baseline.replace(**changes), notes


def ladder(baseline: Plan, plan: Plan, pack: Pack, device: torch.device) -> list[tuple[str, Plan]]:
    """(name, plan) from the baseline to the run, only those in which something differs that costs or saves time.

    A rung is the run's plan with the groups above it still as in the baseline, so each is a plan that can train.
    """
    every = {**GROUPS, OTHERS: rest(plan)}.items()
    groups = [(name, settings) for name, settings in every if differs(settings, baseline, plan, pack, device)]
    found = [("baseline", baseline)]
    for k, (name, _) in enumerate(groups):
        above = [setting for _, settings in groups[k + 1 :] for setting in settings]
        found.append((name, plan.replace(**{setting: getattr(baseline, setting) for setting in above})))
    return found if groups else [*found, (ALL, plan)]


def rest(plan: Plan) -> tuple[str, ...]:
    """The settings that are in no group, and not silent."""
    grouped = {setting for settings in GROUPS.values() for setting in settings}
    return tuple(f.name for f in dataclasses.fields(plan) if f.name not in grouped and f.name not in SILENT)


def differs(settings: Sequence[str], one: Plan, other: Plan, pack: Pack, device: torch.device) -> bool:
    """Whether two plans train differently by these settings; workers count only for a feed that has them."""

    def source(plan: Plan) -> tuple[Any, ...]:
        name, _ = choose(pack, plan, device)
        return {"resident": (name,), "streamed": (name, plan.prefetch)}.get(name, (name, plan.workers, plan.prefetch))

    if "feed" in settings:
        return source(one) != source(other)
    return any(getattr(one, setting) != getattr(other, setting) for setting in settings)


class Course:
    """Plans in training side by side, each with a turn a round. By name: steppers, and peaks, MiB of GPU memory at
    most. step_s: seconds of the slowest one's step; held: bytes of GPU memory of the largest one between its turns."""

    def __init__(self, task: TaskLike, pack: Pack, device: torch.device, clock: Clock | None = None):
        self.task, self.pack, self.device, self.clock = task, pack, device, clock
        self.shared: Resident | None = None  # the pack in memory, for all that read it there
        self.steppers: dict[str, Stepper] = {}
        self.peaks: dict[str, float] = {}
        self.step_s, self.held = 0.0, 0

    def enter(self, name: str, plan: Plan) -> None:
        cuda, feed, before = self.device.type == "cuda", None, 0
        if choose(self.pack, plan, self.device)[0] == "resident":
            self.shared = feed = self.shared or Resident(self.pack, self.device)
        if cuda:
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        stepper = self.steppers[name] = Stepper(self.task, self.pack, plan, self.device, feed, self.clock)
        stepper.advance(steps=WARMUP_STEPS)
        self.step_s = max(self.step_s, stepper.advance().step_s)
        stepper.turns.clear()
        if cuda:
            peak = torch.cuda.max_memory_allocated(self.device) - before + (self.pack.bytes if feed else 0)
            self.peaks[name] = peak / 2**20
            self.held = max(self.held, torch.cuda.memory_allocated(self.device) - before)

    def refusal(self, number: int, seconds: float) -> list[str]:
        """Why so many more plans would take too long or too much memory; [] where they do not."""
        longer = number * (WARMUP_STEPS + 1 + ROUNDS) * self.step_s
        if longer > 2 * seconds * ROUNDS:
            return [f"A step takes {self.step_s:.1f} s: of the rungs only the ends were measured"]
        if self.device.type == "cuda" and number * self.held > SHARE * torch.cuda.mem_get_info(self.device)[0]:
            return ["GPU memory has no room for more models: of the rungs only the ends were measured"]
        return []

    def turn(self, name: str, seconds: float) -> None:
        """What its feed made ready while others had their turn is trained first, and not timed."""
        stepper = self.steppers[name]
        if ahead := made_ready(stepper.plan, self.pack, self.device):
            stepper.advance(steps=ahead)
            stepper.turns.pop()
        stepper.advance(seconds)


def measured(
    course: Course, baseline: Plan, plan: Plan, seconds: float
) -> tuple[tuple[Rung, ...], dict[str, float], list[str]]:
    """(rungs, peak memory as in Receipt, notes)."""
    wanted = ladder(baseline, plan, course.pack, course.device)
    for name, each in (wanted[0], wanted[-1]):
        course.enter(name, each)
    notes = course.refusal(len(wanted) - 2, seconds)
    for name, each in () if notes else wanted[1:-1]:
        course.enter(name, each)
    names = [name for name, _ in wanted if name in course.steppers]
    for _ in range(ROUNDS):
        for name in names:
            course.turn(name, 2 * seconds / len(names))
    steppers = [course.steppers[name] for name in names]
    rounds = [[turn.samples_per_s for turn in stepper.turns] for stepper in steppers]
    named = [*names[:-1], ALL] if notes else names
    peaks = {"process": devices.resident() / 2**20}
    if course.peaks:
        peaks = {"before": course.peaks[names[0]], "after": course.peaks[names[-1]]}
    return rungs_of(named, [stepper.rate() for stepper in steppers], rounds), peaks, notes


def rungs_of(names: Sequence[str], rates: Sequence[Rate], rounds: Sequence[Sequence[float]]) -> tuple[Rung, ...]:
    """Rungs of samples/s: rounds[k] are those of rung k. The factors of the rungs multiply to the last total."""

    def over(k: int, base: int) -> list[float]:
        return [speed / other for speed, other in zip(rounds[k], rounds[base], strict=True)]

    found: list[Rung] = []
    for k, (name, rate) in enumerate(zip(names, rates, strict=True)):
        ratios, factor, steps, changes = over(k, 0), 1.0, [1.0], {}
        total = statistics.median(ratios)
        if found:
            factor = total / found[-1].total
            steps = [factor, *over(k, k - 1)]  # medians may be of different rounds
            changes = changed(found[-1].rate.plan, rate.plan)
        found.append(Rung(name, changes, rate, factor, min(steps), max(steps), total, min(ratios), max(ratios)))
    return tuple(found)


def changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Setting → `before → now`, without those that make no difference."""
    unused = () if now["feed"] == "workers" else ("workers", "prefetch")
    differing = (name for name, value in now.items() if before.get(name) != value and name not in (*SILENT, *unused))
    return {name: f"{shown(before.get(name))} → {shown(now[name])}" for name in differing}


def padding_of(pack: Pack, plan: Plan) -> list[str]:
    """What the plan pads, and what a DataLoader with shuffle=True would, of the column by whose length batches are
    grouped."""
    column = pack.card.bucket_by
    if column is None:
        return []
    ids = np.random.default_rng(0).permutation(pack.ids("train"))
    blind = padded(pack, column, np.split(ids, range(BLIND, len(ids), BLIND)))
    return [
        f"Padding is {padding(pack, plan)[column]:.1%} of {column} at batch {plan.batch_size}, for both, since batches "
        f"are grouped by length; random batches of {BLIND} would pad {blind:.1%}"
    ]
