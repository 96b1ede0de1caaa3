"""Choose the settings that make a step fast on this machine, each judged by what it changes: precision and layout
together by the time that the device works; the batch by samples/s; CUDA graphs where launching a step takes longer than
computing it; the compiler where training is long. Other arithmetic has to learn the same.

On a CPU the time is this process's on one thread: what other programs take is not in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn

from nbtools.data import Pack, Padding, batches_in, gather, on
from nbtools.errors import NbtoolsError
from nbtools.measure.batch import BatchReport, find_batch
from nbtools.measure.lr import LrTrial
from nbtools.measure.profile import StepProfile, profile_of, replays, shapes
from nbtools.measure.timing import EAGER, LONG, Clock, Stepper, Timing, in_turns, typical
from nbtools.show import percent
from nbtools.train import Plan, TaskLike, TrainState, gradients, rehearse
from nbtools.train import device as devices

FASTER, NEAR = 1.05, 1.03  # from which a change is used; times the least that is as good
SLOW = 1.5  # times the fastest combination's first step: no further look at one that takes longer
LAUNCHES = 1.2  # times what the device works that the host takes, from which graphs are tried
COMPILE_PAYS = 1800.0  # seconds of training from which compiling is tried: it took 69 s here, on two busy cores
LOOKS = 5  # at each combination on a CPU
STEPS, BATCHES, SAMPLES = 10, 4, 64  # after which, on which losses and gradients are compared; of a batch at most
SAME_LOSS, SAME_GRADIENT = 0.01, 0.99  # relative; cosine: bf16 keeps 8 bits, 0.4 % a number
CONTROL = 3.0  # times what two equal runs differ by
PRECISION, BATCH, GRAPHS, GUARD = 0.25, 0.35, 0.1, 0.3  # shares of the time


class Choice:
    """The plan so far, and what was measured.

    fixed: settings that the task chose; evidence: setting → what was measured of it; timings: of `plan`, and of the
    `rules'` and the `baseline` beside it, whose samples/s over the plan's are ratios.
    """

    def __init__(
        self, task: TaskLike, pack: Pack, plan: Plan, device: torch.device, fixed: Collection[str], clock: Clock | None
    ):
        self.task, self.pack, self.plan, self.device, self.fixed = task, pack, plan, device, fixed
        self.given_clock = clock
        self.clock = clock or (process_time if device.type == "cpu" else perf_counter)
        self.wall = clock or perf_counter
        self.base: tuple[Stepper, int] | None = None
        self.evidence: dict[str, str] = {}
        self.timings: dict[str, Timing] = {}
        self.ratios: dict[str, float] = {}
        self.batches: BatchReport | None = None
        self.lr_trial: LrTrial | None = None

    # -- precision and layout

    def precision_and_layout(self, seconds: float) -> None:
        """Take the combination with which the device works least for a sample, if it learns the same."""
        over = self.wall() + seconds
        base, size = self.base or self.first_step()
        costs: dict[tuple[Any, ...], Stepper | str] = {(): base}
        for change in self.combinations(base):
            if self.wall() < over:
                costs[tuple(change.items())] = self.attempt(change, size)
        steppers = {key: stepper for key, stepper in costs.items() if isinstance(stepper, Stepper)}
        seconds_of = self.device_seconds(steppers, over)
        whys = {key: why for key, why in costs.items() if isinstance(why, str)}
        faster = {key: cost for key, cost in seconds_of.items() if seconds_of[()] >= FASTER * cost}
        while faster:
            near = [key for key, cost in faster.items() if cost <= NEAR * min(faster.values())]
            key = min(near, key=len)  # of equal ones that which changes least
            whys[key] = self.objection(dict(key), size)
            if not whys[key]:
                self.plan = self.plan.replace(**dict(key))
                break
            del faster[key]
        self.explain(seconds_of, whys)
        self.base = None

    def training_s(self) -> float:
        """Return the seconds that all steps will take, by the first ones."""
        self.base = stepper, size = self.first_step()
        step_s = stepper.advance(steps=2).seconds / 2 * self.plan.batch_size / size
        return self.plan.epochs * batches_in(stepper.pack.splits["train"], self.plan.batch_size) * step_s

    def first_step(self) -> tuple[Stepper, int]:
        """Return the plan in training, on a CPU at a batch whose step is short."""
        self.plan = self.plan.replace(**EAGER)
        stepper = self.stepper(self.plan)
        rehearse(stepper.state, stepper.pack)
        took, size = stepper.advance().seconds, self.plan.batch_size
        if self.device.type == "cpu" and took > LONG and size > 8:
            size = max(8, int(size * LONG / took))
            stepper = self.stepper(self.plan, size)
        return stepper.warm_up(), size

    def stepper(self, plan: Plan, size: int | None = None) -> Stepper:
        plan = plan if size is None or size == plan.batch_size else plan.replace(batch_size=size, micro_batch_size=None)
        plan = plan.replace(threads=1) if self.device.type == "cpu" else plan
        return Stepper(self.task, self.pack, plan, self.device, clock=self.clock)

    def combinations(self, base: Stepper) -> list[dict[str, Any]]:
        """Return the other precisions and layouts, and both at once."""
        plan, values = self.plan, {}
        if "amp" not in self.fixed:
            values["amp"] = [plan.amp, *(amp for amp in precisions(self.device) if amp != plan.amp)]
        if (
            any(isinstance(layer, nn.Conv2d) for layer in base.state.model.modules())
            and "channels_last" not in self.fixed
        ):
            values["channels_last"] = [plan.channels_last, not plan.channels_last]
        rows = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
        changes = [{name: value for name, value in row.items() if value != getattr(plan, name)} for row in rows]
        return [change for change in changes if change]

    def attempt(self, change: Mapping[str, Any], size: int | None = None) -> Stepper | str:
        """Return a change in training, or why it does not train: bfloat16 lacks some operations, memory ends. size: of
        the batch, to be timed by the device's time; None: the plan's, to be timed by the wall."""
        plan = self.plan.replace(**change)

        def start() -> Stepper:
            if size is not None:
                return self.stepper(plan, size).warm_up()
            return Stepper(self.task, self.pack, plan, self.device, clock=self.wall).warm_up()

        try:
            stepper, why = devices.within_memory(start)
        except (RuntimeError, NbtoolsError) as error:
            return f"fails ({first_line(error)})"
        if stepper is None:
            return f"does not fit into memory ({why})"
        return f"fails (the loss became {float(stepper.loss)})" if stepper.lost else stepper

    def device_seconds(self, steppers: dict[tuple[Any, ...], Stepper], over: float) -> dict[tuple[Any, ...], float]:
        """Return what the device works for a step: on CUDA by a trace, else the fastest of some steps in turns."""
        times: dict[tuple[Any, ...], float] = {}
        for look in range(1 if self.device.type == "cuda" else LOOKS):
            for key, stepper in steppers.items():
                if look and (times[key] > SLOW * min(times.values()) or self.wall() > over):
                    continue
                stepper.advance()
                times[key] = stepper.device_s()
        return times

    def explain(self, seconds: dict[tuple[Any, ...], float], whys: dict[tuple[Any, ...], str]) -> None:
        """Enter what the combinations gave as the evidence of both settings."""
        if len(seconds) + len(whys) < 2:
            return
        tried = [f"{named(key, self.plan)} {seconds[()] / seconds[key]:.2f}×" for key in seconds if key]
        tried += [f"{named(key, self.plan)} {why}" for key, why in whys.items() if why]
        how = "the GPU's time" if self.device.type == "cuda" else "the processor's time on one thread"
        text = f"by {how} a step: {', '.join(tried)}; used from {FASTER:.2f}× on"
        names = {name for key in {**seconds, **whys} for name, _ in key}
        self.evidence |= dict.fromkeys(names, text)

    def objection(self, change: Mapping[str, Any], size: int) -> str:
        """Return how loss and gradient of some batches of this size differ with other arithmetic, at the same weights
        and with dropout off, beyond what is due to chance; "" if they do not."""
        size = min(size, SAMPLES)
        plan = self.plan.replace(batch_size=size, micro_batch_size=None, **EAGER)
        try:
            plain = self.still(plan)
            batches = [
                on(self.device, gather(self.pack, ids, Padding(self.pack, plan)))
                for ids, _ in typical(self.pack, plan, BATCHES)
            ]
            for number in range(STEPS):  # the gradients of first weights are mostly rounding in bf16
                plain.step(batches[number % len(batches)])
            changed = self.still(plan.replace(**change))
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

    def still(self, plan: Plan) -> Stepper:
        """Return the plan's first weights, dropout off."""
        plan = plan.replace(warmup_epochs=0.0, schedule="constant")
        stepper = Stepper(self.task, self.pack, plan, self.device, clock=self.clock, learning=True)
        for layer in stepper.state.model.modules():
            if isinstance(layer, nn.modules.dropout._DropoutNd):
                layer.p = 0.0
            elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
                layer.dropout = 0.0
        return stepper

    # -- batch, graphs, compiler

    def batch_size(self, seconds: float, most: int) -> BatchReport:
        self.batches = find_batch(self.task, self.pack, self.plan, self.device, seconds, most, self.clock)
        return self.batches

    def graph_and_compiler(self, seconds: float, asked: bool) -> list[str]:
        """Try CUDA graphs where launching is the limit, torch.compile where training is long; return what is used."""
        if self.device.type != "cuda" and not asked:
            return []
        run = Stepper(self.task, self.pack, self.plan, self.device, clock=self.wall).warm_up()
        host, device = run.advance(steps=3).host_s, run.device_s()
        training = self.plan.epochs * batches_in(run.pack.splits["train"], self.plan.batch_size) * max(host, device)
        count = shapes(run.pack, self.plan)
        recurrent = any(isinstance(layer, nn.RNNBase) for layer in run.state.model.modules())
        if "graph" not in self.fixed and replays(self.plan, self.device, count) and (asked or host > LAUNCHES * device):
            return self.beside(run, {"graph": True}, seconds)
        if "compile" not in self.fixed and not recurrent and (asked or (training > COMPILE_PAYS and device > host)):
            return self.beside(run, {"compile": True}, seconds)
        return []

    def beside(self, run: Stepper, change: dict[str, Any], seconds: float) -> list[str]:
        """Take a change that is faster in turns with the plan; return the settings that are used."""
        [(name, value)], label = change.items(), named(tuple(change.items()), self.plan)
        stepper = self.attempt(change)
        if isinstance(stepper, str):
            self.evidence[name] = f"{label} {stepper}"
            return []
        graphs = stepper.state.graphs
        if graphs is not None and graphs.off:
            self.evidence[name] = f"{label}: {graphs.off}"
            return []
        run.turns.clear()
        in_turns([run, stepper], seconds)
        ratios = stepper.over(run)
        self.evidence[name] = f"{label} {median(ratios):.2f}× ({min(ratios):.2f}–{max(ratios):.2f}, n = {len(ratios)})"
        if median(ratios) < FASTER or min(ratios) <= 1:
            return []
        self.plan = self.plan.replace(**{name: value})
        return [name]

    # -- at last

    def guard(self, others: Mapping[str, Plan], seconds: float) -> StepProfile:
        """Train the plan in turns with other ones; the rules' own takes its place where that is faster. Returns what a
        step of the plan consists of."""
        steppers: dict[str, Stepper] = {}
        over = self.wall() + seconds / 2
        for name, plan in {"plan": self.plan, **others}.items():
            if name != "plan" and (self.wall() > over or plan == self.plan):
                continue
            try:
                made, _ = devices.within_memory(
                    lambda plan=plan: Stepper(self.task, self.pack, plan, self.device, clock=self.wall).warm_up()
                )
                steppers |= {} if made is None else {name: made}
            except (NbtoolsError, RuntimeError, OSError):  # the baseline's feed reads the source files
                if name == "plan":
                    raise
        in_turns([*steppers.values()], seconds / 2)
        ratios = {name: stepper.over(steppers["plan"]) for name, stepper in steppers.items()}
        self.timings = {name: stepper.timing() for name, stepper in steppers.items()}
        self.ratios = {name: median(each) for name, each in ratios.items()}
        profile = profile_of(steppers["plan"])
        if "rules" in ratios and min(ratios["rules"]) > FASTER:
            factor = self.ratios["rules"]
            for name in self.plan.changes_from(others["rules"]):
                self.evidence[name] = f"the rules' value was {factor:.2f}× as fast in turns, n = {len(ratios['rules'])}"
            self.plan = others["rules"]
            self.ratios = {name: ratio / factor for name, ratio in self.ratios.items()}
            profile = profile_of(steppers["rules"])
        for stepper in steppers.values():
            stepper.close()
        return profile


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


def named(change: tuple[tuple[str, Any], ...], plan: Plan) -> str:
    """Return a combination in words: `bf16, channels_last`."""
    words = {"amp": lambda v: "float32" if v == "off" else v}
    texts = [words.get(name, lambda v, name=name: name if v is True else f"{name}={v}")(v) for name, v in change]
    return ", ".join(texts)
