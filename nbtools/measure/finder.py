"""The batch size: the smallest whose throughput is within 5 % of the best, measured on this machine.

The largest batch that fits is not the fastest, and rarely needed: past a knee throughput is flat. So batch sizes are
doubled until throughput no longer rises, memory, data or time end; then those about the knee, and sizes between, are
measured in turns (neighbours and clocks change a machine's speed by more than 5 %), until the choice is clear.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Self

import torch

from nbtools import disk, table
from nbtools.data import Pack
from nbtools.errors import TrainError
from nbtools.measure.memory import Room, room
from nbtools.measure.search import LATE, Candidate, Cap, Search
from nbtools.measure.trial import Trial
from nbtools.measure.untouched import untouched
from nbtools.train import Plan, Task
from nbtools.train import device as devices


@dataclass(frozen=True)
class Row:
    """What was found about one batch size. samples_per_s: the median over n turns, with their least and most; None: it
    was not timed. predicted, measured: bytes of a run at its peak with the largest samples; predicted from the two
    sizes measured before it, None for those two."""

    batch_size: int
    samples_per_s: float | None
    least: float | None
    most: float | None
    n: int
    predicted: int | None
    measured: int | None
    fits: bool


@dataclass(frozen=True)
class Finding:
    """A batch size and its evidence. Shows as a table.

    micro_batch_size: samples a forward pass for the plan's own batch size where that does not fit at once, else None.
    limit: bytes that a run may take, headroom off (10 %, of RAM 20 %); None where nobody knows. seconds: what that
    took. clock: CPU time or wall-clock time. complete: whether something else than the time ended the search for larger
    sizes.
    """

    batch_size: int
    micro_batch_size: int | None
    rows: tuple[Row, ...]
    limit: int | None
    limit_source: str
    seconds: float
    clock: str
    why: str
    complete: bool

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**{**values, "rows": tuple(Row(**row) for row in values["rows"])})

    def table_rows(self) -> list[tuple[Any, ...]]:
        best = max((row.samples_per_s or 0 for row in self.rows), default=0)
        return [
            (
                row.batch_size,
                f"{row.samples_per_s:,.0f} ({row.least:,.0f}–{row.most:,.0f}, n={row.n})" if row.n else None,
                f"{row.samples_per_s / best:.0%}" if row.samples_per_s else None,
                None if row.predicted is None else disk.human(row.predicted),
                None if row.measured is None else disk.human(row.measured),
                ("fits" if row.fits else "does not fit") + (" ← chosen" if row.batch_size == self.batch_size else ""),
            )
            for row in self.rows
        ]

    def __str__(self) -> str:
        return f"{table.text(HEADERS, self.table_rows())}\n{self.why}"

    def _repr_html_(self) -> str:
        return table.html(HEADERS, self.table_rows(), self.why)


HEADERS = ("batch", "samples/s", "of the best", "memory predicted", "measured", "")


def find_batch(
    task: Task,
    pack: Pack,
    plan: Plan,
    device: torch.device | str | None = None,
    seconds: float = 20.0,
    most: int | None = None,
    limit: int | None = None,
) -> Finding:
    """The smallest batch within 5 % of the best throughput that fits, for this plan on this machine.

    most: no larger one is considered (never one larger than the train split). limit: bytes to stay below instead of
    what is free now. seconds: about so long (up to 1.4 times on a busy machine), plus the first step and one or two of
    the largest batch. Nothing outside changes.
    Raises TrainError where not even one sample fits, or the train split has fewer than two.
    """
    device = torch.device(device) if device is not None else devices.pick()
    if pack.splits["train"] < 2:
        raise TrainError(f"{pack.folder}: the train split has {pack.splits['train']} sample(s); pack at least 2")
    with untouched(device):
        devices.give_back(device)  # what an earlier run left is free, though malloc may keep it
        free = room(device) if limit is None else Room(limit, "the limit given")
        found = searched(task, pack, plan, device, free, caps(pack, most), seconds)
    if isinstance(found, TrainError):
        raise found
    return found


def searched(
    task: Task, pack: Pack, plan: Plan, device: torch.device, free: Room | None, capped: list[Cap], seconds: float
) -> Finding | TrainError:
    """The finding or why there is none: an error that was raised would keep the trial and its memory for as long as a
    notebook shows it."""
    began = perf_counter()
    trial, reason = devices.within_memory(lambda: Trial(task, pack, plan, device))
    if trial is None:
        return TrainError(f"out of memory before the first step ({reason}); take a smaller network, or free memory")
    try:
        search = Search(trial, plan, free, min(capped), seconds)
        search.start()
        search.climb()
        search.turns()
    except TrainError as error:
        return error.with_traceback(None)
    return report(search, perf_counter() - began)


def caps(pack: Pack, most: int | None) -> list[Cap]:
    """(largest batch, why) by each rule that is no measurement of time or memory."""
    train = pack.splits["train"]
    found = [(train, f"the train split has {train:,} samples")]
    if most is not None:
        found.append((max(most, 1), f"no more than {most:,} were asked for"))
    return found


def report(search: Search, seconds: float) -> Finding:
    """The search as a value."""
    assert search.choice is not None
    size, wanted, line = search.choice.batch_size, search.plan.batch_size, search.line()
    micro = None
    if wanted > size and line is not None and search.too_much(line.at(wanted)):
        micro = size
    return Finding(
        batch_size=size,
        micro_batch_size=micro,
        rows=tuple(row_of(search.candidates[size]) for size in sorted(search.candidates)),
        limit=None if search.free is None else search.free.usable,
        limit_source="" if search.free is None else search.free.source,
        seconds=seconds,
        clock=search.trial.clock_name,
        why=reason_of(search, micro, seconds),
        complete=search.ended != LATE,
    )


def row_of(candidate: Candidate) -> Row:
    rates = candidate.rates or ([] if candidate.first is None else [candidate.first])
    shown = (statistics.median(rates), min(rates), max(rates)) if rates else (None, None, None)
    fits = not candidate.reason
    return Row(candidate.batch_size, *shown, len(rates), candidate.predicted, candidate.measured, fits)


def reason_of(search: Search, micro: int | None, seconds: float) -> str:
    """One sentence with the figures."""
    choice, candidates = search.choice, search.candidates
    assert choice is not None
    chosen, best = candidates[choice.batch_size], candidates[choice.best]
    rate = statistics.median(chosen.rates)
    if choice.batch_size == choice.best:
        said = f"batch {choice.batch_size}: the best rate found, {rate:,.0f} samples/s"
    else:
        said = f"batch {choice.batch_size}: {choice.ratio:.0%} of the best rate, that at {choice.best}"
        if chosen.measured and best.measured:
            said += f", with {chosen.measured / best.measured:.0%} of its memory"
    largest = max(c.batch_size for c in candidates.values() if c.first or c.rates)
    said += f"; none above {largest} was timed: {search.ended}"
    if micro is not None:
        said += f"; the plan's {search.plan.batch_size} does not fit at once: forward passes of {micro}, lr unchanged"
    if not choice.clear:
        said += "; close: another measurement may choose a neighbour"
    if search.plan.compile or search.plan.graph:
        said += "; measured without compiling"
    return f"{said}; measured {seconds:.1f} s"
