"""fit: the notebook's one call. Loop, history, live plot, checkpoints and receipt together; run again, it goes on."""

from __future__ import annotations

import gc
from contextlib import closing
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from nbtools import disk
from nbtools.data import Pack, on_colab, release_runtime
from nbtools.errors import CheckpointError, PackError, PlanError, StageError, TrainError
from nbtools.findings import Job, diagnose, finish
from nbtools.folder import begin, kept_folder, only_one, restore, stored_plan
from nbtools.live import Surface, Termination, control
from nbtools.measure import advise
from nbtools.rollback import Guard, resilient
from nbtools.run import PLAN, Run
from nbtools.train import Plan, Record, TaskLike, TrainState, as_task, beyond, checkpoint, require_sizes, task_name
from nbtools.train import device as devices

SAVE_EVERY = 60.0  # seconds between checkpoints inside an epoch: what a lost session may cost
SAVE_SHARE = 0.05  # of the time that checkpoints at the ends of quick epochs may take, the best ones aside


def fit(
    task: TaskLike,
    pack: Pack,
    plan: Any = None,
    run: str | Path = "runs/run",
    keep: str | Path | None = None,
    receipt: bool = True,
    progress: bool = True,
    release_gpu: bool = False,
) -> Run:
    """Train in this cell, drawing as it goes; returns the Run.

    plan: a Plan, a Panel or an Advice; None: the run's own, or what `advise` says. run: a folder on local disk; where
    it holds a run already, that run goes on from its last checkpoint, bit for bit (CPU). keep: a second folder, usually
    on Drive (`drive:…`), that gets a copy of everything in the background, and from which a lost local folder is
    restored. receipt: measure the task's baseline beside this run at the end, for a few seconds. release_gpu: at the
    end free the GPU's memory, and on Colab give the machine back, with what is on its disk, so that it costs no more.

    While it trains, buttons and fields in the notebook act on it, and so does `control.json` in its folder (see
    `nbtools.control`). Stop, Ctrl-C or the notebook's own stop button finish the step, save, and return the run; so do
    the shutdown of the kernel and SIGTERM, after which the process ends.
    Raises TrainError, PlanError or CheckpointError; the checkpoints stay whole.
    """
    task = as_task(task)
    folder, kept = places(run, keep, release_gpu)
    if not isinstance(pack, Pack):
        raise PackError(
            f"pack must be a nb.Pack, got {type(pack).__name__}; make one with {task_name(task)}.pack(source)"
        )
    with only_one(folder):
        with disk.explained("starting a run", folder):
            disk.remove(folder / control.FILE)  # meant for an earlier run
        restore(folder, kept)
        wanted = chosen_plan(task, pack, plan, folder)
        require_sizes(pack, wanted)
        state, reason = devices.within_memory(lambda: TrainState(task, pack, wanted))
        if state is None:
            raise TrainError(f"out of memory before the first step ({reason}); take a smaller network, or free memory")
        history, complaints = begin(folder, task, pack, state, advice_in(plan))
        job = Job(task, pack, folder, state, history)
        keeper = checkpoint.Keeper(folder, kept) if kept is not None else None
        surface = Surface(folder, state, pack, history, plan, progress)
        surface.tell_all([*complaints, *beyond(wanted, surface.advised).values(), *filter(None, [ending(state)])])
        with Termination(surface.wishes):
            try:
                with surface:
                    follow(job, keeper, surface)
                finish(job, surface, receipt and not surface.wishes.stop)
            finally:
                if keeper is not None:
                    keeper.keep()
                    keeper.close()
                    surface.tell_all(keeper.complaints)
        found = Run.open(folder, task)
        found.events = surface.told
    if release_gpu and not surface.wishes.stop:
        del job, state, surface, history
        found.events += release(keeper is not None and not keeper.behind)
    return found


def places(run: str | Path, keep: str | Path | None, release_gpu: bool) -> tuple[Path, Path | None]:
    """(folder, kept folder). Raises CheckpointError where a run would be lost."""
    if str(run).startswith("drive:"):
        raise CheckpointError(
            f"run={str(run)!r}: a run is written to local disk, and copied to Drive by keep={str(run)!r}"
        )
    stays = keep is not None and (str(keep).startswith("drive:") or disk.is_slow(Path(keep)))
    if release_gpu and on_colab() and not stays:
        raise CheckpointError(
            "release_gpu=True gives this Colab machine back at the end, and its disk with the run; "
            f"name a folder that stays: keep='drive:runs/…', got keep={str(keep)!r}"
        )
    return Path(run), kept_folder(keep)


def advice_in(plan: Any) -> Plan | None:
    """The advised plan in what was given as a plan; None for a plain plan, which may come from anywhere."""
    return getattr(plan, "advised", getattr(plan, "plan", None))


def chosen_plan(task: Any, pack: Pack, plan: Any, folder: Path) -> Plan:
    if plan is None:
        plan = stored_plan(task, folder) or advise(task, pack, measure=False)
    plan = getattr(plan, "plan", plan)
    if not isinstance(plan, type(task.PLAN)):
        kind = type(task.PLAN)
        raise PlanError(
            f"plan must be a {kind.__module__}.{kind.__qualname__} (or an Advice or a Panel of one), got "
            f"{type(plan).__qualname__}; take {task_name(task)}.PLAN and .replace(...) what you want to change"
        )
    return plan


def follow(job: Job, keeper: checkpoint.Keeper | None, surface: Surface) -> None:
    """The loop and its watchers: rows, picture, checkpoints, and what the person asks for."""
    saver = Saver(job, keeper, surface)
    guard = Guard(job, surface, surface.advised, saver.save)
    # Closed here and not with the traceback, which would keep the feed and its threads.
    with closing(resilient(job, guard)) as records:
        for record in records:
            record = surface.measured(record)
            job.history.append(record)
            surface.update(record)
            if record.kind == "change":
                continue  # it is about to be applied: what else is requested waits for the end of the next step
            if surface.listen() and heed(job, saver, guard, surface, record):
                return
            saver.watch(record)
    if not saver.done:
        saver.save()


def heed(job: Job, saver: Saver, guard: Guard, surface: Surface, record: Record) -> bool:
    """Grant what the person asked for, and hold the run while they pause it; True where they stop it."""
    state, wishes = job.state, surface.wishes
    best = record.kind == "epoch" and state.improved
    while True:
        if wishes.plan is not surface.heeded:
            turn(job, saver, guard, surface, best)
        if wishes.undo:
            undo(job, saver, guard, surface, best)
        if wishes.best and not surface.able("best"):
            wishes.best = False
            surface.answer(f"{control.REFUSED}there is no best checkpoint yet; an evaluation chooses it", asked="best")
        if asked := wishes.save:
            wishes.save = False
        if asked or wishes.stop or (wishes.paused and not saver.done):  # a paused notebook may lose its machine
            saved = saver.save(best and state.improved)
            if asked:
                said = f"saved at step {state.step}" if saved else "not saved: the loss is no longer a number"
                surface.answer(said, "save")
        if wishes.stop:
            surface.answer(f"stopped by {wishes.stopper} after step {state.step}; run it again to continue", "stop")
            return True
        if wishes.profile:
            wishes.profile = False
            diagnose(job, surface, partial(surface.answer, asked="profile"))
        if wishes.evaluate:
            wishes.evaluate = False
            if state.over:
                surface.answer("nothing new to evaluate: the last epoch ended with an evaluation", "evaluate")
            else:
                state.evaluate_next = surface.looking = True
        if not wishes.paused or surface.looking or wishes.best:
            return False
        surface.hold()
        surface.listen()


def turn(job: Job, saver: Saver, guard: Guard, surface: Surface, best: bool) -> None:
    """Apply the plan that was asked for, already checked, from the next step on, and write it down. best: whether
    the run as it is now is the best so far, in case it has to be saved."""
    surface.heeded = wanted = surface.wishes.plan
    if wanted is None or wanted == job.state.plan:
        return
    guard.change(wanted, lambda: saver.done or saver.save(best and job.state.improved))
    surface.undoable.append(job.state.plan)
    job.state.plan = wanted
    with disk.explained("writing the plan", job.folder):
        disk.write_atomic(job.folder / PLAN, wanted.to_json())
    if sentence := ending(job.state):
        surface.answer(sentence)


def undo(job: Job, saver: Saver, guard: Guard, surface: Surface, best: bool) -> None:
    """Take back the last change."""
    surface.wishes.undo = False
    if not surface.undoable:
        surface.answer(f"{control.REFUSED}there is no change to undo", asked="undo")
        return
    surface.request(surface.undoable.pop())
    turn(job, saver, guard, surface, best)
    surface.undoable.pop()  # an undo is not a change to undo
    surface.answer("the last change is undone", asked="undo")


def ending(state: TrainState) -> str:
    """What to say about a plan with fewer epochs than have begun."""
    epochs, present = state.plan.epochs, state.epoch + 1
    if state.segments and epochs < present:
        return f"epochs {epochs} is below the present epoch {present}: training ends after this epoch"
    if epochs < state.epoch:
        return f"epochs {epochs} is below the {state.epoch} epochs done: there is nothing left to train"
    return ""


class Saver:
    """Writes a checkpoint where losing the work since the last one would cost more than writing it."""

    def __init__(self, job: Job, keeper: checkpoint.Keeper | None, surface: Surface):
        self.job, self.keeper, self.surface = job, keeper, surface
        self.saved, self.cost = monotonic(), 0.0
        self.place = (job.state.epoch, job.state.step)

    @property
    def done(self) -> bool:
        """Whether nothing was trained since the last checkpoint."""
        return self.place == (self.job.state.epoch, self.job.state.step)

    def watch(self, record: Record) -> None:
        """At the end of an epoch when it is the best, or checkpoints stay cheap; inside one every minute."""
        since = monotonic() - self.saved
        if record.kind == "epoch" and (self.job.state.improved or since * SAVE_SHARE >= self.cost):
            self.save(best=self.job.state.improved)
        elif since > SAVE_EVERY:
            self.save()

    def save(self, best: bool = False) -> bool:
        """Whether there was something worth it: a lost loss is told at the next log step, and undone."""
        start, worth = monotonic(), not self.job.state.lost()
        if worth:
            checkpoint.save(self.job.folder, self.job.state, len(self.job.history), best)
            self.job.state.improved = False
            if not self.surface.wishes.stop:  # else the last picture comes next, and seconds count in a shutdown
                self.surface.keep_still()
            if self.keeper is not None:
                self.keeper.keep()
                self.surface.tell_all(self.keeper.complaints)
        self.place = (self.job.state.epoch, self.job.state.step)
        self.saved = monotonic()
        self.cost = self.saved - start
        return worth


def release(kept: bool) -> list[str]:
    """Free the memory of the GPU or the processor; on Colab give the machine back if the run is `kept` on another disk.
    Prints and returns why that was not possible: the run is complete either way."""
    gc.collect()
    devices.give_back(devices.pick())
    try:
        if kept:
            release_runtime()
    except StageError as error:
        print(error)
        return [str(error)]
    return []
