"""The train loop, one for all tasks: a generator that yields after every step, so that whatever watches a run (panel,
plot, clock, your own code) is simply code in the body of a `for`.

    state = TrainState(task, pack, plan)
    for record in train(task, state, pack):
        if record.values:
            print(record)
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from nbtools.data import Feed, Pack, batches_left, lengths_of, open_feed
from nbtools.errors import TrainError
from nbtools.show import plural
from nbtools.train.changes import adopt, agree, changes
from nbtools.train.device import autotuning, memory, prepare, required
from nbtools.train.evaluation import Sums, score_split
from nbtools.train.history import Record
from nbtools.train.meter import Diverged
from nbtools.train.plan import Plan, require_sizes
from nbtools.train.ranks import Ended, Restarted
from nbtools.train.state import Best, TrainState
from nbtools.train.step import careful_step, train_step
from nbtools.train.task import TaskLike, best_metric, bound, order, readable


def train(task: TaskLike, state: TrainState, pack: Pack, feed: Feed | None = None) -> Generator[Record, None, None]:
    """Train until the plan's last epoch, `state.stopped`, or the caller leaves the `for`; calling it again continues.

    Yields Records: `step` after every step, with values on log steps only, which on a GPU come later, in a second
    Record with that step's number; `evaluating` after every batch of an evaluation; `epoch`; `change` just before a
    changed plan is applied; `event` for anything else. Replace `state.plan` to change settings from the next step on;
    set `state.evaluate_next` for an evaluation before it, which ends with a Record `evaluation` and changes nothing.
    feed: one that is open, to share it. Raises TrainError for what cannot train, Diverged where the loss is NaN or
    infinite: a checkpoint may be loaded, and this called again. On several ranks this is rank 0's; the others `obey`.
    """
    state.task = bound(task, state.card)
    pack = readable(task, pack, state.plan)
    require_sizes(pack, state.plan)
    prepare(state.plan, state.device)
    feed = feed or required(partial(open_feed, pack, state.plan, state.device))
    samples = pack.splits["train"]
    state.begin(len(pack))
    try:
        while not state.over_as(agree(state, samples)):
            yield from train_epoch(state, feed, pack)
            values, last = {}, state.epoch + 1 >= agree(state, samples).plan.epochs
            if len(pack.ids("val")) and (last or (state.epoch + 1) % state.applied.eval_every == 0):
                values = yield from evaluate(state, feed, pack)
                state.evaluate_next = False
                judge(state, values, agree(state, samples).plan)
            yield end_epoch(state, values, samples)
        yield from changes(state, samples)  # requested since the last step, such as fewer epochs
    finally:
        state.end()


def train_epoch(state: TrainState, feed: Feed, pack: Pack) -> Iterator[Record]:
    """Train on the rest of this epoch; a change of batch size regroups what is left of it."""
    ids, meter, start = pack.ids("train"), state.meter, state.step
    lengths, whole = lengths_of(pack, ids), False
    while not whole:
        yield from between_steps(state, feed, pack)
        batches = rest_of_epoch(state, ids, lengths)
        stream = feed([state.ranks.share(batch) for batch in batches])
        repeats = (state.applied.epochs - state.epoch) * len(batches) if lengths is None else 0
        for batch in batches:
            if state.has_requests():
                yield from between_steps(state, feed, pack)
                if state.applied.batch_size != state.position.segments[-1][0]:
                    break
            meter.watch.begin()
            raw = next(stream)
            meter.watch.got()
            step = careful_step if state.step < state.recovery.careful_until else train_step
            with autotuning(state.device, state.applied, repeats if len(batch) == state.applied.batch_size else 0):
                loss_sum, count = step(state, raw, len(ids), len(batch))
            meter.add(loss_sum, count)
            meter.watch.end()
            state.position.advance(len(batch))
            yield from records(state, len(ids))
        else:
            whole = next(stream, None) is None  # exhausts it: an interrupt while Python frees a generator is lost
    yield from meter.rows()
    if state.lost():
        raise Diverged(f"the loss became non-finite in steps {start + 1} to {state.step}", (start, state.step))


def rest_of_epoch(state: TrainState, ids: np.ndarray, lengths: np.ndarray | None) -> list[np.ndarray]:
    """Return the batches of ids that are left of this epoch, by the applied batch size."""
    position, plan = state.position, state.applied
    if not position.segments or position.segments[-1][0] != plan.batch_size:
        position.segments.append([plan.batch_size, 0])
    return batches_left(ids, lengths, plan.seed, position.epoch, position.segments)


def between_steps(state: TrainState, feed: Feed, pack: Pack) -> Iterator[Record]:
    """Apply a changed plan and evaluate, until nothing more is requested. Returns early where the batch size changed:
    the epoch is regrouped before anything else."""
    yield from state.meter.rows()
    segments = state.position.segments
    while True:
        wanted = yield from changes(state, pack.splits["train"])
        if not wanted.evaluate or (segments and state.applied.batch_size != segments[-1][0]):
            return
        state.evaluate_next = False
        if len(pack.ids("val")):
            values = yield from evaluate(state, feed, pack)
            yield state.record("evaluation", values)
        else:
            what = "nothing to evaluate: the validation split is empty"
            yield state.record("event", {"what": what, "asked": "evaluate"})


def records(state: TrainState, samples: int) -> Iterator[Record]:
    """Yield what a step leaves: on a log step its figures, which may come later; events; its own record."""
    meter, now = state.meter, state.record("step")
    # Steps and not seconds, so that logs are reproducible: ten rows an epoch, at most 50 steps apart.
    if state.step % min(50, max(1, math.ceil(samples / state.applied.batch_size) // 10)) == 0:
        before = meter.rows()  # the last log step's, which may end the loop here
        meter.log(state.record("step", readings(state)), state.scaler)
        yield from before
    while state.events:
        yield state.record("event", {"what": state.events.pop(0)})
    # Several ranks wait: they must all see at the same step that training diverged.
    rows = meter.rows(wait=False) if state.ranks.world == 1 else []
    yield from rows
    if not rows or rows[0].step != now.step:
        yield now


def readings(state: TrainState) -> dict[str, Any]:
    return {"lr": state.position.lr, "batch_size": state.applied.batch_size, **memory(state.device)}


# -- the end of an epoch


def evaluate(state: TrainState, feed: Feed, pack: Pack) -> Generator[Record, None, dict[str, Any]]:
    """Evaluate the validation split, or as many of its samples as the plan does during training; return loss and
    metrics."""
    start, sums, plan = perf_counter(), Sums(state.device), state.applied.while_training()
    state.ranks.align(state.evaluated.buffers())
    for _ in score_split(state.task, state.evaluated, pack, plan, "val", sums, feed, plan.eval_samples, state.ranks):
        yield state.record("evaluating")
    state.last_evaluation = sums.batches
    sums.add_up(state.ranks)
    values = {f"val_{name}": value for name, value in sums.read().items()}
    return {**values, "eval_time": perf_counter() - start}


def judge(state: TrainState, values: dict[str, Any], wanted: Plan) -> None:
    """Decide whether an evaluation is the best so far, and count those in which the metric did not improve; a plateau
    and an early stop follow from it."""
    metric, sign = best_metric(state.task)
    if state.best.metric not in (None, metric):
        state.best = Best(drops=state.best.drops)  # a best value of another metric does not count
    best = state.best
    if f"val_{metric}" not in values:
        named = ", ".join(name.removeprefix("val_") for name in values if name != "eval_time")
        raise TrainError(f"the task's BEST is {metric!r}, but its metrics are {named}; name one of them")
    value, loss = values[f"val_{metric}"], values["val_loss"]
    beaten = best.value is None or order(value, loss, sign) >= order(best.value, best.loss, sign)
    state.improved = math.isfinite(value) and beaten
    best.stale = 0 if state.improved and value != best.value else best.stale + 1  # a tie is saved, but no improvement
    if state.improved:
        best.metric, best.value, best.loss = metric, value, loss
    if state.applied.schedule == "plateau" and best.stale and best.stale % state.applied.patience == 0:
        best.drops += 1
    early = wanted.early_stop  # one that was just turned off ends nothing
    if early is not None and best.stale >= early:
        state.stopped = f"early stop: {metric} did not improve in {plural(best.stale, 'evaluation')}"


def end_epoch(state: TrainState, values: dict[str, Any], samples: int) -> Record:
    """Return the epoch's row; move to the next epoch."""
    row = state.record("epoch", {**state.meter.epoch(samples), **values, **readings(state)})
    state.position.epoch, state.position.segments = state.epoch + 1, []
    return row


# -- the other ranks


def obey(task: TaskLike, state: TrainState, pack: Pack, feed: Feed | None = None) -> None:
    """Train as rank 0 says: `train` on its state, begun anew whenever rank 0 begins anew, until it ends the run."""
    restart = None
    while True:
        try:
            if restart is None:
                state.ranks.broadcast()
                continue
            take_over(state, *restart.args)
            restart = None
            for _ in train(task, state, pack, feed):
                continue
        except Restarted as restarted:
            restart = restarted.with_traceback(None)  # its frames hold the feed
        except Diverged:
            continue  # so does rank 0, and decides what to do
        except Ended:
            return


def take_over(state: TrainState, plan: dict[str, Any], facts: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Make the state rank 0's."""
    adopt(state, type(state.plan).from_dict(plan))  # first: a scaler takes over its saved state
    state.load(tensors, facts)
    state.plan = state.applied
    state.events.clear()
