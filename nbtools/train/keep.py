"""Keep a run on a second disk, usually Drive, while it trains: copied in the background, confirmed by a later start.

A checkpoint is `local` until it is copied; `copied` once it was written there and read back, which on Colab the
machine's own cache may have answered; and `confirmed` when a later start has read it back and found its hash.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any
from uuid import uuid4

from nbtools import disk
from nbtools.data import LATER, SNAPSHOTS, Damaged, Snapshots, manifests, read_snapshot, remount, say
from nbtools.errors import ArchiveError, CheckpointError
from nbtools.train import checkpoint
from nbtools.train.checkpoint import CONTROL, FILE, INDEX

KEPT = "kept.json"  # in the run's folder: where it is kept, and the state of its checkpoints
LOCAL, COPIED, CONFIRMED = "local", "copied", "confirmed"
PAUSE, LONGEST = 5.0, 300.0  # seconds until a copy that failed is tried again: doubled up to the longest
PATIENCE = 30.0  # seconds at the end after which the user is told what is waited for
SLOW = 180.0  # seconds of one copy after which a message says so


class Keeper:
    """Copies a run to a second folder on its own thread: what that folder lacks of the newest state.

    Errors there stop no training: the local files stay intact, and what is missing is copied as soon as that works
    again. `complaints` says so once when it begins, and once when it is over.
    """

    def __init__(self, source: Path, target: Path):
        self.source, self.target, self.snapshots = source, target, Snapshots(target, FILE)
        self.complaints: list[str] = []
        self.asked = self.done = 0  # calls of `keep`, and the last one whose copy is there
        self.index = b""  # of the last of these calls that the thread has seen
        self.start = start_of(target)
        self.looked = self.closing = False
        self.confirmed: dict[str, str] = {}  # checkpoint → its hash, as a later start found it
        self.states: dict[str, str] = {}  # as an earlier start left them, until they are read back
        self.lacking: set[str] = set()  # checkpoints here that cannot be kept
        self.begun, self.slow = inf, False  # when the copy in progress began; whether one was said to be slow
        self.foreign = False  # whether another session writes there too
        try:
            self.last: str | None = self.newest()
        except OSError:
            self.last = None  # unknown until the disk responds
        self.trouble: Exception | None = None  # since which nothing could be copied
        with disk.explained("noting where a run is kept", source):
            if (before := noted(source)).get("to") == str(target):
                self.states = before["checkpoints"]
            self.note()
        self.queue: SimpleQueue[tuple[bytes, int] | None] = SimpleQueue()
        # A daemon: a process can end while a copy hangs, which it could not with a ThreadPoolExecutor.
        self.thread = Thread(target=self.work, name="nbtools-keeper", daemon=True)
        self.thread.start()

    @property
    def behind(self) -> bool:
        """Whether the folder still lacks something."""
        return self.done != self.asked

    def keep(self) -> None:
        """Request a copy of the run's current state. The index is read here: later it may name newer checkpoints."""
        with disk.explained("keeping the run", self.source):
            index = (self.source / INDEX).read_bytes()
        self.asked += 1
        self.queue.put((index, self.asked))
        if (seconds := monotonic() - self.begun) > SLOW and not self.slow:
            self.slow = True
            self.complaints.append(
                f"{self.target}: a copy has been under way for {seconds / 60:.0f} minutes; the run continues, and is "
                f"complete in {self.source}. {self.reached}"
            )

    def work(self) -> None:
        asked, pause = 0, 0.0
        while True:
            try:
                requested = self.queue.get(timeout=pause or None)
            except Empty:  # what failed is tried again
                requested = self.index, asked
            if requested is None:
                return
            self.index, asked = requested
            if asked == self.asked:  # else a newer one brings all of it
                self.begun = monotonic()
                pause = 0.0 if self.attempt(asked) else min(2 * pause or PAUSE, LONGEST)
                self.begun = inf

    def attempt(self, asked: int) -> bool:
        """Copy the state that was requested last → whether to leave it at that."""
        try:
            self.copy(self.index)
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
        if self.foreign:
            return True
        self.done = asked
        if self.trouble is not None:
            self.trouble = None
            self.complaints.append(f"{self.target}: kept again. {self.reached}")
        return True

    @property
    def reached(self) -> str:
        steps = [checkpoint.place(name)[1] for name in list(self.states)]  # which the thread may change
        return f"What is kept there ends at step {max(steps):,}" if steps else "Nothing of it is kept there yet"

    def copy(self, index: bytes) -> None:
        """A snapshot of the checkpoints that the index names, and of all other files of the run."""
        if self.foreign or self.is_foreign():
            return
        if not self.looked:
            self.confirm()
        facts = disk.unsealed(index)
        files: dict[str, Path | bytes] = {}
        known: dict[str, str] = {}  # as it was noted when they were saved
        copied = []
        for name in checkpoint.named(facts):
            alone = "." not in name and name not in (facts["last"], facts.get("anchor", {}).get("name"))
            if alone and not (self.source / f"{name}.json").exists():
                continue  # an older nbtools kept the best weights alone
            weights, note = pair = [self.source / f"{name}.{form}" for form in ("safetensors", "json")]
            try:
                weights.stat()
                known[weights.name] = disk.unsealed(note.read_bytes()).get("sha256", "")
            except ValueError:
                self.lack(note)
                continue
            except FileNotFoundError as error:
                if name not in checkpoint.named(checkpoint.read_index(self.source)):
                    raise  # pruned
                self.lack(Path(error.filename), "is missing")
                continue
            files |= {path.name: path for path in pair}
            copied.append(name)
        for path in self.source.iterdir():
            left = path.name in (INDEX, CONTROL, KEPT, LATER) or path.suffix == ".part" or FILE.fullmatch(path.name)
            if path.is_file() and not left:
                files[path.name] = path
        while True:
            try:
                self.snapshots.take({**files, INDEX: index}, known, id=facts.get("id"), start=self.start)
                break
            except Damaged as error:  # the others count
                path = error.args[0]
                for name in (path.name, path.with_suffix(".json").name):
                    del files[name]
                copied.remove(path.stem)
                self.lack(path)
        self.last = self.newest()
        with suppress(CheckpointError):  # of a run.json that is not the run's
            older = checkpoint.read_index(self.target)  # as an older nbtools kept it
            if older and older.get("id") == facts.get("id"):
                for path in self.target.iterdir():
                    if FILE.fullmatch(path.name) and path.is_file():
                        disk.remove(path)
                disk.remove(self.target / INDEX)  # last, as it tells whose the others are
        for name in (name for name in copied if "." not in name):
            same = self.confirmed.get(name) == self.hash_of(name)
            self.states[name] = CONFIRMED if same else COPIED
        self.note()

    def newest(self) -> str:
        """Return the name of the newest snapshot there; "" for none."""
        return next((path.name for path in manifests(self.target)), "")

    def is_foreign(self) -> bool:
        """Return whether another session has written there since this one did; then nothing there is overwritten."""
        newest = self.newest()
        if self.last not in (None, newest) and newest:
            try:
                self.foreign = read_snapshot(self.target / SNAPSHOTS / newest).get("start") != self.start
            except ArchiveError:
                return False  # damaged: it counts for nothing
        if self.foreign:
            self.complaints.append(
                f"{self.target}: another session has kept its run there meanwhile, so nothing more is copied; all of "
                f"this one is in {self.source}. To keep it, name another keep="
            )
        return self.foreign

    def lack(self, path: Path, why: str = "damaged since it was written") -> None:
        """Say once that a checkpoint here cannot be kept."""
        if path.stem not in self.lacking:
            self.lacking.add(path.stem)
            self.complaints.append(f"{path}: {why}; what is kept lacks it")

    def confirm(self) -> None:
        """Read back what an earlier start has kept."""
        later = self.snapshots.verify().get("start", self.start) != self.start
        names = {name.partition(".")[0] for name in self.snapshots.files if FILE.fullmatch(name)}
        whole = {name: digest for name in names if (digest := self.hash_of(name))}
        self.confirmed = whole if later else {}
        self.states = dict.fromkeys(whole, CONFIRMED if later else COPIED)
        self.looked = True
        self.note()

    def hash_of(self, name: str) -> str:
        """What identifies a checkpoint that is kept whole; "" where it is not."""
        files = [self.snapshots.files.get(f"{name}{suffix}", ()) for suffix in (".json", ".safetensors")]
        return " ".join(part[2] for parts in files for part in parts) if all(files) else ""

    def note(self) -> None:
        """Write down the states of the checkpoints that the run still has."""
        self.states = {n: state for n, state in self.states.items() if (self.source / f"{n}.json").exists()}
        facts = {"to": str(self.target), "checkpoints": self.states, "last": self.last}
        disk.write_atomic(self.source / KEPT, disk.sealed(facts))

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
                self.attempt(self.asked)
        except KeyboardInterrupt:
            self.snapshots.left, self.trouble = True, self.trouble or InterruptedError("interrupted")
        if self.behind and not self.foreign:
            why = self.trouble or "a file of it was deleted meanwhile"
            self.complaints.append(
                f"{self.target}: not kept to the end ({why}). {self.reached}; all of it is in {self.source}: "
                "run it again to copy the rest, before this machine is given back"
            )


def start_of(target: Path) -> str:
    """What tells one start from another. On a network disk that is a start of the machine: a process on the same one
    may read back what never left it."""
    return (disk.is_slow(target) and disk.boot()) or uuid4().hex


def noted(folder: Path) -> dict[str, Any]:
    """What `Keeper.note` wrote; {} where a run is not kept anywhere, or where that cannot be told."""
    try:
        return disk.unsealed((folder / KEPT).read_text())
    except (FileNotFoundError, ValueError):
        return {}


def kept_states(folder: Path) -> dict[str, str]:
    """The checkpoints of a run, newest first → local, copied or confirmed; {} where it is not kept anywhere."""
    known = noted(folder).get("checkpoints")
    return {} if known is None else {name: known.get(name, LOCAL) for name in checkpoint.names(folder)}


def kept_until(folder: Path) -> str:
    """What is kept of a run, in a few words: `step 1,200 copied`; "" where it is not kept anywhere."""
    states = kept_states(folder)
    safe = next((name for name, state in states.items() if state != LOCAL), None)
    if not states or safe is None:
        return "nothing yet" if states else ""
    return f"step {checkpoint.place(safe)[1]:,} {states[safe]}"
