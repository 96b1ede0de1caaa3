"""Archives made in memory, for the tests of staging, archives and packs."""

import errno
import gzip
import io
import lzma
import os
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

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
    return zip_bytes(*files.items()) if form == "zip" else PACKERS[form](tar_bytes(files))


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def put(path: Path, data: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def away(code: int = errno.ENOTCONN):
    raise OSError(code, os.strerror(code))


def forked(job: Callable[..., Any], *args) -> BaseProcess:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        process = get_context("fork").Process(target=job, args=args)
        process.start()
    return process
