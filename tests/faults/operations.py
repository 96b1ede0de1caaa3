"""Every operation on the disk fails in turn, in each way: stage, shard, pack, save, rotate, keep, restore, train.

A job runs in a child where Python's own audit events count what opens, makes, renames and removes files, whoever calls
it, and `disk.read`, `write` and `sync` the rest. The nth operation is broken. Then three things are checked: the child
was done or has refused in a sentence; what is there and taken for whole is what was there before, or what the job
makes, bit for bit; the job, done again without a fault, makes that.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import toy
from archives import archived, put, tree
from faults.forks import DONE, FAILED, Child, done

import nbtools as nb
from nbtools import disk, folder
from nbtools.data import Pack, archive, build, manifests, transfer
from nbtools.train import History, Keeper, Record, TrainState, checkpoint, train

CHANGING = ("create", "write", "sync", "rename", "mkdir", "symlink")  # what a full disk refuses
EVENTS = {f"os.{name}": name for name in ("rename", "remove", "rmdir", "mkdir", "symlink", "truncate")}
EVERY = ("open", "read", "create", "write", "sync", "rename", "remove", "rmdir", "mkdir", "symlink", "truncate")


@dataclass(frozen=True)
class Fault:
    """on: the operations that it can befall. code: the error, None: killed, or a read that gives less. lasts: all later
    ones fail too. share: of a write or read that still happens; lost: what no sync has covered becomes zeros."""

    on: tuple[str, ...] = EVERY
    code: int | None = None
    lasts: bool = False
    share: float = 0.0
    lost: bool = False


FAULTS = {
    "crash": Fault(),
    "torn write": Fault(("write",), share=0.5),
    "power cut": Fault(lost=True),
    "EIO once": Fault(code=errno.EIO),
    "EIO": Fault(code=errno.EIO, lasts=True),
    "ENOTCONN": Fault(code=errno.ENOTCONN, lasts=True),
    "ENOSPC": Fault(CHANGING, errno.ENOSPC, lasts=True),
    "short read": Fault(("read",), share=0.5),
    "empty read": Fault(("read",)),
}


class Layer:
    """Counts the operations below a folder; breaks the first from the nth on that the fault can befall."""

    def __init__(self, root: Path, nth: int, fault: Fault) -> None:
        self.root, self.nth, self.fault = f"{root}/", nth, fault
        self.kinds: list[str] = []
        self.struck = False
        self.turn = threading.RLock()  # no other thread goes on while a power cut takes its bytes
        self.unsynced: dict[int, int] = {}  # inode → first byte that no sync has covered
        for name in ("read", "write", "sync"):
            setattr(disk, name, self.around(name, getattr(disk, name)))
        sys.addaudithook(self.audit)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        name = EVENTS.get(event)
        if event == "open":
            name = "create" if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else "open"
        if name and isinstance(args[0], (str, os.PathLike)):
            path = os.fspath(args[0])
            if path.startswith(self.root) or not path.startswith("/"):  # rmtree names files as seen from their folder
                self.break_if_due(name)

    def around(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(file: Any, *args: Any) -> Any:
            if self.break_if_due(name, file, args, real):
                if self.fault.share:
                    return real(file, max(int(args[0] * self.fault.share), 1))
                return b""
            if name == "sync":
                file.flush()
                self.unsynced.pop(os.fstat(file.fileno()).st_ino, None)
                return None  # a real one takes milliseconds, and nothing here loses its power
            if name == "write":
                self.unsynced.setdefault(os.fstat(file.fileno()).st_ino, file.tell())
            return real(file, *args)

        return operation

    def break_if_due(self, name: str, file: Any = None, args: Any = (), real: Any = None) -> bool:
        """Whether a read is to give less. Raises the fault's error, or ends the process."""
        with self.turn:
            return self.breaks(name, file, args, real)

    def breaks(self, name: str, file: Any, args: Any, real: Any) -> bool:
        self.kinds.append(name)
        due = len(self.kinds) > self.nth and name in self.fault.on and (self.fault.lasts or not self.struck)
        if not due:
            return False
        self.struck = True
        if self.fault.code is not None:
            raise OSError(self.fault.code, os.strerror(self.fault.code))
        if self.fault.on == ("read",):
            return True
        if self.fault.share:
            real(file, args[0][: int(len(args[0]) * self.fault.share)])
        if self.fault.lost:
            self.lose()
        os.kill(os.getpid(), signal.SIGKILL)
        return True

    def lose(self) -> None:
        for path in Path(self.root).rglob("*"):
            start = self.unsynced.get(path.lstat().st_ino)
            if start is not None and path.is_file():
                size = path.stat().st_size
                os.truncate(path, min(start, size))
                os.truncate(path, size)


@dataclass(frozen=True)
class Job:
    """prepare(place): what is there before; act(place): what is done; seen(place) → what is there and taken for whole,
    each as text. keeps: there is always something."""

    prepare: Callable[[Path], object]
    act: Callable[[Path], object]
    seen: Callable[[Path], list[str]]
    keeps: bool = True


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


# -- what is done with data

FILES = {"digits/labels.csv": b"file,label\n", "digits/a.bin": bytes(range(256)) * 300, "digits/b/c.bin": b"c" * 700}
OLD = {"digits/labels.csv": b"file,label\n1,2\n", "digits/old.bin": b"old" * 100}


def folder_there(place: Path, files: dict[str, bytes] = FILES) -> None:
    for name, content in files.items():
        put(place / "drive" / name, content)


def archive_there(form: str) -> Callable[[Path], object]:
    return lambda place: put(place / "drive" / f"digits.{form}", archived(FILES, form))


def shards_there(place: Path) -> None:
    folder_there(place)
    sharding(place)
    (place / "sharded").rename(place / "drive" / "shards")


def sharding(place: Path) -> None:
    vars(sys.modules[nb.shard.__module__])["LEAST"] = 1
    nb.shard("drive:digits", place / "sharded", 9000, progress=False)


def sharded(place: Path) -> list[str]:
    """What the manifest names."""
    path = place / "sharded" / "shards.json"
    names = [one["file"] for one in json.loads(path.read_text())["shards"]] if path.exists() else []
    return [digest([(name, (place / "sharded" / name).read_bytes()) for name in names])] if names else []


def replaced(place: Path) -> None:
    """An older version of the source was staged."""
    path = put(place / "drive" / "digits.zip", archived(OLD, "zip"))
    nb.stage("drive:digits.zip", progress=False)
    put(path, archived(FILES, "zip"))


def staging(name: str, **options: Any) -> Callable[[Path], object]:
    return lambda place: nb.stage(f"drive:{name}", progress=False, **options)


def staged(place: Path) -> list[str]:
    """What the next call takes as it is: receipts, and all that lies next to them."""
    receipts = (place / "cache").glob("*/.stage.json")
    return [json.loads(r.read_text())["version"] + digest(sorted(tree(r.parent).items())) for r in receipts]


def packing(place: Path) -> None:
    build.CHUNK = 4
    toy.pack(place / "raw", into=place / "pack")


def packed(place: Path) -> list[str]:
    there = (place / "pack" / "pack.json").exists()
    return [Pack.open(place / "pack").verify().card.digest] if there else []


def to_keep(place: Path) -> None:
    """A pack, and an older one where it is to be kept."""
    older = toy.pack(toy.demo(place / "older", 5), into=place / "older-pack")
    older.keep(place / "kept.tar")
    toy.make_pack(place, count=9)


def keeping(place: Path) -> None:
    Pack.open(place / "pack").keep(place / "kept.tar")


def kept(place: Path) -> list[str]:
    shutil.rmtree(out := place.with_name("out"), ignore_errors=True)
    archive.extract(place / "kept.tar", out)
    return [Pack.open(out).verify().card.digest]


# -- what is done with a run


def saves(place: Path) -> None:
    """A run with three checkpoints, one of them the best; the state of the next one is in STATES."""
    pack = toy.make_pack(place, count=60)
    state = TrainState(toy, pack, toy.PLAN, "cpu")
    history = History(place / "run" / "history.csv")
    disk.write_atomic(place / "run" / "plan.json", state.plan.to_json())
    for record in train(toy, state, pack):
        if record.kind == "step":
            if state.step == 8:
                break
            if state.step % 2 == 0:
                history.append(Record("step", state.epoch, state.step, 0, {"loss": 1.0 / state.step}))
                checkpoint.save(place / "run", state, len(history), best=state.step == 4)
    checkpoint.mark(place / "run", id="one")
    STATES[:] = [state]


STATES: list[TrainState] = []


def saving(place: Path) -> None:
    checkpoint.save(place / "run", STATES[0], 4, best=True)


def rotating(place: Path) -> None:
    checkpoint.rewind(place / "run", "0001-00000004")


def run_in(place: Path) -> str:
    """The newest state that can be resumed, the best weights, and that there are as many older ones as promised."""
    found = checkpoint.newest(place)
    assert found.name == checkpoint.read_index(place)["last"], found.complaints
    assert all(checkpoint.read(place, name) for name in checkpoint.reached(place, found.name)[: 1 + checkpoint.OLDER])
    values = [(name, tensor.numpy().tobytes()) for name, tensor in sorted(found.tensors.items())]
    best = [(name, tensor.numpy().tobytes()) for name, tensor in sorted(checkpoint.weights(place).items())]
    return f"{found.name} {digest((values, found.facts['state'], best))}"


def saved(place: Path) -> list[str]:
    return [run_in(place / "run")]


def kept_before(place: Path) -> None:
    """A kept run that lacks the last two checkpoints."""
    saves(place)
    copied(place / "run", place / "kept")
    checkpoint.save(place / "run", STATES[0], 4, best=True)


def copied(source: Path, target: Path) -> None:
    keeper = Keeper(source, target)
    keeper.keep()
    keeper.close()
    if keeper.complaints:
        raise nb.NbtoolsError(keeper.complaints[-1])


def copying(place: Path) -> None:
    copied(place / "run", place / "kept")


def lost_here(place: Path) -> None:
    saves(place)
    copied(place / "run", place / "kept")
    shutil.rmtree(place / "run")


def restoring(place: Path) -> None:
    folder.restore(place / "run", place / "kept")


def in_kept(place: Path) -> list[str]:
    """As it is read from there: by way of a copy that is compared with its hashes."""
    return [run_in(nb.stage(place / "kept", progress=False))]


def restored(place: Path) -> list[str]:
    return saved(place) if (place / "run").exists() else in_kept(place)


def rows(place: Path) -> None:
    history = History(place / "history.csv")
    for step in range(5):
        history.append(Record("step", 0, step, 0, {"loss": step / 7}))


def appending(place: Path) -> None:
    history = History(place / "history.csv")
    history.cut(3)
    for step in (3, 4, 5):
        history.append(Record("step", 0, step, 0, {"loss": step / 9, **({"lr": 0.1} if step == 4 else {})}))


def first_rows(place: Path) -> list[str]:
    """Those that a checkpoint counts on, and all once the last is there."""
    found = History(place / "history.csv").rows
    assert [row["step"] for row in found[:3]] == [0, 1, 2]
    return [digest(found if len(found) == 6 else found[:3])]


def training(place: Path) -> None:
    """A run that saves after every step and is kept."""
    folder.SAVE_EVERY, folder.SAVE_SHARE = 0.0, float("inf")
    pack = Pack.open(place / "pack")
    run = nb.fit(toy, pack, toy.PLAN.replace(epochs=2), place / "run", place / "kept", receipt=False, progress=False)
    if unkept := [event for event in run.events if "not kept" in event]:
        raise nb.NbtoolsError(unkept[-1])


def trained(place: Path) -> list[str]:
    """Weights and losses of a run that is done; both copies of one that is not can be resumed."""
    ended = []
    kept = [nb.stage(place / "kept", progress=False)] if manifests(place / "kept") else []
    for path in (place / "run", *kept):
        if path.exists() and checkpoint.names(path):
            over = checkpoint.newest(path).facts["state"]["position"]["epoch"] == 2
            if over and len(History(path / "history.csv").of("epoch")) == 2:  # its row follows the last evaluation
                ended.append(digest((weights_of(path), losses_of(path))))
    return ended


def weights_of(path: Path) -> list[tuple[str, bytes]]:
    return [(name, value.numpy().tobytes()) for name, value in sorted(checkpoint.newest(path).tensors.items())]


def losses_of(path: Path) -> list[dict[str, Any]]:
    """The history without what a clock decides, and without remarks about what happened."""
    rows = [row for row in History(path / "history.csv").rows if row["kind"] not in ("event", "change")]
    return [{name: value for name, value in row.items() if name not in CLOCK} for row in rows]


CLOCK = ("samples_per_s", "data_wait", "memory", "epoch_time", "eval_time")


JOBS = {
    "stage a folder": Job(folder_there, staging("digits"), staged, keeps=False),
    "stage and extract a tar.gz": Job(archive_there("tar.gz"), staging("digits.tar.gz"), staged, keeps=False),
    "stage a tar.xz as one file": Job(
        archive_there("tar.xz"), staging("digits.tar.xz", extract=False), staged, keeps=False
    ),
    "stage shards": Job(shards_there, staging("shards"), staged, keeps=False),
    "shard": Job(folder_there, sharding, sharded, keeps=False),
    "stage a newer version": Job(replaced, staging("digits.zip"), staged, keeps=False),
    "pack": Job(lambda place: toy.demo(place / "raw", 11), packing, packed, keeps=False),
    "keep a pack": Job(to_keep, keeping, kept),
    "save": Job(saves, saving, saved),
    "rotate": Job(saves, rotating, saved),
    "keep a run": Job(kept_before, copying, in_kept),
    "restore a run": Job(lost_here, restoring, restored),
    "write the history": Job(rows, appending, first_rows),
    "train": Job(lambda place: toy.make_pack(place, count=60), training, trained, keeps=False),
}


# -- one after the other


@dataclass
class Place:
    """A folder with what a job finds, made once and copied for each case, always to the same path."""

    job: Job
    root: Path

    def __post_init__(self) -> None:
        self.place, self.made = self.root / "place", self.root / "made"
        self.env = {"NBTOOLS_CACHE": str(self.place / "cache"), "NBTOOLS_DRIVE": str(self.place / "drive")}
        os.environ.update(self.env)
        self.place.mkdir(parents=True)
        self.job.prepare(self.place)
        self.place.rename(self.made)
        self.fresh()
        self.before = self.job.seen(self.place)
        done(lambda: self.job.act(self.place))
        self.after = self.job.seen(self.place)
        self.fresh()
        self.kinds: list[str] = json.loads(eval(done(self.counted)))

    def fresh(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.made, self.place)

    def counted(self) -> str:
        layer = Layer(self.place, sys.maxsize, FAULTS["crash"])
        self.job.act(self.place)
        return json.dumps(layer.kinds)

    def broken(self, nth: int, fault: Fault) -> None:
        transfer.PAUSE = 0.001
        Layer(self.place, nth, fault)
        self.job.act(self.place)

    def again(self, fault: Fault) -> None:
        transfer.PAUSE = 0.001
        if fault.lost:
            disk.boot = lambda: "another"
        self.job.act(self.place)

    def case(self, nth: int, fault: Fault) -> tuple[str, str]:
        """(how the job ended; what is wrong, "" if nothing)."""
        self.fresh()
        code, text = Child(lambda: self.broken(nth, fault)).end()
        ended = "killed" if code < 0 else "done" if code == DONE else "refused"
        if code == FAILED:
            return "failed", text
        try:
            seen = self.job.seen(self.place)
            if not set(seen) <= {*self.before, *self.after} or (self.job.keeps and not seen):
                return ended, f"there is {seen}, neither what was there nor what is made"
            if code == DONE and seen != self.after:
                return ended, f"done, but there is {seen}"
            code, text = Child(lambda: self.again(fault)).end()
            if code != DONE or self.job.seen(self.place) != self.after:
                return ended, f"done again: {text}"
        except Exception:
            return ended, f"what is there cannot be read: {traceback.format_exc()}"
        return ended, ""


def cases(kinds: list[str], share: float = 1.0, first: float = 0.0) -> Iterator[tuple[str, int]]:
    """(fault, operation) of each that the fault can befall; share: of them, evenly; first: where in the share's
    stride to begin, from 0 to 1, so that several calls take different ones."""
    due = 1.0 - share - first
    for name, fault in FAULTS.items():
        for nth, kind in enumerate(kinds):
            due += share if kind in fault.on else 0.0
            if kind in fault.on and due >= 1.0 - 1e-9:
                due -= 1.0
                yield name, nth


def swept(name: str, root: Path, share: float = 1.0, first: float = 0.0) -> tuple[Counter[str], list[str]]:
    """(cases by fault and end, what went wrong) of one job."""
    place, totals, wrong = Place(JOBS[name], root), Counter(), []
    for fault, nth in cases(place.kinds, share, first):
        ended, trouble = place.case(nth, FAULTS[fault])
        totals[f"{fault}, {ended}"] += 1
        if trouble:
            wrong.append(f"{name}, {fault} at operation {nth} ({place.kinds[nth]}): {trouble}")
    with contextlib.suppress(OSError):
        shutil.rmtree(root)
    return totals, wrong
