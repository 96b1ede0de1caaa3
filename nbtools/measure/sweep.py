"""The learning-rate range test (Smith, arXiv 1506.01186): lr rises geometrically step by step until the loss diverges;
then a trial of some learning rates, of which the best one is suggested."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from nbtools.data import Pack, batches_in, in_notebook, phase, tick, work
from nbtools.errors import TrainError
from nbtools.measure.lr_trial import LEAST_S, LrTrial, lr_trial
from nbtools.measure.machine import machine
from nbtools.measure.report import Report
from nbtools.measure.stepper import EAGER, STILL, Stepper, untouched
from nbtools.show import digits, number
from nbtools.train import Plan, TaskLike, rehearse
from nbtools.train import device as devices

if TYPE_CHECKING:
    from nbtools.figures import Sheet

LEAST_STEPS = 25  # that draw a curve through noise
LOST = 4.0  # times the least smoothed loss: there the sweep ends (as fastai's and Lightning's do)
MOST_SKIPS = 30  # steps that fp16 may skip in a row while its scaler looks for a scale
KEPT = 0.8  # of a running average, from step to step
BELOW = 10.0  # the suggestion is this many times below the lr of the least loss (fastai's `minimum`)
NEARLY, FALL = 0.05, 0.01  # of its fall above the least loss, where a valley begins; of the loss: less is no fall


@dataclass(frozen=True)
class Sweep(Report):
    """The curve of a range test. Shows as the curve and a table in a notebook, as the table in a terminal.

    losses[k]: mean loss of the batch that came after the update with lrs[k]; smoothed: running averages from both
    sides, so that the curve does not lag. lost: the lr after which the loss was no number, or LOST times its least;
    None if it never was. suggestion: the best of a trial around what the curve says; None if none is sensible. reason:
    one sentence for either. skipped: steps that fp16 skipped and that were repeated. seconds: of the whole sweep.
    """

    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    lost: float | None
    suggestion: float | None
    reason: str
    batch_size: int
    skipped: int
    seconds: float
    machine: dict[str, str]
    trial: LrTrial | None = None

    def caption(self) -> str:
        return f"lr {digits(self.suggestion)}: {self.reason}" if self.suggestion else f"no suggestion: {self.reason}"

    def table(self) -> tuple[tuple[str, ...], list[tuple[float, ...]]]:
        """About a dozen points of the curve."""
        points = list(zip(self.lrs, self.losses, self.smoothed, strict=True))
        return ("lr", "loss", "smoothed"), points[:: math.ceil(len(points) / 12) or 1]

    def footer(self) -> str:
        skipped = f", {self.skipped} that fp16 skipped" if self.skipped else ""
        how = f"{len(self.lrs)} steps of {self.batch_size} samples{skipped}, {self.seconds:.1f} s"
        return ", ".join([how, *self.machine.values()])

    def figure(self) -> Sheet:
        """The loss over lr, as measured (faint) and smoothed, the suggestion dashed."""
        from nbtools.figures import Sheet

        figure = Sheet(figsize=(5.6, 2.8), dpi=200, layout="constrained")
        axes = figure.add_subplot(xlabel="learning rate", ylabel="loss per sample", xscale="log")
        axes.plot(self.lrs, self.losses, color="C0", alpha=0.3)
        axes.plot(self.lrs, self.smoothed, color="C0")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color="C1", linestyle="--")
        if self.lrs:  # not by one wild loss at the end
            low, high = min(self.smoothed), max(self.smoothed)
            axes.set_ylim(low - (high - low) / 4 - 1e-9, high + (high - low) / 4)
        return figure

    def _repr_png_(self) -> bytes:
        return self.figure()._repr_png_()

    def _ipython_display_(self) -> None:
        """Two outputs, since in a saved notebook GitHub shows a picture only if it is an output by itself."""
        if not in_notebook():
            raise NotImplementedError  # IPython then prints the text
        from IPython.display import HTML, display

        display(self.figure(), HTML(self._repr_html_()))


def lr_sweep(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    device: torch.device | str | None = None,
    low: float = 1e-6,
    high: float = 1.0,
    steps: int = 100,
    seconds: float = 60.0,
) -> Sweep:
    """Raise lr step by step from low to high on a separate model, then try learning rates around what the curve says,
    each for a whole short training as `nb.advise` does, and suggest the best of them.

    Takes `steps` steps of training; fewer if they would take longer than `seconds`, but at least LEAST_STEPS; the trial
    takes at most 15 s, or a tenth of the plan's training up to 120 s. The caller's model, random state and GPU memory
    are unchanged. Raises TrainError for an impossible range, or if training cannot start.
    """
    if not 0 < low < high < math.inf:
        raise TrainError(f"lr_sweep needs 0 < low < high, got low={low:g}, high={high:g}; the defaults suit most tasks")
    if steps < LEAST_STEPS:
        raise TrainError(f"lr_sweep's steps must be at least {LEAST_STEPS} to draw a curve through noise, got {steps}")
    where, trial, start = torch.device(device) if device is not None else devices.pick(), None, perf_counter()
    with work("sweeping the learning rate", steps=seconds, trial=LEAST_S), untouched(where):
        lrs, losses, skipped, step_s = climbed(task, pack, plan, where, (low, high), steps, seconds)
    lost = lrs[len(losses)] if len(losses) < len(lrs) else None
    lrs, curve, took = lrs[: len(losses)], averaged(averaged(losses)[::-1])[::-1], perf_counter() - start
    suggestion, reason = judge(lrs, losses, curve, lost, high)
    if suggestion is not None:
        phase("trial", LEAST_S)
        nearest = plan.lr * 3.0 ** round(math.log(suggestion / plan.lr, 3))  # of those that a trial of the plan tries
        near, whole = plan.replace(lr=nearest, min_lr=min(plan.min_lr, nearest)), pack.splits["train"]
        trial = lr_trial(task, pack, near, where, plan.epochs * batches_in(whole, plan.batch_size) * step_s)
        if trial.lr is not None:
            suggestion, reason = trial.lr, f"{trial.reason}; {reason}"
    curves = tuple(lrs), tuple(losses), tuple(curve)
    return Sweep(*curves, lost, suggestion, reason, plan.batch_size, skipped, took, machine(), trial)


def climbed(
    task: TaskLike, pack: Pack, plan: Plan, device: torch.device, ends: tuple[float, float], steps: int, seconds: float
) -> tuple[list[float], list[float], int, float]:
    """(lrs, losses, steps that fp16 skipped, seconds a step). Where the loss diverges, losses end before lrs do."""
    stepper, skipped = Stepper(task, pack, plan.replace(**STILL, **EAGER, ema=None), device), 0
    rehearse(stepper.state, stepper.pack)

    def step(lr: float) -> float:
        """One optimizer step; its mean loss, nan if fp16 finds no scale: a step that it skips is repeated."""
        nonlocal skipped
        state = stepper.state
        state.plan = state.applied = stepper.plan.replace(lr=lr)
        for _ in range(MOST_SKIPS):
            before, loss = state.skipped, stepper.mean_loss()
            if state.skipped == before or not math.isfinite(loss):
                return loss
            skipped += 1
        return math.nan

    least, begun = step(ends[0]), stepper.clock()  # the first step warms the device up, and is not timed
    for _ in range(3):
        step(ends[0])
    step_s = (stepper.clock() - begun) / 3
    count = max(LEAST_STEPS, min(steps, int(seconds / max(step_s, 1e-9))))
    phase("steps", count * step_s)
    lrs: list[float] = np.geomspace(*ends, count).tolist()
    losses: list[float] = []
    step(lrs[0])
    for lr in [*lrs[1:], lrs[-1]]:  # the loss after an update is that of the next batch
        loss = step(lr)
        tick()
        mean = averaged([*losses, loss])[-1]
        if not math.isfinite(loss + least) or mean > least + (LOST - 1) * abs(least):  # also right for a negative loss
            break
        losses.append(loss)
        least = min(least, mean)
    stepper.close()
    return lrs, losses, skipped, step_s


def averaged(values: Sequence[float]) -> list[float]:
    """Running averages, with the correction for their start."""
    found, running = [], 0.0
    for k, value in enumerate(values, 1):
        running = KEPT * running + (1 - KEPT) * value
        found.append(running / (1 - KEPT**k))
    return found


def judge(
    lrs: Sequence[float], losses: Sequence[float], curve: Sequence[float], lost: float | None, high: float
) -> tuple[float | None, str]:
    """(suggestion, reason): a tenth of the lr from which on the smoothed loss is nearly at its least, or None.

    Nearer to it, an lr that a sweep survives for a step is often too much for a thousand of them.
    """
    if len(losses) < LEAST_STEPS // 3:
        return None, "the loss diverged within the first steps; set a lower low=, and check data and loss"
    least, first = min(curve), curve[0]
    scatter = 1.4826 * median(abs(a - b) for a, b in zip(losses, curve, strict=True))  # σ, outliers aside
    end = f"diverged at lr {digits(lost)}" if lost else f"did not diverge up to lr {digits(high)}"
    if first - least <= max(scatter, FALL * abs(first)):
        fell = (
            f"the smoothed loss fell by {number(max(first - least, 0.0))}, single losses scatter by {number(scatter)}"
        )
        return None, f"{fell}: nothing was learned, and it {end}; take more steps, another range, or a larger batch"
    lr = next(lr for lr, loss in zip(lrs, curve, strict=True) if loss <= least + NEARLY * (first - least))
    at = f"the smoothed loss fell from {number(first)} to {number(least)}, nearly so from lr {digits(lr)} on, and {end}"
    return float(f"{lr / BELOW:.2g}"), f"{at}; a tenth of that lr is a rule of thumb (fastai's `minimum`)"
