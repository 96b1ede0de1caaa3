"""Bring files to a local disk: from a mount, an http(s) address or a link to Google Drive, by way of a `.part` that
the next call resumes.

A connection or a mount that fails is tried again, with longer pauses, for as long as it brings something.
"""

import html
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from urllib.parse import parse_qs, urljoin, urlsplit

from nbtools import disk
from nbtools.data import archive, drive
from nbtools.data.progress import BYTES, bar, say
from nbtools.errors import StageError

CHUNK = 1 << 20
TIMEOUT = 60.0  # seconds without a byte
OPENER = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
SITE = "https://drive.google.com"
HOSTS = ("drive.google.com", "docs.google.com", "drive.usercontent.google.com")
SHARE = "in Drive choose Share → Anyone with the link"
PAGE = "Quota page"  # in docs/troubleshooting.md


class Dropped(Exception):
    """A connection or a read ended early; the next one resumes from there."""


@dataclass(frozen=True)
class File:
    """A file on a mount, or as a server announces it. version: of a mount when it changed, in ns, 0: unknown; page: the
    text of a web page that came instead."""

    place: Path | str
    size: int | None
    version: int | str = 0
    page: str = ""

    def pieces(self, start: int) -> Iterator[bytes]:
        """Yield the bytes from `start` on, also of a server that begins anew. Raises Dropped; StageError if the file
        has changed."""
        if isinstance(self.place, Path):
            try:
                with FileIO(self.place) as file:
                    file.seek(start)
                    while data := file.read(CHUNK):
                        yield data
                    stat = self.place.stat()
            except OSError as error:
                if not (
                    disk.is_away(error) or isinstance(error, FileNotFoundError)
                ):  # without its mount nothing is there
                    raise
                drive.remount(self.place)
                raise Dropped(f"stopped responding (errno {error.errno}, {error.strerror})") from None
            same = (stat.st_size, self.version and stat.st_mtime_ns) == (self.size, self.version)
        else:
            with connect(self.place, start) as response:
                same = read_headers(response)[0] == self.version
                skip = 0 if response.headers.get("Content-Range", "").startswith(f"bytes {start}-") else start
                while same and (data := response.read(CHUNK)):
                    yield data[skip:]
                    skip = max(0, skip - len(data))
        if not same:
            raise StageError(f"{self.place}: it changed while it was copied. Run it again.")


def fetch_all(files: Mapping[str, File], folder: Path, part: Path, name: str, progress: bool, times: int = 1) -> None:
    """Fetch files below a folder, unless they are there, each by way of `part`, which the next call resumes. times: how
    often their bytes must fit on the disk. Raises StageError, DiskError; what came is kept."""
    todo = {path: file for path, file in files.items() if not (folder / path).exists()}
    need = sum(file.size or 0 for file in todo.values())
    disk.require_space(part, times * need - (part.stat().st_size if part.exists() else 0))
    part.parent.mkdir(parents=True, exist_ok=True)
    with bar(total=need or None, desc=f"copy {name}", disable=not progress, **BYTES) as shown:
        for path, file in todo.items():
            fetch(file, part, shown.update)
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            disk.rename(part, folder / path)


def fetch(remote: File, part: Path, progress: Callable[[int], object]) -> None:
    """Append to `part` what it lacks of a file. progress: called with the number of bytes that came."""
    with open(part, "ab", buffering=0) as file:
        if file.tell() > (remote.size or 0):
            file.truncate(0)
        progress(size := file.seek(0, os.SEEK_END))
        tries, reason = 0, ""
        while tries < drive.TRIES:
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
            time.sleep(drive.PAUSE * 2**tries)
    reason = f"{reason}, {drive.TRIES} times in a row. What arrived is kept: run it again"
    raise StageError(f"{remote.place}: {reason}.", entry="Drive errors 5 and 107")


def listing(path: Path) -> dict[str, tuple[int, int]]:
    """Return relative path → (size, mtime in ns) of the files below a folder, and of a dangling link itself; of a file:
    ""."""
    seen = {"": path.stat()} if path.is_file() else {}
    start = len(os.path.join(path, ""))
    for item in disk.walk(path) if path.is_dir() else ():
        seen[item.path[start:]] = item.stat(follow_symlinks=item.is_file())
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in seen.items()}


# -- addresses


def probe(url: str) -> File:
    """Return what a server announces about a file, and the text of a web page. Raises StageError."""
    try:
        with connect(url) as response:
            version, size = read_headers(response)
            is_file = response.headers.get_content_type() != "text/html" or "Content-Disposition" in response.headers
            return File(response.url, size, version, "" if is_file else response.read().decode("utf-8", "replace"))
    except Dropped as error:
        raise StageError(f"{url}: cannot be downloaded: {error}. Check the address and the network.") from None


def files_at(address: str) -> dict[str, File]:
    """Return relative name → file behind a link to Drive, "" for a single file, or of the archive at an address. Raises
    StageError, as if a web page came instead."""
    link = drive_address(address)
    return drive_files(link) if link else only(probe(address))


def only(file: File) -> dict[str, File]:
    """Return an archive as the only file of a source; raise StageError if a web page came instead."""
    if file.page:
        raise StageError(f"{file.place}: {about_page(file.page)}", entry=PAGE)
    return {"": file}


def read_headers(response: http.client.HTTPResponse) -> tuple[str, int | None]:
    """Return (version, size) of a file by the headers of the whole or of a part."""
    headers = response.headers
    total = headers.get("Content-Range", "").rpartition("/")[2] or headers.get("Content-Length", "")
    return headers.get("Last-Modified") or headers.get("ETag") or "", int(total) if total.isdigit() else None


@contextmanager
def connect(url: str, start: int = 0) -> Iterator[http.client.HTTPResponse]:
    """Yield a server's answer, from a byte on. Raises Dropped for trouble of the moment, StageError for a wrong address
    and without permission: the network's OSErrors must not look like the disk's."""
    headers = {"User-Agent": "Mozilla/5.0 nbtools"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        with OPENER.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as response:
            yield response
    except urllib.error.HTTPError as error:
        status, why = f"{url}: HTTP {error.code} {error.reason}", f"check the address; {SHARE}"
        if error.code == 429 or error.code >= 500:
            raise Dropped(status) from None
        if error.code in (401, 403):
            why = about_page(error.read().decode("utf-8", "replace"), forbidden=True)
        raise StageError(f"{status}: {why}.", entry=PAGE) from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
        raise Dropped(str(getattr(error, "reason", error)) or type(error).__name__) from None


def about_page(page: str, forbidden: bool = False) -> str:
    """Return why a web page came instead of a file, in its own words: by the form that Drive's pages have in any
    language."""
    errors = re.findall(r"(?is)<p[^>]*\bclass=[\"']?uc-error-[^>]*>(.*?)</p>", page)
    words = " ".join(errors or re.findall(r"(?is)<title[^>]*>(.*?)</title>", page)[:1])
    text = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", words)).split())[:200]
    why = "open the address in a browser, and use the address of the file itself"
    if errors:
        why = "Drive refuses this file, most often because its download quota is used up: open the link in a browser, "
        why += "choose Make a copy, and stage that as drive:…, or try tomorrow"
    elif forbidden or re.search(r"(?i)accounts\.google\.com/|<input[^>]*\btype=[\"']?(?:password|email)\b", page):
        why = f"you have no permission for this file; its owner must share it: {SHARE}"
    return f"a web page ({text!r}) arrived instead of an archive: {why}"


# -- links to Google Drive


def drive_address(link: str) -> str:
    """Return the address of the file, or of the list of the folder, that a link to Drive in any of its spellings names;
    "" for another text. Files that were shared before 2021 need the key in their link besides."""
    parts = urlsplit(link)
    if parts.hostname not in HOSTS:
        return ""
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    match = re.search(r"/(?:d|(folders))/([\w-]+)", parts.path)
    if not (name := match[2] if match else query.get("id")):
        raise StageError(f"{link}: no file or folder in this Drive link. Copy it again with Share → Copy link.")
    key = f"&resourcekey={query['resourcekey']}" if "resourcekey" in query else ""
    return f"{SITE}/{'embeddedfolderview' if match and match[1] else 'uc'}?id={name}{key}"


def drive_files(address: str) -> dict[str, File]:
    """Return the files of a Drive link, past the page that says that a file is too large for the virus scan. A shortcut
    is followed to what it stands for, as `open?id=` is."""
    from gdown.download import get_url_from_gdrive_confirmation  # which follows the changes of that page
    from gdown.exceptions import FileURLRetrievalError

    page, _, query = address.rpartition("/")[2].partition("?")
    if page != "uc":
        return files_in_folder(address)
    file, key = probe(address), query.partition("&")[2]
    with suppress(FileURLRetrievalError):  # it is another page
        for _ in range(2 * bool(file.page)):
            file = probe(f"{urljoin(str(file.place), get_url_from_gdrive_confirmation(file.page))}&{key}".rstrip("&"))
    there = drive_address(str(probe(f"{SITE}/open?{query}").place)) if file.page else ""
    return drive_files(there) if there and there.partition("&")[0] != address.partition("&")[0] else only(file)


def files_in_folder(address: str) -> dict[str, File]:
    """Return the files of a shared Drive folder and those below it; gdown loses their keys (its #281)."""
    files: dict[str, File] = {}
    for href, title in re.findall(r'(?is)<a\b[^>]*\bhref="(https://d[^"]+)"[^>]*>(.*?)</a>', probe(address).page):
        name = html.unescape(re.sub(r"<[^>]*>", "", title)).strip().replace("/", "_")
        if urlsplit(href).hostname == "docs.google.com":
            say(f"{name}: a Google document, left out")
            continue
        for below, file in drive_files(drive_address(html.unescape(href))).items():
            path = "/".join(archive.safe_parts(f"{name}/{below}"))
            if path in files:
                raise StageError(f"{address}: two files in this Drive folder have the name {path!r}. Rename one.")
            files[path] = file
    if not files:
        fix = f"Better put the files into one tar; {SHARE}"
        raise StageError(f"{address}: Drive lists no files in this folder. {fix}.")
    return files
