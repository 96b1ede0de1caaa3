"""Every operation on the disk fails in turn, in each way.

A job runs in a child where Python's own audit events count what opens, makes, renames and removes files, whoever calls
it, and `disk.read`, `write` and `sync` the rest. The nth operation is broken. Then three things are checked: the child
was done or has refused in a sentence; what is there and taken for whole is what was there before, or what the job
makes, bit for bit; the job, done again without a fault, makes that. Two disks fail by themselves: a small one that
fills up, and a mount whose server is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
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

from faults.forks import DONE, FAILED, Child, done
from faults.jobs import JOBS, Job

from nbtools import disk
from nbtools.data import transfer

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


# -- one after the other


@dataclass
class Place:
    """A folder with what a job finds, made once and copied for each case, always to the same path."""

    job: Job
    root: Path

    def __post_init__(self) -> None:
        self.place, self.made = self.root / "place", self.root / "made"
        os.environ.update(NBTOOLS_CACHE=str(self.place / "cache"), NBTOOLS_DRIVE=str(self.place / "drive"))
        self.place.mkdir(parents=True)
        self.job.prepare(self.place)
        self.place.rename(self.made)
        self.fresh()
        self.before = self.job.seen(self.place)
        done(self.act)
        self.after = self.job.seen(self.place)
        self.fresh()
        self.kinds: list[str] = json.loads(eval(done(self.counted)))

    def fresh(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.made, self.place, dirs_exist_ok=True)  # a mount point stays

    def act(self) -> None:
        """In a child: what fails is tried again without waiting."""
        transfer.PAUSE = 0.001
        self.job.act(self.place)

    def counted(self) -> str:
        layer = Layer(self.place, sys.maxsize, FAULTS["crash"])
        self.act()
        return json.dumps(layer.kinds)

    def broken(self, nth: int, fault: Fault) -> None:
        Layer(self.place, nth, fault)
        self.act()

    def again(self, fault: Fault) -> None:
        if fault.lost:
            disk.boot = lambda: "another"
        self.act()

    def case(self, broken: Callable[[], object], again: Callable[[], object]) -> tuple[str, str]:
        """(how the job ended with the fault; what is wrong, "" if nothing). again: the job without it."""
        code, text = Child(broken).end()
        ended = "killed" if code < 0 else "done" if code == DONE else "refused"
        if code == FAILED:
            return "failed", text
        try:
            seen = self.job.seen(self.place)
            if not set(seen) <= {*self.before, *self.after} or (self.job.keeps and not seen):
                return ended, f"there is {seen}, neither what was there nor what is made"
            if code == DONE and seen != self.after:
                return ended, f"done, but there is {seen}"
            code, text = Child(again).end()
            if code != DONE or self.job.seen(self.place) != self.after:
                return ended, f"done again: {text}"
        except Exception:
            return ended, f"what is there cannot be read: {traceback.format_exc()}"
        return ended, ""

    def swept(self, nth: int, of: int) -> Cases:
        """Every `of`-th of all cases, from the nth on."""
        cases = [(name, at) for name, fault in FAULTS.items() for at, kind in enumerate(self.kinds) if kind in fault.on]
        for name, at in cases[nth::of]:
            self.fresh()
            fault = FAULTS[name]
            ended, trouble = self.case(lambda at=at, f=fault: self.broken(at, f), lambda f=fault: self.again(f))
            yield f"{name} at operation {at} ({self.kinds[at]})", f"{name}, {ended}", trouble

    def full(self) -> Cases:
        """On a disk of its own with ever more room, until there is enough."""
        for room in range(0, 1 << 24, 3 * PAGE):
            ended, trouble = eval(done(lambda room=room: self.with_room(room)))
            yield f"{room} bytes of room", f"full disk, {ended}", trouble
            if ended == "done":
                return

    def with_room(self, room: int) -> tuple[str, str]:
        small(self.place, LARGE)
        self.fresh()
        found = os.statvfs(self.place)
        used = (found.f_blocks - found.f_bfree) * found.f_frsize

        def broken() -> None:
            mount("tmpfs", self.place, f"size={used + room}", MS_REMOUNT)
            try:
                self.act()
            finally:
                mount("tmpfs", self.place, f"size={LARGE}", MS_REMOUNT)

        return self.case(broken, self.act)

    def gone(self) -> Cases:
        """Each look at the folder on Drive is errno 107."""

        def broken() -> None:
            serverless(self.place / self.job.far)
            self.act()

        self.fresh()
        ended, trouble = self.case(broken, self.act)
        yield self.job.far, f"mount gone, {ended}", trouble


# -- disks that fail by themselves

Cases = Iterator[tuple[str, str, str]]  # of each: where, how it ended, what is wrong
PAGE, LARGE = 4096, 1 << 30
MS_REMOUNT, CLONE_NEWNS, CLONE_NEWUSER = 0x20, 0x20000, 0x10000000


def apart() -> None:
    """From now on, only this process and its children see what they mount. Raises OSError where that is forbidden."""
    ids = {"uid": os.getuid(), "gid": os.getgid()}
    system("unshare", CLONE_NEWUSER | CLONE_NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    for name, number in ids.items():
        Path(f"/proc/self/{name}_map").write_text(f"0 {number} 1")


def mount(form: str, place: Path, options: str, flags: int = 0) -> None:
    """Mount a file system; `apart` comes first. Raises OSError where that is forbidden."""
    system("mount", form.encode(), os.fsencode(place), form.encode(), flags, options.encode())


def system(name: str, *args: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        raise OSError(code := ctypes.get_errno(), f"{name}: {os.strerror(code)}")


def serverless(place: Path) -> None:
    """Mount a file system whose server is gone, as Drive's may be."""
    apart()
    server = os.open("/dev/fuse", os.O_RDWR)  # which belongs to who opened it
    mount("fuse", place, f"fd={server},rootmode=40000,user_id=0,group_id=0")
    os.close(server)


def small(place: Path, size: int) -> None:
    apart()
    mount("tmpfs", place, f"size={size}")


def forbidden(how: str, root: Path) -> str:
    """Why such a disk cannot be had here; "" where it can."""
    root.mkdir(parents=True)
    code, text = Child(lambda: serverless(root) if how == "gone" else small(root, PAGE)).end()
    return "" if code == DONE else text.strip().splitlines()[-1]


def swept(name: str, root: Path, nth: int = 0, of: int = 1, how: str = "") -> tuple[Counter[str], list[str]]:
    """(cases by fault and end, what went wrong) of one job: every `of`-th from the nth on. how: `full`, `gone`, or each
    operation."""
    if how and (why := forbidden(how, root / "mount")):
        return Counter({f"skipped: {why}": 1}), []
    place, totals, wrong = Place(JOBS[name], root), Counter(), []
    for where, ended, trouble in getattr(place, how)() if how else place.swept(nth, of):
        totals[ended] += 1
        wrong += [f"{name}, {where}: {trouble}"] if trouble else []
    with contextlib.suppress(OSError):
        shutil.rmtree(root)
    return totals, wrong
