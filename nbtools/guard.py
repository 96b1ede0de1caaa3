"""The guard: three ways back, each of which resumes from an earlier checkpoint with a plan. A change after which
training diverges, or that the user undoes: from before it, with the plan of then. *Back to best*: with the plan of now.
Training that diverges by itself: from the last checkpoint, each step checked."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nbtools import train
from nbtools.errors import CheckpointError
from nbtools.folder import Job
from nbtools.live import REFUSED
from nbtools.show import header, number
from nbtools.train import Diverged, Plan, Record, checkpoint

WATCHED = 20  # log steps: those before a change say how high the loss may be, those after it are compared with them
FACTOR = 3.0  # times the highest of those before it
NOISE = 0.1  # of the run's first loss: where everything is learned, noise alone is many times the highest loss
RETRIES = 2  # returns to a checkpoint where training diverged without a change; the next time the run stops


class Guard:
    """The loop of a run, with its ways back.

    anchor: the checkpoint from before the changes that are watched, also in the index, so that a killed run stays on
    watch: its `name`; its `facts`, which a later one of the same step would replace; `best`, the best weights of then;
    `limit`, the loss above which training has diverged (None: only NaN tells); `since` and `until`, log steps.
    """

    def __init__(self, job: Job):
        self.job, self.state, self.requests, self.returns = job, job.state, job.surface.requests, 0
        index = checkpoint.read_index(job.folder)
        self.anchor: dict[str, Any] | None = index.get("anchor")
        if index.get("diverged"):  # by itself: the settings of that time are not worth going back to
            checkpoint.mark(job.folder, diverged=None)
        else:
            self.watch(self.plan_of(checkpoint.facts_of(job.folder, index["last"])), index["last"])

    def records(self) -> Generator[Record, None, None]:
        """Yield the records of the loop. However it ends, what was copied is written."""
        try:
            while (way := (yield from self.stretch())) is not None:
                self.job.settle()
                yield from way()
        finally:
            self.job.settle()

    def stretch(self) -> Generator[Record, None, Any]:
        """Train to the end, and return None, or until the run is to go back, and return how."""
        records = train.train(self.job.task, self.state, self.job.pack)
        try:
            for record in records:
                if record.kind == "change":  # which is applied when the loop goes on
                    self.watch(self.state.applied)
                elif self.risen(record):
                    return self.undo
                yield record
                if self.requests.take("best"):
                    return self.to_best
                if self.requests.take("undo"):
                    return partial(self.undo, "undo")
        except Diverged as error:  # without its frames, which hold the feed, on a GPU a second copy of the pack
            return self.undo if self.anchor is not None else partial(self.retry, error.with_traceback(None))
        finally:
            records.close()

    def watch(self, old: Plan, name: str = "") -> None:
        """Watch the change from a plan to the wanted one. name: of a checkpoint from before it; "": of now."""
        job, changed = self.job, self.state.plan.changes_from(old).keys()
        if not changed:
            return
        steps, losses = job.history.series("loss", "step")
        if self.anchor is None or (not name and len(steps) - self.anchor["since"] >= WATCHED):
            if not name:
                job.save()
            job.settle()
            index = checkpoint.read_index(job.folder)
            name, limit = name or index["last"], highest(losses)
            facts = checkpoint.facts_of(job.folder, name)
            self.anchor = {"name": name, "facts": facts, "best": index.get("best"), "limit": limit, "since": len(steps)}
        if changed - Plan().to_dict().keys():  # a task's own setting may weigh a term of the loss by any factor
            self.anchor["limit"] = None
        self.anchor["until"] = len(steps) + WATCHED
        checkpoint.mark(job.folder, anchor=self.anchor)

    def risen(self, record: Record) -> bool:
        """Return whether a log step's loss shows that training has diverged since the watched change."""
        anchor, loss = self.anchor, record.values.get("loss")
        if anchor is None or record.kind != "step" or loss is None:
            return False
        rows = self.job.history.of("step")
        few = record.samples - (rows[-1]["samples"] if rows else 0) < record.values["batch_size"] / 2
        if anchor["limit"] is not None and loss > anchor["limit"] and not few:  # any of an epoch's last few may be hard
            return True
        if len(rows) + 1 >= anchor["until"]:
            self.anchor = None
            checkpoint.mark(self.job.folder, anchor=None)
        return False

    def undo(self, asked: str = "") -> Generator[Record, None, None]:
        """Resume from before the watched changes, with the plan of then."""
        state, anchor, self.anchor = self.state, self.anchor or {}, None
        saved = checkpoint.newest(self.job.folder, anchor["name"])
        if saved.name == anchor["name"]:  # else it is damaged, and an older one is used
            saved = replace(saved, facts=anchor["facts"])
        old = state.plan = self.plan_of(saved.facts)  # what was wanted since is void
        names = [*state.applied.changes_from(old)]
        values = f" with {', '.join(f'{name} {train.shown(getattr(old, name))}' for name in names)}" if names else ""
        why = "the change was undone" if asked else f"Training diverged at {self.described(names)}"
        yield from self.resume(saved, f"{why}; ", values, asked, best=anchor["best"])

    def to_best(self) -> Generator[Record, None, None]:
        """Resume from the best checkpoint with the plan of now; refused if it is damaged."""
        try:
            saved = checkpoint.read(self.job.folder, str(checkpoint.best_of(self.job.folder)))
        except CheckpointError as error:
            self.job.surface.answer(f"{REFUSED}{error}", "best")
            return
        best = f"{header(train.best_metric(self.job.task)[0])} {number(self.state.best.value or 0.0)}"
        value = f", the best checkpoint: {best} after epoch {checkpoint.place(saved.name)[0]}"
        yield from self.resume(saved, "", value, "best")

    def retry(self, trouble: Diverged) -> Generator[Record, None, None]:
        """Resume from the last checkpoint, and check each step from there. Raises Diverged if that would not help."""
        state, setting, advised = self.state, trouble.setting, self.requests.advised
        self.returns += 1
        sure = setting != "lr" or train.beyond(state.plan, advised) or state.recovery.refused > train.LEFT_OUT
        if not sure and self.returns <= RETRIES:
            saved = checkpoint.newest(self.job.folder)
            for record in self.resume(saved, f"{trouble.args[0]}; ", ", checking each step from there"):
                state.recovery.careful_until = trouble.steps[1] + 1
                yield record
            return
        checkpoint.mark(self.job.folder, diverged=True)
        lower = advised.lr if advised.lr < state.plan.lr else state.plan.lr / 10
        fix = f"lower lr, in the panel or by plan.replace(lr={train.shown(lower)}), set clip_norm or amp=off"
        if setting == "amp":
            fix = "set amp=off, or amp=bf16 on a GPU that has it, which needs no scale"
        step = checkpoint.place(checkpoint.read_index(self.job.folder)["last"])[1]
        again = f"To continue from step {step:,}, {fix}, and run it again."
        said = f"Training diverged at {self.described([setting])}: {trouble.args[0]}. {again}"
        raise Diverged(said, trouble.steps, setting)

    def resume(
        self, saved: checkpoint.Checkpoint, why: str, how: str, asked: str = "", **entries: Any
    ) -> Generator[Record, None, None]:
        """Resume from a checkpoint with the wanted plan; rows say so, and which settings it did not have."""
        job, state, old = self.job, self.state, self.plan_of(saved.facts)
        if self.anchor is not None and checkpoint.place(self.anchor["name"]) > checkpoint.place(saved.name):
            self.anchor = None
        train.adopt(state, state.plan)  # first: a scaler takes over its saved state
        state.load(saved.tensors, saved.facts["state"])
        state.improved = False
        state.events.clear()
        checkpoint.rewind(job.folder, saved.name, anchor=self.anchor, **entries)
        job.history.cut(saved.facts["rows"])  # after the index: a run killed between them resumes with all of its rows
        self.watch(old, saved.name)
        mark = {"best": "", "undo": "undone, "}.get(asked, "diverged, ") + f"back to step {state.step:,}"
        values = {"what": f"{why}back at step {state.step:,}{how}", "mark": mark}
        yield Record("event", state.epoch, state.step, state.samples, values | ({"asked": asked} if asked else {}))
        yield from train.caught_up(state, old)
        job.take()
        job.settle()

    def plan_of(self, facts: dict[str, Any]) -> Plan:
        return type(self.state.plan).from_dict(facts["plan"])

    def described(self, names: Sequence[str]) -> str:
        """Return the applied settings in words, the lr with its ratio to the advised one."""
        plan, advised = self.state.applied, self.requests.advised
        values = {name: f"{name} {train.shown(getattr(plan, name))}" for name in names}
        if "lr" in values and plan.lr > advised.lr:
            values["lr"] += f", {train.times(plan.lr / advised.lr)} the advised {train.shown(advised.lr)}"
        return " and ".join(values.values()) or "these settings"


def highest(losses: Sequence[float]) -> float | None:
    """Return the loss above which training has diverged: FACTOR times the highest of the last WATCHED ones; None
    without any. A loss may be negative: what counts is the distance from the highest, which is the same for positive
    ones."""
    known = [loss for loss in losses if math.isfinite(loss)]
    if not known:
        return None
    last = known[-WATCHED:]
    return max(last) + max((FACTOR - 1) * max(map(abs, last)), NOISE * abs(known[0]))
