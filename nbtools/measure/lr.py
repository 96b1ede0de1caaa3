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
from nbtools.measure.timing import EAGER, Clock, Stepper, untouched
from nbtools.measure.turns import Deadline, timed
from nbtools.show import Report, digits, number, plural
from nbtools.train import Plan, TaskLike, evaluation, readable
from nbtools.train import device as devices

FACTORS = (1.0, 3.0, 1 / 3, 9.0, 1 / 9)  # of the first lr, in the order in which they are tried
LEAST_VALUES, MORE = 3, 2  # below which nothing is chosen; values beyond these, where the best one lies at an end
LEAST_STEPS = 100  # of each value
LEAST_S, SHARE, MOST_S = 15.0, 0.1, 120.0  # seconds of a whole trial: at least, else a share of the training; at most
CHUNKS, LEAST_SCORED = 32, 100  # parts of the validation samples, whose losses are paired; samples of it at least
SCORED_SHARE, TAIL = 0.2, 0.1  # of the trained samples, that a value is scored on; without validation, of its steps
OFTEN = 10  # steps, after each of which it is seen whether the loss is still a number

Losses = dict[float, np.ndarray | None]
"""lr → the losses that are compared, each of the same samples for all values; None where it diverged"""


@dataclass(frozen=True)
class Candidate:
    """A learning rate that was tried. loss: its score, None if it diverged; near: whether it is the lowest within one
    standard error of the difference on the same samples."""

    lr: float
    loss: float | None
    near: bool = False

    @property
    def shown(self) -> str:
        return "diverged" if self.loss is None else number(self.loss)


@dataclass(frozen=True)
class LrTrial(Report):
    """Hold what trying learning rates gave. Shows as a table.

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
        note = {True: "within noise of the lowest", False: ""}
        rows = [(digits(c.lr), c.shown, "chosen" if c.lr == self.lr else note[c.near]) for c in self.candidates]
        return ("lr", "loss", ""), rows


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
    with work("trying learning rates"):
        step_s = timed(task, pack, plan.replace(**EAGER, ema=None), seconds=0.5).step_s
        phase("values", seconds)
        return lr_trial(task, pack, plan, step_s, False, seconds, lrs)


def lr_trial(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    step_s: float,
    recipe: bool,
    seconds: float | None = None,
    lrs: Sequence[float] | None = None,
) -> LrTrial:
    """Try lrs around the plan's own, whose steps take `step_s`; where the time does not allow 100 steps for each, there
    is no trial: lr is None, and the reason says so. Nothing outside changes.

    recipe: whether the plan's lr is one that the task is known to need, which wins where others are no better. seconds:
    of the trial; None: a tenth of the training, at least 15 and at most 120.
    """
    pack, count, device = readable(task, pack, plan), len(lrs or FACTORS), devices.pick()
    planned = plan.epochs * batches_in(pack.splits["train"], plan.batch_size)
    seconds = seconds or min(max(LEAST_S, SHARE * planned * step_s), MOST_S)
    if seconds < LEAST_STEPS * count * step_s:
        need = f"{count} values of {LEAST_STEPS} steps need {count * LEAST_STEPS * step_s:.0f} s"
        return LrTrial(plan.lr, None, f"no trial of other learning rates: {need}, and a trial may take {seconds:.0f} s")
    room = int(seconds / (max(step_s, 1e-9) * (count if lrs else count + MORE)))
    steps, losses = max(LEAST_STEPS, min(room, planned)), Losses()
    with untouched(device), Deadline(seconds) as clock:
        feed, validation = open_feed(pack, plan, device), scoring_batches(pack, plan, steps)
        for lr in values(losses, plan.lr, lrs):
            made = plan.replace(**EAGER, ema=None, lr=lr, min_lr=min(plan.min_lr, lr))
            stepper = Stepper(task, pack, made, device, feed, clock, learning=True)
            losses[lr] = score(stepper, steps, validation)
            stepper.close()
    took = seconds - clock.left()
    if len(losses) < min(LEAST_VALUES, count):
        reason = f"no trial of other learning rates: in {took:.0f} s {plural(len(losses), 'value')} ended"
        return LrTrial(plan.lr, None, f"{reason}, as the machine is busy", seconds=took)
    return choose_lr(losses, plan.lr, recipe, steps, took, "validation" if validation else "training")


def values(losses: Losses, rule: float, lrs: Sequence[float] | None) -> Iterator[float]:
    """Yield the values in turn; without given ones also beyond the end at which the lowest loss lies, and smaller ones
    where all diverged."""
    for lr in lrs or [rule * factor for factor in FACTORS]:
        yield round_lr(lr)
    for _ in range(0 if lrs else MORE):
        best = lowest(losses)
        if best == max(losses):
            yield round_lr(3 * max(losses))
        elif best in (None, min(losses)):
            yield round_lr(min(losses) / 3)


def round_lr(lr: float) -> float:
    return float(f"{lr:.3g}")


def lowest(losses: Losses) -> float | None:
    """Return the lr with the lowest loss."""
    finite = {lr: float(each.mean()) for lr, each in losses.items() if each is not None}
    return min(finite, key=finite.__getitem__, default=None)


def scoring_batches(pack: Pack, plan: Plan, steps: int) -> list[np.ndarray]:
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
    for step in range(1, steps + 1):
        loss, count = stepper.step(next(stepper.batches))
        training.append(loss / torch.as_tensor(count).clamp(min=1))
        if step % OFTEN == 0 and stepper.lost:
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
    for lr in sorted(losses):
        each, least = losses[lr], losses.get(best or 0.0)
        if each is None or least is None:
            rows.append(Candidate(lr, None))
            continue
        noise = (each - least).std(ddof=1) / math.sqrt(len(each)) if len(each) > 1 else 0.0
        rows.append(Candidate(lr, float(each.mean()), bool((each - least).mean() <= noise)))
    near = [row.lr for row in rows if row.near]
    tried = f"{plural(len(rows), 'value')}, {steps} steps each"
    if best is None:
        reason = f"every lr diverged ({tried}); the rule's is kept: check data and loss"
        return LrTrial(rule, None, reason, tuple(rows), steps, seconds)
    own = recipe and round_lr(rule) in near
    lr, why = round_lr(rule) if own else near[0], f"lowest {where} loss of {tried}, measured here"
    if lr != best:
        kind = "the task's own" if own else "the smallest"
        why = f"{kind} of those whose {where} loss is the lowest within noise; {tried}, measured here"
    listed = ", ".join(f"{digits(row.lr)}: {row.shown}" for row in rows)
    return LrTrial(rule, lr, f"{why} ({listed})", tuple(rows), steps, seconds)
