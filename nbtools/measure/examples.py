"""What a check-up tries on: each task's networks with a little demo data, on the device and on the CPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nbtools.data import Pack
from nbtools.errors import PlanError
from nbtools.measure.advisor import advise
from nbtools.measure.stepper import untouched
from nbtools.measure.trials import first_losses
from nbtools.train import Plan, Task, TrainState, import_task, train
from nbtools.train import device as devices

EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "captcha": ("nbtools.tasks.captcha", {}),
    "captcha lines": ("nbtools.tasks.captcha", {"length": (3, 5)}),
    "hwdb": ("nbtools.tasks.hwdb", {"length": (3, 6)}),
    "sign": ("nbtools.tasks.sign", {"features": True}),
    "segment": ("nbtools.tasks.segment", {"size": (96, 128)}),
}
"""Name → (module of the task, options of its demo): data for all networks."""

SAMPLES, BATCH = 64, 8
STEPS, FEW = 20, 10  # whose losses are compared: on a GPU, on a CPU
SLOWER = 10.0  # times: with all of their lr at once fresh weights diverge in any precision
CPU = torch.device("cpu")


class NotHere(Exception):
    """There is nothing to try here; the message says why."""


@dataclass(frozen=True)
class Case:
    """A network with data for it, and the plan that the rules advise, with few samples a batch. steps: whose losses are
    compared."""

    task: Task
    pack: Pack
    plan: Plan
    steps: int

    def losses(self, device: torch.device, **changes: Any) -> list[float]:
        """The mean loss of each of the first steps from the same weights."""
        with untouched(device):
            return first_losses(self.task, self.pack, self.plan.replace(**changes), device, steps=self.steps)

    def run(self, device: torch.device, evaluating: bool = False, **changes: Any) -> tuple[list[float], TrainState]:
        """(the losses of two epochs, the state after them), evaluated after every third step where asked."""
        with untouched(device):
            state = TrainState(self.task, self.pack, self.plan.replace(**changes), device)
            losses = []
            for record in train(self.task, state, self.pack):
                losses += [record.values["loss"]] if record.kind == "step" and "loss" in record.values else []
                state.evaluate_next = evaluating and record.kind == "step" and state.step % 3 == 0
        return losses, state


class Bench:
    """The device, and cases on demo data, each made when first asked for."""

    def __init__(self, folder: Path, device: torch.device):
        self.folder, self.device, self.cuda = folder, device, device.type == "cuda"
        self.pack, self.reference = functools.cache(self.pack), functools.cache(self.reference)
        self.whole = functools.cache(self.whole)

    def pack(self, name: str) -> Pack:
        task, folder = task_of(name), self.folder / name
        raw = task.demo(folder / "raw", SAMPLES, **EXAMPLES[name][1])
        return task.pack(raw, into=folder / "pack", progress=False)

    def case(self, name: str, network: str = "auto") -> Case:
        """Raises NotHere where the network reads other data."""
        task, pack = task_of(name), self.pack(name)
        plan = advise(task, pack, measure=False).plan
        try:
            if network != "auto":
                plan = task.with_network(plan, pack, network).replace(network=network)
            course = {"epochs": 2, "eval_every": 2, "lr": plan.lr / SLOWER, "min_lr": 0.0, "warmup_epochs": 0.0}
            plain = {"schedule": "constant", "amp": "off", "compile": False, "graph": False, "ema": None}
            plan = plan.replace(batch_size=BATCH, micro_batch_size=None, **course, **plain)
            task.model(pack.card, plan)
        except PlanError as error:
            raise NotHere(str(error)) from None
        return Case(task, pack, plan, STEPS if self.cuda else FEW)

    def reference(self, name: str, network: str) -> list[float]:
        """The losses in float32 on the CPU."""
        return self.case(name, network).losses(CPU)

    def whole(self, name: str) -> tuple[list[float], TrainState]:
        """A run that nothing interrupts, whose data is on the device."""
        return self.case(name).run(self.device, feed="resident")

    def networks(self, name: str) -> list[str]:
        """On a GPU all that a task has; on a CPU the one that the rules advise there, and for signs both."""
        [choice] = [f for f in dataclasses.fields(task_of(name).PLAN) if f.name == "network"]
        named = [network for network in choice.metadata["choices"] if network != "auto"]
        return named if self.cuda or name == "sign" else ["auto"]

    def need(self, what: str, here: bool) -> None:
        if not here:
            raise NotHere(f"needs {what}")

    def each(self, here: bool = True) -> list[str]:
        """The examples that a part tries: where it has nothing to try, one, for a row that says so."""
        return [*EXAMPLES] if here else ["captcha"]


def task_of(name: str) -> Task:
    return import_task(EXAMPLES[name][0], "nb.checkup")


@contextmanager
def limited(device: torch.device, more: int) -> Iterator[None]:
    """Inside, this process gets at most so many more bytes of the device's memory."""
    devices.give_back(device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + more) / total, device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
