"""Advice measured on this machine, and kept next to the pack.

Each setting is judged by what it changes: precision and layout together by the time that the device works; the batch by
samples/s; CUDA graphs where launching a step takes longer than computing it; the compiler where training is long. Then
the plan, the rules' own and the baseline train in turns, and at last learning rates are tried. Other arithmetic has to
learn the same.

On a CPU the time is this process's on one thread: what other programs take is not in it, and a busy machine makes no
other plan than an idle one. Every step reads the clock, which ends a part of the search whose time is over: what it
has decided by then stands.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nbtools import disk
from nbtools.data import Pack, batches_in, choose, cores, phase, work
from nbtools.disk import VERSION
from nbtools.errors import DiskError
from nbtools.measure.advice import THUMB, Advice, Choices, decide, enough, epochs_for_few, has_recipe, inspect
from nbtools.measure.batch import LATE, find_batch
from nbtools.measure.lr import LEAST_S, LrTrial, lr_trial
from nbtools.measure.machine import machine
from nbtools.measure.profile import Verdict, replays, verdict_of
from nbtools.measure.receipt import comparable, preset
from nbtools.measure.timing import EAGER, Clock, Stepper, own_time, untouched, wall
from nbtools.measure.turns import Deadline, attempt, beside, objection
from nbtools.train import (
    Plan,
    Task,
    TaskLike,
    as_task,
    bind,
    build,
    objective,
    readable,
    rehearse,
    require_sizes,
    task_name,
    title_of,
)
from nbtools.train import device as devices

KEPT = 8  # results next to a pack, for instance of other machines
SHARE, LEAST, MOST = 1 / 90, 12.0, 50.0  # of the training that is expected, seconds: what measuring may take (ours)
PARTS = {"precision": 0.3, "its losses": 0.5, "batch size": 0.7, "beside others": 1.2}
"""The parts of the search, and the share of the time that is used when each ends."""

FASTER, NEAR = 1.05, 1.03  # from which a change is used; times the least that is as good
SLOW, LOOKS = 1.5, 5  # times the fastest combination: no further look at one that takes longer; looks at the others
FEW_STEPS = 3  # of warming up
SHORT, FEW = 0.1, 4  # seconds of a step on a CPU that are enough to compare; samples of the first one
BATCH_GAIN = 1.08  # of another batch over the rules': less is within the noise of two measurements
BUSY = 1.5  # processes that want to run, times the cores, from which a CPU is contended
LAUNCHES = 1.2  # times what the device works that the host takes, from which graphs are tried
WORDS = {"off": "float32", True: "channels_last", False: "channels_last=False"}
COMPILE_PAYS = 1800.0  # seconds of training planned from which compiling is tried: it took 69 s here, on two busy cores
LONG_S = 600.0  # seconds of training beyond which a small data set gets no more epochs


def advise(task: TaskLike, pack: Pack, measure: bool = True, seconds: float | None = None) -> Advice:
    """Return the plan to start from, each field with its reason and what was measured here of it.

    Measuring takes about `seconds`, once for a machine, a pack and a task: the result is kept next to the pack; None: a
    ninetieth of the training that it shortens, at least 12 s and at most 60. Then learning rates are tried, for a tenth
    of the training, at most 120 s. measure=False: use what was measured before, else only rules of thumb, without
    delay. Raises TrainError if not even one sample fits.
    """
    task = as_task(task)
    advice, path = by_rules(task, pack, {}), shelf(pack)
    if (part := readable(task, pack, advice.plan)) is not pack:
        pack, advice = part, by_rules(task, part, {})
    name, before = label(task, pack, advice.plan), read_kept(path)
    if name in before:
        advice = Advice.from_dict(before[name], type(task.PLAN))
    elif measure:
        require_sizes(pack)
        with work(f"measuring {title_of(task).rpartition('.')[2]} on this machine"):
            advice = search_plan(task, pack, advice, seconds)
        shelved = [*before.items(), (name, advice.to_dict())][-KEPT:]
        try:
            with disk.explained("saving the advice", path):
                disk.write_atomic(path, json.dumps(dict(shelved)))
        except DiskError as error:  # a pack may be on a read-only disk
            advice = dataclasses.replace(advice, note=f"{advice.note} Not saved for the next time: {error}")
    return dataclasses.replace(advice, presets={name: preset(task, pack, name) for name in task.PRESETS})


def by_rules(task: TaskLike, pack: Pack, chosen: Choices) -> Advice:
    """Return advice by the rules from the results so far; the feed is chosen by the pack's size."""
    own = bind(task, pack.card)
    pretrained = bool(own.pretrained)
    if own.card is not None and not pretrained:  # frozen parameters say so of a network of one's own
        with torch.random.fork_rng(devices=[]):
            pretrained = not all(p.requires_grad for p in build(own, pack.card, own.PLAN).parameters())
    advice = decide(task, pack.card, inspect(), chosen, pretrained)
    if "feed" in advice.reasons:  # suggested by the task
        return advice
    name, why = choose(pack, advice.plan, devices.pick())
    return dataclasses.replace(advice, reasons={**advice.reasons, "feed": f"auto is {name} here: {why}"})


def search_plan(task: Task, pack: Pack, thumb: Advice, seconds: float | None) -> Advice:
    """Search for a plan that is faster than the rules' own, then for its learning rate."""
    device, start = devices.pick(), wall()
    fixed = task.suggest(pack.card, device.type)
    with untouched(device):
        search = Search(task, pack, thumb, fixed, seconds)
        search.choose_arithmetic()
        if "batch_size" not in fixed:  # what does not fit into memory, training takes in smaller passes
            search.choose_batch()
        if device.type == "cuda":
            search.choose_graph_or_compiler()
        verdict = search.guard(thumb.plan)
        phase("learning rate", LEAST_S)
        trial = search.choose_epochs_and_lr(verdict)
    note = f"Measured on {', '.join(machine().values())} in {wall() - start:.0f} s, except where a {THUMB} is named."
    return dataclasses.replace(
        search.advice, note=note + search.note, ratios=search.ratios, lr_trial=trial, verdict=verdict
    )


class Search:
    """The advice so far. chosen: setting → (value, why), of what was measured; fixed: settings that the task chose;
    ratios: of the rules' and the baseline's samples/s over the plan's."""

    def __init__(self, task: Task, pack: Pack, advice: Advice, fixed: Collection[str], seconds: float | None):
        self.task, self.pack, self.advice, self.fixed, self.device = task, pack, advice, fixed, devices.pick()
        self.cpu = self.device.type == "cpu"
        self.clock: Clock = own_time if self.cpu else wall
        self.chosen, self.ratios, self.note = Choices(), dict[str, float](), ""
        self.size = FEW if self.cpu else self.plan.batch_size  # samples of the steps that are compared
        self.sample_s = self.first_steps()
        self.size = self.part_of(self.plan, SHORT).batch_size
        self.seconds = seconds or min(max(SHARE * self.training(self.sample_s), LEAST), MOST)
        self.most, self.start = seconds or MOST, [self.clock(), wall()]

    @property
    def plan(self) -> Plan:
        return self.advice.plan

    def take(self, choices: Choices) -> None:
        """Choose values, each with what was measured of it; the other settings follow."""
        self.chosen |= choices
        self.advice = by_rules(self.task, self.pack, self.chosen)

    def until(self, part: str) -> Deadline:
        """Begin a part of the search; return the clock that ends it."""
        own, passed = self.clock() - self.start[0], wall() - self.start[1]
        deadline = Deadline(PARTS[part] * self.seconds - min(own, passed), PARTS[part] * self.most - passed, self.clock)
        phase(part, max(deadline.left(), 0.0))
        return deadline

    def training(self, sample_s: float) -> float:
        """Return the seconds of all steps of the plan."""
        return self.plan.epochs * self.pack.splits["train"] * sample_s

    def part_of(self, plan: Plan, step_s: float) -> Plan:
        """Return the plan, on a CPU at the part of its batch of which a step takes so many seconds."""
        size = max(2, int(step_s / self.sample_s)) if self.cpu else plan.batch_size
        return plan if size >= plan.batch_size else plan.replace(batch_size=size, micro_batch_size=None)

    # -- precision and layout

    def plain(self, plan: Plan) -> Plan:
        """Return the plan without graphs and compiler, on a CPU on one thread."""
        return plan.replace(**EAGER, threads=1) if self.cpu else plan.replace(**EAGER)

    def stepper(self, plan: Plan, clock: Clock) -> Stepper:
        """Return a plan in training at the size of all that are compared, on one batch for all, since lengths differ by
        more than what is compared."""
        plan = self.plain(plan).replace(batch_size=min(self.size, plan.batch_size), micro_batch_size=None)
        made = Stepper(self.task, self.pack, plan, self.device, clock=clock)
        made.repeat(plan.batch_size)
        return made

    def first_steps(self) -> float:
        """Return the seconds that a step takes for a sample; and see which layers there are."""
        stepper = self.stepper(self.plan, self.clock)
        rehearse(stepper.state, stepper.pack)
        stepper.advance()
        layers = {type(layer) for layer in stepper.state.model.modules()}
        self.convolves = any(issubclass(layer, nn.Conv2d) for layer in layers)
        self.compiles = not any(issubclass(layer, nn.RNNBase) for layer in layers)  # there the compiler gives up
        return max(stepper.advance().seconds / stepper.plan.batch_size, 1e-9)

    def choose_arithmetic(self) -> None:
        """Take the precision and layout with which the device works least for a sample, if they learn the same."""
        changes, best = self.combinations(), ""
        costs, whys = self.compare(changes)
        least, own = min(costs.values(), default=math.inf), costs.get("", 0.0)
        faster = [name for name in costs if own >= FASTER * costs[name]]
        # of equal ones first that which changes least
        for name in sorted(faster, key=lambda name: (costs[name] > NEAR * least, len(changes[name]), costs[name])):
            whys[name] = "is faster, but there was no time to see whether it learns the same"
            with self.until("its losses") as clock:
                whys[name] = objection(self.task, self.pack, self.plain(self.plan), changes[name], clock)
            if not whys[name]:
                best = name
                break
        tried = [f"{name} {own / cost:.2f}×" for name, cost in costs.items() if name]
        tried += [f"{name} {why}" for name, why in whys.items() if why]
        how = "the GPU's time" if self.device.type == "cuda" else "the processor's time on one thread"
        text = f"measured here by {how} a step: {', '.join(tried)}; used from {FASTER:.2f}× on"
        text = text if tried else "no other one was tried: the machine is busy, and the time was over"
        levers = {name: getattr(self.plan, name) for change in changes.values() for name in change}
        self.take({name: (value, text) for name, value in {**levers, **changes[best]}.items()})

    def combinations(self) -> dict[str, dict[str, Any]]:
        """Return name → what differs from the plan: nothing, another precision or layout, both at once."""
        options = {"amp": precisions(self.device), "channels_last": (False, True) if self.convolves else ()}
        options = {name: values for name, values in options.items() if values and name not in self.fixed}
        changes = dict[str, dict[str, Any]]({"": {}})
        for row in itertools.product(*options.values()):
            settings = zip(options, row, strict=True)
            change = {name: value for name, value in settings if value != getattr(self.plan, name)}
            changes[", ".join(WORDS.get(value, str(value)) for value in change.values())] = change
        return changes

    def compare(self, changes: dict[str, dict[str, Any]]) -> tuple[dict[str, float], dict[str, str]]:
        """Return (name → seconds that the device works for a step: on CUDA by a trace, else the fastest of some steps
        in turns; name → why it does not train)."""
        costs, whys, steppers = dict[str, float](), dict[str, str](), dict[str, Stepper]()
        with self.until("precision") as clock:
            for name, change in changes.items():
                made = attempt(partial(self.stepper, self.plan.replace(**change), clock), FEW_STEPS)
                if isinstance(made, str):
                    whys[name] = made
                    continue
                made.advance()
                steppers[name], costs[name] = made, made.device_s()
            for _ in range(LOOKS - 1 if self.device.type != "cuda" else 0):
                for name, stepper in steppers.items():
                    if costs[name] <= SLOW * min(costs.values()):
                        stepper.advance()
                        costs[name] = stepper.device_s()
        return costs, whys

    # -- batch, graphs, compiler

    def choose_batch(self) -> None:
        """Take another batch where that is faster."""
        own, report, most = self.plan.batch_size, None, enough(self.pack.card)
        with self.until("batch size") as clock:
            seconds = max(clock.left(), 0.1)
            report = find_batch(self.task, self.pack, self.plain(self.plan), seconds, most, clock)
        if report is None:
            reason = f"{self.advice.reasons['batch_size']}; there was no time to measure others"
            return self.take({"batch_size": (own, reason)})
        speeds = {row.batch_size: row.samples_per_s for row in report.rows if not row.reason}
        kept = ""
        if own in speeds and speeds[report.batch_size] < BATCH_GAIN * speeds[own]:
            kept = f"it is within {BATCH_GAIN - 1:.0%} of that"
        elif report.ended == LATE and own > max(speeds):
            kept = "there was no time to try it"
        text = f"measured here: {report}" + (f"; {own} is kept: {kept}" if kept else "")
        self.take({"batch_size": (own if kept else report.batch_size, text)})

    def choose_graph_or_compiler(self) -> None:
        """Use CUDA graphs where launching is the limit, torch.compile where training is long, if they are faster in
        turns with the plan."""
        begun, run = wall(), Stepper(self.task, self.pack, self.plan, self.device).warm_up()
        host, device, name = run.advance(steps=3).host_s, run.device_s(), ""
        if "graph" not in self.fixed and host > LAUNCHES * device and replays(run):
            name = "graph"
        elif "compile" not in self.fixed and device > host and self.compiles:
            name = "compile" if self.training(device / self.plan.batch_size) >= COMPILE_PAYS else ""
        if name:  # a capture that could end this process is tried in another one before (nbtools.train.graph)
            trial = beside(run, self.plan.replace(**{name: True}), max(self.seconds / 10, 1.0))
            used = trial.faster and trial.ratio >= FASTER
            self.take({name: (used, f"measured here in turns with the plan: {trial}")})
        self.start = [each + wall() - begun for each in self.start]  # recording and compiling take as long as they take

    # -- at last

    def guard(self, rules: Plan) -> Verdict | None:
        """Train the plan in turns with the rules' own, which takes its place where that is faster, and with the
        baseline, on a CPU parts of long steps. Return what a step of the plan consists of, None if there was no
        time."""
        made, baseline = None, comparable(self.task.BASELINE, self.plan, self.pack)[0]

        busy = self.cpu and os.getloadavg()[0] > BUSY * cores()
        if busy:  # threads would wait for each other
            self.note = " The machine was busy with other work: times are of one thread beside that."

        def by_wall() -> float:
            deadline()
            return wall()

        def part(plan: Plan) -> Plan:
            return self.part_of(plan.replace(threads=1) if busy else plan, short)

        with self.until("beside others") as deadline:
            seconds, short = deadline.left() / 6, deadline.left() / 32
            make = partial(Stepper, self.task, self.pack, device=self.device, clock=by_wall)
            run = make(part(self.plan)).warm_up(FEW_STEPS)
            if self.plan != rules:
                trial = beside(run, part(rules), seconds, FEW_STEPS)
                self.ratios["rules"] = trial.ratio
                if trial.faster:
                    why = f"measured here: the rules' value was {trial.ratio:.2f}× as fast in {len(trial.ratios)} turns"
                    back = self.plan.changes_from(rules).keys() & self.chosen.keys()
                    self.take({name: (getattr(rules, name), why) for name in back})
                    self.ratios["rules"], run = 1.0, make(part(rules)).warm_up(FEW_STEPS)
            made = verdict_of(run, seconds)
            self.ratios["baseline"] = beside(run, part(baseline), seconds, FEW_STEPS).ratio
        return made

    def choose_epochs_and_lr(self, verdict: Verdict | None) -> LrTrial:
        """Choose the epochs of a small data set by the speed, and lr by a trial."""
        samples = self.pack.splits["train"]
        epoch_s = samples * (1 / verdict.timing.samples_per_s if verdict else self.sample_s)
        few = epochs_for_few(self.pack.card, self.plan.batch_size)
        if few and not has_recipe(self.task, "epochs") and self.plan.epochs == few[0] and few[0] * epoch_s > LONG_S:
            why = f"about {LONG_S / 60:.0f} minutes at the measured speed, or the default"
            self.take({"epochs": (max(int(LONG_S / epoch_s), Plan().epochs), why)})
        step_s = epoch_s / batches_in(samples, self.plan.batch_size)
        recipe = "lr" in self.fixed or has_recipe(self.task, "lr")
        trial = lr_trial(self.task, self.pack, self.plan, step_s, recipe)
        rule = f"{self.advice.reasons['lr']}; {trial.reason}"
        self.take({"lr": (self.plan.lr, rule) if trial.lr is None else (trial.lr, trial.reason)})
        return trial


def precisions(device: torch.device) -> tuple[str, ...]:
    """Return the settings of Plan.amp that may be fast on a device."""
    if device.type == "cuda":
        return ("off", "bf16", "fp16") if devices.reduced_precision(device) == "bf16" else ("off", "fp16")
    return ("off", "bf16") if device.type == "cpu" else ()


# -- kept next to the pack


def shelf(pack: Pack) -> Path:
    """Return the file of what was measured: next to the pack, not in it, since a pack's contents are verified."""
    return pack.folder.with_name(f"{pack.folder.name}.advice.json")


def read_kept(path: Path) -> dict[str, Any]:
    """Return label → what was measured before; {} if nothing was."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def label(task: Task, pack: Pack, plan: Plan) -> str:
    """Return a hash of what the measurements depend on: machine and versions, data, task and the rules' plan."""
    own, network = bind(task, pack.card), []
    if own.card is not None:  # a task of one's own may have no name, or the same one for another network
        with torch.random.fork_rng(devices=[]):
            model = build(own, pack.card, plan)
        tensors = [[*parameter.shape, parameter.requires_grad] for parameter in model.parameters()]
        loss, *more = objective(own)
        loss = str(loss) if isinstance(loss, nn.Module) else getattr(loss, "__qualname__", "default")
        network = [str(model), tensors, bool(own.pretrained), loss, *more]
    parts = [VERSION, machine(), pack.card.digest, task_name(task), plan.to_dict(), *network]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()
