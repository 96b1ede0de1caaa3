"""A Plan for this machine and this data set, with a reason for every number that differs from the task's own.

Decided from the device, the pack and the task; the guides' tiers and tables stand here as the rules of thumb they are.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from nbtools import device as devices
from nbtools import table
from nbtools.feed import choose
from nbtools.gpu import Gpu, cores, gpus
from nbtools.pack import Card, Pack
from nbtools.plan import Plan, lr_factor

TIERS = ((40, 512), (24, 256), (12, 128), (0, 64))  # GB of GPU memory → batch (guide 2)
WARMUP = ((1, 0), (2, 3), (4, 5), (8, 10), (16, 20))  # the batch k times as large → epochs of warmup (guide 3)
MOST_K = 16  # beyond it Adam's best lr falls again (arXiv 2405.14578); the guides' table ends there too
LEAST_STEPS = 20  # optimizer steps an epoch below which a larger batch starves a small data set
THUMB = "rule of thumb"


@dataclass(frozen=True)
class Advice:
    """A plan and one reason a field. Shows as a table. baseline: the guide's "before", for the panel's presets."""

    plan: Plan
    reasons: dict[str, str]
    baseline: Plan | None = None
    note: str = ""

    def rows(self) -> list[tuple[str, Any, str]]:
        values = self.plan.to_dict()
        return [(name, values[name], reason) for name, reason in self.reasons.items()]

    def __str__(self) -> str:
        return table.text(("knob", "value", "reason"), self.rows()) + (f"\n{self.note}" if self.note else "")

    def _repr_html_(self) -> str:
        return table.html(("knob", "value", "reason"), self.rows(), self.note)


@dataclass(frozen=True)
class Machine:
    """What advice depends on. accelerator: cuda, mps or cpu; gigabytes: of the GPU's memory."""

    accelerator: str
    name: str
    gigabytes: int = 0
    gpus: int = 0
    cores: int = field(default_factory=cores)
    capability: tuple[int, int] | None = None


def advise(task: Any, pack: Pack) -> Advice:
    """The plan to start from on this machine, each field with its reason."""
    machine = inspect()
    advice = decide(task, pack.card, machine)
    name, why = choose(pack, advice.plan, devices.pick())
    return dataclasses.replace(advice, reasons={**advice.reasons, "feed": f"{name}: {why}"})


def inspect() -> Machine:
    """The machine as it is now."""
    device = devices.pick()
    if device.type != "cuda":
        return Machine(device.type, "Apple GPU" if device.type == "mps" else "CPU")
    properties = torch.cuda.get_device_properties(device)
    found: list[Gpu] = gpus()
    size = Gpu(0, properties.name, memory_total=properties.total_memory // 2**20).gigabytes
    capability = (properties.major, properties.minor)
    return Machine("cuda", properties.name, size or 0, max(len(found), torch.cuda.device_count()), cores(), capability)


def decide(task: Any, card: Card, machine: Machine) -> Advice:
    """Pure: the same card and machine give the same advice."""
    plan, base = task.PLAN, task.BASELINE
    reasons: dict[str, str] = {}
    changes: dict[str, Any] = {}

    def take(name: str, value: Any, reason: str) -> None:
        changes[name], reasons[name] = value, reason

    batch, why = batch_size(card, machine, base.batch_size)
    take("batch_size", batch, why)
    take("lr", *learning_rate(plan, base, batch))
    take("warmup_epochs", *warmup(batch / base.batch_size, plan.epochs))
    take("amp", *precision(machine))
    workers = min(4 * max(machine.gpus, 1), machine.cores, 16)
    take(
        "workers", workers, f'min(4 a GPU, {machine.cores} cores, 16), {THUMB} (guide 2); used by feed="workers" alone'
    )
    suggested = task.suggest(card, machine.accelerator) if hasattr(task, "suggest") else {}
    for name, (value, reason) in suggested.items():
        take(name, value, reason)
    changes["min_lr"] = min(plan.min_lr, changes["lr"])
    changes["micro_batch_size"] = None
    changes["warmup_epochs"] = min(changes["warmup_epochs"], changes.get("epochs", plan.epochs))
    note = f"For {machine.name}" + (f" ({machine.gigabytes} GB)" if machine.gigabytes else f", {machine.cores} cores")
    return Advice(
        plan.replace(**changes), reasons, base, f"{note}; nothing here was measured yet, it is what to start from."
    )


def batch_size(card: Card, machine: Machine, base: int) -> tuple[int, str]:
    train = card.splits["train"]
    if machine.accelerator == "cuda":
        least, batch = next(tier for tier in TIERS if machine.gigabytes >= tier[0])
        why = f"{machine.gigabytes} GB of GPU memory, the tier from {least} GB: {batch}, {THUMB} (guide 2)"
    else:
        batch, why = base, f"no CUDA GPU: the baseline's {base}"
    most = max(1, train // LEAST_STEPS)
    if batch > most:
        batch = 2 ** (most.bit_length() - 1)
        why += f"; capped to {batch} so that {train:,} training samples give at least {LEAST_STEPS} steps an epoch"
    return min(batch, max(train, 1)), why


def learning_rate(plan: Plan, base: Plan, batch: int) -> tuple[float, str]:
    """From the baseline's lr at the baseline's batch, by the rule for the optimizer; k is capped."""
    rule = "linear" if plan.optimizer == "sgd" else "sqrt"
    source = "arXiv 1706.02677" if rule == "linear" else "arXiv 2205.10287"
    k = min(batch / base.batch_size, MOST_K)
    lr = base.lr * lr_factor(rule, k)
    return (
        lr,
        f"{base.lr:g} at batch {base.batch_size}, times {lr / base.lr:.3g} by the {rule} rule, {THUMB} ({source})",
    )


def warmup(k: float, epochs: int) -> tuple[float, str]:
    found = next((e for bound, e in WARMUP if k <= bound), WARMUP[-1][1])
    capped = min(float(found), epochs / 5)
    why = f"{found} epochs for a batch {k:.3g} times the baseline's, {THUMB} (guide 3)"
    return capped, why + (f"; capped to a fifth of {epochs} epochs" if capped < found else "")


def precision(machine: Machine) -> tuple[str, str]:
    if machine.accelerator != "cuda" or machine.capability is None:
        return "off", f"no tensor cores on {machine.accelerator}: mixed precision would only convert"
    shown = ".".join(map(str, machine.capability))
    if machine.capability >= (8, 0):
        return "bf16", f"compute capability {shown} has bfloat16 in hardware; it needs no loss scaling"
    if machine.capability >= (7, 0):
        return "fp16", f"compute capability {shown} has fp16 tensor cores, and only emulates bfloat16"
    return "off", f"compute capability {shown} has no tensor cores"
