"""Contestants measured in turns: paired figures, medians and receipts, in one place for all benchmarks. Receipts are
written to results/, or to the folder that NBTOOLS_RESULTS names.

A machine's speed wanders by more than the differences that matter, so all contestants run in every round and a figure
is the median of what was found *within* rounds. CPU time is measured, not the clock's: neighbours then cost less.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from nbtools import disk, measure

RESULTS = Path(os.environ.get("NBTOOLS_RESULTS") or Path(__file__).parent / "results")


@dataclass(frozen=True)
class Figure:
    """The median of n values, with the least and the most of them."""

    name: str
    unit: str
    value: float
    n: int
    least: float
    most: float

    @classmethod
    def of(cls, name: str, unit: str, values: Sequence[float]) -> Self:
        return cls(name, unit, statistics.median(values), len(values), min(values), max(values))

    def __str__(self) -> str:
        """`name: value unit (n=…, spread least–most)`, the last line of every benchmark."""
        spread = f"{short(self.least)}–{short(self.most)}"
        return f"{self.name}: {short(self.value)} {self.unit} (n={self.n}, spread {spread})"


@dataclass(frozen=True)
class Receipt:
    """What a benchmark leaves: its headline, all other figures, and what they are worth nothing without."""

    headline: Figure
    figures: tuple[Figure, ...]
    conditions: Mapping[str, Any]
    machine: Mapping[str, str] = field(default_factory=measure.machine)
    version: str = disk.VERSION
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"))
    load: tuple[float, ...] = field(default_factory=lambda: tuple(round(x, 2) for x in os.getloadavg()))

    def write(self, folder: Path = RESULTS) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.headline.name}.json"
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n")
        return path

    def __str__(self) -> str:
        return "\n".join(map(str, [*self.figures, self.headline]))


def short(value: float) -> str:
    """Three digits, or all of them before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def in_turns(contestants: Mapping[str, Callable[[], float]], rounds: int, slices: int = 1) -> dict[str, list[float]]:
    """The sum of what each contestant returned in each round of so many slices; another one begins each slice."""
    names = list(contestants)
    found: dict[str, list[float]] = {name: [0.0] * rounds for name in names}
    for k in range(rounds * slices):
        first = k % len(names)
        for name in names[first:] + names[:first]:
            found[name][k // slices] += contestants[name]()
    return found


def above(found: Mapping[str, Sequence[float]], name: str, base: str) -> list[float]:
    """By how much a contestant exceeded another, round by round."""
    return [a - b for a, b in zip(found[name], found[base], strict=True)]


def times(found: Mapping[str, Sequence[float]], slower: str, faster: str) -> list[float]:
    """How many times as much one contestant needed, round by round."""
    return [a / b for a, b in zip(found[slower], found[faster], strict=True)]


def on_one_core() -> dict[str, str]:
    """Keep this process and its children on one core with one thread; returns the machine as it was before."""
    machine = measure.machine()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    return {**machine, "cores": f"{machine['cores'].split(',')[0]}, one used, 1 thread"}
