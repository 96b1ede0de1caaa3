"""The guard: training resumes from an earlier checkpoint: from before a change that makes it diverge, or that the user
undoes, with the plan of then; from the best one, with the plan of now; or from the last one, each step checked."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Generator
from typing import Any

from nbtools import train
from nbtools.folder import Job, resume
from nbtools.live import REFUSED
from nbtools.show import header, number
from nbtools.train import Diverged, Plan, Record, checkpoint

WATCHED = 20  # log steps: those before a change say how high the loss may be; at least as many after it are watched
FACTOR = 3.0  # times the highest of those before it
NOISE = 0.1  # of the run's first loss: where everything is learned, noise alone is many times the highest loss
RETRIES = 2  # returns to a checkpoint where training diverged without a change; the next time the run stops
NOTHING = {
    "best": "there is no best checkpoint yet; the first evaluation chooses one",
    "undo": "there is no change to undo among the last log steps; set the earlier value",
}


class Guard:
    """The loop of a run, with its ways back. anchor: the `name` of the checkpoint from before the changes that are
    watched, the `plan` and the `best` checkpoint of then; in the index too, so that a killed run stays on watch."""

    def __init__(self, job: Job):
        self.job, self.state, self.folder, self.retries, self.careful_until = job, job.state, job.folder, 0, 0
        index = checkpoint.read_index(self.folder)
        self.anchor: dict[str, Any] | None = index.get("anchor")
        if index.get("ended") != "diverged":  # else the settings of that time are not worth going back to
            self.watch(self.plan_of(checkpoint.facts_of(self.folder, index["last"])), index["last"])
        checkpoint.mark(self.folder, ended=None)
        job.surface.undoable = lambda: self.anchor is not None

    def records(self) -> Generator[Record, None, None]:
        """Yield the records of the loop, through every return to a checkpoint."""
        while why := (yield from self.stretch()):
            self.job.wait()
            yield from self.back(why)

    def stretch(self) -> Generator[Record, None, Any]:
        """Train to the end, and return None, or until the run is to go back, and return why."""
        records = train.train(self.job.task, self.state, self.job.pack)
        try:
            for record in records:
                if record.kind == "change":  # which is applied when the loop goes on
                    self.watch(self.state.applied)
                elif self.risen(record):
                    return "risen"
                yield record
                for action in NOTHING:
                    if self.job.surface.requests.take(action) and self.able(action):
                        return action
        except Diverged as error:
            return error.with_traceback(None)  # whose frames hold the feed, on a GPU a second copy of the pack
        finally:
            records.close()

    def able(self, action: str) -> bool:
        """Return whether the run can go back. A change that is not applied yet is taken back instead."""
        surface = self.job.surface
        self.job.wait()  # the best checkpoint may be on its way to the disk
        if action == "undo" and surface.requests.change:
            surface.requests.want(self.state.applied, sure=True)
            surface.answer("the last change was taken back before it was applied", "undo")
        elif surface.able(action):
            return True
        else:
            surface.answer(f"{REFUSED}{NOTHING[action]}", action)
        return False

    def watch(self, old: Plan, name: str = "") -> None:
        """Watch the change from a plan to the wanted one. name: of a checkpoint from before it; "": of now."""
        if self.state.plan != old and (self.anchor is None or len(self.losses()[1]) >= WATCHED):
            if not name:
                self.job.save()
            self.job.wait()
            index = checkpoint.read_index(self.folder)
            self.anchor = {"name": name or index["last"], "plan": old.to_dict(), "best": index.get("best")}
            checkpoint.mark(self.folder, anchor=self.anchor)

    def losses(self) -> tuple[list[float], list[float]]:
        """Return the losses of log steps before the watched changes, and since."""
        steps, losses = self.job.history.series("loss", "step")
        count = bisect_right(steps, checkpoint.place(self.anchor["name"])[1]) if self.anchor else len(steps)
        return losses[:count], losses[count:]

    def risen(self, record: Record) -> bool:
        """Return whether a log step's loss is far above the last WATCHED ones before the watched changes."""
        if self.anchor is None or record.kind != "step" or "loss" not in record.values:
            return False
        before, since = self.losses()
        last = [loss for loss in before if math.isfinite(loss)][-WATCHED:]
        changed = self.state.applied.changes_from(self.plan_of(self.anchor)).keys()
        if last and changed <= Plan().to_dict().keys():  # a task's own setting may weigh a term of the loss
            room = max((FACTOR - 1) * max(map(abs, last)), NOISE * abs(before[0]))  # a loss may be negative
            if record.values["loss"] > max(last) + room:
                return True
        if len(since) + 1 >= 2 * WATCHED:
            self.anchor = None
            checkpoint.mark(self.folder, anchor=None)
        return False

    def back(self, why: Any) -> Generator[Record, None, None]:
        """Resume from the checkpoint that is meant, with the wanted plan; a row says so."""
        job, state, anchor, index = self.job, self.state, self.anchor, checkpoint.read_index(self.folder)
        name, best, what, after = index["last"], index.get("best"), "", ""
        if why == "best":
            name = index["best"]
            value = f"{header(train.best_metric(job.task)[0])} {number(state.best.value or 0.0)}"
            after = f", the best checkpoint: {value} after epoch {checkpoint.place(name)[0]}"
            if anchor and checkpoint.place(anchor["name"]) > checkpoint.place(name):
                self.anchor = None
        elif anchor is None:
            what, after = self.reason(why, checkpoint.place(name)[1]), ", checking each step from there"
        else:  # to before the watched changes; what was wanted since is void
            self.anchor, state.plan, name, best = None, self.plan_of(anchor), anchor["name"], anchor["best"]
            changes = train.listed(state.applied.changes_from(state.plan)) or "a change"
            undone = f"{changes} undone; "
            what = undone if why == "undo" else f"Training diverged after {changes}, which was undone; "
        checkpoint.rewind(self.folder, name, anchor=self.anchor, best=best)
        saved, changes = resume(self.folder, state, job.history)
        state.improved, state.recovery.careful_until = False, max(state.recovery.careful_until, self.careful_until)
        state.events.clear()
        job.place = state.epoch, state.step
        self.watch(self.plan_of(saved.facts), saved.name)
        asked = {"asked": why} if why in NOTHING else {}
        mark = {"best": "", "undo": "undone, "}.get(why, "diverged, ")
        mark = f"{mark}back to step {state.step:,}"
        yield state.record("event", {"what": f"{what}back at step {state.step:,}{after}", "mark": mark, **asked})
        yield from changes
        if job.keeper is not None:
            job.keeper.keep()

    def reason(self, trouble: Diverged, step: int) -> str:
        """Return why the run goes back to its last checkpoint. Raises Diverged if that would not help."""
        reason, setting, plan = trouble.args[0], trouble.setting, self.state.plan
        self.retries, self.careful_until = self.retries + 1, trouble.steps[1] + 1
        if self.retries <= RETRIES and setting == "lr":
            return f"{reason}; "
        lower = train.shown(min(self.job.surface.requests.advised.lr, plan.lr / 10))
        fix = f"lower lr, in the panel or by plan.replace(lr={lower}), set clip_norm or amp=off"
        if setting == "amp":
            fix = "set amp=off, or amp=bf16 on a GPU that has it, which needs no scale"
        what = f"Training diverged at {setting} {train.shown(getattr(plan, setting))}: {reason}. To continue from step"
        raise Diverged(f"{what} {step:,}, {fix}, and run it again.", trouble.steps, setting)

    def plan_of(self, facts: dict[str, Any]) -> Plan:
        return type(self.state.plan).from_dict(facts["plan"])
