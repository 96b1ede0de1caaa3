"""A run in the folder that `keep=` names, usually on Drive: each checkpoint under its own name, and latest.json.

latest.json is replaced last. It has all that belongs together: the texts of the run's small files, and the bytes and
SHA-256 of the checkpoints' files, which lie next to it. earlier.json is the one before.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from nbtools import disk
from nbtools.data.progress import bar, say
from nbtools.data.sources import cache
from nbtools.data.transfer import bring, patient
from nbtools.errors import CheckpointError, StageError

LATEST, EARLIER = "latest.json", "earlier.json"
LATER = "later.json"  # in a run that was opened from where it is kept: that folder, and the weights to fetch from it
FORMER = "snapshots"  # a folder of nbtools 0.2


def is_kept(folder: Path) -> bool:
    """Return whether a run is kept in a folder. Raises OSError where that is unknown."""
    return any(disk.exists(folder / name) for name in (LATEST, EARLIER, FORMER)) if disk.exists(folder) else False


def latest(folder: Path) -> dict[str, Any]:
    """Return what is kept in a folder: `start`, `step`, `files` (name → text) and `checkpoints` (name → [bytes,
    SHA-256]); {} for nothing. Raises OSError, and CheckpointError for a damaged latest.json or another format."""
    trouble = ""
    for name in (LATEST, EARLIER):
        path = folder / name
        if not (disk.exists(folder) and disk.exists(path)):
            continue
        try:
            found = json.loads(path.read_text("utf-8"))
            names = [*found["files"], *found["checkpoints"]]
            if any(Path(one).name != one for one in names):
                raise ValueError("a name in it is not that of a file in its folder")
            if trouble:
                say(f"{trouble}; {path} is used")
            return found
        except (ValueError, LookupError, TypeError) as error:
            trouble = trouble or f"{path}: cannot be read ({error})"
    if trouble:
        raise CheckpointError(f"{trouble}; restore it from Drive's versions, or name another keep=")
    if disk.exists(folder) and disk.exists(folder / FORMER):
        raise CheckpointError(
            f"{folder}: kept by nbtools 0.2, whose runs nbtools 0.3 does not read; train it anew, or name another keep="
        )
    return {}


def restore_kept(folder: Path, target: Path, weights: bool = True) -> None:
    """Copy a kept run into a new folder `target`; what a call that was interrupted copied is not copied again.

    weights: False leaves the weights to `present`. Raises StageError for what does not come whole.
    """
    found = patient(lambda: latest(folder), folder)
    now = {name: one for name, one in found["checkpoints"].items() if weights or not name.endswith(".safetensors")}
    disk.require_space(target, total := sum(size for size, _ in now.values()))
    with bar(total=total or None, desc=f"copy {target.name}", unit="B", unit_scale=True, disable=not weights) as shown:
        for name, (size, digest) in now.items():
            bring(folder / name, target / name, size, target / f"{name}.part", shown.update, digest)
    for name, text in found["files"].items():
        disk.write_atomic(target / name, text)
    if not weights:
        left = {name: one for name, one in found["checkpoints"].items() if name not in now}
        disk.write_atomic(target / LATER, json.dumps({"from": str(folder.absolute()), "files": left}))


def opened_copy(folder: Path) -> Path:
    """Return a folder of the cache with what is kept in `folder`, its weights left to `present`."""
    found = patient(lambda: latest(folder), folder)
    digest = hashlib.sha256(f"{folder.absolute()}\0{json.dumps(found)}".encode()).hexdigest()
    target = cache() / f"{folder.name}-{digest[:8]}"
    with disk.explained(f"opening {folder}", target), lock_of(target):
        if not target.exists():
            part = target.with_name(f"{target.name}.part")
            disk.remove(part)
            restore_kept(folder, part, weights=False)
            disk.publish_folder(part, target)
    return target


def lock_of(path: Path) -> disk.Lock:
    key = hashlib.sha256(bytes(path.absolute())).hexdigest()[:16]
    return disk.Lock(cache() / "locks" / f"kept-{key}.lock")


def present(path: Path) -> Path:
    """Return a file of a run, fetched now if it was left where the run is kept. Raises StageError (also its subclass
    ArchiveError, if it is damaged) or DiskError."""
    note = path.with_name(LATER)
    if path.exists() or not note.exists():
        return path
    left = json.loads(note.read_text())
    if path.name not in left["files"]:
        return path
    place, (size, digest) = Path(left["from"]), left["files"][path.name]
    with disk.explained(f"fetching {path.name} from {place}", place), lock_of(path):
        if path.exists():  # another process has fetched it
            return path
        if not patient(lambda: disk.exists(place), place):
            raise StageError(f"{place} is not there: mount Drive, or the disk that it is on, and run it again.")
        if not patient(lambda: disk.exists(place / path.name), place):
            raise StageError(f"{place}: {path.name} has gone: the run has been trained on. Open it again.")
        disk.require_space(path, size)
        with bar(total=size, desc=f"copy {path.name}", unit="B", unit_scale=True) as shown:
            bring(place / path.name, path, size, path.with_name(f"{path.name}.part"), shown.update, digest)
    return path
