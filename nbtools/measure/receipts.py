"""The receipt: a plan and the baseline it is to beat, trained in turns on the same machine and data."""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass
from typing import Any, Self

import torch

from nbtools import table
from nbtools.device import resident
from nbtools.measure.pace import Pace, Rate, machine
from nbtools.pack import Pack
from nbtools.plan import Plan
from nbtools.state import Task

ROUNDS, SECONDS = 3, 1.5


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
