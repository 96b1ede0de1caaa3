"""Fetch a data set to fast local disk, completely or not at all, and only once.

`decide` says what is to be done with a source and why, `act` does it. On disk, for a source called `digits.tar`:

    <cache>/digits-1f3a5b7c/             appears at once, by one rename
        .stage.json                      the receipt: source, version, sha256, where in here the data is
        digits/…                         the data
    <cache>/digits-1f3a5b7c.part/        everything unfinished; the next call resumes or replaces it
    <cache>/locks/                       so that one of many processes copies and the others wait
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from nbtools import disk, show
from nbtools.data import archive, fetch
from nbtools.data.drive import cache, drive_path, is_far, retry
from nbtools.data.pack import MANIFEST, Pack, touch
from nbtools.data.progress import say
from nbtools.errors import ArchiveError, PackError, StageError

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = r"\.(tar|tar\.gz|tgz|tar\.xz|txz|zip)$"
RECEIPT = ".stage.json"  # no archive can give its folder this name
UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def stage(
    source: str | Path, into: str | Path | None = None, *, sha256: str | None = None, progress: bool = True
) -> Path:
    """Return a folder on local disk with the files of a source, which are copied only if necessary.

    source: a folder, an archive (tar, tar.gz, tar.xz, zip), `drive:path/in/My Drive`, a Drive link, or the http(s)
    address of an archive. into: the target folder; default: $NBTOOLS_CACHE, or nbtools in the temporary folder.
    sha256: the hash that the archive must have. Errors of a mount or a connection are tried again. Raises StageError
    (also its subclass ArchiveError) or DiskError if that fails; then nothing is published.
    """
    with disk.explained(f"looking at {source}", Path(source)):
        job = retry(lambda: decide(str(source), into, sha256 and sha256.lower()), Path(source))
        ready = job.path if job.why == "used in place" else retry(lambda: find_staged(job), Path(source))
    if ready is None:
        lock = cache() / "locks" / f"stage-{hashlib.sha256(bytes(job.target)).hexdigest()[:16]}.lock"
        with disk.explained(f"staging {source}", job.target), disk.lock(lock):
            ready = find_staged(job) or act(job, progress)
    touch(ready)
    return ready


@dataclass(frozen=True)
class Job:
    """Tell what is to be done with a source, and why: `target` is made, unless it is used in place. path: on a disk,
    None of an address."""

    text: str
    path: Path | None
    target: Path
    sha256: str | None
    why: str

    def look(self) -> dict[str, fetch.File]:
        """Return relative name → file, "" for the only one of an archive; it may take a connection."""
        if (path := self.path) is None:
            return fetch.files_at(self.text)
        return {name: fetch.File(path / name, *facts) for name, facts in sorted(fetch.listing(path).items())}


def decide(text: str, into: str | Path | None, sha256: str | None) -> Job:
    """Return what is to be done with a source. Raises StageError, OSError."""
    if re.match("https?://", text):
        path, why, link = None, "fetched from the network", fetch.drive_address(text)
        name, origin = ("drive", link) if link else (PurePosixPath(urlsplit(text).path).name, text)
    else:
        path = Path(text).expanduser().absolute()
        if text.startswith("drive:") or not disk.exists(path):
            path = drive_path(text)  # or an error that names what is there instead
        name, origin, folder = path.name, str(path), path.is_dir()
        why = "unpacked" if not folder else "copied" if into else "used in place"
        why = "copied from a slow disk" if is_far(path) else why
        if not folder:
            with archive.explain_damage(f"{text}: "):
                archive.kind(path)
        elif sha256:
            raise StageError(f"{text}: sha256 is for an archive, and this is a folder. Leave it out.")
        elif not any(True for _ in disk.walk(path)):
            raise StageError(f"{text}: {path} holds no files. Is it the right folder?", entry="Keys, columns and paths")
    root = cache() if into is None else Path(into).expanduser().absolute()
    stem = re.sub(r"[^\w.]+", "-", re.sub(SUFFIXES, "", name, flags=re.I))[:60].strip(".-") or "data"
    target = root / f"{stem}-{hashlib.sha256(origin.encode()).hexdigest()[:8]}"
    return Job(text, path, target, sha256, why)


def version_of(files: dict[str, fetch.File]) -> str:
    """Return a text that changes whenever the content does."""
    facts = [(name, file.size, file.version) for name, file in files.items()]
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def find_staged(job: Job) -> Path | None:
    """Return what an earlier call made from the same version of the source; behind an address, from any."""
    try:
        receipt = json.loads((job.target / RECEIPT).read_text())
        data = job.target / receipt["folder"]
        current = job.path is None or version_of(job.look()) == receipt["version"]
        return data if current and job.sha256 in (None, receipt["sha256"]) and data.exists() else None
    except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError):
        return None


def act(job: Job, progress: bool) -> Path:
    """Fetch, check, unpack, and publish under the final name; the caller holds the lock."""
    target, part = job.target, job.target.with_name(f"{job.target.name}.part")
    files = retry(job.look, Path(job.text))
    version, stem = version_of(files), target.name.rpartition("-")[0]
    begun, path = part / version, job.path
    new, data = begun / "new", begun / "new" / stem
    if not begun.exists():
        disk.remove(part)  # of another version of the source
    if progress:
        say(f"{job.text}: {job.why}, to {target}")
    try:
        if set(files) != {""}:
            fetch.fetch_all(files, data, begun / "file.part", stem, progress)
        else:
            if path is None or is_far(path):
                path = begun / "archive"
                fetch.fetch_all({"archive": files[""]}, begun, begun / "file.part", stem, progress, 2)
            data = unpack(job, path, data, progress)
        if (data / MANIFEST).is_file():
            Pack.open(data).verify()  # a plain tar has no checksum of its own
    except (ArchiveError, PackError) as error:
        disk.remove(part)  # else the next call would resume a bad copy
        if isinstance(error, ArchiveError):
            raise
        raise ArchiveError(f"{job.text}: the pack in it is damaged: {error}. Keep or copy it again.") from None
    folder = data.relative_to(new).as_posix()
    receipt = {"source": job.text, "version": version, "sha256": job.sha256, "folder": folder}
    disk.write_atomic(new / RECEIPT, json.dumps(receipt, indent=2) + "\n")
    if target.exists():  # an older version of the source: half removed under its name, it would pass for whole
        disk.remove(begun / "old")
        disk.rename(target, begun / "old")
    disk.publish_folder(new, target)
    disk.remove(part)
    return target / folder


def unpack(job: Job, path: Path, data: Path, progress: bool) -> Path:
    """Check the hash of an archive, and unpack it into the new folder `data` → it, or the only folder in it."""
    if job.sha256 and (digest := disk.sha256(path)) != job.sha256:
        fix = "Copy it again, or correct the number"
        raise ArchiveError(f"{job.text}: its SHA-256 is {digest}, not {job.sha256}. {fix}.")
    disk.remove(data.parent)
    data.parent.mkdir(parents=True)
    archive.unpack(path, data, job.text, progress)
    top = list(data.iterdir())
    return top[0] if len(top) == 1 and top[0].is_dir() else data


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
    rows, wanted = [], float(match[1]) * UNITS[match[2]]
    with disk.explained("looking at the cache", cache()):
        made = [path for path in cache().glob("*") if path.suffix == ".part" or (path / RECEIPT).exists()]
        for path in sorted([*made, *cache().glob("packs/*/")], key=os.path.getmtime):
            used = f"{datetime.fromtimestamp(path.stat().st_mtime):%Y-%m-%d %H:%M}"
            size = sum(size for size, _ in fetch.listing(path).values())
            if delete := disk.free_bytes(cache()) < wanted:
                gone = path.with_name(f"{path.name}.deleted.part")  # so that nobody reads half of it
                disk.rename(path, gone)
                disk.remove(gone)
            rows.append((path.relative_to(cache()).as_posix(), size, used, delete))
        say(f"{show.size(disk.free_bytes(cache()))} free in {cache()}")
    return pd.DataFrame(rows, columns=["folder", "bytes", "used", "deleted"])
