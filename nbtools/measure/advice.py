"""Advice: a plan with a reason for each number, and what was measured for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from nbtools import table
from nbtools.measure.figures import Tried
from nbtools.measure.finder import Finding
from nbtools.measure.ladder import Ladder, Reference, moved
from nbtools.measure.profile import StepProfile
from nbtools.measure.verdict import Verdict
from nbtools.measure.workers import WorkersFinding
from nbtools.train import Plan


@dataclass(frozen=True)
class Advice:
    """A plan, one reason a field, and the evidence of those that were measured. Shows as a table.

    The panel's presets: baseline, the guide's "before", and largest, the largest batch that the rules allow, None where
    `largest_reason` says that there is none larger. precision, batches, workers, profile: the measurements, None where
    there was none; verdict: what this plan is bound by here.
    """

    plan: Plan
    reasons: dict[str, str]
    baseline: Plan | None = None
    note: str = ""
    largest: Plan | None = None
    largest_reason: str = ""
    evidence: dict[str, str] = field(default_factory=dict)
    precision: Tried | None = None
    batches: Finding | None = None
    workers: WorkersFinding | None = None
    profile: StepProfile | None = None
    verdict: Verdict | None = None

    @property
    def ladder(self) -> Ladder:
        """What goes with another batch, from the largest down: lr by the optimizer's rule, and as many forward passes
        as it takes where a size does not fit at once, or was not tried."""
        plan = self.plan
        reference = Reference(plan.batch_size, plan.lr, "linear" if plan.optimizer == "sgd" else "sqrt")
        sizes = {(self.largest or plan).batch_size, *(plan.batch_size * part // 4 for part in (4, 3, 2, 1))} - {0}
        fits, why = self.at_once()
        return Ladder(tuple(moved(reference, size, fits, why) for size in sorted(sizes, reverse=True)))

    def at_once(self) -> tuple[int, str]:
        """(samples that one forward pass takes, why not more): as measured, else by the rules."""
        if self.batches is None or not any(row.fits for row in self.batches.rows):
            largest = self.largest or self.plan
            return largest.micro_batch_size or largest.batch_size, "rule of thumb for this GPU's memory (guide 2)"
        most = max(row.batch_size for row in self.batches.rows if row.fits)
        beyond = [row.batch_size for row in self.batches.rows if not row.fits]
        return most, f"{min(beyond)} does not fit at once" if beyond else f"more than {most} at once was not tried"

    def rows(self) -> list[tuple[Any, ...]]:
        values = self.plan.to_dict()
        rows = [(name, values[name], reason) for name, reason in self.reasons.items()]
        return [(*row, self.evidence.get(row[0], "")) for row in rows] if self.evidence else rows

    def headers(self) -> tuple[str, ...]:
        return ("knob", "value", "reason", "measured here")[: 4 if self.evidence else 3]

    def footer(self) -> str:
        return " ".join(filter(None, [self.verdict and f"{self.verdict.sentence}.", self.note]))

    def __str__(self) -> str:
        return "\n".join(filter(None, [table.text(self.headers(), self.rows()), self.footer()]))

    def _repr_html_(self) -> str:
        return table.html(self.headers(), self.rows(), self.footer())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], kind: type[Plan]) -> Self:
        """kind: of the plans."""
        plans = {name: values[name] and kind.from_dict(values[name]) for name in ("plan", "baseline", "largest")}
        found = {
            name: values[name] and made.from_dict(values[name])
            for name, made in (
                ("batches", Finding),
                ("workers", WorkersFinding),
                ("profile", StepProfile),
                ("verdict", Verdict),
            )
        }
        tried = values["precision"] and Tried(**values["precision"])
        return cls(**{**values, **plans, **found, "precision": tried})
