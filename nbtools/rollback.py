"""Back to an earlier checkpoint: when training diverged after a change of settings, when it diverged without one, and
when the user asks for the best one.

A change that affects training is watched for WATCHED log steps. The anchor is a checkpoint from before it: going back
to it undoes the change, and every other one since. History, `run.json` and the kept copy follow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from nbtools.errors import CheckpointError
from nbtools.folder import Job
from nbtools.live import REFUSED
from nbtools.show import number, spelled
from nbtools.train import (
    LEFT_OUT,
    Diverged,
    Plan,
    Record,
    adopt,
    best_metric,
    beyond,
    caught_up,
    checkpoint,
    shown,
    times,
    train,
)

WATCHED = 20  # log steps: those before a change say how high the loss may be, those after it are compared with them
FACTOR = 3.0  # times the highest of those before it
NOISE = 0.1  # of the run's first loss: where everything is learned, noise alone is many times the highest loss
RETRIES = 2  # returns to a checkpoint where training diverged without a change; the next time the run stops

UNWATCHED = {"lr_rule", "micro_batch_size", "eval_every", "eval_samples", "early_stop"}
"""Settings that no gradient depends on, BatchNorm's statistics aside."""
OWN = {field.name for field in dataclasses.fields(Plan)}
"""Settings of every task. The others belong to a task and may define its loss (a weight of one of its terms): a
change may raise it by any factor, and only a loss that is not a number means that training diverged."""


@dataclass
class Anchor:
    """The checkpoint from before a change that is being watched.

    name: of the checkpoint; facts: its own, which a later one of the same step would replace; best: the name of the
    best weights then. limit: the loss above which training has diverged; None: only NaN or infinity means that. age:
    log steps since the first change; left: those until the watch ends, counted anew from each change.
    """

    name: str
    facts: dict[str, Any]
    best: str | None
    limit: float | None
    age: int = 0
    left: int = WATCHED


class Guard:
    """Watches the changes of a run's settings, and rolls the run back if one ruins it."""

    def __init__(self, job: Job):
        self.job, self.advised = job, job.surface.requests.advised
        self.returns, index = 0, checkpoint.read_index(job.folder)
        stored = index.get("anchor")
        self.anchor = Anchor(**stored) if stored else None
        if index.get("diverged"):  # by itself: the settings of that time are not worth going back to
            checkpoint.mark(job.folder, diverged=None)
        else:
            self.watch_since(checkpoint.name_of(job.state))

    def watch_since(self, name: str) -> None:
        """Watch what differs from the plan of the checkpoint that the run continues from."""
        plan = self.job.state.plan
        self.watch(type(plan).from_dict(checkpoint.facts_of(self.job.folder, name)["plan"]), name)

    def watch(self, old: Plan, name: str = "") -> None:
        """Watch the change from an old plan to the wanted one. name: of the checkpoint from before it; "": of this
        moment, or, while a slider is dragged, the one from before its first value."""
        job = self.job
        names = affecting(old, job.state.plan)
        if not names:
            return
        if self.anchor is None or (not name and self.anchor.age >= WATCHED):
            if not name and not job.done:
                job.save()
            job.settle()
            index, (_, losses) = checkpoint.read_index(job.folder), job.history.series("loss", "step")
            name = name or index["last"]
            self.anchor = Anchor(name, checkpoint.facts_of(job.folder, name), index.get("best"), highest(losses))
        if not OWN.issuperset(names):
            self.anchor.limit = None
        self.anchor.left = WATCHED
        checkpoint.mark(job.folder, anchor=dataclasses.asdict(self.anchor))

    def risen(self, record: Record) -> bool:
        """Whether a log step's loss shows that training has diverged since the watched change."""
        loss, anchor = record.values.get("loss"), self.anchor
        if anchor is None or record.kind != "step" or loss is None:
            return False
        anchor.age, anchor.left = anchor.age + 1, anchor.left - 1
        if anchor.limit is not None and loss > anchor.limit and not self.short(record):
            return True
        if anchor.left <= (0 if self.job.state.scale >= 1 else -WATCHED):  # below, fp16 may be about to give up
            self.anchor = None
            checkpoint.mark(self.job.folder, anchor=None)
        return False

    def short(self, record: Record) -> bool:
        """Whether its loss is of an epoch's last few samples alone, less than half a batch: any of them may be hard."""
        before = [row["samples"] for row in self.job.history.of("step")[-1:]] or [0]
        return record.samples - before[0] < record.values["batch_size"] / 2

    def undo(self, anchor: Anchor) -> Generator[Record, None, None]:
        """Back to before the watched change, which is undone with all changes since."""
        job, state, self.anchor = self.job, self.job.state, None
        job.settle()
        found = checkpoint.newest(job.folder, anchor.name)
        facts = anchor.facts if found.name == anchor.name else found.facts  # else the anchor's is damaged
        tried, old = state.applied, type(state.plan).from_dict(facts["plan"])
        adopt(state, old)  # first: a scaler takes over its saved state
        state.load(found.tensors, facts["state"])
        state.plan = state.applied  # what was wanted since is void
        checkpoint.rewind(job.folder, checkpoint.name_of(state), best=anchor.best, anchor=None)
        job.write_plan()
        job.surface.returned()
        if names := affecting(old, tried):
            back = ", ".join(f"{name} {shown(getattr(old, name))}" for name in names)
            what = f"Training diverged at {self.described(tried, names)}; back at step {state.step:,} with {back}"
        else:
            what = f"Training diverged after a change that was undone; back at step {state.step:,}"
        yield from self.continued(facts, what, mark=f"diverged, back to step {state.step:,}")

    def to_best(self) -> Generator[Record, None, None]:
        """Back to the best checkpoint, settings unchanged; refused if it is damaged."""
        job, state = self.job, self.job.state
        job.settle()
        name = str(checkpoint.best_of(job.folder))
        try:
            found = checkpoint.read(job.folder, name)
        except CheckpointError as error:
            job.surface.answer(f"{REFUSED}{error}", "best")
            return
        state.load(found.tensors, found.facts["state"])
        if self.anchor is not None and checkpoint.place(self.anchor.name) > checkpoint.place(name):
            self.anchor = None
        checkpoint.rewind(job.folder, name, **({} if self.anchor else {"anchor": None}))
        job.history.cut(found.facts["rows"])  # after the index: a run killed between them resumes with all of its rows
        self.watch_since(name)
        value = f"{spelled(best_metric(job.task)[0])} {number(state.best.value or 0.0)} after epoch {state.epoch}"
        what = f"back at step {state.step:,}, the best checkpoint: {value}"
        old, mark = type(state.plan).from_dict(found.facts["plan"]), f"back to step {state.step:,}, the best"
        yield from self.continued(found.facts, what, old, mark=mark, asked="best")

    def retry(self, trouble: Diverged) -> Generator[Record, None, None]:
        """Back to the last checkpoint, and from there with each step checked before it counts. Raises Diverged if
        that would not help: fp16 skips all steps, lr is far beyond the advised one, skipping steps did not help, or
        there were too many returns."""
        job, state, setting = self.job, self.job.state, trouble.setting
        self.returns += 1
        job.settle()
        sure = setting != "lr" or beyond(state.plan, self.advised) or state.recovery.refused > LEFT_OUT
        if sure or self.returns > RETRIES:
            often = "" if sure else ", for the third time"
            last = checkpoint.place(checkpoint.read_index(job.folder)["last"])[1]
            checkpoint.mark(job.folder, diverged=True)
            lower = self.advised.lr if self.advised.lr < state.plan.lr else state.plan.lr / 10
            fix = f"lower lr, in the panel or by plan.replace(lr={shown(lower)}), set clip_norm or amp=off"
            if setting == "amp":
                fix = "set amp=off, or amp=bf16 on a GPU that has it, which needs no scale"
            raise Diverged(
                f"Training diverged at {self.described(state.plan, [setting])}: {trouble.args[0]}{often}. "
                f"To continue from step {last:,}, {fix}, and run it again.",
                trouble.steps,
                setting,
            )
        facts = checkpoint.load(job.folder, state).facts
        state.recovery.careful_until = trouble.steps[1] + 1
        what = f"{trouble.args[0]}; back at step {state.step}, checking each step from there"
        old, mark = type(state.plan).from_dict(facts["plan"]), f"diverged, back to step {state.step:,}"
        yield from self.continued(facts, what, old, mark=mark)

    def continued(
        self, facts: dict[str, Any], what: str, old: Plan | None = None, **values: str
    ) -> Generator[Record, None, None]:
        """Remove the rows of what was discarded; yield one that says why, and one for the settings that the checkpoint
        did not have (old: its plan); save a checkpoint with them. values: further ones of the first row; `mark`: its
        name in the charts."""
        state = self.job.state
        state.improved = False
        state.events.clear()
        self.job.history.cut(facts["rows"])
        yield Record("event", state.epoch, state.step, state.samples, {"what": what, **values})
        if old is not None:
            yield from caught_up(state, old)
        self.job.save()

    def described(self, plan: Plan, names: Sequence[str]) -> str:
        """Settings in a sentence, the lr with its ratio to the advised one."""
        values = {name: f"{name} {shown(getattr(plan, name))}" for name in names}
        if "lr" in values and plan.lr > self.advised.lr:
            values["lr"] += f", {times(plan.lr / self.advised.lr)} the advised {shown(self.advised.lr)}"
        return " and ".join(values.values())


def affecting(old: Plan, new: Plan) -> list[str]:
    """The settings that differ and affect training."""
    return [name for name in new.changes_from(old) if name not in UNWATCHED]


def highest(losses: Sequence[float]) -> float | None:
    """The loss above which training has diverged: FACTOR times the highest of the last WATCHED ones; None without any.

    A loss may be negative, where a factor is meaningless: what counts is the distance from the highest, twice the
    largest magnitude among them, which is the same for positive ones. Close to 0, where everything is learned, the
    distance is at least NOISE of the run's first loss.
    """
    known = [loss for loss in losses if math.isfinite(loss)]
    if not known:
        return None
    last = known[-WATCHED:]
    return max(last) + max((FACTOR - 1) * max(map(abs, last)), NOISE * abs(known[0]))


def resilient(guard: Guard) -> Generator[Record, None, None]:
    """The loop; goes back to a checkpoint where training diverged or the user asks for it. However it ends, what was
    copied is written before anything is said of the best model."""
    try:
        while (ended := (yield from stretch(guard))) is not None:
            if ended == "best":
                yield from guard.to_best()
            elif guard.anchor is not None:
                yield from guard.undo(guard.anchor)
            elif isinstance(ended, Diverged):
                yield from guard.retry(ended)
    finally:
        guard.job.settle()


def stretch(guard: Guard) -> Generator[Record, None, Diverged | str | None]:
    """Train until the end (None), until training diverged, or the user asks for the best checkpoint."""
    job = guard.job
    records = train(job.task, job.state, job.pack)
    try:
        for record in records:
            if guard.risen(record):
                return "risen"
            yield record
            if job.surface.requests.take("best"):
                return "best"
    except Diverged as error:
        return error.with_traceback(None)  # its frames hold the feed, on a GPU a second copy of the pack
    finally:
        records.close()
    return None
