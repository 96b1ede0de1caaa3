"""Snapshots of a folder's files on a second disk, usually Drive, where nothing is written again under a name that it
had: what is rewritten or appended to there may never arrive (colabtools#287, #2607).

    history.1f2e3d4c5b6a.csv          a part of history.csv, named by its SHA-256
    history.0a9b8c7d6e5f.csv          the next part: a file that only grew gets one more
    snapshots/00000012-9a8b….json     the 12th snapshot: file → its parts (name, bytes, SHA-256); written last

A snapshot of which something is missing or damaged does not count; the KEEP newest are there.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nbtools import disk
from nbtools.errors import ArchiveError

KEEP = 3
SHORT = 12  # digits of a SHA-256 in a name
SNAPSHOTS = "snapshots"
MANIFEST = re.compile(r"(\d{8,})-([0-9a-f]{12})\.json")
UNFINISHED = r"(\.\d+-\d+\.part)"  # at the end of what a crash left
DIGEST = r"(?=\d*[a-f]|.+\.part)[0-9a-f]{12}"  # twelve digits from 0 to 9 may be a user's date
PART = re.compile(rf"(.+)\.{DIGEST}(\.[^.]+)?{UNFINISHED}?")

Parts = list[tuple[str, int, str]]  # name, bytes, SHA-256


def manifests(folder: Path) -> list[Path]:
    """The snapshots in a folder, newest first. Raises OSError where that is unknown."""
    try:
        found = [path for path in (folder / SNAPSHOTS).iterdir() if MANIFEST.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=number, reverse=True)


def number(manifest: Path) -> int:
    return int(manifest.name.partition("-")[0])


def read_snapshot(manifest: Path) -> dict[str, Any]:
    """What a snapshot has: `files`, and what `take` was told about it. Raises ArchiveError if it is damaged."""
    data = manifest.read_bytes()
    if hashlib.sha256(data).hexdigest()[:SHORT] != manifest.stem.partition("-")[2]:
        raise ArchiveError(f"{manifest}: is not what was written: its SHA-256 differs from its name.")
    found = json.loads(data)
    for name in (*found["files"], *(part[0] for parts in found["files"].values() for part in parts)):
        if name in ("", ".", "..") or "/" in name:
            raise ArchiveError(f"{manifest}: {name!r} is not the name of a file in its folder.")
    return found


def newest(folder: Path) -> dict[str, Any]:
    """The newest snapshot that can be read; {} where nothing is kept. Raises ArchiveError if all are damaged."""
    trouble = None
    for manifest in manifests(folder):
        try:
            return read_snapshot(manifest)
        except ArchiveError as error:
            trouble = trouble or error
    if trouble is not None:
        raise trouble
    return {}


def join(parts: Iterable[Path], target: Path) -> None:
    """Write the parts of a file one after the other."""
    with disk.create(target) as file:
        for part in parts:
            disk.write(file, part.read_bytes())


class Damaged(Exception):
    """A file that is to be kept is no longer what was written."""


class Snapshots:
    """Takes snapshots in a folder, in which the user's own files stay. files: file → its parts there, as far as they
    are known to be intact. own: the names of files whose parts are deleted even where no snapshot names them."""

    def __init__(self, folder: Path, own: re.Pattern[str]):
        self.folder, self.own = folder, own
        self.files: dict[str, Parts] = {}
        self.left = False  # while it hung: what it does later would mix with a newer start's copies

    def verify(self) -> dict[str, Any]:
        """Read back the newest snapshot, of an earlier start: what is intact need not be written again."""
        try:
            found = newest(self.folder)
        except ArchiveError:
            found = {}  # the next one is a new beginning
        self.files = {
            name: list(map(tuple, parts))
            for name, parts in found.get("files", {}).items()
            if all(self.intact(file, size, digest) for file, size, digest in parts)
        }
        return found

    def intact(self, name: str, size: int, digest: str) -> bool:
        path = self.folder / name
        return disk.exists(path) and path.stat().st_size == size and disk.sha256(path) == digest

    def take(self, files: Mapping[str, Path | bytes], known: Mapping[str, str], **about: Any) -> None:
        """Store what is not there yet of some files, read back, and then the manifest that names them; delete what the
        KEEP newest snapshots do not name. known: file → the SHA-256 that it must have, where that was noted. Raises
        Damaged where it has not, and OSError, the earlier snapshots untouched."""
        disk.make_folder(self.folder / SNAPSHOTS)
        there = {path.name for path in self.folder.iterdir()}
        self.files = {name: parts for name, parts in self.files.items() if name in files}
        try:
            for name, content in files.items():
                self.files[name] = self.store(name, content, there, known.get(name, ""))
        except OSError as error:
            if error.errno in disk.FULL:
                self.prune()  # of earlier calls that failed: nothing else would make room
            raise
        if self.left:
            raise InterruptedError(f"{self.folder}: interrupted")
        data = json.dumps({"version": 1, **about, "files": self.files}, indent=1).encode()
        last = max(map(number, manifests(self.folder)), default=0)
        digest = hashlib.sha256(data).hexdigest()
        put(self.folder / SNAPSHOTS / f"{last + 1:08d}-{digest[:SHORT]}.json", data, digest)
        self.prune()

    def store(self, name: str, content: Path | bytes, there: set[str], digest: str) -> Parts:
        """The parts of a file, of which those that are not there are written: where it grew, only what was added, with
        the last parts if they are no larger, so that there are never many. digest: of the whole file, "" if unknown."""
        known = [part for part in self.files.get(name, ()) if part[0] in there]
        if digest and [part[2] for part in known] == [digest]:
            return known
        view, kept, end = memoryview(content if isinstance(content, bytes) else content.read_bytes()), [], 0
        for part in () if digest else known:
            if hashlib.sha256(view[end : end + part[1]]).hexdigest() != part[2]:
                break
            kept.append(part)
            end += part[1]
        while kept and kept[-1][1] <= len(view) - end:
            end -= kept.pop()[1]
        if not kept or end < len(view):
            digest = digest or hashlib.sha256(view[end:]).hexdigest()
            stem, dot, suffix = name.rpartition(".") if "." in name else (name, "", "")
            part = (f"{stem}.{digest[:SHORT]}{dot}{suffix}", len(view) - end, digest)
            try:
                put(self.folder / part[0], view[end:], digest)
            except OSError:
                if isinstance(content, Path) and hashlib.sha256(view[end:]).hexdigest() != digest:
                    raise Damaged(content) from None
                raise
            kept.append(part)
        return kept

    def prune(self) -> None:
        """Delete what is certainly of older snapshots, or of copies that failed; damaged manifests stay."""
        kept, names, gone = 0, set(self.files), set()
        named = {part[0] for parts in self.files.values() for part in parts}
        for manifest in manifests(self.folder):
            try:
                files = read_snapshot(manifest)["files"]
            except ArchiveError:
                continue
            kept += 1
            names |= files.keys()
            (named if kept <= KEEP else gone).update(part[0] for parts in files.values() for part in parts)
            if kept > KEEP:
                disk.remove(manifest)
        for path in self.folder.iterdir():
            found = PART.fullmatch(path.name)
            name = f"{found[1]}{found[2] or ''}" if found else ""
            ours = path.name in gone or name in names or self.own.fullmatch(name)
            if ours and path.name not in named and path.is_file() and not self.left:
                disk.remove(path)
        for path in (self.folder / SNAPSHOTS).iterdir():
            if re.fullmatch(MANIFEST.pattern + UNFINISHED, path.name):
                disk.remove(path)


def put(path: Path, data: bytes | memoryview, digest: str) -> None:
    """Write a file whose name says what is in it, unless it is there."""
    if not (disk.exists(path) and path.stat().st_size == len(data) and disk.sha256(path) == digest):
        disk.write_atomic(path, data, digest)  # which reads it back
