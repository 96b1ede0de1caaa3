"""What a plan is bound by on this machine, and the one change most worth making: decided from a StepProfile alone.

Every figure in a verdict was measured by the profile or follows from such by arithmetic; limits that are ours are named
rules of thumb.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from nbtools import table
from nbtools.measure.profile import StepProfile, Tried, duration, shown
from nbtools.measure.report import Report
from nbtools.measure.trials import own_settings, without_augmentation
from nbtools.train import Plan

WORTH = 1.1  # a smaller gain is within what such a measurement varies by: rule of thumb (ours)
NEAR = 1.05  # of two changes so close the one that needs less, or leaves the training as it is, is taken
BUSY = 3.0  # the fastest round over the slowest: something else ran
LITTLE = 0.01  # of a step: not worth a line
BETWEEN = 0.05  # share of an epoch that evaluations and checkpoints may take: rule of thumb (ours)
THUMB = f"at most {BETWEEN:.0%} is a rule of thumb (ours)"
EVALUATIONS = 5  # fewer in a run choose no best checkpoint: rule of thumb (ours)


@dataclass(frozen=True)
class Option:
    """One change and what it would gain. change: settings for `plan.turn`; {} if the user has to make it.

    gain: the factor in samples/s of the steps; of: "step", or "epoch" where only the time between steps shrinks, and
    gain is that of an epoch's samples/s. whole: the factor of an epoch in either case. exact: False where gain is at
    most so much. same: whether what is learned stays the same.
    """

    name: str
    change: dict[str, Any]
    gain: float
    whole: float
    reason: str
    of: str = "step"
    exact: bool = True
    same: bool = True


@dataclass(frozen=True)
class Verdict(Report):
    """bound: data, launch, compute or memory. change: settings for `plan.turn`, None where no change is worth making.

    predicted: the factor in samples/s that it gains, as computed in evidence["option"]. Shows as its sentence.
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
        """What was considered, whether or not it is worth it."""
        headers, options = ("change", "gain", "because"), self.evidence["options"]
        return headers, [(o["name"], f"{o['gain']:.2f}×", f"{o['reason']} ({o['of']})") for o in options]


def verdict(profile: StepProfile, plan: Plan, fixed: Collection[str] = ()) -> Verdict:
    """The bound and the one change.

    fixed: settings that may not change (a run that has started keeps some).
    """
    bound = bound_by(profile)
    options = [option for option in possible(profile, plan) if not set(option.change) & set(fixed)]
    best = chosen([option for option in options if option.whole >= WORTH])
    evidence = {
        "shares": {"data": profile.wait, "host": profile.host, "device": profile.device},
        "floors": profile.floors,
        "ceiling_ratio": profile.ceiling_ratio,
        "untried": list(profile.untried),
        "options": [dataclasses.asdict(option) for option in options],
        "option": best.name if best else None,
        "of": best.of if best else None,
        "exact": best.exact if best else None,
        "seconds": profile.took,
    }
    text = f"{bound.capitalize()}-bound: {because(profile, bound)}; {advised(best, profile)}"
    if profile.most > BUSY * profile.least:
        spread = f"{profile.least:,.0f} to {profile.most:,.0f} samples/s"
        text += f"; rounds varied from {spread}: measure again on a quiet machine"
    return Verdict(bound, text, best and (best.change or None), best and best.gain, evidence)


def bound_by(profile: StepProfile) -> str:
    """Waiting, launching or the device, whichever takes most; the device's work is arithmetic or memory traffic,
    whichever of the two needs longer at this machine's measured rates."""
    if profile.wait >= max(profile.host, profile.device):
        return "data"
    if profile.host >= profile.device:
        return "launch"
    return "compute" if profile.floors["compute"] >= profile.floors["memory"] else "memory"


def because(profile: StepProfile, bound: str) -> str:
    step = f"of a step of {duration(profile.step_s)}"
    floors = {name: duration(seconds) for name, seconds in profile.floors.items()}
    arithmetic = f"{profile.flops_per_s / profile.rates.matrix:.0%} of this machine's measured matrix rate"
    if bound == "data":
        return f"{profile.wait:.0%} {step} waits for data, {profile.ceiling_ratio:.0%} of the ceiling is reached"
    if bound == "launch":
        ops = table.plural(profile.counts.ops, "operation")
        return f"{profile.host:.0%} {step} is launching {ops}, the device works {profile.device:.0%}"
    if bound == "compute":
        return f"the device works {profile.device:.0%} {step}, at {arithmetic}"
    return (
        f"the device works {profile.device:.0%} {step}, at {arithmetic}: moving its tensors takes at least "
        f"{floors['memory']}, the arithmetic {floors['compute']}"
    )


def advised(option: Option | None, profile: StepProfile) -> str:
    if option is None:
        return nothing(profile)
    most = "" if option.exact else "up to "
    what = "an epoch" if option.of == "epoch" else "training"
    otherwise = "" if option.same else "; it changes what is learned"
    return f"{option.name} makes {what} {most}{option.gain:.2g}× as fast ({option.reason}){otherwise}"


def nothing(profile: StepProfile) -> str:
    """Where no change is worth it: which ones were tried, and what each brought."""
    bar, count = f"{100 * (WORTH - 1):.0f} % faster", len(profile.trials)
    named = ", ".join(map(outcome, profile.trials))
    tried = {
        0: "no change of a setting was tried",
        1: f"the one change tried was not {bar}: {named}",
    }.get(count, f"none of the {count} changes tried was {bar}: {named}")
    left = ", ".join(shown(change) for change in profile.untried)
    return tried + (f"; not tried for lack of time or memory: {left}" if left else "")


def outcome(trial: Tried) -> str:
    """A change that was tried, how much faster it was, and why it is not worth it despite its ratio."""
    if trial.failed:
        return f"{shown(trial.change)}{trial.objection}"
    spread = f" (but {trial.low:.2f}–{trial.high:.2f})" if trial.ratio >= WORTH and trial.low <= 1 else ""
    return f"{shown(trial.change)} {trial.ratio:.2f}×{trial.objection}{spread}"


def chosen(options: list[Option]) -> Option | None:
    """The largest gain for an epoch; of near ones the first that leaves the training as it is, then the first."""
    if not options:
        return None
    most = max(option.whole for option in options)
    near = [option for option in options if option.whole * NEAR >= most]
    return next((option for option in near if option.same), near[0])


def possible(profile: StepProfile, plan: Plan) -> list[Option]:
    """All that could be done, whatever it brings."""
    return [
        *measured(profile, plan),
        *waiting(profile),
        *graph(profile, plan),
        *augmenting(profile, plan),
        *evaluating(profile, plan),
    ]


def step_option(profile: StepProfile, name: str, change: dict[str, Any], seconds: float, reason: str, **more) -> Option:
    """A change that makes a step take so many seconds."""
    gain = profile.step_s / seconds
    return Option(name, change, gain, of_epoch(profile, gain), reason, **more)


def of_epoch(profile: StepProfile, gain: float) -> float:
    """The factor of an epoch whose steps are so much faster."""
    steps = profile.train_samples / profile.samples_per_s
    return profile.epoch_s / (profile.epoch_s - steps + steps / gain)


def measured(profile: StepProfile, plan: Plan) -> list[Option]:
    """What was tried; of batch sizes the smallest near the best."""
    found = []
    faster = [trial for trial in profile.trials if trial.low > 1 and trial.agrees]
    batches = [t for t in faster if "batch_size" in t.change]
    best = max((t.ratio for t in batches), default=0.0)
    smallest = min((t for t in batches if t.ratio * NEAR >= best), key=lambda t: t.change["batch_size"], default=None)
    for trial in faster:
        if trial in batches and trial is not smallest:
            continue
        reason = f"tried in turns, {trial.low:.2f}–{trial.high:.2f}× in {trial.rounds} rounds"
        same = not set(trial.change) & {"batch_size", *own_settings(plan)}
        whole = of_epoch(profile, trial.ratio)
        found.append(Option(shown(trial.change), trial.change, trial.ratio, whole, reason, same=same))
    return found


def graph(profile: StepProfile, plan: Plan) -> list[Option]:
    """Replayed as a graph, the model costs the host nothing; the optimizer and the batch still do."""
    if profile.device_type != "cuda" or plan.graph or plan.parted or profile.syncs:  # a graph holds no synchronisation
        return []
    seconds = profile.step_s * (1 - profile.host)
    reason = f"the device has nothing to do in {profile.host:.0%} of a step"
    return [step_option(profile, "graph=True", {"graph": True}, seconds, reason, exact=False)]


def waiting(profile: StepProfile) -> list[Option]:
    """A synchronisation in the step: without it the host runs ahead."""
    if not profile.syncs:
        return []
    seconds = max(profile.step_s * (1 - profile.host), 1e-9)
    reason = f"the host waits for the device at {profile.syncs[0]}"
    return [step_option(profile, "without that line", {}, seconds, reason, exact=False)]


def augmenting(profile: StepProfile, plan: Plan) -> list[Option]:
    """A step whose augmentation costs nothing, where that was not tried."""
    change = without_augmentation(plan)
    if profile.augmentation < LITTLE or change in [trial.change for trial in profile.trials]:
        return []
    name = shown(change) if change else "a cheaper augmentation"
    seconds = profile.step_s * (1 - profile.augmentation)
    reason = f"augmentation takes {profile.augmentation:.0%} of a step"
    return [step_option(profile, name, change, seconds, reason, exact=False, same=False)]


def evaluating(profile: StepProfile, plan: Plan) -> list[Option]:
    """Evaluations, and the checkpoints that follow them, further apart."""
    steps = profile.train_samples / profile.samples_per_s
    most = max(plan.epochs // EVALUATIONS, 1)
    wanted = -(-profile.between_s * (1 - BETWEEN) // (BETWEEN * steps))
    every = int(min(max(wanted, plan.eval_every), most))
    if every <= plan.eval_every:
        return []
    gain = profile.epoch_s / (steps + profile.between_s / every)
    took = f"evaluations {profile.evaluation:.0%}, checkpoints {profile.checkpoint:.0%} of an epoch, {THUMB}"
    return [Option(f"eval_every={every}", {"eval_every": every}, gain, gain, took, of="epoch")]
