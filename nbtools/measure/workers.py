"""How many DataLoader processes pay on this machine, and how many batches ahead: only for `feed="workers"`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Self

import torch

from nbtools import table
from nbtools.data import Pack, choose
from nbtools.measure.loaders import SLICES, Setting, tried
from nbtools.measure.machine import machine
from nbtools.measure.untouched import untouched
from nbtools.train import Plan, Task, require_sizes
from nbtools.train import device as devices

SECONDS = 8.0  # of measuring, the starts of workers aside
CLOSE = 0.95  # of the best rate: fewer processes that reach it are chosen


@dataclass(frozen=True)
class WorkersFinding:
    """The fewest workers, and batches ahead, within 5 % of the best rate; settings: the evidence, in the order tried.
    seconds: of the whole search."""

    workers: int
    prefetch: int
    reason: str
    settings: tuple[Setting, ...] = ()
    seconds: float = 0.0
    machine: dict[str, str] = dataclasses.field(default_factory=machine)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(**{**values, "settings": tuple(Setting(**each) for each in values["settings"])})

    def table(self) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        headers = ("workers", "prefetch", "samples/s", "spread", "waiting for data", "start", "")
        return headers, [row(each, self) for each in self.settings]

    def footer(self) -> str:
        return ", ".join([f"{SLICES} slices a setting, {self.seconds:.1f} s in all", *self.machine.values()])

    def __str__(self) -> str:
        if not self.settings:
            return self.reason
        return f"{self.reason}\n{table.text(*self.table())}\n{self.footer()}"

    def _repr_html_(self) -> str:
        if not self.settings:
            return table.html(("workers",), [(self.reason,)])
        return table.html(*self.table(), self.reason) + table.html(("measured on",), [(self.footer(),)])


def row(each: Setting, finding: WorkersFinding) -> tuple[Any, ...]:
    if each.skipped:
        return each.workers, each.prefetch, None, None, None, None, each.skipped
    chosen = (each.workers, each.prefetch) == (finding.workers, finding.prefetch)
    spread = f"{each.least:,.0f}–{each.most:,.0f}"
    rate, wait, start = f"{each.samples_per_s:,.0f}", f"{each.data_wait:.0%}", f"{each.start:.1f} s"
    return each.workers, each.prefetch, rate, spread, wait, start, "chosen" if chosen else ""


def find_workers(
    task: Task, pack: Pack, plan: Plan, device: torch.device | str | None = None, seconds: float = SECONDS
) -> WorkersFinding:
    """Measure a few settings, where the plan's feed has workers at all; otherwise say at once why there is nothing to.

    No setting is tried for which there are too few cores, too little RAM, or too small a /dev/shm: the last would end
    in a bus error. Raises TrainError where training, or this feed, cannot start.
    """
    where = torch.device(device) if device is not None else devices.pick()
    name, why = choose(pack, plan, where)
    if name != "workers":
        reason = f"the feed is {name} ({why}): no workers take part in it, there is nothing to measure"
        return WorkersFinding(plan.workers, plan.prefetch, reason)
    require_sizes(pack, plan)
    begun = perf_counter()
    with untouched(where):
        settings = tried(task, pack, plan, where, seconds)
    workers, prefetch, reason = chosen(settings)
    return WorkersFinding(workers, prefetch, reason, tuple(settings), perf_counter() - begun)


def chosen(settings: Sequence[Setting]) -> tuple[int, int, str]:
    """(workers, prefetch, reason): pure."""
    best = max(settings, key=lambda each: each.samples_per_s)
    near = [each for each in settings if each.samples_per_s >= CLOSE * best.samples_per_s and not each.skipped]
    pick = min(near, key=lambda each: (each.workers, each.prefetch))
    none = settings[0].samples_per_s
    share = "the best rate" if pick is best else f"{pick.samples_per_s / best.samples_per_s:.0%} of the best"
    if not pick.workers:
        return 0, pick.prefetch, f"no workers: {none:,.0f} samples/s without them is {share}"
    gain = f"{pick.samples_per_s:,.0f} samples/s is {share}, {pick.samples_per_s / none:.1f}× that without workers"
    wait = f"training still waits {pick.data_wait:.0%} of the time for data"
    return (
        pick.workers,
        pick.prefetch,
        f"{table.plural(pick.workers, 'worker')}, {table.plural(pick.prefetch, 'batch')} ahead of each: {gain}; {wait}",
    )
