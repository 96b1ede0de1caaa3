"""The receipt's ladder, decided: from the baseline's way to train to the run's, one group of knobs a rung."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from nbtools.data import Pack, choose
from nbtools.measure.pace import Rate
from nbtools.train import Plan, said

GROUPS = {
    "+ packed feed": ("feed", "workers", "prefetch"),
    "+ batch and lr": ("batch_size", "micro_batch_size"),
    "+ mixed precision": ("amp",),
    "+ compile, graph, layout": ("compile", "graph", "channels_last"),
}
"""In the guide's order, each with the knobs in which plans must differ for it to be a rung; OTHERS is one more, and
ALL is what a run is called that has no rungs."""

OTHERS, ALL = "+ the rest", "this run"
SILENT = (
    *("epochs", "lr", "lr_rule", "schedule", "warmup_epochs", "min_lr", "weight_decay", "betas"),
    *("eval_every", "early_stop", "patience", "seed"),
)
"""Knobs that make no step faster or slower."""


@dataclass(frozen=True)
class Rung:
    """One more group of knobs as the run has them. changes: knob → `before → now`. total: samples/s over the baseline,
    the median over rounds of what was measured in turns, with its least and most; factor: over the rung before, so that
    factors multiply to the total, with the least and most of the rounds.
    """

    name: str
    changes: dict[str, str]
    rate: Rate
    factor: float
    factor_least: float
    factor_most: float
    total: float
    total_least: float
    total_most: float

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(**{**values, "rate": Rate(**values["rate"])})


def ladder(baseline: Plan, plan: Plan, pack: Pack, device: torch.device) -> list[tuple[str, Plan]]:
    """(name, plan) from the baseline to the run, only those in which something differs that costs or saves time.

    A rung is the run's plan with the groups above it still as in the baseline, so each is a plan that can train.
    """
    every = {**GROUPS, OTHERS: rest(plan)}.items()
    groups = [(name, knobs) for name, knobs in every if differs(knobs, baseline, plan, pack, device)]
    found = [("baseline", baseline)]
    for k, (name, _) in enumerate(groups):
        above = [knob for _, knobs in groups[k + 1 :] for knob in knobs]
        found.append((name, plan.replace(**{knob: getattr(baseline, knob) for knob in above})))
    return found if groups else [*found, (ALL, plan)]


def rest(plan: Plan) -> tuple[str, ...]:
    """The knobs that are in no group, and not silent."""
    grouped = {knob for knobs in GROUPS.values() for knob in knobs}
    return tuple(f.name for f in dataclasses.fields(plan) if f.name not in grouped and f.name not in SILENT)


def differs(knobs: Sequence[str], one: Plan, other: Plan, pack: Pack, device: torch.device) -> bool:
    """Whether two plans train otherwise by these knobs; workers count only for a feed that has them."""
    if "feed" in knobs:
        return source(one, pack, device) != source(other, pack, device)
    return any(getattr(one, knob) != getattr(other, knob) for knob in knobs)


def source(plan: Plan, pack: Pack, device: torch.device) -> tuple[Any, ...]:
    """Where a plan's batches come from, and what of it matters there."""
    name, _ = choose(pack, plan, device)
    return {"resident": (name,), "streamed": (name, plan.prefetch)}.get(name, (name, plan.workers, plan.prefetch))


def measured(names: Sequence[str], rates: Sequence[Rate], rounds: Sequence[Sequence[float]]) -> tuple[Rung, ...]:
    """Rungs of samples/s: rounds[k] are those of rung k. The factors of the rungs multiply to the last total."""
    found: list[Rung] = []
    for k, (name, rate) in enumerate(zip(names, rates, strict=True)):
        ratios = over(rounds[k], rounds[0])
        total = statistics.median(ratios)
        before = found[-1] if found else None
        factor = total / before.total if before else 1.0
        steps = [factor, *over(rounds[k], rounds[k - 1])] if before else [factor]  # medians may be of different rounds
        changes = changed(before.rate.plan, rate.plan) if before else {}
        found.append(Rung(name, changes, rate, factor, min(steps), max(steps), total, min(ratios), max(ratios)))
    return tuple(found)


def over(speeds: Sequence[float], others: Sequence[float]) -> list[float]:
    return [speed / other for speed, other in zip(speeds, others, strict=True)]


def changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Knob → `before → now`, without those that make no difference."""
    unused = () if now["feed"] == "workers" else ("workers", "prefetch")
    differing = (name for name, value in now.items() if before.get(name) != value and name not in (*SILENT, *unused))
    return {name: f"{said(before.get(name))} → {said(now[name])}" for name in differing}


def ahead(plan: Plan, pack: Pack, device: torch.device) -> int:
    """Batches that its feed makes ready while others have their turn: to be trained before the clock starts."""
    name, _ = choose(pack, plan, device)
    return {"resident": 0, "streamed": plan.prefetch}.get(name, plan.prefetch * plan.workers)


HEADERS = ("", "samples/s", "over the rung before", "over the baseline", "waiting for data", "what changes")


def rows(rungs: Sequence[Rung]) -> list[tuple[Any, ...]]:
    """A row a rung, in the order of HEADERS; spreads are the least and most of the rounds."""
    found: list[tuple[Any, ...]] = []
    for k, rung in enumerate(rungs):
        speed = f"{rung.rate.samples_per_s:,.0f} ({rung.rate.least:,.0f}–{rung.rate.most:,.0f})"
        factor = f"{rung.factor:.2f}× ({rung.factor_least:.2f}–{rung.factor_most:.2f})" if k else None
        total = f"{rung.total:.2f}× ({rung.total_least:.2f}–{rung.total_most:.2f})" if k else None
        changes = ", ".join(f"{name} {change}" for name, change in rung.changes.items())
        found.append((rung.name, speed, factor, total, f"{rung.rate.data_wait:.0%}", changes))
    return found
