"""What staging and packing left in the cache: listed, and deleted on request. A folder's time of change is when it was
last used."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from nbtools import disk, show
from nbtools.data.sources import cache, listing
from nbtools.errors import DiskError, StageError

PACKS = "packs"
RECEIPT = ".stage.json"  # no archive can give its folder this name
UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Entry:
    """A folder of the cache. used: when, in seconds since 1970."""

    path: Path
    bytes: int
    used: float


@dataclass(frozen=True)
class Cached(show.Table):
    """The cache's entries, the least recently used first, and those that were deleted. Shows as a table."""

    entries: tuple[Entry, ...]
    deleted: tuple[Entry, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)

    def to_dict(self) -> dict[str, object]:
        named = {"entries": self.entries, "deleted": self.deleted}
        return {name: [{**vars(one), "path": str(one.path)} for one in entries] for name, entries in named.items()}

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        now, rows = time.time(), []
        for entry in (*self.deleted, *self.entries):
            state = "deleted" if entry in self.deleted else ""
            name = os.path.relpath(entry.path, cache())
            rows.append((name, show.size(entry.bytes), f"{show.duration(now - entry.used)} ago", state))
        return ("", "size", "last used", "state"), rows

    def footer(self) -> str:
        gone = f"; {show.size(sum(entry.bytes for entry in self.deleted))} deleted" if self.deleted else ""
        return f"{show.size(self.bytes)} in {cache()}{gone}; {show.size(disk.free_bytes(cache()))} free"


def cached(free: int | str | None = None, days: float | None = None) -> Cached:
    """What `stage` and `pack` left in the cache ($NBTOOLS_CACHE, or nbtools in the temporary folder).

    free: bytes, or a text such as "20 GB": delete the least recently used until so much is free. days: delete what
    was not used for so long. All of it can be staged or packed again; what a process uses now is among the last used.
    Raises StageError for a size that is none, DiskError if something cannot be deleted.
    """
    wanted, entries, deleted = bytes_of(free), found(), []
    with disk.explained("deleting from the cache", cache()):
        for entry in entries:
            old = days is not None and time.time() - entry.used > days * 86_400
            if old or disk.free_bytes(cache()) < wanted:
                delete(entry.path)
                deleted.append(entry)
    return Cached(tuple(entry for entry in entries if entry not in deleted), tuple(deleted))


def touch(path: Path) -> None:
    """Note that the entry of the cache that a path is in, if it is in one, is used now."""
    entry = entry_of(path)
    if entry is not None:
        with contextlib.suppress(OSError):  # it is not there yet, or may only be read
            os.utime(entry)


def entry_of(path: Path) -> Path | None:
    """The folder below the cache, or below its packs, that a path is in."""
    if not path.is_relative_to(cache()):
        return None
    parts = path.relative_to(cache()).parts
    depth = 2 if parts[:1] == (PACKS,) else 1
    return cache().joinpath(*parts[:depth]) if len(parts) >= depth else None


def found() -> list[Entry]:
    """The entries, the least recently used first."""
    entries = []
    for folder in (cache(), cache() / PACKS):
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.is_dir() and (folder.name == PACKS or path.suffix == ".part" or (path / RECEIPT).exists()):
                with contextlib.suppress(FileNotFoundError):  # another process stages, packs or deletes
                    entries.append(Entry(path, sum(size for size, _ in listing(path).values()), path.stat().st_mtime))
    return sorted(entries, key=lambda entry: entry.used)


def delete(entry: Path) -> None:
    """Delete an entry. It goes under another name first: nobody finds half of it."""
    gone = entry.with_name(f"{entry.name.removesuffix('.part')}.deleted.part")
    disk.remove(gone)
    with contextlib.suppress(FileNotFoundError):
        disk.rename(entry, gone)
    disk.remove(gone)


def bytes_of(text: int | str | None) -> int:
    if not isinstance(text, str):
        return text or 0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?", text.strip())
    if not match:
        raise StageError(f"free must be bytes, or a size such as 20 GB, got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def require_room(place: Path, need: int, why: str = "") -> None:
    """Raise DiskError unless `need` bytes are free; it says how much of the cache could be deleted."""
    try:
        disk.require_space(place, need)
    except DiskError as error:
        there = sum(entry.bytes for entry in found())
        out = (
            f"{way_out(need)} deletes of the {show.size(there)} in the cache what was used least recently."
            if there
            else ""
        )
        raise DiskError(" ".join(filter(None, (str(error), why, out)))) from None


def way_out(need: int) -> str:
    return f"`python -m nbtools cache --free {show.size(need).replace(' ', '')}`"
