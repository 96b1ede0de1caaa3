"""Advice measured on this machine: what the rules leave open is measured within the time that suits the run, and kept
next to the pack."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from nbtools import disk
from nbtools.data import Pack, choose, phase, work
from nbtools.errors import DiskError
from nbtools.measure.advice import (
    THUMB,
    Advice,
    decide,
    enough,
    epochs_for_few,
    has_recipe,
    inspect,
)
from nbtools.measure.batch import BatchReport, find_batch
from nbtools.measure.levers import LEAST, Levers, outcome
from nbtools.measure.lr_trial import LEAST_S, lr_trial
from nbtools.measure.machine import machine
from nbtools.measure.profile import StepProfile
from nbtools.measure.receipt import SILENT, comparable, preset
from nbtools.measure.stepper import EAGER, Clock, untouched
from nbtools.measure.trials import LEVERS
from nbtools.measure.verdict import verdict
from nbtools.show import digits
from nbtools.train import (
    Plan,
    Task,
    TaskLike,
    as_task,
    bound,
    build,
    objective,
    readable,
    require_training,
    spoken,
    task_name,
)
from nbtools.train import device as devices

VERSION = 9  # of what is measured: what an older version advised is measured again
KEPT = 8  # kept results next to a pack, for instance of other machines
PRECISION, BATCH, OTHERS, BASELINE, STEP = 0.2, 0.3, 0.25, 0.1, 0.15  # shares of the time
LONG_S = 600.0  # seconds of training beyond which a small data set gets no more epochs
EVALUATING = 0.1  # of the training that evaluations may take
HALF = 0.5  # of the time at most for the precision, which gains most


def advise(
    task: TaskLike,
    pack: Pack,
    measure: bool = True,
    seconds: float | None = None,
    compiling: bool = False,
    clock: Clock | None = None,
) -> Advice:
    """The plan to start from, each field with its reason and, where it was measured here, the evidence.

    Measuring takes about `seconds`, once for a machine, a pack and a task: the result is kept next to the pack; None: a
    ninetieth of the training that it shortens, at least 12 s and at most 60. measure=False: use what was measured
    before, else only rules of thumb, without delay. compiling: also try torch.compile and CUDA graphs, however short
    training is; takes a minute or two more. clock: the clock of a Stepper. Raises TrainError if not even one sample
    fits.
    """
    task = as_task(task)
    made = known_or_measured(task, pack, measure, seconds, compiling, clock)
    presets = {name: preset(task, pack, name) for name in task.PRESETS}
    return dataclasses.replace(made, presets=presets)


def known_or_measured(
    task: Task, pack: Pack, measure: bool, seconds: float | None, compiling: bool, clock: Clock | None
) -> Advice:
    """What was measured before, else by the rules, or measured now and kept."""
    thumb, path = by_rules(task, pack, {}), shelf(pack)
    if (part := readable(task, pack, thumb.plan)) is not pack:
        pack, thumb = part, by_rules(task, part, {})
    before = kept(path)
    for asked in (compiling,) if measure else (True, False):  # without measuring whatever there is, the most first
        if found := before.get(label(task, pack, thumb, asked)):
            return Advice.from_dict(found, type(task.PLAN))
    if not measure:
        return thumb
    require_training(pack)
    likely = seconds or LEAST
    phases = {"precision": PRECISION * likely, "batch size": BATCH * likely, "settings": OTHERS * likely}
    phases |= {"baseline": BASELINE * likely, "step": STEP * likely, "learning rate": LEAST_S}
    with work(f"measuring {spoken(task).rpartition('.')[2]} on this machine", **phases):
        made = measured(task, pack, thumb, seconds, compiling, clock)
    unsaved = keep(path, label(task, pack, thumb, compiling), made)
    return dataclasses.replace(made, note=f"{made.note}{unsaved}")


def known(task: TaskLike, pack: Pack) -> Advice | None:
    """What was measured here before; None if nothing was."""
    if not shelf(pack).exists():
        return None
    made = known_or_measured(as_task(task), pack, False, None, False, None)
    return made if made.profile is not None else None


def expected(task: TaskLike, pack: Pack, plan: Plan) -> str:
    """How long a plan will train by what was measured here before, and how long with the baseline's settings; "" for a
    plan that is faster or slower than the advised one."""
    made = known(task, pack)
    if made is None or set(plan.changes_from(made.plan)) - set(SILENT):
        return ""
    return made.times(plan)


def by_rules(task: TaskLike, pack: Pack, found: dict[str, tuple[Any, str]]) -> Advice:
    """Advice by the rules from the results so far; the feed is chosen by the pack's size."""
    advice = decide(task, pack.card, inspect(), found, pretrained(task, pack))
    if "feed" in advice.reasons:  # measured, or suggested by the task
        return advice
    name, why = choose(pack, advice.plan, devices.pick())
    return dataclasses.replace(advice, reasons={**advice.reasons, "feed": f"auto is {name} here: {why}"})


def pretrained(task: TaskLike, pack: Pack) -> bool:
    """Whether the weights of a network of one's own are pretrained: said by the task, or seen by frozen parameters."""
    own = bound(task, pack.card)
    if own.pretrained or own.card is None:
        return bool(own.pretrained)
    with torch.random.fork_rng(devices=[]):
        return any(not parameter.requires_grad for parameter in build(own, pack.card, own.PLAN).parameters())


def measured(
    task: Task, pack: Pack, thumb: Advice, seconds: float | None, compiling: bool, clock: Clock | None
) -> Advice:
    """The precision first, at the rules' batch, then the batch in that precision, since all else depends on it; then
    the other settings for speed, the baseline next to the plan, and what a step consists of."""
    device, start = devices.pick(), perf_counter()
    found, own = Findings(task, pack), task.suggest(pack.card, device.type)
    with untouched(device):
        plan = (thumb.plan if "amp" in own else thumb.plan.replace(amp="off")).replace(**EAGER)
        levers = Levers(task, pack, plan, device, clock, compiling)
        seconds = seconds or levers.budget
        phase("precision", PRECISION * seconds)
        if "amp" not in own:
            levers.pull("amp", PRECISION * seconds, HALF * seconds)
        found.settle(levers)
        if "batch_size" not in own or device.type == "cuda":  # of a GPU the memory has to be known in any case
            levers.run = None  # its memory counts
            found.size("batch_size" in own, BATCH * seconds, clock)
        levers.resume(found.plan.replace(**EAGER))
        room = (OTHERS if found.measured.keys() & {"batches"} else OTHERS + BATCH) * seconds
        phase("settings", room)
        levers.pull_all([name for name in LEVERS[1:] if name not in own], room)
        found.settle(levers)
        phase("baseline", BASELINE * seconds)
        over = levers.over(comparable(task.BASELINE, levers.plan, pack, device)[0], BASELINE * seconds)
        phase("step", STEP * seconds)
        profile = levers.profile(STEP * seconds)
        levers.run = None
        phase("learning rate", LEAST_S)
        found.learn(profile.steps_s, device, clock)
        found.evaluate(profile)
    took = perf_counter() - start
    note = f"Measured on {', '.join(machine().values())} in {took:.0f} s, except where a {THUMB} is named."
    made = {**found.measured, "over": over, "profile": profile, "verdict": verdict(profile, found.plan)}
    return dataclasses.replace(found.advice, note=note, evidence=found.evidence, levers=levers.trials, **made)


@dataclass
class Findings:
    """What measuring has found so far. chosen: setting → (value, why); evidence: setting → what was measured of it;
    measured: fields of the Advice."""

    task: Task
    pack: Pack
    chosen: dict[str, tuple[Any, str]] = field(default_factory=dict)
    evidence: dict[str, str] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def advice(self) -> Advice:
        return by_rules(self.task, self.pack, self.chosen)

    @property
    def plan(self) -> Plan:
        return self.advice.plan

    def settle(self, levers: Levers) -> None:
        """Enter what trying settings has given."""
        outcomes: dict[str, list[str]] = {}
        for tried, before, kept in levers.tried:
            [(name, value)] = tried.change.items()
            outcomes.setdefault(name, []).append(outcome(tried, before))
            if kept or name == "amp":
                self.chosen[name] = value if kept else before, "the faster of two whose losses agree, measured here"
        self.evidence |= {name: "; ".join(each) for name, each in outcomes.items()}

    def size(self, own: bool, seconds: float, clock: Clock | None) -> None:
        """Search for a batch size. own: whether the task suggests one itself, which stands."""
        phase("batch size", seconds)
        plan, evidence = self.plan, self.evidence
        found = find_batch(self.task, self.pack, plan, None, seconds, enough(self.pack.card), clock)
        self.measured["batches"], evidence["batch_size"] = found, found.why
        if own and plan.batch_size != found.batch_size:
            small = plan.batch_size < found.batch_size
            why = "small batches learn better here" if small else "the task is known to need it"
            evidence["batch_size"] += f"; {plan.batch_size} is kept because {why}"
        elif not own and conclusive(found, plan):
            self.chosen["batch_size"] = found.batch_size, "the smallest that is nearly as fast as the fastest"
        elif not own:
            evidence["batch_size"] += f"; {plan.batch_size} is kept because there was no time to try it"
        if found.micro_batch_size is not None:
            self.chosen["micro_batch_size"] = found.micro_batch_size, "the whole batch does not fit at once"

    def learn(self, epoch_s: float, device: torch.device, clock: Clock | None) -> None:
        """Choose the epochs of a small data set by the speed, and lr by a trial. epoch_s: of an epoch's steps."""
        plan, own = self.plan, self.task.suggest(self.pack.card, device.type)
        few = epochs_for_few(self.pack.card, plan.batch_size)
        if few and "epochs" not in own and not has_recipe(self.task, "epochs") and plan.epochs * epoch_s > LONG_S:
            epochs = max(int(LONG_S / epoch_s), Plan().epochs)
            self.chosen["epochs"] = epochs, f"about {LONG_S / 60:.0f} minutes at the measured speed, or the default"
            plan = self.plan
        recipe = "lr" in own or has_recipe(self.task, "lr")
        trial = lr_trial(self.task, self.pack, plan, device, plan.epochs * epoch_s, recipe, clock)
        self.measured["lr_trial"] = trial
        if trial.lr is None:
            self.evidence["lr"] = trial.reason
        else:
            self.chosen["lr"] = trial.lr, trial.reason
            self.evidence["lr"] = f"the trial began at the rule's {digits(trial.rule)} and took {trial.seconds:.0f} s"

    def evaluate(self, profile: StepProfile) -> None:
        """Evaluate, and save the best, so seldom that it takes at most a tenth of the training."""
        plan, own = self.plan, self.task.suggest(self.pack.card, devices.pick().type)
        every = min(math.ceil(profile.between_s / (EVALUATING * profile.steps_s)), plan.epochs)
        if every > plan.eval_every and "eval_every" not in own and not has_recipe(self.task, "eval_every"):
            self.chosen["eval_every"] = every, f"evaluations take at most {EVALUATING:.0%} of the training then"
            took, epoch = digits(profile.between_s), digits(profile.steps_s)
            self.evidence["eval_every"] = f"an evaluation takes {took} s, an epoch's steps {epoch} s"


def conclusive(batches: BatchReport, plan: Plan) -> bool:
    """Whether the search ended by itself, or at least reached the rules' own batch: a busy machine may not let it."""
    return batches.complete or any(row.samples_per_s for row in batches.rows if row.batch_size >= plan.batch_size)


def shelf(pack: Pack) -> Path:
    """Next to the pack, not in it: a pack's contents are verified."""
    return pack.folder.with_name(f"{pack.folder.name}.advice.json")


def label(task: TaskLike, pack: Pack, of: Advice, asked: bool) -> str:
    """Changes with whatever the measurements depend on: machine and versions, data, task and its plan. asked: whether
    to compile."""
    own, network = bound(task, pack.card), []
    if own.card is not None:  # a task of one's own may have no name, or the same one for another network
        with torch.random.fork_rng(devices=[]):
            model = build(own, pack.card, of.plan)
        tensors = [[*parameter.shape, parameter.requires_grad] for parameter in model.parameters()]
        loss, *more = objective(own)
        loss = str(loss) if isinstance(loss, torch.nn.Module) else getattr(loss, "__qualname__", "default")
        network = [str(model), tensors, bool(own.pretrained), loss, *more]
    parts = [
        VERSION,
        machine(),
        pack.card.digest,
        task_name(task),
        of.plan.to_dict(),
        asked,
        *network,
    ]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def keep(path: Path, name: str, found: Advice) -> str:
    """Save what was measured; returns why that failed, or ""."""
    shelved = {**kept(path), name: found.to_dict()}
    try:
        with disk.explained("saving the advice", path):
            disk.write_atomic(path, json.dumps(dict(list(shelved.items())[-KEPT:])))
    except DiskError as error:  # a pack may be on a read-only disk
        return f" Not saved for the next time: {error}"
    return ""


def kept(path: Path) -> dict[str, Any]:
    """Label → what was measured before; {} if nothing was."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}
