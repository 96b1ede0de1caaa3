"""Fetch a data set to fast local disk, completely or not at all, and only once.

`decide` says what is to be done with a source and why, `act` does it. On disk, for a source called `digits.tar`:

    <cache>/digits-1f3a5b7c/             appears at once, by one rename
        .stage.json                      the receipt: source, version, sha256, where in here the data is
        digits/…                         the data
    <cache>/digits-1f3a5b7c.part/        everything unfinished; the next call resumes or replaces it
    <cache>/locks/                       so that one of many processes copies and the others wait
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from nbtools import disk, show
from nbtools.data import archive, fetch
from nbtools.data.fetch import cache, drive_path, is_far, retry
from nbtools.data.pack import Pack, is_pack, touch
from nbtools.data.progress import say
from nbtools.errors import ArchiveError, PackError, StageError

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = r"\.(tar|tar\.gz|tgz|tar\.xz|txz|zip)$"
RECEIPT = ".stage.json"  # no archive can give its folder this name


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def lock(target: Path, busy: StageError | None = None) -> AbstractContextManager[None]:
    if "drive:" in str(target):
        raise StageError(f"{target}: data must go to a local disk; copy them to Drive with pack.keep('drive:…').")
    wait = partial(say, f"Waiting for another process that makes {target}")
    return disk.lock(cache() / "locks" / f"{digest(str(target))}.lock", busy, wait)


@contextmanager
def unfinished(target: Path, version: str) -> Iterator[Path]:
    """Yield a folder for what is not finished yet, with what an interrupted call left of the same version; then give
    the folder `new` in it the target's name. Of damaged data nothing is left."""
    part = target.with_name(f"{target.name}.part")
    begun = part / version
    if not begun.exists():
        disk.remove(part)
        begun.mkdir(parents=True)
    try:
        yield begun
    except (ArchiveError, PackError):  # there is nothing to resume
        disk.remove(part)
        raise
    if target.exists():  # an older version of the source: half removed under its name, it would pass for whole
        disk.remove(begun / "old")
        disk.rename(target, begun / "old")
    disk.publish_folder(begun / "new", target)
    disk.remove(part)


def stage(
    source: str | Path, into: str | Path | None = None, *, sha256: str | None = None, progress: bool = True
) -> Path:
    """Copy the files of a source to local disk, if necessary, and return their folder.

    source: a folder, an archive (tar, tar.gz, tar.xz, zip), `drive:path/in/My Drive`, a Drive link, or the http(s)
    address of an archive. into: where its folder is made; default: $NBTOOLS_CACHE, or nbtools in the temporary folder.
    sha256: the hash that the archive must have. Mount and connection errors are retried. Raises StageError
    (also its subclass ArchiveError) or DiskError if that fails; then nothing is published.
    """
    if not isinstance(source, str | Path):
        raise StageError(f"a source must be a path, drive:… or an address, got {type(source).__name__}")
    with disk.explained(f"looking at {source}", Path(source)):
        job = retry(lambda: decide(str(source), into, sha256 and sha256.lower()), Path(source))
        ready = job.path if job.why == "used in place" else retry(lambda: find_staged(job), Path(source))
    if ready is None:
        with disk.explained(f"staging {source}", job.target), lock(job.target):
            ready = find_staged(job) or act(job, progress)
    touch(ready)
    return ready


@dataclass(frozen=True)
class Job:
    """Say what is to be done with a source, and why: `target` is made, unless it is used in place. path: on a disk."""

    text: str
    path: Path | None
    target: Path
    sha256: str | None
    why: str

    def look(self) -> tuple[dict[str, fetch.File], str]:
        """Return relative name → file, "" for an archive, and a text that changes with the content; it may connect."""
        files = fetch.files_in(self.path) if self.path else fetch.files_at(self.text)
        return files, digest(repr([(name, file.size, file.version) for name, file in files.items()]))


def decide(text: str, into: str | Path | None, sha256: str | None) -> Job:
    if re.match("https?://", text):
        path, why, link = None, "fetched from the network", fetch.drive_address(text)
        name, origin = ("drive", link) if link else (PurePosixPath(urlsplit(text).path).name, text)
    else:
        path = drive_path(text)
        name, origin, folder = path.name, str(path), path.is_dir()
        why = "unpacked" if not folder else "copied" if into else "used in place"
        why = "copied from a slow disk" if is_far(path) else why
        if not folder:
            with archive.explain_damage(f"{text}: "), archive.opened(path):
                pass
        elif sha256:
            raise StageError(f"{text}: sha256 is for an archive, and this is a folder. Leave it out.")
        elif not any(True for _ in disk.walk(path)):
            raise StageError(f"{text}: {path} holds no files. Is it the right folder?", entry="Keys, columns and paths")
    root = cache() if into is None else Path(into).expanduser().absolute()
    stem = re.sub(r"[^\w.]+", "-", re.sub(SUFFIXES, "", name, flags=re.I))[:60].strip(".-") or "data"
    return Job(text, path, root / f"{stem}-{digest(origin)[:8]}", sha256, why)


def find_staged(job: Job) -> Path | None:
    """Return what an earlier call made from the same version of the source; for an address, from any version."""
    try:
        receipt = json.loads((job.target / RECEIPT).read_text())
        data = job.target / receipt["folder"]
        current = job.path is None or job.look()[1] == receipt["version"]
        whole = data.exists() and len(fetch.files_in(data)) >= receipt["files"]  # systems delete what is old in /tmp
        return data if current and job.sha256 in (None, receipt["sha256"]) and whole else None
    except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError):
        return None


def act(job: Job, progress: bool) -> Path:
    """Fetch, check, unpack, and publish under the final name; the caller holds the lock."""
    if progress:  # first: looking at thousands of files on Drive takes minutes
        say(f"{job.text}: {job.why}, to {job.target}")
    (files, version), path = retry(job.look, Path(job.text)), job.path
    stem = job.target.name.rpartition("-")[0]
    with unfinished(job.target, version) as begun:
        data, part = begun / "new" / stem, begun / "file.part"
        if set(files) != {""}:
            fetch.fetch_all(files, data, part, stem, progress)
        else:
            if path is None or is_far(path):
                path = begun / "archive"
                fetch.fetch_all({"archive": files[""]}, begun, part, stem, progress, 2)
            if job.sha256 and (came := disk.sha256(path)) != job.sha256:
                fix = "Copy it again, or correct the hash"
                raise ArchiveError(f"{job.text}: its SHA-256 is {came}, not {job.sha256}. {fix}.")
            disk.remove(data.parent)
            data.mkdir(parents=True)
            archive.unpack(path, data, job.text, progress)
            top = list(data.iterdir())
            data = top[0] if len(top) == 1 and top[0].is_dir() else data  # the only folder in it
        if is_pack(data):
            try:
                Pack.open(data).verify()  # a plain tar has no checksum of its own
            except PackError as error:
                reason = f"{job.text}: the pack in it cannot be used: {error}"
                raise ArchiveError(f"{reason}. Copy it again, or pack the raw data and keep that.") from None
        folder = data.relative_to(begun / "new").as_posix()
        receipt = {"source": job.text, "version": version, "sha256": job.sha256, "folder": folder}
        receipt["files"] = len(fetch.files_in(data))
        disk.write_atomic(begun / "new" / RECEIPT, json.dumps(receipt, indent=2) + "\n")
    return job.target / folder


def cached(free: int | str | None = None) -> "pd.DataFrame":
    """List the folders of the cache, $NBTOOLS_CACHE or nbtools in the temporary folder, the least recently used first.

    free: bytes, or a text such as "20 GB": delete what was used least recently until that much is free. All of it can
    be staged or packed again. Raises StageError for an invalid size, DiskError if something cannot be deleted.
    """
    import pandas as pd  # half a second, for which no other command should wait

    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?", str(free or 0).strip())
    if not match:
        raise StageError(f"free must be bytes, or a size such as 20 GB, got {free!r}")
    rows, wanted = [], float(match[1]) * 1000 ** " kMGT".index(match[2] or " ")
    with disk.explained("looking at the cache", cache()):
        made = [path for path in cache().glob("*") if path.suffix == ".part" or (path / RECEIPT).exists()]
        for path in sorted([*made, *cache().glob("packs/*/")], key=os.path.getmtime):
            used = f"{datetime.fromtimestamp(path.stat().st_mtime):%Y-%m-%d %H:%M}"
            size = sum(file.size or 0 for file in fetch.files_in(path).values())
            if delete := disk.free_bytes(cache()) < wanted:
                gone = path.with_name(f"{path.name}.deleted.part")  # so that nobody reads half of it
                with suppress(StageError), lock(path.with_name(path.name.removesuffix(".part")), StageError()):
                    disk.rename(path, gone)
                    disk.remove(gone)
            rows.append((path.relative_to(cache()).as_posix(), size, used, delete and not path.exists()))
        say(f"{show.size(disk.free_bytes(cache()))} free in {cache()}")
    return pd.DataFrame(rows, columns=["folder", "bytes", "used", "deleted"])
