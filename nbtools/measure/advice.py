"""Advice: the plan to start from, with a reason for each number; by rules of thumb, and by what measuring on this
machine found better.

The guides' tiers and tables are labelled as what they are: rules of thumb. What was measured is kept next to the pack.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import torch

from nbtools import disk, table
from nbtools.data import Card, Pack, choose, cores, phase, work
from nbtools.errors import DiskError, TrainError, sentence
from nbtools.measure.batch import BatchReport, find_batch
from nbtools.measure.machine import machine
from nbtools.measure.presets import preset
from nbtools.measure.profile import StepProfile, Tried
from nbtools.measure.report import Report, restored
from nbtools.measure.several import Scaling, find_scaling, ways
from nbtools.measure.stepper import Clock
from nbtools.measure.trials import LEAST_STEPS, choose_precision, find_precision, step_profile
from nbtools.measure.verdict import Verdict, verdict
from nbtools.measure.workers import WorkersReport, find_workers
from nbtools.table import digits, duration, painted, plural
from nbtools.train import (
    LARGER,
    OPTIMIZERS,
    Plan,
    Steps,
    Task,
    TaskLike,
    as_task,
    bound,
    build,
    lr_factor,
    readable,
    require_training,
    spoken,
    task_name,
)
from nbtools.train import device as devices

VERSION = 4  # of what is measured: what an older version advised is measured again
KEPT = 8  # kept results next to a pack, for instance of other machines
TURNS = 2  # changes to the measured plan, each based on a new profile
SECONDS = 20.0  # for the batch size; a third of it for the profile, which takes two to three times that
FREE = ("feed", "workers", "prefetch", "channels_last", "compile", "graph", "amp")
"""Settings that advice changes by itself where that was measured faster: training takes the same course, but for the
precision of its arithmetic."""

TIERS = ((40, 512), (24, 256), (12, 128), (0, 64))  # GB of GPU memory → batch (guide 2)
MOST_K = LARGER[-1][0]  # beyond it Adam's best lr falls again (arXiv 2405.14578); the guides' table ends there too
LEAST_BATCH = 8  # a smaller one gives BatchNorm poor statistics
STARTING = 20.0  # seconds that processes take to start: torch is imported in each
THUMB = "rule of thumb"
LINE = 84  # letters of a reason that stand in the table


@dataclass(frozen=True)
class Advice(Report):
    """A plan, one reason per field, and the evidence for those that were measured. Shows as a table.

    The panel's presets: baseline, the guide's "before", and largest, the largest batch that the rules allow, or None if
    there is none larger, for which `largest_reason` gives the reason; presets: the task's own, name → (plan, what
    differs here), or (None, why it cannot train here). precision, batches, workers, profile: the measurements, None if
    there was none; verdict: what this plan is bound by here. samples: of the train split. scaling: what several
    processes would give, where that was asked for.
    """

    plan: Plan
    reasons: dict[str, str]
    baseline: Plan | None = None
    note: str = ""
    largest: Plan | None = None
    largest_reason: str = ""
    presets: dict[str, tuple[Plan | None, str]] = field(default_factory=dict)
    evidence: dict[str, str] = field(default_factory=dict)
    precision: Tried | None = None
    batches: BatchReport | None = None
    workers: WorkersReport | None = None
    profile: StepProfile | None = None
    verdict: Verdict | None = None
    samples: int = 0
    scaling: Scaling | None = None

    def other_batches(self) -> list[tuple[Plan, str]]:
        """(plan, why) at other batch sizes, from the largest down: lr by the optimizer's rule, and as many forward
        passes as needed if a size does not fit at once, or was not tried."""
        plan, (most, limit) = self.plan, self.at_once()
        sizes = {(self.largest or plan).batch_size, *(plan.batch_size * part // 4 for part in (3, 2, 1))}
        found = []
        for size in sorted(sizes - {0, plan.batch_size}, reverse=True):
            lr, why = learning_rate(plan, plan.optimizer, size)
            passes = -(-size // most)
            micro = -(-size // passes) if passes > 1 else None
            resized = plan.replace(batch_size=size, micro_batch_size=micro, lr=lr, min_lr=min(plan.min_lr, lr))
            found.append((resized, f"{why}; in {passes} passes: {limit}" if micro else why))
        return found

    def at_once(self) -> tuple[int, str]:
        """(samples that one forward pass takes, why not more): as measured, else by the rules."""
        rows = self.batches.rows if self.batches is not None else ()
        fitting, beyond = ([row.batch_size for row in rows if row.fits == fits] for fits in (True, False))
        if not fitting:
            largest = self.largest or self.plan
            return largest.micro_batch_size or largest.batch_size, f"{THUMB} for this GPU's memory (guide 2)"
        most = max(fitting)
        return most, f"{min(beyond)} does not fit at once" if beyond else f"more than {most} at once was not tried"

    @property
    def ladder(self) -> Any:
        raise AttributeError("Advice.ladder was removed: print the advice, or use advice.other_batches() for the plans")

    def table(self) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """One row per setting, then one row for each other batch size."""
        values = self.plan.to_dict()
        rows = [(name, values[name], reason, self.evidence.get(name, "")) for name, reason in self.reasons.items()]
        for plan, why in self.other_batches():
            rows.append((f"or batch {plan.batch_size}", f"lr {digits(plan.lr)}", why, ""))
        shown = 4 if self.evidence else 3
        return ("setting", "value", "reason", "measured here")[:shown], [row[:shown] for row in rows]

    def colours(self) -> dict[tuple[int, int], str]:
        """Values that were measured here, and those of rules of thumb."""
        source = {name: "yellow" for name, reason in self.reasons.items() if THUMB in reason}
        source |= dict.fromkeys(self.evidence, "green")
        return {(row, 1): source[name] for row, name in enumerate(self.reasons) if name in source}

    def text(self, colour: bool = False) -> str:
        legend = f"{painted('measured here', 'green')}, {painted(THUMB, 'yellow')}"
        text = f"{super().text(colour)}\n{legend}" if colour else super().text()
        return f"{text}\n\n{self.scaling}" if self.scaling else text

    def caption(self) -> str:
        return " ".join(filter(None, [self.length(), self.verdict and sentence(self.verdict.sentence), self.note]))

    def _repr_html_(self) -> str:
        """A line for each setting, its reason in full on a click; below it what the plan is bound by, and other
        batches."""
        values = self.plan.to_dict()
        rows = [(name, values[name], self.why(name)) for name in self.reasons]
        bound = sentence(self.verdict.sentence) if self.verdict else ""
        others = [(plan.batch_size, plan.lr, why) for plan, why in self.other_batches()]
        sizes = f"Other batch sizes: {', '.join(str(size) for size, *_ in others)}"
        parts = [
            table.html(("setting", "value", "why"), rows, self.length()),
            table.folded(sizes, table.html(("batch size", "lr", "why"), others)) if others else "",
            table.note(bound),
            table.note(self.note),
            self.scaling._repr_html_() if self.scaling else "",
        ]
        return "".join(parts)

    def why(self, name: str) -> table.Folded:
        """The start of a setting's reason; what is left of it and what was measured here, to unfold."""
        reason, evidence = self.reasons[name], self.evidence.get(name, "")
        short = clause(reason)
        whole = [reason] if short != reason else []
        return table.Folded(short, ". ".join([*whole, *([f"Measured here: {evidence}"] if evidence else [])]))

    def length(self) -> str:
        """Samples, steps per epoch, in all and of warmup; and the time for them where a step was measured here."""
        if not self.samples:  # advice that an older nbtools kept
            return ""
        seconds = self.profile and self.plan.epochs * self.profile.epoch_s
        time = f"about {duration(seconds)} at the measured speed" if seconds else "time not measured yet"
        return f"{Steps.of(self.plan, self.samples)} · {time}."

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], kind: type[Plan] = Plan) -> Self:
        """kind: of the plans."""
        plans = {name: values[name] and kind.from_dict(values[name]) for name in ("plan", "baseline", "largest")}
        presets = {n: (plan and kind.from_dict(plan), why) for n, (plan, why) in values.get("presets", {}).items()}
        return restored(cls, {**values, **plans, "presets": presets})


def clause(reason: str) -> str:
    """The start of a reason: up to its first semicolon, and of that as many words as fit a line."""
    return textwrap.shorten(reason.partition("; ")[0], LINE, placeholder=" …")


def advise(
    task: TaskLike,
    pack: Pack,
    measure: bool = True,
    seconds: float = SECONDS,
    noise: Any = None,
    compiling: bool = False,
    clock: Clock | None = None,
    processes: int = 1,
) -> Advice:
    """The plan to start from, each field with its reason and, where it was measured here, the evidence.

    Measuring takes about two to three times `seconds`, once for a machine, a pack and a task: the result is kept next
    to the pack. measure=False: use what was measured before, else only rules of thumb, without delay. compiling: also
    try torch.compile and CUDA graphs, however short training is; takes a minute or two more. clock: the clock of a
    Stepper. processes: also what the plan, and one with so many times the batch, would give in so many processes,
    each with a GPU of its own or its share of the CPU's cores. Raises TrainError if not even one sample fits.
    """
    if noise is not None:
        raise TrainError(
            "nb.advise no longer takes noise: the gradient noise scale was removed; to cap the batch size, use "
            "advice.plan.turn(batch_size=…) and compare the runs with nb.compare"
        )
    task = as_task(task)
    if processes < 1:
        raise TrainError(f"processes must be at least 1, got {processes}; leave it out for one")
    made = known_or_measured(task, pack, measure, seconds, compiling, clock)
    scaling = scaled(task, pack, made, processes, measure, seconds, clock) if processes > 1 else None
    presets = {name: preset(task, pack, name) for name in task.PRESETS}
    return dataclasses.replace(made, presets=presets, scaling=scaling)


def known_or_measured(
    task: Task, pack: Pack, measure: bool, seconds: float, compiling: bool, clock: Clock | None
) -> Advice:
    """What was measured before, else by the rules, or measured now and kept."""
    thumb, path = by_rules(task, pack, {}), shelf(pack)
    if (part := readable(task, pack, thumb.plan)) is not pack:
        pack, thumb = part, by_rules(task, part, {})
    before = kept(path)
    for asked in (compiling,) if measure else (True, False):  # without measuring whatever there is, the most first
        if found := before.get(label(task, pack, thumb, asked)):
            return Advice.from_dict(found, type(task.PLAN))
    if not measure:
        return thumb
    require_training(pack)
    phases = {"precision": seconds, "batch size": seconds, "step": 0.6 * seconds}
    with work(f"measuring {spoken(task).rpartition('.')[2]} on this machine", **phases):
        made = measured(task, pack, thumb, seconds, compiling, clock)
    unsaved = keep(path, label(task, pack, thumb, compiling), made)
    return dataclasses.replace(made, note=f"{made.note}{unsaved}")


def scaled(
    task: Task, pack: Pack, made: Advice, processes: int, measure: bool, seconds: float, clock: Clock | None
) -> Scaling:
    """What so many processes would give, as measured before, or now; else the batches alone, without figures."""
    plans, path = [made.plan, *many_times(made, pack.card, processes)], shelf(pack)
    name = label(task, pack, made, processes)
    if found := kept(path).get(name):
        return Scaling.from_dict(found)
    if not measure:
        why = f"{plural(processes, 'process')}: whether they are worth it has not been measured here yet."
        return Scaling(processes, tuple(ways(plans, processes)), why)
    with work(f"measuring {plural(processes, 'process')} on this machine", start=STARTING, training=seconds / 3):
        phase("start")
        found = find_scaling(task, pack, plans, processes, seconds / 3, clock)
    return dataclasses.replace(found, note=found.note + keep(path, name, found))


def many_times(made: Advice, card: Card, processes: int) -> list[Plan]:
    """The plan with so many times the batch, of which each process takes what the plan has; none where there is too
    little data for that, or no rule for its lr."""
    plan, base = made.plan, made.baseline or made.plan
    batch = processes * plan.batch_size
    if batch > min(enough(card), MOST_K * base.batch_size):
        return []
    lr, warm = learning_rate(plan, plan.optimizer, batch)[0], warmup(batch / base.batch_size, plan.epochs)[0]
    micro = plan.micro_batch_size or plan.batch_size
    changes = {"batch_size": batch, "micro_batch_size": micro, "lr": lr, "warmup_epochs": max(warm, plan.warmup_epochs)}
    return [plan.replace(**changes, graph=False)]


def by_rules(task: TaskLike, pack: Pack, found: dict[str, tuple[Any, str]]) -> Advice:
    """Advice by the rules from the results so far; the feed is chosen by the pack's size."""
    advice = decide(task, pack.card, inspect(), found)
    if "feed" in advice.reasons:  # measured, or suggested by the task
        return advice
    name, why = choose(pack, advice.plan, devices.pick())
    return dataclasses.replace(advice, reasons={**advice.reasons, "feed": f"{name}: {why}"})


def measured(task: Task, pack: Pack, thumb: Advice, seconds: float, compiling: bool, clock: Clock | None) -> Advice:
    """The precision first, at the rules' batch, then the batch in that precision, since all else depends on it; then
    what a step consists of, and the changes that it suggests."""
    own, start = task.suggest(pack.card, devices.pick().type), perf_counter()
    found: dict[str, tuple[Any, str]] = {}
    evidence: dict[str, str] = {}
    phase("precision", 0.0 if "amp" in own else None)
    precision = None if "amp" in own else find_precision(task, pack, thumb.plan, seconds / 6, clock)
    if precision is not None:
        amp, evidence["amp"] = choose_precision(precision)
        found["amp"] = amp, "the faster one whose losses agree, measured here"
    plan = by_rules(task, pack, found).plan
    phase("batch size")
    batches = find_batch(task, pack, plan, None, seconds, enough(pack.card), clock)
    evidence["batch_size"] = f"Measured: {batches.why}"
    if "batch_size" in own and plan.batch_size != batches.batch_size:
        why = (
            "small batches learn better here"
            if plan.batch_size < batches.batch_size
            else "the task is known to need it"
        )
        evidence["batch_size"] += f"; {plan.batch_size} is kept because {why}"
    elif "batch_size" not in own and conclusive(batches, plan):
        found["batch_size"] = batches.batch_size, "the smallest that is nearly as fast as the fastest"
    elif "batch_size" not in own:
        evidence["batch_size"] += f"; {plan.batch_size} is kept because the time did not reach to try it"
    if batches.micro_batch_size is not None:
        found["micro_batch_size"] = batches.micro_batch_size, "the whole batch does not fit at once"
    plan, crew = by_rules(task, pack, found).plan, None
    if choose(pack, plan, devices.pick())[0] == "workers":
        phase("workers", seconds / 2)
        crew = find_workers(task, pack, plan, seconds / 3)
        found |= {"workers": (crew.workers, crew.reason), "prefetch": (crew.prefetch, crew.reason)}
        evidence["workers"] = crew.reason
    fixed = ["amp"] if precision is not None and not precision.agrees else []
    for turn in range(TURNS + 1):
        plan = by_rules(task, pack, found).plan
        phase(f"step, turn {turn + 1}" if turn else "step", 0.6 * seconds)
        profile = step_profile(task, pack, plan, None, seconds / 6, fixed, compiling and not turn, clock)
        judged = verdict(profile, plan)
        if turn == TURNS or not judged.change or not set(judged.change) <= set(FREE):
            break
        found |= {name: (value, "measured faster here") for name, value in judged.change.items()}
        evidence |= dict.fromkeys(judged.change, judged.sentence)
        fixed = [*fixed, *judged.change, "compile", "graph"]  # compiling takes a minute, and gained less than this
    took = f"{perf_counter() - start:.0f} s"
    note = f"Measured on {', '.join(machine().values())} in {took}, except where a {THUMB} is named."
    results = {"precision": precision, "batches": batches, "workers": crew, "profile": profile, "verdict": judged}
    return dataclasses.replace(by_rules(task, pack, found), note=note, evidence=evidence, **results)


def conclusive(batches: BatchReport, plan: Plan) -> bool:
    """Whether the search ended by itself, or at least reached the rules' own batch: a busy machine may not let it."""
    return batches.complete or any(row.samples_per_s for row in batches.rows if row.batch_size >= plan.batch_size)


def shelf(pack: Pack) -> Path:
    """Next to the pack, not in it: a pack's contents are verified."""
    return pack.folder.with_name(f"{pack.folder.name}.advice.json")


def label(task: TaskLike, pack: Pack, of: Advice, asked: bool | int) -> str:
    """Changes with whatever the measurements depend on: machine and versions, data, task and its plan. asked: whether
    to compile; or of several processes their number."""
    own, shapes = bound(task, pack.card), []
    if own.card is not None:  # a task of one's own may have no name, or the same one for another network
        with torch.random.fork_rng(devices=[]):
            shapes = [list(parameter.shape) for parameter in build(own, pack.card, of.plan).parameters()]
    parts = [VERSION, machine(), pack.card.digest, task_name(task), of.plan.to_dict(), asked, *shapes]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def keep(path: Path, name: str, found: Report) -> str:
    """Save what was measured; returns why that failed, or ""."""
    shelved = {**kept(path), name: found.to_dict()}
    try:
        with disk.explained("keeping the advice", path):
            disk.write_atomic(path, json.dumps(dict(list(shelved.items())[-KEPT:])))
    except DiskError as error:  # a pack may be on a read-only disk
        return f" Not saved for the next time: {error}"
    return ""


def kept(path: Path) -> dict[str, Any]:
    """Label → what was measured before; {} if nothing was."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


@dataclass(frozen=True)
class Machine:
    """What the rules depend on. accelerator: cuda, mps or cpu; gigabytes: of the GPU's memory, 10⁹ bytes."""

    accelerator: str
    name: str
    gigabytes: float = 0
    gpus: int = 0
    cores: int = field(default_factory=cores)
    capability: tuple[int, int] | None = None


def inspect() -> Machine:
    """The machine's current state."""
    device = devices.pick()
    if device.type != "cuda":
        return Machine(device.type, "Apple GPU" if device.type == "mps" else "CPU")
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    gpus = torch.cuda.device_count()
    return Machine("cuda", properties.name, devices.gigabytes(device), gpus, cores(), capability)


def decide(task: TaskLike, card: Card, machine: Machine, found: Mapping[str, tuple[Any, str]] | None = None) -> Advice:
    """Pure: the same card and machine give the same advice. found: setting → (value, why) of what was measured; it goes
    first, then what the task suggests, and the rest follows from these."""
    task = as_task(task)
    plan, base = task.PLAN, task.BASELINE
    advised: dict[str, tuple[Any, str]] = {**task.suggest(card, machine.accelerator), **(found or {})}

    def chosen(name: str) -> Any:
        return advised[name][0] if name in advised else getattr(plan, name)

    advised.setdefault("batch_size", batch_size(card, machine, base.batch_size))
    batch = chosen("batch_size")
    advised.setdefault("lr", learning_rate(base, chosen("optimizer"), batch))
    advised.setdefault("warmup_epochs", warmup(batch / base.batch_size, chosen("epochs")))
    advised.setdefault("amp", precision(machine))
    advised.setdefault("workers", workers(machine))
    if chosen("graph") and machine.accelerator != "cuda":
        advised["graph"] = False, f"CUDA graphs need CUDA, but this is {machine.name}"
    if chosen("min_lr") > chosen("lr"):
        advised["min_lr"] = chosen("lr"), f"the task's {digits(chosen('min_lr'))} is above the advised lr"
    if "micro_batch_size" not in advised and plan.micro_batch_size is not None:
        advised["micro_batch_size"] = None, "the whole batch at once; training halves it if memory runs out"
    if chosen("graph") and (chosen("micro_batch_size") or batch) < batch:
        advised["graph"] = False, "CUDA graphs need the whole batch in one forward pass"
    made = plan.replace(**{name: value for name, (value, _) in advised.items()})
    reasons = {name: advised[name][1] for name in made.to_dict() if name in advised}
    size = f"{machine.gigabytes:.0f} GB" if machine.gigabytes else plural(machine.cores, "core")
    note = f"For {machine.name} ({size}); a starting point: nothing here has been measured on it yet."
    largest, why = largest_batch(made, base, card, machine)
    return Advice(made, reasons, base, note, largest, why, samples=card.splits["train"])


def enough(card: Card) -> int:
    """The largest batch that leaves a small data set its steps."""
    return min(max(card.splits["train"] // LEAST_STEPS, LEAST_BATCH), card.splits["train"])


def memory_tier(machine: Machine) -> tuple[int, int]:
    """(GB from which it reaches up, its batch) of a CUDA GPU."""
    return devices.tier(machine.gigabytes, TIERS)


def batch_size(card: Card, machine: Machine, base: int) -> tuple[int, str]:
    train = card.splits["train"]
    batch, why = base, f"no CUDA GPU: the baseline's {base}"
    if machine.accelerator == "cuda":
        least, batch = memory_tier(machine)
        why = f"{machine.gigabytes:.0f} GB of GPU memory, the tier from {least} GB: {batch}, {THUMB} (guide 2)"
    most = max(train // LEAST_STEPS, LEAST_BATCH)
    if batch > most:
        batch = max(1, min(2 ** (most.bit_length() - 1), train))
        why += f"; capped to {batch}: {train:,} training samples are few, {THUMB} (ours: {LEAST_STEPS} steps per epoch)"
    return batch, why


def largest_batch(plan: Plan, base: Plan, card: Card, machine: Machine) -> tuple[Plan | None, str]:
    """The plan at the largest power of two that data and lr rules allow, on a GPU in forward passes of its tier."""
    train, bound = card.splits["train"], MOST_K * base.batch_size
    why = f"{MOST_K} × the baseline's {base.batch_size}, where the lr rules end (guide 3, arXiv 2405.14578)"
    if enough(card) < bound:
        bound = enough(card)
        why = f"{LEAST_STEPS} steps per epoch of {train:,} training samples, or batch {LEAST_BATCH} (ours)"
    batch = 2 ** (max(bound, 1).bit_length() - 1)
    if batch <= plan.batch_size:
        return None, f"{THUMB}: the advised {plan.batch_size} is the largest allowed, by {why}"
    reason, micro = f"{THUMB}: batch {batch}, by {why}", plan.micro_batch_size
    if machine.accelerator == "cuda" and batch > (tier := memory_tier(machine))[1]:
        micro = min(micro or tier[1], tier[1])
        reason += f", in forward passes of {micro} for {machine.gigabytes:.0f} GB (guide 2)"
    lr, why_lr = learning_rate(plan, plan.optimizer, batch)
    warm = max(warmup(batch / base.batch_size, plan.epochs)[0], plan.warmup_epochs)
    changed = plan.replace(batch_size=batch, micro_batch_size=micro, lr=lr, warmup_epochs=warm)
    return changed, f"{reason}; lr {digits(lr)} from {why_lr}. Whether it is faster here has not been measured yet"


def learning_rate(base: Plan, optimizer: str, batch: int) -> tuple[float, str]:
    """From another plan's lr at its batch size, by the rule for the optimizer; k is capped."""
    rule, source = OPTIMIZERS[optimizer].lr_rule
    k = batch / base.batch_size
    factor = lr_factor(rule, min(k, MOST_K))
    why = f"{digits(base.lr)} at batch {base.batch_size}, times {factor:.3g} by the {rule} rule, {THUMB} ({source})"
    return float(f"{base.lr * factor:.3g}"), why + (f"; no increase beyond {MOST_K} × the batch" if k > MOST_K else "")


def warmup(k: float, epochs: int) -> tuple[float, str]:
    found = next((least for times, _, (least, _) in LARGER if k <= times), LARGER[-1][2][0])
    capped = min(float(found), epochs / 5)
    why = f"{plural(found, 'epoch')} for a batch {k:.3g} times the baseline's, {THUMB} (guide 3)"
    return capped, why + (f"; capped to a fifth of {plural(epochs, 'epoch')}" if capped < found else "")


def workers(machine: Machine) -> tuple[int, str]:
    why = f'min(4 per GPU, {plural(machine.cores, "core")}, 16), {THUMB} (guide 2); used only by feed="workers"'
    return min(4 * max(machine.gpus, 1), machine.cores, 16), why


def precision(machine: Machine) -> tuple[str, str]:
    if machine.accelerator == "cpu":
        return "off", f"only some CPUs (AMX, AVX512-BF16) are faster in bf16: float32 until that is measured, {THUMB}"
    if machine.accelerator != "cuda" or machine.capability is None:
        return "off", f"mixed precision has not been tried on {machine.accelerator}"
    shown = ".".join(map(str, machine.capability))
    if machine.capability >= (8, 0):
        return "bf16", f"compute capability {shown} has bfloat16 in hardware; it needs no loss scaling"
    if machine.capability >= (7, 0):
        return "fp16", f"compute capability {shown} has fp16 tensor cores, but only emulates bfloat16"
    return "off", f"compute capability {shown} has no tensor cores"
