"""The learning rate: a few around a first one, each trained for some steps from the same weights on the same batches,
under the plan's whole schedule compressed into these steps; the one with the lowest validation loss wins.

The steps are as many as the time allows, up to the planned ones: fewer favour a higher lr than a whole training does
(on four small problems 100 steps chose up to 9 times the lr of 500 to 1,500 steps, for up to 0.09 less accuracy).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from nbtools.data import Pack, batches_in, in_order, lengths_of, open_feed, phase, tick, work
from nbtools.errors import TrainError
from nbtools.measure.report import Report
from nbtools.measure.timing import EAGER, Clock, Stepper, timed, untouched
from nbtools.show import digits, number, plural
from nbtools.train import Plan, TaskLike, evaluation, readable
from nbtools.train import device as devices

if TYPE_CHECKING:
    from nbtools.figures import Sheet

FACTORS = (1.0, 3.0, 1 / 3, 9.0, 1 / 9)  # of the first lr, in the order in which they are tried
LEAST_VALUES = 3  # below which nothing is chosen: the machine is busy
MORE = 2  # values beyond these, where the best one lies at an end
LEAST_STEPS, SHARE_OF_STEPS = 100, 0.02  # of each value: at least so many, else a share of the planned ones
LEAST_S, SHARE, MOST_S = 15.0, 0.1, 120.0  # seconds of a whole trial: at least, else a share of the training; at most
CHUNKS, LEAST_SCORED = 32, 100  # parts of the validation samples, whose losses are paired; samples of it at least
SCORED_SHARE = 0.2  # of the samples that a value trains on, that it is scored on
TAIL = 0.1  # of the steps, whose training losses are the score where there is no validation split


@dataclass(frozen=True)
class Candidate:
    """A learning rate that was tried. loss: its score, None if it diverged; behind: by how much it is above the lowest,
    and noise: one standard error of that, from the same samples."""

    lr: float
    loss: float | None
    behind: float | None = None
    noise: float | None = None


@dataclass(frozen=True)
class LrTrial(Report):
    """What trying learning rates gave. Shows as a table.

    rule: the lr that the values lie around; lr: the chosen one, None if none could be tried; reason: one sentence;
    candidates: by rising lr; steps: of each; seconds: of all.
    """

    rule: float
    lr: float | None
    reason: str
    candidates: tuple[Candidate, ...] = ()
    steps: int = 0
    seconds: float = 0.0

    def caption(self) -> str:
        return self.reason

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        rows = []
        for each in self.candidates:
            loss = "diverged" if each.loss is None else number(each.loss)
            noise = "" if not each.behind or each.noise is None else f"+{number(each.behind)} ± {number(each.noise)}"
            rows.append((digits(each.lr), loss, noise, "chosen" if each.lr == self.lr else ""))
        return ("lr", "loss", "above the lowest", ""), rows

    def figure(self) -> Sheet:
        """Return the loss over lr with its noise, the chosen lr dashed."""
        from nbtools.figures import Sheet

        figure = Sheet(figsize=(5.6, 2.8), dpi=200, layout="constrained")
        axes = figure.add_subplot(xlabel="learning rate", ylabel="loss", xscale="log")
        rows = [each for each in self.candidates if each.loss is not None]
        axes.errorbar([r.lr for r in rows], [r.loss or 0.0 for r in rows], [r.noise or 0.0 for r in rows], marker="o")
        if self.lr is not None:
            axes.axvline(self.lr, color="C1", linestyle="--")
        return figure


def lr_sweep(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    lrs: Sequence[float] | None = None,
    device: torch.device | str | None = None,
    seconds: float = 60.0,
) -> LrTrial:
    """Try learning rates for about `seconds`, and say which one is the best: the plan's times 1/9, 1/3, 1, 3 and 9, and
    beyond the end at which the best one lies; or those given.

    The caller's model, random state and GPU memory are unchanged. Raises TrainError for an impossible lr, or if
    training cannot start.
    """
    if wrong := [lr for lr in lrs or () if not 0 < lr < math.inf]:
        raise TrainError(f"lr_sweep: every lr must be greater than 0 and finite, got {wrong[0]!r}")
    where = torch.device(device) if device is not None else devices.pick()
    with work("trying learning rates", values=seconds):
        step_s = timed(task, pack, plan.replace(**EAGER, ema=None), where, seconds=0.5).step_s
        phase("values", seconds)
        return compare_lrs(task, pack, plan, where, step_s, seconds, lrs=lrs)


def lr_trial(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    device: torch.device,
    training_s: float,
    recipe: bool = False,
    clock: Clock | None = None,
) -> LrTrial:
    """Try lrs around the plan's own, in at most a tenth of the `training_s` seconds that its steps are expected to
    take, at least 15 s and at most 120. recipe: whether the plan's lr is one that the task is known to need, which wins
    where others are no better."""
    planned = plan.epochs * batches_in(readable(task, pack, plan).splits["train"], plan.batch_size)
    seconds = min(max(LEAST_S, SHARE * training_s), MOST_S)
    return compare_lrs(task, pack, plan, device, training_s / planned, seconds, recipe, clock)


def compare_lrs(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    device: torch.device,
    step_s: float,
    seconds: float,
    recipe: bool = False,
    clock: Clock | None = None,
    lrs: Sequence[float] | None = None,
) -> LrTrial:
    """Return what the values gave within so many seconds; where these do not allow 100 steps for each value, there is
    no trial: lr is None, and the reason says so. Nothing outside changes."""
    pack, clock = readable(task, pack, plan), clock or perf_counter
    planned = plan.epochs * batches_in(pack.splits["train"], plan.batch_size)
    count = len(lrs or FACTORS)
    fitting = int(seconds / (count * max(step_s, 1e-9)))
    if fitting < LEAST_STEPS:
        need = f"{count} values of {LEAST_STEPS} steps need {count * LEAST_STEPS * step_s:.0f} s"
        return LrTrial(plan.lr, None, f"no trial of other learning rates: {need}, and a trial may take {seconds:.0f} s")
    room = count if lrs else count + MORE
    steps = min(max(fitting * count // room, LEAST_STEPS), max(planned, LEAST_STEPS))
    with untouched(device):
        trial = Trial(task, pack, plan.replace(**EAGER, ema=None), device, steps, clock, clock() + seconds)
        trial.run(lrs)
    return choose_lr(trial, plan.lr, recipe)


class Trial:
    """The values so far: losses: lr → the paired losses of its score, None where it diverged. over: the time at which
    no further value begins."""

    def __init__(
        self, task: TaskLike, pack: Pack, plan: Plan, device: torch.device, steps: int, clock: Clock, over: float
    ):
        self.task, self.pack, self.plan, self.device, self.steps, self.clock = task, pack, plan, device, steps, clock
        self.losses: dict[float, np.ndarray | None] = {}
        self.begun, self.over, self.longest = clock(), over, 0.0
        self.feed = open_feed(pack, plan, device)
        ids = pack.ids("val")
        most = max(LEAST_SCORED, int(SCORED_SHARE * steps * plan.batch_size))
        if len(ids) > most:
            ids = ids[np.linspace(0, len(ids) - 1, most).round().astype(int)]
        size = min(max(1, len(ids) // CHUNKS), plan.batch_size)
        self.validation = in_order(ids, lengths_of(pack, ids), size) if len(ids) else []

    def run(self, lrs: Sequence[float] | None = None) -> None:
        """Try the values in turn; without given ones also beyond the end at which the lowest loss lies, while there is
        time, and smaller ones where all diverged."""
        for lr in lrs or [self.plan.lr * factor for factor in FACTORS]:
            self.attempt(lr)
        for _ in range(0 if lrs else MORE):
            tried, best = sorted(self.losses), self.lowest
            if not tried:
                break
            if best == tried[-1]:
                self.attempt(3 * tried[-1])
            elif best is None or best == tried[0]:
                self.attempt(tried[0] / 3)
        self.took = self.clock() - self.begun

    @property
    def lowest(self) -> float | None:
        """Return the lr with the lowest loss."""
        finite = {lr: float(losses.mean()) for lr, losses in self.losses.items() if losses is not None}
        return min(finite, key=finite.__getitem__, default=None)

    def attempt(self, lr: float) -> None:
        """Train with this lr, and score it; not where the time would not suffice, or does not."""
        start, lr = self.clock(), float(f"{lr:.3g}")
        if start + self.longest > self.over:
            return
        plan = self.plan.replace(lr=lr, min_lr=min(self.plan.min_lr, lr))
        stepper = Stepper(self.task, self.pack, plan, self.device, feed=self.feed, learning=True)
        stepper.epoch_size = self.steps * plan.batch_size / plan.epochs  # the whole schedule in these steps
        training = list(self.train(stepper))
        if len(training) == self.steps or stepper.lost:
            self.losses[lr] = self.score(stepper, training)
        stepper.close()
        self.longest = max(self.longest, self.clock() - start)

    def train(self, stepper: Stepper) -> Iterator[torch.Tensor]:
        """Yield the mean loss of each step, on the device; ends where one is no number, or the time is over."""
        for step in range(self.steps):
            loss, count = stepper.step(next(stepper.batches))
            yield loss / max(count, 1) if not isinstance(count, torch.Tensor) else loss / count.clamp(min=1)
            if step % 10 == 9:
                tick()
                if stepper.lost or self.clock() > self.over:
                    return

    def score(self, stepper: Stepper, training: list[torch.Tensor]) -> np.ndarray | None:
        """Return the losses that are compared, each of the same samples for all values: of parts of the validation
        samples, or of the last steps; None if one is no number."""
        last = torch.stack(training[-max(1, int(TAIL * self.steps)) :]).double().cpu().numpy()
        if stepper.lost or not np.isfinite(last).all():
            return None
        if not self.validation:
            return last
        state, plan = stepper.state, stepper.plan
        batches = self.feed(self.validation)
        losses = evaluation.losses(stepper.task, state.model, batches, plan, self.device)
        return losses if np.isfinite(losses).all() else None


def choose_lr(trial: Trial, rule: float, recipe: bool) -> LrTrial:
    """Return the lr with the lowest loss; of those within one standard error of it the recipe's, else the smallest."""
    if len(trial.losses) < LEAST_VALUES:
        reason = f"no trial of other learning rates: in {trial.took:.0f} s {plural(len(trial.losses), 'value')} ended"
        return LrTrial(rule, None, f"{reason}, as the machine is busy", seconds=trial.took)
    best = trial.lowest
    rows = [
        compare_losses(lr, losses, trial.losses[best] if best else None) for lr, losses in sorted(trial.losses.items())
    ]
    seconds, where = trial.took, "validation" if trial.validation else "training"
    tried = f"{plural(len(rows), 'value')}, {trial.steps} steps each"
    if best is None:
        reason = f"every lr diverged ({tried}); the rule's is kept: check data and loss"
        return LrTrial(rule, None, reason, tuple(rows), trial.steps, seconds)
    near = [row.lr for row in rows if row.behind is not None and row.behind <= (row.noise or 0.0)]
    own = float(f"{rule:.3g}")
    lr = own if recipe and own in near else min(near)
    why = f"lowest {where} loss of {tried}, measured here"
    if lr != best:
        kind = "the task's own" if lr == own and recipe else "the smallest"
        why = f"{kind} of those whose {where} loss is the lowest within noise; {tried}, measured here"
    losses = ", ".join(f"{digits(r.lr)}: {'diverged' if r.loss is None else number(r.loss)}" for r in rows)
    return LrTrial(rule, lr, f"{why} ({losses})", tuple(rows), trial.steps, seconds)


def compare_losses(lr: float, losses: np.ndarray | None, best: np.ndarray | None) -> Candidate:
    if losses is None or best is None:
        return Candidate(lr, None)
    differences = losses - best
    noise = float(differences.std(ddof=1) / math.sqrt(len(differences))) if len(differences) > 1 else 0.0
    return Candidate(lr, float(losses.mean()), float(differences.mean()), noise)
