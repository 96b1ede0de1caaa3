"""Write, replace and lock files. Unfinished ones are named `*.part`: a file without `.part` is complete."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from nbtools.errors import DiskError, NbtoolsError
from nbtools.show import size

VERSION = "0.3.0"  # of the package, which packs and runs record
PIECE = 1 << 18  # bytes that are unpacked at once: they stay in the processor's cache
MOUNTS = Path("/proc/self/mounts")  # Linux


def sync_path(path: Path) -> None:
    """Make the content of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):  # as of folders on Drive
            raise
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Give a file or folder another name, durably; it replaces a file, or an empty folder."""
    os.replace(source, target)
    sync_path(target.parent)


def publish_folder(part: Path, target: Path) -> None:
    """Give a finished folder its name, once all that is in it is durable; `target` is absent or an empty folder."""
    os.sync()  # an fsync for each of 50,000 images would take minutes
    rename(part, target)


def write_atomic(path: Path, data: bytes | memoryview | str, digest: str = "") -> Path:
    """Replace the content of a file: a reader, or a crash, finds the old or the new one, never a mixture. The new one
    gets the name once it reads back as written. digest: its SHA-256, if known."""
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    data = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        part.write_bytes(data)
        sync_path(part)
        if sha256(part) != (digest or hashlib.sha256(data).hexdigest()):
            raise OSError(errno.EIO, "reads back differently from what was written", os.fspath(path))
        rename(part, path)
    except OSError:
        with suppress(OSError):  # the disk that failed may refuse this too: the first error counts
            part.unlink(missing_ok=True)
        raise
    return path


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def from_json(data: str | bytes) -> dict[str, Any]:
    """Return a JSON object; raise ValueError for anything else."""
    if not isinstance(values := json.loads(data), dict):
        raise ValueError("not a JSON object")
    return values


def exists(path: Path) -> bool:
    """Return whether something is there; raise OSError where that is unknown, unlike Path.exists() of Python 3.14."""
    with suppress(FileNotFoundError):
        return bool(path.stat())
    return False


def walk(folder: Path | str, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[os.DirEntry[str]]:
    """Yield what is below a folder and no folder itself, also through links to folders, but never in a circle."""
    stat = os.stat(folder)
    if (here := (stat.st_dev, stat.st_ino)) not in above:
        for entry in list(os.scandir(folder)):
            if entry.is_dir():
                yield from walk(entry.path, above | {here})
            else:
                yield entry


def sha256(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_bytes(path: Path) -> int:
    """Return the bytes free on the disk that holds `path`, which need not exist yet."""
    path = Path(path).absolute()
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


def require_space(path: Path, need: int) -> None:
    if need > (free := free_bytes(path)):
        rule = f"{path}: needs {size(need)}, but only {size(free)} is free there"
        raise DiskError(f"{rule}. Free some space, or choose another disk.")


def mounts() -> dict[str, str]:
    lines = [line.split()[1:3] for line in MOUNTS.read_text().splitlines()] if MOUNTS.exists() else []
    return {point.replace(r"\040", " "): kind for point, kind in lines}  # the latest at each point


def is_slow(path: Path) -> bool:
    kinds = mounts()
    kind = kinds[max(filter(path.resolve().is_relative_to, kinds), key=len)] if kinds else ""
    return kind.startswith(("fuse.", "nfs", "cifs", "smb")) and "overlayfs" not in kind  # the root of a container


def is_away(error: BaseException) -> bool:
    """Return whether an error means that a disk stopped responding, as Drive after a while: the file may be whole."""
    return isinstance(error, OSError) and error.errno in (errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT)


@contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError inside into a DiskError: what was being done, where, why it failed, what to do next."""
    try:
        yield
    except OSError as error:
        reason, fix = error.strerror or str(error), "Choose another folder or disk, or try again."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = f"the disk is full ({size(free_bytes(path))} free)"
            fix = "Free some space, or choose another disk."
        entry = "Drive errors 5 and 107" if is_away(error) else ""
        raise DiskError(f"{doing}: {error.filename or path}: {reason}. {fix}", entry=entry) from error


@contextmanager
def lock(path: Path, busy: NbtoolsError | None = None, wait: Callable[[], object] = bool) -> Iterator[None]:
    """Let one process or thread in at a time; others call `wait` and wait, or raise `busy`. The system lets go when the
    owner dies. The file stays, on a local disk: deleting it would let two owners in."""
    with explained("taking a lock", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("a")
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if busy:
                raise busy from None
            wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        HELD.add(file)
        try:
            yield
        finally:
            HELD.discard(file)
            fcntl.flock(file, fcntl.LOCK_UN)  # at once: a new fork has not closed its own yet


HELD: set[IO[Any]] = set()
os.register_at_fork(after_in_child=lambda: [file.close() for file in HELD])  # workers outlive a killed owner
