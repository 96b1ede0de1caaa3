"""The check of a machine, before anything is trained on it: GPUs, versions, memory, which precisions it can train in
and how fast its matrix products are in each; and of a task, before its data is there."""

from __future__ import annotations

import math
import platform
import tempfile
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
from nbtools.measure.machine import Gpus, gpus
from nbtools.measure.profile import matrix_rates, matrix_side
from nbtools.show import number, plural
from nbtools.train import Task, TrainState, checkpoint, evaluation, train_step
from nbtools.train import device as devices

SECONDS = 0.1  # of matrix products in each format


@dataclass(frozen=True)
class Check:
    """What this machine is. machine: part → what it is, None for what is not there. formats: (name, whether it trains
    in it); rates: name → FLOP/s of square matrix products, side by side. Shows as tables."""

    gpus: Gpus
    machine: dict[str, str | None]
    formats: dict[str, str]
    rates: dict[str, list[float]]
    side: int

    def __str__(self) -> str:
        products = f"products of {self.side:,} × {self.side:,}, GFLOP/s"
        rows = [(name, here, self.rate(name)) for name, here in self.formats.items()]
        parts = [
            str(self.gpus),
            show.text(("machine", ""), list(self.machine.items())),
            show.text(("format", "trains here", products), rows),
            "A plan for your data, measured: python -m nbtools advise TASK --data SOURCE",
        ]
        return "\n\n".join(parts)

    def rate(self, name: str) -> str | None:
        """Return the median with its spread; None where nothing was measured."""
        if not (each := self.rates.get(name)):
            return None
        middle, least, most = (show.digits(float(f"{f(each) / 1e9:.3g}")) for f in (median, min, max))
        return f"{middle} ({least}–{most}, n = {len(each)})"


def check() -> Check:
    """Look at this machine, and multiply matrices for a fraction of a second."""
    device, found, before = devices.pick(), gpus(), torch.get_float32_matmul_precision()
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    machine = {
        "trains on": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "nbtools": f"{VERSION}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        "torch": f"{torch.__version__}, {cuda}, {plural(torch.get_num_threads(), 'thread')}",
        "cuDNN": None if cudnn is None else str(cudnn),
        "AMP": f"{devices.reduced(device)}, where nb.advise measures a gain",
    }
    rates, kinds = dict[str, list[float]](), formats(device)
    for name, (dtype, _) in kinds.items():
        try:
            torch.set_float32_matmul_precision("high" if name == "TF32" else "highest")
            if dtype is not None:
                matrix_rates(device, dtype)  # warm
                rates[name] = matrix_rates(device, dtype, SECONDS)
        finally:
            torch.set_float32_matmul_precision(before)
    return Check(found, machine, {name: here for name, (_, here) in kinds.items()}, rates, matrix_side(device))


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
    """Train one step on demo data, saved and loaded again, in a temporary folder; return the result in a sentence.
    knobs: settings in place of the advised ones.

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
        entry = "Predictions differ between training and inference"
        raise TrainError(f"{rule}: is the forward pass random in eval?", entry=entry)
    return (
        f"it works on {state.device}: {plural(len(pack), 'demo sample')} packed, "
        f"{sum(p.numel() for p in state.parameters):,} parameters, first loss {number(loss)}; "
        "saved, and loaded with equal outputs"
    )
