"""What a plan is bound by on this machine, and the one change most worth making: decided from a StepProfile alone, in
which every figure was measured."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from nbtools.measure.profile import StepProfile, Trial
from nbtools.measure.report import Report
from nbtools.show import percent, timing
from nbtools.train import Plan

WORTH = 1.1  # a smaller gain is within the noise of such a measurement: rule of thumb (ours)
BUSY = 3.0  # the fastest turn over the slowest: something else ran
HELPS = {
    "data": "A cheaper augmentation or smaller samples",
    "launch": "Fewer, larger layers",
    "compute": "A smaller network or smaller inputs",
    "memory": "A smaller network or smaller inputs",
}
"""What makes training faster where no setting does, by bound."""


@dataclass(frozen=True)
class Verdict(Report):
    """bound: data, launch, compute or memory. change: settings for `plan.turn`, None if no change is worth making;
    factor: the samples/s that it gave over the plan's. Shows as its sentence."""

    bound: str
    sentence: str
    change: dict[str, Any] | None
    factor: float | None

    def __str__(self) -> str:
        return self.sentence

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        return ("what limits it",), [(self.sentence,)]


def verdict(profile: StepProfile, plan: Plan, fixed: Collection[str] = ()) -> Verdict:
    """Return the bound and the one change. fixed: settings that may not change (a run that has started keeps some)."""
    bound = bound_by(profile)
    worth = [t for t in profile.trials if t.ratio >= WORTH and t.least > 1 and not set(t.change) & set(fixed)]
    best = max(worth, key=lambda trial: trial.ratio, default=None)
    text = f"{because(profile, bound)} {advised(best, profile, bound)}"
    here = profile.timing
    if here.most > BUSY * here.least:
        spread = f"{here.least:,.0f} to {here.most:,.0f} samples/s"
        text += f" Turns varied from {spread}: measure again on a quiet machine."
    return Verdict(bound, text, best and best.change, best and best.ratio)


def bound_by(profile: StepProfile) -> str:
    """Return waiting, launching or the device, whichever takes most; the device computes where its matrix products need
    more than half of its time at the rate measured here, else it moves tensors."""
    if profile.wait >= max(profile.host, profile.device):
        return "data"
    if profile.host >= profile.device:
        return "launch"
    return "compute" if profile.products >= 0.5 else "memory"


def because(profile: StepProfile, bound: str) -> str:
    step = f"of each {timing(profile.timing.step_s)} step"
    device = "processor" if profile.device_type == "cpu" else "GPU"
    if bound == "data":
        return f"Loading data is the limit: training waits for it {percent(profile.wait)} {step}."
    if bound == "launch":
        waits = f" The host waits for it at {profile.waits[0]}; do without that line." if profile.waits else ""
        return f"Kernel launches are the limit: the {device} waits for them {percent(profile.host)} {step}.{waits}"
    if bound == "compute":
        return f"The {device} is the limit: busy {percent(profile.device)} {step}."
    products = profile.products * profile.device
    return (
        f"Memory bandwidth is the limit: {percent(profile.device - products)} {step} goes into reading and writing "
        f"tensors, {percent(products)} into matrix products."
    )


def advised(best: Trial | None, profile: StepProfile, bound: str) -> str:
    """Return the change, or what was tried and what would help instead."""
    if best is not None:
        name = ", ".join(f"{setting}={value}" for setting, value in best.change.items())
        spread = f"{best.least:.2f}–{best.most:.2f}× in {best.rounds} turns with the plan"
        return f"{name} makes training {best.ratio:.2g}× as fast (measured: {spread})."
    tried = f"Tried: {'; '.join(map(str, profile.trials))}. " if profile.trials else ""
    return f"{tried}{HELPS[bound]} would help."
