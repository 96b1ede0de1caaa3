"""Fetch a data set to fast local disk, completely or not at all, and only once.

A `Source` knows where it comes from; `stage` decides what to do with it and publishes the result. On disk, for a source
called `digits.tar`:

    <cache>/digits-1f3a5b7c/             appears at once, by one rename
        .stage.json                      the receipt: source, version, size, sha256
        digits/…                         the data; or digits.tar, with extract=False
    <cache>/digits-1f3a5b7c.part/        everything unfinished; the next call resumes or replaces it
    <cache>/locks/                       so that one of many processes copies and the others wait
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event

from tqdm import tqdm

from nbtools import disk
from nbtools.data import archive, cached
from nbtools.data.cached import RECEIPT
from nbtools.data.pack import MANIFEST, Pack
from nbtools.data.progress import bar, say
from nbtools.data.sources import Source, cache, listing, require_archive, source_of
from nbtools.data.transfer import patient
from nbtools.errors import ArchiveError, PackError, StageError
from nbtools.show import size as sized

PACKED = 2  # a pack's bytes for one of its source: a rule of thumb, of 0.2 to 17 measured on the tasks' demo data
SUFFIXES = r"\.(tar|tar\.gz|tgz|tar\.xz|txz|tar\.bz2|tbz2?|zip)$"
WHOLE = "\0whole"  # ends an origin that is staged as one file: it is published next to its unpacked folder


def stage(
    source: str | Path | Source,
    into: str | Path | None = None,
    *,
    extract: bool = True,
    sha256: str | None = None,
    progress: bool = True,
) -> Path:
    """A folder on local disk with the files of a source, which are copied only if necessary.

    source: a folder, an archive (tar, tar.gz, tar.xz, tar.bz2, zip), `drive:path/in/My Drive`, a Drive link, or the
    http(s) address of an archive. into: the target folder; default: $NBTOOLS_CACHE, or nbtools in the
    temporary folder. extract: False keeps an archive as one file, a plain tar or a zip, from which files are read in
    place: 50,000 images are not written one by one. sha256: the hash that the archive must have; by default that of the
    file next to it, `data.tar.sha256` as sha256sum writes it, if there is one. Errors of a mount or a connection are
    tried again. Raises StageError (also its subclass ArchiveError) or DiskError if that fails; then nothing is
    published.
    """
    sha256 = sha256.lower() if sha256 else None
    text = source.text if isinstance(source, Source) else str(source)
    place = Path(text)
    with disk.explained(f"looking at {text}", place):
        cached.touch(place.expanduser().absolute())  # it may lie in the cache, where `stage` in the terminal put it
        found = source if isinstance(source, Source) else patient(lambda: source_of(text), place)
        if sha256 is None and not found.is_folder:
            sha256 = patient(found.promised, place)
        if sha256 and found.is_folder:
            raise StageError(f"{text}: sha256 is for an archive, and this is a folder. Leave it out.")
        if into is None and found.here and is_ready(found, extract):
            if sha256:
                require_hash(found.text, disk.sha256(found.here), sha256)
            return found.here
        root = cache() if into is None else Path(into).expanduser().absolute()
        stem = re.sub(r"[^\w.]+", "-", re.sub(SUFFIXES, "", found.name, flags=re.I))[:60].strip(".-") or "data"
        origin = found.origin if extract or found.is_folder else found.origin + WHOLE
        target = named(root, stem, origin)
        version = "" if found.is_remote else patient(found.version, place)
    if ready := staged(target, version, sha256):
        cached.touch(target)
        return ready
    with disk.explained(f"staging {text}", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with lock_of(target):
            return staged(target, version, sha256) or publish(found, target, extract, sha256, progress)


def named(root: Path, stem: str, origin: str) -> Path:
    return root / f"{stem}-{hashlib.sha256(origin.encode()).hexdigest()[:8]}"


def lock_of(target: Path) -> disk.Lock:
    key = hashlib.sha256(str(target).encode()).hexdigest()[:16]
    return disk.Lock(cache() / "locks" / f"stage-{key}.lock")


def is_ready(source: Source, extract: bool) -> bool:
    """Whether what is here can be used directly: a folder, or an archive from which files are read in place."""
    return source.is_folder or (not extract and archive.kind(Path(source.here or "")) in archive.IN_PLACE)


def staged(target: Path, version: str, sha256: str | None) -> Path | None:
    """What an earlier call made from the same version of the source; "": from any."""
    try:
        receipt = json.loads((target / RECEIPT).read_text())
        data = target / receipt["folder"]
        same = version in ("", receipt["version"]) and sha256 in (None, receipt["sha256"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return data if same and data.exists() else None


def publish(source: Source, target: Path, extract: bool, sha256: str | None, progress: bool) -> Path:
    """Fetch, check, extract if requested, and publish under the final name; the caller holds the lock."""
    part, name = target.with_name(f"{target.name}.part"), target.name.rpartition("-")[0]
    version = patient(source.version, Path(source.text))
    begun = part / version
    begun.mkdir(parents=True, exist_ok=True)
    for other in part.iterdir():
        if other.name != begun.name:
            disk.remove(other)  # of another version of the source
    new, digest = begun / "new", None
    data = new / name
    if source.is_folder:
        fetch(source, data, name, progress)  # what came of it whole is kept, whatever else is damaged
    try:
        if source.is_folder:
            size = bytes_below(data)
        else:
            path = source.here or begun / "archive"
            if not source.here:
                digest = fetch(source, path, name, progress, 1 + extract)
            form, size = require_archive(path, source.text), path.stat().st_size
            with hashing(path, digest) as found:
                if sha256 or not extract:  # nothing is read of an archive that is not the expected one
                    require_hash(source.text, found.result(), sha256)
                if extract:
                    data = unpacked(path, data, progress)
                else:
                    data = one_file(path, data, form, not source.here, progress)
                digest = found.result()
            if not source.here:
                disk.remove(path)
        if (data / MANIFEST).is_file():
            verify(data, source.text)
    except ArchiveError:
        disk.remove(part)  # else the next call would resume a bad copy
        raise
    folder = data.relative_to(new).as_posix()
    receipt = {"source": source.text, "origin": source.origin, "version": version, "size": size, "sha256": digest}
    for left in new.glob(f"{RECEIPT}.*"):
        disk.remove(left)  # by a call that could not write it
    disk.write_atomic(new / RECEIPT, json.dumps({**receipt, "folder": folder}, indent=2) + "\n")
    if target.exists():  # an older version of the source: half removed under its name, it would pass for whole
        disk.remove(begun / "old")
        disk.rename(target, begun / "old")
    disk.publish_folder(new, target)
    with contextlib.suppress(OSError):  # all is published; what stays is empty folders
        disk.remove(part)
    return target / folder


def fetch(source: Source, part: Path, name: str, progress: bool, room: int = 1) -> str | None:
    """Fetch a source to a `.part` → an archive's SHA-256, if it is known. room: how many times its bytes must fit,
    including what is already there; if there is no room for a pack of them too, a message says so, since that is only
    an estimate."""
    if progress and source.hint:
        say(source.hint)
    if source.size is not None:
        cached.require_room(part, need := room * source.size + source.extra - bytes_below(part))
        left, pack = disk.free_bytes(part) - need, PACKED * source.size
        if progress and left < pack:
            say(
                f"{name}: {sized(left)} will be free once it is here, and a pack of it may need about {sized(pack)}, "
                f"by a rule of thumb (twice its size); {cached.way_out(pack)} makes room. Packing stops after "
                "the first samples if the others have no room."
            )
    with moving(source.size, f"{source.verb} {name}", progress) as shown:
        return source.fetch(part, shown.update)


def bytes_below(path: Path) -> int:
    return sum(size for size, _ in listing(path).values())


@contextlib.contextmanager
def hashing(path: Path, known: str | None) -> Iterator[Future[str]]:
    """The SHA-256 of a file, computed on a thread that ends with the block. known: what it is, where that is known."""
    ended = Event()
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(lambda: known or disk.sha256(path, ended.is_set))
        finally:
            ended.set()


def require_hash(text: str, digest: str, sha256: str | None) -> None:
    if sha256 not in (None, digest):
        raise ArchiveError(f"{text}: its SHA-256 is {digest}, not {sha256}. Copy it again, or correct the number.")


def verify(folder: Path, text: str) -> None:
    """Compare each file of a pack with the hash in its manifest: a plain tar has no checksum of its own. Once, when it
    comes to this disk. Raises ArchiveError."""
    try:
        Pack.open(folder).verify()
    except PackError as error:
        raise ArchiveError(f"{text}: the pack in it is damaged: {error}. Keep or copy it again.") from None


def unpacked(path: Path, data: Path, progress: bool) -> Path:
    """Extract an archive into `data`; return it, or the only folder in it."""
    size = archive.unpacked_size(path)
    disk.remove(data.parent)
    cached.require_room(data, size)
    data.parent.mkdir(parents=True, exist_ok=True)
    with moving(size, f"extract {data.name}", progress) as shown:
        archive.extract(path, data, shown.update)
    top = list(data.iterdir())
    return top[0] if len(top) == 1 and top[0].is_dir() else data


def one_file(path: Path, data: Path, form: str, copied: bool, progress: bool) -> Path:
    """The archive as one file from which files are read in place: a compressed tar as the plain one within it, since
    gzip, xz and bzip2 cannot be read at any place."""
    target = data.with_name(f"{data.name}.{form.partition('.')[0]}")
    disk.remove(data.parent)
    data.parent.mkdir(parents=True, exist_ok=True)
    if copied and form in archive.IN_PLACE:
        disk.rename(path, target)
    else:
        cached.require_room(target, path.stat().st_size)
        with moving(path.stat().st_size, f"unpack {data.name}", progress) as shown:
            archive.plain(path, target, shown.update)
    archive.archive_index(target)
    return target


def moving(total: int | None, doing: str, progress: bool) -> tqdm:
    """A progress bar with MB/s and time left."""
    return bar(total=total or None, desc=doing, unit="B", unit_scale=True, disable=not progress)
