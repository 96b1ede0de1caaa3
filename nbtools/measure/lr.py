"""The learning rate: a few around a first one, each trained for some steps from the same weights on the same batches,
under the plan's whole schedule compressed into these steps; the one with the lowest validation loss wins.

The steps are as many as the time allows, up to the planned ones: fewer favour a higher lr than a whole training does
(on four small problems 100 steps chose up to 9 times the lr of 500 to 1,500 steps, for up to 0.09 less accuracy).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nbtools.data import Feed, Pack, batches_in, in_order, lengths_of, open_feed, phase, work
from nbtools.errors import TrainError
from nbtools.measure.report import Report
from nbtools.measure.timing import EAGER, Clock, Deadline, Stepper, timed, untouched
from nbtools.show import digits, number, plural
from nbtools.train import Plan, TaskLike, evaluation, readable
from nbtools.train import device as devices

FACTORS = (1.0, 3.0, 1 / 3, 9.0, 1 / 9)  # of the first lr, in the order in which they are tried
LEAST_VALUES = 3  # below which nothing is chosen: the machine is busy
MORE = 2  # values beyond these, where the best one lies at an end
LEAST_STEPS = 100  # of each value
LEAST_S, SHARE, MOST_S = 15.0, 0.1, 120.0  # seconds of a whole trial: at least, else a share of the training; at most
CHUNKS, LEAST_SCORED = 32, 100  # parts of the validation samples, whose losses are paired; samples of it at least
SCORED_SHARE = 0.2  # of the samples that a value trains on, that it is scored on
TAIL = 0.1  # of the steps, whose training losses are the score where there is no validation split
OFTEN = 10  # steps, after each of which it is seen whether the loss is still a number

Losses = dict[float, np.ndarray | None]
"""lr → the losses that are compared, each of the same samples for all values; None where it diverged"""


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


def lr_sweep(
    task: TaskLike, pack: Pack, plan: Plan, lrs: Sequence[float] | None = None, seconds: float = 60.0
) -> LrTrial:
    """Try learning rates for about `seconds`, and say which one is the best: the plan's times 1/9, 1/3, 1, 3 and 9, and
    beyond the end at which the best one lies; or those given.

    The caller's model, random state and GPU memory are unchanged. Raises TrainError for an impossible lr, or if
    training cannot start.
    """
    if wrong := [lr for lr in lrs or () if not 0 < lr < math.inf]:
        raise TrainError(f"lr_sweep: every lr must be greater than 0 and finite, got {wrong[0]!r}")
    with work("trying learning rates", values=seconds):
        step_s = timed(task, pack, plan.replace(**EAGER, ema=None), seconds=0.5).step_s
        phase("values", seconds)
        return compare_lrs(task, pack, plan, step_s, seconds, lrs=lrs)


def lr_trial(task: TaskLike, pack: Pack, plan: Plan, training_s: float, recipe: bool) -> LrTrial:
    """Try lrs around the plan's own, in at most a tenth of the `training_s` seconds that its steps are expected to
    take, at least 15 s and at most 120."""
    seconds = min(max(LEAST_S, SHARE * training_s), MOST_S)
    planned = plan.epochs * batches_in(readable(task, pack, plan).splits["train"], plan.batch_size)
    return compare_lrs(task, pack, plan, training_s / planned, seconds, recipe)


def compare_lrs(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    step_s: float,
    seconds: float,
    recipe: bool = False,
    lrs: Sequence[float] | None = None,
) -> LrTrial:
    """Return what the values gave within so many seconds; where these do not allow 100 steps for each value, there is
    no trial: lr is None, and the reason says so. recipe: whether the plan's lr is one that the task is known to need,
    which wins where others are no better. Nothing outside changes."""
    pack, values, device = readable(task, pack, plan), len(lrs or FACTORS), devices.pick()
    planned = plan.epochs * batches_in(pack.splits["train"], plan.batch_size)
    if int(seconds / (values * max(step_s, 1e-9))) < LEAST_STEPS:
        need = f"{values} values of {LEAST_STEPS} steps need {values * LEAST_STEPS * step_s:.0f} s"
        return LrTrial(plan.lr, None, f"no trial of other learning rates: {need}, and a trial may take {seconds:.0f} s")
    room = values if lrs else values + MORE
    steps = min(max(int(seconds / (room * step_s)), LEAST_STEPS), max(planned, LEAST_STEPS))
    clock, losses = Deadline(seconds), Losses()
    with untouched(device), clock.until():
        feed, validation = open_feed(pack, plan, device), scored(pack, plan, steps)
        for lr in candidates(losses, plan.lr, lrs):
            made = plan.replace(**EAGER, ema=None, lr=lr, min_lr=min(plan.min_lr, lr))
            stepper = Stepper(task, pack, made, device, feed, clock, learning=True)
            losses[lr] = score(stepper, steps, validation)
            stepper.close()
    took = seconds - clock.left(1.0)
    if len(losses) < min(LEAST_VALUES, values):
        reason = f"no trial of other learning rates: in {took:.0f} s {plural(len(losses), 'value')} ended"
        return LrTrial(plan.lr, None, f"{reason}, as the machine is busy", seconds=took)
    return choose_lr(losses, plan.lr, recipe, steps, took, "validation" if validation else "training")


def candidates(losses: Losses, rule: float, lrs: Sequence[float] | None) -> Iterator[float]:
    """Yield the values in turn; without given ones also beyond the end at which the lowest loss lies, and smaller ones
    where all diverged."""
    for lr in lrs or [rule * factor for factor in FACTORS]:
        yield rounded(lr)
    for _ in range(0 if lrs else MORE):
        tried, best = sorted(losses), lowest(losses)
        if best == tried[-1]:
            yield rounded(3 * tried[-1])
        elif best is None or best == tried[0]:
            yield rounded(tried[0] / 3)


def rounded(lr: float) -> float:
    return float(f"{lr:.3g}")


def lowest(losses: Losses) -> float | None:
    """Return the lr with the lowest loss."""
    finite = {lr: float(each.mean()) for lr, each in losses.items() if each is not None}
    return min(finite, key=finite.__getitem__, default=None)


def scored(pack: Pack, plan: Plan, steps: int) -> list[np.ndarray]:
    """Return the validation samples that every value is scored on, in parts."""
    ids, most = pack.ids("val"), max(LEAST_SCORED, int(SCORED_SHARE * steps * plan.batch_size))
    if len(ids) > most:
        ids = ids[np.linspace(0, len(ids) - 1, most).round().astype(int)]
    size = min(max(1, len(ids) // CHUNKS), plan.batch_size)
    return in_order(ids, lengths_of(pack, ids), size) if len(ids) else []


def score(stepper: Stepper, steps: int, validation: list[np.ndarray]) -> np.ndarray | None:
    """Train so many steps under the whole schedule; return the losses of the parts of the validation samples, or of the
    last steps; None if one is no number."""
    stepper.epoch_size = steps * stepper.plan.batch_size / stepper.plan.epochs
    training = list[torch.Tensor]()
    for step in range(steps):
        loss, count = stepper.step(next(stepper.batches))
        training.append(loss / torch.as_tensor(count).clamp(min=1))
        if step % OFTEN == OFTEN - 1 and stepper.lost:
            return None
    losses = torch.stack(training[-max(1, int(TAIL * steps)) :]).double().cpu().numpy()
    if validation and np.isfinite(losses).all():
        batches = read_on_time(stepper.feed, validation, stepper.clock)
        losses = evaluation.losses(stepper.task, stepper.state.model, batches, stepper.plan, stepper.device)
    return losses if np.isfinite(losses).all() else None


def read_on_time(feed: Feed, parts: list[np.ndarray], clock: Clock) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches until the time is over."""
    for raw in feed(parts):
        clock()
        yield raw


def choose_lr(losses: Losses, rule: float, recipe: bool, steps: int, seconds: float, where: str) -> LrTrial:
    """Return the lr with the lowest loss; of those within one standard error of it the recipe's, else the smallest."""
    best, rows = lowest(losses), list[Candidate]()
    for lr, each in sorted(losses.items(), key=lambda pair: pair[0]):
        if each is None or best is None or (least := losses[best]) is None:
            rows.append(Candidate(lr, None))
            continue
        behind = each - least
        noise = float(behind.std(ddof=1) / math.sqrt(len(behind))) if len(behind) > 1 else 0.0
        rows.append(Candidate(lr, float(each.mean()), float(behind.mean()), noise))
    tried = f"{plural(len(rows), 'value')}, {steps} steps each"
    if best is None:
        reason = f"every lr diverged ({tried}); the rule's is kept: check data and loss"
        return LrTrial(rule, None, reason, tuple(rows), steps, seconds)
    near = [row.lr for row in rows if row.behind is not None and row.behind <= (row.noise or 0.0)]
    own = recipe and rounded(rule) in near
    lr, why = rounded(rule) if own else min(near), f"lowest {where} loss of {tried}, measured here"
    if lr != best:
        kind = "the task's own" if own else "the smallest"
        why = f"{kind} of those whose {where} loss is the lowest within noise; {tried}, measured here"
    listed = ", ".join(f"{digits(r.lr)}: {'diverged' if r.loss is None else number(r.loss)}" for r in rows)
    return LrTrial(rule, lr, f"{why} ({listed})", tuple(rows), steps, seconds)
