"""The receipt: the task's baseline and a plan, the rungs between them, and the guide's optimised settings, trained in
turns on the same machine and data. A rung has one more group of settings as the plan has them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from nbtools.data import Pack, choose, cores, phase
from nbtools.errors import NbtoolsError, TrainError
from nbtools.measure.machine import machine
from nbtools.measure.timing import Stepper, Timing, untouched
from nbtools.measure.turns import Trial, attempt, beside
from nbtools.show import Report, duration, html, note, number, percent, plural, shown, timing
from nbtools.train import Plan, TaskLike, as_task, list_changes
from nbtools.train import device as devices

SECONDS, ROUNDS = 9.0, 3  # of all turns; of these at least
LEAST, SHARE, SHORT = 36.0, 0.1, 1.0  # seconds, or share of the run if more, that a receipt takes; after any run
GROUPS = {
    "+ packed feed": ("feed", "workers", "prefetch"),
    "+ batch and lr": ("batch_size", "micro_batch_size"),
    "+ mixed precision": ("amp",),
    "+ compile, layout": ("compile", "graph", "channels_last"),
}
"""In the guide's order, each with the settings in which plans must differ for it to be a rung; OTHERS has the rest."""
BASELINE, ALL, OTHERS, GUIDE = "baseline", "this run", "+ other settings", "guide's optimised"
SILENT = (
    *("epochs", "lr", "lr_rule", "schedule", "warmup_epochs", "min_lr", "weight_decay", "betas", "eps"),
    *("eval_every", "eval_samples", "early_stop", "patience", "seed"),
)
"""Settings that make no step faster or slower."""


@dataclass(frozen=True)
class Rung:
    """One more group of settings as the run has them. trial: in turns with the baseline; changes: setting → `before →
    now`; factor: over the previous rung, so that factors multiply to the total; None for baseline and guide."""

    name: str
    trial: Trial
    timing: Timing
    changes: dict[str, str] = field(default_factory=dict)
    factor: float | None = None


@dataclass(frozen=True, repr=False)
class Receipt(Report):
    """Before and after on this machine and this data: the same network, trained with two plans, and the rungs between
    them; guide: the guide's optimised settings, over the baseline, None if they were not measured. Shows as a table.

    samples: that all epochs train on. cold_start: seconds from the call of `nb.fit` to the tenth step, if known.
    """

    rungs: tuple[Rung, ...]
    guide: Rung | None
    machine: dict[str, str]
    notes: tuple[str, ...]
    samples: int
    cold_start: float | None = None

    @property
    def ratio(self) -> float:
        """Return samples/s of the run over the baseline's, the median of what was measured in turns."""
        return self.rungs[-1].trial.ratio

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        """Return (headers, rows): one row per rung, the guide's below the first; spreads are from least to most."""
        first, *others = self.rungs
        rows = []
        for rung in (first, *([self.guide] if self.guide is not None else []), *others):
            here, factor = rung.timing, None if rung.factor is None else f"{rung.factor:.2f}×"
            speed = f"{number(here.samples_per_s)} ({number(here.least)}–{number(here.most)})"
            total = None if rung is first else rung.trial.spread
            waited = percent(here.waited) if here.waited > 0.005 else None
            rows.append((rung.name, speed, factor, total, waited, list_changes(rung.changes)))
        return ("", "samples/s", "vs previous row", "vs baseline", "waiting for data", "what changes"), rows

    def caption(self) -> str:
        guide = f"; the guide's optimised settings: {self.guide.trial.spread}" if self.guide is not None else ""
        last = self.rungs[-1]
        now = self.samples / last.timing.samples_per_s  # before by the ratio: medians of each alone need not agree
        whole = f"all epochs' steps take {timing(now)}, or {timing(now * self.ratio)} with the baseline's settings"
        return f"Samples/s relative to the baseline on this machine: {last.trial.spread}{guide}; {whole}"

    def footer(self) -> str:
        took = None if self.cold_start is None else timing(self.cold_start)
        cold = took and f"From the call of nb.fit to the tenth step: {took}"
        return " ".join([*(f"{each}." for each in (*self.notes, cold) if each), ", ".join(self.machine.values())])

    def _repr_html_(self) -> str:
        title = "<summary style='display: list-item'>How this was measured, and what was not</summary>"
        return f"{html(*self.table(), self.caption())}<details>{title}{note(self.footer())}</details>"


def receipt(task: TaskLike, pack: Pack, plan: Plan, seconds: float = 0.0, run_s: float = 0.0) -> Receipt:
    """Measure the task's BASELINE, a plan, the rungs between them and the first of its PRESETS in turns.

    seconds: of all turns (SECONDS). run_s: seconds that the run took, if known: after a short one turns are shorter,
    and what would take more than a tenth of it is left out, which is said; of a short one as long, or LEAST. Raises
    TrainError where the two ends alone would.
    """
    task, device = as_task(task), devices.pick()
    pack = task.part(pack, plan)
    seconds = seconds or min(SECONDS, (run_s or 60.0) / 6)
    baseline, notes = comparable(task.BASELINE, plan, pack), ["Both train the same network"]
    plans, guide = ladder(baseline, plan, pack), dict[str, Plan]()
    if pack.raw is None:
        notes.append("The pack was opened without its files: both read it, so the data pipeline was not measured")
    if task.PRESETS:
        made, why = preset(task, pack, next(iter(task.PRESETS)), **own_values(plan))
        guide = {GUIDE: made} if made else {}
        notes += [f"The {GUIDE} settings {'here' if made else 'cannot train here'}: {why.rstrip('.')}"] if why else []
    with untouched(device):
        run = attempt(lambda: Stepper(task, pack, baseline, device))
        if isinstance(run, str):
            raise TrainError(f"{BASELINE} {run}")
        last = [*plans][-1]  # what matters most first
        trials, more = compare(run, {last: plans[last], **guide, **plans}, seconds, run_s)
        rungs = [Rung(BASELINE, Trial({}, (1.0,) * len(run.turns)), run.timing())]
        run.batches.close()
        del run
    for name in (name for name in plans if name in trials):
        rungs.append(rung(name if len(trials.keys() - {GUIDE}) > 1 else ALL, trials[name], rungs[-1], pack))
    guided = rung(GUIDE, trials[GUIDE], rungs[0], pack) if GUIDE in trials else None
    if device.type == "cpu":
        more.append("No GPU: the gain from mixed precision, larger batches and data kept on a GPU was not measured")
    return Receipt(tuple(rungs), guided, machine(), (*notes, *more), plan.epochs * pack.splits["train"])


def compare(run: Stepper, plans: dict[str, Plan], seconds: float, run_s: float) -> tuple[dict[str, Trial], list[str]]:
    """Train plans in turns with the baseline, the first in any case; return (name → trial, what to say of the rest)."""
    trials, notes, late, most = dict[str, Trial](), list[str](), list[str](), min(LEAST, run_s or LEAST)
    most = max(most, SHARE * run_s, SHORT)
    first, step_s, start = next(iter(plans)), run.advance().seconds, run.clock()
    if run_s and ROUNDS * step_s > most:
        raise TrainError(f"it would take about {duration(2 * ROUNDS * step_s)}, longer than a tenth of the run")
    for left, (name, plan) in zip(range(len(plans), 0, -1), plans.items(), strict=True):
        times = plan.batch_size / run.plan.batch_size if plan.feed == run.plan.feed else 1  # as long as the baseline's
        likely = ROUNDS * step_s * (1 + times)
        if name != first and run.clock() - start + likely > most:
            late.append(name)
            continue
        phase(name, left * max(seconds / len(plans), likely))
        trial = beside(run, plan, max(seconds / len(plans), likely))
        if trial.timing is None:
            notes.append(f"{name} {trial.failed}")
            continue
        trials[name] = trial
        if (micro := trial.timing.plan["micro_batch_size"]) != plan.micro_batch_size:
            notes.append(f"Memory ran out with {name}: measured in passes of {micro} samples")
    if first not in trials:
        raise TrainError("; ".join(notes))
    if late:
        notes.append(f"Not measured, as that would take longer than {duration(most)}: {', '.join(late)}")
    return trials, notes


def rung(name: str, trial: Trial, below: Rung, pack: Pack) -> Rung:
    here = trial.timing or below.timing
    before, now = costs(below.timing.plan, pack), costs(here.plan, pack)
    changes = {n: f"{shown(before.get(n))} → {shown(now[n])}" for n in now if now[n] != before.get(n)}
    factor = None if name == GUIDE else trial.ratio / below.trial.ratio
    return Rung(name, replace(trial, timing=None), here, changes, factor)


def comparable(baseline: Plan, plan: Plan, pack: Pack) -> Plan:
    """Return the baseline's settings as they fit here, with the run's network: a smaller one is no speed-up."""
    return fitting(baseline.replace(**own_values(plan)), pack)[0]


def own_values(plan: Plan) -> dict[str, Any]:
    """Return the settings that the task added."""
    return {name: value for name, value in plan.to_dict().items() if name not in Plan.__dataclass_fields__}


def ladder(baseline: Plan, plan: Plan, pack: Pack) -> dict[str, Plan]:
    """Return name → plan of the rungs above the baseline, only those in which something differs that costs or saves
    time. Each is the run's plan with the groups above it still as in the baseline, so that it can train."""
    before, now = (costs(each.to_dict(), pack) for each in (baseline, plan))
    groups, plans = {**GROUPS, OTHERS: now.keys() - set().union(*GROUPS.values())}, dict[str, Plan]()
    groups = {name: names for name, names in groups.items() if any(before.get(each) != now.get(each) for each in names)}
    for count, name in enumerate(groups, 1):
        above = [setting for later in [*groups][count:] for setting in groups[later]]
        plans[name] = plan.replace(**{setting: getattr(baseline, setting) for setting in above})
    return plans or {ALL: plan}


def costs(settings: dict[str, Any], pack: Pack) -> dict[str, Any]:
    """Return the settings that make a step faster or slower, with the feed chosen and what that has."""
    feed, _ = choose(pack, SimpleNamespace(feed=settings["feed"]), devices.pick())
    unused = {"resident": ("workers", "prefetch"), "streamed": ("workers",)}.get(feed, ())
    return {k: v for k, v in {**settings, "feed": feed}.items() if k not in (*SILENT, *unused)}


def preset(task: TaskLike, pack: Pack, name: str, /, **own: Any) -> tuple[Plan | None, str]:
    """Return (plan with `own` settings, what differs from the task's and why), or (None, why) if it cannot train."""
    made = as_task(task).PRESETS[name]
    try:
        plan = (made if isinstance(made, Plan) else made(pack.card)).replace(**own)
        fitted, changes = fitting(plan, as_task(task).part(pack, plan))
        devices.require(fitted, devices.pick())
    except NbtoolsError as error:
        return None, error.args[0]
    moved = fitted.changes_from(plan).items()
    return fitted, "; ".join(f"{n} {change}{f' ({changes[n][1]})' if n in changes else ''}" for n, change in moved)


def fitting(plan: Plan, pack: Pack) -> tuple[Plan, dict[str, tuple[Any, str]]]:
    """Return (the plan as it fits here, setting → (value, why)). fp16 is float32 without a GPU, as in torch."""
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
