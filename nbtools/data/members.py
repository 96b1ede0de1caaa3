"""The files of a plain tar or a zip, read where they lie: nothing is unpacked, so 50,000 images stay one file on disk.

No handle is held between two calls: threads and forked processes cannot move each other's place in a file.
"""

import contextlib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any

from nbtools import disk
from nbtools.data.entries import OPENERS, Forward, Names, budget, in_tar, in_zip, kind, pour, refusals, require_size
from nbtools.errors import ArchiveError

LARGEST = 1 << 28  # bytes of a member that is read into memory; a scanned page has 3 MB


@dataclass(frozen=True, slots=True)
class Member:
    """Where a file of an archive has its bytes. method and crc: of a zip; a tar has neither."""

    start: int
    packed: int
    size: int
    method: int | None = None
    crc: int = 0


@dataclass(frozen=True)
class Index:
    """All files of an archive. top: the only folder that holds them all, "" where there is none."""

    files: dict[str, Member]
    top: str


def index(path: Path) -> Index:
    """Where each file of a plain tar or a zip lies; found once, as long as the archive does not change.

    Raises ArchiveError, with file and entry, for all that `archive.extract` would refuse.
    """
    seen = path.stat()
    return _index(path, seen.st_size, seen.st_mtime_ns)


def first(path: Path, count: int) -> list[str]:
    """The names of the first files, of a tar without reading on."""
    names = Names()
    with refusals(path, lambda: names.entry):
        return [name for name, _ in islice(_entries(path, names), count)]


def read(path: Path, name: str) -> bytes:
    """A file of an archive, whole; may be called by many threads and processes at once.

    Raises ArchiveError, with archive and entry, where it is damaged, absent, or larger than fits the archive.
    """
    with _opened(path, name) as (content, member):
        most = min(LARGEST, budget(member.packed))
        if member.size > most:
            raise ArchiveError(
                f"has {disk.human(member.size)}, and at most {disk.human(most)} of {disk.human(member.packed)} are "
                "read at once. Unpack the archive, and give the folder"
            )
        data = disk.read(content, member.size)
        require_size(len(data), member.size)
        return data


def copy(path: Path, name: str, file: FileIO) -> None:
    """Write a file of an archive to another, piece by piece; raises ArchiveError as `read` does."""
    with _opened(path, name) as (content, member):
        pour(content, file, member.size)


@lru_cache(maxsize=32)
def _index(path: Path, size: int, mtime: int) -> Index:
    names = Names()
    with refusals(path, lambda: names.entry):
        if kind(path) not in ("tar", "zip"):
            raise ArchiveError("has no files that can be read in place: it is no plain tar, and no zip")
        files = dict(_entries(path, names))
        if not files:
            raise ArchiveError("holds no files")
    tops = {parts[0] for parts in names.spelled.values()}
    return Index(files, tops.pop() if len(tops) == 1 and not tops & files.keys() else "")


def _entries(path: Path, names: Names) -> Iterator[tuple[str, Member]]:
    """The files of any archive in order; of a compressed tar, they lie where the tar within it has them."""
    form, limit = kind(path), budget(path.stat().st_size)
    with open(path, "rb") as raw:
        if form == "zip":
            with zipfile.ZipFile(raw) as reader:
                for parts, info, start in in_zip(raw, reader, names, limit):
                    if parts:
                        place = Member(start, info.compress_size, info.file_size, info.compress_type, info.CRC)
                        yield "/".join(parts), place
        elif form:
            with OPENERS[form](raw) as file:
                for parts, _, member in in_tar(Forward(raw, file, limit, lambda count: None), names):
                    yield "/".join(parts), Member(member.offset_data, member.size, member.size)


@contextlib.contextmanager
def _opened(path: Path, name: str) -> Iterator[tuple[Any, Member]]:
    with refusals(path, lambda: name):
        member = index(path).files.get(name)
        if member is None:
            raise ArchiveError("is not in it")
        with open(path, "rb", buffering=0) as file:
            file.seek(member.start)
            yield (file if member.method is None else _inflated(file, name, member)), member


def _inflated(file: FileIO, name: str, member: Member) -> zipfile.ZipExtFile:
    """An entry's bytes, no more of them than its header says, compared with its CRC at the end."""
    info = zipfile.ZipInfo(name)
    info.compress_type, info.compress_size = member.method or 0, member.packed
    info.file_size, info.CRC = member.size, member.crc
    return zipfile.ZipExtFile(file, "r", info)
