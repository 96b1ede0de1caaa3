"""fit: a whole training run in one call: the folder, start or resume, training under the guard, the receipt. Called
again, it resumes."""

from __future__ import annotations

import gc
import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import is_torchelastic_launched

from nbtools import disk, train
from nbtools.callbacks import Callback, TensorBoard, callbacks_of
from nbtools.data import Pack, meanwhile, on_colab, place_to_keep, release_runtime, say
from nbtools.errors import CheckpointError, PackError, ctrl_c
from nbtools.finish import diagnose, finish
from nbtools.folder import Job, begin, only_one, rebuild, restore
from nbtools.guard import Guard
from nbtools.identity import Call, called, former_run, meant, own_folder
from nbtools.live import REFUSED, FirstSignal, Panel, Surface, chosen, running_kernel
from nbtools.run import Run, what_next
from nbtools.train import Plan, Ranks, Task, TaskLike, TrainState, checkpoint
from nbtools.train import device as devices

NOTHING = {
    "best": "there is no best checkpoint yet; the first evaluation chooses one",
    "undo": "there is no change to undo among the last log steps; set the earlier value",
}


@contextmanager
def letting_go() -> Iterator[None]:
    """Leave no_grad and autocast after an error, and in a notebook no memory: IPython keeps a traceback until the next
    one, and with it the variables of its frames, such as a model."""
    try:
        yield
    except BaseException as error:
        devices.leave_modes()
        cause: BaseException | None = error if running_kernel() is not None else None
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        with suppress(RuntimeError):  # of a GPU that no longer answers: the first error counts
            release_memory()
        raise


def release_memory() -> None:
    gc.collect()
    devices.give_back(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))


@letting_go()
@train.naming()
def fit(
    task: TaskLike,
    pack: Pack,
    plan: Any = None,
    run: str | Path | None = None,
    keep: str | Path | None = None,
    receipt: bool = True,
    progress: bool = True,
    release_gpu: bool = False,
    samples: str | Sequence[int] | None = None,
    callbacks: Sequence[Callback] = (),
    log: str | None = None,
    fresh: bool = False,
) -> Run:
    """Train in this cell, drawing as it goes; return the Run. Stop and Ctrl-C finish the step, save, and return it, in
    a script by a KeyboardInterrupt; the same call then resumes.

    plan: a Plan, a Panel or an Advice, or a function that returns one, called once a lost folder is restored; None:
    the run's own, or what `advise` proposes. run: a folder on local disk; a run that is already there resumes from its
    last checkpoint, bit for bit (CPU), with the settings that code or a hand changed since; a finished one is returned,
    or extended by more epochs, and refuses anything else. None: the newest run below `runs/` with the same network,
    data and given settings, or that this Panel drove; else a new `runs/<task>-<n>`. fresh: start over in that folder.
    keep: a second folder, usually on Drive (`drive:…`), to which everything is copied in the background, and from which
    a lost local folder, or one that is behind, is restored. receipt: measure the task's baseline next to this run at
    the end, for a few seconds. release_gpu: at the end free the GPU's memory, and on Colab give the machine back, with
    everything on its disk. samples: which are shown with their predictions: "first" (as by default), "worst", or at
    most eight ids of the pack. callbacks: functions `f(record, run)`, called with each record that has values, on
    rank 0; one that returns "stop" stops the run after the step, and an error in one ends it. log: "tensorboard" writes
    event files into the folder. Raises TrainError, PlanError or CheckpointError; the checkpoints stay intact.
    """
    task, watchers = train.as_task(task), callbacks_of(callbacks, log)
    folder, kept = places(run, keep, release_gpu)
    require_pack(task, pack)
    ranks = train.join()
    if not ranks.first:
        return follower(task, pack, ranks)
    again = ranks.again or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0  # torchrun has restarted this run
    fresh = fresh and not again
    if folder is None:
        plan = called(plan)
        folder = own_folder(task, pack, plan, fresh)
    with only_one(folder):
        if not (again or isinstance(plan, Call)):  # that of `launch`, which has done so
            forget(folder)
        restore(folder, kept, fresh)
        rebuild(folder)
        plan = called(plan)
        call = meant(task, pack, plan, folder, fresh)
        unread, pack = train.unread(task, pack, call.plan), train.readable(task, pack, call.plan)
        samples = None if samples is None else chosen(samples, pack)
        state = make_state(task, pack, call.plan, folder, fresh, ranks)
        history, notes = begin(folder, pack, state, call, fresh)
        if isinstance(plan, Panel):
            plan.adopt(call.plan)
        if samples is not None:
            checkpoint.mark(folder, samples=samples)
        surface = Surface(folder, state, pack, history, plan, progress)
        surface.next_steps = lambda: what_next(Run.open(folder, task), state.over and not surface.requests.stop)
        job = Job(pack, folder, state, surface, None if kept is None else train.Keeper(folder, kept))
        introduce(job, [unread, *call.said, *notes], again)
        interrupted = carry_out(job, receipt, watchers)
        result = Run.open(folder, task)
        result.events = surface.events
    if release_gpu and not surface.requests.stop:
        kept_all = job.keeper is not None and job.keeper.done == job.keeper.requested
        del job, state, surface, history
        release_memory()
        if kept_all:
            release_runtime()
    if interrupted and running_kernel() is None and not is_torchelastic_launched():
        raise ctrl_c(result)
    return result


# -- before it trains


def places(run: str | Path | None, keep: str | Path | None, release_gpu: bool) -> tuple[Path | None, Path | None]:
    """Return (folder, kept folder). Raises CheckpointError if a run would be lost."""
    if run is None and keep is not None:
        rule = f"keep={str(keep)!r} needs run=, the local folder of the run that is kept there"
        raise CheckpointError(f"{rule}; name one, run='runs/…'")
    if str(run).startswith("drive:"):
        rule = f"run={str(run)!r}: a run is written to local disk"
        raise CheckpointError(f"{rule}, and copied to Drive by keep={str(run)!r}")
    if release_gpu and on_colab() and not str(keep).startswith("drive:"):
        rule = "release_gpu=True gives this Colab machine back at the end, with the run on its disk"
        raise CheckpointError(f"{rule}; name a folder on Drive: keep='drive:runs/…', got keep={str(keep)!r}")
    return run if run is None else Path(run), keep if keep is None else place_to_keep(keep)


def require_pack(task: Task, pack: Any) -> None:
    if not isinstance(pack, Pack):
        makes = f"{train.spoken(task)}.pack(source), or nb.pack(data)"
        raise PackError(f"pack must be a nb.Pack, got {type(pack).__name__}; make one with {makes}")


def forget(folder: Path) -> None:
    """Remove requests that were meant for an earlier run."""
    with disk.explained("starting a run", folder):
        disk.remove(folder / train.CONTROL)


def make_state(task: Task, pack: Pack, plan: Plan, folder: Path, fresh: bool, ranks: Ranks) -> TrainState:
    """Return a new state; a few samples go through it before a run folder exists."""
    train.require_sizes(pack, plan)
    if ranks.world > 1:
        ranks.broadcast((plan.to_dict(), str(folder)))
    state = devices.required(lambda: TrainState(task, pack, plan, ranks=ranks))
    if fresh or former_run(task, folder) is None:
        train.rehearse(state, pack)
    return state


def follower(task: Task, pack: Pack, ranks: Ranks) -> Run:
    """Train as rank 0 says, until it ends the run. Signals reach every rank, and rank 0 decides what becomes of them,
    so that all stop after the same step."""
    with FirstSignal(signal.SIGINT, lambda: None), FirstSignal(signal.SIGTERM, lambda: None):
        values, folder = ranks.broadcast()
        plan = type(task.PLAN).from_dict(values)
        pack = train.readable(task, pack, plan)
        state = devices.required(lambda: TrainState(task, pack, plan, ranks=ranks))
        train.obey(task, state, pack)
    return Run(Path(folder), task, pack.card, state.plan)


def introduce(job: Job, notes: Sequence[str], again: bool) -> None:
    """Say what a run begins with; in any case what it does otherwise than the call reads."""
    state, surface = job.state, job.surface
    for remark in getattr(job.pack, "remarks", ()):
        surface.report(remark)
    said = [*train.beyond(state.plan, surface.requests.advised).values(), *notes]
    if again:
        said.append(f"resumed from step {state.step:,}: a process was lost")
    elif state.over:
        more = "it is finished: the same call returns it; more epochs extend it, and fresh=True starts over"
        said.append(f"{Run.open(job.folder, job.task)}; {more}")
    for note in filter(None, said):
        surface.report(note)
        if not surface.progress and not is_torchelastic_launched():
            say(note)


# -- while it trains


def carry_out(job: Job, receipt: bool, callbacks: Sequence[Callback]) -> bool:
    """Train to the end, or to a stop, then measure what is left to the end, and say what to do next; return whether
    Ctrl-C ended any of it."""
    surface, alone = job.surface, not is_torchelastic_launched()  # torchrun starts again what dies of SIGTERM
    stop = partial(surface.requests.post, "stop", by="SIGTERM")
    with FirstSignal(signal.SIGTERM, stop, later=alone) as sigterm:
        try:
            with surface:
                follow(job, callbacks)
            job.state.ranks.end()
            sigterm.call = interrupt  # everything is saved
            with FirstSignal(signal.SIGINT, interrupt) as sigint:
                finish(job, receipt)
            sigterm.call = stop  # the last copy, which `close` waits for, is worth the seconds
            if surface.notebook:
                surface.tell(surface.next_steps())
        finally:
            job.close()
    return sigint.came or (surface.interrupts is not None and surface.interrupts.came)


def interrupt() -> None:
    raise KeyboardInterrupt


def follow(job: Job, callbacks: Sequence[Callback]) -> None:
    """Watch the loop: rows, picture, checkpoints, callbacks, and what is requested."""
    state, surface, run = job.state, job.surface, Run(job.folder, job.task, job.pack.card, job.state.applied)
    run.history, guard = job.history, Guard(job)
    surface.undoable = lambda: guard.anchor is not None
    with ExitStack() as stack:
        # Closed here and not with the traceback, which would keep the feed and its threads.
        records = stack.enter_context(closing(guard.records()))
        for log in callbacks:
            if isinstance(log, TensorBoard):
                stack.callback(log.close)
        for record in records:
            record = surface.measured(record)
            job.history.append(record)
            surface.update(record)
            job.write_plan()
            run.plan = state.applied
            for function in callbacks if record.values else ():
                if function(record, run) == "stop":
                    surface.requests.post("stop", by=f"the callback {getattr(function, '__name__', function)}")
            if record.kind != "change":  # a checkpoint amid a change would resume with its row, but without the change
                job.watch(record)
                if surface.listen() and act(job):
                    break
    job.write_plan()
    job.save()
    job.wait()


def act(job: Job) -> bool:
    """Do what is requested, and hold the run while it is paused; return whether it is to stop. The guard goes back."""
    state, surface, requests = job.state, job.surface, job.surface.requests
    while True:
        if requests.change and requests.take("undo"):
            requests.want(state.applied, sure=True)
            surface.answer("the last change was taken back before it was applied", "undo")
        for action in [each for each in NOTHING if each in requests.pending]:
            job.wait()  # it may be on its way to the disk
            if not surface.able(action) and requests.take(action):
                surface.answer(f"{REFUSED}{NOTHING[action]}", action)
        if requests.take("save"):
            lost = "not saved: the loss is no longer a number"
            worth = job.save()
            job.wait()
            surface.answer(f"saved at step {state.step}" if worth else lost, "save")
        if requests.stop or requests.paused:  # a paused notebook may lose its machine
            job.save()
        if requests.stop:
            surface.answer(f"stopped by {requests.stopper} after step {state.step}; run it again to continue", "stop")
            return True
        if requests.take("profile"):
            surface.measure()
            with meanwhile(partial(attend, surface)), state.watch.paused():
                diagnose(job, partial(surface.answer, asked="profile"))
        if requests.take("evaluate"):
            state.evaluate_next = surface.looking = not state.over
        if not requests.paused or surface.looking or requests.pending:
            return False
        with state.watch.paused():
            surface.hold()
            surface.listen()


def attend(surface: Surface) -> None:
    """Read clicks while something is measured. Raises KeyboardInterrupt where one asks for a stop."""
    surface.listen()
    if surface.requests.stop:
        interrupt()
