"""The files of a source that was decided on, brought to a place on local disk: copied or downloaded, checked, unpacked.

What is unfinished stays where the next call resumes it; `stage` gives the whole its name.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

from nbtools import disk
from nbtools.data import archive, entries, fetch, members
from nbtools.data.progress import bar
from nbtools.data.source import IN_PLACE, Decision, listing, require_archive
from nbtools.errors import ArchiveError, StageError
from nbtools.table import plural

MANY = 1000  # files: Drive gives about 50 kB/s on small ones


def bring(
    decision: Decision,
    remote: fetch.Remote | None,
    data: Path,
    extract: Callable[[Path], bool] | None,
    sha256: str | None,
    progress: bool,
) -> tuple[Path, int, str | None]:
    """Put the files of a source into `data` → (the folder or archive that holds them, bytes of the source, SHA-256)."""
    if decision.how == "folder":
        return data, _copy_folder(decision, data, progress), None
    if decision.how == "drive folder":
        return data, _download_folder(decision, data, progress), None
    path = _fetch_archive(decision, remote, data.parent.with_name("archive"), extract is None, progress)
    size, digest = path.stat().st_size, checked(path, decision.source, sha256)
    whole, copied = extract is not None and not extract(path), decision.how != "archive"
    brought = _whole(path, data, copied, progress) if whole else _extract(path, data, progress)
    if copied:
        disk.remove(path)
    return brought, size, digest


def _copy_folder(decision: Decision, data: Path, progress: bool) -> int:
    origin = Path(decision.origin)
    files = sorted(listing(origin).items())
    total = sum(size for _, (size, _) in files)
    if progress and len(files) > MANY:
        tqdm.write(
            f"{origin}: {plural(len(files), 'file')}, which is slow there. One tar of them copies many times faster."
        )
    disk.require_space(data, total - sum(size for size, _ in listing(data).values()))
    with _bar(total, f"copy {decision.name}", progress) as moved:
        for name, (size, _) in files:
            fetch.copy(origin / name, data / name, size, moved)
    return total


def _download_folder(decision: Decision, data: Path, progress: bool) -> int:
    listed = fetch.drive_folder(decision.origin)
    files = {name: file_id for file_id, name in listed}
    if len(files) < len(listed):
        raise StageError(f"{decision.source}: two files in this Drive folder have the same name. Rename one.")
    with _bar(0, f"download {decision.name}", progress) as moved:
        for name, file_id in files.items():
            target = data.joinpath(*entries.safe_parts(name))
            if not target.exists():
                remote = fetch.drive_file(file_id)
                part = data.parent.with_name(f"{file_id}-{remote.version}")
                disk.require_space(data, remote.size or 0)
                fetch.download(remote, part, moved)
                disk.make_folder(target.parent)
                disk.rename(part, target)
    return sum(size for size, _ in listing(data).values())


def _fetch_archive(decision: Decision, remote: fetch.Remote | None, copy: Path, unpacks: bool, progress: bool) -> Path:
    """The archive on local disk: where it is, or its copy."""
    if decision.how == "archive":
        return Path(decision.origin)
    total = (remote.size or 0) if remote else decision.size
    here = copy.stat().st_size if copy.exists() else 0
    disk.require_space(copy, (2 if unpacks else 1) * total - here)  # itself, and at least as much again unpacked
    with _bar(total, f"{'download' if remote else 'copy'} {decision.name}", progress) as moved:
        if remote:
            fetch.download(remote, copy, moved)
        else:
            fetch.copy(Path(decision.origin), copy, total, moved)
    return copy


def checked(path: Path, source: str, sha256: str | None) -> str:
    """An archive's SHA-256, which must be the expected one if there is one."""
    require_archive(path, source)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 not in (None, digest):
        raise ArchiveError(
            f"{source}: its SHA-256 is {digest}, not {sha256}. Copy it again, or ask who gave the number."
        )
    return digest


def _extract(path: Path, data: Path, progress: bool) -> Path:
    """Unpack into `data`; return it, or the only folder in it."""
    size = archive.unpacked_size(path)
    disk.remove(data.parent)
    disk.require_space(data, size)
    disk.make_folder(data.parent)
    with _bar(size, f"extract {data.name}", progress) as moved:
        archive.extract(path, data, progress=moved)
    top = list(data.iterdir())
    return top[0] if len(top) == 1 and top[0].is_dir() else data


def _whole(path: Path, data: Path, copied: bool, progress: bool) -> Path:
    """The archive as one file from which members are read: a compressed tar as the plain one within it.

    Read at any place it must be, which gzip, xz and bzip2 do not allow: lines are looked at once for their texts, once
    for their pixels, by all threads, and again in each epoch of raw files.
    """
    form = require_archive(path, str(path))
    target = data.with_name(f"{data.name}.{form.partition('.')[0]}")
    disk.remove(data.parent)
    disk.make_folder(data.parent)
    if copied and form in IN_PLACE:
        disk.rename(path, target)
    else:
        disk.require_space(target, path.stat().st_size)
        with _bar(path.stat().st_size, f"unpack {data.name}", progress) as moved:
            archive.plain(path, target, moved)
    members.index(target)
    return target


@contextlib.contextmanager
def _bar(total: int, doing: str, progress: bool) -> Iterator[Callable[[int], object]]:
    """MB/s and time left, at most four times a second: more updates hang a Colab tab (lightning#2517)."""
    with bar(
        total=total or None, desc=doing, unit="B", unit_scale=True, mininterval=0.25, disable=not progress
    ) as shown:
        yield shown.update
