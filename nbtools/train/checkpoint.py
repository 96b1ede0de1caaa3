"""Checkpoints: write under another name, sync, rename; read the newest intact one.

    run.json                   what the run is, and the names of its last and its best checkpoint
    0003-00000141.safetensors  weights, moments and random states, in epoch 3 after step 141
    0003-00000141.json         position, plan, and the SHA-256 of the tensors; written after them

Others are deleted, but for the best one, OLDER ones before the last, and the anchor, from before a watched change.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from nbtools import disk
from nbtools.data import patient
from nbtools.errors import CheckpointError
from nbtools.train.state import TrainState, below

VERSION = 2  # of a run folder
INDEX, CONTROL = "run.json", "control.json"  # what a run is, and what is requested of it
OLDER = 2  # checkpoints behind the last: it may be damaged, or not on Drive yet
NAME = re.compile(r"\d{4,}-\d{8,}")
FILE = re.compile(NAME.pattern + r"\.(safetensors|json)(\.(.+\.)?part)?")
MARKING = Lock()


@dataclass(frozen=True)
class Checkpoint:
    """A state as it was. facts: rows of the history, whether it is the best, applied plan, plain part of the state;
    complaints: about newer ones, which are damaged."""

    name: str
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    complaints: tuple[str, ...] = ()


def save(folder: Path, state: TrainState, rows: int, best: bool = False) -> None:
    """Write the state, and delete old checkpoints. rows: of the history, which a resume cuts to them. Raises DiskError;
    the older checkpoints are intact then."""
    publish(folder, snapshot(state, rows, best))


def snapshot(state: TrainState, rows: int, best: bool = False) -> Checkpoint:
    """Copy the state to host memory."""
    facts = {"rows": rows, "best": best, "plan": state.applied.to_dict(), "state": state.facts()}
    plain: dict[str, Any] = {"device": "cpu", "copy": True, "memory_format": torch.contiguous_format}
    tensors = {name: tensor.detach().to(**plain) for name, tensor in state.tensors().items()}
    return Checkpoint(f"{state.epoch:04d}-{state.step:08d}", tensors, facts)


def publish(folder: Path, taken: Checkpoint) -> None:
    """Write a snapshot, and make it the last checkpoint."""
    path, data = folder / f"{taken.name}.safetensors", save_tensors(taken.tensors)
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
    stay = {*named(mark(folder, last=last, **entries)), *names(folder, last)[: 1 + OLDER]}
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
        fix = "restore it from the kept copy, or delete it and train on"
        raise CheckpointError(f"{path}: {error}; {fix}") from None
    if index.get("version", VERSION) != VERSION:
        made = f"{path}: this run was made by nbtools {index.get('nbtools', '0.1')} in another format"
        raise CheckpointError(f"{made}; open it with that version, or train anew in another folder")
    return index


def named(index: dict[str, Any]) -> set[str]:
    """Return the names of the checkpoints in an index."""
    anchor = index.get("anchor", {})
    return {index.get("last"), index.get("best"), anchor.get("name"), anchor.get("best")} - {None}


def best_of(folder: Path) -> str | None:
    """Return the name of the best checkpoint; None before the first evaluation."""
    return read_index(folder).get("best")


def place(name: str) -> tuple[int, ...]:
    """Return the (epoch, step) of a checkpoint's name."""
    return tuple(map(int, name.split("-")))


def names(folder: Path, last: str | None = None) -> list[str]:
    """Return the names of a run's checkpoints, newest first; those after the last were discarded."""
    every = (path.stem for path in folder.glob("*.json") if NAME.fullmatch(path.stem))
    return sorted((name for name in every if last is None or place(name) <= place(last)), key=place, reverse=True)


def facts_of(folder: Path, name: str) -> dict[str, Any]:
    """Read the plain part of a checkpoint. Raises CheckpointError."""
    try:
        return disk.from_json((folder / f"{name}.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / name}.json: cannot be read ({error})") from None


def read(folder: Path, name: str) -> Checkpoint:
    """Read one checkpoint. Raises CheckpointError if it is missing or damaged."""
    path, facts = folder / f"{name}.safetensors", facts_of(folder, name)
    try:
        data = patient(path.read_bytes, path)
        if hashlib.sha256(data).hexdigest() != facts["sha256"]:
            raise ValueError("its hash is not that of what was written")
        return Checkpoint(name, load_tensors(data), facts)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path}: damaged or missing ({error}); copy it from where the run is kept") from None


def newest(folder: Path, last: str | None = None) -> Checkpoint:
    """Read the newest intact checkpoint up to the last (None: that of the index). Raises CheckpointError for none."""
    damage: list[str] = []
    for name in names(folder, last or read_index(folder).get("last")):
        try:
            return replace(read(folder, name), complaints=tuple(f"{each}; {name} is used meanwhile" for each in damage))
        except CheckpointError as error:
            damage.append(str(error))
    fix = "no intact checkpoint; move this folder away to resume from where it is kept (keep=), or name another one"
    raise CheckpointError(f"{folder}: {'; '.join([*damage, fix])}")


def load(folder: Path, state: TrainState) -> Checkpoint:
    """Load the newest intact checkpoint into the state."""
    taken = newest(folder)
    state.load(taken.tensors, taken.facts["state"])
    return taken


def weights(folder: Path) -> dict[str, Tensor]:
    """Read the best evaluated weights; the newest ones where nothing was evaluated. Raises CheckpointError."""
    best = best_of(folder)
    tensors = (newest(folder) if best is None else read(folder, best)).tensors
    return below(tensors, "ema.module.") or below(tensors, "model.")
