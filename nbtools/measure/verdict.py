"""What a plan is bound by on this machine, and the one change most worth making: decided from a StepProfile alone.

Every figure in a verdict was measured by the profile or is computed from such figures; our own limits are labelled
rules of thumb.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from nbtools.measure.profile import MEMORY, TIME, StepProfile, Tried, shown
from nbtools.measure.report import Report
from nbtools.measure.trials import own_settings, replays, without_augmentation
from nbtools.table import percent, timing
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
BETWEEN = 0.05  # share of an epoch that evaluations and checkpoints may take: rule of thumb (ours)
EVALUATIONS = 5  # fewer in a run choose no best checkpoint: rule of thumb (ours)


@dataclass(frozen=True)
class Option:
    """One change and what it would gain. change: settings for `plan.turn`; {} if the user has to make it. gain: the
    factor in samples/s of the steps, or of an epoch where only the time between them shrinks; whole: of an epoch in
    either case. exact: False if it is an upper bound. same: whether what is learned stays the same."""

    name: str
    change: dict[str, Any]
    gain: float
    whole: float
    reason: str
    exact: bool = True
    same: bool = True


@dataclass(frozen=True)
class Verdict(Report):
    """bound: data, launch, compute or memory. change: settings for `plan.turn`, None if no change is worth making.

    predicted: the factor in samples/s that it gains. evidence["options"]: what was considered, whether or
    not it is worth it. Shows as its sentence.
    """

    bound: str
    sentence: str
    change: dict[str, Any] | None
    predicted: float | None
    evidence: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        return self.sentence

    def caption(self) -> str:
        return self.sentence

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, str, str]]]:
        options = self.evidence["options"]
        return ("change", "gain", "because"), [(o["name"], f"{o['gain']:.2f}×", o["reason"]) for o in options]


def verdict(profile: StepProfile, plan: Plan, fixed: Collection[str] = ()) -> Verdict:
    """The bound and the one change. fixed: settings that may not change (a run that has started keeps some)."""
    bound = bound_by(profile)
    possible = [*measured(profile, plan), *computed(profile, plan), *evaluating(profile, plan)]
    options = [option for option in possible if not set(option.change) & set(fixed)]
    best = chosen([option for option in options if option.whole >= WORTH])
    text = f"{because(profile, bound)} {advised(best, profile)}"
    if profile.most > BUSY * profile.least:
        spread = f"{profile.least:,.0f} to {profile.most:,.0f} samples/s"
        text += f" Rounds varied from {spread}: measure again on a quiet machine."
    evidence = {"options": [dataclasses.asdict(option) for option in options]}
    return Verdict(bound, text, best and (best.change or None), best and best.gain, evidence)


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
    count = len(profile.trials)
    doubtful = ", ".join(outcome(trial) for trial in profile.trials if trial.failed or trial.ratio >= WORTH)
    who, no = ("The one change", " not") if count == 1 else (f"None of the {count} changes", "")
    tried = f"{who} tried was{no} {percent(WORTH - 1)} faster"
    tried = f"{who} tried is{no} worth it: {doubtful}" if doubtful else tried
    helps = f"{HELPS[bound_by(profile)]} would help."
    return " ".join(filter(None, [f"{tried}." if count else "", lacking(profile), helps]))


def lacking(profile: StepProfile) -> str:
    """What could not be tried for want of time, or of memory; "" where all was tried."""
    left = {lack: [shown(each.change) for each in profile.skipped if each.lack == lack] for lack in (TIME, MEMORY)}
    parts = [f"no {lack} to try {', '.join(changes)}" for lack, changes in left.items() if changes]
    return f"There was {', and '.join(parts)}." if parts else ""


def outcome(trial: Tried) -> str:
    """A change that was tried, how much faster it was, and why it is no choice despite its ratio."""
    if trial.failed:
        return f"{shown(trial.change)}{trial.objection}"
    spread = f" (but {trial.low:.2f}–{trial.high:.2f})" if trial.ratio >= WORTH and trial.low <= 1 else ""
    return f"{shown(trial.change)} {trial.ratio:.2f}×{trial.objection}{spread}"


def chosen(options: list[Option]) -> Option | None:
    """The largest gain for an epoch; among near ones the first that does not change the training, then the first."""
    most = max((option.whole for option in options), default=0.0)
    near = [option for option in options if option.whole * NEAR >= most]
    return next((option for option in near if option.same), near[0] if near else None)


def of_epoch(profile: StepProfile, gain: float) -> float:
    """The factor of an epoch whose steps are `gain` times as fast."""
    return profile.epoch_s / (profile.epoch_s - profile.steps_s + profile.steps_s / gain)


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
        gains = trial.ratio, of_epoch(profile, trial.ratio)
        found.append(Option(shown(trial.change), trial.change, *gains, reason, same=same))
    return found


def computed(profile: StepProfile, plan: Plan) -> list[Option]:
    """What was not tried, and gains at most its share of a step: a line that makes the host wait for the device; else
    CUDA graphs, which launch a step at nearly no cost; augmentation."""
    found: list[Option] = []

    def add(name: str, change: dict[str, Any], share: float, reason: str, same: bool = True) -> None:
        gain = 1 / max(1 - share, 1e-9)
        found.append(Option(name, change, gain, of_epoch(profile, gain), reason, exact=False, same=same))

    if profile.syncs:
        add("without that line", {}, profile.host, f"the host waits for the device at {profile.syncs[0]}")
    elif profile.device_type == "cuda" and replays(plan, profile.shapes):
        idle = f"the GPU is idle {percent(profile.host)} of each step"
        add("graph=True", {"graph": True}, profile.host, idle)
    change = without_augmentation(plan)
    if profile.augmentation >= LITTLE and change not in [trial.change for trial in profile.trials]:
        name = shown(change) if change else "a cheaper augmentation"
        add(
            name,
            change,
            profile.augmentation,
            f"augmentation takes {percent(profile.augmentation)} of a step",
            same=False,
        )
    return found


def evaluating(profile: StepProfile, plan: Plan) -> list[Option]:
    """Evaluations, and the checkpoints that follow them, further apart."""
    most = max(plan.epochs // EVALUATIONS, 1)
    wanted = -(-profile.between_s * (1 - BETWEEN) // (BETWEEN * profile.steps_s))
    every = int(min(max(wanted, plan.eval_every), most))
    if every <= plan.eval_every:
        return []
    gain = profile.epoch_s / (profile.steps_s + profile.between_s / every)
    now = profile.between_s / plan.eval_every / profile.epoch_s
    took = (
        f"evaluations and checkpoints take {percent(now)} of an epoch; rule of thumb (ours): at most {percent(BETWEEN)}"
    )
    return [Option(f"eval_every={every}", {"eval_every": every}, gain, gain, took)]
