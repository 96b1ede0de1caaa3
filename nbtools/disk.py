"""Write, replace and lock files.

Unfinished files are named `*.part`; a file without `.part` is complete. POSIX only (flock).
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from nbtools import errors
from nbtools.table import size

PIECE = 1 << 18  # bytes that are hashed or unpacked at once: they stay in the processor's cache
WORD = 16  # bytes of what the owner of a lock does
FULL = (errno.ENOSPC, errno.EDQUOT)
AWAY = (errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT)
"""Errors of a disk that stopped responding, which say nothing about a file: Drive gives the first two after a while."""

MANY = 64  # above this many files one sync() of everything is cheaper than an fsync each (50,000 images: minutes)


def create(path: Path) -> FileIO:
    """A new unbuffered file; fails when the name is taken, even by a dangling link."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    return os.fdopen(descriptor, "wb", buffering=0)


def append(path: Path) -> FileIO:
    """An unbuffered file to append to; a new one where there is none."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    return os.fdopen(descriptor, "ab", buffering=0)


def read(file, count: int) -> bytes:
    return file.read(count)


def write(file, data: bytes | bytearray | memoryview) -> None:
    """Write all of it: an unbuffered file may take only a part, and report a full disk at the next call."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[file.write(rest) :]


def sync(file) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, where its file system can do that (Drive's FUSE cannot)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    os.replace(source, target)


def remove(path: Path) -> None:
    """Delete a file, a link or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link(path: Path, name: Path) -> None:
    """A symbolic link of this name to a path; fails when the name is taken."""
    name.symlink_to(path)


def make_folder(path: Path, fresh: bool = False) -> None:
    """Make a folder and those above it; a `fresh` one must not exist yet."""
    path.mkdir(parents=True, exist_ok=not fresh)


def publish_file(part: Path, target: Path) -> Path:
    """Give a finished file its name, atomically and durably; replaces an older one."""
    with open(part, "rb") as file:
        sync(file)
    rename(part, target)
    sync_folder(target.parent)
    return target


def sync_below(folder: Path) -> None:
    """Make a folder and all that is in it durable."""
    folders, files = [folder], []
    for path in folder.rglob("*"):
        (folders if path.is_dir() else files).append(path)
    if len(files) + len(folders) > MANY:
        os.sync()
    else:
        for path in files:
            with open(path, "rb") as file:
                sync(file)
        for path in folders:
            sync_folder(path)


def publish_folder(part: Path, target: Path, synced: bool = False) -> Path:
    """Give a finished folder its name, atomically and durably; `target` must be absent or an empty folder. synced: what
    is in it is durable already."""
    if not synced:
        sync_below(part)
    rename(part, target)
    sync_folder(target.parent)
    return target


def write_atomic(path: Path, data: bytes | memoryview | str, digest: str = "") -> Path:
    """Replace the content of a file: a reader, or a crash, finds the old or the new one, never a mixture. The new one
    gets the name once it was read back from the disk and is what was to be written. digest: its SHA-256, if known."""
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    data = data.encode() if isinstance(data, str) else data
    make_folder(path.parent)
    remove(part)
    try:
        with create(part) as file:
            write(file, data)
            sync(file)
            forget(file)
        if sha256(part) != (digest or hashlib.sha256(data).hexdigest()):
            raise OSError(errno.EIO, "reads back differently from what was written", os.fspath(path))
        rename(part, path)
        sync_folder(path.parent)
        return path
    except OSError:
        with contextlib.suppress(OSError):  # the disk that failed may refuse this too: the first error counts
            remove(part)
        raise


def forget(file) -> None:
    """Drop a synced file from memory, where the system can, so that it is next read from the disk itself."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # some file systems take no advice
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def to_json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=1)


def from_json(data: str | bytes) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for what is none."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    return values


def is_away(error: BaseException) -> bool:
    """Whether it says that a disk stopped responding, and not what a file is like."""
    return isinstance(error, OSError) and error.errno in AWAY


def exists(path: Path) -> bool:
    """Whether something is there; raises OSError where that is unknown, unlike Path.exists() from Python 3.14 on."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def free_bytes(path: Path) -> int:
    """Bytes free for this user on the disk that holds `path`, which need not exist yet."""
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


def require_space(path: Path, need: int) -> None:
    """Raise DiskError unless `need` bytes are free where `path` is, or will be."""
    free = free_bytes(path)
    if need > free:
        raise errors.DiskError(
            f"{path}: needs {size(need)}, only {size(free)} are free there. Free some space, or choose another disk."
        )


def sha256(path: Path, stopped: Callable[[], bool] = lambda: False) -> str:
    """Of a file. Raises InterruptedError once `stopped()`, which is asked again and again."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(PIECE))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(piece):
            if stopped():
                raise InterruptedError(errno.EINTR, "hashing was stopped", os.fspath(path))
            digest.update(piece[:count])
    return digest.hexdigest()


def walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Everything below a folder that is not a folder itself, also through links to folders, but never in a circle."""
    stack: list[tuple[str, frozenset[tuple[int, int]]]] = [(os.fspath(folder), frozenset())]
    while stack:
        place, above = stack.pop()
        seen = os.stat(place)
        if (seen.st_dev, seen.st_ino) in above:
            continue
        above |= {(seen.st_dev, seen.st_ino)}
        with os.scandir(place) as found:
            for item in found:
                if item.is_dir():
                    stack.append((item.path, above))
                else:
                    yield item


def is_slow(path: Path) -> bool:
    """Whether a path is on FUSE (Drive), NFS or SMB, as far as Linux reports it."""
    mounts = Path("/proc/self/mountinfo")
    if not mounts.exists():
        return False
    form = file_system(path.resolve(), mounts.read_text())
    local = ("fuseblk", "fuse.fuse-overlayfs", "fuse.overlayfs")  # NTFS, and the roots of rootless containers
    return form.startswith(("fuse", "nfs", "cifs", "smb")) and form not in local


def file_system(path: Path, mountinfo: str) -> str:
    """The type of the file system that holds a path: that of the longest, then latest mount point above it."""
    best, form = "", ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace(r"\040", " ")
        if path.is_relative_to(point) and len(point) >= len(best):
            best, form = point, right.split()[0]
    return form


@contextlib.contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError inside into a DiskError: what was being done, where, why it failed, what to do next."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            reason, advice = (
                f"the disk is full ({size(free_bytes(path))} free)",
                "Free some space, or choose another disk.",
            )
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            reason, advice = os.strerror(error.errno), "Choose another folder, or change its permissions."
        elif error.errno in (errno.ENOTDIR, errno.EEXIST):
            reason, advice = "a file is where a folder should be", "Move it, or choose another folder."
        else:
            reason, advice = error.strerror or str(error), "Try again; if it happens again, choose another disk."
            if is_away(error):
                advice = "Try again; a file that it happens to again is damaged: copy it anew, or delete it."
        entry = "Drive errors 5 and 107" if is_away(error) else ""
        raise errors.DiskError(f"{doing}: {error.filename or path}: {reason}. {advice}", entry=entry) from error


HELD: "set[Lock]" = set()  # exclusive locks that this process holds or waits for


class Lock:
    """Lets one process (and thread) in at a time; the others wait, or with wait=False raise BlockingIOError. The system
    releases it when its owner dies, though its forks, such as a loader's workers, may live on for a moment. shared:
    lets in all others that share it too, and is held until the last fork ends.

    The file stays: deleting it would let two owners in. It belongs on a local disk, never on Drive. Its owner may
    write a word of what it does into it, which others read as long as the owner has it.
    """

    def __init__(self, path: Path, wait: bool = True, shared: bool = False) -> None:
        self.path, self.wait, self.shared, self.descriptor = path, wait, shared, -1

    def __enter__(self) -> "Lock":
        make_folder(self.path.parent)
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if not self.shared:
            HELD.add(self)
        try:
            kind = fcntl.LOCK_SH if self.shared else fcntl.LOCK_EX
            fcntl.flock(self.descriptor, kind | (0 if self.wait else fcntl.LOCK_NB))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        HELD.discard(self)
        if self.descriptor >= 0:  # else this is a fork of the owner
            if not self.shared:  # at once: a fork that has just begun has not closed its own yet
                with contextlib.suppress(OSError):
                    fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            self.close()

    def close(self) -> None:
        os.close(self.descriptor)
        self.descriptor = -1

    def held(self) -> bool:
        """Whether somebody has it now; only with wait=False. Raises DiskError where that is unknown."""
        with explained("looking whether a lock is held", self.path):
            try:
                with self:
                    return False
            except BlockingIOError:
                return True

    def note(self, word: str) -> None:
        """Write a word of at most WORD bytes. On a full disk the old one stays: it is not worth a failure."""
        with contextlib.suppress(OSError):
            os.pwrite(self.descriptor, word.encode().ljust(WORD), 0)  # all at once: a reader sees no half of it

    def noted(self) -> str:
        """The word of the owner, or of its last owner; "" where that is unknown."""
        with contextlib.suppress(OSError):
            return self.path.read_bytes().decode().strip()
        return ""


def leave_to_the_parent() -> None:
    """After a fork: the locks are the parent's alone."""
    while HELD:
        HELD.pop().close()


os.register_at_fork(after_in_child=leave_to_the_parent)
