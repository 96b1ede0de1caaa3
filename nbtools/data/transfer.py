"""Bytes from a mount or a server into a `.part` that is resumed and known by its SHA-256.

An interrupted transfer loses nothing, and every write goes through `disk`. A connection or a mount that fails is tried
again, with longer pauses, for as long as it brings something; what came is compared by size, and before it is resumed
by its hash.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO, TypeVar

from nbtools import disk, show
from nbtools.data import drive
from nbtools.data.archive import Progress
from nbtools.errors import ArchiveError, DiskError, StageError

CHUNK = 1 << 20
OPENER = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
PAUSE = 1.0  # seconds before the second try; doubles with each that brought nothing
ROUNDED = 10**9  # ns: the time of change of a file that reaches Drive during its copy may be rounded
STRIDE = 1 << 26  # bytes after which what came is vouched for anew: so much is copied again after a kill
TIMEOUT = 60.0  # seconds without a byte
TRIES = 5
T = TypeVar("T")


def patient(look: Callable[[], T], place: Path) -> T:
    """What `look` returns, tried again with longer pauses while a mount does not answer; Drive is mounted anew."""
    for tries in range(TRIES - 1):
        try:
            return look()
        except (OSError, DiskError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if getattr(cause, "errno", None) not in disk.AWAY:
                raise
        time.sleep(PAUSE * 2**tries)
        drive.remount(place)
    return look()


class Part:
    """A file that is being fetched, and the SHA-256 of what it has so far, so that it is resumed only as it was left.

    The hash is noted in `<name>.sum` wherever a fetch ends early, and every STRIDE bytes: a file that is fetched at
    once, as most are, needs none.
    """

    def __init__(self, path: Path):
        self.path, self.sum = path, path.with_name(f"{path.name}.sum")
        self.size, self.noted, self.digest = 0, 0, hashlib.sha256()
        if self.sum.exists() or path.exists():
            self.resume()

    def resume(self) -> None:
        """Take over what is there as far as the note vouches for it, and nothing if it does not."""
        try:
            size, expected = json.loads(self.sum.read_text())
            with open(self.path, "rb") as file:
                while self.size < size and (data := file.read(min(CHUNK, size - self.size))):
                    self.digest.update(data)
                    self.size += len(data)
        except (FileNotFoundError, ValueError, TypeError):
            size, expected = 0, ""
        if (self.size, self.digest.hexdigest()) != (size, expected):
            self.restart()
            return
        self.noted = self.size
        with open(self.path, "ab", buffering=0) as file:
            file.truncate(self.size)

    def restart(self) -> None:
        self.size, self.noted, self.digest = 0, 0, hashlib.sha256()
        disk.remove(self.path)
        disk.remove(self.sum)

    def append(self, pieces: Callable[[], bytes], progress: Progress) -> None:
        """Write pieces until one is empty. Each is hashed while the next one comes."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab", buffering=0) as file, ThreadPoolExecutor(1) as pool:
            hashed = pool.submit(bytes)
            while data := pieces():
                disk.write(file, data)
                hashed.result()
                self.size += len(data)
                hashed = pool.submit(self.digest.update, data)
                if self.size - self.noted >= STRIDE:
                    hashed.result()
                    self.note()
                progress(len(data))

    def note(self) -> None:
        if self.size != self.noted:
            disk.write_atomic(self.sum, json.dumps([self.size, self.digest.hexdigest()]))
            self.noted = self.size

    def complete(self, size: int | None, attempt: Callable[[], None], place: Path | None = None) -> str:
        """Attempt to append what is missing until all is there; after TRIES in a row that brought nothing, return why.

        size: None is whole after an attempt that raised nothing. place: on a mount, which is mounted anew."""
        tries, reason = 0, ""
        while size is None or self.size < size or not self.path.exists():
            if tries == TRIES:
                return reason
            if tries:
                time.sleep(PAUSE * 2 ** (tries - 1))
                if place is not None:
                    drive.remount(place)
            before = self.size
            try:
                attempt()
                if size is None:
                    break
                reason = f"it ended after {self.size} of {size} bytes"
            except Dropped as error:
                reason = str(error)
            finally:  # also where the user interrupts
                if self.size < (size or 0):
                    self.note()
            tries = 0 if self.size > before else tries + 1
        return ""


def bring(
    source: Path, target: Path, size: int, unfinished: Path, progress: Progress, digest: str = "", changed: int = 0
) -> None:
    """Copy a file unless it is there, by way of a file that may be resumed. Raises ArchiveError, and leaves nothing,
    if it has not the digest that was noted for it."""
    if target.exists() and target.stat().st_size == size:
        progress(size)
        return
    unfinished = unfinished.with_name(f"{unfinished.name}-{hashlib.sha256(bytes(target)).hexdigest()[:16]}")
    for _ in range(2):  # what was read may be damaged, and the file not
        if copy(source, unfinished, size, progress, changed) == digest or not digest:
            break
        disk.remove(unfinished)
    else:
        raise ArchiveError(f"{source}: its SHA-256 is not the one that was noted for it: it is damaged.")
    target.parent.mkdir(parents=True, exist_ok=True)
    disk.rename(unfinished, target)
    disk.remove(unfinished.with_name(f"{unfinished.name}.sum"))


def copy(source: Path, path: Path, size: int, progress: Progress, changed: int = 0) -> str:
    """Append to `path` what is missing of a file of `size` bytes, through errors of its mount, and reads that end too
    early → its SHA-256. Raises StageError if it does not come whole, and keeps what came; also if its size, or its time
    of change in ns (0: unknown), is not what was announced, and keeps nothing: that may be a mixture."""
    part = Part(path)
    if part.size > size:
        part.restart()
    progress(part.size)

    def attempt() -> None:
        with ExitStack() as stack:
            content = mounted(lambda: FileIO(source))
            stack.callback(closed, content)
            content.seek(part.size)
            part.append(lambda: mounted(lambda: content.read(CHUNK)), progress)

    if reason := part.complete(size, attempt, source):
        raise Away(
            f"{source}: {reason}, {TRIES} times in a row. What arrived is kept: run it again, on Colab after "
            "remounting Drive.",
            entry="Drive errors 5 and 107",
        )
    now = patient(source.stat, source)
    if not part.size == now.st_size == size or (changed and abs(now.st_mtime_ns - changed) >= ROUNDED):
        part.restart()
        raise StageError(f"{source}: it changed while it was being copied ({size} bytes were expected). Run it again.")
    return part.digest.hexdigest()


def closed(file: FileIO) -> None:
    """Close a file of a mount; an error of that would replace the one that told why."""
    with suppress(OSError):
        file.close()


def mounted(act: Callable[[], T]) -> T:
    """Do something with a file of a mount; what the mount raises must not look like the local disk's own errors."""
    try:
        return act()
    except OSError as error:
        if error.errno not in (*disk.AWAY, errno.ENOENT):  # without its mount a path is not there
            raise
        raise Dropped(f"stopped responding (errno {error.errno}, {error.strerror})") from None


@dataclass(frozen=True)
class Announced:
    """What a server reports about a file before any of it is read."""

    url: str
    size: int | None  # bytes
    version: str  # changes when the content does
    page: str  # the web page that arrived instead, else ""


class Away(StageError):
    """A mount does not give a file, however often it is asked."""


class Dropped(Exception):
    """A connection or a read ended early; the next one resumes from there."""


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


def download(file: Announced, path: Path, progress: Progress) -> str:
    """Append what is missing of a file to `path` → its SHA-256. Raises StageError if it does not come whole; what came
    is kept."""
    part = Part(path)
    if file.size is None:
        part.restart()  # whether it was whole cannot be known
    progress(part.size)

    def attempt() -> None:
        done = part.size
        with connect(file.url, done) as response:
            if done and not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
                part.restart()  # this server starts from the beginning
                progress(-done)
            part.append(lambda: receive(response), progress)

    if reason := part.complete(file.size, attempt):
        raise unreachable(file.url, f"{reason}; {show.size(part.size)} are kept")
    return part.digest.hexdigest()


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
        return response.read(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise Dropped(f"{type(error).__name__}: {error}") from None


def unreachable(url: str, reason: str) -> StageError:
    return StageError(f"{url}: cannot be downloaded: {reason}. Check the address and the network, then run it again.")
