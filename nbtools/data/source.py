"""Look at a source of data and decide what `stage` does with it. Nothing here copies, mounts or downloads."""

import difflib
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nbtools import disk
from nbtools.data import entries, fetch
from nbtools.errors import ArchiveError, StageError

COLAB_MOUNT = Path("/content/drive")
SUFFIXES = r"\.(tar|tar\.gz|tgz|tar\.xz|txz|tar\.bz2|tbz2?|zip)$"

IN_PLACE = ("tar", "zip")  # files can be read from these where they lie
WHOLE = "\0whole"  # part of an origin that may be staged as one file: it is published beside its unpacked folder


@dataclass(frozen=True)
class Decision:
    """What `stage` does with a source, and why."""

    how: str  # use · folder · archive · copied archive · url · drive file · drive folder
    why: str
    source: str  # as the user wrote it
    origin: str  # a path, an address, or Drive's id
    target: Path  # what appears at once when all is done
    version: str = ""  # of the origin; of an address it is known only after asking
    size: int = 0  # bytes of an archive at hand
    mtime: float = 0.0

    @property
    def name(self) -> str:
        """Of the folder with the data, below `target`."""
        return self.target.name.rpartition("-")[0]


def decide(
    source: str, path: Path | None, root: Path, use: bool = True, extract: Callable[[Path], bool] | None = None
) -> Decision:
    """Choose what to do with a source that is at `path`, or with an address; raises StageError for nothing usable.

    root: below which it is to be put. use: whether what is on local disk may be used as it is. extract: whether an
    archive is to be unpacked; None unpacks each.
    """
    if path is None:
        if link := fetch.drive_link(source):
            kind, name = link
            target = _target(root, f"drive-{name[:8]}", name)
            if kind == "file" and extract:
                target = _target(root, f"drive-{name[:8]}", f"{name}{WHOLE}")
            return Decision(f"drive {kind}", "a Drive link is downloaded", source, name, target)
        target = _target(root, PurePosixPath(source.split("?")[0]).name, f"{source}{WHOLE if extract else ''}")
        return Decision("url", "an address is downloaded", source, source, target)
    target, is_far = _target(root, path.name, str(path)), _is_far(path) and not path.is_relative_to(root)
    if path.is_dir():
        if not any(True for _ in disk.walk(path)):
            raise StageError(f"{source}: {path} holds no files. Is it the right folder?")
        if use and not is_far:
            return Decision("use", "a folder on local disk is used as it is", source, str(path), path)
        why = "it is not on local disk" if is_far else "a copy was asked for"
        version = hashlib.sha256(repr(sorted(listing(path).items())).encode("utf-8", "surrogateescape"))
        return Decision("folder", why, source, str(path), target, version.hexdigest()[:16])
    form = require_archive(path, source)
    if extract and (is_far or not extract(path)):
        if use and not is_far and form in IN_PLACE:
            return Decision("use", "files are read from a plain tar or a zip on local disk", source, str(path), path)
        target = _target(root, path.name, f"{path}{WHOLE}")
    how, why = ("copied archive", "one big read is the fast way") if is_far else ("archive", "it is on local disk")
    seen = path.stat()
    version = f"{seen.st_size}-{seen.st_mtime_ns}"
    return Decision(how, why, source, str(path), target, version, seen.st_size, seen.st_mtime)


def _target(root: Path, name: str, origin: str) -> Path:
    stem = re.sub(r"[^\w.]+", "-", re.sub(SUFFIXES, "", name, flags=re.I))[:60].strip(".-") or "data"
    return root / f"{stem}-{hashlib.sha256(origin.encode()).hexdigest()[:8]}"


def _is_far(path: Path) -> bool:
    """Whether a path lies on Drive, or what stands for it, or on another slow mount; a link lies where it leads to, and
    so does a folder with one."""
    roots = [COLAB_MOUNT, *([Path(folder)] if (folder := os.environ.get("NBTOOLS_DRIVE")) else [])]
    roots = [root.resolve() for root in roots]
    return any(any(map(real.is_relative_to, roots)) or disk.is_slow(real) for real in _places(path))


def _places(path: Path) -> Iterator[Path]:
    """Where a path really lies, then the folders that links below it lead to, each once."""
    yield path.resolve()
    seen = set()
    for base, folders, names in os.walk(path):
        for link in (link for name in (*folders, *names) if os.path.islink(link := os.path.join(base, name))):
            real = Path(os.path.realpath(link))
            place = real if real.is_dir() else real.parent
            if place not in seen:
                seen.add(place)
                yield place


def missing(source: str, path: Path) -> StageError:
    """Say what was looked for, and what is there under a similar name."""
    parent = path.parent
    while not parent.is_dir():
        parent = parent.parent
    names = sorted(entry.name for entry in parent.iterdir())
    wanted = path.relative_to(parent).parts[0]
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5) or names[:5]
    there = f"{parent} has {', '.join(near)}" if near else f"{parent} is empty"
    return StageError(f"{source}: there is no {path}. {there}.")


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Relative path → (size, mtime in ns) of the files below a folder."""
    seen = {os.path.relpath(item.path, folder): item.stat() for item in disk.walk(folder)} if folder.is_dir() else {}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in seen.items()}


def require_archive(path: Path, source: str) -> str:
    """The kind of an archive. Raises ArchiveError for a file that is none by its first bytes, with what a web page in
    its place says."""
    form = entries.kind(path)
    if form is None:
        with open(path, "rb") as file:
            head = disk.read(file, 100_000)
        if re.match(rb"(?i)\s*(\xef\xbb\xbf)?\s*(<!doctype html|<html|<head)", head):
            raise ArchiveError(f"{source}: {fetch.complaint(head.decode('utf-8', 'replace'))}")
        raise ArchiveError(
            f"{source}: not an archive: it begins with {head[:16]!r}. Give a folder, tar (plain, gz, xz, bz2) or zip."
        )
    return form
