"""Bytes from a mount or a server into a `.part` that the next call resumes.

A connection or a mount that fails is tried again, with longer pauses, for as long as it brings something.
"""

import errno
import html
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TypeVar

from nbtools import disk
from nbtools.data import drive
from nbtools.errors import DiskError, StageError

CHUNK = 1 << 20
PAGE = 1 << 26  # bytes of a web page that are read at most
PAUSE = 1.0  # seconds before the second try; doubles with each that brought nothing
TRIES = 5
TIMEOUT = 60.0  # seconds without a byte
OPENER = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
T = TypeVar("T")
Progress = Callable[[int], object]  # called with the bytes that came


class Dropped(Exception):
    """A connection or a read ended early; the next one resumes from there."""


def patient(look: Callable[[], T], place: Path) -> T:
    """Return what `look` returns, tried again with longer pauses while a mount does not answer."""
    for tries in range(TRIES - 1):
        try:
            return look()
        except (OSError, DiskError) as error:
            if not disk.is_away(error.__cause__ or error):
                raise
        time.sleep(PAUSE * 2**tries)
        drive.remount(place)
    return look()


@dataclass(frozen=True)
class Mounted:
    """A file on a mount. version: when it changed, in ns; 0: unknown."""

    place: Path
    size: int
    version: int = 0
    entry = "Drive errors 5 and 107"

    def pieces(self, start: int) -> Iterator[bytes]:
        """Yield the bytes from `start` on. Raises Dropped; StageError if the file changes meanwhile."""
        try:
            with FileIO(self.place) as file:
                file.seek(start)
                while data := file.read(CHUNK):
                    yield data
            now = self.place.stat()
        except OSError as error:
            if error.errno not in (*disk.AWAY, errno.ENOENT):  # without its mount a path is not there
                raise
            drive.remount(self.place)
            raise Dropped(f"stopped responding (errno {error.errno}, {error.strerror})") from None
        if (now.st_size, self.version and now.st_mtime_ns) != (self.size, self.version):
            raise StageError(f"{self.place}: it changed while it was copied. Run it again.")


@dataclass(frozen=True)
class Web:
    """A file as a server announces it. page: the text of a web page that came instead, else ""."""

    place: str
    size: int | None
    version: str
    page: str = ""
    entry = ""

    def pieces(self, start: int) -> Iterator[bytes]:
        """Yield the bytes from `start` on, also of a server that begins anew. Raises Dropped, StageError."""
        with connected(self.place, start) as response:
            if announced(response)[0] != self.version:
                raise StageError(f"{self.place}: it changed while it was copied. Run it again.")
            skip = 0 if response.headers.get("Content-Range", "").startswith(f"bytes {start}-") else start
            while data := response.read(CHUNK):
                yield data[skip:]
                skip = max(0, skip - len(data))


def fetch(remote: Mounted | Web, path: Path, progress: Progress) -> None:
    """Append to `path` what is missing of a file. Raises StageError, and keeps what came."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", buffering=0) as file:
        if file.tell() > (remote.size or 0):
            file.truncate(0)
        progress(size := file.seek(0, os.SEEK_END))
        tries, reason = 0, ""
        while tries < TRIES:
            before = size
            try:
                for data in remote.pieces(size):
                    disk.write(file, data)
                    progress(len(data))
                    size += len(data)
                if remote.size in (None, size):
                    return
                reason = f"it ended after {size} of {remote.size} bytes"
            except Dropped as error:
                reason = str(error)
            tries = 0 if size > before else tries + 1
            time.sleep(PAUSE * 2**tries)
    fix = "What arrived is kept: run it again, on Colab after remounting Drive."
    raise StageError(f"{remote.place}: {reason}, {TRIES} times in a row. {fix}", entry=remote.entry)


def deliver(remote: Mounted | Web, target: Path, part: Path, progress: Progress) -> None:
    """Copy a file by way of `part`, which is resumed. Raises StageError."""
    fetch(remote, part, progress)
    target.parent.mkdir(parents=True, exist_ok=True)
    disk.rename(part, target)


def bring(source: Path, target: Path, size: int, part: Path, progress: Progress) -> None:
    """Copy a file of a mount unless it is there. Raises StageError."""
    if target.exists() and target.stat().st_size == size:
        progress(size)
        return
    deliver(Mounted(source, size), target, part, progress)
    disk.sync_path(target)


def probe(url: str) -> Web:
    """Return what a server announces about a file, and the text of a web page. Raises StageError."""
    try:
        with connected(url) as response:
            version, size = announced(response)
            is_file = response.headers.get_content_type() != "text/html" or "Content-Disposition" in response.headers
            page = "" if is_file else response.read(PAGE).decode("utf-8", "replace")
            return Web(response.url, size, version, page)
    except Dropped as error:
        raise StageError(f"{url}: cannot be downloaded: {error}. Check the address and the network.") from None


def announced(response: http.client.HTTPResponse) -> tuple[str, int | None]:
    """Return (version, size) of a file by the headers of the whole or of a part."""
    headers = response.headers
    total = headers.get("Content-Range", "").rpartition("/")[2] or headers.get("Content-Length", "")
    return headers.get("Last-Modified") or headers.get("ETag") or "", int(total) if total.isdigit() else None


@contextmanager
def connected(url: str, start: int = 0) -> Iterator[http.client.HTTPResponse]:
    """Yield a server's answer, from a byte on. Raises Dropped for trouble of the moment, StageError for a page that
    says why and for a wrong address: the network's OSErrors must not look like the disk's."""
    headers = {"User-Agent": "Mozilla/5.0 nbtools"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        with OPENER.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as response:
            yield response
    except urllib.error.HTTPError as error:
        status = f"{url}: HTTP {error.code} {error.reason}"
        if error.code == 429 or (error.code >= 500 and error.code != 501):
            raise Dropped(status) from None
        if error.headers.get_content_type() == "text/html" and error.code != 404:
            page = error.read().decode("utf-8", "replace")
            raise StageError(f"{status}: {about_page(page, error.code in (401, 403))}", entry="Quota page") from None
        fix = "Check the address; a file on Drive must be shared: Share → Anyone with the link"
        raise StageError(f"{status}: cannot be downloaded. {fix}.") from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
        raise Dropped(str(getattr(error, "reason", error)) or type(error).__name__) from None


def about_page(page: str, forbidden: bool = False) -> str:
    """Return why a web page came instead of a file, in its own words, and what to do: by the form that Drive's pages
    have in any language."""
    errors = re.findall(r"(?is)<p[^>]*\bclass=[\"']?uc-error-[^>]*>(.*?)</p>", page)
    words = " ".join(errors or re.findall(r"(?is)<title[^>]*>(.*?)</title>", page)[:1])
    text = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", words)).split())[:200]
    advice = "open the address in a browser, and use the address of the file itself."
    if errors:
        why = "Drive refuses this file, most often because its download quota is used up"
        advice = f"{why}. Open the link in a browser, choose Make a copy, and stage that as drive:…, or try tomorrow."
    elif forbidden or re.search(r"(?i)accounts\.google\.com/|<input[^>]*\btype=[\"']?(?:password|email)\b", page):
        why = "you have no permission for this file. Its owner chooses Share → Anyone with the link"
        advice = f"{why}; or mount the Drive that has it and stage it as drive:…."
    return f"a web page ({text!r}) arrived instead of an archive: {advice}"
