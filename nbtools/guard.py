"""The guard resumes training from an earlier checkpoint: from before a change that made it diverge, or that the user
undoes, with the plan of that time; from the best one, with the current plan; or from the last, checking each step."""

from collections.abc import Generator
from typing import Any

from nbtools import show, train
from nbtools.errors import CheckpointError
from nbtools.folder import Job, resume
from nbtools.live import REFUSED
from nbtools.train import Diverged, Plan, Record, checkpoint

WATCHED = 20  # log steps: those before a change say how high the loss may be; at least as many after it are watched
FACTOR, NOISE = 3.0, 0.1  # how high: of the highest of those before it; above that, of the run's first loss
RETRIES = 2  # returns to a checkpoint where training diverged without a change; the next time the run stops
NOTHING = {
    "best": "there is no best checkpoint yet; the first evaluation chooses one",
    "undo": "there is no change to undo in the last log steps; set the earlier value",
}


class Guard:
    """The loop of a run, with its ways back. anchor: the `name` of the checkpoint before the watched changes, with the
    `plan` and `best` of that time; in the index too, for a killed run. way: the requested way back, if available."""

    def __init__(self, job: Job):
        self.job, self.state, self.folder, self.retries, self.way = job, job.state, job.folder, 0, ""
        self.anchor: dict[str, Any] | None = checkpoint.mark(self.folder, ended=None).get("anchor")
        job.surface.undoable = lambda: self.anchor is not None

    def records(self) -> Generator[Record, None, None]:
        while why := (yield from self.stretch()):
            yield from self.back(why)

    def stretch(self) -> Generator[Record, None, Any]:
        """Train to the end and return None, or until the run has to go back and return why."""
        records = train.train(self.job.task, self.state, self.job.pack)
        try:
            for record in records:
                if record.kind == "change":  # which is applied when the loop goes on
                    self.watch()
                elif record.kind == "step" and "loss" in record.values and self.has_risen(record.values["loss"]):
                    return "risen"
                yield record
                if way := self.ask():
                    return way
        except Diverged as error:
            return error.with_traceback(None)  # whose frames hold the feed, on a GPU a second copy of the pack
        finally:
            records.close()

    def ask(self) -> str:
        """Return the requested way back; if it is not available, say so, without a paused run taking a step."""
        for action in filter(self.job.surface.requests.take, NOTHING):
            self.job.wait()  # the best checkpoint may be on its way to the disk
            if action == "undo" and self.state.plan != self.state.applied:
                self.state.plan = self.state.applied
                self.job.surface.answer("the last change was taken back before it was applied", action)
            elif not self.job.surface.able(action):
                self.job.surface.answer(f"{REFUSED}{NOTHING[action]}", action)
            else:
                try:
                    self.read(action)
                    self.way = action
                except CheckpointError as error:
                    self.job.surface.answer(f"{REFUSED}{error}", action)
        return self.way

    def read(self, why: Any) -> str:
        """Return the name of the checkpoint to go back to: the best, else the newest intact one before the watched
        changes. Raises CheckpointError where it is damaged, since going back deletes the later ones."""
        index, anchor = checkpoint.read_index(self.folder), self.anchor or {}
        if why == "best":
            return checkpoint.read(self.folder, index["best"]).name
        return checkpoint.newest(self.folder, anchor.get("name", index["last"])).name

    def watch(self) -> None:
        """Watch the change from the applied plan to the wanted one, unless an earlier one is still being watched."""
        if self.anchor is None or len(self.losses(self.anchor)[1]) >= WATCHED:
            self.job.save()
            self.job.wait()
            index = checkpoint.read_index(self.folder)
            anchor = {"name": index["last"], "plan": self.state.applied.to_dict(), "best": index.get("best")}
            self.anchor = checkpoint.mark(self.folder, anchor=anchor)["anchor"]

    def losses(self, anchor: dict[str, Any]) -> tuple[list[float], list[float]]:
        """Return the losses of log steps before the watched changes, and since."""
        rows = [row for row in self.job.history.of("step") if "loss" in row]
        last = checkpoint.place(anchor["name"])[1]
        return [row["loss"] for row in rows if row["step"] <= last], [row["loss"] for row in rows if row["step"] > last]

    def has_risen(self, loss: float) -> bool:
        """Return whether the loss of a log step is far above the last WATCHED ones before the watched changes."""
        if self.anchor is None:
            return False
        before, since = self.losses(self.anchor)
        changed = self.state.applied.changes_from(type(self.state.plan)(**self.anchor["plan"])).keys()
        if before and changed <= Plan().to_dict().keys():  # a task's own setting may weigh a term of the loss
            last = before[-WATCHED:]  # a loss may be negative
            if loss > max(last) + max((FACTOR - 1) * max(map(abs, last)), NOISE * abs(before[0])):
                return True
        if len(since) + 1 >= 2 * WATCHED:
            self.anchor = checkpoint.mark(self.folder, anchor=None).get("anchor")
        return False

    def back(self, why: Any) -> Generator[Record, None, None]:
        """Resume from the checkpoint that is meant, with the wanted plan; a row says so. why: `undo`, `best`, `risen`,
        or the error of a run that diverged."""
        job, state, anchor, self.way = self.job, self.state, self.anchor, ""
        job.wait()
        index = checkpoint.read_index(self.folder)
        name, best = self.read(why), index.get("best")
        if why == "best":
            what = "the best checkpoint: "
            if anchor and checkpoint.place(anchor["name"]) > checkpoint.place(name):
                self.anchor = None
        elif anchor is None:
            what = f"{self.reason(why, checkpoint.place(name)[1])}; now checking every step: "
        else:  # to before the watched changes; changes wanted since then are dropped
            state.plan = type(state.plan)(**anchor["plan"])
            self.anchor, best = None, anchor["best"]
            changes = train.list_changes(state.applied.changes_from(state.plan)) or "a change"
            what = f"{changes} undone; " if why == "undo" else f"Training diverged after {changes}, which was undone; "
        checkpoint.rewind(self.folder, name, anchor=self.anchor, best=best, returns=index.get("returns", 0) + 1)
        rows = resume(self.folder, state, job.history)[1]
        if isinstance(why, Diverged):
            state.careful_until = why.steps[1] + 1
        state.improved, job.place = False, (-1, -1)  # a checkpoint that follows here has the rows of this return
        state.events.clear()
        yield from rows
        event = {"what": f"{what}back at step {state.step:,}", "mark": f"back to step {state.step:,}"}
        yield state.record("event", {**event, "asked": why} if why in NOTHING else event)
        if job.keeper is not None:
            job.keeper.keep()

    def reason(self, trouble: Diverged, step: int) -> str:
        """Return why the run goes back to its last checkpoint. Raises Diverged if that would not help."""
        reason, setting, plan = trouble.args[0], trouble.setting, self.state.plan
        self.retries += 1
        if self.retries <= RETRIES and setting == "lr":
            return reason
        lower = show.shown(min(self.job.surface.requests.advised.lr, plan.lr / 10))
        fix = f"lower lr, in the panel or by plan.replace(lr={lower}), or set clip_norm or amp=off"
        if setting == "amp":
            fix = "set amp=off, or amp=bf16 on a GPU that has it, which needs no loss scaling"
        what = f"Training diverged at {setting} {show.shown(getattr(plan, setting))}: {reason}. To continue from step"
        raise Diverged(f"{what} {step:,}, {fix}, and run it again.", trouble.steps, setting)
