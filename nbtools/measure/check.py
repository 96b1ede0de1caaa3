"""The check of a machine, before anything is trained on it: GPUs, versions, memory, which precisions it can train in
and how fast its matrix products are in each."""

from __future__ import annotations

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

from nbtools import show
from nbtools.data import open_feed
from nbtools.disk import VERSION
from nbtools.errors import TrainError
from nbtools.measure.advisor import advise
from nbtools.measure.machine import Gpus, gpus, processor
from nbtools.measure.profile import matrix_rates, matrix_side
from nbtools.show import number, plural
from nbtools.train import Task, TrainState, checkpoint, evaluation, train_step
from nbtools.train import device as devices

SECONDS = 0.1  # of matrix products in each format


@dataclass(frozen=True)
class Arithmetic:
    """A floating-point format on the device that trains. here: whether it trains in it. flops: FLOP/s of square matrix
    products, the median of `n` with their least and most; None if they were not measured."""

    name: str
    here: str
    flops: float | None = None
    least: float = 0.0
    most: float = 0.0
    n: int = 0

    def row(self) -> tuple[str, str, str | None]:
        if self.flops is None:
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
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    machine = {
        "trains on": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "CPU": processor(),
        "nbtools": f"{VERSION}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        "torch": f"{torch.__version__}, {cuda}, {plural(torch.get_num_threads(), 'thread')}",
        "cuDNN": None if cudnn is None else str(cudnn),
        "driver": found[0].driver if found else None,
        "AMP": f"{devices.reduced(device)}, where nb.advise measures a gain",
    }
    return Check(found, machine, matrix_side(device), tuple(arithmetic(device)))


def arithmetic(device: torch.device) -> Iterator[Arithmetic]:
    """Yield each format: float32 as it is, and the faster ones that training may use."""
    before = torch.get_float32_matmul_precision()
    for name, (dtype, here) in formats(device).items():
        try:
            torch.set_float32_matmul_precision("high" if name == "TF32" else "highest")
            rates = None if dtype is None else [matrix_rates(device, dtype, s) for s in (0.02, SECONDS)][1]  # warm
        finally:
            torch.set_float32_matmul_precision(before)
        if rates:
            yield Arithmetic(name, here, median(rates), min(rates), max(rates), len(rates))
        else:
            yield Arithmetic(name, here)


def formats(device: torch.device) -> dict[str, tuple[torch.dtype | None, str]]:
    """Return format → (dtype to measure it with, whether it trains in it); None: not to be measured."""
    if device.type != "cuda":
        apple = device.type == "mps"
        return {
            "float32": (torch.float32, "yes"),
            "TF32": (None, "no: on NVIDIA GPUs from compute capability 8.0"),
            "bf16": (None, "not tried on MPS") if apple else (torch.bfloat16, "yes"),
            "fp16": (torch.float16, "yes") if apple else (None, "no: it needs a GPU"),
        }
    capability = torch.cuda.get_device_capability(device)
    shown = f"compute capability {'.'.join(map(str, capability))}"
    ampere = capability >= (8, 0)
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
