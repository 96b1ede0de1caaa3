"""The check of a machine, before anything is trained on it: GPUs, versions, memory, and how fast its matrix products
are in each precision; and of a task, before its data is there."""

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
from nbtools.measure.machine import Gpus, gpus, machine
from nbtools.measure.profile import matrix_rates
from nbtools.show import number, plural
from nbtools.train import Task, TrainState, checkpoint, evaluation, train_step
from nbtools.train import device as devices

SECONDS = 0.1  # of matrix products in each precision


@dataclass(frozen=True)
class Check:
    """Describe this machine. parts: part → what it is, None for what is not there; rates: precision → FLOP/s of square
    matrix products, a value a round. Shows as tables."""

    gpus: Gpus
    parts: dict[str, str | None]
    rates: dict[str, list[float]]

    def __str__(self) -> str:
        rows = []
        for name, each in self.rates.items():
            middle, least, most = (number(f(each) / 1e9) if each else "" for f in (median, min, max))
            rows.append((name, f"{middle} ({least}–{most}, n = {len(each)})" if each else "not on this device"))
        tables = [show.text(("machine", ""), [*self.parts.items()]), show.text(("matrix products", "GFLOP/s"), rows)]
        hint = "A plan for your data, measured: python -m nbtools advise TASK --data SOURCE"
        return "\n\n".join([str(self.gpus), *tables, hint])


def check() -> Check:
    """Look at this machine, and multiply matrices for a fraction of a second."""
    device, before = devices.pick(), torch.get_float32_matmul_precision()
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    here = machine()
    parts = {
        "trains on": f"{here['device']}, {here['cores']}",
        "nbtools": f"{VERSION}, {here['python']}, {platform.system()} {platform.machine()}",
        "torch": f"{torch.__version__}, {cuda}",
        "cuDNN": None if cudnn is None else str(cudnn),
        "AMP": f"{devices.reduced_precision(device)}, where nb.advise measures a gain",
    }
    dtypes: dict[str, torch.dtype | None]
    ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    dtypes = {"float32": torch.float32, "TF32": torch.float32 if ampere else None}
    dtypes |= {"bf16": torch.bfloat16 if ampere or device.type == "cpu" else None}
    dtypes |= {"fp16": torch.float16 if device.type in devices.FP16_DEVICES else None}
    rates = {name: list[float]() for name in dtypes}
    for name, dtype in dtypes.items():
        try:
            torch.set_float32_matmul_precision("high" if name == "TF32" else "highest")
            for seconds in (0.02, SECONDS) if dtype else ():  # the first round warms up
                rates[name] = matrix_rates(device, dtype or torch.float32, seconds)
        finally:
            torch.set_float32_matmul_precision(before)
    return Check(gpus(), parts, rates)


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
            raise TrainError(f"the loss of the first step is {loss}; train with amp=off, and check the labels")
        (folder / "run").mkdir()
        checkpoint.save(folder / "run", state, rows=0)
        checkpoint.load(folder / "run", loaded)
    answers = (evaluation.forward(task, one.evaluated, raw, plan, one.device)[1] for one in (state, loaded))
    if not all(map(torch.equal, *(map(torch.as_tensor, tree_leaves(answer)) for answer in answers))):
        rule = "the outputs of the loaded weights differ from those of the saved ones"
        raise TrainError(f"{rule}: is the forward pass random in eval?")
    return (
        f"it works on {state.device}: {plural(len(pack), 'demo sample')} packed, "
        f"{sum(p.numel() for p in state.parameters):,} parameters, first loss {number(loss)}; "
        "saved, and loaded with equal outputs"
    )
