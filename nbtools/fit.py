"""fit: a whole training run in one call: the folder, start or resume, training under the guard, the receipt. Called
again, it resumes."""

from __future__ import annotations

import gc
import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch.distributed import is_torchelastic_launched

from nbtools import disk, measure
from nbtools.callbacks import Callback, Callbacks
from nbtools.data import Pack, meanwhile, on_colab, phase, place_to_keep, release_runtime, say, work
from nbtools.errors import CheckpointError, NbtoolsError, PackError, PlanError, StageError, ctrl_c
from nbtools.folder import Job, begin, only_one, require_replaceable, restore
from nbtools.guard import WATCHED, Guard
from nbtools.identity import Call, decide, former_run, new_folder, search
from nbtools.live import EVALUATING, MEASURING, REFUSED, FirstSignal, Panel, Surface, chosen, running_kernel
from nbtools.run import EVALUATION, RECEIPT, VERDICT, Run, what_next
from nbtools.table import number, plural
from nbtools.train import (
    CONTROL,
    Keeper,
    Plan,
    Ranks,
    Task,
    TaskLike,
    TrainState,
    as_task,
    beyond,
    checkpoint,
    evaluation,
    fixed,
    idle,
    join,
    naming,
    obey,
    readable,
    rehearse,
    require_sizes,
    spoken,
    unread,
)
from nbtools.train import device as devices

MEASURED = "measuring the receipt"
PHASES = {"first steps": 5.0, "turns": 9.0, "step": 9.0}  # seconds of it, as measured on two cores
NOTHING = {
    "best": "there is no best checkpoint yet; the first evaluation chooses one",
    "undo": f"there is no change to undo in the last {WATCHED} log steps; set the value of before",
}


@contextmanager
def letting_go() -> Iterator[None]:
    """Leave torch's modes as they were after an error, and in a notebook no memory: IPython keeps a traceback until the
    next one, and with it the variables of its frames, such as a model. Under `%pdb on` they stay, to be looked at."""
    modes = devices.modes()
    try:
        yield
    except BaseException as error:
        devices.restore_modes(modes)
        kernel, cause = running_kernel(), error
        if kernel is not None and not kernel.shell.call_pdb:
            while cause is not None:
                traceback.clear_frames(cause.__traceback__)
                cause = cause.__cause__ or cause.__context__
            gc.collect()
            with suppress(RuntimeError):  # of a GPU that no longer answers: the first error counts
                devices.give_back(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))
        raise


@letting_go()
@naming()
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
    """Train in this cell, drawing as it goes; return the Run.

    plan: a Plan, a Panel or an Advice, or a function that returns one, called once a lost folder is restored; None:
    the run's own, or what `advise` proposes. run: a folder on local disk; a run that is already there resumes from its
    last checkpoint, bit for bit (CPU), with the settings that code or a hand changed since; a finished one is returned,
    or extended by more epochs, and refuses anything else. None: the newest run below `runs/` with the same network,
    data and given settings, or that this Panel drove; else a new `runs/<task>-<n>`. fresh: start over in that folder.
    keep: a second folder, usually on Drive (`drive:…`), to which everything is copied in the background, and from which
    a lost local folder, or one that is behind, is restored. receipt: measure the task's baseline next to this run at
    the end, for a few seconds. release_gpu: at the end free the GPU's memory, and on Colab give the machine back, with
    everything on its disk. samples: which are shown with their predictions while it trains: "first" (as by default),
    "worst", or ids of the pack, at most eight; kept in the run's folder, as a choice made in the panel is.

    callbacks: functions `f(record, run)`, called with each record that has values, on rank 0; one that returns "stop"
    stops the run after the step, and an error in one ends it. log: "tensorboard" writes event files into the folder.

    While it trains, buttons and fields in the notebook act on it, and so does `control.json` in its folder (see
    `nbtools.live.send`). Stop, Ctrl-C or the notebook's own stop button finish the step, save, and return the run; so
    do a shutdown of the kernel and SIGTERM, after which the process ends. Outside of a notebook Ctrl-C raises
    KeyboardInterrupt once everything is saved, so that it ends a script's loop too. Raises TrainError, PlanError or
    CheckpointError; the checkpoints stay intact.
    """
    task, watchers = as_task(task), Callbacks(callbacks, log)
    folder, kept = places(run, keep, release_gpu)
    require_pack(task, pack)
    ranks = join()
    if ranks is not None and not ranks.first:
        return follower(task, pack, ranks)
    again = restarted(ranks)
    fresh = fresh and not again
    if folder is None:
        plan = called(plan)
        folder = own_folder(task, pack, plan, fresh)
    with only_one(folder, made=run is None) as own:
        if not (again or isinstance(plan, Given)):
            forget(folder)
        restore(folder, kept, fresh)
        plan = called(plan)
        job = prepare(task, pack, plan, folder, kept, fresh, ranks, samples, progress, receipt)
        job.surface.announce = own.note
        if again:
            job.surface.report(f"resumed from step {job.state.step:,}: a process was lost, which torchrun names")
        interrupted = carry_out(job, receipt, watchers)
        result = Run.open(folder, task)
        result.events, stopped = job.surface.events, job.surface.requests.stop
    if release_gpu and not stopped:
        safe = job.keeper is not None and job.keeper.done == job.keeper.requested
        del job
        result.events += release(safe)
    if interrupted and running_kernel() is None and not is_torchelastic_launched():
        raise ctrl_c(result)
    return result


# -- what a call means


@dataclass(frozen=True)
class Given:
    """What `launch` hands to its ranks as their plan, with the one that it was advised; requests to a former run are
    removed already, and `control.json` has those that came since."""

    plan: Plan
    advised: Plan | None
    panel: str | None = None


def called(plan: Any) -> Any:
    return plan() if callable(plan) and not isinstance(plan, type) else plan


def panel_of(plan: Any) -> str | None:
    """Return what identifies the Panel that drives a run; None for another plan."""
    return plan.id if isinstance(plan, Panel) else getattr(plan, "panel", None)


def places(run: str | Path | None, keep: str | Path | None, release_gpu: bool) -> tuple[Path | None, Path | None]:
    """Return (folder, kept folder). Raises CheckpointError if a run would be lost."""
    if run is None and keep is not None:
        raise CheckpointError(
            f"keep={str(keep)!r} needs run=, the local folder of the run that is kept there; name one, run='runs/…'"
        )
    if str(run).startswith("drive:"):
        raise CheckpointError(
            f"run={str(run)!r}: a run is written to local disk, and copied to Drive by keep={str(run)!r}"
        )
    stays = keep is not None and (str(keep).startswith("drive:") or disk.is_slow(Path(keep)))
    if release_gpu and on_colab() and not stays:
        raise CheckpointError(
            "release_gpu=True gives this Colab machine back at the end, with the run on its disk; "
            f"name a folder that outlives it: keep='drive:runs/…', got keep={str(keep)!r}",
            entry="Session lost",
        )
    if run is None:
        return None, None
    folder, kept = Path(run), None if keep is None else place_to_keep(keep)
    if kept is not None and kept.resolve() == folder.resolve():
        raise CheckpointError(
            f"run={str(run)!r} and keep={str(keep)!r} are one folder, in which the copies would replace the run; "
            "name a second folder with keep=, on Drive or another disk"
        )
    return folder, kept


def require_pack(task: Task, pack: Any) -> None:
    if not isinstance(pack, Pack):
        makes = "nb.pack(data)" if task.packs_datasets else f"{spoken(task)}.pack(source), or nb.pack(data)"
        raise PackError(f"pack must be a nb.Pack, got {type(pack).__name__}; make one with {makes}")


def own_folder(task: Task, pack: Pack, plan: Any, fresh: bool) -> Path:
    """Return the folder of a call without `run=`."""
    wanted = chosen_plan(task, pack, plan)
    there = None if fresh else search(task, pack, wanted, panel_of(plan))
    require_sizes(readable(task, pack, wanted), wanted)
    return there or new_folder(task, readable(task, pack, wanted).card, wanted)


def forget(folder: Path) -> None:
    """Remove requests that were meant for an earlier run."""
    with disk.explained("starting a run", folder):
        disk.remove(folder / CONTROL)


def meant(task: Task, pack: Pack, plan: Any, folder: Path, fresh: bool) -> Call:
    """Return the plan with which a call trains in a folder, and what is said of it."""
    if fresh:
        require_replaceable(folder)
    former = None if fresh else former_run(task, folder)
    if plan is None and former is not None:
        asked = chosen_plan(task, pack, None)
        recipe = {} if former.given.keys() & {"lr", "batch_size"} else asked.given()  # of the task, as it was before
        names = former.applied.to_dict().keys() - recipe.keys()
        return decide(former, former.applied.replace(**recipe).marked(names))
    return decide(former, chosen_plan(task, pack, plan, measured=former is None))


def chosen_plan(task: Task, pack: Pack, plan: Any, measured: bool = False) -> Plan:
    """Return the plan that a call gives; where it gives none, the advised one: measured, or by what is known so far."""
    if plan is None:
        plan = measure.advise(task, pack, measure=measured)
    plan, kind = getattr(plan, "plan", plan), type(task.PLAN)
    if not isinstance(plan, kind):
        raise PlanError(
            f"plan must be a {kind.__module__}.{kind.__qualname__} (or an Advice or a Panel of one), got "
            f"{type(plan).__qualname__}; use {spoken(task)}.PLAN, with .replace(...) for your changes"
        )
    return plan


# -- several processes


def restarted(ranks: Ranks | None) -> bool:
    """Return whether torchrun has started this run's processes before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0 or (ranks is not None and ranks.again)


def follower(task: Task, pack: Pack, ranks: Ranks) -> Run:
    """Train as rank 0 says, until it ends the run. Signals reach every rank, and rank 0 decides what becomes of them,
    so that all stop after the same step."""
    with FirstSignal(signal.SIGINT, lambda: None), FirstSignal(signal.SIGTERM, lambda: None):
        values, folder = ranks.tell()
        plan = type(task.PLAN).from_dict(values)
        pack = readable(task, pack, plan)
        obey(task, devices.required(lambda: TrainState(task, pack, plan, ranks=ranks)), pack)
    return Run(Path(folder), task, pack.card, plan)


# -- start or resume


def prepare(
    task: Task,
    pack: Pack,
    plan: Any,
    folder: Path,
    kept: Path | None,
    fresh: bool,
    ranks: Ranks | None,
    samples: str | Sequence[int] | None,
    progress: bool,
    receipt: bool,
) -> Job:
    """Start the run in a folder, or resume it, and say what it does otherwise than the call reads."""
    call = meant(task, pack, plan, folder, fresh)
    wanted, given = call.plan, call.plan if plan is None else chosen_plan(task, pack, plan)
    limits, pack = unread(task, pack, wanted), readable(task, pack, wanted)
    require_sizes(pack, wanted)
    if ranks is not None:
        ranks.tell((wanted.to_dict(), str(folder)))
    samples = None if samples is None else chosen(samples, pack)
    state = devices.required(lambda: TrainState(task, pack, wanted, ranks=ranks))
    if fresh or former_run(task, folder) is None:
        rehearse(state, pack)
    advised = getattr(plan, "advised", getattr(plan, "plan", None))  # a plain plan may come from anywhere
    history, complaints, changed = begin(folder, pack, state, given, advised, panel_of(plan), fresh)
    if isinstance(plan, Panel) and wanted != given:
        plan.adopt(wanted)
    if samples is not None:
        checkpoint.mark(folder, samples=samples)
    surface = Surface(folder, state, pack, history, plan, progress, afterwards(wanted, pack, folder, receipt))
    requests = surface.requests
    surface.next_steps = lambda: what_next(Run.open(folder, task), state.over and not requests.stop)
    surface.report_all([*complaints, *beyond(wanted, requests.advised).values()])
    for note in filter(None, [limits, idle(wanted) if ranks is None else ""]):
        surface.report(note)
    for note in filter(None, [*call.said, changed, ending(state) or finished(state, folder)]):
        surface.report(note)
        if not progress and not is_torchelastic_launched():
            say(note)  # what a run does otherwise than the call reads is said in any case
    return Job(pack, folder, state, surface, Keeper(folder, kept) if kept is not None else None)


def ending(state: TrainState) -> str:
    """Return the message about a plan with fewer epochs than have begun; "" for none."""
    epochs, present = state.plan.epochs, state.epoch + 1
    if state.position.segments and epochs < present:
        return f"epochs {epochs} is below the current epoch {present}: training ends after this epoch"
    if epochs < state.epoch:
        return f"epochs {epochs} is below the {state.epoch} epochs done: there is nothing left to train"
    return ""


def finished(state: TrainState, folder: Path) -> str:
    """Return the message about a run that had trained all its epochs before; "" for another."""
    again = "it is finished: the same call returns it; more epochs extend it, and fresh=True starts over"
    return f"{Run.open(folder, state.task)}; {again}" if state.over else ""


def afterwards(plan: Plan, pack: Pack, folder: Path, receipt: bool) -> str:
    """Return what follows training, and is not in the time left."""
    evaluated = evaluation.is_partial(plan, pack.splits["val"])
    measured = receipt and not (folder / RECEIPT).exists()
    return " + ".join(["final evaluation"] * evaluated + ["receipt"] * measured)


# -- train


def carry_out(job: Job, receipt: bool, callbacks: Callbacks) -> bool:
    """Train to the end, or to a stop, then measure what is left to the end, and say what to do next; return whether
    Ctrl-C ended any of it."""
    state, surface = job.state, job.surface
    stop, alone = partial(surface.requests.post, "stop", by="SIGTERM"), not is_torchelastic_launched()
    with FirstSignal(signal.SIGTERM, stop, later=alone) as sigterm:  # torchrun starts again what dies of it
        try:
            with surface:
                follow(job, callbacks)
            if state.ranks is not None:
                state.ranks.end()
            sigterm.call = interrupt  # everything is saved
            with FirstSignal(signal.SIGINT, interrupt) as sigint:
                finish(job, receipt)
            if surface.notebook:
                surface.tell(surface.next_steps())
        finally:
            job.close()
    return sigint.came or (surface.interrupts is not None and surface.interrupts.came)


def interrupt() -> None:
    raise KeyboardInterrupt


def follow(job: Job, callbacks: Callbacks) -> None:
    """Watch the loop: rows, picture, checkpoints, and what is requested."""
    state, surface, run = job.state, job.surface, Run(job.folder, job.task, job.pack.card, job.state.applied)
    run.history = job.history
    # Closed here and not with the traceback, which would keep the feed and its threads.
    with devices.asserts_explained(), closing(callbacks), closing(Guard(job).records()) as records:
        for record in records:
            record = surface.measured(record)
            if record.kind == "change" and (sentence := ending(state)):  # of settings, which are applied next
                surface.answer(sentence)
            job.history.append(record)
            surface.update(record)
            job.write_plan()
            callbacks.call(record, job, run)
            if record.kind != "change":  # a checkpoint amid a change would resume with its row, but without the change
                job.watch(record)
                if surface.listen() and act(job):
                    break
    job.write_plan()
    if not job.done:
        job.save()
    job.settle()


def act(job: Job) -> bool:
    """Do what is requested, and hold the run while it is paused; return whether it is to stop. The guard goes back."""
    state, surface, requests = job.state, job.surface, job.surface.requests
    while True:
        if state.plan != state.applied and requests.take("undo"):
            state.plan = state.applied
            surface.answer("the last change was taken back before it was applied", "undo")
        for action, why in NOTHING.items():
            if action in requests.pending:
                job.settle()  # it may be on its way to the disk
                if not surface.able(action):
                    requests.take(action)
                    surface.answer(f"{REFUSED}{why}", action)
        if requests.take("save"):
            lost = "not saved: the loss is no longer a number"
            surface.answer(f"saved at step {state.step}" if job.save() else lost, "save")
        if requests.stop or requests.paused:  # a paused notebook may lose its machine
            job.write_plan()
            if not job.done:
                job.save()
        if requests.stop:
            surface.answer(f"stopped by {requests.stopper} after step {state.step}; run it again to continue", "stop")
            return True
        if requests.take("profile"):
            surface.measure()
            with meanwhile(partial(attend, surface)), state.watch.paused():
                diagnose(job, partial(surface.answer, asked="profile"))
        if requests.take("evaluate"):
            if state.over:
                surface.answer("nothing new to evaluate: the last epoch ended with an evaluation", "evaluate")
            else:
                state.evaluate_next = surface.looking = True
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


# -- after training


def finish(job: Job, receipt: bool) -> None:
    """Report why the run stopped early; evaluate what training left to its end; measure the receipt."""
    state, surface, path = job.state, job.surface, job.folder / RECEIPT
    if state.stopped:
        surface.report(f"{state.stopped}; to continue, change the plan")
    if state.over and not surface.requests.stop and evaluation.is_partial(state.plan, job.pack.splits["val"]):
        evaluate_all(job)
    if not receipt or surface.requests.stop or path.exists():
        return
    if state.ranks is not None and (epochs := job.history.of("epoch")):
        world, rate = state.ranks.world, epochs[-1]["samples_per_s"]
        surface.report(f"the receipt measures one of {world} processes; together they trained {rate:,.0f} samples/s")
    if not surface.progress:
        surface.report(f"{MEASURED} …")
    surface.announce(MEASURING)
    with optional("no receipt", surface.report), work(MEASURED, surface.progress, **PHASES):
        plan = one_share(state)
        phase("first steps")
        disk.write_atomic(path, measure.receipt(job.task, job.pack, plan, state.device).to_json())
        known = Run.open(job.folder, job.task).stored(VERDICT)
        if not known or known["profile"]["plan"] != json.loads(plan.to_json()):  # of an earlier plan
            phase("step")
            diagnose(job, surface.report)


@contextmanager
def optional(missing: str, tell: Callable[[str], None], again: str = "run it again to get it") -> Iterator[None]:
    """Turn the failure of a measurement after the run is saved, such as out of memory, into a message."""
    try:
        yield
    except (NbtoolsError, OSError, RuntimeError) as error:
        tell(f"{missing}: {type(error).__name__}: {error}")
    except KeyboardInterrupt:
        tell(f"{missing}: interrupted; {again}")


def evaluate_all(job: Job) -> None:
    """Evaluate the best weights on the whole validation split, with all scales and other costly options."""
    run, tell, count = Run.open(job.folder, job.task), job.surface.report, job.pack.splits["val"]
    about = {"epoch": run.best_row.get("epoch"), "plan": json.loads(run.plan.to_json())}
    if not count or about.items() <= run.stored(EVALUATION).items():
        return
    start, shows = monotonic(), job.surface.progress
    if not shows:
        tell("evaluating the best weights on the whole validation split …")
    job.surface.announce(EVALUATING)
    with optional("no final evaluation", tell):
        values = evaluation.evaluate(job.task, run.model(job.state.device), job.pack, job.state.plan, "val", shows)
        about |= {"values": values, "seconds": monotonic() - start}
        disk.write_atomic(job.folder / EVALUATION, json.dumps(about, indent=1))
        shown = ", ".join(f"{name} {number(value)}" for name, value in values.items())
        tell(f"all {plural(count, 'validation sample')}, in {about['seconds']:.0f} s: {shown}")


def one_share(state: TrainState) -> Plan:
    """Return the plan of what one process does in a step: with several, its share of the batch."""
    plan, world = state.plan, state.ranks.world if state.ranks is not None else 1
    return plan if world == 1 else plan.replace(batch_size=max(plan.batch_size // world, 1))


def diagnose(job: Job, tell: Callable[[str], None]) -> None:
    """Measure what a step of this run consists of, on a separate model; report the verdict and save it."""
    state, surface, kept = job.state, job.surface, fixed(job.state.plan)
    kept = kept if state.ranks is None else {**kept, "batch_size": "the share of one process"}
    with optional("not measured", tell, "What limits it? measures again"):
        plan = one_share(state)
        profile = measure.step_profile(job.task, job.pack, plan, state.device, fixed=kept)
        verdict = measure.verdict(profile, plan, fixed=kept)
        found = {"profile": profile.to_dict(), "verdict": verdict.to_dict()}
        disk.write_atomic(job.folder / VERDICT, json.dumps(found))
        if surface.panel is not None:
            surface.panel.propose(verdict.sentence, verdict.change)
        tell(verdict.sentence)


def release(kept: bool) -> list[str]:
    """Free the memory of the GPU or the processor; on Colab give the machine back if the run is `kept` on another disk.
    Prints and returns why that was not possible: the run is complete either way."""
    gc.collect()
    devices.give_back(devices.pick())
    try:
        if kept:
            release_runtime()
    except StageError as error:
        say(str(error))
        return [str(error)]
    return []
