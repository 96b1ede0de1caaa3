"""The batch size and the learning rate, each found by trying values on this machine.

Batches are doubled until throughput no longer rises, or memory, data or time runs out: the largest that fits is not the
fastest, and rarely needed. Learning rates train for some steps from the same weights on the same batches, under the
plan's whole schedule compressed into these steps: as many as the time allows, since fewer favour too high an lr. Where
there is no recipe, the metric decides first: the loss punishes a network that is sure of itself, though it is right.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nbtools.data import Pack, batches_in, in_order, lengths_of, open_feed, phase, work
from nbtools.errors import TrainError
from nbtools.measure.machine import kilobytes, room
from nbtools.measure.timing import EAGER, TYPICAL, Clock, Stepper, epoch_batches, finish, untouched, wall
from nbtools.measure.turns import Deadline, Late, timed
from nbtools.show import Report, digits, number, percent, plural, size
from nbtools.train import Plan, TaskLike, as_task, evaluation, release
from nbtools.train import device as devices

WITHIN, RISING = 0.95, 1.03  # of the best throughput: is chosen; of the last: still rises
FIRST, LOOKS, TURN = 8, 5, 0.2  # the first size; turns of each, of which the best counts, and their most seconds
HEADROOM = {"cuda": 0.1, "cpu": 0.2}  # of what is free: fragments, others; glibc's malloc kept 14–19 % beyond its use
LATE, FLAT = "time ran out", "throughput no longer rises"

FACTORS = (1.0, 3.0, 1 / 3, 9.0, 1 / 9)  # of the first lr, in the order in which they are tried
LEAST_VALUES, MORE = 3, 2  # below which nothing is chosen; values beyond these, where the best one lies at an end
LEAST_STEPS = 100  # of each value
LEAST_S, SHARE, MOST_S = 15.0, 0.1, 120.0  # seconds of a whole trial: at least, else a share of the training; at most
CHUNKS, LEAST_SCORED = 32, 100  # parts of the validation samples, whose losses are paired; samples of it at least
SCORED_SHARE, TAIL = 0.2, 0.1  # of the trained samples, that a value is scored on; without validation, of its steps
OFTEN = 10  # steps, after each of which it is seen whether the loss is still a number

Costs = dict[float, np.ndarray | None]
"""lr → (2, n): what is compared, lower is better, and losses, of the same samples for all; None where it diverged"""


@dataclass(frozen=True)
class Row:
    """What one batch size gave. samples_per_s: 0 where it does not fit; memory: bytes at its peak, 0 where unknown."""

    batch_size: int
    samples_per_s: float = 0.0
    memory: int = 0
    reason: str = ""


@dataclass(frozen=True)
class BatchReport:
    """A batch size. rows: what was tried; ended: why no larger one was."""

    batch_size: int
    rows: tuple[Row, ...]
    ended: str

    def __str__(self) -> str:
        best = max(self.rows, key=lambda row: row.samples_per_s).batch_size
        fast = "the fastest" if self.batch_size == best else f"nearly as fast as the fastest ({best})"
        return f"{self.batch_size} is {fast}; no larger one was timed: {self.ended}"


def find_batch(
    task: TaskLike, pack: Pack, plan: Plan, seconds: float = 20.0, most: int | None = None, clock: Clock = wall
) -> BatchReport:
    """Return the smallest batch within 5 % of the best throughput that fits, for this plan on this machine.

    most: the largest size to consider. seconds: roughly what the search takes. Nothing outside changes. Raises
    TrainError if not even one sample fits, or the train split has fewer than two.
    """
    device, pack = devices.pick(), as_task(task).part(pack, plan)
    train = pack.splits["train"]
    whole = plan.replace(micro_batch_size=None, batch_size=min(plan.batch_size, train), **EAGER)
    with untouched(device):  # no local name outlives it that would keep the model in memory
        stepper = devices.run_or_explain(lambda: Stepper(task, pack, whole, device, clock=clock, halves=False))
        rows, ended = Finder(stepper, seconds).climb(min(most or train, train))
        del stepper
    fitting = [row for row in rows if not row.reason]
    if not fitting:
        fix = "use a smaller network or smaller samples, Plan.amp or Plan.checkpoint_activations"
        raise TrainError(f"not even one sample fits ({ended}): {fix}, or free memory", entry="Out of memory")
    best = max(row.samples_per_s for row in fitting)
    chosen = next(row.batch_size for row in fitting if row.samples_per_s >= WITHIN * best)
    return BatchReport(chosen, tuple(rows), ended)


class Finder:
    """A search by a model in training. rows: size → what it gave."""

    def __init__(self, stepper: Stepper, seconds: float):
        self.stepper, self.device, self.seconds, self.start = stepper, stepper.device, seconds, stepper.clock()
        self.rows, ids = dict[int, Row](), stepper.pack.ids("train")
        self.free, self.held = room(self.device), self.peak(ids[:0])
        lengths = lengths_of(stepper.pack, ids)
        self.largest = ids if lengths is None else ids[np.argsort(-lengths, kind="stable")]

    def climb(self, cap: int) -> tuple[list[Row], str]:
        """Double from the first size that fits up to `cap`; return (rows by size, why no larger one was tried)."""
        now, best, flat, ended = min(FIRST, cap), 0.0, 0, ""
        while self.look(now).reason and now > 1:
            now //= 2
        with suppress(Late):  # what was measured by then counts
            while not ended:
                row = self.rows.get(now) or self.look(now)
                flat, best = (0 if row.samples_per_s >= RISING * best else flat + 1), max(best, row.samples_per_s)
                left = self.start + self.seconds - self.stepper.clock()
                if row.reason:
                    ended = f"{now} does not fit: {row.reason}"
                elif flat == 2:
                    ended = FLAT
                elif left < 2 * (LOOKS + 3) * now / best:
                    ended = LATE
                elif now == cap:
                    ended = f"{cap:,} samples were the largest size to try"
                now = min(2 * now, cap)
        return [self.rows[key] for key in sorted(self.rows)], ended or LATE

    def look(self, now: int) -> Row:
        row, reason = devices.within_memory(lambda: self.measure(now))
        if reason:
            release(self.stepper.state)
        self.rows[now] = row or Row(now, reason=reason)
        return self.rows[now]

    def measure(self, now: int) -> Row:
        """Take the largest samples for two steps, of which the first may tune kernels, and time typical ones. Raises
        MemoryError before the system ends the process, as the half shows, and where too little would be free."""
        if self.device.type == "cpu":
            self.require(2 * self.rows.get(now // 2, Row(0)).memory)
        memory = max([self.peak(self.largest[:now]) for _ in range(2)][-1] - self.held, 0)
        self.require(memory)
        stands_for = self.stepper.repeat(now, TYPICAL)
        looks = LOOKS if self.stepper.advance().seconds < self.seconds / 10 else 1  # one where a step takes long
        turns = [self.stepper.advance(min(TURN, self.seconds / 250)) for _ in range(looks)]
        return Row(now, stands_for * max(turn.samples_per_s for turn in turns), memory)

    def require(self, need: int) -> None:
        share = HEADROOM.get(self.device.type, 0.1)
        if self.free is not None and need > (1 - share) * self.free:
            raise MemoryError(f"it needs {size(need)}; of {size(self.free)} free memory, {percent(share)} is kept free")

    def peak(self, ids: np.ndarray) -> int:
        """Return the most bytes that tensors on CUDA, or this process on Linux, hold during a step; 0 where unknown."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        for raw in self.stepper.feed([ids]) if len(ids) else ():
            self.stepper.step(raw)
        finish(self.device)
        return torch.cuda.max_memory_allocated(self.device) if cuda else kilobytes("/proc/self/status", "VmHWM:")


@dataclass(frozen=True)
class Candidate:
    """A learning rate that was tried. loss: None if it diverged; score: the metric by which values are compared."""

    lr: float
    loss: float | None
    score: float | None = None

    @property
    def outcome(self) -> str:
        return "diverged" if self.loss is None else number(self.loss if self.score is None else self.score)


@dataclass(frozen=True, repr=False)
class LrTrial(Report):
    """Hold what trying learning rates gave. Shows as a table.

    rule: the lr that the values lie around; lr: the chosen one, None if none could be tried; reason: one sentence;
    candidates: by rising lr; steps: of each; seconds: of all; metric: by which they are compared.
    """

    rule: float
    lr: float | None
    reason: str
    candidates: tuple[Candidate, ...] = ()
    steps: int = 0
    seconds: float = 0.0
    metric: str = "loss"

    def caption(self) -> str:
        return self.reason

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        second = {c.lr: "" if c.score is None or c.loss is None else number(c.loss) for c in self.candidates}
        rows = [(digits(c.lr), c.outcome, second[c.lr], "chosen" * (c.lr == self.lr)) for c in self.candidates]
        return ("lr", self.metric, "loss", ""), rows


def lr_sweep(task: TaskLike, pack: Pack, plan: Any, lrs: Iterable[float] = (), seconds: float = 60.0) -> LrTrial:
    """Try learning rates for about `seconds`, and say which one is the best: the plan's times 1/9, 1/3, 1, 3 and 9, and
    beyond the end at which the best one lies; or those given. plan: a Plan, Panel or Advice. The caller's model, random
    state and GPU memory are unchanged. Raises TrainError where it cannot."""
    plan, lrs = getattr(plan, "plan", plan), [*dict.fromkeys(map(float, lrs))]
    if wrong := [lr for lr in lrs if not 0 < lr < math.inf]:
        raise TrainError(f"lr_sweep: every lr must be greater than 0 and finite, got {wrong[0]!r}")
    with work("trying learning rates"):
        step_s = timed(task, pack, plan.replace(**EAGER, ema=None), seconds=0.5).step_s
        return lr_trial(task, pack, plan, step_s, False, seconds, lrs)


def lr_trial(
    task: TaskLike, pack: Pack, plan: Plan, step_s: float, recipe: bool, seconds: float = 0.0, lrs: Sequence[float] = ()
) -> LrTrial:
    """Try lrs around the plan's own, whose steps take `step_s`; where the time does not allow 100 steps for each, there
    is no trial, and the reason says so. recipe: whether the task is known to need the plan's lr, which wins where
    others are no better. seconds: of the trial; 0: a tenth of the training, at least 15 and at most 120."""
    pack, count, device = as_task(task).part(pack, plan), len(lrs or FACTORS), devices.pick()
    planned = plan.epochs * batches_in(pack.splits["train"], plan.batch_size)
    seconds = seconds or min(max(LEAST_S, SHARE * planned * step_s), MOST_S)
    if seconds < LEAST_STEPS * count * step_s:
        need = f"{count} values of {LEAST_STEPS} steps need {count * LEAST_STEPS * step_s:.0f} s"
        return LrTrial(plan.lr, None, f"no trial of other learning rates: {need}, but only {seconds:.0f} s are allowed")
    phase("learning rate", seconds)
    most = int(seconds / (max(step_s, 1e-9) * (count if lrs else count + MORE)))
    steps, losses, peaks, best = max(LEAST_STEPS, min(most, planned)), Costs(), set[float](), "-loss"
    with untouched(device), Deadline(seconds) as clock:
        feed, validation = open_feed(pack, plan, device), scoring_batches(pack, plan, steps)
        for lr in values(losses, plan.lr, lrs):
            made = plan.replace(**EAGER, ema=None, lr=lr, min_lr=min(plan.min_lr, lr))
            stepper = Stepper(task, pack, made, device, feed, clock, learning=True)
            peaks.add(round_lr(lr * stepper.state.optimizer.param_groups[0]["lr_scale"]))
            if losses and len(peaks) == 1:
                return LrTrial(plan.lr, None, "no trial of other learning rates: the optimizer has an lr of its own")
            best = "-loss" if recipe or not validation else stepper.task.BEST
            losses[lr] = score(stepper, steps, validation, best)
            stepper.batches.close()
    took = seconds - clock.left()
    if len(losses) < min(LEAST_VALUES, count):
        reason = f"no trial of other learning rates: only {plural(len(losses), 'value')} finished in {took:.0f} s"
        return LrTrial(plan.lr, None, f"{reason}, as steps took longer than before", seconds=took)
    made = LrTrial(plan.lr, None, "", (), steps, took, best.removeprefix("-").replace("_", " "))
    return choose_lr(losses, made, recipe, "validation" if validation else "training", best.startswith("-"))


def values(losses: Costs, rule: float, lrs: Sequence[float]) -> Iterator[float]:
    """Yield the values in turn; by default also beyond the end with the best one, smaller if all diverged."""
    yield from lrs or [round_lr(rule * factor) for factor in FACTORS]
    for _ in range(0 if lrs else MORE):
        best = lowest(losses)
        if best == max(losses):
            yield round_lr(3 * max(losses))
        elif best in (None, min(losses)):
            yield round_lr(min(losses) / 3)


def round_lr(lr: float) -> float:
    return float(f"{lr:.3g}")


def lowest(costs: Costs) -> float | None:
    """Return the lr with the lowest loss of those whose cost is within one standard error of the lowest."""
    finite = {lr: each for lr, each in costs.items() if each is not None}
    first = min(finite.values(), key=lambda each: tuple(each.mean(1)), default=np.zeros((2, 1)))
    level = {lr: float(each[1].mean()) for lr, each in finite.items() if near(each[0], first[0])}
    return min(level, key=level.__getitem__, default=None)


def scoring_batches(pack: Pack, plan: Plan, steps: int) -> list[np.ndarray]:
    """Return the validation samples that every value is scored on, in parts."""
    ids, most = pack.ids("val"), max(LEAST_SCORED, int(SCORED_SHARE * steps * plan.batch_size))
    if len(ids) > most:
        ids = ids[np.linspace(0, len(ids) - 1, most).round().astype(int)]
    return in_order(ids, lengths_of(pack, ids), min(max(1, len(ids) // CHUNKS), plan.batch_size)) if len(ids) else []


def score(stepper: Stepper, steps: int, validation: list[np.ndarray], best: str) -> np.ndarray | None:
    """Train so many steps of the whole schedule; return costs of validation parts or last steps if all are finite."""
    whole, rest = divmod(steps, batches_in(stepper.pack.splits["train"], stepper.plan.batch_size))
    part = sum(map(len, epoch_batches(stepper.pack, stepper.plan, whole)[:rest]))
    stepper.state.epoch_size = (whole * stepper.pack.splits["train"] + part) / stepper.plan.epochs
    training = list[torch.Tensor]()
    for step in range(1, steps + 1):
        loss, count = stepper.step(next(stepper.batches))
        training.append(loss / (count + (count == 0)))
        if step % OFTEN == 0 and not math.isfinite(float(loss)):
            return None
    losses = torch.stack(training[-max(1, int(TAIL * steps)) :]).float().cpu().numpy().astype(np.float64)
    costs = np.stack([losses, losses])
    if validation and np.isfinite(losses).all():
        batches = (raw for raw in stepper.feed(validation) if stepper.clock() >= 0)  # a Deadline ends here too
        costs = evaluation.costs(stepper.task, stepper.state.model, batches, stepper.plan, best)
    return costs if np.isfinite(costs).all() else None


def choose_lr(costs: Costs, made: LrTrial, recipe: bool, where: str, falls: bool) -> LrTrial:
    """Return the trial with its choice: the lr with the lowest loss where the metric is best; without one, of those
    within one standard error the recipe's, else the smallest. falls: whether a lower metric is better."""
    best, rows, metric = lowest(costs), list[Candidate](), made.metric if made.metric != "loss" else ""
    tried, rule = f"{plural(len(costs), 'value')}, {made.steps} steps each", round_lr(made.rule)
    for lr, each in sorted(costs.items()):
        cost, loss = (None, None) if each is None else map(float, each.mean(1))
        rows.append(Candidate(lr, loss, None if cost is None or not metric else cost if falls else -cost))
    made = replace(made, candidates=tuple(rows))
    if best is None:
        return replace(made, reason=f"every lr diverged ({tried}), so the rule's is kept; check data and loss")
    finite = {lr: each for lr in sorted(costs) if (each := costs[lr]) is not None}
    level = [best] if metric else [lr for lr in finite if near(finite[lr][0], finite[best][0])]
    own = recipe and rule in level
    lr, why = rule if own else level[0], f"lowest {where} loss {metric and f'where {metric} is best '}of {tried}"
    if lr != best:
        kind = "the task's own," if own else "the smallest"
        why = f"{kind} whose {where} loss is within noise of the lowest; {tried}"
    listed = ", ".join(f"{digits(row.lr)}: {row.outcome}" for row in rows)
    return replace(made, lr=lr, reason=f"{why}, measured here ({listed})")


def near(losses: np.ndarray, lowest: np.ndarray) -> bool:
    """Return whether they are the lowest within one standard error of the differences."""
    gaps = losses - lowest
    return bool(gaps.mean() <= (gaps.std(ddof=1) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0))
