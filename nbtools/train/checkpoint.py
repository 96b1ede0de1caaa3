"""Checkpoints: write under another name, sync, rename; read the newest intact one; keep copies on a second disk.

    run.json                   what the run is, and the names of its last and its best checkpoint
    0003-00000141.safetensors  weights, moments and random states, in epoch 3 after step 141
    0003-00000141.json         position, plan, and the SHA-256 of the tensors; written after them

Others are deleted, but for the best one, OLDER ones before the last, and the anchor, from before a watched change.

A run is kept, usually on Drive, as a run folder that is always complete: one worker copies each finished checkpoint
under its own name, reads it back, and then replaces run.json there.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from nbtools import disk
from nbtools.data import remount, retry, say
from nbtools.errors import CheckpointError
from nbtools.train.state import TrainState, below

VERSION = 3  # of a run folder
INDEX, CONTROL = "run.json", "control.json"  # what a run is, and what is requested of it
OLDER = 2  # checkpoints behind the last: it may be damaged, or not on Drive yet
NAME = re.compile(r"\d{4,}-\d{8,}")
FILE = re.compile(NAME.pattern + r"\.(safetensors|json)(\.(.+\.)?part)?")
SMALL = (".json", ".csv", ".png")  # files of a run that are kept whole each time they have changed
RESTORE = "; copy it from where the run is kept"
PATIENCE = 30.0  # seconds at the end after which the user is told what is waited for
MARKING = Lock()


@dataclass(frozen=True)
class Checkpoint:
    """A state as it was, its plain part in `facts`. complaints: about newer ones, which are damaged."""

    name: str
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    complaints: tuple[str, ...] = ()


def snapshot(state: TrainState, rows: int, best: bool = False) -> Checkpoint:
    """Copy the state to host memory. rows: of the history, which a resume cuts to them."""
    facts = {"rows": rows, "best": best, "plan": state.applied.to_dict(), "state": state.facts()}
    plain: dict[str, Any] = {"device": "cpu", "copy": True, "memory_format": torch.contiguous_format}
    tensors = {name: tensor.detach().to(**plain) for name, tensor in state.tensors().items()}
    return Checkpoint(f"{state.epoch:04d}-{state.step:08d}", tensors, facts)


def publish(folder: Path, taken: Checkpoint) -> None:
    path, data = folder / f"{taken.name}.safetensors", safetensors.save(taken.tensors)
    digest = hashlib.sha256(data).hexdigest()
    with disk.explained(f"saving checkpoint {taken.name}", folder):
        for rows in folder.glob("*.csv"):  # on which it counts
            disk.sync_path(rows)
        disk.write_atomic(path, data, digest)
        disk.write_atomic(path.with_suffix(".json"), json.dumps({**taken.facts, "sha256": digest}, indent=1))
    rewind(folder, taken.name, **({"best": taken.name} if taken.facts["best"] else {}))


def rewind(folder: Path, last: str, **entries: Any) -> None:
    """Make a checkpoint the last; delete later ones and those too old. entries: others of the index, which goes first:
    a run that is killed in between does not resume from a later one."""
    stay = {*names_in(mark(folder, last=last, **entries)), *names(folder, last)[: 1 + OLDER]}
    with disk.explained(f"deleting checkpoints around {last}", folder):
        for path in folder.iterdir():
            if FILE.fullmatch(path.name) and (path.suffix == ".part" or path.stem not in stay):
                path.unlink(missing_ok=True)


def mark(folder: Path, **entries: Any) -> dict[str, Any]:
    """Write entries into the index, and return it; None removes one."""
    with MARKING, disk.explained("writing the index", folder):  # the writer's thread marks, too
        index = {name: value for name, value in {**read_index(folder), **entries}.items() if value is not None}
        disk.write_atomic(folder / INDEX, json.dumps(index, indent=1))
    return index


def read_index(folder: Path) -> dict[str, Any]:
    """Return what a run is; {} where there is no index. Raises CheckpointError, DiskError."""
    path = folder / INDEX
    try:
        with disk.explained("reading the index", path):
            index = disk.from_json(path.read_text()) if disk.exists(path) else {}
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; restore it from the kept copy, or delete it and train again") from None
    if index.get("version", VERSION) != VERSION:
        made = f"{path}: this run was made by nbtools {index.get('nbtools', '0.1')} in another format"
        raise CheckpointError(f"{made}; open it with that version, or train again in another folder")
    return index


def names_in(index: dict[str, Any]) -> set[str]:
    anchor = index.get("anchor", {})
    return {index.get("last"), index.get("best"), anchor.get("name"), anchor.get("best")} - {None}


def place(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split("-")))


def names(folder: Path, last: str | None = None) -> list[str]:
    """Return the names of a run's checkpoints, newest first; those after the last were discarded."""
    every = (path.stem for path in folder.glob("*.json") if NAME.fullmatch(path.stem))
    return sorted((name for name in every if last is None or place(name) <= place(last)), key=place, reverse=True)


def read(folder: Path, name: str) -> Checkpoint:
    """Read one checkpoint. Raises CheckpointError if it is missing or damaged."""
    path = folder / f"{name}.safetensors"
    try:
        facts = disk.from_json(retry(path.with_suffix(".json").read_text, path))
        data = retry(path.read_bytes, path)
        if hashlib.sha256(data).hexdigest() != facts["sha256"]:
            raise ValueError("its hash differs from the one recorded")
        return Checkpoint(name, safetensors.load(data), facts)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path}: damaged or missing ({error}){RESTORE}") from None


def newest(folder: Path, last: str | None = None) -> Checkpoint:
    """Read the newest intact checkpoint up to a last one, by default the index's. Raises CheckpointError for none."""
    damage: list[str] = []
    for name in names(folder, last or read_index(folder).get("last")):
        try:
            return replace(read(folder, name), complaints=tuple(f"{each}; {name} is used instead" for each in damage))
        except CheckpointError as error:
            damage.append(str(error).removesuffix(RESTORE))
    fix = "no intact checkpoint; move this folder away to resume from its kept copy (keep=), or name another folder"
    raise CheckpointError(f"{folder.absolute()}: {'; '.join([*damage, fix])}")


def load(folder: Path, state: TrainState) -> Checkpoint:
    """Load the newest intact checkpoint into a state, and return it. Raises CheckpointError."""
    state.load((saved := newest(folder)).tensors, saved.facts["state"])
    return saved


def weights(folder: Path) -> dict[str, Tensor]:
    """Read the best evaluated weights; the newest ones where nothing was evaluated. Raises CheckpointError."""
    best = read_index(folder).get("best")
    tensors = (newest(folder) if best is None else read(folder, best)).tensors
    return below(tensors, "ema.module.") or below(tensors, "model.")


class Keeper:
    """Copies a run to a second folder on a thread of its own. complaints: said once where copies begin to fail, and at
    the end; trouble: why the last copy is not there, if so: the next checkpoint is tried again."""

    def __init__(self, source: Path, target: Path):
        self.source, self.target, self.kept = source, target, "nothing yet"
        self.complaints: list[str] = []
        self.trouble: BaseException | None = None
        with disk.explained("keeping a run", target):
            self.before = retry(lambda: read_index(target), target)
        self.queue: SimpleQueue[bool] = SimpleQueue()
        self.thread = Thread(target=self.work, name="nbtools-keeper", daemon=True)  # ends though a copy hangs
        self.thread.start()

    def keep(self) -> None:
        self.queue.put(True)

    def work(self) -> None:
        for _ in iter(self.queue.get, False):  # which `close` puts last
            if self.queue.empty():  # else what comes next brings this too
                self.attempt()
        self.attempt()

    def attempt(self) -> None:
        try:
            if "last" in (index := read_index(self.source)):  # else nothing is saved yet, or its folder was emptied
                self.copy(index)
            self.trouble = None
        except Exception as error:
            lost = Path(error.filename or "") if isinstance(error, FileNotFoundError) else Path()
            if lost.parent == self.source and lost.stem not in names_in(read_index(self.source)):
                return  # pruned: a newer state is on its way
            if self.trouble is None:
                what = f"not kept ({error}); the run continues, and all of it is in {self.source}"
                self.complaints.append(f"{self.target}: {what}")
            self.trouble = error

    def copy(self, index: dict[str, Any]) -> None:
        """Copy what has changed, run.json last; delete checkpoints there that are no longer here. Raises
        CheckpointError unless what is there was there before, or is of this session, by the run's starts."""
        small = [path for path in self.source.iterdir() if path.suffix in SMALL and not FILE.fullmatch(path.name)]
        small = [path for path in small if path.name not in (CONTROL, INDEX)]
        for path in [*small, *(self.source / f"{name}.json" for name in names_in(index)), self.source / INDEX]:
            kept, there = read_index(self.target), self.target / path.name
            if kept != self.before and kept.get("starts", []) != index.get("starts"):
                rule = "another session has kept its run there since, or the disk was changed"
                raise CheckpointError(f"{rule}; to keep this one, name another keep=")
            data = json.dumps(index, indent=1).encode() if path.name == INDEX else path.read_bytes()
            if not disk.exists(there) or there.read_bytes() != data:
                if FILE.fullmatch(path.name):  # the facts of a checkpoint, which have the hash of its tensors
                    disk.write_atomic(there.with_suffix(".safetensors"), path.with_suffix(".safetensors").read_bytes())
                disk.write_atomic(there, data)
        self.kept = f"step {place(index['last'])[1]:,}"
        for path in self.target.iterdir():
            if FILE.fullmatch(path.name) and not (path.stem in names_in(index) or (self.source / path.name).exists()):
                path.write_bytes(b"")  # Drive keeps what is deleted for 30 days, and counts it
                path.unlink(missing_ok=True)

    def close(self, mount: bool = False, tell: Callable[[str], None] = say) -> None:
        """Wait until the run as it is now is copied, or cannot be; an interrupt ends that. mount: mount Drive anew if
        it does not answer, which may ask the user; tell: shows what a long wait is for."""
        self.queue.put(False)
        try:
            self.thread.join(PATIENCE)
            if self.thread.is_alive():
                tell(f"{self.target}: waiting for {self.source} to be copied; interrupt to stop waiting")
            self.thread.join()
            if self.trouble is not None and mount:
                remount(self.target)
                self.attempt()
        except KeyboardInterrupt:
            self.trouble = KeyboardInterrupt("interrupted")
        if self.trouble is not None:
            what = f"the last state was not copied ({self.trouble}); kept: {self.kept}"
            fix = f"all of it is in {self.source}: run it again to copy the rest, before this machine is given back"
            self.complaints.append(f"{self.target}: {what}; {fix}")
