"""How fast a plan trains here, measured in turns with others."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from nbtools.data import Feed, Pack
from nbtools.train import Plan, Task, TrainState, train

WARMUP_STEPS = 3


@dataclass(frozen=True)
class Rate:
    """How a plan trains here: medians over rounds. data_wait: the share of the time that waited for data, 0–1."""

    plan: dict[str, Any]
    samples_per_s: float
    least: float
    most: float
    data_wait: float
    rounds: int


class Pace:
    """A plan in training, stepped for a while at a time, so that several can be measured in turns. Its lr is tiny:
    a full one without the warmup may lose the loss. feed: one that is open, for several to share; None: the plan's."""

    def __init__(
        self, task: Task, pack: Pack, plan: Plan, device: torch.device | None = None, feed: Feed | None = None
    ):
        endless = plan.replace(epochs=10**6, eval_every=10**6, warmup_epochs=0.0, early_stop=None)
        endless = endless.replace(schedule="constant", lr=1e-12, min_lr=0.0)
        self.plan, self.state = plan, TrainState(task, pack, endless, device)
        self.steps = train(task, self.state, pack, feed)
        self.rates: list[tuple[float, float]] = []  # (samples/s, data-wait share) of each round
        self.advance(steps=WARMUP_STEPS)

    def advance(self, seconds: float = 0.0, steps: int = 0) -> None:
        """At least so long and so many steps, to the device's end; a row in `rates` where seconds are given."""
        self.synchronize()
        start, begun, waited = perf_counter(), self.state.samples, 0.0
        done = 0
        while done < steps or perf_counter() - start < seconds:
            before = self.state.waited
            if next(self.steps).kind == "step":
                done += 1
                waited += max(self.state.waited - before, 0.0)
        self.synchronize()
        if seconds:
            took = perf_counter() - start
            self.rates.append(((self.state.samples - begun) / took, waited / took))

    def synchronize(self) -> None:
        if self.state.device.type == "cuda":
            torch.cuda.synchronize(self.state.device)

    def rate(self) -> Rate:
        speeds, waits = zip(*self.rates, strict=True)
        return Rate(
            plan=self.plan.to_dict(),
            samples_per_s=statistics.median(speeds),
            least=min(speeds),
            most=max(speeds),
            data_wait=statistics.median(waits),
            rounds=len(speeds),
        )
