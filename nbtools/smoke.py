"""Whether a task trains on this machine at all: one step, saved, loaded, with equal answers, without a data set."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from nbtools import table
from nbtools.data import open_feed
from nbtools.errors import TrainError
from nbtools.folder import begin
from nbtools.measure import advise
from nbtools.train import Batch, TaskLike, TrainState, as_task, checkpoint, evaluation, step, task_name
from nbtools.train import device as devices

COUNT, BATCH = 48, 4  # demo samples written; of a step


@dataclass(frozen=True)
class Smoke:
    """What was done, with seconds and what came of it. Shows as a table."""

    task: str
    device: str
    rows: tuple[tuple[str, float, str], ...]

    def __str__(self) -> str:
        return f"{self.task} on {self.device}: it works\n{table.text(HEADERS, self.shown())}"

    def _repr_html_(self) -> str:
        return table.html(HEADERS, self.shown(), f"{self.task} on {self.device}: it works")

    def shown(self) -> list[tuple[str, str, str]]:
        return [(what, f"{seconds:.2f}", said) for what, seconds, said in self.rows]


HEADERS = ("step", "seconds", "")


def smoke(task: TaskLike, device: torch.device | str | None = None, **knobs: Any) -> Smoke:
    """A random batch of the task's demo data through forward, backward, optimizer, checkpoint and back, in seconds.

    A task whose networks cannot all read what its `demo` writes by default names other options in SMOKE. knobs:
    settings of the plan, in place of those that the rules advise for this machine; the batch has 4 samples. Writes to a
    temporary folder only. Raises TrainError if a loss is not a number or the loaded weights answer differently, and
    whatever a part that does not work raises.
    """
    task = as_task(task)
    where = torch.device(device) if device is not None else devices.pick()
    rows: list[tuple[str, float, str]] = []
    began = perf_counter()

    def done(what: str, said: str) -> None:
        nonlocal began
        rows.append((what, perf_counter() - began, said))
        began = perf_counter()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pack = task.pack(task.demo(folder / "raw", COUNT, **task.SMOKE), into=folder / "pack", progress=False)
        done("data", f"{table.plural(len(pack), 'sample')} written and packed")
        plan = advise(task, pack, measure=False).plan.turn(**knobs)
        plan = plan.replace(batch_size=min(BATCH, pack.splits["train"]), micro_batch_size=None)
        state, twin = (TrainState(task, pack, plan, where) for _ in range(2))
        done("model", f"{sum(p.numel() for p in state.parameters):,} parameters")
        raw = next(iter(open_feed(pack, plan, where)([pack.ids("train")[: plan.batch_size]])))
        loss_sum, count = step(state, raw, pack.splits["train"])
        done("step", f"loss {checked(float(loss_sum) / max(float(count), 1)):.4g}")
        begin(folder / "run", pack, state)
        done("save", "the checkpoint is written")
        checkpoint.load(folder / "run", twin)
        if not equal(*(answers(task, one, raw) for one in (state, twin))):
            raise TrainError(
                "the loaded weights must answer as the saved ones, and they differ: is the forward pass random in eval?"
            )
        done("load", "the loaded weights give equal answers")
    return Smoke(task_name(task), str(where), tuple(rows))


def checked(loss: float) -> float:
    if not math.isfinite(loss):
        raise TrainError(f"the loss of the first step is {loss}; train with amp=off, and look at the labels")
    return loss


def answers(task: Any, state: TrainState, raw: Batch) -> list[Any]:
    return tree_leaves(evaluation.forward(task, state.evaluated, raw, state.plan, state.device)[1])


def equal(ours: list[Any], theirs: list[Any]) -> bool:
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(ours, theirs, strict=True))
