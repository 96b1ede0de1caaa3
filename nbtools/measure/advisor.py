"""Advice measured on this machine: what the rules leave open is measured within the time that suits the run, and kept
next to the pack."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from nbtools import disk
from nbtools.data import Pack, choose, phase, work
from nbtools.errors import DiskError
from nbtools.measure.advice import THUMB, Advice, decide, enough, epochs_for_few, has_recipe, inspect
from nbtools.measure.choice import LEAST, Choice
from nbtools.measure.lr import LEAST_S, LrTrial, lr_trial
from nbtools.measure.machine import machine
from nbtools.measure.profile import StepProfile
from nbtools.measure.receipt import SILENT, comparable, preset
from nbtools.measure.timing import Clock, untouched
from nbtools.measure.verdict import verdict
from nbtools.show import digits, percent
from nbtools.train import (
    Plan,
    Task,
    TaskLike,
    as_task,
    bound,
    build,
    objective,
    readable,
    require_sizes,
    spoken,
    task_name,
)
from nbtools.train import device as devices

VERSION = 11  # of what is measured: what an older version advised is measured again
KEPT = 8  # kept results next to a pack, for instance of other machines
PHASES = ("precision", "batch size", "graphs", "the plan beside others", "learning rate")
LONG_S = 600.0  # seconds of training beyond which a small data set gets no more epochs


def advise(
    task: TaskLike,
    pack: Pack,
    measure: bool = True,
    seconds: float | None = None,
    compiling: bool = False,
    clock: Clock | None = None,
) -> Advice:
    """Return the plan to start from, each field with its reason and, where it was measured here, the evidence.

    Measuring takes about `seconds`, once for a machine, a pack and a task: the result is kept next to the pack; None: a
    ninetieth of the training that it shortens, at least 12 s and at most 60. measure=False: use what was measured
    before, else only rules of thumb, without delay. compiling: also try torch.compile and CUDA graphs, however short
    training is; takes a minute or two more. clock: in place of the machine's. Raises TrainError if not even one sample
    fits.
    """
    task = as_task(task)
    made = known_or_measured(task, pack, measure, seconds, compiling, clock)
    presets = {name: preset(task, pack, name) for name in task.PRESETS}
    return dataclasses.replace(made, presets=presets)


def known_or_measured(
    task: Task, pack: Pack, measure: bool, seconds: float | None, compiling: bool, clock: Clock | None
) -> Advice:
    """Return what was measured before, else by the rules, or measured now and kept."""
    thumb, path = by_rules(task, pack, {}), shelf(pack)
    if (part := readable(task, pack, thumb.plan)) is not pack:
        pack, thumb = part, by_rules(task, part, {})
    before = kept(path)
    for asked in (compiling,) if measure else (True, False):  # without measuring whatever there is, the most first
        if values := before.get(label(task, pack, thumb, asked)):
            return Advice.from_dict(values, type(task.PLAN))
    if not measure:
        return thumb
    require_sizes(pack)
    with work(f"measuring {spoken(task).rpartition('.')[2]} on this machine", **dict.fromkeys(PHASES, LEAST / 4)):
        made = measured(task, pack, thumb, seconds, compiling, clock)
    unsaved = keep(path, label(task, pack, thumb, compiling), made)
    return dataclasses.replace(made, note=f"{made.note}{unsaved}")


def expected(task: TaskLike, pack: Pack, plan: Plan) -> str:
    """Return how long a plan will train by what was measured here before, and how long with the baseline's settings; ""
    for a plan that is faster or slower than the advised one."""
    if not shelf(pack).exists():
        return ""
    made = known_or_measured(as_task(task), pack, False, None, False, None)
    return "" if set(plan.changes_from(made.plan)) - set(SILENT) else made.times(plan)


def by_rules(task: TaskLike, pack: Pack, chosen: dict[str, tuple[Any, str]]) -> Advice:
    """Return advice by the rules from the results so far; the feed is chosen by the pack's size."""
    advice = decide(task, pack.card, inspect(), chosen, pretrained(task, pack))
    if "feed" in advice.reasons:  # suggested by the task
        return advice
    name, why = choose(pack, advice.plan, devices.pick())
    return dataclasses.replace(advice, reasons={**advice.reasons, "feed": f"auto is {name} here: {why}"})


def pretrained(task: TaskLike, pack: Pack) -> bool:
    """Return whether the weights of a network of one's own are pretrained: said by the task, or seen by frozen
    parameters."""
    own = bound(task, pack.card)
    if own.pretrained or own.card is None:
        return bool(own.pretrained)
    with torch.random.fork_rng(devices=[]):
        return any(not parameter.requires_grad for parameter in build(own, pack.card, own.PLAN).parameters())


def measured(
    task: Task, pack: Pack, thumb: Advice, seconds: float | None, compiling: bool, clock: Clock | None
) -> Advice:
    """Measure the precision and layout first, then the batch in it, then graphs; the plan beside the rules' own and the
    baseline; last the learning rate."""
    device, start = devices.pick(), perf_counter()
    own, chosen = task.suggest(pack.card, device.type), {}
    with untouched(device):
        choice = Choice(task, pack, thumb.plan, device, own, seconds, clock)
        phase("precision", 0.5 * choice.seconds)
        choice.precision_and_layout(0.5)
        fastest = "of those that learn the same the fastest, measured here"
        changed = choice.plan.changes_from(thumb.plan).keys() & {"amp", "channels_last"}
        chosen |= {name: (getattr(choice.plan, name), fastest) for name in changed}
        if "batch_size" not in own or device.type == "cuda":  # of a GPU the memory has to be known in any case
            phase("batch size", 0.25 * choice.seconds)
            chosen |= choice.batch_size(0.75, enough(pack.card))
        choice.plan = by_rules(task, pack, chosen).plan
        phase("graphs", 0.1 * choice.seconds)
        choice.graph_and_compiler(0.8, compiling)
        phase("the plan beside others", 0.2 * choice.seconds)
        baseline = comparable(task.BASELINE, choice.plan, pack, device)[0]
        contended = choice.others() if choice.contended else 0.0
        profile = choice.guard({"rules": thumb.plan, "baseline": baseline})
        used = ("compile", "graph") if choice.plan != thumb.plan else ()
        chosen = chosen if choice.plan != thumb.plan else {}
        chosen |= {name: (True, "faster here, measured in turns") for name in used if getattr(choice.plan, name)}
        phase("learning rate", LEAST_S)
        chosen |= (more := epochs_and_lr(choice, chosen, profile))[0]
    advice = by_rules(task, pack, chosen)
    took = perf_counter() - start
    note = f"Measured on {', '.join(machine().values())} in {took:.0f} s, except where a {THUMB} is named."
    if contended:
        note += f" Other programs took {percent(contended)} of the processor: settings were compared by its time on one"
        note += " thread, not by the wall, and times are of such a machine."
    return dataclasses.replace(
        advice,
        note=note,
        evidence=choice.evidence,
        timings=choice.timings,
        ratios=choice.ratios,
        batches=choice.batches,
        lr_trial=more[1],
        profile=profile,
        verdict=verdict(profile, advice.plan),
    )


def epochs_and_lr(
    choice: Choice, chosen: dict[str, tuple[Any, str]], profile: StepProfile
) -> tuple[dict[str, tuple[Any, str]], LrTrial]:
    """Choose the epochs of a small data set by the speed, and lr by a trial."""
    task, pack, plan = choice.task, choice.pack, by_rules(choice.task, choice.pack, chosen).plan
    few, more = epochs_for_few(pack.card, plan.batch_size), {}
    if few and not has_recipe(task, "epochs") and plan.epochs == few[0] and plan.epochs * profile.steps_s > LONG_S:
        epochs = max(int(LONG_S / profile.steps_s), Plan().epochs)
        more["epochs"] = epochs, f"about {LONG_S / 60:.0f} minutes at the measured speed, or the default"
        plan = by_rules(task, pack, {**chosen, **more}).plan
    recipe = "lr" in choice.fixed or has_recipe(task, "lr")
    trial = lr_trial(task, pack, plan, choice.device, plan.epochs * profile.steps_s, recipe, choice.given_clock)
    choice.evidence["lr"] = trial.reason
    if trial.lr is not None:
        more["lr"] = trial.lr, trial.reason
        choice.evidence["lr"] = f"the trial began at the rule's {digits(trial.rule)} and took {trial.seconds:.0f} s"
    return more, trial


# -- kept next to the pack


def shelf(pack: Pack) -> Path:
    """Return the file of what was measured: next to the pack, not in it, since a pack's contents are verified."""
    return pack.folder.with_name(f"{pack.folder.name}.advice.json")


def label(task: TaskLike, pack: Pack, of: Advice, asked: bool) -> str:
    """Return a hash of what the measurements depend on: machine and versions, data, task and its plan. asked: whether
    to compile."""
    own, network = bound(task, pack.card), []
    if own.card is not None:  # a task of one's own may have no name, or the same one for another network
        with torch.random.fork_rng(devices=[]):
            model = build(own, pack.card, of.plan)
        tensors = [[*parameter.shape, parameter.requires_grad] for parameter in model.parameters()]
        loss, *more = objective(own)
        loss = str(loss) if isinstance(loss, torch.nn.Module) else getattr(loss, "__qualname__", "default")
        network = [str(model), tensors, bool(own.pretrained), loss, *more]
    parts = [VERSION, machine(), pack.card.digest, task_name(task), of.plan.to_dict(), asked, *network]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def keep(path: Path, name: str, made: Advice) -> str:
    """Save what was measured; returns why that failed, or ""."""
    shelved = {**kept(path), name: made.to_dict()}
    try:
        with disk.explained("saving the advice", path):
            disk.write_atomic(path, json.dumps(dict(list(shelved.items())[-KEPT:])))
    except DiskError as error:  # a pack may be on a read-only disk
        return f" Not saved for the next time: {error}"
    return ""


def kept(path: Path) -> dict[str, Any]:
    """Return label → what was measured before; {} if nothing was."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}
