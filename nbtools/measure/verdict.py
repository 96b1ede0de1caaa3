"""What a plan is bound by on this machine, and the one change most worth making: decided from a StepProfile alone.

Every figure in a verdict was measured by the profile or is computed from such figures; our own limits are labelled
rules of thumb.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from nbtools.measure.profile import StepProfile, Tried, shown
from nbtools.measure.report import Report
from nbtools.measure.trials import own_settings, replays, without_augmentation
from nbtools.show import percent, timing
from nbtools.train import Plan

WORTH = 1.1  # a smaller gain is within the noise of such a measurement: rule of thumb (ours)
NEAR = 1.05  # of two changes this close, the one that needs less, or does not change the training, is taken
BUSY = 3.0  # the fastest round over the slowest: something else ran
LITTLE = 0.01  # of a step: not worth a line
HELPS = {
    "data": "A cheaper augmentation or smaller samples",
    "launch": "Fewer, larger layers",
    "compute": "A smaller network or smaller inputs",
    "memory": "A smaller network or smaller inputs",
}
"""What makes training faster where no setting does, by bound."""


@dataclass(frozen=True)
class Option:
    """One change and the factor in samples/s that it would gain. change: settings for `plan.turn`; {} if the user has
    to make it. exact: False if the gain is an upper bound. same: whether what is learned stays the same."""

    name: str
    change: dict[str, Any]
    gain: float
    reason: str
    exact: bool = True
    same: bool = True


@dataclass(frozen=True)
class Verdict(Report):
    """bound: data, launch, compute or memory. change: settings for `plan.turn`, None if no change is worth making.

    predicted: the factor in samples/s that it gains. options: what was considered, whether or not it is worth it. Shows
    as its sentence.
    """

    bound: str
    sentence: str
    change: dict[str, Any] | None
    predicted: float | None
    options: tuple[Option, ...] = ()

    def __str__(self) -> str:
        return self.sentence

    def caption(self) -> str:
        return self.sentence

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, str, str]]]:
        return ("change", "gain", "because"), [(one.name, f"{one.gain:.2f}×", one.reason) for one in self.options]


def verdict(profile: StepProfile, plan: Plan, fixed: Collection[str] = ()) -> Verdict:
    """The bound and the one change. fixed: settings that may not change (a run that has started keeps some)."""
    bound, possible = bound_by(profile), [*measured(profile, plan), *computed(profile, plan)]
    options = tuple(option for option in possible if not set(option.change) & set(fixed))
    best = chosen([option for option in options if option.gain >= WORTH])
    text = f"{because(profile, bound)} {advised(best, profile)}"
    if profile.most > BUSY * profile.least:
        spread = f"{profile.least:,.0f} to {profile.most:,.0f} samples/s"
        text += f" Rounds varied from {spread}: measure again on a quiet machine."
    return Verdict(bound, text, best and (best.change or None), best and best.gain, options)


def bound_by(profile: StepProfile) -> str:
    """Waiting, launching or the device, whichever takes most; the device computes where its matrix products need more
    than half of its time at the rate measured here, else it moves tensors."""
    if profile.wait >= max(profile.host, profile.device):
        return "data"
    if profile.host >= profile.device:
        return "launch"
    return "compute" if profile.arithmetic >= 0.5 else "memory"


def because(profile: StepProfile, bound: str) -> str:
    step, device = f"of each {timing(profile.step_s)} step", "processor" if profile.device_type == "cpu" else "GPU"
    if bound == "data":
        reached = f"{percent(profile.ceiling_ratio)} of the speed without waiting is reached"
        return f"Loading data is the limit: training waits for it {percent(profile.wait)} {step}; {reached}."
    if bound == "launch" and device == "GPU":
        return f"Kernel launches are the limit: the GPU waits for them {percent(profile.host)} {step}."
    if bound == "launch":
        return f"The fixed cost is the limit: {percent(profile.host)} {step} does not grow with the batch."
    if bound == "compute":
        return f"The {device} is the limit: busy {percent(profile.device)} {step}."
    products = profile.arithmetic * profile.device
    return (
        f"Memory bandwidth is the limit: {percent(profile.device - products)} {step} goes into reading and writing "
        f"tensors, {percent(products)} into matrix products."
    )


def advised(option: Option | None, profile: StepProfile) -> str:
    """The change; if none is worth it, how many were tried, those that were faster but are no choice, and what would
    help instead."""
    if option is not None:
        most, otherwise = "" if option.exact else "up to ", "" if option.same else " It changes what is learned."
        return f"{option.name} makes training {most}{option.gain:.2g}× as fast ({option.reason}).{otherwise}"
    count, helps = len(profile.trials), f"{HELPS[bound_by(profile)]} would help."
    doubtful = ", ".join(outcome(trial) for trial in profile.trials if trial.failed or trial.ratio >= WORTH)
    who, no = ("The one change", " not") if count == 1 else (f"None of the {count} changes", "")
    tried = f"is{no} worth it: {doubtful}" if doubtful else f"was{no} {percent(WORTH - 1)} faster"
    return f"{who} tried {tried}. {helps}" if count else helps


def outcome(trial: Tried) -> str:
    """A change that was tried, how much faster it was, and why it is no choice despite its ratio."""
    if trial.failed:
        return f"{shown(trial.change)}{trial.objection}"
    spread = f" (but {trial.low:.2f}–{trial.high:.2f})" if trial.ratio >= WORTH and trial.low <= 1 else ""
    return f"{shown(trial.change)} {trial.ratio:.2f}×{trial.objection}{spread}"


def chosen(options: list[Option]) -> Option | None:
    """The largest gain; among near ones the first that does not change the training, then the first."""
    most = max((option.gain for option in options), default=0.0)
    near = [option for option in options if option.gain * NEAR >= most]
    return next((option for option in near if option.same), near[0] if near else None)


def measured(profile: StepProfile, plan: Plan) -> list[Option]:
    """What was tried; of batch sizes the smallest near the best."""
    faster = [trial for trial in profile.trials if trial.low > 1 and trial.agrees]
    batches = sorted((t for t in faster if "batch_size" in t.change), key=lambda t: t.change["batch_size"])
    best = max((t.ratio for t in batches), default=0.0)
    left_out = [t for t in batches if t is not next(t for t in batches if t.ratio * NEAR >= best)]
    found = []
    for trial in (trial for trial in faster if trial not in left_out):
        reason = f"tried in turns with the plan, {trial.low:.2f}–{trial.high:.2f}× in {trial.rounds} rounds"
        same = not set(trial.change) & {"batch_size", *own_settings(plan)}
        found.append(Option(shown(trial.change), trial.change, trial.ratio, reason, same=same))
    return found


def computed(profile: StepProfile, plan: Plan) -> list[Option]:
    """What was not tried, and gains at most its share of a step: CUDA graphs, which launch a step at nearly no cost;
    augmentation."""
    found: list[Option] = []

    def add(name: str, change: dict[str, Any], share: float, reason: str, same: bool = True) -> None:
        found.append(Option(name, change, 1 / max(1 - share, 1e-9), reason, exact=False, same=same))

    if profile.device_type == "cuda" and replays(plan, profile.shapes):
        idle = f"the GPU is idle {percent(profile.host)} of each step"
        add("graph=True", {"graph": True}, profile.host, idle)
    change, share = without_augmentation(plan), profile.augmentation
    if share >= LITTLE:
        name = shown(change) if change else "a cheaper augmentation"
        add(name, change, share, f"augmentation takes {percent(share)} of a step", same=False)
    return found
