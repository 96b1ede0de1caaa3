"""Measurements on the user's machine: how fast a plan trains here, and the receipt that compares two of them."""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Self

import torch

from nbtools import gpu, table
from nbtools.device import resident
from nbtools.loop import train
from nbtools.pack import Pack
from nbtools.plan import Plan
from nbtools.state import Task, TrainState

ROUNDS, SECONDS, WARMUP_STEPS = 3, 1.5, 3


@dataclass(frozen=True)
class Rate:
    """How a plan trains here: medians over rounds. data_wait: the share of the time that waited for data, 0–1."""

    plan: dict[str, Any]
    samples_per_s: float
    least: float
    most: float
    data_wait: float
    rounds: int


@dataclass(frozen=True)
class Receipt:
    """Before and after on this machine and this data: the same network, two ways to train it. Shows as a table.

    ratio: the median over rounds of after / before, measured in turns, with its least and most. peak_memory: MiB, of
    the GPU for either; without one, of the whole process for both together.
    """

    before: Rate
    after: Rate
    ratio: float
    ratio_least: float
    ratio_most: float
    peak_memory: dict[str, float]
    machine: dict[str, str]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        parts = {"before": Rate(**values["before"]), "after": Rate(**values["after"]), "notes": tuple(values["notes"])}
        return cls(**{**values, **parts})

    def rows(self) -> list[tuple[str, ...]]:
        pair = (self.before, self.after)
        rows: list[tuple[str, ...]] = [
            ("samples/s", *(f"{r.samples_per_s:,.0f} ({r.least:,.0f}–{r.most:,.0f})" for r in pair)),
            ("waiting for data", *(f"{r.data_wait:.0%}" for r in pair)),
        ]
        for name in ("feed", "workers", "batch_size", "amp", "compile", "channels_last", "optimizer"):
            values = [str(r.plan[name]) for r in pair]
            if values[0] != values[1]:
                rows.append((name, *values))
        memory = [
            f"{self.peak_memory[side]:,.0f} MiB" if side in self.peak_memory else "" for side in ("before", "after")
        ]
        if any(memory):
            rows.append(("peak GPU memory", *memory))
        return rows

    def caption(self) -> str:
        spread = f"{self.ratio_least:.2f}–{self.ratio_most:.2f}, n = {self.after.rounds}"
        return f"{self.ratio:.2f}× the baseline's samples/s on this machine ({spread})"

    def footer(self) -> str:
        return " ".join([*(f"{note}." for note in self.notes), ", ".join(self.machine.values())])

    def __str__(self) -> str:
        rows = table.text(("", "baseline", "this run"), self.rows())
        return f"{self.caption()}\n{rows}\n{self.footer()}"

    def _repr_html_(self) -> str:
        rows = table.html(("", "baseline", "this run"), self.rows(), self.caption())
        return rows + table.html(("measured on",), [(self.footer(),)])

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)


class Pace:
    """A plan in training, stepped for a while at a time, so that two can be measured in turns. Its lr is tiny:
    a full one without the warmup may lose the loss."""

    def __init__(self, task: Task, pack: Pack, plan: Plan, device: torch.device | None = None):
        endless = plan.replace(epochs=10**6, eval_every=10**6, warmup_epochs=0.0, early_stop=None)
        endless = endless.replace(schedule="constant", lr=1e-12, min_lr=0.0)
        self.plan, self.state = plan, TrainState(task, pack, endless, device)
        self.steps = train(task, self.state, pack)
        self.rates: list[tuple[float, float]] = []  # (samples/s, data-wait share) of each round
        self.advance(steps=WARMUP_STEPS)

    def advance(self, seconds: float = 0.0, steps: int = 0) -> None:
        """At least so long and so many steps, to the device's end; a row in `rates` where seconds are given."""
        self.synchronize()
        start, begun, waited = perf_counter(), self.state.samples, 0.0
        done = 0
        while done < steps or perf_counter() - start < seconds:
            before = self.state.waited
            if next(self.steps).kind == "step":
                done += 1
                waited += max(self.state.waited - before, 0.0)
        self.synchronize()
        if seconds:
            took = perf_counter() - start
            self.rates.append(((self.state.samples - begun) / took, waited / took))

    def synchronize(self) -> None:
        if self.state.device.type == "cuda":
            torch.cuda.synchronize(self.state.device)

    def rate(self) -> Rate:
        speeds, waits = zip(*self.rates, strict=True)
        return Rate(
            plan=self.plan.to_dict(),
            samples_per_s=statistics.median(speeds),
            least=min(speeds),
            most=max(speeds),
            data_wait=statistics.median(waits),
            rounds=len(speeds),
        )


def receipt(
    task: Task, pack: Pack, plan: Plan, device: torch.device | None = None, seconds: float = SECONDS
) -> Receipt:
    """Measure the task's BASELINE and a plan in turns, a few seconds each."""
    baseline, notes = comparable(task.BASELINE, plan, pack)
    paces, peaks = [], {}
    for side, candidate in (("before", baseline), ("after", plan)):
        held = 0
        if torch.cuda.is_available():
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        paces.append(Pace(task, pack, candidate, device))
        if torch.cuda.is_available():
            peaks[side] = (torch.cuda.max_memory_allocated() - held) / 2**20
    for _ in range(ROUNDS):
        for pace in paces:
            pace.advance(seconds, steps=1)
    before, after = (pace.rate() for pace in paces)
    ratios = [b[0] / a[0] for a, b in zip(paces[0].rates, paces[1].rates, strict=True)]
    if not peaks:
        peaks = {"process": resident() / 2**20}
        notes.append("No GPU: the GPU's levers (mixed precision, larger batches, resident data) were not measured")
    return Receipt(before, after, statistics.median(ratios), min(ratios), max(ratios), peaks, machine(), tuple(notes))


def comparable(baseline: Plan, plan: Plan, pack: Pack) -> tuple[Plan, list[str]]:
    """The baseline's way to train, with the run's own network and loss: a smaller network is no speed-up."""
    own = {f.name for f in dataclasses.fields(plan)} - {f.name for f in dataclasses.fields(Plan)}
    changes: dict[str, Any] = {name: getattr(plan, name) for name in own}
    changes["batch_size"] = min(baseline.batch_size, pack.splits["train"])
    notes = ["Both train the same network"]
    if pack.raw is None:
        changes["feed"] = "auto"
        notes.append("The source files are gone: both read the pack, and the data part was not measured")
    return baseline.replace(**changes), notes


def machine() -> dict[str, str]:
    """What a figure is worth nothing without: device, cores, versions."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else gpu.cpu_name()
    return {
        "device": device,
        "cores": f"{gpu.cores()} CPU cores, {torch.get_num_threads()} threads",
        "torch": f"torch {torch.__version__}",
        "python": f"Python {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
    }
