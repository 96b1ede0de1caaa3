"""The learning-rate range test (Smith, arXiv 1506.01186): lr rises geometrically step by step until the loss diverges;
then a trial of some learning rates, of which the best one is suggested.

The steps are those of training: one lr a step, in however many micro-batches; one that fp16 skips is repeated.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch

from nbtools.data import Pack, batches_in, in_notebook, phase, tick, work
from nbtools.errors import TrainError
from nbtools.measure.lr_trial import LEAST_S, LrTrial, lr_trial
from nbtools.measure.machine import machine
from nbtools.measure.report import Report
from nbtools.measure.stepper import EAGER, STILL, Stepper, untouched
from nbtools.table import digits, number
from nbtools.train import Plan, TaskLike, rehearse
from nbtools.train import device as devices

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS, SECONDS = 100, 60.0
LEAST_STEPS = 25  # that draw a curve through noise
WARMUP_STEPS = 3  # at the lowest lr: what a step costs, and the loss to start from
LOST = 4.0  # times the least smoothed loss: there the sweep ends (as fastai's and Lightning's do)
MOST_SKIPS = 30  # steps that fp16 may skip in a row while its scaler looks for a scale
KEPT = 0.8  # of a running average, from step to step
BELOW = 10.0  # the suggestion is this many times below the lr of the least loss
NEARLY = 0.05  # of its fall above the least loss: in a flat valley noise says where the least one is
FALL = 0.01  # of the loss: less is no fall
BLUE, VERMILION = "#0072b2", "#d55e00"  # colour-blind-safe (Okabe & Ito)
RULE = "rule of thumb (fastai's `minimum`, arXiv 2002.04688; the beginning of a flat valley: ours)"


@dataclass(frozen=True)
class Sweep(Report):
    """The curve of a range test. Shows as the curve and a table in a notebook, as the table in a terminal.

    losses[k]: mean loss of the batch that came after the update with lrs[k]; start: before any; None: not a number.
    smoothed: running averages from both sides, so that the curve does not lag. lost: the lr after which the loss was no
    number, or LOST times its least; None if it never was. suggestion: the best of a trial around what the curve says;
    None if none is sensible. reason: one sentence for either. skipped: steps that fp16 skipped and that were repeated.
    seconds: of the whole sweep.
    """

    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    start: float | None
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

    def figure(self) -> Figure:
        """The loss over lr, as measured (faint) and smoothed, the suggestion marked."""
        from nbtools.figures import GREY, Sheet

        figure = Sheet(figsize=(5.6, 2.8), dpi=200, layout="constrained")
        axes = figure.add_subplot(xlabel="learning rate", ylabel="loss per sample", xscale="log")
        if not self.lrs:
            axes.set_title("diverged at once")
            return figure
        axes.plot(self.lrs, self.losses, color=BLUE, alpha=0.3)
        axes.plot(self.lrs, self.smoothed, color=BLUE, label="smoothed loss")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color=VERMILION, linestyle="--", label=f"suggested {digits(self.suggestion)}")
        low, high = min(self.smoothed), max(self.smoothed)
        axes.set_ylim(low - (high - low) / 4 - 1e-9, high + (high - low) / 4)  # not by one wild loss at the end
        axes.legend(frameon=False, labelcolor=GREY)
        return figure

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.figure().savefig(file, format="png")
        return file.getvalue()

    def _ipython_display_(self) -> None:
        """Two outputs, since in a saved notebook GitHub shows a picture only if it is an output by itself."""
        if not in_notebook():
            raise NotImplementedError  # IPython then prints the text
        from IPython.display import HTML, display

        display(self.figure())
        display(HTML(self._repr_html_()))


def lr_sweep(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    device: torch.device | str | None = None,
    low: float = 1e-6,
    high: float = 1.0,
    steps: int = STEPS,
    seconds: float = SECONDS,
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
    where = torch.device(device) if device is not None else devices.pick()
    with work("sweeping the learning rate", steps=seconds, trial=LEAST_S), untouched(where):
        climb = Climb(task, pack, plan, where)
        rehearse(climb.state, climb.pack)
        lrs, losses = climb.sweep((low, high), steps, seconds)
        start, skipped, took = climb.start, climb.skipped, climb.clock() - climb.began
        each, whole = climb.each, batches_in(climb.pack.splits["train"], plan.batch_size)
        climb.close()
        del climb
    lost = lrs[len(losses)] if len(losses) < len(lrs) else None
    kept, curve = lrs[: len(losses)], smooth(losses)
    suggestion, reason = judge(kept, losses, curve, lost, (low, high))
    if not math.isfinite(start):
        lost, reason = None, "the loss was not a number before any update; check data and loss, or set amp=off"
    first = start if math.isfinite(start) else None
    trial = None
    if suggestion is not None:
        phase("trial", LEAST_S)
        lr = plan.lr * 3.0 ** round(
            math.log(suggestion / plan.lr, 3)
        )  # among the values that a trial of the plan tries
        near = plan.replace(lr=lr, min_lr=min(plan.min_lr, lr))
        trial = lr_trial(task, pack, near, where, plan.epochs * whole * each)
        if trial.lr is not None:
            suggestion, reason = trial.lr, f"{trial.reason}; {reason}"
    curves = tuple(kept), tuple(losses), tuple(curve)
    return Sweep(*curves, first, lost, suggestion, reason, plan.batch_size, skipped, took, machine(), trial)


class Climb(Stepper):
    """A stepper with a different lr at every step. start: the loss before any update; skipped: steps that fp16
    skipped."""

    def __init__(self, task: TaskLike, pack: Pack, plan: Plan, device: torch.device):
        super().__init__(task, pack, plan.replace(**STILL, **EAGER, ema=None), device)
        self.began, self.start, self.skipped, self.each = self.clock(), math.nan, 0, 0.0

    def at(self, lr: float) -> float:
        """One optimizer step with this lr; its mean loss, nan if fp16 finds no scale. A step that fp16 skips is
        repeated on the next batch, and its loss does not count. Reading the loss waits for the device."""
        state = self.state
        state.plan = state.applied = self.plan.replace(lr=lr)
        for _ in range(MOST_SKIPS):
            before = state.skipped
            loss = self.mean_loss()
            if state.skipped == before or not math.isfinite(loss):
                return loss
            self.skipped += 1
        return math.nan

    def sweep(self, ends: tuple[float, float], steps: int, seconds: float) -> tuple[list[float], list[float]]:
        """(lrs, losses). Where the loss diverges, losses end before lrs do."""
        self.start, begun = self.at(ends[0]), self.clock()  # the first step warms the device up, and is not timed
        if not math.isfinite(self.start):
            return list(ends), []
        for _ in range(WARMUP_STEPS):
            self.at(ends[0])
        self.each = (self.clock() - begun) / WARMUP_STEPS
        number = max(LEAST_STEPS, min(steps, int(seconds / max(self.each, 1e-9))))
        phase("steps", number * self.each)
        lrs: list[float] = np.geomspace(*ends, number).tolist()
        losses: list[float] = []
        least = self.start
        self.at(lrs[0])
        for lr in [*lrs[1:], lrs[-1]]:  # the loss after an update is that of the next batch
            loss = self.at(lr)
            tick()
            mean = averaged([*losses, loss])[-1]
            if not math.isfinite(loss) or mean > least + (LOST - 1) * abs(least):  # also right for a negative loss
                break
            losses.append(loss)
            least = min(least, mean)
        return lrs, losses


def smooth(losses: Sequence[float]) -> list[float]:
    """Running averages forward and then backward, each with the correction for its start."""
    return averaged(averaged(losses)[::-1])[::-1]


def averaged(values: Sequence[float]) -> list[float]:
    found, running = [], 0.0
    for k, value in enumerate(values, 1):
        running = KEPT * running + (1 - KEPT) * value
        found.append(running / (1 - KEPT**k))
    return found


def judge(
    lrs: Sequence[float], losses: Sequence[float], curve: Sequence[float], lost: float | None, ends: tuple[float, float]
) -> tuple[float | None, str]:
    """(suggestion, reason): a tenth of the lr from which on the smoothed loss is nearly at its least, or None.

    Nearer to it, an lr that a sweep survives for a step is often too much for a thousand of them.
    """
    low, high = ends
    if len(losses) < LEAST_STEPS // 3:
        when = f"within the first steps, at lr {digits(lost)}" if lost and losses else "before lr rose"
        return None, f"the loss diverged {when}; sweep lower (low={low / 100:.0e}), and check data and loss"
    least = min(curve)
    fall = curve[0] - least
    scatter = 1.4826 * median(abs(a - b) for a, b in zip(losses, curve, strict=True))  # σ, outliers aside
    if fall <= max(scatter, FALL * abs(curve[0])):
        end = f"before it diverged at lr {digits(lost)}" if lost else f"up to lr {digits(high)}"
        found = f"the smoothed loss fell by {number(max(fall, 0.0))}, and single losses scatter by {number(scatter)}"
        return None, f"{found}: nothing was learned {end}; take more steps, another range, or a larger batch"
    k = next(k for k, loss in enumerate(curve) if loss <= least + NEARLY * fall)
    start, nearly = f"{number(curve[0])} at first", f"close to its minimum ({number(least)})"
    at = f"the smoothed loss, {start}, is {nearly} from lr {digits(lrs[k])} on"
    if lost is None and k >= 0.9 * len(curve):
        return float(f"{lrs[k] / BELOW:.2g}"), f"{at}, the end of the range; a sweep to high={10 * high:g} tells more"
    if lrs[k] / BELOW < low:
        return None, f"{at}, and a tenth of that was not measured; sweep lower (low={low / 100:.0e})"
    end = f"diverged at lr {digits(lost)}" if lost else f"no divergence up to lr {digits(high)}"
    return float(f"{lrs[k] / BELOW:.2g}"), f"{at}, {end}; a tenth of that lr is a {RULE}"
