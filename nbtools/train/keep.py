"""Keep a run on a second disk, usually Drive, while it trains.

One worker copies each finished checkpoint under its own name, reads it back, and then replaces latest.json
(`nbtools.data.keeping`), which names it: what is there is complete or absent, whenever the machine is lost.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any
from uuid import uuid4

from nbtools import disk
from nbtools.data import EARLIER, LATER, LATEST, latest, remount, say
from nbtools.errors import CheckpointError
from nbtools.train import checkpoint
from nbtools.train.checkpoint import CONTROL, FILE, INDEX

KEPT = "kept.json"  # in the run's folder: where it is kept, and until which step
PLOT = "plot.png"
PAUSE, LONGEST = 5.0, 300.0  # seconds until a copy that failed is tried again: doubled up to the longest
PATIENCE = 30.0  # seconds at the end after which the user is told what is waited for


class Keeper:
    """Copies a run to a second folder on a thread of its own. Errors there stop no training: the local files stay
    intact, and the copy is tried again. `complaints` says so once when it begins, and once when it is over.

    requested, done: calls of `keep`, and the last one whose copy is there.
    """

    def __init__(self, source: Path, target: Path):
        self.source, self.target, self.start = source, target, uuid4().hex
        self.complaints: list[str] = []
        self.requested = self.done = 0
        self.foreign = self.closing = self.left = False
        self.trouble: Exception | None = None  # since which nothing could be copied
        self.there: dict[str, list[Any]] = {}  # files in the target that are whole: name → [bytes, SHA-256]
        self.named: set[str] = set()  # checkpoints' files in the target that this run may delete
        before = noted(source)
        self.step: int | None = before.get("step") if before.get("to") == str(target) else None
        self.known: str | None = None  # the start that wrote what was there at first
        with suppress(OSError, CheckpointError):
            self.known = latest(target).get("start", "")
        with disk.explained("noting where a run is kept", source):
            self.note()
        self.queue: SimpleQueue[tuple[bytes, int] | None] = SimpleQueue()
        # A daemon: a process can end while a copy hangs, which it could not with a ThreadPoolExecutor.
        self.thread = Thread(target=self.work, name="nbtools-keeper", daemon=True)
        self.thread.start()

    def keep(self) -> None:
        """Request a copy of the run as it is now. The index is read here: later it may name newer checkpoints."""
        with disk.explained("keeping the run", self.source):
            index = (self.source / INDEX).read_bytes()
        self.requested += 1
        self.queue.put((index, self.requested))

    def work(self) -> None:
        index, number, pause = b"", 0, 0.0
        while True:
            with suppress(Empty):  # then what failed is tried again
                if (request := self.queue.get(timeout=pause or None)) is None:
                    return
                index, number = request
            if number == self.requested:  # else a newer request brings all of it
                pause = 0.0 if self.attempt(index, number) else min(2 * pause or PAUSE, LONGEST)

    def attempt(self, index: bytes, number: int) -> bool:
        """Copy the state of a request → whether to leave it at that."""
        try:
            if not self.foreign:
                self.copy(index)
        except Exception as error:
            if isinstance(error, FileNotFoundError) and Path(error.filename or "").parent == self.source:
                return True  # pruned: a newer state is on its way
            if self.trouble is None and not self.closing:
                self.complaints.append(
                    f"{self.target}: not kept ({error}); the run continues, and is complete in {self.source}. "
                    f"{self.reached}; the rest follows when it can be written again"
                )
            self.trouble = error
            return False
        if not self.foreign:
            self.done = number
            if self.trouble is not None:
                self.trouble = None
                self.complaints.append(f"{self.target}: kept again. {self.reached}")
        return True

    @property
    def reached(self) -> str:
        return (
            "Nothing of it is kept there yet" if self.step is None else f"What is kept there ends at step {self.step:,}"
        )

    def copy(self, index: bytes) -> None:
        """Copy the checkpoints that the index names, then replace latest.json, then delete what it does not name."""
        facts = json.loads(index)
        before = latest(self.target)
        if self.known is None:  # it was not to be read at first
            self.known = before.get("start", "")
        if before and before.get("start") not in (self.start, self.known):
            self.foreign = True
            self.complaints.append(
                f"{self.target}: another session has kept its run there meanwhile, so nothing more is copied; all of "
                f"this one is in {self.source}. To keep it, name another keep="
            )
            return
        self.there = {**before.get("checkpoints", {}), **self.there}
        now: dict[str, list[Any]] = {}
        for name in checkpoint.named(facts):
            note = (self.source / f"{name}.json").read_bytes()
            self.bring(now, f"{name}.safetensors", json.loads(note)["sha256"])
            self.bring(now, f"{name}.json", hashlib.sha256(note).hexdigest())
        if self.left:
            raise InterruptedError("interrupted")
        files = {INDEX: index.decode()}
        for path in self.source.iterdir():
            left = path.name in (INDEX, CONTROL, KEPT, LATER) or FILE.fullmatch(path.name)
            if path.suffix in (".json", ".csv") and not left:
                with suppress(UnicodeDecodeError):  # a user's own
                    files[path.name] = path.read_text("utf-8")
        step = checkpoint.place(facts["last"])[1]
        text = json.dumps({"version": 2, "start": self.start, "step": step, "files": files, "checkpoints": now})
        part = disk.write_atomic(self.target / f"{LATEST}.new", text)
        if before:
            with suppress(OSError, ValueError, LookupError):
                self.named |= json.loads((self.target / EARLIER).read_text())["checkpoints"].keys()
            self.named |= before["checkpoints"].keys()
            if disk.exists(self.target / LATEST):
                disk.rename(self.target / LATEST, self.target / EARLIER)
        disk.rename(part, self.target / LATEST)
        for name in self.named - now.keys() - before.get("checkpoints", {}).keys():
            disk.remove(self.target / name)
        self.named |= now.keys()
        self.there, self.step = now, step
        self.note()
        with suppress(OSError):  # for whoever looks into the folder
            disk.write_atomic(self.target / PLOT, (self.source / PLOT).read_bytes())

    def bring(self, now: dict[str, list[Any]], name: str, digest: str) -> None:
        """Copy one file, unless it is there, and read it back."""
        there = self.target / name
        size = (self.source / name).stat().st_size
        known = self.there.get(name) == [size, digest] and disk.exists(there) and there.stat().st_size == size
        if not known:
            disk.write_atomic(there, (self.source / name).read_bytes(), digest)
        now[name] = self.there[name] = [size, digest]

    def note(self) -> None:
        facts = {"to": str(self.target), "start": self.start, "step": self.step}
        disk.write_atomic(self.source / KEPT, json.dumps(facts))

    def close(self, mount: bool = False, tell: Callable[[str], None] = say) -> None:
        """Wait until everything requested is copied, or cannot be; an interrupt ends that. mount: mount Drive anew if
        it does not answer, which may ask the user. tell: shows what a long wait is for."""
        self.closing = True
        self.queue.put(None)
        try:
            self.thread.join(PATIENCE)
            if self.thread.is_alive():
                tell(
                    f"{self.target}: waiting for the last copy of this run. {self.reached}; all of it is in "
                    f"{self.source}. Interrupt to end the wait"
                )
            while self.thread.is_alive():
                self.thread.join(1.0)
            if self.trouble is not None and mount:
                remount(self.target)
                self.attempt((self.source / INDEX).read_bytes(), self.requested)
        except KeyboardInterrupt:
            self.left, self.trouble = True, self.trouble or InterruptedError("interrupted")
        if self.done != self.requested and not self.foreign:
            self.complaints.append(
                f"{self.target}: not kept to the end ({self.trouble or 'a file of it was deleted meanwhile'}). "
                f"{self.reached}; all of it is in {self.source}: run it again to copy the rest, before this machine "
                "is given back"
            )


def noted(folder: Path) -> dict[str, Any]:
    """Return what `Keeper.note` wrote: `to`, `start`, `step`; {} where a run is kept nowhere."""
    try:
        return json.loads((folder / KEPT).read_text())
    except (FileNotFoundError, ValueError):
        return {}


def kept_until(folder: Path) -> str:
    """Return what is kept of a run: `step 1,200`, or `nothing yet`; "" where it is kept nowhere."""
    found = noted(folder)
    return "" if not found else "nothing yet" if found["step"] is None else f"step {found['step']:,}"
