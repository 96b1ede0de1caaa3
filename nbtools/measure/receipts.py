"""The receipt: a plan and the baseline it is to beat, and the rungs between them, trained in turns on the same machine
and data."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Self

import torch

from nbtools import table
from nbtools.data import Pack, Resident, choose
from nbtools.measure import rungs as ladders
from nbtools.measure.machine import machine
from nbtools.measure.pace import WARMUP_STEPS, Pace, Rate
from nbtools.measure.parts import padding, random_padding
from nbtools.measure.rungs import ALL, Rung, ahead, ladder
from nbtools.measure.untouched import untouched
from nbtools.train import Plan, Task, as_task
from nbtools.train import device as devices

ROUNDS, SECONDS = 3, 1.5
BLIND = 64  # the guides' batch, for what batches that are not grouped by length would pad
SHARE = 0.5  # of free GPU memory that the rungs between the ends may take


@dataclass(frozen=True)
class Receipt:
    """Before and after on this machine and this data: the same network, two ways to train it, and the rungs between
    them, () in receipts of older versions. Shows as a table.

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
    rungs: tuple[Rung, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        parts = {"before": Rate(**values["before"]), "after": Rate(**values["after"]), "notes": tuple(values["notes"])}
        rungs = tuple(Rung.from_dict(rung) for rung in values.get("rungs", ()))
        return cls(**{**values, **parts, "rungs": rungs})

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        """(headers, rows): a row a rung; without rungs, the ends beside each other."""
        if self.rungs:
            return ladders.HEADERS, ladders.rows(self.rungs)
        pair = (self.before, self.after)
        rows: list[tuple[str, ...]] = [
            ("samples/s", *(f"{r.samples_per_s:,.0f} ({r.least:,.0f}–{r.most:,.0f})" for r in pair)),
            ("waiting for data", *(f"{r.data_wait:.0%}" for r in pair)),
        ]
        changes = ladders.changed(self.before.plan, self.after.plan)
        rows += [(name, *change.split(" → ", 1)) for name, change in changes.items()]
        return ("", "baseline", "this run"), rows

    def caption(self) -> str:
        spread = f"{self.ratio_least:.2f}–{self.ratio_most:.2f}, n = {self.after.rounds}"
        return f"{self.ratio:.2f}× the baseline's samples/s on this machine ({spread})"

    def footer(self) -> str:
        names = {"before": "baseline", "after": "this run"}
        peaks = [f"{names[side]} {peak:,.0f} MiB" for side, peak in self.peak_memory.items() if side in names]
        memory = [f"Peak GPU memory: {', '.join(peaks)}."] if peaks else []
        return " ".join([*(f"{note}." for note in self.notes), *memory, ", ".join(self.machine.values())])

    def __str__(self) -> str:
        return f"{self.caption()}\n{table.text(*self.table())}\n{self.footer()}"

    def _repr_html_(self) -> str:
        return table.html(*self.table(), self.caption()) + table.html(("measured on",), [(self.footer(),)])

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)


def receipt(
    task: Task, pack: Pack, plan: Plan, device: torch.device | None = None, seconds: float = SECONDS
) -> Receipt:
    """Measure the task's BASELINE, a plan and the rungs between them in turns. seconds: of a turn, were there only
    two; more rungs have shorter ones, so that the whole takes as long."""
    where = device or devices.pick()
    baseline, notes = comparable(as_task(task).BASELINE, plan, pack)
    with untouched(where):
        rungs, peaks, more = climbed(task, pack, (baseline, plan), where, seconds)
    notes += [*more, *padding_of(pack, plan)]
    if "process" in peaks:
        notes.append("No GPU: what mixed precision, larger batches and resident data bring on one was not measured")
    first, last = rungs[0], rungs[-1]
    spread = last.total, last.total_least, last.total_most
    return Receipt(first.rate, last.rate, *spread, peaks, machine(), tuple(notes), rungs)


def climbed(
    task: Task, pack: Pack, ends: tuple[Plan, Plan], device: torch.device, seconds: float
) -> tuple[tuple[Rung, ...], dict[str, float], list[str]]:
    """(rungs, peak memory as in Receipt, notes)."""
    if device.type == "cuda":  # what training before this has freed counts as room for a resident pack
        gc.collect()
        torch.cuda.empty_cache()
    wanted = ladder(*ends, pack, device)
    resident = {name for name, plan in wanted if choose(pack, plan, device)[0] == "resident"}
    shared = Resident(pack, device) if resident else None
    course = Course(task, pack, device)
    for name, plan in (wanted[0], wanted[-1]):
        course.enter(name, plan, shared if name in resident else None)
    notes = course.refusal(len(wanted) - 2, seconds)
    for name, plan in () if notes else wanted[1:-1]:
        course.enter(name, plan, shared if name in resident else None)
    names = [name for name, _ in wanted if name in course.paces]
    for _ in range(ROUNDS):
        for name in names:
            course.turn(name, 2 * seconds / len(names))
    paces = [course.paces[name] for name in names]
    named = [*names[:-1], ALL] if notes else names
    rungs = ladders.measured(named, [p.rate() for p in paces], [[speed for speed, _ in p.rates] for p in paces])
    return rungs, course.memory(names[0], names[-1]), notes


class Course:
    """Plans in training side by side. By name: paces; peaks, MiB of GPU memory at most; ahead, batches that each one's
    feed makes ready while others have their turn. step: seconds of the slowest one's step; held: bytes of GPU memory of
    the largest one between its turns."""

    def __init__(self, task: Task, pack: Pack, device: torch.device):
        self.task, self.pack, self.device = task, pack, device
        self.paces: dict[str, Pace] = {}
        self.peaks: dict[str, float] = {}
        self.ahead: dict[str, int] = {}
        self.step, self.held = 0.0, 0

    def enter(self, name: str, plan: Plan, feed: Resident | None) -> None:
        cuda, before = self.device.type == "cuda", 0
        if cuda:
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self.ahead[name] = 0 if feed is not None else ahead(plan, self.pack, self.device)
        pace = self.paces[name] = Pace(self.task, self.pack, plan, self.device, feed)
        start = perf_counter()
        pace.advance(steps=1)
        self.step = max(self.step, perf_counter() - start)
        if cuda:
            peak = torch.cuda.max_memory_allocated(self.device) - before + (self.pack.bytes if feed is not None else 0)
            self.peaks[name] = peak / 2**20
            self.held = max(self.held, torch.cuda.memory_allocated(self.device) - before)

    def refusal(self, number: int, seconds: float) -> list[str]:
        """Why so many more plans would take too long or too much memory; [] where they do not."""
        longer = number * (WARMUP_STEPS + 1 + ROUNDS) * self.step
        if longer > 2 * seconds * ROUNDS:
            return [f"A step takes {self.step:.1f} s: of the rungs only the ends were measured"]
        if self.device.type == "cuda" and number * self.held > SHARE * torch.cuda.mem_get_info(self.device)[0]:
            return ["GPU memory has no room for more models: of the rungs only the ends were measured"]
        return []

    def memory(self, first: str, last: str) -> dict[str, float]:
        """MiB at most, as in Receipt; a shared pack counts for each that shares it."""
        if self.peaks:
            return {"before": self.peaks[first], "after": self.peaks[last]}
        return {"process": devices.resident() / 2**20}

    def turn(self, name: str, seconds: float) -> None:
        pace = self.paces[name]
        pace.advance(steps=self.ahead[name])
        pace.advance(seconds, steps=1)


def padding_of(pack: Pack, plan: Plan) -> list[str]:
    """What the plan pads, and what batches drawn blindly would, of the column by whose length batches are grouped."""
    column = pack.card.bucket_by
    if column is None:
        return []
    blind = random_padding(pack, column, BLIND)
    return [
        f"Padding is {padding(pack, plan)[column]:.1%} of {column} at batch {plan.batch_size}, for both, since batches "
        f"are grouped by length; random batches of {BLIND} would pad {blind:.1%}"
    ]


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
