"""The check of a machine, before anything is trained on it: GPUs, versions, memory, which precisions it can train in
and how fast its matrix products are in each."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from nbtools import disk, show
from nbtools.data import cache, cores, open_feed
from nbtools.errors import TrainError
from nbtools.measure import memory
from nbtools.measure.advisor import advise
from nbtools.measure.machine import Gpus, cpu_name, gpus, instructions, pair
from nbtools.measure.profile import matrix_rates, matrix_side
from nbtools.show import number, plural
from nbtools.train import Task, TrainState, checkpoint, evaluation, train_step
from nbtools.train import device as devices
from nbtools.version import VERSION

DEVICES = {"cpu": "the processor", "mps": "Apple's GPU (MPS)"}
SECONDS = 0.1  # of matrix products in each format
BF16 = {"AMX BF16", "AVX-512 BF16", "BF16"}  # instructions of processors


@dataclass(frozen=True)
class Arithmetic:
    """A floating-point format on the device that trains. here: whether it trains in it, and why. flops: FLOP/s of
    square matrix products, the median of `n` with their least and most; None if they were not measured."""

    name: str
    here: str
    flops: float | None = None
    least: float | None = None
    most: float | None = None
    n: int = 0

    def row(self) -> tuple[str, str, str | None]:
        if self.flops is None or self.least is None or self.most is None:
            return self.name, self.here, None
        digits = [show.digits(float(f"{value / 1e9:.3g}")) for value in (self.flops, self.least, self.most)]
        return self.name, self.here, f"{digits[0]} ({digits[1]}–{digits[2]}, n = {self.n})"


@dataclass(frozen=True)
class Check:
    """What this machine is. machine: part → what it is, None for what is not there; side: of the matrices that were
    multiplied. Shows as tables."""

    gpus: Gpus
    machine: dict[str, str | None]
    side: int
    arithmetic: tuple[Arithmetic, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        products = f"products of {self.side:,} × {self.side:,}, GFLOP/s"
        parts = [
            show.text(*self.gpus.table()) if self.gpus else self.gpus.missing,
            show.text(("machine", ""), list(self.machine.items())),
            show.text(("format", "trains here", products), [each.row() for each in self.arithmetic]),
            "A plan for your data, measured: python -m nbtools advise TASK --data SOURCE",
        ]
        return "\n\n".join(filter(None, parts))


def check() -> Check:
    """Look at this machine, and multiply matrices for a fraction of a second."""
    device, found = devices.pick(), gpus()
    machine = parts_of(device, found)
    return Check(found, machine, matrix_side(device), tuple(arithmetic(device)))


def parts_of(device: torch.device, found: Gpus) -> dict[str, str | None]:
    """Return what trains, and what figures of this machine depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else DEVICES.get(device.type, str(device))
    own = ", ".join(instructions()) or "no vector instructions that nbtools knows"
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    ram, space, amp = memory.ram(), None, devices.reduced(device)
    with contextlib.suppress(OSError):
        space = f"{show.size(disk.free_bytes(cache()))} free for {cache()}"
    return {
        "trains on": name,
        "processor": f"{cpu_name()}, {plural(cores(), 'core')}: {own}",
        "RAM": None if ram is None else f"{pair(ram.bytes, memory.ram_in_all(), show.size)} free",
        "disk": space,
        "nbtools": f"{VERSION}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        "torch": f"{torch.__version__}, {cuda}, {plural(torch.get_num_threads(), 'thread')}",
        "cuDNN": None if cudnn is None else cudnn_version(cudnn),
        "driver": found[0].driver if found else None,
        "AMP": "not tried on this device" if amp == "off" else f"{amp}, where nb.advise measures a gain",
    }


def cudnn_version(number: int) -> str:
    """cudnnGetVersion's number: 8902 is 8.9.2, 90100 is 9.1.0."""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def arithmetic(device: torch.device) -> Iterator[Arithmetic]:
    """Each format: float32 as it is, and the faster ones that training may use."""
    before = torch.get_float32_matmul_precision()
    for name, (dtype, here) in formats(device).items():
        if dtype is None:
            yield Arithmetic(name, here)
            continue
        try:
            torch.set_float32_matmul_precision("high" if name == "TF32" else "highest")
            rates, why = devices.within_memory(lambda dtype=dtype: warm_rates(device, dtype))
        finally:
            torch.set_float32_matmul_precision(before)
        if rates is None:
            yield Arithmetic(name, f"{here}; not measured: {why}")
        else:
            yield Arithmetic(name, here, median(rates), min(rates), max(rates), len(rates))


def warm_rates(device: torch.device, dtype: torch.dtype) -> list[float]:
    """FLOP/s of each product, after some that load and choose kernels."""
    matrix_rates(device, dtype)
    return matrix_rates(device, dtype, SECONDS)


def formats(device: torch.device) -> dict[str, tuple[torch.dtype | None, str]]:
    """Format → (dtype to measure it with, whether it trains in it and why); None: not to be measured."""
    if device.type != "cuda":
        own = sorted(BF16.intersection(instructions()))
        bf16 = f"yes, {', '.join(own)}" if own else "slowly: the processor has no instructions for it"
        apple = device.type == "mps"
        return {
            "float32": (torch.float32, "yes"),
            "TF32": (None, "no: on NVIDIA GPUs from compute capability 8.0"),
            "bf16": (None if apple else torch.bfloat16, "not tried on MPS" if apple else bf16),
            "fp16": (torch.float16 if apple else None, "yes" if apple else "no: it needs a GPU"),
        }
    capability = torch.cuda.get_device_capability(device)
    ampere = capability >= (8, 0)
    shown = f"compute capability {'.'.join(map(str, capability))}"
    return {
        "float32": (torch.float32, "yes"),
        "TF32": (torch.float32, "yes, in place of float32") if ampere else (None, f"no: 8.0 or newer, not {shown}"),
        "bf16": (torch.bfloat16, "yes, tensor cores") if ampere else (None, f"only emulated: {shown}"),
        "fp16": (torch.float16, "yes, tensor cores" if capability >= (7, 0) else "yes, without tensor cores"),
    }


def smoke_test(task: Task, **knobs: Any) -> str:
    """One step on demo data, saved and loaded again, in a temporary folder; returns the result in a sentence. knobs:
    settings in place of the advised ones.

    Raises TrainError if the loss is not a number or the loaded weights give different outputs.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pack = task.pack(task.demo(folder / "raw", 48, **task.SMOKE), into=folder / "pack", progress=False)
        plan = advise(task, pack, measure=False).plan.turn(**knobs)
        plan = plan.replace(batch_size=min(4, pack.splits["train"]), micro_batch_size=None)
        state, loaded = TrainState(task, pack, plan), TrainState(task, pack, plan)
        raw = next(iter(open_feed(pack, plan, state.device)([pack.ids("train")[: plan.batch_size]])))
        total, count = train_step(state, raw, pack.splits["train"])
        loss = float(total) / max(float(count), 1)
        if not math.isfinite(loss):
            rule = f"the loss of the first step is {loss}"
            raise TrainError(f"{rule}; train with amp=off, and check the labels", entry="NaN")
        (folder / "run").mkdir()
        checkpoint.save(folder / "run", state, rows=0)
        checkpoint.load(folder / "run", loaded)
    answers = (evaluation.forward(task, one.evaluated, raw, plan, one.device)[1] for one in (state, loaded))
    if not all(map(torch.equal, *(map(torch.as_tensor, tree_leaves(answer)) for answer in answers))):
        rule = "the outputs of the loaded weights differ from those of the saved ones"
        raise TrainError(
            f"{rule}: is the forward pass random in eval?", entry="Predictions differ between training and inference"
        )
    return (
        f"it works on {state.device}: {plural(len(pack), 'demo sample')} packed, "
        f"{sum(p.numel() for p in state.parameters):,} parameters, first loss {number(loss)}; "
        "saved, and loaded with equal outputs"
    )
