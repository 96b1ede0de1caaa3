"""Keep a run on a second disk, usually Drive, while it trains.

One worker copies each finished checkpoint under its own name, reads it back, and then replaces latest.json
(`nbtools.data.keeping`), which names it: what is there is complete or absent, whenever the machine is lost.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any
from uuid import uuid4

from nbtools import disk
from nbtools.data import EARLIER, LATER, LATEST, latest, remount, say
from nbtools.errors import CheckpointError
from nbtools.train.checkpoint import CONTROL, FILE, INDEX, named, place

KEPT = "kept.json"  # in the run's folder: where it is kept, and until which step
PLOT = "plot.png"
PATIENCE = 30.0  # seconds at the end after which the user is told what is waited for


class Keeper:
    """Copies a run to a second folder on a thread of its own; after an error there the next checkpoint is tried again.

    complaints: said once where copies begin to fail, and once where they no longer do; requested, done: calls of
    `keep`, and the last one whose copy is there.
    """

    def __init__(self, source: Path, target: Path):
        self.source, self.target, self.start = source, target, uuid4().hex
        self.requested = self.done = 0
        self.complaints: list[str] = []
        self.trouble: Exception | None = None  # since which nothing could be copied
        self.foreign = False  # whether another session's run is there
        self.left = False  # whether an interrupt ended the wait for the last copy
        with disk.explained("keeping a run", target):
            self.known = latest(target)
        before = kept_note(source)
        self.note(before.get("step") if before.get("to") == str(target) else None)
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
        number, before = self.requested, self.trouble
        try:
            self.copy()
            self.done, self.trouble = number, None
        except Exception as error:
            if isinstance(error, FileNotFoundError) and Path(error.filename or "").parent == self.source:
                return  # pruned: a newer state is on its way
            self.trouble = error
        if before is None and self.trouble is not None:
            what = f"not kept ({self.trouble}); the run continues, and all of it is in {self.source}"
            self.complaints.append(f"{self.target}: {what}")
        elif before is not None and self.trouble is None:
            self.complaints.append(f"{self.target}: kept again, until {kept_until(self.source)}")

    def copy(self) -> None:
        """Copy the checkpoints that the index names, replace latest.json, delete what neither it nor the one before it
        names. Raises OSError, CheckpointError."""
        index, before = json.loads((self.source / INDEX).read_text()), latest(self.target)
        if self.foreign or (before != self.known and before.get("start") != self.start):
            self.foreign = True
            raise CheckpointError("another session has kept its run there since; to keep this one, name another keep=")
        earlier: dict[str, Any] = before.get("checkpoints", {})
        paths = [self.source / f"{name}{end}" for end in (".safetensors", ".json") for name in named(index)]
        now = {path.name: self.bring(path, earlier.get(path.name)) for path in paths}
        small = [path for path in self.source.iterdir() if path.suffix in (".json", ".csv")]
        small = [path for path in small if path.name not in (CONTROL, KEPT, LATER) and not FILE.fullmatch(path.name)]
        files = {path.name: path.read_text("utf-8", "replace") for path in small} | {INDEX: json.dumps(index, indent=1)}
        made = {"version": 2, "start": self.start, "step": place(index["last"])[1], "files": files, "checkpoints": now}
        if self.left:  # another call may keep its run there by now
            raise InterruptedError("interrupted")
        if before:
            disk.write_atomic(self.target / EARLIER, json.dumps(before))
        disk.write_atomic(self.target / LATEST, json.dumps(made))
        self.note(made["step"])
        for path in self.target.iterdir():
            if FILE.fullmatch(path.name) and path.name not in {**earlier, **now}:
                path.unlink(missing_ok=True)
        if (self.source / PLOT).exists():  # for whoever looks into the folder
            disk.write_atomic(self.target / PLOT, (self.source / PLOT).read_bytes())

    def bring(self, path: Path, there: Any) -> list[Any]:
        """Copy a file of a checkpoint, unless it is there, and read it back; return its [bytes, SHA-256]."""
        facts = path.with_suffix(".json").read_bytes()
        digest = hashlib.sha256(facts).hexdigest() if path.suffix == ".json" else json.loads(facts)["sha256"]
        now = [path.stat().st_size, digest]
        if there != now or not disk.exists(self.target / path.name):
            disk.write_atomic(self.target / path.name, path.read_bytes(), digest)
        return now

    def note(self, step: int | None) -> None:
        with disk.explained("noting where a run is kept", self.source):
            facts = {"to": str(self.target), "start": self.start, "step": step}
            disk.write_atomic(self.source / KEPT, json.dumps(facts))

    def close(self, mount: bool = False, tell: Callable[[str], None] = say) -> None:
        """Wait until everything requested is copied, or cannot be; an interrupt ends that. mount: mount Drive anew if
        it does not answer, which may ask the user; tell: shows what a long wait is for."""
        self.queue.put(False)
        try:
            self.thread.join(PATIENCE)
            if self.thread.is_alive():
                tell(f"{self.target}: waiting for the last copy of {self.source}; interrupt to end the wait")
            while self.thread.is_alive():
                self.thread.join(1.0)
            if self.done != self.requested and mount and not self.foreign:
                remount(self.target)
                self.attempt()
        except KeyboardInterrupt:
            self.left, self.trouble = True, self.trouble or InterruptedError("interrupted")
        if self.done != self.requested and not self.foreign:
            why = self.trouble or "a file of it was deleted meanwhile"
            here = f"Kept: {kept_until(self.source)}; all of it is in {self.source}"
            fix = "run it again to copy the rest, before this machine is given back"
            self.complaints.append(f"{self.target}: not kept to the end ({why}). {here}: {fix}")


def kept_note(folder: Path) -> dict[str, Any]:
    """Return where a run is kept: `to`, `start`, `step`; {} where it is kept nowhere."""
    try:
        return json.loads((folder / KEPT).read_text())
    except (FileNotFoundError, ValueError):
        return {}


def kept_until(folder: Path) -> str:
    """Return what is kept of a run: `step 1,200`, or `nothing yet`; "" where it is kept nowhere."""
    note = kept_note(folder)
    return "" if not note else "nothing yet" if note["step"] is None else f"step {note['step']:,}"
