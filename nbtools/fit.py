"""fit: the notebook's one call. Loop, history, live plot, checkpoints and receipt together; run again, it goes on."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

from nbtools import checkpoint, disk, measure
from nbtools.advise import advise
from nbtools.errors import CheckpointError, NbtoolsError, PackError, PlanError, TrainError
from nbtools.history import History, Record
from nbtools.loop import Diverged, refuse_fixed, require_sizes, told, train
from nbtools.pack import Pack
from nbtools.plan import Plan
from nbtools.run import CARD, HISTORY, PLAN, PLOT, RECEIPT, Run, task_name
from nbtools.stage import cache, drive_path
from nbtools.state import Task, TrainState
from nbtools.surface import Interrupt, Surface

SAVE_EVERY = 60.0  # seconds between checkpoints inside an epoch: what a lost session may cost
SAVE_SHARE = 0.05  # of the time that checkpoints at the ends of quick epochs may take, the best ones aside
ROLLBACKS = 2  # returns to a checkpoint because of a lost loss; the next time the run stops


def fit(
    task: Task,
    pack: Pack,
    plan: Any = None,
    run: str | Path = "runs/run",
    keep: str | Path | None = None,
    receipt: bool = True,
    progress: bool = True,
) -> Run:
    """Train in this cell, drawing as it goes; returns the Run.

    plan: a Plan, a Panel or an Advice; None: the run's own, or what `advise` says. run: a folder on local disk; where
    it holds a run already, that run goes on from its last checkpoint, bit for bit (CPU). keep: a second folder, usually
    on Drive (`drive:…`), that gets a copy of everything in the background, and from which a lost local folder is
    restored. receipt: measure the task's baseline beside this run at the end, for a few seconds.

    An interrupt (Ctrl-C, the notebook's stop button) finishes the step, saves, and returns the run as it is.
    Raises TrainError, PlanError or CheckpointError; the checkpoints stay whole.
    """
    if str(run).startswith("drive:"):
        raise CheckpointError(
            f"run={str(run)!r}: a run is written to local disk, and copied to Drive by keep={str(run)!r}"
        )
    if not isinstance(pack, Pack):
        raise PackError(
            f"pack must be a nb.Pack, got {type(pack).__name__}; make one with {task_name(task)}.pack(source)"
        )
    folder, kept = Path(run), kept_folder(keep)
    with only_one(folder):
        restore(folder, kept)
        wanted = chosen_plan(task, pack, plan, folder)
        require_sizes(pack, wanted)
        state = TrainState(task, pack, wanted)
        history, complaints = begin(folder, task, pack, state)
        job = Job(task, pack, folder, state, history)
        keeper = checkpoint.Keeper(folder, kept) if kept is not None else None
        surface = Surface(folder.name, task, state, pack, progress)
        for complaint in complaints:
            surface.tell(complaint)
        try:
            with Interrupt() as interrupt:
                follow(job, keeper, surface, interrupt)
            finish(job, surface, receipt and not interrupt.asked)
        finally:
            surface.close()
            if keeper is not None:
                keeper.keep()
                keeper.close()
                surface.tell_all(keeper.complaints)
        found = Run.open(folder, task)
        found.events = surface.told
        return found


@dataclass(frozen=True)
class Job:
    """One run under way."""

    task: Task
    pack: Pack
    folder: Path
    state: TrainState
    history: History


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Two processes in one run folder would mix their histories. Raises TrainError for the second."""
    key = hashlib.blake2b(str(folder.resolve()).encode(errors="surrogateescape"), digest_size=8).hexdigest()
    with ExitStack() as stack:
        with disk.explained("locking a run", cache()):
            try:
                stack.enter_context(disk.Lock(cache() / "locks" / f"run-{key}.lock", wait=False))
            except BlockingIOError:
                raise TrainError(
                    f"{folder}: another process trains here; stop it, or name another run folder"
                ) from None
        yield


def chosen_plan(task: Any, pack: Pack, plan: Any, folder: Path) -> Plan:
    if plan is None:
        plan = stored_plan(task, folder) or advise(task, pack)
    plan = getattr(plan, "plan", plan)
    if not isinstance(plan, type(task.PLAN)):
        kind = type(task.PLAN)
        raise PlanError(
            f"plan must be a {kind.__module__}.{kind.__qualname__} (or an Advice or a Panel of one), got "
            f"{type(plan).__qualname__}; take {task_name(task)}.PLAN and .replace(...) what you want to change"
        )
    return plan


def stored_plan(task: Any, folder: Path) -> Plan | None:
    """The plan of the run in a folder, where one was started."""
    path = folder / PLAN
    return type(task.PLAN).from_json(path.read_text()) if checkpoint.names(folder) and path.exists() else None


def kept_folder(keep: str | Path | None) -> Path | None:
    if keep is None:
        return None
    return drive_path(keep, create=True) if str(keep).startswith("drive:") else Path(keep)


def restore(folder: Path, kept: Path | None) -> None:
    """Bring a run back from where it is kept when the local folder is gone, as it is after a lost session.

    Raises CheckpointError where that would mix two runs, or replace files that are no run's.
    """
    if kept is None or not (theirs := checkpoint.read_index(kept)):
        return
    if ours := checkpoint.read_index(folder):
        if ours.get("id") != theirs.get("id"):
            raise CheckpointError(f"{kept} keeps another run than {folder}; name another keep=, or another run=")
        return
    if folder.exists() and any(p.name not in (PLAN, CARD, HISTORY) and p.suffix != ".part" for p in folder.iterdir()):
        raise CheckpointError(f"{folder} holds files and no run, and {kept} keeps a run; name a new folder with run=")
    part = folder.with_name(f"{folder.name}.part")
    with disk.explained(f"restoring {folder} from {kept}", folder):
        disk.remove(part)
        disk.make_folder(part.parent)
        shutil.copytree(kept, part, ignore=shutil.ignore_patterns("*.part"))
        disk.remove(folder)
        disk.publish_folder(part, folder)


def begin(folder: Path, task: Any, pack: Pack, state: TrainState) -> tuple[History, list[str]]:
    """A new run folder, or the old one and the state of its last checkpoint; and what was wrong with newer ones."""
    if checkpoint.names(folder):
        return resume(folder, pack, state)
    with disk.explained("starting a run", folder):
        disk.make_folder(folder)
        disk.remove(folder / HISTORY)
        disk.write_atomic(folder / CARD, json.dumps(pack.card.to_dict(), ensure_ascii=False, indent=1))
        disk.write_atomic(folder / PLAN, state.plan.to_json())
        disk.write_atomic(
            folder / checkpoint.INDEX, json.dumps({"version": 1, "id": uuid4().hex, "task": task_name(task)})
        )
    checkpoint.save(folder, state, rows=0)
    return History(folder / HISTORY), []


def resume(folder: Path, pack: Pack, state: TrainState) -> tuple[History, list[str]]:
    if json.loads((folder / CARD).read_text()) != json.loads(json.dumps(pack.card.to_dict())):
        raise CheckpointError(
            f"{folder}: this run was trained on another pack (its card.json is not that of {pack.folder}); "
            "give the same data and options, or name another run folder"
        )
    tensors, facts, complaints = checkpoint.newest(folder)
    old, new = type(state.plan).from_dict(facts["plan"]), state.plan  # plan.json may be ahead of the checkpoint
    changed = new.changes_from(old)
    refuse_fixed(changed, new)
    state.load(tensors, facts["state"])
    history = History(folder / HISTORY)
    history.cut(facts["rows"])
    disk.write_atomic(folder / PLAN, new.to_json())
    if changed:
        if state.stopped:
            state.stopped, state.stale = None, 0  # asked to go on: an early stop counts anew from here
        history.append(Record("change", state.epoch, state.step, state.samples, {"what": told(changed)}))
        if "batch_size" in changed or "micro_batch_size" in changed:
            state.micro = new.micro_batch_size
    return history, complaints


def follow(job: Job, keeper: checkpoint.Keeper | None, surface: Surface, interrupt: Interrupt) -> None:
    """The loop and its watchers: rows, picture, checkpoints, the interrupt."""
    state, saver = job.state, Saver(job, keeper, surface)
    for record in resilient(job):
        job.history.append(record)
        surface.update(record, job.history)
        if interrupt.asked:
            saver.save(best=record.kind == "epoch" and state.improved)
            surface.tell(f"stopped by you after step {state.step}; run it again to go on")
            return
        saver.watch(record)
    if saver.place != (state.epoch, state.step):
        saver.save()


class Saver:
    """Writes a checkpoint where losing the work since the last one would cost more than writing it."""

    def __init__(self, job: Job, keeper: checkpoint.Keeper | None, surface: Surface):
        self.job, self.keeper, self.surface = job, keeper, surface
        self.saved, self.cost = monotonic(), 0.0
        self.place = (job.state.epoch, job.state.step)

    def watch(self, record: Record) -> None:
        """At the end of an epoch when it is the best, or checkpoints stay cheap; inside one every minute."""
        since = monotonic() - self.saved
        if record.kind == "epoch" and (self.job.state.improved or since * SAVE_SHARE >= self.cost):
            self.save(best=self.job.state.improved)
        elif since > SAVE_EVERY:
            self.save()

    def save(self, best: bool = False) -> None:
        start = monotonic()
        if not self.job.state.lost():  # else the next log step says so, and the run goes back to a checkpoint before
            checkpoint.save(self.job.folder, self.job.state, len(self.job.history), best)
            self.job.state.improved = False
            if self.keeper is not None:
                self.keeper.keep()
                self.surface.tell_all(self.keeper.complaints)
        self.place = (self.job.state.epoch, self.job.state.step)
        self.saved = monotonic()
        self.cost = self.saved - start


def resilient(job: Job) -> Iterator[Record]:
    """The loop; where the loss is lost, back to the last checkpoint and again, each step checked before it counts."""
    state = job.state
    for rollback in range(ROLLBACKS + 1):
        try:
            yield from train(job.task, state, job.pack)
            return
        except Diverged as error:
            trouble = error.with_traceback(None)  # its frames hold the feed, on a GPU a second copy of the pack
        if rollback == ROLLBACKS:
            raise TrainError(f"{trouble}, for the third time; lower Plan.lr, set Plan.clip_norm, or look at the data")
        facts, _ = checkpoint.load(job.folder, state)
        job.history.cut(facts["rows"])
        state.careful_until = trouble.steps[1] + 1
        what = f"{trouble}; back to step {state.step}, and each step checked from there"
        yield Record("event", state.epoch, state.step, state.samples, {"what": what})


def finish(job: Job, surface: Surface, receipt: bool) -> None:
    """The picture and the receipt that stay."""
    if job.state.stopped:
        surface.tell(f"{job.state.stopped}; to go on, change the plan")
    surface.close()
    with disk.explained("writing the plot", job.folder):
        surface.plot.finish(job.history, job.folder / PLOT)
    path = job.folder / RECEIPT
    if not receipt or path.exists():
        return
    surface.tell("measuring the baseline beside this run …")
    try:
        disk.write_atomic(path, measure.receipt(job.task, job.pack, job.state.plan, job.state.device).to_json())
    except (NbtoolsError, OSError, RuntimeError) as error:  # the run is trained and saved, whatever the baseline does
        surface.tell(f"no receipt: {type(error).__name__}: {error}")
    except KeyboardInterrupt:
        surface.tell("no receipt: stopped by you; run it again to measure it")
