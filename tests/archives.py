"""Archives made in memory, and a disk that fails, for the tests of staging, archives and packs."""

import errno
import gzip
import io
import itertools
import lzma
import os
import signal
import stat
import sys
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from nbtools import errors

PACKERS = {"tar": bytes, "tar.gz": gzip.compress, "tar.xz": lzma.compress}
FORMS = (*PACKERS, "zip")
Members = dict[str, bytes] | list[tuple[str, bytes] | tarfile.TarInfo]


def tar_bytes(members: Members) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in members.items() if isinstance(members, dict) else members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member, io.BytesIO(bytes(member.size)))
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return buffer.getvalue()


def zip_bytes(*members: tuple[str | zipfile.ZipInfo, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        for name, content in members:
            file.writestr(name, content)
    return buffer.getvalue()


def archived(files: dict[str, bytes], form: str) -> bytes:
    """The same files in any of the formats."""
    return zip_bytes(*files.items()) if form == "zip" else PACKERS[form](tar_bytes(files))


def tree(folder: Path) -> dict[str, bytes]:
    """Relative path → content of the files below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def put(path: Path, data: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def forked(job: Callable[..., Any], *args) -> BaseProcess:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        process = get_context("fork").Process(target=job, args=args)
        process.start()
    return process


CHANGES = ("os.mkdir", "os.rename", "os.symlink", "os.truncate", "os.remove", "os.rmdir")
REMOVALS = ("os.remove", "os.rmdir")  # which a full disk allows


def failing(nth: int, fault: Callable[[], None]) -> None:
    """From the nth operation on that changes the disk below the folder for temporary files, `fault` in its place, for
    the rest of this process. Of a file whose sync is cut short, half is lost."""
    count, root, sync = itertools.count(), tempfile.gettempdir(), os.fsync

    def audit(event: str, found: tuple[Any, ...]) -> None:
        writes = event == "open" and found[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if not (writes or event in CHANGES) or not isinstance(found[0], str | os.PathLike):
            return
        path = os.fspath(found[0])
        below = path.startswith(root) or not path.startswith("/")  # rmtree names files as seen from their folder
        if below and next(count) >= nth and (fault is kill or event not in REMOVALS):
            fault()

    def fsync(descriptor: Any) -> None:
        if next(count) >= nth:
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            if fault is kill and stat.S_ISREG(os.fstat(number).st_mode) and os.fstat(number).st_size:
                os.truncate(f"/proc/self/fd/{number}", os.fstat(number).st_size // 2)
            fault()
        sync(descriptor)

    os.fsync = fsync
    sys.addaudithook(audit)


def ended_at(nth: int, fault: Callable[[], None], job: Callable[..., Any], *args) -> int | None:
    """How a process ends that does the job with a fault from its nth operation on the disk on: 0: the job was done
    before; 1: by an error of nbtools; -9: killed."""

    def run() -> None:
        failing(nth, fault)
        try:
            job(*args)
        except errors.NbtoolsError:
            os._exit(1)

    process = forked(run)
    process.join()
    return process.exitcode
