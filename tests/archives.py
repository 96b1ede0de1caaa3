"""Archives made in memory, and a disk that fails, for the tests of staging, archives and packs."""

import bz2
import errno
import gzip
import io
import lzma
import os
import signal
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from nbtools import disk, errors

PACKERS = {"tar": bytes, "tar.gz": gzip.compress, "tar.xz": lzma.compress, "tar.bz2": bz2.compress}
FORMS = (*PACKERS, "zip")
OPERATIONS = ("create", "append", "read", "write", "sync", "sync_folder", "rename", "remove", "link", "make_folder")
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


def fault_at(patch: pytest.MonkeyPatch, nth: int, fault: Callable[..., Any]) -> list[str]:
    """Make each operation on the disk from the nth on `fault(name, operation, arguments)` → the names as they come."""
    calls: list[str] = []

    def faulty(name: str, real: Callable[..., Any]):
        def operation(*args, **more):
            calls.append(name)
            return fault(name, real, args) if len(calls) > nth else real(*args, **more)

        return operation

    for name in OPERATIONS:
        patch.setattr(disk, name, faulty(name, getattr(disk, name)))
    return calls


def full(name: str, real: Callable[..., Any], args: tuple) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def kill(name: str, real: Callable[..., Any], args: tuple) -> None:
    """A write is cut in its midst: half of the bytes are there."""
    if name == "write":
        real(args[0], args[1][: len(args[1]) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def forked(job: Callable[..., Any], *args) -> BaseProcess:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        process = get_context("fork").Process(target=job, args=args)
        process.start()
    return process


def ended_at(nth: int, fault: Callable[..., Any], job: Callable[..., Any], *args) -> int | None:
    """How a process ends that does the job with a fault from its nth operation on the disk on: 0: the job was done
    before; 1: by an error of nbtools; -9: killed."""

    def run() -> None:
        fault_at(pytest.MonkeyPatch(), nth, fault)
        try:
            job(*args)
        except errors.NbtoolsError:
            os._exit(1)

    process = forked(run)
    process.join()
    return process.exitcode
