"""Checkpoints: safetensors + JSON, atomic, verified when read, copied to Drive in the background.

A run folder holds, beside plan.json and history.csv:

    run.json                 task, names of the last and the best checkpoint
    0003-00000141.safetensors   weights, optimizer, sums, random states: epoch 3, step 141
    0003-00000141.json          position, plan, SHA-256 of the tensors; written after them, so that it vouches for them
    0003-00000150.weights.safetensors   the evaluated weights alone, of the best epoch

A file is never written in place: a crash leaves the older ones as they were, and `load` takes the newest whole one.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from nbtools import disk
from nbtools.errors import CheckpointError
from nbtools.state import TrainState

INDEX = "run.json"
OLDER = 2  # checkpoints kept behind the last: a copy on Drive may turn out not to have arrived


def save(folder: Path, state: TrainState, rows: int, best: bool = False) -> list[Path]:
    """Write the state (and, as the best, its evaluated weights); prune old ones; returns the files that are new.

    rows: of the history so far; a resume cuts what lies beyond. Raises DiskError, the older checkpoints untouched.
    """
    name = f"{state.epoch:04d}-{state.step:08d}"
    with disk.explained(f"saving checkpoint {name}", folder):
        index = read_index(folder)
        facts = {"rows": rows, "plan": state.plan.to_dict(), "state": state.facts()}
        new = write(folder, name, state.tensors(), facts)
        index["last"] = name
        if best:
            weights = f"{name}.weights"
            new += write(folder, weights, state.evaluated.state_dict(), {"best": state.best, "epoch": state.epoch})
            index["best"] = weights
        disk.write_atomic(folder / INDEX, json.dumps(index, indent=1))
        prune(folder, index)
    return [*new, folder / INDEX]


def write(folder: Path, name: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> list[Path]:
    data = save_tensors({k: v.detach().contiguous().clone() for k, v in tensors.items()})
    facts = {**facts, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    tensors_path = disk.write_atomic(folder / f"{name}.safetensors", data)
    return [tensors_path, disk.write_atomic(folder / f"{name}.json", json.dumps(facts, indent=1))]


def read(folder: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, facts) of one checkpoint. Raises CheckpointError where it is missing or not what was written."""
    path = folder / f"{name}.safetensors"
    try:
        facts = json.loads((folder / f"{name}.json").read_text())
        data = path.read_bytes()
        if len(data) != facts["bytes"] or hashlib.sha256(data).hexdigest() != facts["sha256"]:
            raise CheckpointError(f"{path}: {len(data)} bytes that are not the {facts['bytes']} written; it is damaged")
        return load_tensors(data), facts
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None


def load(folder: Path, state: TrainState) -> tuple[dict[str, Any], list[str]]:
    """Bring the state to the newest whole checkpoint; returns (its facts, complaints about newer, damaged ones).

    Raises CheckpointError where there is none.
    """
    complaints: list[str] = []
    for name in names(folder):
        try:
            tensors, facts = read(folder, name)
        except CheckpointError as error:
            complaints.append(f"{error}; the one before it is taken")
            continue
        state.load(tensors, facts["state"])
        return facts, complaints
    raise CheckpointError(f"{folder}: no whole checkpoint{': ' if complaints else ''}{'; '.join(complaints)}")


def names(folder: Path) -> list[str]:
    """Checkpoints of a run, newest first."""
    return sorted((p.stem for p in folder.glob("[0-9]*-[0-9]*.json") if ".weights" not in p.name), reverse=True)


def weights(folder: Path) -> dict[str, Tensor]:
    """The best evaluated weights; the newest ones where no evaluation chose."""
    best = read_index(folder).get("best")
    if best is not None:
        return read(folder, best)[0]
    for name in names(folder):
        tensors, _ = read(folder, name)
        prefix = "ema.module." if any(k.startswith("ema.module.") for k in tensors) else "model."
        return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    raise CheckpointError(f"{folder}: no checkpoint; train first, or name another run folder")


def read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise CheckpointError(
            f"{path}: not JSON ({error}); restore it from the kept copy, or delete the folder"
        ) from None


def prune(folder: Path, index: dict[str, Any]) -> None:
    """Keep the last, the ones before it, and the best; what a crash left half-written goes too."""
    kept = {index.get("best"), *names(folder)[: 1 + OLDER]}
    for path in folder.glob("[0-9]*-[0-9]*.*"):
        if path.suffix == ".part" or path.name.rsplit(".", 1)[0] not in kept:
            disk.remove(path)


class Keeper:
    """Copies a run to a second folder (Drive) on a thread of its own; only the newest state of each file matters.

    Trouble there is told through `complaints` and does not stop training: what is local stays whole.
    """

    def __init__(self, source: Path, target: Path):
        self.source, self.target = source, target
        self.complaints: list[str] = []
        self.wanted: dict[str, Path] = {}
        self.change = threading.Condition()
        self.busy = self.closed = False
        self.thread = threading.Thread(target=self.work, name="nbtools-keeper", daemon=True)
        self.thread.start()

    def keep(self, files: Iterable[Path]) -> None:
        with self.change:
            self.wanted |= {path.name: path for path in files}
            self.change.notify_all()

    def work(self) -> None:
        while True:
            with self.change:
                while not self.wanted and not self.closed:
                    self.change.wait()
                if not self.wanted:
                    return
                files, self.wanted, self.busy = self.wanted, {}, True
            try:
                self.copy(files)
            except OSError as error:
                self.complaints.append(
                    f"{self.target}: not kept ({error}); the run goes on, and is whole in {self.source}"
                )
            with self.change:
                self.busy = False
                self.change.notify_all()

    def copy(self, files: dict[str, Path]) -> None:
        disk.make_folder(self.target)
        index = {INDEX} & files.keys()
        for name in [*sorted(files.keys() - index), *index]:  # the index last: it must not name what is not there yet
            if files[name].exists():  # pruned meanwhile: a newer one is on its way
                data = files[name].read_bytes()
                copied = disk.write_atomic(self.target / name, data)
                if copied.read_bytes() != data:
                    raise OSError(f"{copied}: reads back other than it was written")
        if index:
            prune(self.target, read_index(self.target))

    def flush(self) -> None:
        """Wait until all that was asked for is copied."""
        with self.change:
            self.change.wait_for(lambda: not self.wanted and not self.busy)

    def close(self) -> None:
        self.flush()
        with self.change:
            self.closed = True
            self.change.notify_all()
        self.thread.join()
