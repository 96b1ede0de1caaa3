"""What staging and packing left in the cache: listed, and deleted on request. A folder's time of change is when it was
last used."""

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from nbtools import disk, show
from nbtools.data.sources import cache, listing
from nbtools.errors import DiskError, StageError

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

    def to_dict(self) -> dict[str, object]:
        return {name: [{**vars(one), "path": str(one.path)} for one in ones] for name, ones in vars(self).items()}

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        now, rows = time.time(), []
        for entry in (*self.deleted, *self.entries):
            name, used = os.path.relpath(entry.path, cache()), f"{show.duration(now - entry.used)} ago"
            rows.append((name, show.size(entry.bytes), used, "deleted" if entry in self.deleted else ""))
        return ("", "size", "last used", "state"), rows

    def footer(self) -> str:
        there = show.size(sum(entry.bytes for entry in self.entries))
        return f"{there} in {cache()}; {show.size(disk.free_bytes(cache()))} free"


def cached(free: int | str | None = None, days: float | None = None) -> Cached:
    """List what `stage` and `pack` left in the cache ($NBTOOLS_CACHE, or nbtools in the temporary folder).

    free: bytes, or a text such as "20 GB": delete the least recently used until so much is free. days: delete what
    was not used for so long. All of it can be staged or packed again. Raises StageError for a size that is none,
    DiskError if something cannot be deleted.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?", str(free or 0).strip())
    if not match:
        raise StageError(f"free must be bytes, or a size such as 20 GB, got {free!r}")
    wanted, entries, deleted = float(match[1]) * UNITS[match[2]], in_cache(), []
    with disk.explained("deleting from the cache", cache()):
        for entry in entries:
            old = days is not None and time.time() - entry.used > days * 86_400
            if old or disk.free_bytes(cache()) < wanted:
                gone = entry.path.with_name(f"{entry.path.name.removesuffix('.part')}.deleted.part")
                disk.remove(gone)
                disk.rename(entry.path, gone)  # so that nobody reads half of it
                disk.remove(gone)
                deleted.append(entry)
    return Cached(tuple(entry for entry in entries if entry not in deleted), tuple(deleted))


def in_cache() -> list[Entry]:
    """Return the entries, the least recently used first."""
    packs, entries = cache() / "packs", []
    for path in (*cache().glob("*"), *packs.glob("*")):
        if path.is_dir() and (path.parent == packs or path.suffix == ".part" or (path / RECEIPT).exists()):
            with contextlib.suppress(FileNotFoundError):  # another process stages, packs or deletes
                entries.append(Entry(path, sum(size for size, _ in listing(path).values()), path.stat().st_mtime))
    return sorted(entries, key=lambda entry: entry.used)


def touch(path: Path) -> None:
    """Note that the entry of the cache that a path is in, if it is in one, is used now."""
    if path.is_relative_to(cache()):
        parts = path.relative_to(cache()).parts
        with contextlib.suppress(OSError):  # it is not there yet, or may only be read
            os.utime(cache().joinpath(*parts[: 2 if parts[:1] == ("packs",) else 1]))


def require_room(place: Path, need: int, why: str = "") -> None:
    """Raise DiskError unless `need` bytes are free; it says how much of the cache could be deleted."""
    try:
        disk.require_space(place, need)
    except DiskError as error:
        there = show.size(sum(entry.bytes for entry in in_cache()))
        way = f"`python -m nbtools cache --free {show.size(need).replace(' ', '')}`"
        raise DiskError(f"{error} {why} {way} deletes of the {there} in the cache what was used least.") from None
