"""fit: a whole training run in one call: loop, history, live plot, checkpoints and receipt; called again, it
resumes."""

from __future__ import annotations

import gc
import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from time import monotonic
from typing import Any, ParamSpec, TypeVar

import torch
from torch.distributed import is_torchelastic_launched

from nbtools import disk, measure
from nbtools.data import Pack, meanwhile, on_colab, phase, place_to_keep, release_runtime, say, work
from nbtools.errors import CheckpointError, NbtoolsError, PackError, PlanError, StageError, ctrl_c
from nbtools.folder import Job, begin, only_one, require_replaceable, restore
from nbtools.identity import Call, decide, former_run, new_folder, search
from nbtools.live import EVALUATING, MEASURING, REFUSED, FirstSignal, Panel, Surface, chosen, running_kernel
from nbtools.rollback import Guard, resilient
from nbtools.run import EVALUATION, RECEIPT, VERDICT, Run, what_next
from nbtools.show import number, plural
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

P = ParamSpec("P")
T = TypeVar("T")
MEASURED = "measuring the receipt"
PHASES = {"first steps": 5.0, "turns": 9.0, "step": 9.0}  # seconds of it, as measured on two cores


def letting_go(act: Callable[P, T]) -> Callable[P, T]:
    """A function whose errors leave torch's modes as they were, and in a notebook no memory: IPython keeps a traceback
    until the next one, and with it what the variables of its frames refer to, such as a model and its batches. Under
    `%pdb on` they stay, to be looked at."""

    @wraps(act)
    def called(*given: P.args, **named: P.kwargs) -> T:
        modes = devices.modes()
        try:
            return act(*given, **named)
        except BaseException as error:
            devices.restore_modes(modes)
            kernel = running_kernel()
            if kernel is not None and not kernel.shell.call_pdb:
                let_go(error)
            raise

    return called


def let_go(error: BaseException | None) -> None:
    """Clear the variables of the frames that an error, and those that led to it, ended; free the memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
    with suppress(RuntimeError):  # of a GPU that no longer answers: the first error counts
        devices.give_back(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))


@letting_go
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
    fresh: bool = False,
) -> Run:
    """Train in this cell, drawing as it goes; returns the Run.

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

    While it trains, buttons and fields in the notebook act on it, and so does `control.json` in its folder (see
    `nbtools.live.send`). Stop, Ctrl-C or the notebook's own stop button finish the step, save, and return the run; so
    do a shutdown of the kernel and SIGTERM, after which the process ends. Outside of a notebook Ctrl-C raises
    KeyboardInterrupt once everything is saved, so that it ends a script's loop too. Raises TrainError, PlanError or
    CheckpointError; the checkpoints stay intact.
    """
    task = as_task(task)
    folder, kept = places(run, keep, release_gpu)
    require_pack(task, pack)
    ranks = join()
    if ranks is not None and not ranks.first:
        return follower(task, pack, ranks)
    again = restarted(ranks)
    if folder is None:
        plan = called(plan)
        folder = own_folder(task, pack, plan, fresh and not again)
    with emptied(folder, run), only_one(folder) as own:
        if not (again or isinstance(plan, Given)):
            forget(folder)
        fresh = fresh and not again
        restore(folder, kept, fresh)
        plan = called(plan)
        call = meant(task, pack, plan, folder, fresh)
        wanted, given = call.plan, call.plan if plan is None else chosen_plan(task, pack, plan)
        limits = unread(task, pack, wanted)
        pack = readable(task, pack, wanted)
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
        surface = Surface(folder, state, pack, history, plan, progress, afterwards(wanted, pack, folder, receipt))
        surface.announce = own.note
        if samples is not None:
            surface.previews.which = samples
            checkpoint.mark(folder, samples=samples)
        job = Job(pack, folder, state, surface, Keeper(folder, kept) if kept is not None else None)
        requests = surface.requests
        surface.next_steps = lambda: what_next(Run.open(folder, task), state.over and not requests.stop)
        doubtful = beyond(wanted, requests.advised).values()
        lost = f"resumed from step {state.step:,}: a process was lost, which torchrun names" if again else ""
        surface.report_all([*complaints, *doubtful, *filter(None, [limits, idle(wanted) if ranks is None else ""])])
        for note in filter(None, [*call.said, changed, ending(state) or finished(job), lost]):
            surface.report(note)
            if not progress and not is_torchelastic_launched():
                say(note)  # what a run does otherwise than the call reads is said in any case
        interrupted = carry_out(job, receipt)
        found = Run.open(folder, task)
        found.events = surface.events
    if release_gpu and not requests.stop:
        safe = job.keeper is not None and job.keeper.done == job.keeper.requested
        del job, state, surface, history, requests
        found.events += release(safe)
    if interrupted and running_kernel() is None and not is_torchelastic_launched():
        raise ctrl_c(found)
    return found


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


def own_folder(task: Task, pack: Pack, plan: Any, fresh: bool) -> Path:
    """Return the folder of a call without `run=`."""
    wanted = chosen_plan(task, pack, plan)
    there = None if fresh else search(task, pack, wanted, panel_of(plan))
    require_sizes(readable(task, pack, wanted), wanted)
    return there or new_folder(task, readable(task, pack, wanted).card, wanted)


@contextmanager
def emptied(folder: Path, run: Any) -> Iterator[None]:
    """Remove the folder that a call without `run=` made, where it fails before a run is in it."""
    try:
        yield
    except BaseException:
        if run is None:
            with suppress(OSError):
                folder.rmdir()
        raise


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


def require_pack(task: Task, pack: Any) -> None:
    if not isinstance(pack, Pack):
        makes = "nb.pack(data)" if task.packs_datasets else f"{spoken(task)}.pack(source), or nb.pack(data)"
        raise PackError(f"pack must be a nb.Pack, got {type(pack).__name__}; make one with {makes}")


def forget(folder: Path) -> None:
    """Remove requests that were meant for an earlier run."""
    with disk.explained("starting a run", folder):
        disk.remove(folder / CONTROL)


def restarted(ranks: Ranks | None) -> bool:
    """Whether torchrun has started this run's processes before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0 or (ranks is not None and ranks.again)


def follower(task: Task, pack: Pack, ranks: Ranks) -> Run:
    """What a rank other than 0 does: train as rank 0 says, until it ends the run. Signals reach every rank, and rank 0
    decides what becomes of them, so that all stop after the same step."""
    with FirstSignal(signal.SIGINT, lambda: None), FirstSignal(signal.SIGTERM, lambda: None):
        values, folder = ranks.tell()
        plan = type(task.PLAN).from_dict(values)
        pack = readable(task, pack, plan)
        state = devices.required(lambda: TrainState(task, pack, plan, ranks=ranks))
        obey(task, state, pack)
    return Run(Path(folder), task, pack.card, state.plan)


def places(run: str | Path | None, keep: str | Path | None, release_gpu: bool) -> tuple[Path | None, Path | None]:
    """(folder, kept folder). Raises CheckpointError if a run would be lost."""
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


def carry_out(job: Job, receipt: bool) -> bool:
    """Train to the end, or to a stop, then measure what is left to the end, and say what to do next; returns whether
    Ctrl-C ended any of it."""
    state, surface = job.state, job.surface
    asked, alone = partial(surface.requests.post, "stop", by="SIGTERM"), not is_torchelastic_launched()
    with FirstSignal(signal.SIGTERM, asked, later=alone) as sigterm:  # torchrun starts again what dies of it
        try:
            with surface:
                follow(job)
            if state.ranks is not None:
                state.ranks.end()
            with FirstSignal(signal.SIGINT, lambda: None) as sigint, sigint.interrupting():
                finish(job, sigterm, receipt)
            if surface.notebook:
                surface.tell(surface.next_steps())
        finally:
            job.close()
    return sigint.came or (surface.interrupts is not None and surface.interrupts.came)


def follow(job: Job) -> None:
    """The loop and its watchers: rows, picture, checkpoints, and what is requested."""
    surface, guard = job.surface, Guard(job)
    # Closed here and not with the traceback, which would keep the feed and its threads.
    with devices.asserts_explained(), closing(resilient(guard)) as records:
        for record in records:
            record = surface.measured(record)
            if record.kind == "change":  # of settings, which are applied next
                guard.watch(job.state.applied)
                job.note_request()  # a process that is lost in the first step with it
                if sentence := ending(job.state):
                    surface.answer(sentence)
            job.history.append(record)
            surface.update(record)
            job.write_plan()
            if record.kind != "change":  # a checkpoint amid a change would resume with its row, but without the change
                job.watch(record)
                if surface.listen() and act(job):
                    break
    job.write_plan()
    if not job.done:
        job.save()
    job.settle()


def act(job: Job) -> bool:
    """Do what is requested, and hold the run while it is paused; True where it is to stop."""
    state, surface, requests = job.state, job.surface, job.surface.requests
    while True:
        if requests.take("undo"):
            surface.undo()
        if "best" in requests.pending:
            job.settle()  # it may be on its way to the disk
            if not surface.able("best"):
                requests.take("best")
                surface.answer(f"{REFUSED}there is no best checkpoint yet; the first evaluation chooses one", "best")
        if requests.take("save"):
            lost = "not saved: the loss is no longer a number"
            surface.answer(f"saved at step {state.step}" if job.save() else lost, "save")
        if requests.stop or requests.paused:  # a paused notebook may lose its machine
            job.note_request()
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
        if not requests.paused or surface.looking or "best" in requests.pending:
            return False
        with state.watch.paused():
            surface.hold()
            surface.listen()


def attend(surface: Surface) -> None:
    """Read clicks while something is measured. Raises KeyboardInterrupt where one asks for a stop."""
    surface.listen()
    if surface.requests.stop:
        raise KeyboardInterrupt


def ending(state: TrainState) -> str:
    """The message about a plan with fewer epochs than have begun."""
    epochs, present = state.plan.epochs, state.epoch + 1
    if state.position.segments and epochs < present:
        return f"epochs {epochs} is below the current epoch {present}: training ends after this epoch"
    if epochs < state.epoch:
        return f"epochs {epochs} is below the {state.epoch} epochs done: there is nothing left to train"
    return ""


def finished(job: Job) -> str:
    """The message about a run that had trained all its epochs before."""
    if not job.state.over:
        return ""
    done = f"{Run.open(job.folder, job.task)}; it is finished"
    return f"{done}: the same call returns it; more epochs extend it, and fresh=True starts over"


def afterwards(plan: Plan, pack: Pack, folder: Path, receipt: bool) -> str:
    """What follows training, and is not in the time left."""
    evaluated = evaluation.is_partial(plan, pack.splits["val"])
    measured = receipt and not (folder / RECEIPT).exists()
    return " + ".join(["final evaluation"] * evaluated + ["receipt"] * measured)


def finish(job: Job, sigterm: FirstSignal, receipt: bool) -> None:
    """Report why the run stopped early; the evaluation that training left to its end, and the receipt. SIGTERM, which
    also follows a kernel's shutdown, ends either, as everything is saved."""
    state, surface, path = job.state, job.surface, job.folder / RECEIPT
    if state.stopped:
        surface.report(f"{state.stopped}; to continue, change the plan")
    if state.over and not surface.requests.stop and evaluation.is_partial(state.plan, job.pack.splits["val"]):
        evaluate_all(job, sigterm)
    if not receipt or surface.requests.stop or path.exists():
        return
    if state.ranks is not None and (epochs := job.history.of("epoch")):
        world, rate = state.ranks.world, epochs[-1]["samples_per_s"]
        surface.report(f"the receipt measures one of {world} processes; together they trained {rate:,.0f} samples/s")
    if not surface.progress:
        surface.report(f"{MEASURED} …")
    surface.announce(MEASURING)
    with optional("no receipt", surface.report), sigterm.interrupting(), work(MEASURED, surface.progress, **PHASES):
        plan = one_share(state)
        phase("first steps")
        found = measure.receipt(job.task, job.pack, plan, state.device)
        disk.write_atomic(path, found.to_json())
        known = Run.open(job.folder, job.task).stored(VERDICT)
        if not known or known["profile"]["plan"] != json.loads(plan.to_json()):  # of an earlier plan
            phase("step")
            diagnose(job, surface.report)


@contextmanager
def optional(missing: str, tell: Callable[[str], None], again: str = "run it again to get it") -> Iterator[None]:
    """For measurements after the run is saved: a failure, such as out of memory, becomes a message."""
    try:
        yield
    except (NbtoolsError, OSError, RuntimeError) as error:
        tell(f"{missing}: {type(error).__name__}: {error}")
    except KeyboardInterrupt:
        tell(f"{missing}: interrupted; {again}")


def evaluate_all(job: Job, sigterm: FirstSignal) -> None:
    """Evaluate the best weights on the whole validation split, with all scales and other costly options, and keep the
    result."""
    run, tell, count = Run.open(job.folder, job.task), job.surface.report, job.pack.splits["val"]
    asked = {"epoch": run.best_row.get("epoch"), "plan": json.loads(run.plan.to_json())}
    if not count or asked.items() <= run.stored(EVALUATION).items():
        return
    start, shows = monotonic(), job.surface.progress
    if not shows:
        tell("evaluating the best weights on the whole validation split …")
    job.surface.announce(EVALUATING)
    with optional("no final evaluation", tell), sigterm.interrupting():
        model, plan = run.model(job.state.device), job.state.plan
        values = evaluation.evaluate(job.task, model, job.pack, plan, "val", shows)
        seconds = monotonic() - start
        disk.write_atomic(
            job.folder / EVALUATION, json.dumps({**asked, "values": values, "seconds": seconds}, indent=1)
        )
        shown = ", ".join(f"{name} {number(value)}" for name, value in values.items())
        tell(f"all {plural(count, 'validation sample')}, in {seconds:.0f} s: {shown}")


def one_share(state: TrainState) -> Plan:
    """The plan of what one process does in a step: with several, its share of the batch."""
    plan, world = state.plan, state.ranks.world if state.ranks is not None else 1
    return plan if world == 1 else plan.replace(batch_size=max(plan.batch_size // world, 1))


def diagnose(job: Job, tell: Callable[[str], None]) -> None:
    """Measure what a step of this run consists of, on a separate model; report the verdict and save it."""
    state, surface, kept = job.state, job.surface, fixed(job.state.plan)
    kept = kept if state.ranks is None else {**kept, "batch_size": "the share of one process"}
    with optional("not measured", tell, "What limits it? measures again"):
        plan = one_share(state)
        profile = measure.step_profile(job.task, job.pack, plan, state.device, fixed=kept)
        found = measure.verdict(profile, plan, fixed=kept)
        disk.write_atomic(job.folder / VERDICT, json.dumps({"profile": profile.to_dict(), "verdict": found.to_dict()}))
        if surface.panel is not None:
            surface.panel.propose(found.sentence, found.change)
        tell(found.sentence)


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
