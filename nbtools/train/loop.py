"""The train loop, one for all tasks: a generator that yields after every step, so that whatever watches a run (panel,
plot, clock, a person's own code) is simply code in the body of a `for`.

    state = TrainState(task, pack, plan)
    for record in train(task, state, pack):
        if record.values:
            print(record)
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from time import perf_counter
from typing import Any

import numpy as np
import torch

from nbtools.data import Feed, Pack, batches_left, lengths_of, open_feed
from nbtools.errors import TrainError
from nbtools.table import plural
from nbtools.train.bounds import require_change, require_sizes
from nbtools.train.device import memory, prepare
from nbtools.train.history import Record
from nbtools.train.metrics import Sums
from nbtools.train.plan import Plan
from nbtools.train.scoring import evaluation
from nbtools.train.state import TrainState
from nbtools.train.step import Diverged, step
from nbtools.train.task import Task, TaskLike, as_task, best_metric


def train(task: TaskLike, state: TrainState, pack: Pack, feed: Feed | None = None) -> Generator[Record, None, None]:
    """Train until the plan's last epoch, `state.stopped`, or the caller leaves the `for`; calling it again goes on.

    Yields Record `step` after every step (with values on log steps only: reading a value waits for the device),
    `evaluating` after every batch of an evaluation, `epoch` after each epoch, `change` and `event` when they happen.
    Replace `state.plan` to turn a knob; it acts at the next step. Set `state.evaluate_next` for an evaluation before
    the next step, which ends with a Record `evaluation` and changes nothing. feed: one that is open, to share it; None:
    the plan's. Raises TrainError where training cannot start.
    """
    task, ids = as_task(task), pack.ids("train")
    require_sizes(pack, state.plan)
    prepare(state.plan, state.device, many_shapes=state.card.bucket_by is not None)
    feed = feed or open_feed(pack, state.plan, state.device)
    state.restore_rng()
    try:
        while not state.over:
            start = state.step
            yield from train_epoch(task, state, feed, pack)
            if state.lost():
                raise Diverged(f"the loss was lost in steps {start + 1} to {state.step}", (start, state.step))
            values: dict[str, Any] = {}
            if len(pack.ids("val")) and due(state):
                values = yield from evaluate_epoch(task, state, feed, pack)
            yield end_epoch(state, values, len(ids))
        yield from changes(state, len(ids))  # asked for since the last step, such as fewer epochs
    finally:
        state.capture_rng()
        state.training = False


def train_epoch(task: Task, state: TrainState, feed: Feed, pack: Pack) -> Iterator[Record]:
    """The rest of this epoch; a change of batch size regroups what is left of it."""
    ids = pack.ids("train")
    lengths, regrouped = lengths_of(pack, ids), True
    while regrouped:
        yield from changes(state, len(ids))
        if not state.segments or state.segments[-1][0] != state.plan.batch_size:
            state.segments.append([state.plan.batch_size, 0])
        batches = batches_left(ids, lengths, state.plan.seed, state.epoch, state.segments)
        regrouped = yield from train_batches(task, state, feed, batches, pack)


def train_batches(
    task: Task, state: TrainState, feed: Feed, batches: list[np.ndarray], pack: Pack
) -> Generator[Record, None, bool]:
    """Train on batches in order; True when the batch size changed before their end."""
    epoch_size = pack.splits["train"]
    every = log_interval(epoch_size, state.plan.batch_size)
    stream, window = feed(batches), Window(state)
    for batch in batches:
        while asked(state):  # again after each yield: whoever watches may have asked for more
            if state.plan.batch_size != state.segments[-1][0]:
                return True
            yield from changes(state, epoch_size)
            if state.evaluate_next:
                yield from evaluate_between(task, state, feed, pack)
        start = perf_counter()
        raw = next(stream)
        arrived = perf_counter()
        loss_sum, count = step(task, state, raw, epoch_size)
        state.loss_sum += loss_sum
        state.count += count
        state.step += 1
        state.samples += len(batch)
        state.segments[-1][1] += 1
        values = {"loss": window.loss(state)} if state.step % every == 0 else {}
        state.waited += arrived - start
        state.seconds += perf_counter() - start
        if values:
            values |= window.rates(state)
            window = Window(state)
        while state.events:
            yield record(state, "event", {"what": state.events.pop(0)})
        yield record(state, "step", values)
    return False


def asked(state: TrainState) -> bool:
    """Whether there is something to do before the next step."""
    return state.plan is not state.applied or state.evaluate_next or state.plan.batch_size != state.segments[-1][0]


class Window:
    """What happened since a log step: its loss and its rates."""

    def __init__(self, state: TrainState):
        self.step, self.samples, self.seconds, self.waited = state.step, state.samples, state.seconds, state.waited

    def loss(self, state: TrainState) -> float:
        """Mean loss since the last log step: the one transfer to the host. Raises Diverged where it is no number."""
        total, count = float(state.loss_sum), float(state.count)
        if not math.isfinite(total):
            raise Diverged(f"the loss became {total} in steps {self.step + 1} to {state.step}", (self.step, state.step))
        loss = (total - state.logged[0]) / max(count - state.logged[1], 1)
        state.logged = (total, count)
        return loss

    def rates(self, state: TrainState) -> dict[str, Any]:
        seconds, waited = state.seconds - self.seconds, state.waited - self.waited
        return rates(state, state.samples - self.samples, seconds, waited)


def rates(state: TrainState, samples: int, seconds: float, waited: float) -> dict[str, Any]:
    seconds = max(seconds, 1e-9)
    return {
        "lr": state.lr,
        "batch_size": state.plan.batch_size,
        "samples_per_s": samples / seconds,
        "data_wait": waited / seconds,
        **memory(state.device),
    }


def record(state: TrainState, kind: str, values: dict[str, Any]) -> Record:
    return Record(kind, state.epoch, state.step, state.samples, values)


def due(state: TrainState) -> bool:
    """Whether this epoch ends with an evaluation; the last one always does."""
    return (state.epoch + 1) % state.plan.eval_every == 0 or state.epoch + 1 >= state.plan.epochs


def evaluated(task: Task, state: TrainState, feed: Feed, pack: Pack) -> Generator[Record, None, dict[str, float]]:
    """Loss and metrics of the validation split, or of as many of its samples as the plan looks at while it trains."""
    sums, plan = Sums(state.device), state.plan.while_training()
    for _ in evaluation(task, state.evaluated, pack, plan, "val", sums, feed, plan.eval_samples):
        yield record(state, "evaluating", {})
    return sums.read()


def evaluate_between(task: Task, state: TrainState, feed: Feed, pack: Pack) -> Iterator[Record]:
    """Evaluate in the middle of an epoch. It counts for nothing: the run goes on as if nobody had looked."""
    state.evaluate_next = False
    if not len(pack.ids("val")):
        yield record(
            state, "event", {"what": "nothing to evaluate: the validation split is empty", "asked": "evaluate"}
        )
        return
    start = perf_counter()
    values = validation((yield from evaluated(task, state, feed, pack)))
    yield record(state, "evaluation", {**values, "eval_time": perf_counter() - start})


def validation(found: Mapping[str, float]) -> dict[str, Any]:
    return {f"val_{name}": value for name, value in found.items()}


def evaluate_epoch(task: Task, state: TrainState, feed: Feed, pack: Pack) -> Generator[Record, None, dict[str, Any]]:
    """Evaluate the validation split; sets best, stale, drops and stopped."""
    start = perf_counter()
    found = yield from evaluated(task, state, feed, pack)
    state.evaluate_next = False
    metric, sign = best_metric(task)
    if metric not in found:
        raise TrainError(f"the task's BEST is {metric!r}, and its metrics are {', '.join(found)}; name one of them")
    state.improved = math.isfinite(found[metric]) and (state.best is None or sign * found[metric] > sign * state.best)
    state.best, state.stale = (found[metric], 0) if state.improved else (state.best, state.stale + 1)
    if state.plan.schedule == "plateau" and state.stale and state.stale % state.plan.patience == 0:
        state.drops += 1
    if state.plan.early_stop is not None and state.stale >= state.plan.early_stop:
        state.stopped = f"early stop: {metric} did not improve in {plural(state.stale, 'evaluation')}"
    return {**validation(found), "eval_time": perf_counter() - start}


def end_epoch(state: TrainState, values: dict[str, Any], epoch_size: int) -> Record:
    """The epoch's row; the state moves to the next epoch."""
    row = {
        "train_loss": float(state.loss_sum) / max(float(state.count), 1),
        **values,
        **rates(state, epoch_size, state.seconds, state.waited),
        "epoch_time": state.seconds,
    }
    if state.device.type == "cuda":
        row["gpu_memory_peak"] = torch.cuda.max_memory_allocated(state.device) / 2**20
        torch.cuda.reset_peak_memory_stats(state.device)
    ended = record(state, "epoch", row)
    state.epoch += 1
    state.segments, state.seconds, state.waited = [], 0.0, 0.0
    state.loss_sum.zero_()
    state.count, state.logged = 0, (0.0, 0.0)
    return ended


def changes(state: TrainState, epoch_size: int) -> Iterator[Record]:
    """Apply a replaced plan to model and optimizer; a row just before says what changes."""
    while state.plan is not state.applied:
        old, new = state.applied, state.plan
        differing = new.changes_from(old)
        try:
            require_change(state, new, epoch_size)
        except TrainError:
            state.plan = old
            raise
        if differing:  # while the old plan still applies: a watcher may save this moment
            yield record(state, "change", {"what": told(differing)})
        adopt(state, new)


def adopt(state: TrainState, new: Plan) -> None:
    """Make model and optimizer follow a plan."""
    differing = new.changes_from(state.applied)
    if "micro_batch_size" in differing or "batch_size" in differing:
        state.micro = new.micro_batch_size
    if "amp" in differing:
        state.scaler = torch.amp.GradScaler(state.device.type) if new.amp == "fp16" else None
    for group in state.optimizer.param_groups:
        group["weight_decay"] = new.weight_decay if group.get("decays", True) else 0.0
        group.update({"momentum": new.betas[0]} if new.optimizer == "sgd" else {"betas": new.betas})
    state.applied = new


def caught_up(state: TrainState, saved: Plan) -> Iterator[Record]:
    """Back at a checkpoint that was saved under another plan: the knobs turned since stay turned, and a row says so."""
    differing = state.applied.changes_from(saved)
    if "micro_batch_size" in differing or "batch_size" in differing:
        state.micro = state.applied.micro_batch_size
    if differing:
        yield record(state, "change", {"what": told(differing)})


def told(differing: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {change}" for name, change in differing.items())


def log_interval(samples: int, batch_size: int) -> int:
    """Steps between log rows: ten an epoch, at most 50 steps. Steps and not seconds, so that a log can be repeated."""
    return min(50, max(1, math.ceil(samples / batch_size) // 10))
