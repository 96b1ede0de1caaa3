"""Where data comes from: one small class per kind of source. A new kind only needs a subclass of Source.

`transfer` brings the bytes of a file, into a `.part` that the next call resumes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import ClassVar

from nbtools import disk
from nbtools.data import archive, drive
from nbtools.data.archive import Progress
from nbtools.data.transfer import Announced, bring, copy, download, probe
from nbtools.errors import ArchiveError, StageError

MANY = 1000  # files: Drive gives about 50 kB/s on small ones


class Source:
    """A place that data comes from. Subclasses with an `of` are asked in turn, the last defined first, whether a text
    is theirs.

    text: what the user wrote; origin: what distinguishes it from all other sources; name: of the archive or folder.
    here: its path on local disk, if it is there; it is then fetched only where a copy is asked for.
    size: bytes to fetch, None if the server does not announce it; extra: more that it needs for a while; hint: what to
    tell the user before fetching. All are known after version().
    """

    kinds: ClassVar[list[type[Source]]] = []
    is_folder = False  # `fetch` fills a folder; else it writes one archive
    is_remote = False  # its version takes a connection: what was staged before is used without asking
    verb = "copy"
    here: Path | None = None
    size: int | None = None
    extra = 0
    hint = ""

    def __init_subclass__(cls) -> None:
        if "of" in vars(cls):
            Source.kinds.insert(0, cls)

    def __init__(self, text: str, origin: str, name: str):
        self.text, self.origin, self.name = text, origin, name

    @classmethod
    def of(cls, text: str) -> Source | None:
        """The source that a text names, None if it is of another kind. Raises StageError for nothing usable."""
        return None

    def version(self) -> str:
        """A text that changes whenever the content does: a `.part` of another version is not resumed."""
        raise NotImplementedError

    def promised(self) -> str | None:
        """The SHA-256 that an archive must have, as a file next to it says; None if nothing does."""
        return None

    def fetch(self, part: Path, progress: Progress) -> str | None:
        """Write all of it to `part`, a file or a folder, resuming what is there → the SHA-256 of an archive; None: it
        is read again for that. Raises StageError, and keeps what came."""
        raise NotImplementedError


def source_of(text: str) -> Source:
    found = (kind.of(text) for kind in Source.kinds)
    return next(source for source in found if source is not None)  # any text is a path


class Local(Source):
    """A folder or an archive on a disk, or on a mounted Drive: `drive:path/in/My Drive`."""

    def __init__(self, text: str, path: Path):
        super().__init__(text, str(path), path.name)
        self.path, self.is_folder, self.here = path, path.is_dir(), None if is_far(path) else path
        if not self.is_folder:
            require_archive(path, text)
        elif not any(True for _ in disk.walk(path)):
            raise StageError(f"{text}: {path} holds no files. Is it the right folder?", entry="Keys, columns and paths")

    @classmethod
    def of(cls, text: str) -> Source:
        path = Path(text).expanduser().absolute()
        if text.startswith("drive:") or not disk.exists(path):
            path = drive.drive_path(text)  # or an error that names what is there instead
        return Local(text, path)

    @cached_property
    def files(self) -> list[tuple[str, tuple[int, int]]]:
        return sorted(listing(self.path).items())

    def version(self) -> str:
        self.size = sum(size for _, (size, _) in self.files)
        if len(self.files) > MANY:
            slow = f"{len(self.files):,} files, which is slow there"
            self.hint = f"{self.path}: {slow}. A single tar of them copies many times faster."
        if not self.is_folder:
            return "-".join(map(str, self.files[0][1]))
        return hashlib.sha256(repr(self.files).encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def promised(self) -> str | None:
        """What `sha256sum ARCHIVE > ARCHIVE.sha256` wrote."""
        path = self.path.with_name(f"{self.path.name}.sha256")
        if not disk.exists(path):
            return None
        for line in path.read_text("utf-8", "replace").splitlines():
            digest, _, of = line.strip().partition(" ")
            name = PurePosixPath(of.strip(" *")).name
            if re.fullmatch(r"[0-9a-fA-F]{64}", digest) and name in ("", self.path.name):
                return digest.lower()
        raise StageError(
            f"{path}: must have a line of 64 hexadecimal digits and the name {self.path.name}, as sha256sum writes it. "
            "Write it again, or delete it."
        )

    def fetch(self, part: Path, progress: Progress) -> str | None:
        if not self.is_folder:
            [(_, (size, changed))] = self.files
            return copy(self.path, part, size, progress, changed)
        for name, (size, changed) in self.files:
            bring(self.path / name, part / name, size, part.parent.with_name("unfinished"), progress, changed=changed)
        return None


class Url(Source):
    """The http(s) address of an archive."""

    is_remote, verb = True, "download"

    @classmethod
    def of(cls, text: str) -> Source | None:
        return cls(text, text, PurePosixPath(text.split("?")[0]).name) if re.match("https?://", text) else None

    @cached_property
    def announced(self) -> Announced:
        return probe(self.origin)

    def version(self) -> str:
        self.size = self.announced.size
        return self.announced.version

    def fetch(self, part: Path, progress: Progress) -> str | None:
        return download(self.announced, part, progress)


class DriveFile(Url):
    """A link to an archive on Google Drive."""

    @classmethod
    def of(cls, text: str) -> Source | None:
        form, file_id = drive_link(text)
        return cls(text, file_id, f"drive-{file_id[:8]}") if form == "file" else None

    @cached_property
    def announced(self) -> Announced:
        """Of the file itself, past the page that says that it is too large for the virus scan."""
        url = f"{drive.SITE}/uc?id={self.origin}&export=download"
        found = probe(url)
        for _ in range(2):
            if not found.page or not (following := drive.confirmed(found.page, found.url)):
                break
            url, found = following, probe(following)
        if found.page:
            raise StageError(f"{url}: {drive.complaint(found.page)}", entry="Quota page")
        return found


class DriveFolder(Source):
    """A link to a folder on Google Drive."""

    is_folder, is_remote, verb = True, True, "download"

    @classmethod
    def of(cls, text: str) -> Source | None:
        form, folder_id = drive_link(text)
        return cls(text, folder_id, f"drive-{folder_id[:8]}") if form == "folder" else None

    def version(self) -> str:
        return "listed"

    def fetch(self, part: Path, progress: Progress) -> None:
        for name, file_id in drive.files_in_folder(self.origin).items():
            target = part.joinpath(*archive.safe_parts(name))
            if not target.exists():
                file = DriveFile(self.text, file_id, name)
                unfinished = part.parent.with_name(f"{file_id}-{file.version()}")
                disk.require_space(part, file.size or 0)
                file.fetch(unfinished, progress)
                target.parent.mkdir(parents=True, exist_ok=True)
                disk.rename(unfinished, target)
                disk.remove(unfinished.with_name(f"{unfinished.name}.sum"))


def drive_link(url: str) -> tuple[str, str]:
    """(`folder` or `file`, id) of a Drive link in any of its spellings; two empty texts for any other text."""
    if not re.match(r"https?://(drive|docs|drive\.usercontent)\.google\.com/", url):
        return "", ""
    if found := re.search(r"/folders/([\w-]+)", url):
        return "folder", found[1]
    if found := re.search(r"/d/([\w-]+)|[?&]id=([\w-]+)", url):
        return "file", found[1] or found[2]
    raise StageError(f"{url}: no file or folder in this Drive link. Copy it again with Share → Copy link.")


def cache() -> Path:
    """Where staged data and packs are stored by default: local, fast, and lost with the machine."""
    return Path(os.environ.get("NBTOOLS_CACHE") or Path(tempfile.gettempdir()) / "nbtools").absolute()


def is_far(path: Path) -> bool:
    """Whether a path is on Drive, or what stands in for it, or on another slow mount, but not in the cache; links, and
    folders that hold one, are followed."""
    if path.is_relative_to(cache()):
        return False
    roots = [drive.MOUNT.resolve(), *(Path(folder).resolve() for folder in [os.environ.get("NBTOOLS_DRIVE")] if folder)]

    def far(place: Path) -> bool:
        return any(map(place.is_relative_to, roots)) or disk.is_slow(place)

    if far(path.resolve()):  # without listing its files, which is slow there
        return True
    return any(map(far, {real if real.is_dir() else real.parent for real in linked(path)}))


def linked(folder: Path | str) -> Iterator[Path]:
    """Where the links below a folder lead, if it is one."""
    with os.scandir(folder) if os.path.isdir(folder) else contextlib.nullcontext(()) as found:
        for item in found:
            if item.is_symlink():
                yield Path(os.path.realpath(item))
            elif item.is_dir():
                yield from linked(item.path)


def listing(path: Path) -> dict[str, tuple[int, int]]:
    """Relative path → (size, mtime in ns) of the files below a folder, and of a dangling link itself; of a file: ""."""
    seen = {"": path.stat()} if path.is_file() else {}
    start = len(os.path.join(path, ""))
    for item in disk.walk(path) if path.is_dir() else ():
        seen[item.path[start:]] = item.stat(follow_symlinks=item.is_file())
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in seen.items()}


def require_archive(path: Path, text: str) -> str:
    """An archive's kind, by its first bytes. Raises ArchiveError for any other file, with what a web page in its place
    says."""
    if form := archive.kind(path):
        return form
    with open(path, "rb") as file:
        head = file.read(100_000)
    if re.match(rb"(?i)\s*(\xef\xbb\xbf)?\s*(<!doctype html|<html|<head)", head):
        raise ArchiveError(f"{text}: {drive.complaint(head.decode('utf-8', 'replace'))}", entry="Quota page")
    raise ArchiveError(
        f"{text}: not an archive: it begins with {head[:16]!r}. Give a folder, tar (plain, gz, xz, bz2) or zip."
    )
