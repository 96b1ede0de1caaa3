"""fit: one training run from the user's call to its receipt. The same call again resumes it."""

import json
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from torch.distributed import is_torchelastic_launched

from nbtools import disk, measure, train
from nbtools.data import Pack, meanwhile, place_to_keep, release_runtime, say, work
from nbtools.errors import CheckpointError, MissingExtra, PackError, PlanError, TrainError
from nbtools.folder import Job, begin, decide, former_run, identity, own_folder, restore
from nbtools.guard import Guard
from nbtools.live import MEASURING, FirstSignal, Surface, choose_ids, running_kernel
from nbtools.run import RECEIPT, VERDICT, Run, busy, lock, what_next
from nbtools.train import Plan, Ranks, Record, Task, TaskLike, TrainState, checkpoint
from nbtools.train import device as devices

COLD_STEPS = 10  # after which a start is over
Callback = Callable[[Record, Run], Any]


@contextmanager
def letting_go() -> Iterator[None]:
    """Give back memory after an error, also what the frames of a notebook's last one keep."""
    try:
        yield
    except BaseException as error:
        cause: BaseException | None = error if running_kernel() is not None else None
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        with suppress(RuntimeError):  # of a GPU that no longer answers: the first error counts
            devices.give_back()
        raise


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
    samples: Sequence[int] | None = None,
    callbacks: Sequence[Callback] = (),
    log: str | None = None,
    fresh: bool = False,
    **settings: Any,
) -> Run:
    """Train in this cell, drawing as it goes; return the Run. Stop and Ctrl-C finish the step, save, and return it; in
    a script, Ctrl-C raises KeyboardInterrupt(run). The same call then resumes, bit for bit on a CPU.

    plan: a Plan, Panel or Advice; None: the run's own, else the advised one. run: its folder; None: that of the run
    under `runs/` that matches this call, else a new one. keep: a second folder for copies, usually `drive:…`. receipt:
    measure it against the baseline at the end. release_gpu: then free the GPU, and with keep="drive:…" Colab's machine.
    samples: up to eight ids to show. callbacks: f(record, run); "stop" stops the run. log: "tensorboard". fresh: start
    over. Raises TrainError, PlanError, CheckpointError; the checkpoints stay intact.
    """
    begun, task, watchers = monotonic(), train.as_task(task), watchers_of(callbacks, log)
    ranks = train.join()
    if not ranks.first:
        return follower(task, pack, ranks)
    folder, kept = opening(task, pack, plan, run, keep, fresh := fresh and not ranks.again, **settings)
    with lock(folder):
        there = folder.is_dir() and any(folder.iterdir())
        try:
            if kept is not None:
                restore(folder, kept, fresh, progress)
            job = prepare(task, pack, plan, folder, kept, fresh, ranks, progress, samples)
            release_gpu = release_gpu and not job.state.over  # else nothing is trained
        except BaseException:  # an interrupt amid the advice, too
            with suppress(OSError):  # of a disk that failed
                if not there and folder.is_dir() and not folder.is_symlink():  # made or copied for this call
                    disk.remove(folder)
            raise
        interrupted = carry_out(job, receipt, watchers, begun)
        result, keeper, stopped = Run.open(folder, task), job.keeper, job.surface.requests.stop
        result.events = job.surface.events
        del job
    if release_gpu or running_kernel() is not None:
        devices.give_back()  # what of the run only cycles keep; a script's next run does
    if release_gpu and keeper and keeper.trouble is None and not stopped and str(keep).startswith("drive:"):
        release_runtime()
    if interrupted and running_kernel() is None and not is_torchelastic_launched():
        raise KeyboardInterrupt(result)  # once everything is saved; it ends a script's loop over runs, too
    return result


def opening(task: Any, pack: Any, plan: Any, run: Any, keep: Any, fresh: bool, **settings: Any) -> tuple[Path, Any]:
    """Return the folder of a call's run, without earlier requests, and where it is kept. Raises an NbtoolsError."""
    if settings:
        train.as_task(task).PLAN.replace(**settings)  # what is none either, is refused as such
        given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        plan = f"{train.title_of(train.as_task(task))}.PLAN.replace({given})"
        raise PlanError(f"no argument is called {', '.join(settings)}; settings go into plan={plan}")
    if not isinstance(pack, Pack):
        makes = f"{train.title_of(task)}.pack(source), or nb.pack(data)"
        raise PackError(f"pack must be an nb.Pack, got {type(pack).__name__}; make one with {makes}")
    if run is None and keep is not None:
        raise CheckpointError(f"keep={str(keep)!r} needs run=, the local folder of the run; name one, run='runs/…'")
    drives = [point for point, kind in disk.mounts().items() if kind == "fuse.drive"]
    if str(run).startswith("drive:") or any(map(Path(run or "/").expanduser().resolve().is_relative_to, drives)):
        raise CheckpointError(f"run={str(run)!r}: a run folder must be local; keep={str(run)!r} copies it to Drive")
    kept = None if keep is None else place_to_keep(keep)
    folder = own_folder(task, pack, plan, fresh) if run is None else Path(run).expanduser()
    if not is_torchelastic_launched() and not busy(folder):  # else `launch` has done this, or the call is refused
        with disk.explained("starting a run", folder):
            disk.remove(folder / train.CONTROL)  # which was meant for an earlier run
    return folder, kept


def follower(task: Task, pack: Pack, ranks: Ranks) -> Run:
    """Train as rank 0 says, until it ends the run. Rank 0 also decides what becomes of a signal, which reaches all."""
    with FirstSignal(signal.SIGINT, lambda: None), FirstSignal(signal.SIGTERM, lambda: None):
        values, folder = ranks.broadcast()
        plan = type(task.PLAN)(**values)
        pack = task.part(pack, plan)
        state = devices.run_or_explain(lambda: TrainState(task, pack, plan, ranks=ranks))
        train.obey(task, state, pack)
    return Run(Path(folder), task, pack.card, state.plan)


def prepare(
    task: Task, pack: Pack, call: Any, folder: Path, kept: Any, fresh: bool, ranks: Ranks, progress: bool, samples: Any
) -> Job:
    """Return the run of a folder, ready to train. call: what the user gave as the plan."""
    former = None if fresh else former_run(task, folder)
    with nullcontext() if progress else work("", False):  # the advice has a bar of its own
        call = measure.advise(task, pack) if call is None and former is None else call
        plan, given, messages = decide(task, pack, call, former)
        if ranks.world > 1 and not (former and former.over) and "graph" not in plan.given():
            plan = plan.replace(graph=False)  # an advice's own, which replays one process
    whole, pack = pack, task.part(pack, plan)
    counts = [f"{pack.splits[split]:,} of {count:,} {split}" for split, count in whole.splits.items() if count]
    unread = f"this network reads {', '.join(counts)} samples" if pack.splits != whole.splits else ""
    samples = None if samples is None else choose_ids(samples, pack)
    train.require_sizes(pack, plan)
    if former is None or not former.over or plan.epochs > former.plan.epochs:  # else it opens on any device
        devices.require(plan, devices.pick(), ranks.world)
    ranks.broadcast((plan.to_dict(), str(folder)))
    state = devices.run_or_explain(lambda: TrainState(task, pack, plan, ranks=ranks))
    now = identity(state.task, pack.card, state.model, plan)  # before a forward pass, which may count its calls
    if former is None:
        train.rehearse(state, pack)  # before anything is written
    history, complaints = begin(folder, pack, state, former, given, call, now)
    if samples is not None:
        checkpoint.mark(folder, samples=samples)
    surface = Surface(folder, state, pack, history, call, progress)
    if ranks.again:
        messages.append(f"resumed from step {state.step:,}: a process was lost")
    elif state.over:
        more = "it is finished: the same call returns it; more epochs extend it, and fresh=True starts over"
        messages.append(f"{Run.open(folder, task)}; {more}")
    for message in filter(None, [unread, *(pack.remarks if former is None else ()), *messages, *complaints]):
        surface.report(message)
        if not progress and not is_torchelastic_launched():
            say(message)
    return Job(surface, kept)


def carry_out(job: Job, receipt: bool, callbacks: Sequence[Callback], begun: float) -> bool:
    """Train, tell why it ended early, and measure; return whether Ctrl-C ended it. begun: when `fit` was called."""
    state, surface, path, stop = job.state, job.surface, job.folder / RECEIPT, job.surface.requests.post
    alone = not is_torchelastic_launched()  # torchrun starts again what dies of SIGTERM
    with FirstSignal(signal.SIGTERM, partial(stop, "stop", by="SIGTERM"), later=alone), closing(job):
        with surface, devices.untouched(state.device):
            cold_start = follow(job, callbacks, begun)
        checkpoint.mark(job.folder, ended="stopped" if surface.requests.stop and not state.over else "done")
        state.ranks.end()
        with FirstSignal(signal.SIGINT, partial(stop, "stop")) as sigint:
            if state.stopped:
                surface.report(f"{state.stopped}; to continue, set more epochs")
            if receipt and not surface.requests.stop and not path.exists():  # under torchrun that of one process
                with optional("no receipt", surface), work("measuring the receipt", surface.progress):
                    made = measure.receipt(job.task, job.pack, one_share(state), run_s=state.meter.watch.wall)
                    own = {"samples": made.samples // state.ranks.world, "cold_start": cold_start}
                    disk.write_atomic(path, json.dumps({**made.to_dict(), **own}, indent=1))
                    diagnose(job, surface.report)
        if surface.notebook:
            surface.tell(what_next(Run.open(job.folder, job.task)))
    return sigint.came or surface.interrupts.came


def follow(job: Job, callbacks: Sequence[Callback], begun: float) -> float | None:
    """Watch the loop, and do what is requested; return the seconds from the call to the tenth step of a new run."""
    state, surface, run = job.state, job.surface, Run(job.folder, job.task, job.pack.card, job.state.applied)
    run.history, run.settle, new, cold_start = job.history, job.wait, not state.step, None
    with closing((guard := Guard(job)).records()) as records:  # a traceback would keep the feed and its threads
        for record in records:
            record = surface.measured(record)
            if new and record.kind == "step" and state.step == COLD_STEPS:
                measure.finish(state.device)
                cold_start = monotonic() - begun
            job.log(record)
            surface.update(record)
            run.plan = state.applied
            for function in callbacks if record.values else ():
                if function(record, run) == "stop" and not state.over:
                    surface.requests.post("stop", by=f"the callback {getattr(function, '__name__', function)}")
            if run.plan is not state.applied:  # a callback's changes, beside what the user has requested meanwhile
                changed = run.plan.changes_from(state.applied)
                state.plan = state.plan.replace(**{name: getattr(run.plan, name) for name in changed})
            if record.kind != "change" and surface.listen() and act(job, guard):
                break
    job.save()
    job.wait()
    return cold_start


def act(job: Job, guard: Guard) -> bool:
    """Do what is requested, and hold the run while it is paused; return whether it is to stop."""
    state, surface, requests = job.state, job.surface, job.surface.requests
    while True:
        if requests.take("save"):
            worth = job.save()
            job.wait()
            surface.answer(f"saved at step {state.step}" if worth else "not saved: the loss is not finite", "save")
        if requests.stop or requests.paused:  # a paused notebook may lose its machine
            job.save()
        if requests.stop:
            lost = train.list_changes(state.plan.changes_from(state.applied))
            then = "get its receipt" if state.over else f"continue{lost and f'; not applied: {lost}'}"
            surface.answer(f"stopped by {requests.stopper} after step {state.step}; run it again to {then}", "stop")
            return True
        if requests.take("profile"):
            surface.due = 0.0  # shown at once, since training waits for it
            surface.draw(MEASURING)
            with state.meter.watch.paused(), optional("not measured", surface):
                diagnose(job, partial(surface.answer, asked="profile"))
        if requests.take("evaluate"):
            state.evaluate_next = surface.looking = not state.over
        if guard.ask() or not requests.paused or surface.looking or requests.pending:
            return False
        with state.meter.watch.paused():
            surface.hold()
            surface.listen()


@contextmanager
def optional(missing: str, surface: Surface) -> Iterator[None]:
    """Turn the failure of a measurement, such as out of memory, into a message; a request to stop ends it."""

    def attend() -> None:
        surface.listen()
        if surface.requests.stop:
            raise KeyboardInterrupt

    try:
        with meanwhile(attend):
            yield
    except Exception as error:  # whatever a measurement raises, the run is saved
        surface.report(f"{missing}: {type(error).__name__}: {error}")
    except KeyboardInterrupt:
        surface.report(f"{missing}: interrupted; run it again to get it")


def one_share(state: TrainState) -> Plan:
    """Return the plan of one process's part of a step: with several processes, its share of the batch."""
    return state.plan.turn(batch_size=max(state.plan.batch_size // state.ranks.world, 1))


def diagnose(job: Job, tell: Callable[[str], None]) -> None:
    """Measure where the time of a step of this run goes, on a separate model; report the verdict and save it."""
    state, surface, plan = job.state, job.surface, one_share(job.state)
    fixed = [] if state.over else [*plan.fixed_settings()]  # at the end, what is proposed is for the next run
    fixed += ["batch_size", "graph"] * (state.ranks.world > 1)  # of several processes, which have a share, and no graph
    train.release(state)  # all of the GPU is for the measurement
    verdict = measure.verdict(job.task, job.pack, plan, fixed=fixed, run_s=state.meter.watch.wall)
    disk.write_atomic(job.folder / VERDICT, json.dumps(verdict.to_dict()))
    if surface.panel is not None and (verdict.best or not state.over):  # when it is over, the cell has the sentence
        surface.panel.propose(f"Faster: {verdict.best}" if state.over else verdict.sentence, verdict.change)
    tell(verdict.sentence)


def watchers_of(callbacks: Sequence[Callback], log: str | None) -> list[Callback]:
    """Return what a call of `fit` gives, the logger last: it writes the numbers of a run's rows into its folder, by
    global step. Raises TrainError, and MissingExtra without its package."""
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise TrainError(f"callbacks must be a list of functions f(record, run), got {callbacks!r}; pass [f]")
    if log not in (None, "tensorboard"):
        raise TrainError(f'log must be "tensorboard" or None, got {log!r}; any other logger is a function in callbacks')
    if log is None:
        return [*callbacks]
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtra(f'log="tensorboard" needs tensorboard ({error}): pip install tensorboard') from None
    writer, last = None, 0

    def write(record: Record, run: Run) -> None:
        nonlocal writer, last
        if writer is None or record.step < last:  # the run begins, or went back: rows are repeated
            before = [row["step"] for row in run.history.rows[:-1]]
            writer = SummaryWriter(str(run.folder), purge_step=before[-1] + 1 if before else 0)
        last = record.step
        for name, value in record.values.items():
            if isinstance(value, (int, float)):
                writer.add_scalar(f"{record.kind}/{name}", value, record.step)
        writer.flush()  # a run that is killed repeats only what is beyond its checkpoint

    return [*callbacks, write]
