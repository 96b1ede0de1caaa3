"""The receipt: the task's baseline and a plan, the rungs between them, and the guide's optimised settings, trained in
turns on the same machine and data. A rung has one more group of settings as the plan has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from nbtools.data import Pack, choose, cores, phase
from nbtools.errors import NbtoolsError, TrainError
from nbtools.measure.machine import machine
from nbtools.measure.timing import Stepper, Timing, untouched
from nbtools.measure.turns import attempt, in_turns, share_of, shared
from nbtools.show import Report, duration, html, note, percent, plural
from nbtools.train import Plan, TaskLike, as_task, listed, readable, shown
from nbtools.train import device as devices

SECONDS, ROUNDS = 9.0, 3  # of all turns; of these at least
LEAST, SHARE = 36.0, 0.1  # seconds that a receipt may take, or this share of the run if that is more
GROUPS = {
    "+ packed feed": ("feed", "workers", "prefetch"),
    "+ batch and lr": ("batch_size", "micro_batch_size"),
    "+ mixed precision": ("amp",),
    "+ compile, layout, threads": ("compile", "graph", "channels_last", "threads"),
}
"""In the guide's order, each with the settings in which plans must differ for it to be a rung; OTHERS has the rest."""
NOTABLE = 0.005  # share of the time that a row waits for data, above which it is shown
BASELINE, ALL, OTHERS, GUIDE = "baseline", "this run", "+ other settings", "guide's optimised"
SILENT = (
    *("epochs", "lr", "lr_rule", "schedule", "warmup_epochs", "min_lr", "weight_decay", "betas", "eps"),
    *("eval_every", "early_stop", "patience", "seed"),
)
"""Settings that make no step faster or slower."""


@dataclass(frozen=True)
class Rung:
    """One more group of settings as the run has them. changes: setting → `before → now`. total: samples/s over the
    baseline, the median of the turns, with least and most; factor: over the previous rung, so that factors multiply to
    the total; None for the baseline and the guide's settings."""

    name: str
    changes: dict[str, str]
    timing: Timing
    factor: float | None
    total: float
    least: float
    most: float

    @property
    def over_baseline(self) -> str:
        return f"{self.total:.2f}× ({self.least:.2f}–{self.most:.2f})"


@dataclass(frozen=True)
class Receipt(Report):
    """Before and after on this machine and this data: the same network, trained with two plans, and the rungs between
    them; guide: the guide's optimised settings, over the baseline, None if they were not measured. Shows as a table.

    samples: that all epochs train on. cold_start: seconds from the call of `nb.fit` to the tenth step, None where that
    is not known.
    """

    rungs: tuple[Rung, ...]
    guide: Rung | None
    machine: dict[str, str]
    notes: tuple[str, ...]
    samples: int
    cold_start: float | None = None

    @property
    def before(self) -> Timing:
        return self.rungs[0].timing

    @property
    def after(self) -> Timing:
        return self.rungs[-1].timing

    @property
    def ratio(self) -> float:
        """Return samples/s of the run over the baseline's, the median of what was measured in turns."""
        return self.rungs[-1].total

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        """Return (headers, rows): one row a rung, below the first one the guide's, spreads from least to most."""
        first, *others = self.rungs
        rows = []
        for rung in (first, *([self.guide] if self.guide is not None else []), *others):
            here, factor = rung.timing, None if rung.factor is None else f"{rung.factor:.2f}×"
            speed = f"{here.samples_per_s:,.0f} ({here.least:,.0f}–{here.most:,.0f})"
            total = None if rung is first else rung.over_baseline
            waited = percent(here.waited) if here.waited > NOTABLE else None
            rows.append((rung.name, speed, factor, total, waited, listed(rung.changes)))
        return ("", "samples/s", "vs previous row", "vs baseline", "waiting for data", "what changes"), rows

    def caption(self) -> str:
        spread = f"{self.rungs[-1].least:.2f}–{self.rungs[-1].most:.2f}, n = {self.after.turns}"
        guide = f"; the guide's optimised settings: {self.guide.over_baseline}" if self.guide is not None else ""
        took, before = (duration(self.samples / timing.samples_per_s) for timing in (self.after, self.before))
        whole = f"all epochs' steps take {took}, with the baseline's settings {before}"
        return f"{self.ratio:.2f}× the baseline's samples/s on this machine ({spread}){guide}; {whole}"

    def footer(self) -> str:
        notes = [*self.notes]
        if self.cold_start is not None:
            notes.append(f"From the call of nb.fit to the tenth step: {duration(self.cold_start)}")
        return " ".join([*(f"{note}." for note in notes), ", ".join(self.machine.values())])

    def _repr_html_(self) -> str:
        """Return the sentence and the table, with how it was measured folded."""
        how = f"<details><summary>How, and what was not measured</summary>{note(self.footer())}</details>"
        return html(*self.table(), self.caption()) + how

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)


def receipt(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    seconds: float | None = None,
    run_s: float | None = None,
    cold_start: float | None = None,
) -> Receipt:
    """Measure the task's BASELINE, a plan, the rungs between them and the first of its PRESETS in turns.

    seconds: of all turns (SECONDS). run_s: seconds that the run took, if known: after a short one turns are shorter,
    and what would take more than a tenth of it (LEAST, if that is more) is left out, and it is said. Raises TrainError
    where the two ends alone would.
    """
    task, pack, seconds = as_task(task), readable(task, pack, plan), seconds or SECONDS * share_of(run_s)
    baseline, notes = comparable(task.BASELINE, plan, pack)
    plans, guide = ladder(baseline, plan, pack), dict[str, Plan]()
    if task.PRESETS:
        made, why = preset(task, pack, next(iter(task.PRESETS)), **own_values(plan))
        guide = {GUIDE: made} if made else {}
        notes += [f"The {GUIDE} settings {'here' if made else 'cannot train here'}: {why.rstrip('.')}"] if why else []
    with untouched(devices.pick()):
        runs, more = side_by_side(task, pack, plans, guide, seconds, run_s)
        rungs = list[Rung]()
        for name in (name for name in plans if name in runs):
            rungs.append(rung(name, pack, runs, rungs[-1] if rungs else None))
        beside = rung(GUIDE, pack, runs, rungs[0]) if GUIDE in runs else None
        del runs
    if len(rungs) == 2:
        rungs[1] = replace(rungs[1], name=ALL)
    if devices.pick().type == "cpu":
        more.append("No GPU: what mixed precision, larger batches and data kept on a GPU would gain was not measured")
    samples = plan.epochs * pack.splits["train"]
    return Receipt(tuple(rungs), beside, machine(), (*notes, *more), samples, cold_start)


def side_by_side(
    task: TaskLike, pack: Pack, plans: dict[str, Plan], guide: dict[str, Plan], seconds: float, run_s: float | None
) -> tuple[dict[str, Stepper], list[str]]:
    """Train the first and the last plan in turns, and as many others as have time for it; return (name → what trained,
    what is to say of the others). Raises TrainError where not even these two can."""
    first, *between, last = plans
    runs, notes, late, most = dict[str, Stepper](), list[str](), list[str](), max(LEAST, SHARE * (run_s or 0.0))
    need = slowest = 0.0  # seconds of a round; of a sample
    for name in (first, last, *guide, *between):  # those that matter most first
        plan = {**plans, **guide}[name]
        if name not in (first, last) and ROUNDS * (need + plan.batch_size * slowest) > most:
            late.append(name)
            continue
        run = next((run for run in runs.values() if shared(run, plan)), None)
        made = attempt(partial(Stepper, task, pack, plan, devices.pick(), shared(run, plan)))
        if isinstance(made, str):
            notes.append(f"{name} {made}")
            continue
        runs[name], step_s = made, made.advance().seconds
        made.turns.clear()
        need, slowest = need + step_s, max(slowest, step_s / plan.batch_size)
        if (micro := made.state.recovery.micro) != plan.micro_batch_size:
            notes.append(f"Memory ran out with {name}: measured in passes of {micro} samples")
    if not {first, last} <= runs.keys():
        raise TrainError("; ".join(notes))
    if run_s is not None and ROUNDS * need > 2 * most:
        raise TrainError(f"it would take about {duration(ROUNDS * need)}, longer than a tenth of the run")
    if late:
        notes.append(f"Not measured, as that would take longer than {duration(most)}: {', '.join(late)}")
    phase("turns", max(seconds, ROUNDS * need))
    in_turns([*runs.values()], max(seconds, ROUNDS * need))
    for run in runs.values():
        run.close()
    return runs, notes


def rung(name: str, pack: Pack, runs: dict[str, Stepper], below: Rung | None) -> Rung:
    """Return what the turns of a plan showed. below: the rung that it is compared with."""
    run, changes, factor = runs[name], dict[str, str](), None
    ratios = run.over(next(iter(runs.values())))
    if below is not None:
        before, now = costs(type(run.plan).from_dict(below.timing.plan), pack), costs(run.plan, pack)
        changes = {n: f"{shown(before.get(n))} → {shown(now[n])}" for n in now if now[n] != before.get(n)}
        factor = None if name == GUIDE else median(ratios) / below.total
    return Rung(name, changes, run.timing(), factor, median(ratios), min(ratios), max(ratios))


# -- the plans


def comparable(baseline: Plan, plan: Plan, pack: Pack) -> tuple[Plan, list[str]]:
    """Return the baseline's settings as they fit here, with the run's own network and loss: a smaller network is no
    speed-up."""
    notes = ["Both train the same network"]
    if pack.raw is None:
        notes.append("The source files are gone: both read the pack, so the data pipeline was not measured")
    return fitting(baseline.replace(**own_values(plan)), pack)[0], notes


def own_values(plan: Plan) -> dict[str, Any]:
    """Return the settings that the task added."""
    return {name: value for name, value in plan.to_dict().items() if name not in Plan.__dataclass_fields__}


def ladder(baseline: Plan, plan: Plan, pack: Pack) -> dict[str, Plan]:
    """Return name → plan from the baseline to the run, only those in which something differs that costs or saves time.

    A rung is the run's plan with the groups above it still as in the baseline, so each is a plan that can train.
    """
    before, now = costs(baseline, pack), costs(plan, pack)
    differing = {name for name in {**before, **now} if before.get(name) != now.get(name)}
    grouped = {setting for settings in GROUPS.values() for setting in settings}
    groups = [*GROUPS.items(), (OTHERS, tuple(name for name in now if name not in grouped))]
    groups = [(name, settings) for name, settings in groups if differing & set(settings)]
    plans = {BASELINE: baseline}
    for number, (name, _) in enumerate(groups):
        above = [setting for _, settings in groups[number + 1 :] for setting in settings]
        plans[name] = plan.replace(**{setting: getattr(baseline, setting) for setting in above})
    return plans if groups else {**plans, ALL: plan}


def costs(plan: Plan, pack: Pack) -> dict[str, Any]:
    """Return the settings that make a step faster or slower, with the feed chosen; workers and prefetch only where that
    has them."""
    name, _ = choose(pack, plan, devices.pick())
    unused = {"resident": ("workers", "prefetch"), "streamed": ("workers",)}.get(name, ())
    return {k: v for k, v in {**plan.to_dict(), "feed": name}.items() if k not in (*SILENT, *unused)}


def preset(task: TaskLike, pack: Pack, name: str, /, **own: Any) -> tuple[Plan | None, str]:
    """Return (plan, what differs from the task's own and why), or (None, why) if it cannot train on this machine or
    data. own: settings in place of the preset's."""
    made = as_task(task).PRESETS[name]
    try:
        plan = (made if isinstance(made, Plan) else made(pack.card)).replace(**own)
        fitted, changes = fitting(plan, readable(task, pack, plan))
        devices.require(fitted, devices.pick())
    except NbtoolsError as error:
        return None, error.args[0]
    moved = fitted.changes_from(plan).items()
    return fitted, "; ".join(f"{n} {change}{f' ({changes[n][1]})' if n in changes else ''}" for n, change in moved)


def fitting(plan: Plan, pack: Pack) -> tuple[Plan, dict[str, tuple[Any, str]]]:
    """Return (the plan as it fits here, setting → (value, why)): what has to differ. fp16 becomes float32 without a
    GPU, as torch's own autocast for CUDA does there."""
    changes: dict[str, tuple[Any, str]] = {}
    if plan.batch_size > (train := pack.splits["train"]):
        changes["batch_size"] = train, "the whole train split"
    if plan.amp == "fp16" and devices.pick().type not in devices.FP16_DEVICES:
        changes["amp"] = "off", "fp16 needs a GPU"
    if plan.feed == "workers" and pack.raw is None:
        changes["feed"] = "auto", "the source files are gone"
    if plan.workers > cores():
        changes["workers"] = cores(), f"this machine has {plural(cores(), 'core')}"
    return plan.turn(**{setting: value for setting, (value, _) in changes.items()}), changes
