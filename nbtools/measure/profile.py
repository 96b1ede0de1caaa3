"""Where the time of a training step goes on this machine, what each change to the plan gains, measured, and hence the
verdict: what the plan is bound by, and the one change most worth making."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from nbtools.data import Pack, Padding, choose, gather, on, phase
from nbtools.measure.machine import matrix_rates
from nbtools.measure.timing import Stepper, Timing, shapes, trace, typical, untouched
from nbtools.measure.turns import Trial, beside, in_turns
from nbtools.show import Report, number, percent, timing
from nbtools.train import DTYPES, MOST_GRAPHS, Plan, TaskLike, gradients, synchronizing, unrecordable
from nbtools.train import device as devices

SECONDS = 3.0  # of the turns of the plan; all changes together get as long again
KERNELS = 5  # that are listed by name
WAIT_SHARE = 0.1  # of a step: from here another feed is tried
LEAST_STEPS = 20  # optimizer steps per epoch below which a larger batch starves a small data set: rule of thumb (ours)
WORTH = 1.1  # a smaller gain is within the noise of such a measurement: rule of thumb (ours)
SENTENCES = {
    "data": "Loading data is the limit: training waits for it {wait} of each {step} step.",
    "launch": "Kernel launches are the limit: the GPU waits for them {host} of each {step} step.",
    "compute": "Arithmetic is the limit: matrix products take {products} of each {step} step, moving tensors {moves}.",
    "memory": "Memory bandwidth is the limit: {moves} of each {step} step goes into reading and writing tensors, "
    "{products} into matrix products.",
}


@dataclass(frozen=True, repr=False)
class Verdict(Report):
    """Say what limits a plan here, and the one change worth making. Shows as a sentence and a table.

    wait, host, device: shares of a step that wait for data, that wait for the host to launch (none on a CPU), and in
    which the device works. products: the share that matrix products, convolutions and attention would need at the rate
    of a large product in the plan's precision. kernels: (name, share of the device's time), the longest ones. waits:
    `file:line` at which the host waits for the GPU in a step. trials: of changes.
    """

    timing: Timing
    wait: float
    host: float
    device: float
    products: float
    kernels: tuple[tuple[str, float], ...]
    waits: tuple[str, ...]
    trials: tuple[Trial, ...] = ()

    @property
    def limit(self) -> str:
        """Return data, launch, or what the device does most: compute (its matrix products), or memory."""
        if self.wait >= max(self.host, self.device):
            return "data"
        return "launch" if self.host >= self.device else "compute" if self.products >= self.device / 2 else "memory"

    @property
    def best(self) -> Trial | None:
        worth = [trial for trial in self.trials if trial.faster and trial.ratio >= WORTH]
        return max(worth, key=lambda trial: trial.ratio, default=None)

    @property
    def change(self) -> dict[str, Any] | None:
        """Return settings for `plan.turn`, None if no change is worth making."""
        return self.best and self.best.change

    @property
    def sentence(self) -> str:
        shares = {name: percent(getattr(self, name)) for name in ("wait", "host", "device", "products")}
        step, moves = timing(self.timing.step_s), percent(self.device - self.products)
        text = SENTENCES[self.limit].format(**shares, step=step, moves=moves)
        if self.limit == "launch" and self.waits:
            text += f" The host waits for it at {self.waits[0]}; avoid that line."
        if self.best:
            return f"{text} {self.best.name} makes training faster (measured: {self.best.spread} in turns)."
        return text + (f" Tried: {'; '.join(map(str, self.trials))}." if self.trials else "")

    def caption(self) -> str:
        return self.sentence

    def table(self) -> tuple[tuple[str, str], list[tuple[str, str]]]:
        here = self.timing
        spread = f"{number(here.least)}–{number(here.most)}, n = {here.turns}"
        rows = [
            ("samples/s", f"{number(here.samples_per_s)} ({spread}) at batch {here.plan['batch_size']}"),
            ("a step", f"data {percent(self.wait)}, host {percent(self.host)}, device {percent(self.device)}"),
            ("first steps", f"{timing(here.cold_s)} more than steady ones"),
            ("longest kernels", ", ".join(f"{name} {percent(share)}" for name, share in self.kernels)),
            *(("host waits at", line) for line in self.waits),
        ]
        return ("", "measured"), rows


def verdict(
    task: TaskLike, pack: Pack, plan: Plan, seconds: float = 0.0, fixed: Collection[str] = (), run_s: float = 0.0
) -> Verdict:
    """Measure a plan, and what changes to it gain, for about twice `seconds` (SECONDS) after warming up. fixed:
    settings that may not change. run_s: seconds that the run took, if it did; after a short one, less time. Raises
    TrainError if training could not start."""
    device, seconds = devices.pick(), seconds or min(SECONDS, (run_s or 60.0) / 20)
    phase("what limits it", 2 * seconds)
    with untouched(device):
        run = Stepper(task, pack, plan, device).warm_up()
        made = verdict_of(run, seconds)
        changes = [change for change in worth_trying(run, made) if not set(change) & set(fixed)]
        trials = [beside(run, run.plan.turn(**change), seconds / len(changes)) for change in changes]
        run.batches.close()
    return replace(made, trials=tuple(trials))


def verdict_of(run: Stepper, seconds: float) -> Verdict:
    """Measure turns of a plan, and what a step consists of; no change is tried yet."""
    run.turns.clear()
    in_turns([run], seconds)
    here, pack, plan = run.timing(), run.pack, run.plan
    raw = on(run.device, gather(pack, typical(pack, plan)[0][0], Padding(pack, plan)))
    device = 1 - here.waited
    if run.device.type == "cuda":
        device *= min(1.0, here.device_s / max(here.step_s * device, 1e-9))
    times, rate = trace(run), max(matrix_rates(run.device, DTYPES.get(plan.amp, torch.float32)))
    return Verdict(
        timing=here,
        wait=here.waited,
        host=max(1 - here.waited - device, 0.0),
        device=device,
        products=min(flops(run, raw) / len(raw["id"]) * here.samples_per_s / rate, device),
        kernels=tuple((name, each / max(sum(times.values()), 1e-9)) for name, each in times.most_common(KERNELS)),
        waits=tuple(synchronizing(lambda: run.step(raw))[1]),
    )


def worth_trying(run: Stepper, made: Verdict) -> Iterator[dict[str, Any]]:
    """Yield changes for what a step is bound by: another feed; graphs and a larger batch; another precision."""
    plan, reduced = run.plan, devices.reduced_precision(run.device)
    if made.wait >= WAIT_SHARE and run.pack.is_stored:
        feed = choose(run.pack, plan.replace(feed="auto"), run.device)[0]
        yield {"feed": feed if feed != run.feed.name else "streamed"}
    if made.limit == "data" or plan.compile:
        return
    if made.host > made.device and (change := graph_change(run)):
        yield change
    if 2 * plan.batch_size <= run.pack.splits["train"] // LEAST_STEPS:
        yield {"batch_size": 2 * plan.batch_size}
    if made.device > made.host and plan.amp == "off" != reduced:
        yield {"amp": reduced}


def graph_change(run: Stepper) -> dict[str, Any]:
    """Return the settings with which CUDA graphs may help: fp16, which none replays, makes way for bf16, or for float32
    where that is only emulated. {} for more shapes than are recorded, or where there are graphs already."""
    change: dict[str, Any] = {"graph": True}
    if run.plan.amp == "fp16":
        change["amp"] = "bf16" if devices.reduced_precision(run.device) == "bf16" else "off"
    never = run.device.type != "cuda" or run.plan.graph or unrecordable(run.plan.replace(**change))
    return {} if never or shapes(run.pack, run.plan) > MOST_GRAPHS else change


def flops(run: Stepper, raw: Any) -> int:
    """Return the floating-point operations of both passes of a batch: not elementwise ones, fused RNN and CTC."""
    state = run.state
    compiled, state.network = state.network, state.model  # a compiled network hides its operations
    with FlopCounterMode(display=False) as counter:
        gradients(state, raw, len(raw["id"]))
    state.network = compiled
    return int(counter.get_total_flops())
