"""Time to accuracy: how long the baseline and a plan take to the same value of a metric, trained by the loop itself."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Self

import torch

from nbtools import table
from nbtools.data import Pack
from nbtools.errors import TrainError
from nbtools.measure.pace import machine
from nbtools.measure.receipts import comparable
from nbtools.measure.untouched import untouched
from nbtools.train import Diverged, Plan, Task, TrainState, best_metric, train
from nbtools.train import device as devices

SECONDS = 300.0  # that each may train, a seed

REACHED, OUT_OF_TIME, OUT_OF_EPOCHS, LOST = "reached", "out of time", "out of epochs", "lost the loss"
"""How one ends."""


@dataclass(frozen=True)
class Finish:
    """One plan trained from one seed. seconds: of training, from the opening of the feed to the end of the last epoch,
    evaluations apart; curve: (seconds, value) after each epoch."""

    plan: dict[str, Any]
    seed: int
    ended: str
    seconds: float
    eval_seconds: float
    steps: int
    curve: tuple[tuple[float, float], ...]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(**{**values, "curve": tuple((float(s), float(v)) for s, v in values["curve"])})

    @property
    def reached(self) -> bool:
        return self.ended == REACHED


@dataclass(frozen=True)
class Race:
    """The baseline and a plan on their way to a target, a Finish a seed. Shows as a table. lower: whether lower values
    of the metric are better."""

    metric: str
    target: float
    lower: bool
    before: tuple[Finish, ...]
    after: tuple[Finish, ...]
    notes: tuple[str, ...]
    machine: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        sides = {side: tuple(map(Finish.from_dict, values[side])) for side in ("before", "after")}
        return cls(**{**values, **sides, "notes": tuple(values["notes"])})

    @property
    def ratios(self) -> list[float]:
        """The baseline's seconds over the plan's, of the seeds with which both reached the target."""
        pairs = zip(self.before, self.after, strict=True)
        return [before.seconds / after.seconds for before, after in pairs if before.reached and after.reached]

    @property
    def bounds(self) -> list[float]:
        """What the ratio exceeds, of the seeds with which only the plan arrived before the baseline's time was out."""
        pairs = zip(self.before, self.after, strict=True)
        return [b.seconds / a.seconds for b, a in pairs if a.reached and b.ended == OUT_OF_TIME]

    def best(self, finish: Finish) -> float | None:
        values = [value for _, value in finish.curve]
        return (min(values) if self.lower else max(values)) if values else None

    def caption(self) -> str:
        """Says who did not arrive; a factor only over seeds with which both did."""
        goal = f"{self.metric} {'≤' if self.lower else '≥'} {self.target:g}"
        n, ratios = len(self.after), self.ratios
        missed = [
            f"{name} did not reach it with {n - arrived} of {table.plural(n, 'seed')}"
            for name, side in (("the baseline", self.before), ("this run", self.after))
            if (arrived := sum(finish.reached for finish in side)) < n
        ]
        if not ratios and self.bounds:
            missed.insert(0, f"more than {min(self.bounds):.2f}× as fast as the baseline")
        if ratios:
            spread = f"{min(ratios):.2f}–{max(ratios):.2f}, n = {len(ratios)}"
            missed.insert(0, f"{statistics.median(ratios):.2f}× as fast as the baseline ({spread})")
        return f"{goal}: {'; '.join(missed)}"

    def rows(self) -> list[tuple[Any, ...]]:
        """A row a seed and plan."""
        found = []
        for before, after in zip(self.before, self.after, strict=True):
            for name, finish in (("baseline", before), ("this run", after)):
                seconds = (f"{finish.seconds:,.1f} s", f"{finish.eval_seconds:,.1f} s")
                best = self.best(finish)
                value = None if best is None else f"{best:.4g}"
                found.append((name, finish.seed, finish.ended, *seconds, len(finish.curve), finish.steps, value))
        return found

    def table(self) -> tuple[Sequence[str], list[tuple[Any, ...]]]:
        headers = ("", "seed", "", "training", "evaluations", "epochs", "steps", f"best {self.metric}")
        return headers, self.rows()

    def footer(self) -> str:
        return " ".join([*(f"{note}." for note in self.notes), ", ".join(self.machine.values())])

    def __str__(self) -> str:
        return f"{self.caption()}\n{table.text(*self.table())}\n{self.footer()}"

    def _repr_html_(self) -> str:
        return table.html(*self.table(), self.caption()) + table.html(("measured on",), [(self.footer(),)])


def time_to(
    task: Task,
    pack: Pack,
    plan: Plan,
    target: float,
    metric: str | None = None,
    device: torch.device | None = None,
    baseline: Plan | None = None,
    seconds: float = SECONDS,
    seeds: Sequence[int] = (0,),
) -> Race:
    """Train the baseline and a plan until the validation's metric is the target, looked at after each epoch.

    metric: one of the task's, or `loss`, with a `-` where lower is better; None: the one that chooses the task's best
    checkpoint. baseline: None for the task's, with the plan's own network. seconds: that each may train with a seed;
    both are also over after the last of their epochs. Raises TrainError without a validation split or such a metric.
    """
    name, sign = best_metric(task) if metric is None else (metric.lstrip("-"), -1.0 if metric.startswith("-") else 1.0)
    if not len(pack.ids("val")):
        raise TrainError(f"{pack.folder}: time_to looks at the validation split, and it is empty; pack with val= more")
    if not seeds:
        raise TrainError("time_to needs at least one seed, got none; leave seeds out for one")
    where, notes = device or devices.pick(), []
    if baseline is None:
        baseline, notes = comparable(task.BASELINE, plan, pack)
    sides: tuple[list[Finish], list[Finish]] = [], []
    for seed in seeds:
        for side, each in zip(sides, (baseline, plan), strict=True):
            seeded = each.replace(seed=seed, eval_every=1, early_stop=None)
            with untouched(where):
                side.append(arrival(task, pack, seeded, where, (name, sign * target, sign), seconds))
    before, after = map(tuple, sides)
    return Race(name, target, sign < 0, before, after, tuple(notes), machine())


def arrival(
    task: Task, pack: Pack, plan: Plan, device: torch.device, goal: tuple[str, float, float], seconds: float
) -> Finish:
    """Train until the goal (metric, target times sign, sign), or out of time, epochs or numbers."""
    metric, target, sign = goal
    state = TrainState(task, pack, plan, device)
    start, looked, curve, ended = perf_counter(), 0.0, [], OUT_OF_EPOCHS
    try:
        for values in epochs(task, state, pack, start + seconds):
            looked += values["eval_time"]
            if f"val_{metric}" not in values:
                known = ", ".join(each.removeprefix("val_") for each in values if each.startswith("val_"))
                raise TrainError(f"the task has no metric {metric!r} to reach; it has {known}")
            curve.append((perf_counter() - start - looked, values[f"val_{metric}"]))
            if sign * curve[-1][1] >= target:
                ended = REACHED
                break
        else:
            ended = OUT_OF_EPOCHS if state.epoch >= plan.epochs else OUT_OF_TIME
    except Diverged:
        ended = LOST
    spent = curve[-1][0] if ended == REACHED else perf_counter() - start - looked
    return Finish(plan.to_dict(), plan.seed, ended, spent, looked, state.step, tuple(curve))


def epochs(task: Task, state: TrainState, pack: Pack, until: float) -> Iterator[dict[str, Any]]:
    """The rows of epochs, until a time of the clock that evaluations put off."""
    for record in train(task, state, pack):
        if record.kind == "epoch":
            yield record.values
            until += record.values["eval_time"]
        elif record.kind == "step" and perf_counter() > until:
            return
