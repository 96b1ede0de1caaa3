"""The effective batch: micro × accumulation × processes, and what becomes of lr. Pure arithmetic, shown as a table.

Two ways down where memory ends: the effective batch stays, in more passes (lr stays too), or it changes, and lr follows
by a rule that is shown. The guides' ladders are both: 64 → 48 → 32 with its lr, and 1024 → 896 or 2 × 512.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from nbtools import table
from nbtools.errors import PlanError
from nbtools.train import Plan, lr_factor

SOURCES = {"sqrt": "arXiv 2205.10287", "linear": "arXiv 1706.02677"}


@dataclass(frozen=True)
class Rung:
    """One way to make an optimizer step. micro: samples a forward pass; effective: samples a step, of all processes;
    note: what was done to lr, and why."""

    effective: int
    micro: int
    accumulation: int
    processes: int
    lr: float
    note: str

    def plan(self, plan: Plan) -> Plan:
        """The plan that steps this way."""
        micro = None if self.accumulation == 1 else self.micro
        resized = plan.replace(batch_size=self.effective, micro_batch_size=micro)
        return resized.replace(lr=self.lr, min_lr=min(plan.min_lr, self.lr))

    def row(self) -> tuple[Any, ...]:
        return (self.micro, self.accumulation, self.processes, self.effective, table.digits(self.lr), self.note)


@dataclass(frozen=True)
class Ladder:
    """Rungs from the one that was wanted down. Shows as a table."""

    rungs: tuple[Rung, ...]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(tuple(Rung(**rung) for rung in values["rungs"]))

    def rows(self) -> list[tuple[Any, ...]]:
        return [rung.row() for rung in self.rungs]

    def __str__(self) -> str:
        return table.text(HEADERS, self.rows())

    def _repr_html_(self) -> str:
        return table.html(HEADERS, self.rows(), "effective = micro × accumulation × processes")


HEADERS = ("micro", "accumulation", "processes", "effective", "lr", "")


@dataclass(frozen=True)
class Reference:
    """The effective batch and lr that a rule counts from. digits: in which lr is said, 1.5: one and a half, as the
    guides round (0.00245 → 0.0025)."""

    batch_size: int
    lr: float
    rule: str = "sqrt"
    digits: float = 3

    def at(self, effective: int) -> float:
        return rounded(self.lr * lr_factor(self.rule, effective / self.batch_size), self.digits)

    def note(self, effective: int) -> str:
        k = effective / self.batch_size
        if self.rule == "none" or k == 1:
            return "lr stays" if k != 1 else "the reference"
        factor, base = lr_factor(self.rule, k), f"{table.digits(self.lr)} at batch {self.batch_size}"
        return f"{base}, times {factor:.3g} by the {self.rule} rule, rule of thumb ({SOURCES[self.rule]})"


def split(effective: int, fits: int, processes: int = 1) -> tuple[int, int]:
    """(micro, accumulation): the fewest forward passes, none above `fits` samples, that make the effective batch.

    Where it does not divide, passes differ by one sample and micro is the larger, as a step cuts its batch. Raises
    PlanError where processes cannot share it equally.
    """
    if min(effective, fits, processes) < 1:
        raise PlanError(f"effective, fits and processes must be ≥ 1, got {effective}, {fits} and {processes}")
    share, left = divmod(effective, processes)
    if left:
        near = max(share, 1) * processes
        raise PlanError(f"Plan.batch_size {effective} must be a multiple of {processes} processes; take {near}")
    accumulation = -(-share // fits)
    return -(-share // accumulation), accumulation


def kept(effective: int, lr: float, fits: int, processes: int = 1) -> Rung:
    """The same effective batch where only `fits` samples fit a forward pass: accumulation rises, lr stays."""
    micro, accumulation = split(effective, fits, processes)
    note = "at once" if accumulation == 1 else f"{effective // processes} does not fit at once: same step, lr stays"
    return Rung(effective, micro, accumulation, processes, lr, note)


def moved(reference: Reference, effective: int, fits: int, why: str) -> Rung:
    """An effective batch with lr by the reference's rule, in the fewest forward passes of at most `fits` samples; why
    not of more, where one is not enough."""
    micro, accumulation = split(effective, fits)
    passes = f"; in {accumulation} passes: {why}" if accumulation > 1 else ""
    return Rung(effective, micro, accumulation, 1, reference.at(effective), reference.note(effective) + passes)


def changed(reference: Reference, micro: int, processes: int = 1, accumulation: int = 1) -> Rung:
    """Another effective batch, its lr by the reference's rule."""
    effective = micro * accumulation * processes
    return Rung(effective, micro, accumulation, processes, reference.at(effective), reference.note(effective))


def ladder(
    reference: Reference, micros: Sequence[int], processes: int = 1, wanted: int | None = None, fits: int | None = None
) -> Ladder:
    """Rungs for a process's batch going down through `micros`, lr by rule; last, where `fits` is given, the wanted
    effective batch (the reference's where None) kept by accumulation."""
    rungs = [changed(reference, micro, processes) for micro in micros]
    if fits is not None:
        effective = wanted or reference.batch_size
        rungs.append(kept(effective, reference.at(effective), fits, processes))
    return Ladder(tuple(rungs))


def rounded(value: float, digits: float) -> float:
    """To so many significant digits; 1.5: to halves of the first one."""
    whole, half = math.floor(digits), digits % 1
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - whole + 1)
    step = unit / 2 if half else unit
    return float(f"{round(value / step) * step:.12g}")
