"""Fetch a data set to fast local disk, completely or not at all, and only once.

`decide` says what is to be done with a source and why, `act` does it. On disk, for a source called `digits.tar`:

    <cache>/digits-1f3a5b7c/             appears at once, by one rename
        .stage.json                      the receipt: source, version, size, sha256
        digits/…                         the data; or digits.tar, with extract=False
    <cache>/digits-1f3a5b7c.part/        everything unfinished; the next call resumes or replaces it
    <cache>/locks/                       so that one of many processes copies and the others wait
"""

import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from nbtools import disk
from nbtools.data import archive, cached
from nbtools.data.cached import RECEIPT
from nbtools.data.pack import MANIFEST, Pack
from nbtools.data.progress import bar, say
from nbtools.data.sources import Source, cache, listing, require_archive, source_of
from nbtools.data.transfer import fetch, patient
from nbtools.errors import ArchiveError, PackError, StageError

SUFFIXES = r"\.(tar|tar\.gz|tgz|tar\.xz|txz|tar\.bz2|tbz2?|zip)$"


def stage(
    source: str | Path,
    into: str | Path | None = None,
    *,
    extract: bool = True,
    sha256: str | None = None,
    progress: bool = True,
) -> Path:
    """Return a folder on local disk with the files of a source, which are copied only if necessary.

    source: a folder, an archive (tar, tar.gz, tar.xz, tar.bz2, zip), `drive:path/in/My Drive`, a Drive link, or the
    http(s) address of an archive. into: the target folder; default: $NBTOOLS_CACHE, or nbtools in the
    temporary folder. extract: False keeps an archive as one file, a plain tar or a zip, from which files are read in
    place: 50,000 images are not written one by one. sha256: the hash that the archive must have; by default that of the
    file next to it, `data.tar.sha256` as sha256sum writes it, if there is one. Errors of a mount or a connection are
    tried again. Raises StageError (also its subclass ArchiveError) or DiskError if that fails; then nothing is
    published.
    """
    with disk.explained(f"looking at {source}", Path(source)):
        job = patient(lambda: decide(str(source), into, extract, sha256), Path(source))
    if (ready := job.ready) is None:
        lock = cache() / "locks" / f"stage-{hashlib.sha256(bytes(job.target)).hexdigest()[:16]}.lock"
        with disk.explained(f"staging {source}", job.target), disk.Lock(lock):
            ready = staged(job) or act(job, progress)
    cached.touch(ready)
    return ready


@dataclass(frozen=True)
class Job:
    """What is to be done with a source, and why: nothing where `ready` is the result, else `target` is made."""

    source: Source
    target: Path
    extract: bool
    sha256: str | None
    why: str
    ready: Path | None = None


def decide(text: str, into: str | Path | None, extract: bool, sha256: str | None) -> Job:
    """Return what is to be done with a source. Raises StageError, OSError."""
    source = source_of(text)
    path, is_folder = source.path, source.path is not None and source.path.is_dir()
    if sha256 and is_folder:
        raise StageError(f"{text}: sha256 is for an archive, and this is a folder. Leave it out.")
    if path and not is_folder:
        sha256 = sha256 or promised(path)
    root = cache() if into is None else Path(into).expanduser().absolute()
    stem = re.sub(r"[^\w.]+", "-", re.sub(SUFFIXES, "", source.name, flags=re.I))[:60].strip(".-") or "data"
    origin = source.origin if extract or is_folder else f"{source.origin}\0whole"
    target = root / f"{stem}-{hashlib.sha256(origin.encode()).hexdigest()[:8]}"
    sha256 = sha256 and sha256.lower()
    if path is None:
        job = Job(source, target, extract, sha256, "fetched from the network")
    elif source.is_far:
        job = Job(source, target, extract, sha256, "copied from a slow disk")
    elif into or not (is_folder or (not extract and archive.kind(path) in archive.IN_PLACE)):
        job = Job(source, target, extract, sha256, "copied" if is_folder else "unpacked")
    else:
        if sha256:
            require_hash(text, path, sha256)
        return Job(source, target, extract, sha256, "used where it is", path)
    return replace(job, ready=staged(job))


def staged(job: Job) -> Path | None:
    """Return what an earlier call made from the same version of the source; behind an address, from any."""
    try:
        receipt = json.loads((job.target / RECEIPT).read_text())
        data = job.target / receipt["folder"]
        same = job.source.path is None or job.source.version == receipt["version"]
        return data if same and job.sha256 in (None, receipt["sha256"]) and data.exists() else None
    except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError):
        return None


def promised(path: Path) -> str | None:
    """Return the SHA-256 that an archive must have: what `sha256sum ARCHIVE > ARCHIVE.sha256` wrote beside it."""
    note = path.with_name(f"{path.name}.sha256")
    if not disk.exists(note):
        return None
    if match := re.match(r"([0-9a-fA-F]{64})\b", note.read_text("utf-8", "replace")):
        return match[1]
    raise StageError(f"{note}: must begin with 64 hexadecimal digits, as of sha256sum. Write it again, or delete it.")


def act(job: Job, progress: bool) -> Path:
    """Fetch, check, unpack if requested, and publish under the final name; the caller holds the lock."""
    source, target = job.source, job.target
    version = patient(lambda: source.version, Path(source.text))
    part = target.with_name(f"{target.name}.part")
    if not (begun := part / version).exists():
        disk.remove(part)  # of another version of the source
    if progress:
        say(f"{source.text}: {job.why}, to {target}")
    data = begun / "new" / target.name.rpartition("-")[0]
    try:
        if set(source.files) != {""}:
            fetch_all(source, data, begun, progress)
        else:
            path = source.path if source.path and not source.is_far else begun / "archive"
            if path != source.path:
                fetch_all(source, path, begun, progress, 1 + job.extract)
            require_archive(path, source.text)
            if job.sha256:
                require_hash(source.text, path, job.sha256)  # before anything of it is read
            data = unpacked(path, data, job.extract, progress)
        if (data / MANIFEST).is_file():
            verify(data, source.text)
    except ArchiveError as error:
        disk.remove(part)  # else the next call would resume a bad copy
        if source.text in str(error):
            raise
        raise ArchiveError(f"{source.text}: {error}") from None
    folder = data.relative_to(begun / "new").as_posix()
    publish(begun, target, {"source": source.text, "version": version, "sha256": job.sha256, "folder": folder})
    return target / folder


def publish(begun: Path, target: Path, receipt: dict[str, str | None]) -> None:
    disk.write_atomic(begun / "new" / RECEIPT, json.dumps(receipt, indent=2) + "\n")
    if target.exists():  # an older version of the source: half removed under its name, it would pass for whole
        disk.remove(begun / "old")
        disk.rename(target, begun / "old")
    disk.publish_folder(begun / "new", target)
    disk.remove(begun.parent)


def fetch_all(source: Source, place: Path, begun: Path, progress: bool, times: int = 1) -> None:
    """Fetch the files of a source below `place`, each by way of a `.part` in `begun`. times: how often their bytes must
    fit on the disk."""
    sizes = [file.size for file in source.files.values()]
    total = None if None in sizes else sum(filter(None, sizes))
    cached.require_room(begun, times * (total or 0) - sum(size for size, _ in listing(begun).values()))
    with moving(total, f"copy {source.name}", progress) as shown:
        for name, file in source.files.items():
            if (target := place / name).exists():
                shown.update(file.size or 0)
                continue
            part = begun / f"{hashlib.sha256(name.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}.part"
            fetch(file, part, shown.update)
            if len(sizes) <= disk.MANY:  # else all at once, before they are published
                disk.sync_path(part)
            target.parent.mkdir(parents=True, exist_ok=True)
            disk.rename(part, target)


def require_hash(text: str, path: Path, sha256: str) -> None:
    if (digest := disk.sha256(path)) != sha256:
        raise ArchiveError(f"{text}: its SHA-256 is {digest}, not {sha256}. Copy it again, or correct the number.")


def unpacked(path: Path, data: Path, extract: bool, progress: bool) -> Path:
    """Extract an archive into the new folder `data`; return it, or the only folder in it. extract: False makes it one
    file from which files are read in place. A compressed tar becomes the plain one within it first."""
    disk.remove(data.parent)
    data.parent.mkdir(parents=True)
    form, whole = str(archive.kind(path)), path
    if not (extract and form in archive.IN_PLACE):
        whole = data.with_name(f"{data.name}.{form.partition('.')[0]}")
        cached.require_room(data, size := path.stat().st_size)
        with moving(size, f"unpack {path.name}", progress) as shown:
            archive.plain(path, whole, shown.update)
    size = sum(place.size for place in archive.archive_index(whole).files.values())
    if not extract:
        return whole
    cached.require_room(data, size)
    with moving(size, f"unpack {data.name}", progress) as shown:
        archive.extract(whole, data, shown.update)
    if whole != path:
        disk.remove(whole)
    top = list(data.iterdir())
    return top[0] if len(top) == 1 and top[0].is_dir() else data


def moving(total: int | None, doing: str, progress: bool) -> tqdm:
    """Return a progress bar with MB/s and time left."""
    return bar(total=total, desc=doing, unit="B", unit_scale=True, disable=not progress)


def verify(folder: Path, text: str) -> None:
    """Compare each file of a pack with the hash in its manifest: a plain tar has no checksum of its own."""
    try:
        Pack.open(folder).verify()
    except PackError as error:
        raise ArchiveError(f"{text}: the pack in it is damaged: {error}. Keep or copy it again.") from None
