"""The guard: training goes on from an earlier checkpoint. After a change that makes it diverge, or that the user
undoes: from before it, with the plan of then. *Back to best*: with the plan of now. Where it diverges by itself: from
the last one, each step checked."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Generator, Sequence
from typing import Any

from nbtools import train
from nbtools.folder import Job
from nbtools.show import header, number
from nbtools.train import Diverged, Plan, Record, checkpoint

WATCHED = 20  # log steps: those before a change say how high the loss may be; at least as many after it are watched
FACTOR = 3.0  # times the highest of those before it
NOISE = 0.1  # of the run's first loss: where everything is learned, noise alone is many times the highest loss
RETRIES = 2  # returns to a checkpoint where training diverged without a change; the next time the run stops


class Guard:
    """The loop of a run, with its ways back. anchor: the `name` of the checkpoint from before the changes that are
    watched, the `plan` and the `best` checkpoint of then; in the index too, so that a killed run stays on watch."""

    def __init__(self, job: Job):
        self.job, self.state, self.retries, self.careful_until = job, job.state, 0, 0
        index = checkpoint.read_index(job.folder)
        self.anchor: dict[str, Any] | None = index.get("anchor")
        if index.get("ended") != "diverged":  # else the settings of that time are not worth going back to
            self.watch(self.plan_of(checkpoint.facts_of(job.folder, index["last"])), index["last"])
        checkpoint.mark(job.folder, ended=None)

    def records(self) -> Generator[Record, None, None]:
        """Yield the records of the loop, through every return to a checkpoint."""
        while why := (yield from self.stretch()):
            self.job.wait()
            back = self.to_best if why == "best" else self.undo if self.anchor is not None else self.retry
            yield from self.resume(*back(why), why if why in ("best", "undo") else "")

    def stretch(self) -> Generator[Record, None, Any]:
        """Train to the end, and return None, or until the run is to go back, and return why."""
        records, take = train.train(self.job.task, self.state, self.job.pack), self.job.surface.requests.take
        try:
            for record in records:
                if record.kind == "change":  # which is applied when the loop goes on
                    self.watch(self.state.applied)
                elif self.risen(record):
                    return "risen"
                yield record
                if take("best"):
                    return "best"
                if self.anchor is not None and take("undo"):
                    return "undo"
        except Diverged as error:
            return error.with_traceback(None)  # whose frames hold the feed, on a GPU a second copy of the pack
        finally:
            records.close()

    def watch(self, old: Plan, name: str = "") -> None:
        """Watch the change from a plan to the wanted one. name: of a checkpoint from before it; "": of now."""
        if self.state.plan != old and (self.anchor is None or len(self.losses()[1]) >= WATCHED):
            if not name:
                self.job.save()
            self.job.wait()
            index = checkpoint.read_index(self.job.folder)
            self.anchor = {"name": name or index["last"], "plan": old.to_dict(), "best": index.get("best")}
            checkpoint.mark(self.job.folder, anchor=self.anchor)

    def losses(self) -> tuple[list[float], list[float]]:
        """Return the losses of log steps before the watched changes, and since."""
        steps, losses = self.job.history.series("loss", "step")
        count = bisect_right(steps, checkpoint.place(self.anchor["name"])[1]) if self.anchor else len(steps)
        return losses[:count], losses[count:]

    def risen(self, record: Record) -> bool:
        """Return whether a log step's loss shows that training has diverged since the watched changes."""
        if self.anchor is None or record.kind != "step" or "loss" not in record.values:
            return False
        before, since = self.losses()
        changed = self.state.applied.changes_from(self.plan_of(self.anchor)).keys()
        own = changed - Plan().to_dict().keys()  # a task's own setting may weigh a term of the loss by any factor
        if record.values["loss"] > highest(before) and not own:
            return True
        if len(since) + 1 >= 2 * WATCHED:
            self.anchor = None
            checkpoint.mark(self.job.folder, anchor=None)
        return False

    def undo(self, why: Any) -> tuple[checkpoint.Checkpoint, str]:
        """Return the checkpoint from before the watched changes, and want the plan of then."""
        anchor, self.anchor = self.anchor or {}, None
        saved = checkpoint.newest(self.job.folder, anchor["name"])
        self.state.plan = self.plan_of(anchor)  # what was wanted since is void
        checkpoint.mark(self.job.folder, best=anchor["best"])
        changes = train.listed(self.state.applied.changes_from(self.state.plan)) or "a change"
        what = f"{changes} undone" if why == "undo" else f"Training diverged after {changes}, which was undone"
        return saved, f"{what}; back at step {{}}"

    def to_best(self, why: Any) -> tuple[checkpoint.Checkpoint, str]:
        """Return the best checkpoint."""
        saved = checkpoint.read(self.job.folder, checkpoint.read_index(self.job.folder)["best"])
        best = f"{header(train.best_metric(self.job.task)[0])} {number(self.state.best.value or 0.0)}"
        return saved, f"back at step {{}}, the best checkpoint: {best} after epoch {checkpoint.place(saved.name)[0]}"

    def retry(self, trouble: Any) -> tuple[checkpoint.Checkpoint, str]:
        """Return the last checkpoint, from which each step is checked. Raises Diverged if that would not help."""
        saved, reason, setting = checkpoint.newest(self.job.folder), trouble.args[0], trouble.setting
        self.retries, self.careful_until = self.retries + 1, trouble.steps[1] + 1
        if self.retries <= RETRIES and setting == "lr":
            return saved, f"{reason}; back at step {{}}, checking each step from there"
        plan, step = self.state.plan, checkpoint.place(saved.name)[1]
        lower = train.shown(min(self.job.surface.requests.advised.lr, plan.lr / 10))
        fix = f"lower lr, in the panel or by plan.replace(lr={lower}), set clip_norm or amp=off"
        if setting == "amp":
            fix = "set amp=off, or amp=bf16 on a GPU that has it, which needs no scale"
        said = f"Training diverged at {setting} {train.shown(getattr(plan, setting))}: {reason}. To continue from step"
        raise Diverged(f"{said} {step:,}, {fix}, and run it again.", trouble.steps, setting)

    def resume(self, saved: checkpoint.Checkpoint, what: str, asked: str) -> Generator[Record, None, None]:
        """Resume from a checkpoint with the wanted plan; a row says so, with the step in `what`."""
        job, state, old = self.job, self.state, self.plan_of(saved.facts)
        if self.anchor is not None and checkpoint.place(self.anchor["name"]) > checkpoint.place(saved.name):
            self.anchor = None
        train.adopt(state, state.plan)  # first: a scaler takes over its saved state
        state.load(saved.tensors, saved.facts["state"])
        state.improved, state.recovery.careful_until = False, max(state.recovery.careful_until, self.careful_until)
        state.events.clear()
        job.place = state.epoch, state.step
        checkpoint.rewind(job.folder, saved.name, anchor=self.anchor)
        job.history.cut(saved.facts["rows"])  # after the index: a run killed between them resumes with all of its rows
        self.watch(old, saved.name)
        mark = {"best": "", "undo": "undone, "}.get(asked, "diverged, ") + f"back to step {state.step:,}"
        values = {"what": what.format(f"{state.step:,}"), "mark": mark, **({"asked": asked} if asked else {})}
        yield Record("event", state.epoch, state.step, state.samples, values)
        yield from train.caught_up(state, old)
        if job.keeper is not None:
            job.keeper.keep()

    def plan_of(self, facts: dict[str, Any]) -> Plan:
        return type(self.state.plan).from_dict(facts["plan"])


def highest(losses: Sequence[float]) -> float:
    """Return the loss above which training has diverged: FACTOR times the highest of the last WATCHED ones. A loss may
    be negative: what counts is the distance from the highest."""
    last = [loss for loss in losses if math.isfinite(loss)][-WATCHED:]
    return max(last) + max((FACTOR - 1) * max(map(abs, last)), NOISE * abs(losses[0])) if last else math.inf
