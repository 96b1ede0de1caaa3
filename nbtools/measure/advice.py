"""Advice by rules of thumb, labelled as what they are: the plan to start from, before `nb.advise` measures."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from nbtools.data import Card, batches_in, cores
from nbtools.errors import sentence
from nbtools.measure.finders import LrTrial
from nbtools.measure.profile import LEAST_STEPS, Verdict
from nbtools.show import Report, digits, html, note, percent, plural, restore, timing
from nbtools.train import LR_FACTORS, OPTIMIZERS, Plan, Task, TaskLike, as_task
from nbtools.train import device as devices

TIERS = ((40, 512), (24, 256), (12, 128), (0, 64))  # GB of GPU memory → batch (captcha guide)
LARGER = {1: 0, 2: 3, 4: 5, 8: 10, 16: 20}  # batch times → least epochs of warmup (a guide's, not measured by us)
MOST_K = max(LARGER)  # beyond it Adam's best lr falls again (arXiv 2405.14578); the guide's table ends there too
FEW_SAMPLES, FEW_STEPS, LONG_S = 10_000, 1_500, 600.0  # below which training takes so many steps, in so many seconds
FORWARD, EVALUATION_SHARE = 1 / 3, 0.1  # evaluation's time per sample over training's; its largest share of the time
MOST_PROCESSES = 8  # that read files: more wait for the same disk
ASKED = ("epochs", "batch_size", "lr", "amp")  # settings that a notebook shows wherever they come from
LEAST_BATCH = 8  # a smaller one gives BatchNorm poor statistics
THUMB = "rule of thumb"
WARMING = 10  # a network without a recipe warms up for its epochs over this: fewer trainings with a high lr fail
BROKEN = {"mps": {"channels_last": (False, "batch norm is wrong with it on MPS (pytorch#175189)")}}
SPEED = ("amp", "channels_last", "feed", "workers", "prefetch", "compile", "graph", "micro_batch_size")
"""Settings that are advice's to choose, whether or not it tried them."""

Choice = tuple[Any, str]  # a value, and why
Choices = dict[str, Choice]


@dataclass(frozen=True, repr=False)
class Advice(Report):
    """A plan, with reasons for its settings and what was measured here. Shows as a table.

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
        built_in = type(self.plan).__module__.startswith("nbtools.tasks.")  # has another recipe for each machine
        object.__setattr__(self, "plan", self.plan.marked(self.plan.to_dict() if built_in else advised))

    def table(self) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        values = self.plan.to_dict()
        return ("setting", "value", "reason"), [(name, values[name], why) for name, why in self.reasons.items()]

    def caption(self) -> str:
        """Return samples and steps, and the time for them where a step was measured."""
        length = self.plan.length_of(self.samples)
        if self.verdict is None:
            return f"{length} · time not measured yet."
        seconds = self.plan.epochs * self.samples / self.verdict.timing.samples_per_s
        ratio = self.ratios.get("baseline")
        before = f", {timing(seconds / ratio)} with the baseline's settings" if ratio else ""
        return f"{length} · about {timing(seconds)} at the measured speed{before}."

    def footer(self) -> str:
        return "\n".join(filter(None, [sentence(self.verdict.sentence) if self.verdict else "", self.note]))

    def _repr_html_(self) -> str:
        """Return what was decided or measured, with the other settings folded."""
        headers, rows = self.table()
        first = [row for row in rows if row[0] in ASKED or "measured here" in row[2]]
        others = [row for row in rows if row not in first]
        title = f"<summary style='display: list-item'>{plural(len(others), 'other setting')}, with reasons</summary>"
        folded = f"<details>{title}{html(headers, others)}{note(self.note)}</details>"
        bound = note(sentence(self.verdict.sentence)) if self.verdict else ""
        return f"{html(headers, first, self.caption())}{bound}{folded}"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], kind: type[Plan] = Plan) -> Self:
        """Return the advice of `to_dict` without its presets, which follow from the task. kind: of the plans."""
        plans = {name: values[name] and kind(**values[name]) for name in ("plan", "baseline")}
        return restore(cls, {**values, **plans, "presets": {}})


@dataclass(frozen=True)
class Machine:
    """Describe a machine to the rules. accelerator: cuda, mps or cpu; gigabytes: of the GPU's memory, 10⁹ bytes."""

    accelerator: str
    name: str
    gigabytes: float = 0
    cores: int = field(default_factory=cores)
    capability: tuple[int, int] | None = None


def inspect() -> Machine:
    device = devices.pick()
    if device.type != "cuda":
        return Machine(device.type, "Apple GPU" if device.type == "mps" else "CPU")
    gpu = torch.cuda.get_device_properties(device)
    return Machine("cuda", gpu.name, devices.gigabytes(device), cores(), (gpu.major, gpu.minor))


def decide(
    task: TaskLike, card: Card, machine: Machine, chosen: Choices | None = None, pretrained: bool = False
) -> Advice:
    """Return advice for card and machine: first what was chosen (measured), then what the task suggests, then rules."""
    task = as_task(task)
    plan, base = task.PLAN, task.BASELINE
    advised = {**task.suggest(card, machine.accelerator), **(chosen or {}), **BROKEN.get(machine.accelerator, {})}

    def value(name: str) -> Any:
        return advised[name][0] if name in advised else getattr(plan, name)

    advised.setdefault("batch_size", batch_size(card, machine, base.batch_size))
    batch, fresh = value("batch_size"), Plan(batch_size=64, lr=OPTIMIZERS[value("optimizer")].lr)
    start = base if has_recipe(task, "lr") else fresh.replace(lr=fresh.lr / 20) if pretrained else fresh
    advised.setdefault("lr", learning_rate(start, value("optimizer"), batch))
    if not has_recipe(task, "epochs") and (few := more_epochs(card, batch)):
        advised.setdefault("epochs", few)
    advised.setdefault("warmup_epochs", warmup(batch / base.batch_size, value("epochs"), has_recipe(task, "lr")))
    advised.setdefault("amp", precision(machine))
    if seldom := evaluations(plan, card, value("epochs")):
        advised.setdefault("eval_every", seldom)
    if value("feed") == "workers":
        why = f"min({plural(machine.cores, 'core')}, {MOST_PROCESSES}), {THUMB} (ours)"
        advised.setdefault("workers", (min(machine.cores, MOST_PROCESSES), why))
    if value("min_lr") > value("lr"):
        advised["min_lr"] = value("lr"), f"the task's {digits(value('min_lr'))} is above the advised lr"
    if plan.micro_batch_size is not None:
        advised.setdefault("micro_batch_size", (None, "the whole batch at once; training halves it if memory runs out"))
    made = plan.replace(**{name: value for name, (value, _) in advised.items()})
    own = dict.fromkeys(("channels_last", "compile", "graph"), (None, "the task's own"))  # shown in any case
    reasons = {name: {**own, **advised}[name][1] for name in made.to_dict() if name in {**own, **advised}}
    size = f"{machine.gigabytes:.0f} GB" if machine.gigabytes else plural(machine.cores, "core")
    note = f"For {machine.name} ({size}); a starting point: not measured on this machine yet; guides: docs/guides.md."
    return Advice(made, reasons, base, note, samples=card.splits["train"])


def has_recipe(task: Task, name: str) -> bool:
    """Return whether the task itself gives a value to a setting."""
    return any(getattr(plan, name) != getattr(Plan(), name) for plan in (task.PLAN, task.BASELINE))


def enough(card: Card) -> int:
    """Return the largest batch that leaves a small data set its steps."""
    return min(max(card.splits["train"] // LEAST_STEPS, LEAST_BATCH), card.splits["train"])


def batch_size(card: Card, machine: Machine, base: int) -> Choice:
    batch, most, why = base, enough(card), f"no CUDA GPU: the baseline's {base}, {THUMB}"
    if machine.accelerator == "cuda":
        least, batch = devices.tier(machine.gigabytes, TIERS)
        why = f"{machine.gigabytes:.0f} GB of GPU memory, the tier from {least} GB: {batch}, {THUMB} (captcha guide)"
    if batch > most:
        batch = max(1, most if most < LEAST_BATCH else 2 ** (most.bit_length() - 1))
        few = f"{card.splits['train']:,} training samples are few"
        why += f"; capped to {batch}: {few}, {THUMB} (ours: {LEAST_STEPS} steps per epoch)"
    return batch, why


def learning_rate(base: Plan, optimizer: str, batch: int) -> Choice:
    """Return lr by another plan's at its batch size and the rule for the optimizer; k is capped."""
    rule, source = OPTIMIZERS[optimizer].lr_rule
    k = batch / base.batch_size
    factor = LR_FACTORS[rule](min(k, MOST_K))
    why = f"{digits(base.lr)} at batch {base.batch_size}, times {factor:.3g} by the {rule} rule, {THUMB} ({source})"
    return float(f"{base.lr * factor:.3g}"), why + (f"; no increase beyond {MOST_K} × the batch" if k > MOST_K else "")


def more_epochs(card: Card, batch: int, epoch_s: float = 0.0) -> Choice | None:
    """Return the epochs that give a small data set its steps, in at most ten minutes, and why; None: the default."""
    train, default = card.splits["train"], Plan().epochs
    epochs = -(-FEW_STEPS // batches_in(train, batch)) if 0 < train < FEW_SAMPLES else 0
    if epochs * epoch_s > LONG_S and epochs > default:
        why = f"about {LONG_S / 60:.0f} minutes at the speed measured here, but at least the default"
        return max(int(LONG_S / epoch_s), default), why
    why = f"about {FEW_STEPS:,} steps: {train:,} training samples are few, {THUMB} (ours)"
    return (epochs, why) if epochs > default else None


def warmup(k: float, epochs: int, recipe: bool) -> Choice:
    if not recipe:  # the task has no lr of its own either
        return epochs / WARMING, f"a tenth of {plural(epochs, 'epoch')}, {THUMB} (ours)"
    least = next((least for times, least in LARGER.items() if k <= times), LARGER[MOST_K])
    capped = min(float(least), epochs / 5)
    why = f"{plural(least, 'epoch')} for {k:.3g} × the baseline's batch, {THUMB} (guide to large batches)"
    return capped, why + (f"; capped at a fifth of {plural(epochs, 'epoch')}" if capped < least else "")


def evaluations(plan: Plan, card: Card, epochs: int, price: float = 0.0) -> Choice | None:
    """Return the epochs between evaluations, so that these take at most a tenth of the time; None for the plan's own.
    price: what a validation sample takes over one that is trained on, 0 where that was not measured."""
    samples = min(card.splits.get("val", 0), plan.eval_samples or math.inf)
    share = samples * (price or FORWARD) / max(card.splits["train"], 1)
    every = min(math.ceil(share / EVALUATION_SHARE), max(epochs // 3, 1)) if plan.eval_every == 1 else 0
    how = "measured here" if price else f"a sample takes a third of training's, {THUMB} (ours)"
    why = f"an evaluation takes about {percent(share)} of an epoch's time: {how}"
    return (every, why) if every > (0 if price else 1) else None


def precision(machine: Machine) -> Choice:
    if machine.accelerator == "cpu":
        return "off", f"float32, {THUMB}: only CPUs with AMX or AVX512-BF16 are faster in bf16"
    if machine.accelerator != "cuda" or machine.capability is None:
        return "off", f"float32, {THUMB}: mixed precision has not been tried on {machine.accelerator}"
    shown = ".".join(map(str, machine.capability))
    if machine.capability >= (8, 0):
        return "bf16", f"compute capability {shown} has bfloat16, which needs no loss scaling, {THUMB}"
    if machine.capability >= (7, 0):
        return "fp16", f"compute capability {shown} has fp16 tensor cores, and emulates bfloat16, {THUMB}"
    return "off", f"compute capability {shown} has no tensor cores, {THUMB}"
