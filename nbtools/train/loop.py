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
from dataclasses import replace
from functools import partial
from operator import iadd
from time import perf_counter
from typing import Any

import torch

from nbtools.data import Feed, Pack, batches_left, lengths_of, open_feed
from nbtools.errors import TrainError
from nbtools.show import plural
from nbtools.train.device import memory, prepare, put, require, required
from nbtools.train.evaluation import Sums, fed, score_split
from nbtools.train.history import Record
from nbtools.train.optimizer import follow
from nbtools.train.plan import Plan, listed, refuse_fixed, require_batch, require_sizes
from nbtools.train.ranks import Ended, Restarted, share
from nbtools.train.recovery import Diverged, train_step
from nbtools.train.state import Best, EpochSums, Log, TrainState, Wanted
from nbtools.train.task import TaskLike, best_metric, bound, order, readable

LEAST_SCALE = 1e-4  # of fp16's loss, below which fairseq gives up too: overflowing steps halve it from 65,536


def train(task: TaskLike, state: TrainState, pack: Pack, feed: Feed | None = None) -> Generator[Record, None, None]:
    """Train until the plan's last epoch, `state.stopped`, or the caller leaves the `for`; calling it again continues.

    Yields Record `step` after every step (with values on log steps only: reading a value waits for the device; so on a
    GPU they come in a Record of their own, of the same step, when they have arrived: before the next log step's and
    before anything else that has values),
    `evaluating` after every batch of an evaluation, `epoch` after each epoch, `change` just before a changed plan is
    applied, `event` for anything else. Replace `state.plan` to change settings from the next step on. Set
    `state.evaluate_next` for an evaluation before the next step, which ends with a Record `evaluation` and changes
    nothing. feed: one that is open, to share it; None: the plan's. Raises TrainError if training cannot start.

    On several ranks this is rank 0's; the others run `obey`, and take over its state when this begins.
    """
    state.task = bound(task, state.card)
    pack = readable(task, pack, state.plan)
    require_sizes(pack, state.plan)
    state.know(len(pack))
    prepare(state.plan, state.device, many_shapes=state.card.bucket_by is not None)
    opening = partial(open_feed, pack, state.plan, state.device, state.events.append)
    feed, count = feed or required(opening), len(pack.ids("train"))
    if state.ranks is not None and state.ranks.first:
        state.spread()
    state.restore_rng()
    state.watch.start()
    try:
        while True:
            if state.over_as(agree(state, count)):
                break
            start = state.step
            yield from train_epoch(state, feed, pack)
            lost = state.lost()
            state.sums.add(state.watch.lap())
            if lost:
                raise Diverged(f"the loss became non-finite in steps {start + 1} to {state.step}", (start, state.step))
            wanted, values, done = agree(state, count), {}, state.epoch + 1
            ends = done >= wanted.plan.epochs  # as wanted, like `over`
            if len(pack.ids("val")) and (done % state.applied.eval_every == 0 or ends):
                values, wanted = yield from evaluate_val(state, feed, pack)
                state.evaluate_next = False
                judge(state, values, wanted.plan)
            yield end_epoch(state, values, count)
        yield from changes(state, count)  # requested since the last step, such as fewer epochs
    finally:
        state.watch.stop()
        state.capture_rng()
        state.training = False


def obey(task: TaskLike, state: TrainState, pack: Pack, feed: Feed | None = None) -> None:
    """The program of every rank but the first: train as rank 0 does, and serve it in between, until it ends the run."""
    ranks, begun = state.ranks, None
    assert ranks is not None
    while True:
        try:
            if begun is None:
                ranks.tell()
            else:
                take_over(state, begun)
                begun = None
                for _ in train(task, state, pack, feed):
                    continue
        except Restarted as restarted:
            begun = restarted.with_traceback(None)  # its frames hold the feed
        except Diverged:
            continue  # so does rank 0, and decides what to do
        except Ended:
            return


def take_over(state: TrainState, begun: Restarted) -> None:
    """Make the state rank 0's."""
    plan, facts, tensors = begun.args
    adopt(state, type(state.plan).from_dict(plan))  # first: a scaler takes over its saved state
    state.load(tensors, facts)
    state.plan = state.applied
    state.events.clear()


def train_epoch(state: TrainState, feed: Feed, pack: Pack) -> Iterator[Record]:
    """The rest of this epoch; a change of batch size regroups what is left of it."""
    ids, position, sums, watch = pack.ids("train"), state.position, state.sums, state.watch
    lengths = lengths_of(pack, ids)
    sums.add(watch.lap())  # of an interrupted loop
    window = Window(state)
    while True:
        yield from rows(state)
        yield from changes(state, len(ids))
        plan = state.applied
        if not position.segments or position.segments[-1][0] != plan.batch_size:
            position.segments.append([plan.batch_size, 0])
        batches = batches_left(ids, lengths, plan.seed, position.epoch, position.segments)
        every = log_interval(len(ids), plan.batch_size)
        ranks = state.ranks
        stream = fed(feed, batches if ranks is None else [share(each, ranks.rank, ranks.world) for each in batches])
        for batch in batches:
            if state.called():
                yield from between_steps(state, feed, pack)
                if state.applied.batch_size != position.segments[-1][0]:
                    break
            watch.begin()
            raw = next(stream)
            watch.got()
            loss_sum, count = train_step(state, raw, len(ids), len(batch))
            sums.loss += loss_sum
            sums.count = required(partial(iadd, sums.count, count), "counting samples")  # the first on a GPU allocates
            watch.end()
            position.step += 1
            position.samples += len(batch)
            position.segments[-1][1] += 1
            logs = position.step % every == 0
            before = rows(state) if logs or state.events else []
            if logs:
                state.log, window = window.log(state), Window(state)
            yield from before
            while state.events:
                yield record(state, "event", {"what": state.events.pop(0)})
            yield from step_rows(state)
        else:
            next(stream, None)
            yield from rows(state)
            return


def between_steps(state: TrainState, feed: Feed, pack: Pack) -> Iterator[Record]:
    """Apply a changed plan and evaluate where that was asked for, also while this yields; not beyond a change of batch
    size, for which the epoch is regrouped first. An evaluation changes nothing in the run."""
    yield from rows(state)
    while True:
        wanted = yield from changes(state, pack.splits["train"])
        if not wanted.evaluate or state.applied.batch_size != state.position.segments[-1][0]:
            return
        state.evaluate_next = False
        if len(pack.ids("val")):
            values, _ = yield from evaluate_val(state, feed, pack)
            yield record(state, "evaluation", values)
        else:
            what = "nothing to evaluate: the validation split is empty"
            yield record(state, "event", {"what": what, "asked": "evaluate"})


def log_interval(samples: int, batch_size: int) -> int:
    """Steps between log rows: ten an epoch, at most 50 steps. Steps and not seconds, so that a log can be repeated."""
    return min(50, max(1, math.ceil(samples / batch_size) // 10))


class Window:
    """The steps from one log step to the next."""

    def __init__(self, state: TrainState):
        self.step, self.samples = state.step, state.samples

    def log(self, state: TrainState) -> Log:
        """Its settings and memory; its loss and its times are on their way to the host."""
        put(state.logged.tensor, state.sums.loss, state.sums.count)
        state.logged.send()
        return Log(record(state, "step", readings(state)), self.step, state.samples - self.samples, state.watch.lap())


def rows(state: TrainState) -> list[Record]:
    """The row of the last log step, if it is still to come: waits for its loss, but not for the steps after it. Raises
    Diverged if the loss is not finite, or fp16 skips all steps."""
    if state.log is None:
        return []
    log, sums = state.log, state.sums
    total, count = state.logged.values()
    speed = rates(log.samples, *sums.add(log.lap))
    state.log = None
    steps = log.since, log.record.step
    if not math.isfinite(total):
        raise Diverged(f"the loss became {total} in steps {steps[0] + 1} to {steps[1]}", steps)
    if state.scale < LEAST_SCALE:
        what = f"gradients overflow in every step, though their scale has fallen to {state.scale:.0e}, and none counts"
        raise Diverged(what, steps, "amp")
    found = mean("loss", total - sums.logged[0], count - sums.logged[1])
    sums.logged = (total, count)
    return [replace(log.record, values={**found, **speed, **log.record.values, "wall": state.watch.wall})]


def mean(name: str, total: float, count: float) -> dict[str, float]:
    """{name: total / count}; {} where no step counted: a loss of 0 would be the best of all."""
    return {name: total / count} if count else {}


def step_rows(state: TrainState) -> list[Record]:
    """The record of a step; with it, or before it where that came later, the last log step's row if its loss has
    arrived. Several ranks do not ask, since they must all find out at the same step that training diverged."""
    found = rows(state) if state.logged.arrived and state.ranks is None else []
    return found if found and found[0].step == state.step else [*found, record(state, "step", {})]


def rates(samples: int, seconds: float, waited: float) -> dict[str, Any]:
    """How fast so many samples were trained on, and the share of the time in which the device waited for data."""
    seconds = max(seconds, 1e-9)
    return {"samples_per_s": samples / seconds, "data_wait": waited / seconds}


def readings(state: TrainState) -> dict[str, Any]:
    return {"lr": state.position.lr, "batch_size": state.applied.batch_size, **memory(state.device)}


def record(state: TrainState, kind: str, values: dict[str, Any]) -> Record:
    return Record(kind, state.position.epoch, state.position.step, state.position.samples, values)


# -- the end of an epoch


def evaluate_val(state: TrainState, feed: Feed, pack: Pack) -> Generator[Record, None, tuple[dict[str, Any], Wanted]]:
    """Loss and metrics of the validation split, or of as many of its samples as the plan evaluates during training; and
    what is wanted by then."""
    start, sums, plan, ranks = perf_counter(), Sums(state.device), state.applied.while_training(), state.ranks
    if ranks is not None:
        ranks.same(state.evaluated.buffers())
    for _ in score_split(state.task, state.evaluated, pack, plan, "val", sums, feed, plan.eval_samples, ranks):
        yield record(state, "evaluating", {})
    wanted = state.wanted
    if ranks is not None:
        wanted = agree(state, pack.splits["train"])
        sums.add_up(ranks)
    values = {f"val_{name}": value for name, value in sums.read().items()}
    return {**values, "eval_time": perf_counter() - start}, wanted


def judge(state: TrainState, values: dict[str, Any], wanted: Plan) -> None:
    """Whether an epoch's evaluation is the best so far, and in how many since the metric did not improve; a plateau and
    an early stop follow from it. A best value of another metric does not count."""
    plan, (metric, sign) = state.applied, best_metric(state.task)
    if state.best.metric not in (None, metric):
        state.best = Best(drops=state.best.drops)
    best = state.best
    if f"val_{metric}" not in values:
        named = ", ".join(name.removeprefix("val_") for name in values if name != "eval_time")
        raise TrainError(f"the task's BEST is {metric!r}, but its metrics are {named}; name one of them")
    value = values[f"val_{metric}"]
    loss, before = values["val_loss"], best.value
    state.improved = math.isfinite(value) and (
        before is None or order(value, loss, sign) >= order(before, best.loss, sign)
    )
    best.stale = 0 if state.improved and (before is None or value != before) else best.stale + 1
    if state.improved:
        best.metric, best.value, best.loss = metric, value, loss
    if plan.schedule == "plateau" and best.stale and best.stale % plan.patience == 0:
        best.drops += 1
    early = wanted.early_stop  # one that was just turned off ends nothing
    if early is not None and best.stale >= early:
        state.stopped = f"early stop: {metric} did not improve in {plural(best.stale, 'evaluation')}"


def end_epoch(state: TrainState, values: dict[str, Any], epoch_size: int) -> Record:
    """The epoch's row; the state moves to the next epoch."""
    sums, position = state.sums, state.position
    row = {
        **mean("train_loss", float(sums.loss), float(sums.count)),
        **values,
        **rates(epoch_size, sums.seconds, sums.waited),
        **readings(state),
        "epoch_time": sums.seconds,
        "wall": state.watch.wall,
    }
    if state.device.type == "cuda":
        row["gpu_memory_peak"] = torch.cuda.max_memory_allocated(state.device) / 2**20
        torch.cuda.reset_peak_memory_stats(state.device)
    ended = record(state, "epoch", row)
    position.epoch, position.segments, state.sums = position.epoch + 1, [], EpochSums(sums.loss.zero_())
    return ended


# -- a changed plan


def agree(state: TrainState, epoch_size: int) -> Wanted:
    """What is wanted by now, on several ranks by rank 0: to be called after each record, since whoever watches rank 0
    may have changed it. What this returns is the same on all ranks; `state.plan` may be replaced at any time. Raises
    TrainError for a plan that this run cannot adopt at this point, which is then forgotten."""
    wanted, ranks = state.wanted, state.ranks
    if wanted.plan is not state.applied:
        try:
            require_change(state, wanted.plan, epoch_size)
        except TrainError:
            state.plan = state.applied
            raise
    if ranks is not None:
        plan = wanted.plan.to_dict() if wanted.plan is not state.applied else None
        plan, evaluate, stopped = ranks.tell((plan, wanted.evaluate, wanted.stopped))
        if not ranks.first:
            state.plan = state.applied if plan is None else type(state.plan).from_dict(plan)
            state.stopped = stopped
            wanted = Wanted(state.plan, evaluate, stopped)
    return wanted


def changes(state: TrainState, epoch_size: int) -> Generator[Record, None, Wanted]:
    """Apply a replaced plan to model and optimizer; a row says what changes. Returns what else is wanted."""
    while (wanted := agree(state, epoch_size)).plan is not state.applied:
        if differing := wanted.plan.changes_from(state.applied):
            yield record(state, "change", {"what": listed(differing)})  # a watcher may save: the old plan still applies
        adopt(state, wanted.plan)
    return wanted


def require_change(state: TrainState, new: Plan, epoch_size: int) -> None:
    """Raise TrainError for a plan that this run cannot adopt at this point."""
    refuse_fixed(new.changes_from(state.applied), new)
    require(new, state.device)
    require_batch(new, epoch_size)


def adopt(state: TrainState, new: Plan, since: Plan | None = None) -> None:
    """Make model and optimizer follow a plan. since: the one that they follow now; None: the applied one."""
    differing = new.changes_from(since or state.applied)
    if differing.keys() & {"micro_batch_size", "batch_size"}:
        state.recovery.micro = new.micro_batch_size
    if "amp" in differing:
        state.scaler, state.scale = torch.amp.GradScaler(state.device.type) if new.amp == "fp16" else None, math.inf
    follow(state.optimizer, new)
    state.applied = new


def caught_up(state: TrainState, saved: Plan) -> Iterator[Record]:
    """Back at a checkpoint that was saved under another plan: settings changed since are kept, and a row records it."""
    adopt(state, state.applied, since=saved)
    if differing := state.applied.changes_from(saved):
        yield record(state, "change", {"what": listed(differing)})
