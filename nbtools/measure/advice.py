"""Advice: the plan to start from, with a reason for each number; by rules of thumb, and by what measuring on this
machine found better.

The guides' tiers and tables are labelled as what they are: rules of thumb. What was measured is kept next to the pack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from nbtools.data import Card, batches_in, cores
from nbtools.errors import sentence
from nbtools.measure.lr import LrTrial
from nbtools.measure.profile import LEAST_STEPS, Verdict
from nbtools.show import Report, digits, duration, html, note, percent, plural, restore
from nbtools.train import LARGER, OPTIMIZERS, Plan, Task, TaskLike, as_task, length_of, lr_factor
from nbtools.train import device as devices

TIERS = ((40, 512), (24, 256), (12, 128), (0, 64))  # GB of GPU memory → batch (captcha guide)
MOST_K = LARGER[-1][0]  # beyond it Adam's best lr falls again (arXiv 2405.14578); the guides' table ends there too
FEW_SAMPLES, FEW_STEPS = 10_000, 1_500  # training samples below which a run gets about so many steps
FORWARD, EVALUATION_SHARE = 1 / 3, 0.1  # of a step's time: what evaluating takes a sample; of the time, what all may
MOST_PROCESSES = 8  # that read files: more wait for the same disk
LEAST_BATCH = 8  # a smaller one gives BatchNorm poor statistics
THUMB = "rule of thumb"
CAPTCHA_GUIDE, LARGE_GUIDE = "captcha guide", "guide to large batches"
ASKED = ("epochs", "batch_size", "lr", "amp")  # settings that are shown in a notebook wherever they come from
GUIDES = "The guides named here are the speed-up guides that nbtools replaces: see docs/guides.md."
SPEED = ("amp", "channels_last", "threads", "feed", "workers", "prefetch", "compile", "graph", "micro_batch_size")
"""Settings that are advice's to choose, whether or not it tried them."""

Choices = dict[str, tuple[Any, str]]
"""setting → (value, why)"""


@dataclass(frozen=True)
class Advice(Report):
    """A plan, and one reason per field with what was measured of it here. Shows as a table.

    baseline: the guide's "before"; presets: the task's own, name → (plan, what differs here), or (None, why it cannot
    train here). ratios: samples/s of the rules' plan and of the baseline over the plan's, in turns. lr_trial, verdict:
    what else was measured, None if it was not. samples: of the train split.
    """

    plan: Plan
    reasons: dict[str, str]
    baseline: Plan | None = None
    note: str = ""
    presets: dict[str, tuple[Plan | None, str]] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    lr_trial: LrTrial | None = None
    verdict: Verdict | None = None
    samples: int = 0

    def __post_init__(self) -> None:
        plain = {name for name, value in self.plan.to_dict().items() if value == getattr(Plan(), name, ...)}
        advised = {*self.reasons, *SPEED, *plain} & self.plan.to_dict().keys()  # the rest is the task's recipe
        object.__setattr__(self, "plan", self.plan.marked(advised))

    def table(self) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """Return one row per setting with its reason."""
        values = self.plan.to_dict()
        return ("setting", "value", "reason"), [(name, values[name], why) for name, why in self.reasons.items()]

    def caption(self) -> str:
        """Return samples, steps per epoch, in all and of warmup; and the time for them, and with the baseline's
        settings, where a step was measured."""
        length = length_of(self.plan, self.samples)
        if self.verdict is None:
            return f"{length} · time not measured yet."
        steps = self.plan.epochs * self.samples / self.verdict.timing.samples_per_s
        text = f"{length} · these take about {duration(steps)} at the measured speed"
        if not self.ratios.get("baseline"):
            return f"{text}."
        return f"{text}, {duration(steps / self.ratios['baseline'])} with the baseline's settings."

    def footer(self) -> str:
        guides = GUIDES if any("guide" in reason for reason in self.reasons.values()) else ""
        bound = sentence(self.verdict.sentence) if self.verdict else ""
        return "\n".join(filter(None, [bound, self.note, guides]))

    def _repr_html_(self) -> str:
        """Return what was decided or measured, with the other settings and where they were measured folded."""
        headers, rows = self.table()
        first = [row for row in rows if row[0] in ASKED or "measured here" in row[2]]
        others = [row for row in rows if row not in first]
        notes = [*map(note, self.footer().splitlines())]
        shown = notes[:1] if self.verdict else []
        inside = "".join([html(headers, others), *notes[len(shown) :]])
        folded = f"<details><summary>{plural(len(others), 'other setting')}, with reasons</summary>{inside}</details>"
        return "".join([html(headers, first, self.caption()), *shown, folded])

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], kind: type[Plan] = Plan) -> Self:
        """Return the advice of `to_dict` without its presets, which follow from the task. kind: of the plans."""
        plans = {name: values[name] and kind.from_dict(values[name]) for name in ("plan", "baseline")}
        return restore(cls, {**values, **plans, "presets": {}})


@dataclass(frozen=True)
class Machine:
    """Describe a machine to the rules. accelerator: cuda, mps or cpu; gigabytes: of the GPU's memory, 10⁹ bytes."""

    accelerator: str
    name: str
    gigabytes: float = 0
    gpus: int = 0
    cores: int = field(default_factory=cores)
    capability: tuple[int, int] | None = None


def inspect() -> Machine:
    """Return this machine."""
    device = devices.pick()
    if device.type != "cuda":
        return Machine(device.type, "Apple GPU" if device.type == "mps" else "CPU")
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    gpus = torch.cuda.device_count()
    return Machine("cuda", properties.name, devices.gigabytes(device), gpus, cores(), capability)


def decide(
    task: TaskLike, card: Card, machine: Machine, chosen: Choices | None = None, pretrained: bool = False
) -> Advice:
    """Return advice that depends on card and machine alone. chosen: what was measured; it goes first, then what the
    task suggests, and the rest follows from these. pretrained: whether the network's weights are."""
    task = as_task(task)
    plan, base = task.PLAN, task.BASELINE
    advised: Choices = {**task.suggest(card, machine.accelerator), **(chosen or {})}

    def value(name: str) -> Any:
        return advised[name][0] if name in advised else getattr(plan, name)

    advised.setdefault("batch_size", batch_size(card, machine, base.batch_size))
    batch = value("batch_size")
    origin = base if has_recipe(task, "lr") else starting(value("optimizer"), pretrained)
    advised.setdefault("lr", learning_rate(origin, value("optimizer"), batch))
    if (few := epochs_for_few(card, batch)) and not has_recipe(task, "epochs"):
        advised.setdefault("epochs", few)
    advised.setdefault("warmup_epochs", warmup(batch / base.batch_size, value("epochs")))
    if (seldom := evaluations(card, value("epochs"))) and plan.eval_every == 1:
        advised.setdefault("eval_every", seldom)
    advised.setdefault("amp", precision(machine))
    if value("feed") == "workers":
        many = min(machine.cores, MOST_PROCESSES)
        why = f"min({plural(machine.cores, 'core')}, {MOST_PROCESSES}), {THUMB} (ours)"
        advised.setdefault("workers", (many, why))
    if value("graph") and (machine.accelerator != "cuda" or value("amp") == "fp16"):
        advised["graph"] = False, f"CUDA graphs need CUDA and no fp16, but this is {machine.name}, amp {value('amp')}"
    if value("min_lr") > value("lr"):
        advised["min_lr"] = value("lr"), f"the task's {digits(value('min_lr'))} is above the advised lr"
    if plan.micro_batch_size is not None:
        advised.setdefault("micro_batch_size", (None, "the whole batch at once; training halves it if memory runs out"))
    made = plan.replace(**{name: value for name, (value, _) in advised.items()})
    own = dict.fromkeys(("channels_last", "compile", "graph"), (None, "the task's own"))  # shown in any case
    reasons = {name: {**own, **advised}[name][1] for name in made.to_dict() if name in {**own, **advised}}
    size = f"{machine.gigabytes:.0f} GB" if machine.gigabytes else plural(machine.cores, "core")
    note = f"For {machine.name} ({size}); a starting point: nothing here has been measured on it yet; "
    note += "(measured) means on other machines."
    return Advice(made, reasons, base, note, samples=card.splits["train"])


def enough(card: Card) -> int:
    """Return the largest batch that leaves a small data set its steps."""
    return min(max(card.splits["train"] // LEAST_STEPS, LEAST_BATCH), card.splits["train"])


def has_recipe(task: Task, name: str) -> bool:
    """Return whether the task itself gives a value to a setting."""
    return any(getattr(plan, name) != getattr(Plan(), name) for plan in (task.PLAN, task.BASELINE))


def starting(optimizer: str, pretrained: bool) -> Plan:
    """Return the lr at which a network without a recipe starts, and its batch."""
    return Plan(batch_size=64, lr=OPTIMIZERS[optimizer].lr / (20 if pretrained else 1))


def epochs_for_few(card: Card, batch: int) -> tuple[int, str] | None:
    """Return the epochs that give a small data set enough steps, and why; None where the default does."""
    train = card.splits["train"]
    epochs = -(-FEW_STEPS // batches_in(train, batch)) if 0 < train < FEW_SAMPLES else 0
    if epochs <= Plan().epochs:
        return None
    return epochs, f"about {FEW_STEPS:,} steps: {train:,} training samples are few, {THUMB} (ours)"


def batch_size(card: Card, machine: Machine, base: int) -> tuple[int, str]:
    train = card.splits["train"]
    batch, why = base, f"no CUDA GPU: the baseline's {base}"
    if machine.accelerator == "cuda":
        least, batch = devices.tier(machine.gigabytes, TIERS)
        why = f"{machine.gigabytes:.0f} GB of GPU memory, the tier from {least} GB: {batch}, {THUMB} ({CAPTCHA_GUIDE})"
    most = max(train // LEAST_STEPS, LEAST_BATCH)
    if batch > most:
        batch = max(1, min(2 ** (most.bit_length() - 1), train))
        why += f"; capped to {batch}: {train:,} training samples are few, {THUMB} (ours: {LEAST_STEPS} steps per epoch)"
    return batch, why


def learning_rate(base: Plan, optimizer: str, batch: int) -> tuple[float, str]:
    """Return lr by another plan's at its batch size and the rule for the optimizer; k is capped."""
    rule, source = OPTIMIZERS[optimizer].lr_rule
    k = batch / base.batch_size
    factor = lr_factor(rule, min(k, MOST_K))
    why = f"{digits(base.lr)} at batch {base.batch_size}, times {factor:.3g} by the {rule} rule, {THUMB} ({source})"
    return float(f"{base.lr * factor:.3g}"), why + (f"; no increase beyond {MOST_K} × the batch" if k > MOST_K else "")


def warmup(k: float, epochs: int) -> tuple[float, str]:
    least = next((least for times, _, (least, _) in LARGER if k <= times), LARGER[-1][2][0])
    capped = min(float(least), epochs / 5)
    why = f"{plural(least, 'epoch')} for {k:.3g} × the baseline's batch, {THUMB} ({LARGE_GUIDE})"
    return capped, why + (f"; capped to a fifth of {plural(epochs, 'epoch')}" if capped < least else "")


def evaluations(card: Card, epochs: int) -> tuple[int, str] | None:
    """Return the epochs between evaluations, so that these take at most a tenth of the time; None for each epoch."""
    share = card.splits.get("val", 0) * FORWARD / max(card.splits["train"], 1)
    every = min(math.ceil(share / EVALUATION_SHARE), max(epochs // 3, 1))
    if every <= 1:
        return None
    return every, f"one takes about {percent(share)} of an epoch's time: a sample a third of a step's, {THUMB} (ours)"


def precision(machine: Machine) -> tuple[str, str]:
    if machine.accelerator == "cpu":
        return "off", f"float32, {THUMB}: only CPUs with AMX or AVX512-BF16 are faster in bf16"
    if machine.accelerator != "cuda" or machine.capability is None:
        return "off", f"mixed precision has not been tried on {machine.accelerator}"
    shown = ".".join(map(str, machine.capability))
    if machine.capability >= (8, 0):
        return "bf16", f"compute capability {shown} has bfloat16 in hardware; it needs no loss scaling"
    if machine.capability >= (7, 0):
        return "fp16", f"compute capability {shown} has fp16 tensor cores, but only emulates bfloat16"
    return "off", f"compute capability {shown} has no tensor cores"
