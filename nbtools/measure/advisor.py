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
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from nbtools import disk
from nbtools.data import Pack, Padding, Raw, batches_in, choose, gather, on, phase, work
from nbtools.disk import VERSION
from nbtools.errors import DiskError, NbtoolsError
from nbtools.measure.advice import THUMB, Advice, decide, enough, epochs_for_few, has_recipe, inspect
from nbtools.measure.batch import LATE, BatchReport, find_batch
from nbtools.measure.lr import LEAST_S, LrTrial, lr_trial
from nbtools.measure.machine import machine, others_share
from nbtools.measure.profile import StepProfile, compiles, profile_of, replays, shapes, verdict
from nbtools.measure.receipt import comparable, preset
from nbtools.measure.timing import (
    EAGER,
    Deadline,
    Stepper,
    attempt,
    in_turns,
    own_time,
    typical,
    untouched,
    wall,
)
from nbtools.show import digits, percent
from nbtools.train import (
    Plan,
    Task,
    TaskLike,
    TrainState,
    as_task,
    bound,
    build,
    gradients,
    objective,
    readable,
    rehearse,
    require_sizes,
    spoken,
    task_name,
)
from nbtools.train import device as devices

KEPT = 8  # results next to a pack, for instance of other machines
SHARE, LEAST, MOST = 1 / 90, 12.0, 50.0  # of the training that is expected, seconds: what measuring may take (ours)
PHASES = {"precision": 0.3, "its losses": 0.5, "batch size": 0.7, "beside others": 1.0, "profile": 1.2}
"""The parts of the search, and the share of the time that is used when each ends."""

FASTER, NEAR = 1.05, 1.03  # from which a change is used; times the least that is as good
SLOW, LOOKS = 1.5, 5  # times the fastest combination: no further look at one that takes longer; looks at the others
FEW_STEPS = 3  # of warming up
SHORT, FEW = 0.1, 4  # seconds of a step on a CPU that are enough to compare; samples of the first one
BATCH_GAIN = 1.08  # of another batch over the rules': less is within the noise of two measurements
LAUNCHES = 1.2  # times what the device works that the host takes, from which graphs are tried
STEPS, BATCHES, SAMPLES = 6, 3, 8  # after which, on which losses and gradients are compared; of a batch at most
SAME_LOSS, SAME_GRADIENT = 0.01, 0.99  # relative; cosine: bf16 keeps 8 bits, 0.4 % a number
CONTROL = 3.0  # times what two equal runs differ by
BUSY = 0.2  # of the processor that other programs take, from which a CPU is contended
LONG_S = 600.0  # seconds of training beyond which a small data set gets no more epochs

Change = tuple[tuple[str, Any], ...]
Choices = dict[str, tuple[Any, str]]
"""setting → (value, why)"""


def advise(task: TaskLike, pack: Pack, measure: bool = True, seconds: float | None = None) -> Advice:
    """Return the plan to start from, each field with its reason and, where it was measured here, the evidence.

    Measuring takes about `seconds`, once for a machine, a pack and a task: the result is kept next to the pack; None: a
    ninetieth of the training that it shortens, at least 12 s and at most 60. Then learning rates are tried, for a tenth
    of the training, at most 120 s. measure=False: use what was measured before, else only rules of thumb, without
    delay. Raises TrainError if not even one sample fits.
    """
    task = as_task(task)
    made = known_or_measured(task, pack, measure, seconds)
    return dataclasses.replace(made, presets={name: preset(task, pack, name) for name in task.PRESETS})


def known_or_measured(task: Task, pack: Pack, measure: bool, seconds: float | None) -> Advice:
    """Return what was measured before, else by the rules, or measured now and kept."""
    thumb, path = by_rules(task, pack, {}), shelf(pack)
    if (part := readable(task, pack, thumb.plan)) is not pack:
        pack, thumb = part, by_rules(task, part, {})
    name, before = label(task, pack, thumb), kept(path)
    if name in before:
        return Advice.from_dict(before[name], type(task.PLAN))
    if not measure:
        return thumb
    require_sizes(pack)
    with work(f"measuring {spoken(task).rpartition('.')[2]} on this machine", **dict.fromkeys(PHASES, LEAST / 4)):
        made = measured(task, pack, thumb, seconds)
    shelved = [*before.items(), (name, made.to_dict())][-KEPT:]
    try:
        with disk.explained("saving the advice", path):
            disk.write_atomic(path, json.dumps(dict(shelved)))
    except DiskError as error:  # a pack may be on a read-only disk
        return dataclasses.replace(made, note=f"{made.note} Not saved for the next time: {error}")
    return made


def by_rules(task: TaskLike, pack: Pack, chosen: Choices) -> Advice:
    """Return advice by the rules from the results so far; the feed is chosen by the pack's size."""
    own = bound(task, pack.card)
    pretrained = bool(own.pretrained)
    if own.card is not None and not pretrained:  # frozen parameters say so of a network of one's own
        with torch.random.fork_rng(devices=[]):
            pretrained = not all(p.requires_grad for p in build(own, pack.card, own.PLAN).parameters())
    advice = decide(task, pack.card, inspect(), chosen, pretrained)
    if "feed" in advice.reasons:  # suggested by the task
        return advice
    name, why = choose(pack, advice.plan, devices.pick())
    return dataclasses.replace(advice, reasons={**advice.reasons, "feed": f"auto is {name} here: {why}"})


def measured(task: Task, pack: Pack, thumb: Advice, seconds: float | None) -> Advice:
    """Search for a plan that is faster than the rules' own, then for its learning rate."""
    device, start = devices.pick(), wall()
    own = task.suggest(pack.card, device.type)
    with untouched(device):
        search = Search(task, pack, thumb.plan, own, seconds)
        chosen = search.precision_and_layout()
        if "batch_size" not in own or device.type == "cuda":  # of a GPU the memory has to be known in any case
            chosen |= search.batch_size(enough(pack.card))
        search.plan = by_rules(task, pack, chosen).plan
        chosen |= search.graph_or_compiler()
        profile = search.guard(thumb.plan, comparable(task.BASELINE, search.plan, pack)[0])
        chosen = chosen if search.plan != thumb.plan else {}
        phase("learning rate", LEAST_S)
        more, trial = search.epochs_and_lr(chosen, profile)
    advice = by_rules(task, pack, {**chosen, **more})
    note = f"Measured on {', '.join(machine().values())} in {wall() - start:.0f} s, except where a {THUMB} is"
    note += " named."
    if search.contended:
        note += f" Other programs took {percent(search.contended)} of the processor: settings were compared by its time"
        note += " on one thread, not by the wall, and times are of such a machine."
    return dataclasses.replace(
        advice,
        note=note,
        evidence=search.evidence,
        ratios=search.ratios,
        batches=search.batches,
        lr_trial=trial,
        profile=profile,
        verdict=profile and verdict(profile),
    )


class Search:
    """The plan so far, and what was measured. fixed: settings that the task chose; evidence: setting → what was
    measured of it; ratios: of the rules' and the baseline's samples/s over the plan's; contended: the share of a CPU
    that other programs took, 0 if it was small."""

    def __init__(self, task: Task, pack: Pack, plan: Plan, fixed: Collection[str], seconds: float | None):
        self.task, self.pack, self.device, self.fixed = task, pack, devices.pick(), fixed
        self.plan, self.cpu = plan.replace(**EAGER), self.device.type == "cpu"
        self.clock = Deadline(seconds or LEAST, seconds or MOST, own_time if self.cpu else wall)
        self.others, self.contended = others_share(), 0.0
        self.evidence: dict[str, str] = {}
        self.ratios: dict[str, float] = {}
        self.batches: BatchReport | None = None
        self.base = self.first_step()
        self.clock.grant(self.clock.seconds - self.clock.left(1.0))  # imports, first kernels, the growth of the batch
        if seconds is None:
            self.clock.seconds = min(max(SHARE * self.training(self.step_s), LEAST), MOST)

    def training(self, step_s: float) -> float:
        """Return the seconds of all steps of the plan."""
        return self.plan.epochs * batches_in(self.pack.splits["train"], self.plan.batch_size) * step_s

    def until(self, name: str) -> Any:
        return self.clock.until(PHASES[name], name)

    def by_wall(self) -> float:
        """Return the wall's time, within the part of the search."""
        self.clock()
        return wall()

    # -- precision and layout

    def first_step(self) -> Stepper:
        """Return the plan in training, on a CPU at a part of its batch that makes a short step."""
        self.size = FEW if self.cpu else self.plan.batch_size
        stepper = self.stepper(self.plan)
        rehearse(stepper.state, stepper.pack)
        for _ in range(2):
            self.step_s = stepper.advance().seconds * self.plan.batch_size / stepper.plan.batch_size
        stepper.close()
        self.size = self.part(self.plan, SHORT).batch_size
        stepper = self.stepper(self.plan).warm_up(FEW_STEPS)
        self.step_s = stepper.advance().seconds * self.plan.batch_size / stepper.plan.batch_size
        return stepper

    def stepper(self, plan: Plan) -> Stepper:
        """Return a plan in training at the size of all that are compared, on a CPU on one thread."""
        if self.size < plan.batch_size:
            plan = plan.replace(batch_size=self.size, micro_batch_size=None)
        plan = plan.replace(threads=1) if self.cpu else plan
        made = Stepper(self.task, self.pack, plan, self.device, clock=self.clock)
        if self.pack.card.bucket_by:  # one batch for all: lengths differ by more than what is compared
            [(ids, _)] = typical(self.pack, plan)
            made.batches = itertools.repeat(on(self.device, gather(self.pack, ids, Padding(self.pack, plan))))
        return made

    def part(self, plan: Plan, step_s: float) -> Plan:
        """Return the plan, on a CPU at the part of its batch of which a step takes so many seconds."""
        size = max(2, int(step_s / max(self.step_s, 1e-9) * plan.batch_size)) if self.cpu else plan.batch_size
        return plan if size >= plan.batch_size else plan.replace(batch_size=size, micro_batch_size=None)

    def precision_and_layout(self) -> Choices:
        """Take the combination with which the device works least for a sample, if it learns the same; return what
        differs from the plan."""
        costs, whys, before = dict[Change, float](), dict[Change, str](), self.plan
        changes = [*self.combinations()]
        with self.until("precision"):
            self.compare(changes, costs, whys)
        least = min(costs.values(), default=math.inf)
        faster = [change for change, cost in costs.items() if costs[()] >= FASTER * cost]
        near = {change: costs[change] <= NEAR * least for change in faster}  # of equal ones that which changes least
        for change in sorted(faster, key=lambda each: (not near[each], near[each] * len(each), costs[each])):
            whys[change] = "is faster, but there was no time to see whether it learns the same"
            with self.until("its losses"):
                whys[change] = self.objection(dict(change))
            if not whys[change]:
                self.plan = self.plan.replace(**dict(change))
                break
        text = "no other one was tried: the machine is busy, and the time was over"
        if len(costs) + len(whys) > 1:
            tried = [f"{named(change)} {costs[()] / cost:.2f}×" for change, cost in costs.items() if change]
            tried += [f"{named(change)} {why}" for change, why in whys.items() if why]
            how = "the GPU's time" if self.device.type == "cuda" else "the processor's time on one thread"
            text = f"by {how} a step: {', '.join(tried)}; used from {FASTER:.2f}× on"
        self.evidence |= dict.fromkeys({name for change in changes for name, _ in change}, text)
        del self.base
        why = "of those that learn the same the fastest, measured here"
        return {name: (getattr(self.plan, name), why) for name in self.plan.changes_from(before)}

    def compare(self, changes: Sequence[Change], costs: dict[Change, float], whys: dict[Change, str]) -> None:
        """Fill in what the device works for a step of the plan and of each other combination: on CUDA by a trace, else
        the fastest of some steps in turns; or why it does not train."""
        steppers = dict[Change, Stepper]()
        for change in changes:
            plan = self.plan.replace(**dict(change))
            made = attempt(partial(self.stepper, plan), FEW_STEPS) if change else self.base
            if isinstance(made, Stepper):
                made.advance()
                steppers[change], costs[change] = made, made.device_s()
            else:
                whys[change] = made
        for _ in range(0 if self.device.type == "cuda" else LOOKS - 1):
            for change, stepper in steppers.items():
                if costs[change] <= SLOW * min(costs.values()):
                    stepper.advance()
                    costs[change] = stepper.device_s()

    def combinations(self) -> Iterator[Change]:
        """Yield what the plan is, then the other precisions and layouts, and both at once."""
        plan, values = self.plan, {}
        if "amp" not in self.fixed:
            values["amp"] = [plan.amp, *(amp for amp in precisions(self.device) if amp != plan.amp)]
        images = any(isinstance(layer, nn.Conv2d) for layer in self.base.state.model.modules())
        if images and "channels_last" not in self.fixed:
            values["channels_last"] = [plan.channels_last, not plan.channels_last]
        for row in itertools.product(*values.values()):
            yield tuple((n, value) for n, value in zip(values, row, strict=True) if value != getattr(plan, n))

    def objection(self, change: Mapping[str, Any]) -> str:
        """Return how loss and gradient of some batches differ with other arithmetic, at the same weights and with
        dropout off, beyond what is due to chance; "" if they do not."""
        size = min(self.plan.batch_size, SAMPLES)
        still = {"batch_size": size, "micro_batch_size": None, "warmup_epochs": 0.0, "schedule": "constant"}
        plan = self.plan.replace(**still)
        try:
            plain, changed = self.without_dropout(plan), self.without_dropout(plan.replace(**change))
            padding = Padding(self.pack, plan)
            batches = [on(self.device, gather(self.pack, ids, padding)) for ids, _ in typical(self.pack, plan, BATCHES)]
            for number in range(STEPS):  # the gradients of first weights are mostly rounding in bf16
                plain.step(batches[number % len(batches)])
            changed.state.model.load_state_dict(plain.state.model.state_dict())
            first, again, other = (self.gradient(each.state, batches) for each in (plain, plain, changed))
        except (RuntimeError, NbtoolsError) as error:
            return f"fails ({str(error).partition(chr(10))[0]})"
        (control, alike), (far, cosine) = apart(first, again), apart(first, other)
        if not far <= max(SAME_LOSS, CONTROL * control):
            return f"is faster, but its loss differs by {percent(far, 1)}"
        if not 1 - cosine <= max(1 - SAME_GRADIENT, CONTROL * (1 - alike)):
            return f"is faster, but its gradient has a cosine of {cosine:.3f} to the plan's"
        return ""

    def without_dropout(self, plan: Plan) -> Stepper:
        stepper = Stepper(self.task, self.pack, plan, self.device, clock=self.clock, learning=True)
        for layer in stepper.state.model.modules():
            if isinstance(layer, nn.modules.dropout._DropoutNd):
                layer.p = 0.0
            elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
                layer.dropout = 0.0
        return stepper

    def gradient(self, state: TrainState, batches: Sequence[Raw]) -> tuple[float, Tensor]:
        """Return (mean loss, gradient) of batches, the same random numbers drawn each time."""
        losses, parts, scaler = list[float](), list[Tensor](), state.scaler
        state.restore_rng()
        for raw in batches:
            self.clock()
            total, count = gradients(state, raw, len(raw["id"]))
            losses.append(float(total) / max(float(count), 1))
            parts.append(torch.cat([p.grad.double().flatten() for p in state.parameters if p.grad is not None]))
            parts[-1] /= scaler.get_scale() if scaler is not None else 1.0
        return sum(losses) / len(losses), torch.stack(parts).sum(0)

    # -- batch, graphs, compiler

    def batch_size(self, most: int) -> Choices:
        """Return settings: the batch, where another than the plan's is faster; micro batches, where that does not fit.
        One that the task suggests stands."""
        plan, late = self.plan.replace(threads=1) if self.cpu else self.plan, "there was no time to try others"
        with self.until("batch size"):
            self.batches = find_batch(
                self.task, self.pack, plan, max(self.clock.left(PHASES["batch size"]), 0.1), most, self.clock
            )
        if (report := self.batches) is None:
            self.evidence["batch_size"] = late
            return {}
        speeds = {row.batch_size: row.samples_per_s for row in report.rows if row.rates and not row.reason}
        chosen, own = Choices(), speeds.get(plan.batch_size)
        if "batch_size" in self.fixed:
            why = f"; {plan.batch_size} is kept because the task is known to need it"
        elif own and speeds[report.batch_size] < BATCH_GAIN * own:
            why = f"; {plan.batch_size} is within {BATCH_GAIN - 1:.0%} of it, and kept"
        elif own or report.ended != LATE or plan.batch_size < max(speeds):
            why, chosen["batch_size"] = "", (report.batch_size, "the smallest that is nearly as fast as the fastest")
        else:
            why = f"; {plan.batch_size} is kept because {late}"
        self.evidence["batch_size"] = report.why + why
        if report.micro_batch_size is not None:
            chosen["micro_batch_size"] = report.micro_batch_size, "the whole batch does not fit at once"
        return chosen

    def graph_or_compiler(self) -> Choices:
        """Use CUDA graphs where launching is the limit, torch.compile where training is long, if they are faster in
        turns with the plan."""
        if self.device.type != "cuda":
            return {}
        left = self.clock.left(1.0)
        run = Stepper(self.task, self.pack, self.plan, self.device).warm_up()
        host, device, many = run.advance(steps=3).host_s, run.device_s(), shapes(run.pack, self.plan)
        if "graph" not in self.fixed and host > LAUNCHES * device and replays(self.plan, self.device, many):
            name = "graph"
        elif "compile" not in self.fixed and device > host and compiles(run, self.training(device)):
            name = "compile"
        else:
            return {}
        # Compiling and recording each shape take as long as they take; a capture that could end this process is tried
        # in another one before (nbtools.train.graph).
        changed = self.plan.replace(**{name: True})
        other = attempt(lambda: Stepper(self.task, self.pack, changed, self.device))
        if isinstance(other, Stepper):
            other.advance(steps=4 * many)
            other = other.state.graphs.off if other.state.graphs and other.state.graphs.off else other
        if isinstance(other, str):
            self.evidence[name] = f"{name} {other}"
            return {}
        for stepper in (run, other):
            stepper.turns.clear()
        in_turns([run, other], max(self.clock.left(PHASES["beside others"]) / 3, 1.0))
        self.clock.grant(left - self.clock.left(1.0))
        ratios = other.over(run)
        spread = f"{min(ratios):.2f}–{max(ratios):.2f}, n = {len(ratios)}"
        self.evidence[name] = f"{name} {median(ratios):.2f}× in turns ({spread})"
        if median(ratios) < FASTER or sorted(ratios)[len(ratios) // 4] <= 1:
            return {}
        self.plan = changed
        return {name: (True, "faster here, measured in turns")}

    # -- at last

    def guard(self, rules: Plan, baseline: Plan) -> StepProfile | None:
        """Train the plan in turns with the rules' own, which takes its place where that is faster, and with the
        baseline. Return what a step of the plan consists of, None if there was no time.

        On a CPU a part of a long step is trained; on a contended one without turns, on one thread: several wait for
        each other there.
        """
        plans = {"plan": self.plan, "rules": rules, "baseline": baseline}
        plans = {name: plan for name, plan in plans.items() if name == "plan" or plan != self.plan}
        if self.cpu and (others := self.others()) > BUSY:
            self.contended, plans = others, {"plan": self.plan.replace(threads=1)}
        steppers, best, profile = dict[str, Stepper](), "plan", None
        with self.until("beside others"):
            seconds = self.clock.left(PHASES["beside others"])
            for name, plan in plans.items():
                make = partial(
                    Stepper, self.task, self.pack, self.part(plan, seconds / 32), self.device, clock=self.by_wall
                )
                made = make().warm_up(FEW_STEPS) if name == "plan" else attempt(make, FEW_STEPS)
                steppers |= {name: made} if isinstance(made, Stepper) else {}
            in_turns([*steppers.values()], seconds / 2)
            ratios = {name: median(stepper.over(steppers["plan"])) for name, stepper in steppers.items()}
            best = "rules" if ratios.get("rules", 0.0) > 1 else "plan"
            if best == "rules":
                turns = len(steppers["rules"].turns)
                text = f"the rules' value was {ratios['rules']:.2f}× as fast in turns, n = {turns}"
                self.evidence |= dict.fromkeys(self.plan.changes_from(rules), text)
                self.plan = rules
            self.ratios = {name: ratio / ratios[best] for name, ratio in ratios.items() if name != "plan"}
        with self.until("profile"):
            profile = profile_of(steppers[best]) if best in steppers and steppers[best].turns else None
        for stepper in steppers.values():
            stepper.close()
        return profile

    def epochs_and_lr(self, chosen: Choices, profile: StepProfile | None) -> tuple[Choices, LrTrial]:
        """Choose the epochs of a small data set by the speed, and lr by a trial."""
        plan, more = by_rules(self.task, self.pack, chosen).plan, Choices()
        epoch_s = profile.steps_s if profile else self.training(self.step_s) / self.plan.epochs
        few = epochs_for_few(self.pack.card, plan.batch_size)
        if few and not has_recipe(self.task, "epochs") and plan.epochs == few[0] and few[0] * epoch_s > LONG_S:
            epochs = max(int(LONG_S / epoch_s), Plan().epochs)
            more["epochs"] = epochs, f"about {LONG_S / 60:.0f} minutes at the measured speed, or the default"
            plan = by_rules(self.task, self.pack, {**chosen, **more}).plan
        recipe = "lr" in self.fixed or has_recipe(self.task, "lr")
        trial = lr_trial(self.task, self.pack, plan, plan.epochs * epoch_s, recipe)
        self.evidence["lr"] = trial.reason
        if trial.lr is not None:
            more["lr"] = trial.lr, trial.reason
            self.evidence["lr"] = f"the trial began at the rule's {digits(trial.rule)} and took {trial.seconds:.0f} s"
        return more, trial


def precisions(device: torch.device) -> tuple[str, ...]:
    """Return the settings of Plan.amp that may be fast on a device."""
    if device.type == "cuda":
        return ("off", "bf16", "fp16") if devices.reduced(device) == "bf16" else ("off", "fp16")
    return ("off", "bf16") if device.type == "cpu" else ("off",)


def apart(these: tuple[float, Tensor], those: tuple[float, Tensor]) -> tuple[float, float]:
    """Return (how far the second loss is from the first, the cosine between the gradients)."""
    far = abs(those[0] - these[0]) / max(abs(these[0]), 1e-12)
    return far, float(torch.nn.functional.cosine_similarity(these[1], those[1], 0))


def named(change: Change) -> str:
    """Return a combination in words: `bf16, channels_last`."""
    words = {"off": "float32", True: "channels_last", False: "channels_last=False"}
    return ", ".join(str(words.get(value, value)) for _, value in change)


# -- kept next to the pack


def shelf(pack: Pack) -> Path:
    """Return the file of what was measured: next to the pack, not in it, since a pack's contents are verified."""
    return pack.folder.with_name(f"{pack.folder.name}.advice.json")


def kept(path: Path) -> dict[str, Any]:
    """Return label → what was measured before; {} if nothing was."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def label(task: Task, pack: Pack, thumb: Advice) -> str:
    """Return a hash of what the measurements depend on: machine and versions, data, task and the rules' plan."""
    own, network = bound(task, pack.card), []
    if own.card is not None:  # a task of one's own may have no name, or the same one for another network
        with torch.random.fork_rng(devices=[]):
            model = build(own, pack.card, thumb.plan)
        tensors = [[*parameter.shape, parameter.requires_grad] for parameter in model.parameters()]
        loss, *more = objective(own)
        loss = str(loss) if isinstance(loss, nn.Module) else getattr(loss, "__qualname__", "default")
        network = [str(model), tensors, bool(own.pretrained), loss, *more]
    parts = [VERSION, machine(), pack.card.digest, task_name(task), thumb.plan.to_dict(), *network]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()
