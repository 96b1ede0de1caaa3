"""Checkpoints: safetensors + JSON, atomic, verified when read.

A run folder holds, next to plan.json and history.csv:

    run.json                 task, names of the last and the best checkpoint
    0003-00000141.safetensors   weights, optimizer, random states: epoch 3, step 141
    0003-00000141.json          position, sums, plan, SHA-256 of the tensors; written after them: it vouches for them
    0003-00000150.best.safetensors   the evaluated weights alone, of the best epoch; once named .weights

The last checkpoint and OLDER ones before it are kept, the best epoch's, and the anchor: the one from before a change of
settings that is still being watched (see `nbtools.guard`).

A file is never written in place: a crash leaves the older ones intact, and `newest` takes the newest intact one up to
the last.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from nbtools import disk
from nbtools.data import patient, present
from nbtools.errors import ArchiveError, CheckpointError, StageError
from nbtools.train.device import within_memory
from nbtools.train.state import TrainState, below

VERSION = 2  # of a run folder
INDEX, CONTROL = "run.json", "control.json"  # what a run is, and what is requested of it
NAME = r"\d{4,}-\d{8,}"
NAMED = re.compile(NAME + r"(\.best|\.weights)?")
FILE = re.compile(NAMED.pattern + r"\.(safetensors|json)(\..+\.part)?")
BEST = ".best"  # at the end of the name of the best weights, which are alone
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}  # in the safetensors format
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
MARKING = Lock()
OLDER = 2  # checkpoints kept behind the last: a copy may not have reached Drive


@dataclass(frozen=True)
class Snapshot:
    """A state as it was, to be written. files: their names → (tensors in the state's `copies`, facts), in the order in
    which they are written; entries: of the index; copied: when the tensors are there (None: they are)."""

    name: str
    files: dict[str, tuple[dict[str, Tensor], dict[str, Any]]]
    entries: dict[str, str]
    copied: Any

    @property
    def arrived(self) -> bool:
        """Whether all tensors are there."""
        return self.copied is None or self.copied.query()


def save(folder: Path, state: TrainState, rows: int, best: bool = False) -> None:
    """Write the state (and, as the best, its evaluated weights); prune old ones. rows: of the history so far; a resume
    cuts what lies beyond. Raises DiskError, the older checkpoints untouched."""
    publish(folder, snapshot(state, rows, best))


def snapshot(state: TrainState, rows: int, best: bool = False) -> Snapshot:
    """Copy the state to host memory, which is used again by the next snapshot. Nothing waits for a GPU, as a step that
    follows changes no weight before they are copied."""
    name, facts = name_of(state), {"rows": rows, "plan": state.applied.to_dict(), "state": state.facts()}
    tensors = copies(state)  # of the applied plan's state, not of what waits to be applied
    files, entries = {name: (tensors, facts)}, {"last": name}
    if best:
        entries["best"] = name + BEST
        evaluated = below(tensors, "model." if state.ema is None else "ema.module.")
        files[entries["best"]] = evaluated, {"best": state.best.value, "epoch": state.epoch}
    copied = torch.cuda.current_stream(state.device).record_event() if state.device.type == "cuda" else None
    return Snapshot(name, files, entries, copied)


def copies(state: TrainState) -> dict[str, Tensor]:
    """The state's tensors in `state.copies`: memory that is kept, pinned for a GPU, since to fresh pages a copy takes
    two to eight times as long. Strides stay, or the GPU, which may be full, would need memory for a contiguous one."""
    found, kept = state.tensors(), state.copies
    for name, tensor in found.items():
        if name not in kept or (kept[name].shape, kept[name].dtype) != (tensor.shape, tensor.dtype):
            like = partial(torch.empty_like, tensor, device="cpu")
            pinned, _ = within_memory(partial(like, pin_memory=tensor.is_cuda))
            kept[name] = like() if pinned is None else pinned
        kept[name].copy_(tensor, non_blocking=tensor.is_cuda)  # elsewhere nothing tells when it has arrived
    return {name: kept[name] for name in found}


def publish(folder: Path, taken: Snapshot) -> None:
    """Write a snapshot, and make it the last checkpoint."""
    if taken.copied is not None:
        taken.copied.synchronize()
    with disk.explained(f"saving checkpoint {taken.name}", folder):
        for name, (tensors, facts) in taken.files.items():
            write(folder, name, tensors, facts)
        rewind(folder, **taken.entries)


def name_of(state: TrainState) -> str:
    return f"{state.epoch:04d}-{state.step:08d}"


def rewind(folder: Path, last: str, **entries: Any) -> None:
    """Make this checkpoint the last, and discard later ones and those too old; the index first, so that a run killed in
    between does not resume from them. entries: others of the index."""
    mark(folder, last=last, **entries)
    with disk.explained(f"discarding checkpoints around {last}", folder):
        prune(folder, read_index(folder))


def mark(folder: Path, **entries: Any) -> None:
    """Write entries into the index; None removes one. One thread at a time: it reads what it writes again."""
    with MARKING, disk.explained("writing the index", folder):
        index = {**read_index(folder), **entries}
        named = {name: value for name, value in index.items() if value is not None}
        disk.write_atomic(folder / INDEX, disk.to_json(named))


def best_of(folder: Path) -> str | None:
    """The name of the best epoch's checkpoint; None before the first, and where only its weights were kept."""
    name = read_index(folder).get("best", "").partition(".")[0]
    return name if name and (folder / f"{name}.json").exists() else None


def stopped(folder: Path) -> str | None:
    """Why nothing is left to train before the last epoch, as of the last checkpoint."""
    name = read_index(folder).get("last", "")
    return facts_of(folder, name)["state"]["stopped"] if (folder / f"{name}.json").exists() else None


def facts_of(folder: Path, name: str) -> dict[str, Any]:
    """The plain part of a checkpoint. Raises CheckpointError if it cannot be read."""
    try:
        return disk.from_json(patient((folder / f"{name}.json").read_text, folder))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / name}.json: cannot be read ({error})") from None


def write(folder: Path, name: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write tensors of the CPU, and the facts that vouch for them."""
    data = packed(tensors)
    digest = hashlib.sha256(data).hexdigest()
    facts = {**facts, "bytes": len(data), "sha256": digest}
    disk.write_atomic(folder / f"{name}.safetensors", data, digest)
    disk.write_atomic(folder / f"{name}.json", disk.to_json(facts))


def packed(tensors: dict[str, Tensor]) -> memoryview | bytes:
    """The tensors in the safetensors format, for a thread next to one that trains. The library's `save` holds the
    interpreter's lock all along: a step stood still for 3 s where 300 MB were packed on a busy machine. And a copy by
    torch would give this thread a team of OpenMP's for as long as it lives; where there are more threads in teams than
    cores, libgomp's no longer spin for their next piece of work, which made steps of many small operations take 1.4
    times as long (two cores). The same tensors give the same bytes, whatever their order: a checkpoint that is written
    again, and killed before its facts, is still the one that the older facts vouch for."""
    if any(tensor.dtype not in NAMES for tensor in tensors.values()):
        return save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()})
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):  # aligned
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [end, end := end + tensor.nbytes],
        }
    text = json.dumps(header).encode()
    text = (len(text) + -len(text) % 8).to_bytes(8, "little") + text + b" " * (-len(text) % 8)
    file = np.empty(len(text) + end, np.uint8)
    data = file[len(text) :]
    file[: len(text)] = np.frombuffer(text, np.uint8)
    for name, entry in header.items():
        tensor = tensors[name]
        bits = tensor.view(BITS[tensor.element_size()]).numpy()  # numpy has no bfloat16
        place = data[slice(*entry["data_offsets"])].view(bits.dtype)
        np.copyto(place.reshape(bits.shape), bits)
    return file.data


@dataclass(frozen=True)
class Checkpoint:
    """One that was read. facts: the history's rows, the applied plan, the state's plain part. complaints: about newer
    ones, which are damaged."""

    name: str
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    complaints: tuple[str, ...] = ()


def read(folder: Path, name: str) -> Checkpoint:
    """One checkpoint. Raises CheckpointError if it is missing or differs from what was written, StageError if it is
    kept on a disk that does not respond."""
    path, facts = folder / f"{name}.safetensors", facts_of(folder, name)
    try:
        data = patient(present(path).read_bytes, path)  # one error of a mount is no damage
        if len(data) != facts["bytes"] or hashlib.sha256(data).hexdigest() != facts["sha256"]:
            cut = f"{len(data)} bytes that are not the {facts['bytes']} written"
            wrong = cut if len(data) != facts["bytes"] else "not as it was written: its hash differs"
            raise CheckpointError(f"{path}: {wrong}; it is damaged")
        return Checkpoint(name, load_tensors(data), facts)
    except (ArchiveError, OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None


def load(folder: Path, state: TrainState) -> Checkpoint:
    """Load the newest intact checkpoint into the state."""
    found = newest(folder)
    state.load(found.tensors, found.facts["state"])
    accept(folder, found)
    return found


def accept(folder: Path, found: Checkpoint) -> None:
    """Make the one that a run resumes from the last. Damaged ones after it go, or they would count among those to
    keep, and push out the intact; so does an anchor after it."""
    if found.complaints:
        anchor = read_index(folder).get("anchor")
        late = anchor and place(anchor["name"]) > place(found.name)
        rewind(folder, found.name, **({"anchor": None} if late else {}))


def newest(folder: Path, last: str | None = None) -> Checkpoint:
    """The newest intact checkpoint up to the last (None: that of the index). Raises CheckpointError for none."""
    complaints: list[str] = []
    last = last or read_index(folder).get("last")
    for name in reached(folder, last):
        try:
            found = read(folder, name)
            return dataclasses.replace(found, complaints=tuple(f"{each}; {name} is used" for each in complaints))
        except CheckpointError as error:
            complaints.append(str(error))
    fix = "no intact checkpoint; move this folder away to resume from where it is kept (keep=), or name another one"
    raise CheckpointError(f"{folder}: {'; '.join([*complaints, fix])}")


def names(folder: Path) -> list[str]:
    """Checkpoints of a run, newest first."""
    found = (p.stem for p in folder.glob("*.json") if re.fullmatch(NAME, p.stem))
    return sorted(found, key=place, reverse=True)


def reached(folder: Path, last: str | None) -> list[str]:
    """Those up to the last, newest first; later ones were discarded, or are another run's."""
    return [name for name in names(folder) if last is None or place(name) <= place(last)]


def place(name: str) -> tuple[int, ...]:
    """(epoch, step) of a checkpoint's name."""
    return tuple(map(int, name.split("-")))


def weights(folder: Path) -> dict[str, Tensor]:
    """The best evaluated weights; the newest ones if there was no evaluation."""
    best = read_index(folder).get("best")
    if best is None:
        return evaluated(newest(folder))
    try:
        return read(folder, best).tensors
    except CheckpointError as error:
        try:
            return evaluated(read(folder, best.partition(".")[0]))  # the same epoch's, which has them too
        except (CheckpointError, StageError):
            fix = "copy it from where the run is kept, or train on to a better epoch"
            raise CheckpointError(f"{error}; {fix}") from None


def evaluated(found: Checkpoint) -> dict[str, Tensor]:
    return below(found.tensors, "ema.module.") or below(found.tensors, "model.")


def left(folder: Path) -> dict[str, Any]:
    """What an index that was lost named: the newest checkpoint and best weights that are there."""
    best = max((p.stem for p in folder.glob("*.*.json") if NAMED.fullmatch(p.stem)), default=None)
    return {"last": names(folder)[0], "best": best}


def read_index(folder: Path) -> dict[str, Any]:
    """What a run is. Raises CheckpointError, DiskError."""
    path = folder / INDEX
    try:
        with disk.explained("reading the index", path):
            index = disk.from_json(path.read_text()) if path.exists() else {}
        try:
            wrong = [name for name in named(index) if not NAMED.fullmatch(name)]
        except (AttributeError, TypeError):
            wrong = [{key: index[key] for key in ("anchor", "best", "last") if key in index}]
        if wrong:
            raise ValueError(f"{wrong[0]!r} names no checkpoint")
        if index.get("version", VERSION) != VERSION:
            raise CheckpointError(
                f"{path}: this run was made by nbtools {index.get('nbtools', '0.1')} (format {index['version']}, and "
                f"format {VERSION} is read here); open it with that version, or train anew in another folder"
            )
        return index
    except ValueError as error:
        fix = "restore it from the kept copy, or delete it and train on"
        raise CheckpointError(f"{path}: {error}; {fix}") from None


def prune(folder: Path, index: dict[str, Any]) -> None:
    """Delete all but what the index names and OLDER ones before the last, and what a crash left half-written."""
    kept = {*named(index), *reached(folder, index["last"])[: 1 + OLDER]}
    for path in folder.iterdir():
        if FILE.fullmatch(path.name) and (path.suffix == ".part" or path.stem not in kept):
            disk.remove(path)


def named(index: dict[str, Any]) -> list[str]:
    """The checkpoints and weights that an index names, the last at the end."""
    anchor = index.get("anchor", {})
    bests = filter(None, (anchor.get("best"), index.get("best")))
    found = [name for best in bests for name in (best, best.partition(".")[0])]
    return list(dict.fromkeys([*found, *filter(None, (anchor.get("name"), index.get("last")))]))
