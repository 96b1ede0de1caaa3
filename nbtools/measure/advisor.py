"""Advice measured on this machine, and kept next to the pack.

Each setting is judged by what it changes: precision and layout together by the time that the device works; the batch by
samples/s; graphs where launching a step takes longer than computing it; the compiler where training is long. At last
the plan, the rules' own and the baseline train in turns. On a CPU the time is this process's on one thread, so that a
busy machine makes no other plan than an idle one.
"""

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import process_time
from typing import Any

import torch
from torch import nn

from nbtools import disk, train
from nbtools.data import Feed, Pack, Padding, batches_in, choose, cores, digest, phase, work
from nbtools.disk import VERSION
from nbtools.errors import NbtoolsError, PlanError
from nbtools.measure.advice import Advice, Choices, decide, enough, evaluations, has_recipe, inspect, more_epochs
from nbtools.measure.finders import LATE, LrTrial, find_batch, lr_trial
from nbtools.measure.machine import machine, matrix_rates
from nbtools.measure.profile import Verdict, graph_change, verdict_of
from nbtools.measure.receipt import comparable, preset
from nbtools.measure.timing import EAGER, Clock, Stepper, finish, shapes, untouched, wall
from nbtools.measure.turns import Deadline, attempt, beside, objection
from nbtools.train import Plan, Sums, Task, TaskLike, evaluation
from nbtools.train import device as devices

SHARE, LEAST, MOST = 1 / 90, 12.0, 50.0  # of the training that is expected, seconds: what measuring may take (ours)
PARTS = {"precision": 0.3, "its losses": 0.5, "batch size": 0.7, "beside others": 1.2}
"""The parts of the search, and the share of the time that is used when each ends."""

FASTER, NEAR = 1.05, 1.03  # from which a change is used; times the least that is as good
SLOW, LOOKS = 1.5, 5  # times the fastest combination: no further look at one that takes longer; looks at the others
FEW_STEPS = 3  # of warming up
LONG = 1.0  # seconds of a step, of which a part is enough to compare on a GPU
SHORT, FEW = 0.1, 4  # seconds of a step on a CPU that are enough to compare; samples of the first one
BATCH_GAIN = 1.08  # of another batch over the rules': less is within the noise of two measurements
BUSY, SHARED = 1.5, 0.83  # from so many processes a core, or below this share of the threads' time, a CPU is contended
LAUNCHES = 1.2  # times what the device works that the host takes, from which graphs are tried
WORDS = {"off": "float32", True: "channels_last", False: "channels_last=False"}
COMPILED = 8  # lengths at most: each of our lines' was compiled anew (on a CPU, a minute each), and torch stops there
COMPILE_PAYS = 1800.0  # seconds of training planned from which compiling is tried: it took 69 s here, on two busy cores


def advise(task: TaskLike, pack: Pack, measure: bool = True, seconds: float | None = None, **settings: Any) -> Advice:
    """Return the plan to start from, with reasons and what was measured here.

    Measuring takes about `seconds`, once per machine, pack and task: the result is kept next to the pack until a call
    gives it more time. None: a ninetieth of the training that it shortens, 12 to 60 s, on CUDA graphs and compilation
    besides. Then learning rates are tried, for a tenth of the training, 15 to 120 s. measure=False: use what was
    measured before, else only rules of thumb, without delay. Raises TrainError if not even one sample fits.
    """
    if settings:
        raise PlanError(f"advise takes no {', '.join(settings)}; change its plan: nb.advise(task, pack).plan.turn(…)")
    task = train.as_task(task)
    pretrained, network = describe_network(task, pack)
    path = pack.folder.with_name(f"{pack.folder.name}.advice.json")  # not in it, since a pack's contents are verified
    pack = task.part(pack, by_rules(task, pack, pretrained, {}).plan)
    advice, kept = by_rules(task, pack, pretrained, {}), dict[str, Any]()
    parts = [VERSION, machine(), pack.card.digest, train.task_name(task), advice.plan.to_dict(), *network]
    key = digest(json.dumps(parts, sort_keys=True))
    with suppress(OSError, ValueError):
        kept = dict(json.loads(path.read_text()))
    if key in kept and (not measure or (seconds or 0.0) <= kept[key].get("seconds", LEAST)):
        advice = Advice.from_dict(kept[key], type(task.PLAN))
    elif measure:
        train.require_sizes(pack)
        name = train.title_of(task).rpartition(".")[2]
        with work(f"measuring {name} on this machine"):
            advice = search_plan(task, pack, partial(by_rules, task, pack, pretrained), seconds)
        with suppress(OSError):  # a pack may be on a read-only disk
            disk.write_atomic(path, json.dumps({**kept, key: {**advice.to_dict(), "seconds": seconds or LEAST}}))
    return dataclasses.replace(advice, presets={name: preset(task, pack, name) for name in task.PRESETS})


def describe_network(task: Task, pack: Pack) -> tuple[bool, list[Any]]:
    """Return (whether its weights are pretrained, as frozen parameters say too; what tells a network of one's own and
    its loss from others: such a task may have no name, or the same one for another network)."""
    own = train.bind(task, pack.card)
    if own.card is None:
        return bool(own.pretrained), []
    with devices.untouched(torch.device("cpu")):
        model = train.build(own, pack.card, own.PLAN)
    pretrained = bool(own.pretrained) or not all(parameter.requires_grad for parameter in model.parameters())
    return pretrained, [pretrained, train.identity(own, pack.card, model, own.PLAN)]


def by_rules(task: Task, pack: Pack, pretrained: bool, chosen: Choices) -> Advice:
    """Return advice by the rules from the results so far; the feed is chosen by the pack's size."""
    advice = decide(task, pack.card, inspect(), chosen, pretrained)
    suggested = advice.reasons.get("feed", "auto is {} here: {}".format(*choose(pack, advice.plan, devices.pick())))
    return dataclasses.replace(advice, reasons={**advice.reasons, "feed": suggested})


def search_plan(task: Task, pack: Pack, rules: Callable[[Choices], Advice], seconds: float | None) -> Advice:
    """Search for a plan that is faster than the rules' own, then for its learning rate."""
    start, threads = wall(), torch.get_num_threads()
    with untouched(device := devices.pick()):
        torch.set_num_threads(1 if device.type == "cpu" else threads)
        search = Search(task, pack, rules, seconds)
        search.choose_arithmetic()
        if "batch_size" not in search.fixed:  # what does not fit into memory, training takes in smaller passes
            search.choose_batch()
        if search.device.type == "cuda":
            search.choose_graph_or_compiler()
        torch.set_num_threads(threads)
        busy = search.cpu and contended(device)
        torch.set_num_threads(1 if busy else threads)  # which would wait for each other
        verdict = search.guard()
        torch.set_num_threads(threads)
        trial = search.choose_epochs_and_lr(verdict)
    note = f"Measured on {', '.join(machine().values())} in {wall() - start:.0f} s, where a reason says so."
    note += " The machine was busy with other work, or shows more cores than it gives: times are for one thread." * busy
    note += " The guides are those of docs/guides.md."
    return dataclasses.replace(search.advice, note=note, ratios=search.ratios, lr_trial=trial, verdict=verdict)


def contended(device: torch.device) -> bool:
    """Return whether other processes take a CPU's time: by the load average, or by the share that all threads get in
    half a second of matrix products. On two cores it was 0.92 to 0.99, beside one process 0.53 to 0.73 (n = 39)."""
    begun, used = wall(), process_time()
    matrix_rates(device, torch.float32, 0.5)
    alone = (wall() - begun) * torch.get_num_threads()
    return process_time() - used < SHARED * alone or os.getloadavg()[0] > BUSY * max(cores(), os.cpu_count() or 1)


class Search:
    """The advice so far. rules: chosen settings → advice; chosen: setting → (value, why), of what was measured; fixed:
    settings that the task chose; ratios: of the rules' and the baseline's samples/s over the plan's."""

    def __init__(self, task: Task, pack: Pack, rules: Callable[[Choices], Advice], seconds: float | None):
        self.task, self.pack, self.rules, self.device = task, pack, rules, devices.pick()
        self.advice, self.fixed = rules({}), task.suggest(pack.card, self.device.type)
        self.chosen, self.ratios = Choices(), dict[str, float]()
        self.cpu = self.device.type == "cpu"
        self.clock: Clock = process_time if self.cpu else wall
        self.sample_s = SHORT / FEW if self.cpu else 1e-9  # until it is measured: on a GPU by a whole batch
        self.sample_s, self.evaluation_s, self.eager_s = self.first_steps(self.plan), 0.0, 0.0
        self.samples = self.plan.epochs * pack.splits["train"]  # of the whole training
        self.seconds = seconds or min(max(SHARE * self.samples * self.sample_s, LEAST), MOST)
        self.most, self.start = seconds or MOST, [self.clock(), wall()]

    @property
    def plan(self) -> Plan:
        return self.advice.plan

    def take(self, choices: Choices) -> None:
        """Choose values, each with what was measured of it; the other settings follow."""
        self.chosen |= choices
        self.advice = self.rules(self.chosen)

    def until(self, part: str) -> Deadline:
        """Begin a part of the search; return the clock that ends it."""
        deadline = Deadline(PARTS[part] * self.seconds, PARTS[part] * self.most, self.clock, self.start)
        phase(part, max(deadline.left(), 0.0))
        return deadline

    def part_of(self, plan: Plan, step_s: float) -> Plan:
        """Return the plan at the part of its batch of which a step takes so many seconds."""
        size = max(2, int(step_s / self.sample_s))
        return plan if size >= plan.batch_size else plan.replace(batch_size=size, micro_batch_size=None)

    def stepper(self, plan: Plan, clock: Clock, feed: Feed | None = None) -> Stepper:
        """Return a plan in training at the size of all that are compared, on one batch, or on CUDA the same few."""
        plan = self.part_of(plan.replace(**EAGER), SHORT).replace(micro_batch_size=None)
        made = Stepper(self.task, self.pack, plan, self.device, feed, clock)
        made.repeat(plan.batch_size)
        return made

    def first_steps(self, plan: Plan) -> float:
        """Return the seconds that a step takes for a sample; and see which layers there are."""
        stepper = self.stepper(plan, self.clock)
        try:
            train.rehearse(stepper.state, stepper.pack)
            stepper.advance()
            stepper.device_s()  # starts the GPU's tracer, which takes seconds
        except (RuntimeError, NbtoolsError):
            if plan.amp == "off" or "amp" in self.fixed:
                raise
            return self.first_steps(plan.replace(amp="off"))  # half precision lacks operations; `compare` will see it
        layers = [*stepper.state.model.modules()]
        self.convolves = any(isinstance(layer, nn.Conv2d) for layer in layers)
        self.compiles = not any(isinstance(layer, nn.RNNBase) for layer in layers)  # there the compiler gives up
        return max(stepper.advance().seconds / stepper.plan.batch_size, 1e-9)

    def choose_arithmetic(self) -> None:
        """Take the precision and layout with which the device works least for a sample, if they learn the same."""
        changes = self.combinations()
        costs, whys = self.compare(changes)
        least, own = min(costs.values(), default=0.0), costs.get("", 0.0)
        best = "" if own else min(costs, key=costs.__getitem__, default="")  # where the rules' own does not train
        faster = [name for name in costs if own >= FASTER * costs[name]]
        for name in sorted(faster, key=lambda name: (costs[name] > NEAR * least, len(changes[name]), costs[name])):
            whys[name] = "is faster, but there was no time to check that it learns the same"
            with self.until("its losses") as clock:
                clock()  # before two models are made
                plain = self.plan.replace(**EAGER)
                whys[name] = objection(self.task, self.pack, plain, changes[name], clock, self.sample_s)
            if not whys[name]:
                best = name
                break
        tried = [f"{name} {own / cost:.2f}×" for name, cost in costs.items() if name and own]
        tried += [f"{name or WORDS.get(self.plan.amp, self.plan.amp)} {why}" for name, why in whys.items() if why]
        how = "the processor's time on one thread" if self.cpu else "the GPU's time"
        text = f"measured here by {how} per step: {', '.join(tried)}; used from {FASTER:.2f}×"
        text = text if tried else "no alternative was tried: time ran out"
        names = sorted({*itertools.chain(*changes.values())})  # amp first, where all is said
        plan, brief = self.plan.replace(**changes[best]), f"measured here, with {', '.join(names[:1])}"
        self.take({name: (getattr(plan, name), brief if i else text) for i, name in enumerate(names)})

    def combinations(self) -> dict[str, dict[str, Any]]:
        """Return name → what differs from the plan: nothing, another precision or layout, both at once."""
        reduced = sorted({devices.reduced_precision(self.device), "fp16"})
        amps = {"cpu": ("off", "bf16"), "cuda": (*reduced, "off")}.get(self.device.type, ())
        options = {"amp": amps, "channels_last": (False, True) if self.convolves and amps else ()}
        options = {name: values for name, values in options.items() if values and name not in self.fixed}
        changes = dict[str, dict[str, Any]]({"": {}})
        for row in itertools.product(*options.values()):
            settings = zip(options, row, strict=True)
            change = {name: value for name, value in settings if value != getattr(self.plan, name)}
            changes[", ".join(WORDS.get(value, str(value)) for value in change.values())] = change
        return dict(sorted(changes.items(), key=lambda each: len(each[1])))  # time may end before the last

    def compare(self, changes: dict[str, dict[str, Any]]) -> tuple[dict[str, float], dict[str, str]]:
        """Return (name → seconds of a step on the device, by a CUDA trace or the fastest turn; name → why it fails)."""
        costs, whys, steppers = dict[str, float](), dict[str, str](), dict[str, Stepper]()
        with self.until("precision") as clock:
            feed = None
            for name, change in changes.items():
                made = attempt(partial(self.stepper, self.plan.replace(**change), clock, feed), FEW_STEPS)
                if isinstance(made, str):
                    whys[name] = made
                    continue
                made.advance()
                costs[name], feed = made.device_s(), feed or made.feed  # on a GPU one pack for all
                if self.device.type == "cuda":  # one trace is enough
                    made.batches.close()  # frees the model
                else:
                    steppers[name] = made
            for _ in range(LOOKS - 1):
                for name, stepper in steppers.items():
                    if costs[name] <= SLOW * min(costs.values()):
                        stepper.advance()
                        costs[name] = stepper.device_s()
        return costs, whys

    def choose_batch(self) -> None:
        own, report, most = self.plan.batch_size, None, enough(self.pack.card)
        with self.until("batch size") as clock:
            report = find_batch(self.task, self.pack, self.plan.replace(**EAGER), max(clock.left(), 0.1), most, clock)
        if report is None:
            reason = f"{self.advice.reasons['batch_size']}; there was no time to measure others"
            return self.take({"batch_size": (own, reason)})
        speeds, kept = {row.batch_size: row.samples_per_s for row in report.rows if not row.reason}, ""
        if own in speeds and speeds[report.batch_size] < BATCH_GAIN * speeds[own]:
            kept = f"it is within {BATCH_GAIN - 1:.0%} of that"
        elif report.ended == LATE and own > max(speeds):
            kept = "there was no time to try it"
        text = f"measured here: {report}" + (f"; {own} is kept: {kept}" if kept and report.batch_size != own else "")
        self.take({"batch_size": (own if kept else report.batch_size, text)})

    def choose_graph_or_compiler(self) -> None:
        """Use CUDA graphs where launching is the limit, torch.compile where training is long, if faster in turns. An
        fp16 plan gets graphs in bf16, the rules' own there, or in float32: neither is checked for losses."""
        begun, plan = wall(), self.part_of(self.plan, LONG)
        run = Stepper(self.task, self.pack, plan, self.device).warm_up()
        host, device, graph = run.advance(steps=3).host_s, run.device_s(), graph_change(run)
        whole = device * self.plan.batch_size / plan.batch_size
        change, self.eager_s = dict[str, Any](), max(host, whole)  # as long as steps of the lr trial: it records none
        if host > LAUNCHES * device and not graph.keys() & self.fixed.keys():
            change = graph
        elif "compile" not in self.fixed and device > host and self.compiles and not self.plan.compile:
            long = self.samples * device / plan.batch_size >= COMPILE_PAYS
            longest = max(Padding(self.pack).longest.values(), default=0)
            many = hasattr(plan, "bucket") and shapes(self.pack, self.plan) > COMPILED
            change = {"compile": True} | ({"bucket": math.ceil(longest / COMPILED)} if many else {}) if long else {}
        if change:  # a capture that could end this process is tried in another one before (nbtools.train.graph)
            trial = beside(run, plan.replace(**change), max(self.seconds / 10, 1.0))
            used, why = trial.faster and trial.ratio >= FASTER, f"measured here in turns with the plan: {trial}"
            first = next(iter(change))  # what is shown as not used, beside the precision that stays
            self.take({name: (value, why) for name, value in change.items()} if used else {first: (False, why)})
        self.start = [each + wall() - begun for each in self.start]  # recording, compiling: as long as it takes

    def guard(self) -> Verdict | None:
        """Train the plan in turns with the rules' own, which takes its place where that is faster, and the baseline, on
        a CPU parts of long steps. Return what a step of the plan consists of, None if there was no time."""
        rules, made = self.rules({}).plan, None
        with self.until("beside others") as deadline:
            seconds, short = deadline.left() / 6, deadline.left() / 32
            part = partial(self.part_of, step_s=short)

            def warm(plan: Plan) -> Stepper:
                return Stepper(self.task, self.pack, part(plan), self.device, clock=deadline.wall).warm_up(FEW_STEPS)

            run = warm(self.plan)
            if self.plan != rules:
                trial = beside(run, part(rules), seconds, FEW_STEPS)
                self.ratios["rules"] = trial.ratio
                if trial.faster:
                    why = f"measured here: the rules' value was {trial.ratio:.2f}× as fast in {len(trial.ratios)} turns"
                    back = self.plan.changes_from(rules).keys() & self.chosen.keys()
                    self.take({name: (getattr(rules, name), why) for name in back})
                    self.ratios["rules"], run = 1.0, warm(rules)
            made = verdict_of(run, seconds)
            self.evaluation_s = evaluation_s(run, self.plan)
            baseline = part(comparable(self.task.BASELINE, self.plan, self.pack))
            self.ratios["baseline"] = beside(run, baseline, seconds, FEW_STEPS).ratio
        return made

    def choose_epochs_and_lr(self, verdict: Verdict | None) -> LrTrial:
        """Choose the epochs of a small data set and of an evaluation by their speed, and lr by a trial."""
        samples, batch = self.pack.splits["train"], self.plan.batch_size
        epoch_s = samples * (1 / verdict.timing.samples_per_s if verdict else self.sample_s)
        few = more_epochs(self.pack.card, batch, epoch_s)
        if few and "epochs" not in self.fixed and not has_recipe(self.task, "epochs"):
            self.take({"epochs": few})
        price = self.evaluation_s * samples / epoch_s
        if price and (seldom := evaluations(self.task.PLAN, self.pack.card, self.plan.epochs, price)):
            self.take({"eval_every": seldom})
        step_s = max(epoch_s / batches_in(samples, batch), self.eager_s)
        trial = lr_trial(self.task, self.pack, self.plan, step_s, "lr" in self.fixed or has_recipe(self.task, "lr"))
        reason = trial.reason if trial.lr else f"{self.advice.reasons['lr']}; {trial.reason}"
        self.take({"lr": (trial.lr or self.plan.lr, reason)})
        return trial


def evaluation_s(run: Stepper, plan: Plan) -> float:
    """Return the seconds that an evaluation during training takes for a sample; 0.0 without validation samples."""
    plan, seconds = plan.while_training().replace(micro_batch_size=run.state.micro), 0.0
    size = plan.batch_size * max(run.lanes, 1)
    for most in (2, size, size) if len(run.pack.ids("val")) else ():  # the first ones load kernels
        start, few, sums = run.clock(), plan.replace(eval_samples=most), Sums(run.device)
        samples = sum(evaluation.score_split(run.task, run.state.model, run.pack, few, "val", sums, run.feed))
        finish(run.device)
        seconds = (run.clock() - start) / samples
    return seconds
