"""Advice: a plan with a reason for each number, and what was measured for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from nbtools import table
from nbtools.measure import Finding, Ladder, StepProfile, Verdict, WorkersFinding
from nbtools.measure.ladder import Reference, ladder
from nbtools.plan import Plan


@dataclass(frozen=True)
class Advice:
    """A plan, one reason a field, and the evidence of those that were measured. Shows as a table.

    The panel's presets: baseline, the guide's "before", and largest, the largest batch that the rules allow, None where
    `largest_reason` says that there is none larger. batches, workers, profile: the measurements, None where there was
    none; verdict: what this plan is bound by here.
    """

    plan: Plan
    reasons: dict[str, str]
    baseline: Plan | None = None
    note: str = ""
    largest: Plan | None = None
    largest_reason: str = ""
    evidence: dict[str, str] = field(default_factory=dict)
    batches: Finding | None = None
    workers: WorkersFinding | None = None
    profile: StepProfile | None = None
    verdict: Verdict | None = None

    @property
    def ladder(self) -> Ladder:
        """What goes with another batch: smaller ones with lr by the optimizer's rule, and last the largest batch in as
        many passes of the advised one as it takes."""
        plan = self.plan
        reference = Reference(plan.batch_size, plan.lr, "linear" if plan.optimizer == "sgd" else "sqrt")
        sizes = dict.fromkeys(plan.batch_size * part // 4 for part in (4, 3, 2, 1))
        wanted = (self.largest or plan).batch_size
        return ladder(
            reference, [size for size in sizes if size], wanted=wanted, fits=plan.micro_batch_size or plan.batch_size
        )

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
        return cls(**{**values, **plans, **found})
