"""The training loop, one for all tasks: a generator that yields after each step, so that whatever watches a run (panel,
plot, clock, your own code) is simply code in the body of a `for`.

    state = TrainState(task, pack, plan)
    for record in train(task, state, pack):
        if record.values:
            print(record)
"""

import math
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

from nbtools.data import Feed, Pack, batches_left, lengths_of, open_feed
from nbtools.errors import TrainError
from nbtools.train.device import autotuning, memory, prepare, run_or_explain
from nbtools.train.evaluation import Sums, score_split
from nbtools.train.history import Record
from nbtools.train.meter import Diverged
from nbtools.train.plan import require_sizes
from nbtools.train.ranks import Ended, Restarted
from nbtools.train.state import TrainState, adopt, change
from nbtools.train.step import train_step
from nbtools.train.task import TaskLike, bind


def train(task: TaskLike, state: TrainState, pack: Pack, feed: Feed | None = None) -> Generator[Record, None, None]:
    """Train until the plan's last epoch, `state.stopped`, or the caller leaves the `for`; calling it again continues.

    Yields Records: `step` after every step, with values on log steps only, which on a GPU come later, in a second
    Record with that step's number; `evaluating` after every batch of an evaluation; `epoch`; `change` just before a
    changed plan is applied; `event` for anything else. Replace `state.plan` to change settings from the next step on;
    set `state.evaluate_next` for an evaluation before it, which ends with a Record `evaluation` and changes nothing.
    feed: an open one, to share. Raises TrainError for what cannot train, Diverged where the loss is NaN or
    infinite: a checkpoint may be loaded, and this called again. On several ranks this is rank 0's; the others `obey`.
    """
    state.task = bind(task, state.card)
    pack = state.task.part(pack, state.plan)
    if pack.card.digest != state.card.digest:
        raise TrainError(f"{pack.folder} is not the pack of this state; make another, nb.TrainState(task, pack, plan)")
    require_sizes(pack, state.plan)
    if not state.over:
        prepare(state.plan, state.device, state.ranks.world)
    opened: Any = feed or (None if state.over else run_or_explain(partial(open_feed, pack, state.plan, state.device)))
    state.begin()
    try:
        while not state.agree().over:
            yield from train_epoch(state, opened, pack)
            values, last = {}, state.epoch + 1 >= state.agree().plan.epochs
            if len(pack.ids("val")) and (last or (state.epoch + 1) % state.applied.eval_every == 0):
                values = yield from evaluate(state, opened, pack)
                state.evaluate_next = False
                state.agree().judge(values)
            row = state.record("epoch", {**state.meter.epoch(pack.splits["train"]), **values, **readings(state)})
            state.epoch, state.segments = state.epoch + 1, []
            yield row
        while state.agree().plan is not state.applied:  # requested since the last step, such as fewer epochs
            yield from change(state, state.plan)
    finally:
        state.end()


def train_epoch(state: TrainState, feed: Feed, pack: Pack) -> Iterator[Record]:
    """Train on the rest of this epoch; a change of batch size regroups what is left of it."""
    ids, meter, start = pack.ids("train"), state.meter, state.step
    lengths, whole = lengths_of(pack, ids), False
    while not whole:
        yield from between_steps(state, feed, pack)
        if not state.segments or needs_regrouping(state):
            state.segments.append([state.applied.batch_size, 0])
        batches = batches_left(ids, lengths, state.applied.seed, state.epoch, state.segments)
        stream = feed([state.ranks.share(batch) for batch in batches])
        repeats = (state.applied.epochs - state.epoch) * len(batches) if lengths is None else 0
        for batch in batches:
            yield from between_steps(state, feed, pack)
            if needs_regrouping(state):
                break
            begin = meter.watch.mark()
            raw = next(stream)
            got = meter.watch.mark()
            with autotuning(state.device, state.applied, repeats if len(batch) == state.applied.batch_size else 0):
                loss_sum, count = train_step(state, raw, len(batch))
            meter.add(loss_sum, count, begin, got)
            state.step, state.samples = state.step + 1, state.samples + len(batch)
            state.segments[-1][1] += 1
            yield from records(state)
        else:
            whole = next(stream, None) is None  # exhausts it: an interrupt while Python frees a generator is lost
    yield from meter.rows()
    if state.lost():
        raise Diverged(f"the loss became non-finite in steps {start + 1} to {state.step}", (start, state.step))


def needs_regrouping(state: TrainState) -> bool:
    """Return whether the batch size has changed since the batches of this epoch were made."""
    return bool(state.segments) and state.applied.batch_size != state.segments[-1][0]


def between_steps(state: TrainState, feed: Feed, pack: Pack) -> Iterator[Record]:
    """Apply changed plans and evaluate until nothing is requested, or a new batch size asks to regroup the epoch."""
    while state.agree().plan is not state.applied or state.evaluate_next:
        yield from state.meter.rows()
        if state.plan is not state.applied:
            yield from change(state, state.plan)
            if needs_regrouping(state):
                return
            continue
        state.evaluate_next = False
        if len(pack.ids("val")):
            yield state.record("evaluation", (yield from evaluate(state, feed, pack)))
        else:
            what = "nothing to evaluate: the validation split is empty"
            yield state.record("event", {"what": what, "asked": "evaluate"})


def records(state: TrainState) -> Iterator[Record]:
    """Yield what a step leaves: on a log step its figures, which may come later; events; its own record."""
    meter, now, rows = state.meter, state.record("step"), list[Record]()
    # Steps and not seconds, so that logs are reproducible: ten rows an epoch, at most 50 steps apart.
    if state.step % min(50, max(1, math.ceil(state.epoch_size / state.applied.batch_size) // 10)) == 0:
        rows = meter.rows()  # the last log step's, which may end the loop here
        meter.log(state.record("step", readings(state)), state.scaler)
    rows += meter.rows(wait=state.ranks.world > 1)  # several must see at the same step that training diverged
    yield from rows
    while state.events:
        yield state.record("event", {"what": state.events.pop(0)})
    if not rows or rows[-1].step != now.step:
        yield now


def readings(state: TrainState) -> dict[str, Any]:
    return {"lr": state.lr, "batch_size": state.applied.batch_size, **memory(state.device)}


def evaluate(state: TrainState, feed: Feed, pack: Pack) -> Generator[Record, None, dict[str, Any]]:
    """Return loss and metrics of the validation split, or of as many of its samples as the plan takes meanwhile."""
    start, sums, plan = perf_counter(), Sums(state.device, state.ranks), state.applied.while_training()
    plan = plan.replace(micro_batch_size=state.micro)  # what does not fit in training may not fit here
    state.ranks.align(state.evaluated.buffers())
    state.capture_rng()
    state.evaluating = True  # whose random numbers, of a network that samples, are not kept
    try:
        for _ in score_split(state.task, state.evaluated, pack, plan, "val", sums, feed):
            yield state.record("evaluating")
    finally:
        state.evaluating = False
        state.restore_rng()
    return {**{f"val_{name}": value for name, value in sums.read().items()}, "eval_time": perf_counter() - start}


def obey(task: TaskLike, state: TrainState, pack: Pack) -> None:
    """Train as rank 0 says: on its state, begun anew whenever rank 0 begins anew, until it ends the run."""
    with suppress(Ended):
        while True:
            with suppress(Restarted, Diverged):  # rank 0 diverges too, and decides what to do
                plan, tensors, facts = state.ranks.broadcast()
                adopt(state, type(state.plan)(**plan))  # first: a scaler takes over its saved state
                state.load(tensors, facts)
                state.plan = state.applied
                state.events.clear()
                for _ in train(task, state, pack):
                    continue
