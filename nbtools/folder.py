"""A run's folder: locked while a process trains in it, begun, resumed from its last checkpoint, and brought back from
where it is kept."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import sleep
from typing import Any
from uuid import uuid4

from nbtools import disk
from nbtools.data import Card, Pack, cache, existing, place_to_keep
from nbtools.errors import CheckpointError, TrainError
from nbtools.live import control
from nbtools.run import CARD, HISTORY, PLAN
from nbtools.train import History, Plan, TrainState, caught_up, checkpoint, refuse_fixed, task_name


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Two processes in one run folder would mix their histories. Raises TrainError for the second."""
    with ExitStack() as stack:
        with disk.explained("locking a run", cache()):
            for patience in (0.1, 0.1, 0):  # `busy` holds the lock for an instant to look at it
                try:
                    stack.enter_context(lock(folder))
                    break
                except BlockingIOError:
                    if not patience:
                        raise TrainError(
                            f"{folder}: another process trains here; stop it, or name another run folder"
                        ) from None
                    sleep(patience)
        yield


def busy(folder: Path) -> bool:
    """Whether a process of this machine trains in a run folder now."""
    try:
        with lock(folder):
            return False
    except BlockingIOError:
        return True


def lock(folder: Path) -> disk.Lock:
    key = hashlib.blake2b(str(folder.resolve()).encode(errors="surrogateescape"), digest_size=8).hexdigest()
    return disk.Lock(cache() / "locks" / f"run-{key}.lock", wait=False)


def stored_plan(task: Any, folder: Path) -> Plan | None:
    """The plan of the run in a folder, where one was started."""
    path = folder / PLAN
    return type(task.PLAN).from_json(path.read_text()) if checkpoint.names(folder) and path.exists() else None


def kept_folder(keep: str | Path | None) -> Path | None:
    """Where a run is kept: where it is already, else a new place; None where nothing is to be kept, or Drive was
    refused."""
    if keep is None:
        return None
    place = place_to_keep(keep)
    return existing(str(keep)) or place if place and str(keep).startswith("drive:") else place


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
    if folder.exists() and any(
        p.name not in (PLAN, CARD, HISTORY, control.FILE) and p.suffix != ".part" for p in folder.iterdir()
    ):
        raise CheckpointError(f"{folder} holds files and no run, and {kept} keeps a run; name a new folder with run=")
    part = folder.with_name(f"{folder.name}.part")
    with disk.explained(f"restoring {folder} from {kept}", folder):
        disk.remove(part)
        disk.make_folder(part.parent)
        shutil.copytree(kept, part, ignore=shutil.ignore_patterns("*.part"))
        disk.remove(folder)
        disk.publish_folder(part, folder)


def begin(
    folder: Path, task: Any, pack: Pack, state: TrainState, advised: Plan | None = None
) -> tuple[History, list[str]]:
    """A new run folder, or the old one and the state of its last checkpoint; and what was wrong with newer ones.

    advised: the plan that values are compared with; None: that of the old run, or the one it starts with.
    """
    if checkpoint.names(folder):
        if advised is not None:
            checkpoint.mark(folder, advised=advised.to_dict())
        return resume(folder, pack, state)
    with disk.explained("starting a run", folder):
        disk.make_folder(folder)
        disk.remove(folder / HISTORY)
        disk.write_atomic(folder / CARD, json.dumps(pack.card.to_dict(), ensure_ascii=False, indent=1))
        disk.write_atomic(folder / PLAN, state.plan.to_json())
        disk.write_atomic(
            folder / checkpoint.INDEX, json.dumps({"version": 1, "id": uuid4().hex, "task": task_name(task)})
        )
    checkpoint.mark(folder, advised=(advised or state.plan).to_dict())
    checkpoint.save(folder, state, rows=0)
    return History(folder / HISTORY), []


def resume(folder: Path, pack: Pack, state: TrainState) -> tuple[History, list[str]]:
    if Card.from_dict(json.loads((folder / CARD).read_text())) != pack.card:
        raise CheckpointError(
            f"{folder}: this run was trained on another pack (its card.json is not that of {pack.folder}); "
            "give the same data and options, or name another run folder"
        )
    tensors, facts, complaints = checkpoint.newest(folder)
    old, new = type(state.plan).from_dict(facts["plan"]), state.plan  # plan.json may be ahead of the checkpoint
    changed = new.changes_from(old)
    refuse_fixed(changed, new, resumed=True)
    state.load(tensors, facts["state"])
    history = History(folder / HISTORY)
    history.cut(facts["rows"])
    disk.write_atomic(folder / PLAN, new.to_json())
    if changed and state.stopped:
        state.stopped, state.stale = None, 0  # asked to go on: an early stop counts anew from here
    for record in caught_up(state, old):
        history.append(record)
    return history, complaints
