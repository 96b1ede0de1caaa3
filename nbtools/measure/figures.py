"""The figures of a train step: what a profile measured, as a value."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Self

from nbtools import table
from nbtools.measure.rates import Counts, Rates

AGREES = 0.02  # bf16 keeps 8 bits, 0.4 % a number; measured: at most 0.6 % (four tasks, three seeds each)


@dataclass(frozen=True)
class Tried:
    """A change of the plan. ratio: its samples/s over the plan's, the median over rounds; low, high: the quartiles.

    drift: of a faster precision, how far its first losses are from float32's, relative (see `tries.drift`), infinite
    where one of them is not a number; None where they were not compared. failed: why the model cannot be trained with
    it at all; the ratio is then 0.
    """

    change: dict[str, Any]
    ratio: float
    low: float
    high: float
    rounds: int
    drift: float | None = None
    failed: str = ""

    @property
    def agrees(self) -> bool:
        """Whether it learns the same, as far as that was checked."""
        return not self.failed and (self.drift is None or self.drift <= AGREES)


@dataclass(frozen=True)
class StepProfile:
    """How a plan trains here. Shows as a table.

    feed: the plan's; packed: what `feed="auto"` would take.
    samples_per_s: of the plan as it is, with least and most of `rounds`; ceiling: of the same step on one raw batch
    that lies on the device; ceiling_ratio: the first over the second, measured in turns.
    wait, host, device: shares of a step that wait for data, that launch (see `profile.py`), and the rest; together 1.
    batching, augmentation: shares of a step in `task.batch` without draws, and what the draws add.
    host_s, device_s, cached_s, small_s: seconds a step, on the cached batch, undisturbed (best of its repeats): of the
    host, of the device, of both, and of forward passes of two samples. device_s is an event's on CUDA, else the rest.
    evaluation_s, checkpoint_s: seconds of one evaluation (some batches, scaled to the split) and of one checkpoint
    (one written to a temporary folder).
    padding: ragged column → share of its elements that are padding, over an epoch of this plan, exact.
    memory: MiB. step: the most that a step takes beyond what is held (see `measure.memory`); held: weights, gradients
    and optimizer; on CUDA allocated and reserved too, of the whole process at that step's peak.
    trials: changes that were tried; untried: those that memory or time (a slow step) did not allow to try.
    syncs: `file:line` where a step makes the host wait (CUDA). took: seconds that all this took. shapes: different
    lengths of an epoch's batches, after Plan.bucket where a task has that knob; 1 where samples are of one size.
    """

    plan: dict[str, Any]
    device_type: str
    train_samples: int
    feed: str
    packed: str
    samples_per_s: float
    least: float
    most: float
    rounds: int
    ceiling: float
    ceiling_ratio: float
    wait: float
    host: float
    device: float
    batching: float
    augmentation: float
    host_s: float
    device_s: float
    cached_s: float
    small_s: float
    evaluation_s: float
    checkpoint_s: float
    padding: dict[str, float]
    memory: dict[str, float]
    counts: Counts
    rates: Rates
    trials: tuple[Tried, ...]
    untried: tuple[dict[str, Any], ...]
    syncs: tuple[str, ...]
    machine: dict[str, str]
    took: float
    shapes: int = 1

    @property
    def step_s(self) -> float:
        return self.plan["batch_size"] / self.samples_per_s

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch: its steps, and its part of an evaluation and of the checkpoint that may follow it."""
        return self.train_samples / self.samples_per_s + self.between_s / self.plan["eval_every"]

    @property
    def between_s(self) -> float:
        return self.evaluation_s + self.checkpoint_s

    @property
    def evaluation(self) -> float:
        """Share of an epoch."""
        return self.evaluation_s / self.plan["eval_every"] / self.epoch_s

    @property
    def checkpoint(self) -> float:
        """Share of an epoch, where each evaluation is followed by a checkpoint, as that of a better model is."""
        return self.checkpoint_s / self.plan["eval_every"] / self.epoch_s

    @property
    def floors(self) -> dict[str, float]:
        """Seconds below which a step cannot be: host, compute, memory."""
        return {**self.counts.floors(self.rates), "host": self.host_s}

    @property
    def flops_per_s(self) -> float:
        """Model FLOP/s of the plan as it is."""
        return self.counts.flops / self.counts.samples * self.samples_per_s

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        made = {
            "counts": Counts.from_dict(values["counts"]),
            "rates": Rates.from_dict(values["rates"]),
            "trials": tuple(Tried(**trial) for trial in values["trials"]),
            "untried": tuple(values["untried"]),
            "syncs": tuple(values["syncs"]),
        }
        return cls(**{**values, **made})

    def rows(self) -> list[tuple[str, str]]:
        spread = f"{self.least:,.0f}–{self.most:,.0f}, n = {self.rounds}"
        rows = [
            ("samples/s", f"{self.samples_per_s:,.0f} ({spread}) at batch {self.plan['batch_size']}"),
            ("ceiling", f"{self.ceiling:,.0f} samples/s on one cached batch; {self.ceiling_ratio:.0%} of it reached"),
            (
                "a step",
                f"{duration(self.step_s)}: data {self.wait:.0%}, host {self.host:.0%}, {self.device:.0%} device",
            ),
            ("batches", f"{self.batching:.0%} of a step to prepare them, {self.augmentation:.0%} to augment them"),
            ("an epoch", f"evaluation {self.evaluation:.0%}, checkpoint {self.checkpoint:.0%}"),
            ("arithmetic", f"{self.flops_per_s / 1e9:,.3g} of {self.rates.matrix / 1e9:,.3g} GFLOP/s"),
            ("memory", ", ".join(f"{name} {size:,.0f} MiB" for name, size in self.memory.items())),
        ]
        rows += [("padding", f"{share:.1%} of {column}") for column, share in self.padding.items()]
        rows += [
            ("tried", f"{shown(t.change)}: {t.ratio:.2f}× ({t.low:.2f}–{t.high:.2f}){apart(t)}") for t in self.trials
        ]
        return [*rows, *(("host waits at", place) for place in self.syncs)]

    def __str__(self) -> str:
        return table.text(("step", "measured"), self.rows())

    def _repr_html_(self) -> str:
        return table.html(("step", "measured"), self.rows(), f"Measured in {self.took:.1f} s")


def apart(trial: Tried) -> str:
    """The reason not to take a precision, however fast it is."""
    if trial.failed:
        return f", it fails ({trial.failed})"
    if trial.agrees or trial.drift is None:
        return ""
    far = f"differs by {trial.drift:.0%}" if math.isfinite(trial.drift) else "is not a number"
    return f", but its loss {far}"


def shown(change: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in change.items())


def duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
