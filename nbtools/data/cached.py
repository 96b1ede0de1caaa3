"""What staging and packing left in the cache. A folder's time of change is when it was last used."""

from __future__ import annotations

import contextlib
import os
import re
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from nbtools import disk, show
from nbtools.data.progress import say
from nbtools.data.sources import cache, listing
from nbtools.errors import StageError

if TYPE_CHECKING:
    import pandas as pd

RECEIPT = ".stage.json"  # no archive can give its folder this name
UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def cached(free: int | str | None = None) -> pd.DataFrame:
    """Return a row for each folder that `stage` and `pack` left in the cache, the least recently used first. The cache
    is $NBTOOLS_CACHE, or nbtools in the temporary folder.

    free: bytes, or a text such as "20 GB": delete what was used least recently until so much is free. All of it can be
    staged or packed again. Raises StageError for a size that is none, DiskError if something cannot be deleted.
    """
    import pandas as pd  # half a second, for which no other command should wait

    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?", str(free or 0).strip())
    if not match:
        raise StageError(f"free must be bytes, or a size such as 20 GB, got {free!r}")
    rows = []
    with disk.explained("looking at the cache", cache()):
        for path in sorted(folders(), key=os.path.getmtime):
            used = datetime.fromtimestamp(path.stat().st_mtime)
            size = sum(size for size, _ in listing(path).values())
            too_little = disk.free_bytes(cache()) < float(match[1]) * UNITS[match[2]]
            if too_little:
                gone = path.with_name(f"{path.name}.deleted.part")  # so that nobody reads half of it
                disk.rename(path, gone)
                disk.remove(gone)
            name = path.relative_to(cache()).as_posix()
            rows.append((name, size, f"{used:%Y-%m-%d %H:%M}", too_little))
        say(f"{show.size(disk.free_bytes(cache()))} free in {cache()}")
    return pd.DataFrame(rows, columns=["folder", "bytes", "used", "deleted"])


def folders() -> list[Path]:
    """Return what is staged, packed, or was interrupted in that."""
    staged = [path for path in cache().glob("*") if path.suffix == ".part" or (path / RECEIPT).exists()]
    return [*staged, *cache().glob("packs/*/")]


def touch(path: Path) -> None:
    """Note that the entry of the cache that a path is in, if it is in one, is used now."""
    if path.is_relative_to(cache()):
        parts = path.relative_to(cache()).parts
        with contextlib.suppress(OSError):  # it is not there yet, or may only be read
            os.utime(cache().joinpath(*parts[: 2 if parts[:1] == ("packs",) else 1]))
