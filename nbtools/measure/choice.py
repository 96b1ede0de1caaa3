"""Choose the settings that make a step fast on this machine, each judged by what it changes: precision and layout
together by the time that the device works; the batch by samples/s; CUDA graphs where launching a step takes longer than
computing it; the compiler where training is long. Other arithmetic has to learn the same.

On a CPU the time is this process's on one thread: what other programs take is not in it, and a busy machine makes no
other plan than an idle one.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn

from nbtools.data import Pack, Padding, batches_in, gather, on
from nbtools.errors import NbtoolsError
from nbtools.measure.batch import LATE, BatchReport, find_batch
from nbtools.measure.graphs import replayed
from nbtools.measure.machine import others_share
from nbtools.measure.profile import StepProfile, profile_of, replays, shapes
from nbtools.measure.timing import EAGER, Clock, Stepper, Timing, in_turns, typical
from nbtools.show import percent
from nbtools.train import Plan, TaskLike, TrainState, gradients, rehearse
from nbtools.train import device as devices

FASTER, NEAR = 1.05, 1.03  # from which a change is used; times the least that is as good
SLOW, LOOKS = 1.5, 5  # times the fastest combination: no further look at one that takes longer; looks at the others
SHORT, FEW = 0.1, 4  # seconds of a step on a CPU that are enough to compare; samples of the first one
BATCH_GAIN = 1.08  # of another batch over the rules': less is within the noise of two measurements
LAUNCHES = 1.2  # times what the device works that the host takes, from which graphs are tried
COMPILE_PAYS = 1800.0  # seconds of training from which compiling is tried: it took 69 s here, on two busy cores
STEPS, BATCHES, SAMPLES = 6, 3, 8  # after which, on which losses and gradients are compared; of a batch at most
SAME_LOSS, SAME_GRADIENT = 0.01, 0.99  # relative; cosine: bf16 keeps 8 bits, 0.4 % a number
BUSY = 0.2  # of the processor that other programs take, from which a CPU is contended
CONTROL = 3.0  # times what two equal runs differ by
SHARE, LEAST, MOST = 1 / 90, 12.0, 60.0  # of the training that is expected, seconds: what measuring may take (ours)

Change = tuple[tuple[str, Any], ...]


class Choice:
    """The plan so far, and what was measured.

    fixed: settings that the task chose; seconds: for all, None: a share of the training. evidence: setting → what was
    measured of it; timings: of `plan`, and of the `rules'` and the `baseline` beside it; ratios: their samples/s over
    the plan's.
    """

    def __init__(
        self,
        task: TaskLike,
        pack: Pack,
        plan: Plan,
        device: torch.device,
        fixed: Collection[str],
        seconds: float | None,
        clock: Clock | None,
    ):
        self.task, self.pack, self.device, self.fixed, self.given_clock = task, pack, device, fixed, clock
        self.plan = plan.replace(**EAGER)
        self.wall, self.clock = clock or perf_counter, clock or (process_time if device.type == "cpu" else perf_counter)
        self.start, self.others = (self.wall(), self.clock()), others_share()
        self.evidence: dict[str, str] = {}
        self.timings: dict[str, Timing] = {}
        self.ratios: dict[str, float] = {}
        self.batches: BatchReport | None = None
        self.base, self.size = self.first_step()
        self.step_s = max(self.base.advance().seconds, 1e-9) * plan.batch_size / self.size
        training = plan.epochs * batches_in(self.base.pack.splits["train"], plan.batch_size) * self.step_s
        self.seconds, self.most = seconds or min(max(SHARE * training, LEAST), MOST), seconds or MOST

    def left(self, share: float) -> float:
        """Return the seconds until this share of the time is used. On a CPU what others take does not count, but never
        beyond `most` by the wall."""
        wall, own = self.wall() - self.start[0], self.clock() - self.start[1]
        return min(share * self.seconds - min(wall, own), share * self.most - wall)

    # -- precision and layout

    def first_step(self) -> tuple[Stepper, int]:
        """Return (the plan in training, samples of its batch): on a CPU as many as make a short step."""
        size = self.plan.batch_size
        if self.device.type == "cpu":
            size = min(FEW, size)
        stepper = self.stepper(self.plan, size)
        rehearse(stepper.state, stepper.pack)
        took = min(stepper.advance().seconds for _ in range(2))
        larger = min(int(size * SHORT / max(took, 1e-9)), self.plan.batch_size)
        if larger >= 2 * size:
            size = larger
            stepper.close()
            stepper = self.stepper(self.plan, size)
        return stepper.warm_up(3), size

    def stepper(self, plan: Plan, size: int) -> Stepper:
        plan = plan if size == plan.batch_size else plan.replace(batch_size=size, micro_batch_size=None)
        plan = plan.replace(threads=1) if self.device.type == "cpu" else plan
        return Stepper(self.task, self.pack, plan, self.device, clock=self.clock)

    def precision_and_layout(self, share: float) -> None:
        """Take the combination with which the device works least for a sample, if it learns the same."""
        steppers, whys = dict[Change, Stepper]({(): self.base}), dict[Change, str]()
        for change in self.combinations():
            if self.left(share) > 0:
                made = self.attempt(partial(self.stepper, self.plan.replace(**dict(change)), self.size))
                steppers |= {change: made} if isinstance(made, Stepper) else {}
                whys |= {change: made} if isinstance(made, str) else {}
        costs = self.device_seconds(steppers, share)
        faster = {change: cost for change, cost in costs.items() if costs[()] >= FASTER * cost}
        while faster:
            near = [change for change, cost in faster.items() if cost <= NEAR * min(faster.values())]
            change = min(near, key=len)  # of equal ones that which changes least
            if not (why := self.objection(dict(change))):
                self.plan = self.plan.replace(**dict(change))
                break
            whys[change] = why
            del faster[change]
        if self.left(share) < 0 and len(costs) < 2:
            self.evidence["amp"] = "no other one was tried: the machine is busy, and the time was over"
        elif len(costs) + len(whys) > 1:
            tried = [f"{named(change)} {costs[()] / costs[change]:.2f}×" for change in costs if change]
            tried += [f"{named(change)} {why}" for change, why in whys.items()]
            how = "the GPU's time" if self.device.type == "cuda" else "the processor's time on one thread"
            text = f"by {how} a step: {', '.join(tried)}; used from {FASTER:.2f}× on"
            self.evidence |= dict.fromkeys({name for change in {**costs, **whys} for name, _ in change}, text)
        del self.base

    def combinations(self) -> list[Change]:
        """Return the other precisions and layouts, and both at once."""
        plan, values = self.plan, {}
        if "amp" not in self.fixed:
            values["amp"] = [plan.amp, *(amp for amp in precisions(self.device) if amp != plan.amp)]
        images = any(isinstance(layer, nn.Conv2d) for layer in self.base.state.model.modules())
        if images and "channels_last" not in self.fixed:
            values["channels_last"] = [plan.channels_last, not plan.channels_last]
        rows = [tuple(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
        changes = [tuple((name, value) for name, value in row if value != getattr(plan, name)) for row in rows]
        return [change for change in changes if change]

    def attempt(self, make: Any) -> Stepper | str:
        """Return what trains, warm; or why it does not: bfloat16 lacks some operations, memory ends."""
        try:
            stepper, why = devices.within_memory(lambda: make().warm_up(3))
        except (RuntimeError, NbtoolsError, OSError) as error:
            return f"fails ({first_line(error)})"
        if stepper is None:
            return f"does not fit into memory ({why})"
        return f"fails (the loss became {float(stepper.loss)})" if stepper.lost else stepper

    def device_seconds(self, steppers: dict[Change, Stepper], share: float) -> dict[Change, float]:
        """Return what the device works for a step: on CUDA by a trace, else the fastest of some steps in turns."""
        times: dict[Change, float] = {}
        for look in range(1 if self.device.type == "cuda" else LOOKS):
            for change, stepper in steppers.items():
                if look and (times[change] > SLOW * min(times.values()) or self.left(share) < 0):
                    continue
                stepper.advance()
                times[change] = stepper.device_s()
        return times

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
            first, again, other = (gradient(each.state, batches) for each in (plain, plain, changed))
        except (RuntimeError, NbtoolsError) as error:
            return f"fails ({first_line(error)})"
        (control, alike), (far, cosine) = compare(first, again), compare(first, other)
        if not far <= max(SAME_LOSS, CONTROL * control):
            return f"is faster, but its loss differs by {percent(far, 1)}"
        if not 1 - cosine <= max(1 - SAME_GRADIENT, CONTROL * (1 - alike)):
            return f"is faster, but its gradient has a cosine of {cosine:.3f} to the plan's"
        return ""

    def without_dropout(self, plan: Plan) -> Stepper:
        stepper = Stepper(self.task, self.pack, plan, self.device, learning=True)
        for layer in stepper.state.model.modules():
            if isinstance(layer, nn.modules.dropout._DropoutNd):
                layer.p = 0.0
            elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
                layer.dropout = 0.0
        return stepper

    # -- batch, graphs, compiler

    def batch_size(self, share: float, most: int) -> dict[str, tuple[Any, str]]:
        """Return settings: the batch, where another than the plan's is faster; micro batches, where that does not fit.
        One that the task suggests stands."""
        plan = self.plan.replace(threads=1) if self.device.type == "cpu" else self.plan
        self.batches = report = find_batch(
            self.task, self.pack, plan, self.device, max(self.left(share), 0.1), most, self.clock
        )
        speeds = {row.batch_size: row.samples_per_s for row in report.rows if row.rates and not row.reason}
        chosen, own = dict[str, tuple[Any, str]](), speeds.get(plan.batch_size)
        self.evidence["batch_size"] = report.why
        if "batch_size" in self.fixed:
            self.evidence["batch_size"] += f"; {plan.batch_size} is kept because the task is known to need it"
        elif own and speeds[report.batch_size] < BATCH_GAIN * own:
            self.evidence["batch_size"] += f"; {plan.batch_size} is within {BATCH_GAIN - 1:.0%} of it, and kept"
        elif own or report.ended != LATE or plan.batch_size < max(speeds):
            chosen["batch_size"] = report.batch_size, "the smallest that is nearly as fast as the fastest"
        else:
            self.evidence["batch_size"] += f"; {plan.batch_size} is kept because there was no time to try it"
        if report.micro_batch_size is not None:
            chosen["micro_batch_size"] = report.micro_batch_size, "the whole batch does not fit at once"
        return chosen

    def graph_and_compiler(self, share: float, compiling: bool) -> None:
        """Use CUDA graphs where launching is the limit, torch.compile where training is long, if they are faster."""
        if self.device.type != "cuda" and not compiling:
            return
        run = Stepper(self.task, self.pack, self.plan, self.device, clock=self.wall).warm_up()
        host, device = run.advance(steps=3).host_s, run.device_s()
        training = self.plan.epochs * batches_in(run.pack.splits["train"], self.plan.batch_size) * max(host, device)
        count, seconds = shapes(run.pack, self.plan), max(self.left(share), 2.0)
        recurrent = any(isinstance(layer, nn.RNNBase) for layer in run.state.model.modules())
        if "graph" not in self.fixed and replays(self.plan, self.device, count) and host > LAUNCHES * device:
            run.close()
            del run
            self.judge("graph", *replayed(self.task, self.pack, self.plan, self.device, seconds))
        elif "compile" not in self.fixed and not recurrent and (compiling or (training > COMPILE_PAYS > device > host)):
            compiled = self.plan.replace(compile=True)
            other = self.attempt(lambda: Stepper(self.task, self.pack, compiled, self.device, clock=self.wall))
            if isinstance(other, str):
                return self.judge("compile", [], other)
            in_turns([run, other], seconds)
            self.judge("compile", other.over(run), "")

    def judge(self, name: str, ratios: list[float], why: str) -> None:
        """Use a setting that was faster in turns with the plan."""
        self.evidence[name] = f"{name} {why}"
        if ratios:
            spread = f"{min(ratios):.2f}–{max(ratios):.2f}, n = {len(ratios)}"
            self.evidence[name] = f"{name} {median(ratios):.2f}× in turns ({spread})"
            if median(ratios) >= FASTER and sorted(ratios)[len(ratios) // 4] > 1:
                self.plan = self.plan.replace(**{name: True})

    # -- at last

    @property
    def contended(self) -> bool:
        """Return whether other programs take so much of a CPU that the wall's time of a step is not the plan's."""
        return self.device.type == "cpu" and self.given_clock is None and self.others() > BUSY

    def guard(self, others: Mapping[str, Plan]) -> StepProfile:
        """Train the plan in turns with other ones; the rules' own takes its place where that is faster. Returns what a
        step of the plan consists of. On a CPU in parts of long steps; on a contended one without turns, on one thread:
        several wait for each other there."""
        plans = {"plan": self.plan, **{name: plan for name, plan in others.items() if plan != self.plan}}
        if self.contended:
            plans = {"plan": self.plan.replace(threads=1)}
        seconds, steppers = max(self.left(1.0), 2.0), dict[str, Stepper]()
        for name, plan in plans.items():
            if name in ("plan", "rules") or self.left(1.0) > seconds / 2:
                make = partial(Stepper, self.task, self.pack, self.part(plan, seconds), self.device, clock=self.wall)
                made = make().warm_up(3) if name == "plan" else self.attempt(make)
                steppers |= {name: made} if isinstance(made, Stepper) else {}
        in_turns([*steppers.values()], max(self.left(1.0), seconds / 8))
        self.timings = {name: stepper.timing() for name, stepper in steppers.items()}
        self.ratios = {name: median(stepper.over(steppers["plan"])) for name, stepper in steppers.items()}
        best, factor = "plan", self.ratios.get("rules", 0.0)
        if factor > 1:
            best, turns = "rules", len(steppers["rules"].turns)
            for name in self.plan.changes_from(others["rules"]):
                self.evidence[name] = f"the rules' value was {factor:.2f}× as fast in turns, n = {turns}"
            self.plan, self.timings["plan"] = others["rules"], self.timings["rules"]
            self.ratios = {name: ratio / factor for name, ratio in self.ratios.items() if name != "plan"}
        profile = profile_of(steppers[best])
        for stepper in steppers.values():
            stepper.close()
        return profile

    def part(self, plan: Plan, seconds: float) -> Plan:
        """Return the plan, on a CPU at the part of its batch of which 16 steps fit into so many seconds."""
        most = seconds / 16 / self.step_s if self.device.type == "cpu" else 1.0
        size = max(2, int(most * plan.batch_size))
        return plan if size >= plan.batch_size else plan.replace(batch_size=size, micro_batch_size=None)


def precisions(device: torch.device) -> tuple[str, ...]:
    """Return the settings of Plan.amp that may be fast on a device."""
    if device.type == "cuda":
        return ("off", "bf16", "fp16") if devices.reduced(device) == "bf16" else ("off", "fp16")
    return ("off", "bf16") if device.type == "cpu" else ("off",)


def gradient(state: TrainState, batches: Sequence[Any]) -> tuple[float, Tensor]:
    """Return (mean loss, gradient) of batches, the same random numbers drawn each time."""
    loss, whole = 0.0, torch.zeros(())
    state.restore_rng()
    for raw in batches:
        total, count = gradients(state, raw, len(raw["id"]))
        scale = state.scaler.get_scale() if state.scaler is not None else 1.0
        parts = [p.grad.double().flatten() / scale for p in state.parameters if p.grad is not None]
        loss, whole = loss + float(total) / max(float(count), 1) / len(batches), whole.to(parts[0]) + torch.cat(parts)
    return loss, whole


def compare(these: tuple[float, Tensor], those: tuple[float, Tensor]) -> tuple[float, float]:
    """Return (how far the second loss is from the first, the cosine between the gradients)."""
    far = abs(those[0] - these[0]) / max(abs(these[0]), 1e-12)
    return far, float(torch.nn.functional.cosine_similarity(these[1], those[1], 0))


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]


def named(change: Change) -> str:
    """Return a combination in words: `bf16, channels_last`."""
    words = {"off": "float32", True: "channels_last", False: "channels_last=False"}
    return ", ".join(str(words.get(value, value)) for _, value in change)
