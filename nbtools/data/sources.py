"""Where data comes from: one small class per kind of source. A new kind only needs a subclass of Source.

What is fetched goes into a `.part` that the next call resumes: free space is known first, an interrupted download loses
nothing, and every write goes through `disk`.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, ClassVar

from nbtools import disk, table
from nbtools.data import archive, drive
from nbtools.data.archive import Progress
from nbtools.errors import ArchiveError, StageError

CHUNK = 1 << 20
MANY = 1000  # files: Drive gives about 50 kB/s on small ones
OPENER = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
PAUSE = 1.0  # seconds before the second connection; doubles with each that brought nothing
TIMEOUT = 60.0  # seconds without a byte
TRIES = 5


class Source:
    """A place that data comes from. Subclasses are asked in turn, the last defined first, whether a text is theirs.

    text: what the user wrote; origin: what distinguishes it from all other sources; name: of the archive or folder.
    here: its path on local disk, if it is there; it is then fetched only where a copy is asked for.
    size: bytes to fetch, None if the server does not announce it; hint: what to tell the user before fetching. Both
    are known after version().
    """

    kinds: ClassVar[list[type[Source]]] = []
    is_folder = False  # `fetch` fills a folder; else it writes one archive
    is_remote = False  # its version takes a connection: what was staged before is used without asking
    verb = "copy"
    here: Path | None = None
    size: int | None = None
    hint = ""

    def __init_subclass__(cls) -> None:
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

    def fetch(self, part: Path, progress: Progress) -> None:
        """Write all of it to `part`, a file or a folder, resuming what is there. Raises StageError, and keeps what
        came."""
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
        return cls(text, path)

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

    def fetch(self, part: Path, progress: Progress) -> None:
        for name, (size, _) in self.files:
            copy(self.path / name, part / name, size, progress)


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

    def fetch(self, part: Path, progress: Progress) -> None:
        download(self.announced, part, progress)


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
                disk.make_folder(target.parent)
                disk.rename(unfinished, target)


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
    places = set()
    for base, folders, names in os.walk(path):
        for link in filter(os.path.islink, (os.path.join(base, name) for name in (*folders, *names))):
            real = Path(os.path.realpath(link))
            places.add(real if real.is_dir() else real.parent)
    return any(map(far, places))


def listing(path: Path) -> dict[str, tuple[int, int]]:
    """Relative path → (size, mtime in ns) of the files below a folder, and of a dangling link itself; of a file: ""."""
    seen = {"": path.stat()} if path.is_file() else {}
    start = len(os.path.join(path, ""))
    for item in disk.walk(path) if path.is_dir() else ():
        seen[item.path[start:]] = item.stat(follow_symlinks=item.is_file())
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in seen.items()}


def require_archive(path: Path, text: str) -> None:
    """Raise ArchiveError for a file that is no archive by its first bytes, with what a web page in its place says."""
    if archive.kind(path):
        return
    with open(path, "rb") as file:
        head = disk.read(file, 100_000)
    if re.match(rb"(?i)\s*(\xef\xbb\xbf)?\s*(<!doctype html|<html|<head)", head):
        raise ArchiveError(f"{text}: {drive.complaint(head.decode('utf-8', 'replace'))}", entry="Quota page")
    raise ArchiveError(
        f"{text}: not an archive: it begins with {head[:16]!r}. Give a folder, tar (plain, gz, xz, bz2) or zip."
    )


def copy(source: Path, part: Path, size: int, progress: Progress) -> None:
    """Append to `part` what is missing of a file of `size` bytes; one that stops responding can be resumed."""
    if bytes_in(part) > size:
        disk.remove(part)
    done = bytes_in(part)
    progress(done)
    disk.make_folder(part.parent)
    with open(source, "rb") as content, disk.append(part) as file:
        content.seek(done)
        while data := read_mounted(content, source):
            disk.write(file, data)
            progress(len(data))
    if bytes_in(part) != size:
        raise StageError(
            f"{source}: gave {bytes_in(part)} bytes instead of {size}: it changed during the copy. Run it again."
        )


def read_mounted(content: IO[bytes], source: Path) -> bytes:
    try:
        return disk.read(content, CHUNK)
    except OSError as error:  # Drive gives errno 5 or 107 after a while
        raise StageError(
            f"{source}: stopped responding (errno {error.errno}, {error.strerror}). What arrived is kept: run it "
            "again, on Colab after remounting Drive.",
            entry="Drive errors 5 and 107",
        ) from None


def bytes_in(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


@dataclass(frozen=True)
class Announced:
    """What a server reports about a file before any of it is read."""

    url: str
    size: int | None  # bytes
    version: str  # changes when the content does
    page: str  # the web page that arrived instead, else ""


class Dropped(Exception):
    """A connection ended early; the next one resumes from there."""


def probe(url: str) -> Announced:
    """Ask a server for a file and read what it announces; a web page is read whole."""
    try:
        with connect(url) as response:
            headers = response.headers
            length = headers.get("Content-Length")
            stamp = f"{headers.get('ETag')} {headers.get('Last-Modified')} {length}"
            is_page = headers.get_content_type() == "text/html" and not headers.get("Content-Disposition")
            return Announced(
                url=response.url,
                size=int(length) if length and length.isdigit() else None,
                version=hashlib.sha256(stamp.encode()).hexdigest()[:16],
                page=receive(response).decode("utf-8", "replace") if is_page else "",
            )
    except Dropped as error:
        raise unreachable(url, str(error)) from None


def download(file: Announced, part: Path, progress: Progress) -> None:
    """Append what is missing of a file to `part`; five connections in a row without a byte are an error."""
    if file.size is None:
        disk.remove(part)  # whether it was whole cannot be known
    progress(bytes_in(part))
    tries, reason = 0, ""
    while tries < TRIES:
        if file.size is not None and bytes_in(part) == file.size:
            return
        if tries:
            time.sleep(PAUSE * 2 ** (tries - 1))
        before = bytes_in(part)
        try:
            download_rest(file.url, part, progress)
            if file.size is None:
                return
            reason = f"it ended after {bytes_in(part)} of {file.size} bytes"
        except Dropped as error:
            reason = str(error)
        tries = 0 if bytes_in(part) > before else tries + 1
    raise unreachable(file.url, f"{reason}; {table.size(bytes_in(part))} are kept")


def download_rest(url: str, part: Path, progress: Progress) -> None:
    done = bytes_in(part)
    with connect(url, done) as response:
        if done and not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            disk.remove(part)  # this server starts from the beginning
            progress(-done)
        with disk.append(part) as file:
            while data := receive(response):
                disk.write(file, data)
                progress(len(data))


def connect(url: str, start: int = 0) -> http.client.HTTPResponse:
    """The response from byte `start` on. Raises Dropped for trouble of the moment, StageError for a page that says why
    or a wrong address."""
    request = urllib.request.Request(url, headers={"User-Agent": "Mozilla/5.0 nbtools"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        return OPENER.open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            status = f"HTTP {error.code} {error.reason}"
            if error.code >= 500 and error.code != 501:
                raise Dropped(status) from None
            if error.headers.get_content_type() == "text/html" and error.code != 404:
                page = receive(error).decode("utf-8", "replace")
                raise StageError(f"{url}: {status}: {drive.complaint(page)}", entry="Quota page") from None
            raise unreachable(url, status) from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
        raise Dropped(str(getattr(error, "reason", error))) from None


def receive(response: IO[bytes]) -> bytes:
    """Read from the network; its OSErrors must not look like the disk's."""
    try:
        return disk.read(response, CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise Dropped(f"{type(error).__name__}: {error}") from None


def unreachable(url: str, reason: str) -> StageError:
    return StageError(f"{url}: cannot be downloaded: {reason}. Check the address and the network, then run it again.")
