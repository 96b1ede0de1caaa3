"""Rules of thumb: a Plan from the device, the pack and the task, without measuring; the guides' tiers and tables stand
here as what they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nbtools.data import Card, cores
from nbtools.measure.advice import Advice
from nbtools.table import digits, plural
from nbtools.train import Plan, lr_factor
from nbtools.train import device as devices

TIERS = ((40, 512), (24, 256), (12, 128), (0, 64))  # GB of GPU memory → batch (guide 2)
NEARLY = 0.98  # torch sees a little less than is sold: 39.4 GiB (42.3 GB) of "40 GB", 22.0 GiB (23.7 GB) of "24 GB"
WARMUP = ((1, 0), (2, 3), (4, 5), (8, 10), (16, 20))  # the batch k times as large → epochs of warmup (guide 3)
MOST_K = 16  # beyond it Adam's best lr falls again (arXiv 2405.14578); the guides' table ends there too
LEAST_STEPS = 20  # optimizer steps an epoch below which a larger batch starves a small data set
LEAST_BATCH = 8  # a smaller one gives BatchNorm poor statistics
THUMB = "rule of thumb"


@dataclass(frozen=True)
class Machine:
    """What advice depends on. accelerator: cuda, mps or cpu; gigabytes: of the GPU's memory, 10⁹ bytes."""

    accelerator: str
    name: str
    gigabytes: float = 0
    gpus: int = 0
    cores: int = field(default_factory=cores)
    capability: tuple[int, int] | None = None


def inspect() -> Machine:
    """The machine as it is now."""
    device = devices.pick()
    if device.type != "cuda":
        return Machine(device.type, "Apple GPU" if device.type == "mps" else "CPU")
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    gigabytes = properties.total_memory / 1e9
    return Machine("cuda", properties.name, gigabytes, torch.cuda.device_count(), cores(), capability)


def decide(task: Any, card: Card, machine: Machine, found: Mapping[str, tuple[Any, str]] | None = None) -> Advice:
    """Pure: the same card and machine give the same advice. found: knob → (value, why) of what was measured; it goes
    first, then what the task suggests, and the rest follows from these."""
    plan, base = task.PLAN, task.BASELINE
    advised: dict[str, tuple[Any, str]] = {**suggested(task, card, machine), **(found or {})}

    def chosen(name: str) -> Any:
        return advised[name][0] if name in advised else getattr(plan, name)

    advised.setdefault("batch_size", batch_size(card, machine, base.batch_size))
    batch = chosen("batch_size")
    advised.setdefault("lr", learning_rate(base, chosen("optimizer"), batch))
    advised.setdefault("warmup_epochs", warmup(batch / base.batch_size, chosen("epochs")))
    advised.setdefault("amp", precision(machine))
    advised.setdefault("workers", workers(machine))
    if chosen("graph") and machine.accelerator != "cuda":
        advised["graph"] = False, f"CUDA graphs need CUDA, and this is {machine.name}"
    if chosen("min_lr") > chosen("lr"):
        advised["min_lr"] = chosen("lr"), f"the task's {digits(chosen('min_lr'))} is above the advised lr"
    if "micro_batch_size" not in advised and plan.micro_batch_size is not None:
        advised["micro_batch_size"] = None, "the whole batch at once; training halves it where memory ends"
    if chosen("graph") and (chosen("micro_batch_size") or batch) < batch:
        advised["graph"] = False, "CUDA graphs need the whole batch in one forward pass"
    made = plan.replace(**{name: value for name, (value, _) in advised.items()})
    reasons = {name: advised[name][1] for name in made.to_dict() if name in advised}
    size = f"{machine.gigabytes:.0f} GB" if machine.gigabytes else plural(machine.cores, "core")
    note = f"For {machine.name} ({size}); nothing here was measured on it yet, it is what to start from."
    largest, why = largest_batch(made, base, card, machine)
    return Advice(made, reasons, base, note, largest, why)


def suggested(task: Any, card: Card, machine: Machine) -> dict[str, tuple[Any, str]]:
    """Knob → (value, why) of the task's own."""
    return dict(task.suggest(card, machine.accelerator)) if hasattr(task, "suggest") else {}


def enough(card: Card) -> int:
    """The largest batch that leaves a small data set its steps."""
    return min(max(card.splits["train"] // LEAST_STEPS, LEAST_BATCH), card.splits["train"])


def memory_tier(machine: Machine) -> tuple[int, int]:
    """(GB from which it reaches up, its batch) of a CUDA GPU."""
    return next(tier for tier in TIERS if machine.gigabytes >= NEARLY * tier[0])


def batch_size(card: Card, machine: Machine, base: int) -> tuple[int, str]:
    train = card.splits["train"]
    if machine.accelerator == "cuda":
        least, batch = memory_tier(machine)
        why = f"{machine.gigabytes:.0f} GB of GPU memory, the tier from {least} GB: {batch}, {THUMB} (guide 2)"
    else:
        batch, why = base, f"no CUDA GPU: the baseline's {base}"
    most = max(train // LEAST_STEPS, LEAST_BATCH)
    if batch > most:
        batch = max(1, min(2 ** (most.bit_length() - 1), train))
        why += f"; capped to {batch}: {train:,} training samples are few, {THUMB} (ours: {LEAST_STEPS} steps an epoch)"
    return batch, why


def largest_batch(plan: Plan, base: Plan, card: Card, machine: Machine) -> tuple[Plan | None, str]:
    """The plan at the largest power of two that data and lr rules allow, on a GPU in forward passes of its tier."""
    train, most = card.splits["train"], MOST_K * base.batch_size
    bound, why = (
        most,
        f"{MOST_K} × the baseline's {base.batch_size}, where the lr rules end (guide 3, arXiv 2405.14578)",
    )
    if enough(card) < most:
        bound = enough(card)
        why = f"{LEAST_STEPS} steps an epoch of {train:,} training samples, or batch {LEAST_BATCH} (ours)"
    batch = 2 ** (max(bound, 1).bit_length() - 1)
    if batch <= plan.batch_size:
        return None, f"{THUMB}: the advised {plan.batch_size} is as large as it goes, by {why}"
    reason = f"{THUMB}: batch {batch}, by {why}"
    micro = plan.micro_batch_size
    if machine.accelerator == "cuda" and batch > (tier := memory_tier(machine))[1]:
        micro = min(micro or tier[1], tier[1])
        reason += f", in forward passes of {micro} for {machine.gigabytes:.0f} GB (guide 2)"
    lr, why_lr = learning_rate(plan, plan.optimizer, batch)
    warm = max(warmup(batch / base.batch_size, plan.epochs)[0], plan.warmup_epochs)
    changed = plan.replace(batch_size=batch, micro_batch_size=micro, lr=lr, warmup_epochs=warm)
    return changed, f"{reason}; lr {digits(lr)} from {why_lr}. Whether it is faster here, nobody has measured yet"


def learning_rate(base: Plan, optimizer: str, batch: int) -> tuple[float, str]:
    """From the baseline's lr at the baseline's batch, by the rule for the optimizer; k is capped."""
    rule, source = ("linear", "arXiv 1706.02677") if optimizer == "sgd" else ("sqrt", "arXiv 2205.10287")
    k = batch / base.batch_size
    factor = lr_factor(rule, min(k, MOST_K))
    why = f"{digits(base.lr)} at batch {base.batch_size}, times {factor:.3g} by the {rule} rule, {THUMB} ({source})"
    return float(f"{base.lr * factor:.3g}"), why + (f"; no more beyond {MOST_K} × the batch" if k > MOST_K else "")


def warmup(k: float, epochs: int) -> tuple[float, str]:
    found = next((e for bound, e in WARMUP if k <= bound), WARMUP[-1][1])
    capped = min(float(found), epochs / 5)
    why = f"{plural(found, 'epoch')} for a batch {k:.3g} times the baseline's, {THUMB} (guide 3)"
    return capped, why + (f"; capped to a fifth of {plural(epochs, 'epoch')}" if capped < found else "")


def workers(machine: Machine) -> tuple[int, str]:
    cores = plural(machine.cores, "core")
    why = f'min(4 a GPU, {cores}, 16), {THUMB} (guide 2); used by feed="workers" alone'
    return min(4 * max(machine.gpus, 1), machine.cores, 16), why


def precision(machine: Machine) -> tuple[str, str]:
    if machine.accelerator == "cpu":
        return "off", f"only some CPUs (AMX, AVX512-BF16) are faster in bf16: float32 until that is measured, {THUMB}"
    if machine.accelerator != "cuda" or machine.capability is None:
        return "off", f"mixed precision was never tried on {machine.accelerator}"
    shown = ".".join(map(str, machine.capability))
    if machine.capability >= (8, 0):
        return "bf16", f"compute capability {shown} has bfloat16 in hardware; it needs no loss scaling"
    if machine.capability >= (7, 0):
        return "fp16", f"compute capability {shown} has fp16 tensor cores, and only emulates bfloat16"
    return "off", f"compute capability {shown} has no tensor cores"
