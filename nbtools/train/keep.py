"""Keep a run on a second disk, usually Drive, while it trains: a run folder there that is always complete.

One worker copies each finished checkpoint under its own name, reads it back, and then replaces run.json, which names
it. Older checkpoints stay for a while: what is written to Drive may never reach it, and a run goes on from the newest
one that is whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from nbtools import disk
from nbtools.data import File, fetch_all, patient, remount, say
from nbtools.errors import CheckpointError
from nbtools.train.checkpoint import CONTROL, FILE, INDEX, named, place, read_index

KEPT = "kept.json"  # in the run's folder: where it is kept, and until which step
SMALL = (".json", ".csv", ".png")  # files of a run that are copied whole each time they have changed
FORMER = "snapshots"  # a folder of nbtools 0.2
PATIENCE = 30.0  # seconds at the end after which the user is told what is waited for


class Keeper:
    """Copies a run to a second folder on a thread of its own; after an error there the next checkpoint is tried again.

    complaints: said once where copies begin to fail, and at the end; requested, done: calls of `keep`, and the last one
    whose copy is there; left: an interrupt ended the wait, and another call may keep its run there.
    """

    def __init__(self, source: Path, target: Path):
        self.source, self.target = source, target
        self.requested, self.done, self.left = 0, 0, False
        self.complaints: list[str] = []
        self.trouble: Exception | None = None  # since which nothing could be copied
        with disk.explained("keeping a run", target):
            self.before = read_index(target)
            if disk.exists(target / FORMER):
                raise CheckpointError(f"{target}: kept by nbtools 0.2, which 0.3 does not read; name another keep=")
        note = kept_note(source)
        self.note(note["step"] if note.get("to") == str(target) else None)
        self.queue: SimpleQueue[bool] = SimpleQueue()
        # A daemon: a process can end while a copy hangs, which it could not with a ThreadPoolExecutor.
        self.thread = Thread(target=self.work, name="nbtools-keeper", daemon=True)
        self.thread.start()

    def keep(self) -> None:
        """Request a copy of the run as it is now."""
        self.requested += 1
        self.queue.put(True)

    def work(self) -> None:
        while self.queue.get():
            if self.done != self.requested:  # else a copy has brought what is requested with what came before
                self.attempt()

    def attempt(self) -> None:
        number = self.requested
        try:
            self.copy()
            self.done, self.trouble = number, None
        except Exception as error:
            if isinstance(error, FileNotFoundError) and Path(error.filename or "").parent == self.source:
                return  # pruned: a newer state is on its way
            if self.trouble is None:
                what = f"not kept ({error}); the run continues, and all of it is in {self.source}"
                self.complaints.append(f"{self.target}: {what}")
            self.trouble = error

    def copy(self) -> None:
        """Copy what is new, run.json last; delete checkpoints there that are no longer here. Raises OSError,
        CheckpointError."""
        index = read_index(self.source)
        self.require_own(index)
        for path in self.source.iterdir():
            if path.suffix in SMALL and path.name not in (CONTROL, INDEX, KEPT) and not FILE.fullmatch(path.name):
                self.bring(path)
        for name in named(index):
            self.bring(self.source / f"{name}.json")
        self.require_own(index)  # the copy may have taken long
        disk.write_atomic(self.target / INDEX, json.dumps(index, indent=1))
        self.note(place(index["last"])[1])
        for path in self.target.iterdir():
            if FILE.fullmatch(path.name) and path.stem not in named(index) and not (self.source / path.name).exists():
                path.unlink(missing_ok=True)

    def bring(self, path: Path) -> None:
        """Copy a file that has changed; the facts of a checkpoint follow its tensors, whose hash they have."""
        there, data = self.target / path.name, path.read_bytes()
        if disk.exists(there) and there.read_bytes() == data:
            return
        if FILE.fullmatch(path.name):
            tensors = path.with_suffix(".safetensors")
            disk.write_atomic(self.target / tensors.name, tensors.read_bytes())
        disk.write_atomic(there, data)

    def require_own(self, index: dict[str, Any]) -> None:
        """Raise CheckpointError unless what is there was there before, or is of this session, by the run's starts."""
        there = read_index(self.target)
        if self.left or (there != self.before and there.get("starts", []) != index.get("starts")):
            rule = "another session has kept its run there since, or the disk was changed"
            raise CheckpointError(f"{rule}; to keep this one, name another keep=")

    def note(self, step: int | None) -> None:
        with disk.explained("noting where a run is kept", self.source):
            disk.write_atomic(self.source / KEPT, json.dumps({"to": str(self.target), "step": step}))

    def close(self, mount: bool = False, tell: Callable[[str], None] = say) -> None:
        """Wait until everything requested is copied, or cannot be; an interrupt ends that. mount: mount Drive anew if
        it does not answer, which may ask the user; tell: shows what a long wait is for."""
        self.queue.put(False)
        try:
            self.thread.join(PATIENCE)
            if self.thread.is_alive():
                tell(f"{self.target}: waiting for the last copy of {self.source}; interrupt to end the wait")
            self.thread.join()
            if self.done != self.requested and mount:
                remount(self.target)
                self.attempt()
        except KeyboardInterrupt:
            self.left = True
        if self.done != self.requested:
            what = f"not kept to the end ({self.trouble or 'interrupted'}); kept: {kept_until(self.source)}"
            fix = f"all of it is in {self.source}: run it again to copy the rest, before this machine is given back"
            self.complaints.append(f"{self.target}: {what}; {fix}")


def restore_kept(kept: Path, target: Path) -> None:
    """Copy a kept run into a new folder `target`; weights that a call which was interrupted has copied are not copied
    again. Raises StageError, DiskError."""
    paths = patient(lambda: sorted(kept.iterdir()), kept)
    tensors = {path.name: path for path in paths if path.suffix == ".safetensors"}
    files = {name: File(path, patient(path.stat, path).st_size) for name, path in tensors.items()}
    for path in paths:
        if path.suffix in SMALL:
            disk.write_atomic(target / path.name, patient(path.read_bytes, path))
    fetch_all(files, target, target / "weights.part", target.name, progress=True)
    for name in files:
        disk.sync_path(target / name)


def kept_note(folder: Path) -> dict[str, Any]:
    """Return where a run is kept, `to` and until which `step`; {} where it is kept nowhere."""
    path = folder / KEPT
    return json.loads(path.read_text()) if path.exists() else {}


def kept_until(folder: Path) -> str:
    """Return what is kept of a run: `step 1,200`, or `nothing yet`; "" where it is kept nowhere."""
    note = kept_note(folder)
    return "" if not note else "nothing yet" if note["step"] is None else f"step {note['step']:,}"
