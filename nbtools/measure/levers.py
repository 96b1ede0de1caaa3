"""Levers: settings for speed alone, each tried on real batches against the fastest plan so far, and kept where it is
reliably faster and the first losses agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from nbtools.data import Pack, batches_in
from nbtools.errors import NbtoolsError
from nbtools.measure.profile import Bench, StepProfile, Tried
from nbtools.measure.stepper import Clock, Stepper
from nbtools.measure.trials import COMPILE_PAYS, FASTER, LOSSES, alternative, in_turns, try_out, warmed
from nbtools.show import percent, plural
from nbtools.train import Plan, TaskLike, rehearse
from nbtools.train import device as devices

SHARE, LEAST, MOST = 1 / 90, 12.0, 60.0  # of the training that is expected, seconds: what measuring may take (ours)


class Levers:
    """The fastest plan so far, in training (None: memory ran out), and what was tried.

    tried: [(change, the value in its place before, whether it is kept)]. compiling: try that however short training is,
    and CUDA graphs.
    """

    def __init__(
        self,
        task: TaskLike,
        pack: Pack,
        plan: Plan,
        device: torch.device,
        clock: Clock | None = None,
        compiling: bool = False,
    ):
        self.task, self.pack, self.device, self.compiling = task, pack, device, compiling
        self.clock = clock or perf_counter
        self.tried: list[tuple[Tried, Any, bool]] = []
        self.run: Stepper | None = None
        self.step_s = 0.0
        devices.within_memory(lambda: self.begin(plan))

    def begin(self, plan: Plan) -> Stepper:
        stepper = Stepper(self.task, self.pack, plan, self.device, clock=self.clock)
        if self.run is None and not self.tried:
            rehearse(stepper.state, stepper.pack)
        run = warmed(stepper)
        self.run, self.step_s = run, run.advance().seconds
        return run

    def resume(self, plan: Plan) -> Stepper:
        """Go on from this plan, if it is another one than the fastest. Raises TrainError if memory runs out."""
        if self.run is not None and self.run.plan == plan:
            return self.run
        self.run = None
        return devices.required(lambda: self.begin(plan))

    @property
    def plan(self) -> Plan:
        assert self.run is not None
        return self.run.plan

    @property
    def training_s(self) -> float:
        """Seconds that all epochs' steps would take."""
        assert self.run is not None
        return self.plan.epochs * batches_in(self.run.pack.splits["train"], self.plan.batch_size) * self.step_s

    @property
    def budget(self) -> float:
        """Seconds for all measuring: a share of the training that it may make shorter."""
        return LEAST if self.run is None else min(max(SHARE * self.training_s, LEAST), MOST)

    def pull(self, name: str, seconds: float, most: float | None = None) -> bool:
        """Try the other value of a setting for about `seconds`, unless its fewest rounds take more than `most`
        (default: `seconds`); whether it is kept."""
        change = self.alternative(name)
        if self.run is None or not change:
            return False
        found, stepper = try_out(self.run, change, seconds, most or seconds, self.step_s)
        if found is None:
            return False
        kept = found.low >= FASTER and found.agrees
        self.tried.append((found, self.value(name), kept))
        if kept:
            self.run = stepper
            self.step_s /= found.ratio
        return kept

    def pull_all(self, names: Sequence[str], seconds: float) -> None:
        """Try settings one after another; what one leaves of its time, the others have."""
        names = [name for name in names if self.alternative(name)]
        over = self.clock() + seconds
        for k, name in enumerate(names):
            while self.pull(name, max(left := over - self.clock(), 0.0) / (len(names) - k), left):
                if name != "threads":
                    break  # else half of the half

    def over(self, baseline: Plan, seconds: float) -> Tried | None:
        """Another plan in turns with the fastest; None if it cannot train here."""
        assert self.run is not None
        now = self.plan.to_dict()
        change = {name: value for name, value in baseline.to_dict().items() if value != now[name]}
        try:
            return in_turns(self.run, change, seconds, least=2)[0]
        except (NbtoolsError, RuntimeError, OSError):  # its feed reads the source files; the advice is complete without
            return None

    def profile(self, seconds: float) -> StepProfile:
        """What a step of the fastest plan consists of, and what was tried and is not used."""
        start, bench = self.clock(), Bench(self.resume(self.plan))
        bench.advance(seconds)
        rejected = tuple(tried for tried, _, kept in self.tried if not kept)
        return dataclasses.replace(bench.profile(), trials=rejected, took=self.clock() - start)

    @property
    def trials(self) -> tuple[Tried, ...]:
        return tuple(tried for tried, *_ in self.tried)

    def value(self, name: str) -> Any:
        """What a setting comes to in the fastest plan."""
        assert self.run is not None
        resolved = {"feed": self.run.feed.name, "threads": self.plan.threads or devices.threads()}
        return resolved.get(name, getattr(self.plan, name))

    def alternative(self, name: str) -> dict[str, Any]:
        """The change to try; {}: there is none here. CUDA graphs only where asked, since recording may fail."""
        unasked = not self.compiling and (
            name == "graph" or (name == "compile" and self.run is not None and self.training_s < COMPILE_PAYS)
        )
        return {} if self.run is None or unasked else alternative(name, self.run)


def outcome(tried: Tried, before: Any) -> str:
    """What trying a setting gave, and why it is kept or not."""
    [(name, value)] = tried.change.items()
    new, old = worded(name, value), worded(name, before)
    if tried.failed:
        return f"{new}{tried.objection}"
    text = f"{new} {tried.ratio:.2f}× as fast as {old} ({tried.low:.2f}–{tried.high:.2f} in {tried.rounds} rounds)"
    if tried.low < FASTER:
        return f"{text}; it is used only where reliably {percent(FASTER - 1)} faster"
    if not tried.agrees or tried.drift is None:
        return text + tried.objection
    return f"{text}; losses of {LOSSES} steps within {percent(tried.drift, 2)}"


def worded(name: str, value: Any) -> str:
    """A setting's value in words: `bf16`, `float32`, `1 thread`, `channels_last=True`."""
    if name == "threads":
        return plural(value, "thread")
    return ("float32" if value == "off" else str(value)) if name == "amp" else f"{name}={value}"
