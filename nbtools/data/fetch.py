"""Bytes into a `.part`, from a slow mount or over http(s), resumed where they stopped; Drive's links and web pages.

gdown reads Drive's pages (they change, and it follows), with the two functions that 5.2 and 6 have in common. The bytes
come over here, because then free space is known first, a stop is resumed, and every write goes through `disk`.
"""

import hashlib
import html
import http.client
import importlib
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nbtools import disk
from nbtools.errors import MissingExtra, StageError

CHUNK = 1 << 20
DRIVE = "https://drive.google.com"
OPENER = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
PAUSE = 1.0  # seconds before the second connection; doubles with each that brought nothing
TIMEOUT = 60.0  # seconds without a byte
TRIES = 5


@dataclass(frozen=True)
class Remote:
    """What a server announces about a file, before any of it is read."""

    url: str
    size: int | None  # bytes
    version: str  # changes when the content does
    page: str  # the web page that came instead, else ""


class Dropped(Exception):
    """A connection ended early; the next one goes on from there."""


def drive_link(url: str) -> tuple[str, str] | None:
    """(`folder` or `file`, id) of a Drive link in any of its spellings; None for another address."""
    if not re.match(r"https?://(drive|docs|drive\.usercontent)\.google\.com/", url):
        return None
    if found := re.search(r"/folders/([\w-]+)", url):
        return "folder", found[1]
    if found := re.search(r"/d/([\w-]+)|[?&]id=([\w-]+)", url):
        return "file", found[1] or found[2]
    raise StageError(f"{url}: no file or folder in this Drive link. Copy it again with Share → Copy link.")


def probe(url: str) -> Remote:
    """Ask a server for a file and read what it announces; a web page is read whole."""
    try:
        with _connect(url) as response:
            headers = response.headers
            length = headers.get("Content-Length")
            stamp = f"{headers.get('ETag')} {headers.get('Last-Modified')} {length}"
            is_page = headers.get_content_type() == "text/html" and not headers.get("Content-Disposition")
            return Remote(
                url=response.url,
                size=int(length) if length and length.isdigit() else None,
                version=hashlib.sha256(stamp.encode()).hexdigest()[:16],
                page=_receive(response, CHUNK).decode("utf-8", "replace") if is_page else "",
            )
    except Dropped as error:
        raise _unreachable(url, str(error)) from None


def drive_file(file_id: str) -> Remote:
    """The file behind a Drive id, past the page that says it is too large for the virus scan."""
    url = f"{DRIVE}/uc?id={file_id}&export=download"
    for _ in range(3):
        remote = probe(url)
        if not remote.page:
            return remote
        try:
            url = urllib.parse.urljoin(remote.url, _gdown("download").get_url_from_gdrive_confirmation(remote.page))
        except _gdown("exceptions").FileURLRetrievalError:
            break
    raise StageError(f"{url}: {complaint(remote.page)}")


def drive_folder(folder_id: str) -> list[tuple[str, str]]:
    """(id, relative path) of the files in a shared Drive folder."""
    list_folder = _gdown("download_folder").download_folder
    try:
        listed = list_folder(id=folder_id, quiet=True, skip_download=True)
    except Exception as error:  # 5.2 raises RuntimeError and friends, 6 its own, both those of requests
        reason = f"{type(error).__name__}: {error}"
    else:
        if listed:
            return [(file.id, file.path) for file in listed]
        reason = "it is empty, or not shared"
    raise StageError(
        f"{DRIVE}/drive/folders/{folder_id}: Drive does not list this folder ({reason}). Choose Share → Anyone with "
        "the link in Drive. Better: put the files into one tar and share that; gdown 5 lists 50 files at most."
    )


def copy(source: Path, part: Path, size: int, progress: Callable[[int], object]) -> None:
    """Append to `part` what is missing of a file of `size` bytes; one that stops answering can be resumed."""
    if _size(part) > size:
        disk.remove(part)
    done = _size(part)
    progress(done)
    disk.make_folder(part.parent)
    with open(source, "rb") as content, disk.append(part) as file:
        content.seek(done)
        while data := _read_mounted(content, source):
            disk.write(file, data)
            progress(len(data))
    if _size(part) != size:
        raise StageError(f"{source}: gave {_size(part)} bytes instead of {size}: it changed meanwhile. Run it again.")


def _read_mounted(content: IO[bytes], source: Path) -> bytes:
    try:
        return disk.read(content, CHUNK)
    except OSError as error:  # Drive gives errno 5 or 107 after a while
        raise StageError(
            f"{source}: stopped answering ({error.strerror}). What came is kept: run it again, on Colab after "
            "remounting Drive."
        ) from None


def download(remote: Remote, part: Path, progress: Callable[[int], object]) -> None:
    """Append what is missing of a file to `part`; five connections in a row without a byte are an error."""
    if remote.size is None:
        disk.remove(part)  # nothing tells whether it was whole
    progress(_size(part))
    tries, reason = 0, ""
    while tries < TRIES:
        if remote.size is not None and _size(part) == remote.size:
            return
        if tries:
            time.sleep(PAUSE * 2 ** (tries - 1))
        before = _size(part)
        try:
            _download_on(remote, part, progress)
            if remote.size is None:
                return
            reason = f"it ended after {_size(part)} of {remote.size} bytes"
        except Dropped as error:
            reason = str(error)
        tries = 0 if _size(part) > before else tries + 1
    raise _unreachable(remote.url, f"{reason}; {disk.human(_size(part))} are kept")


def _download_on(remote: Remote, part: Path, progress: Callable[[int], object]) -> None:
    done = _size(part)
    with _connect(remote.url, {"Range": f"bytes={done}-"} if done else {}) as response:
        if done and not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            disk.remove(part)  # this server starts from the beginning
            progress(-done)
        with disk.append(part) as file:
            while data := _receive(response, CHUNK):
                disk.write(file, data)
                progress(len(data))


def complaint(page: str) -> str:
    """What a web page that came instead of an archive says, quota or permission, and what to do about it."""
    title = re.search(r"(?is)<title[^>]*>(.*?)</title>", page)
    name = " ".join(html.unescape(title[1]).split())[:80] if title else "untitled"
    text = re.sub(r"(?is)<(script|style)\b.*?</\1>|<[^>]*>", " ", page)
    if re.search(r"(?i)quota|too many users|limit (was |is )?(reached|exceeded)", text):
        return (
            f"a web page ({name!r}) came instead of an archive: the download quota of this file is used up. Open the "
            "link in a browser, choose Make a copy, and stage your copy as drive:…, or try again tomorrow."
        )
    if re.search(r"(?i)sign.?in|log.?in|permission|request access|need access|access denied|forbidden", text):
        return (
            f"a web page ({name!r}) came instead of an archive: you have no permission for this file. Its owner "
            "chooses Share → Anyone with the link; or mount the Drive that has it and stage it as drive:…."
        )
    return (
        f"a web page ({name!r}) came instead of an archive. Open the address in a browser, and use that of the file "
        "itself."
    )


def _connect(url: str, headers: dict[str, str] | None = None) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers={"User-Agent": "Mozilla/5.0 nbtools", **(headers or {})})
    try:
        return OPENER.open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(url, error) from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
        raise Dropped(str(getattr(error, "reason", error))) from None


def _refusal(url: str, error: urllib.error.HTTPError) -> Exception:
    """What an HTTP status means: trouble of the moment, a page that says why, or a wrong address."""
    status = f"HTTP {error.code} {error.reason}"
    if error.code >= 500 and error.code != 501:
        return Dropped(status)
    if error.headers.get_content_type() == "text/html" and error.code != 404:
        return StageError(f"{url}: {status}: {complaint(_receive(error, CHUNK).decode('utf-8', 'replace'))}")
    return _unreachable(url, status)


def _receive(response: IO[bytes], count: int) -> bytes:
    """Read from the network; its OSErrors must not look like the disk's."""
    try:
        return disk.read(response, count)
    except (OSError, http.client.HTTPException) as error:
        raise Dropped(f"{type(error).__name__}: {error}") from None


def _unreachable(url: str, reason: str) -> StageError:
    return StageError(f"{url}: cannot be downloaded: {reason}. Check the address and the network, then run it again.")


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _gdown(module: str):
    try:
        return importlib.import_module(f"gdown.{module}")
    except ImportError as error:
        raise MissingExtra(f"Drive links need gdown ({error}): pip install 'gdown>=5.2,<7'") from error
