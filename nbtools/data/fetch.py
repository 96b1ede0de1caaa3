"""Where data come from: the cache, My Drive as a folder ($NBTOOLS_DRIVE, or Colab's mount, which may stop responding),
an http(s) address, or a link to Google Drive; files come by way of a `.part` that the next call resumes."""

import difflib
import errno
import html
import http.client
import os
import re
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path, PurePosixPath
from threading import current_thread, main_thread
from urllib.parse import parse_qs, urljoin, urlsplit

from nbtools import disk
from nbtools.data import archive
from nbtools.data.progress import BYTES, T, bar, say
from nbtools.errors import DiskError, DriveRefused, StageError

MOUNT = Path("/content/drive")  # Colab's
PAUSE, TRIES = 0.5, 5  # seconds, doubled before each try of what failed; so often without any progress
CHUNK = 1 << 20
TIMEOUT = 60.0  # seconds without a byte
OPENER = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
SITE = "https://drive.google.com"
HOSTS = ("drive.google.com", "docs.google.com", "drive.usercontent.google.com")
SHARE = "in Drive choose Share → Anyone with the link"
PAGE = "Quota page"  # in docs/troubleshooting.md

_declined = False  # whether Colab's dialog was declined: it is not shown a second time


def cache() -> Path:
    """Return where staged data and packs are stored by default: local, fast, and lost with the machine."""
    place = Path(tempfile.gettempdir(), "nbtools")
    if place.exists() and not os.access(place, os.W_OK):  # another user's
        place = place.with_name(f"nbtools-{os.getuid()}")
    return Path(os.environ.get("NBTOOLS_CACHE") or place).expanduser().absolute()


def local(text: str) -> Path:
    """Return the absolute path, below Drive or not, whether it exists or not."""
    if not text.startswith("drive:"):
        return Path(text).expanduser().absolute()
    inside = PurePosixPath(text.removeprefix("drive:").lstrip("/"))
    if ".." in inside.parts:
        raise StageError(f"{text}: a drive: path must stay inside My Drive, without `..`.")
    folder = os.environ.get("NBTOOLS_DRIVE")
    return (Path(folder).expanduser().absolute() if folder else mount()) / inside


def drive_path(path: str | Path) -> Path:
    """Return the local path of `drive:…` or another path. Raises StageError, with similar names, if there is none."""
    with disk.explained(f"looking at {path}", Path(path)):
        place = local(str(path))
        if disk.exists(place):
            return place
        parent = next(folder for folder in place.parents if folder.is_dir())
        names = sorted(os.listdir(parent))
    near = difflib.get_close_matches(place.relative_to(parent).parts[0], names, cutoff=0.5) or names[:5]
    there = f"{parent} has {', '.join(near) or 'nothing'}"
    raise StageError(f"{path}: there is no {place}. {there}.", entry="Keys, columns and paths")


def kept(place: str, instead: str = "demo data") -> Path | None:
    """Return what a notebook kept at a `drive:` place; None, and a sentence, if nothing is there or it was declined."""
    reason = f"Nothing is kept at {place} yet"
    try:
        with disk.explained(f"looking at {place}", Path(place)):
            path = local(place)
            if disk.exists(path) and not (path.is_dir() and not os.listdir(path)):
                return path
    except DriveRefused as refusal:
        reason = str(refusal)
    say(f"{reason}: using {instead} instead.")
    return None


def place_to_keep(where: str | Path) -> Path | None:
    """Return the local path, its folder made, for what should outlive this machine; None if Drive was declined."""
    try:
        with disk.explained(f"creating the folder of {where}", Path(where)):
            place = local(str(where))
            retry(lambda: place.parent.mkdir(parents=True, exist_ok=True), place)
            return place
    except DriveRefused as refusal:
        say(f"{refusal}: nothing is kept at {where}, and the work of this session is lost with the machine.")
        return None


def is_far(path: Path) -> bool:
    """Return whether a path, or what a link in a folder leads to, is on a slow mount, as Drive is, not in the cache."""
    roots = [MOUNT.resolve(), Path(os.environ.get("NBTOOLS_DRIVE") or MOUNT).resolve()]
    links = (item for item in path.glob("*") if item.is_symlink())
    real = (place.resolve() for places in ([path], links) for place in places)
    far = (any(map(place.is_relative_to, roots)) or disk.is_slow(place) for place in real)
    return not path.is_relative_to(cache()) and any(far)


def retry(act: Callable[[], T], place: Path, progress: Callable[[], object] = int) -> T:
    """Return the result of `act`, tried again while a mount or server is away. progress: returns how far it came."""
    tries, before = 0, progress()
    while True:
        try:
            return act()
        except (OSError, DiskError) as error:
            tries, before = tries + 1 if progress() == before else 0, progress()
            if tries == TRIES or not disk.is_away(error.__cause__ or error):
                raise
        time.sleep(PAUSE * 2**tries)
        remount(place)


def mount_point() -> Path:
    return Path(next((point for point, kind in disk.mounts().items() if kind == "fuse.drive"), MOUNT))  # a user's too


def mount() -> Path:
    """Return Colab's My Drive; it is mounted first, which asks for access. Raises DriveRefused, StageError."""
    global _declined
    place = mount_point() / "MyDrive"
    with suppress(OSError):  # the folder may remain when the mount is gone
        if os.path.ismount(place.parent) and os.listdir(place) is not None:
            return place
    try:
        if not _declined:
            from google.colab import drive  # pyright: ignore[reportMissingImports]

            drive.mount(str(place.parent), force_remount=True)  # the folder that a lost mount leaves counts as mounted
            return place
    except (ImportError, NotImplementedError):  # Kaggle's machines have Colab's package, without its Drive
        raise StageError("drive: is Colab's Drive. Elsewhere, set NBTOOLS_DRIVE to a folder to use instead.") from None
    except Exception as error:  # ValueError, RuntimeError or Colab's own MessageError, by version
        if not (_declined := type(error).__name__ == "MessageError"):  # the browser's answer: access is not granted
            reason = f"Drive is not mounted: {type(error).__name__}: {error}"
            raise StageError(f"{reason}. Allow access in Colab's dialog, or restart the runtime.") from None
    raise DriveRefused("Access to Drive was declined in Colab's dialog (restart the session to be asked again)")


def remount(path: Path) -> None:
    """Mount Colab's Drive anew if a path is on it, and it is away. Only the main thread can: Colab may ask the user."""
    named = str(path).startswith("drive:") and not os.environ.get("NBTOOLS_DRIVE")
    if (named or path.is_relative_to(mount_point())) and current_thread() is main_thread():
        try:
            mount()
        except StageError as error:
            say(str(error))


def release_runtime() -> None:
    """On Colab, flush Drive, then give the machine back. Raises StageError, and keeps the machine, if that fails."""
    if "google.colab" not in sys.modules:  # Colab's kernel imports it at its start
        return
    from google.colab import drive, runtime  # pyright: ignore[reportMissingImports]

    try:
        drive.flush_and_unmount()
    except Exception as error:
        fix = "Check the kept folder on Drive, then choose Runtime, Disconnect and delete runtime"
        raise StageError(f"The machine is kept: Drive could not be flushed ({error}). {fix}.") from None
    runtime.unassign()


@dataclass(frozen=True)
class File:
    """A file of a mount or server. version: on a mount when it changed, in ns, 0: unknown; page: text of a web page."""

    place: Path | str
    size: int | None
    version: int | str = 0
    page: str = ""

    def pieces(self, start: int) -> Iterator[bytes]:
        """Yield the bytes from `start` on. Raises OSError where it stops responding, StageError if the file changed."""
        same = True
        if isinstance(self.place, Path):
            try:
                with FileIO(self.place) as file:
                    file.seek(start)
                    while data := file.read(CHUNK):
                        yield data
                    stat = self.place.stat()
            except FileNotFoundError:  # without its mount nothing is there
                raise TimeoutError(errno.ETIMEDOUT, "no longer there") from None
            same = (stat.st_size, self.version and stat.st_mtime_ns) == (self.size, self.version)
        elif start != self.size:  # a server refuses a range behind the end
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
    with bar(total=need or None, desc=f"copy {name}", disable=not progress, **BYTES) as shown:
        for path, file in todo.items():
            try:
                fetch(file, part, shown.update)
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                os.replace(part, folder / path)  # durable with all others, once the folder is published
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:  # of what Drive lists and cannot read
                    raise
                say(f"{path}: a Google document, left out")


def fetch(remote: File, part: Path, progress: Callable[[int], object]) -> None:
    """Append to `part` what it lacks of a file. progress: called with the number of bytes that came."""
    with open(part, "ab") as file:
        if file.tell() > (remote.size or 0):
            file.truncate(0)
        progress(file.seek(0, os.SEEK_END))

        def append() -> None:
            for data in remote.pieces(file.tell()):
                file.write(data)
                progress(len(data))
            if remote.size not in (None, file.tell()):
                raise TimeoutError(errno.ETIMEDOUT, f"it ended after {file.tell()} of {remote.size} bytes")

        try:
            retry(append, Path(remote.place), file.tell)
        except OSError as error:
            if not disk.is_away(error):
                raise
            reason = f"{remote.place}: stopped responding: {error.strerror}, {TRIES} times in a row"
            raise StageError(f"{reason}. What arrived is kept: run it again.", entry="Drive errors 5 and 107") from None


def files_in(path: Path) -> dict[str, File]:
    """Return relative path → file of those below a folder, sorted, and of a dangling link itself; of a file: ""."""
    start, seen = len(os.path.join(path, "")), {"": path.stat()} if path.is_file() else {}
    for item in disk.walk(path) if path.is_dir() else ():
        seen[item.path[start:]] = item.stat(follow_symlinks=item.is_file())
    return {name: File(path / name, stat.st_size, stat.st_mtime_ns) for name, stat in sorted(seen.items())}


def probe(url: str) -> File:
    """Return what a server announces about a file, and the text of a web page. Raises StageError."""

    def announced() -> File:
        with connect(url) as response:
            version, size = read_headers(response)
            is_file = response.headers.get_content_type() != "text/html" or "Content-Disposition" in response.headers
            return File(response.url, size, version, "" if is_file else response.read().decode("utf-8", "replace"))

    try:
        return retry(announced, Path(url))
    except OSError as error:
        raise StageError(f"{url}: cannot be downloaded: {error.strerror}. Check the address and the network.") from None


def read_headers(response: http.client.HTTPResponse) -> tuple[str, int | None]:
    headers = response.headers
    total = headers.get("Content-Range", "").rpartition("/")[2] or headers.get("Content-Length", "")
    return headers.get("Last-Modified") or headers.get("ETag") or "", int(total) if total.isdigit() else None


@contextmanager
def connect(url: str, start: int = 0) -> Iterator[http.client.HTTPResponse]:
    """Yield a server's answer, from a byte on. Raises TimeoutError for what may pass, StageError for what does not."""
    headers = {"User-Agent": "Mozilla/5.0 nbtools"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        with OPENER.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as response:
            yield response
    except urllib.error.HTTPError as error:
        status, why = f"HTTP {error.code} {error.reason}", f"check the address; {SHARE}"
        if error.code == 429 or error.code >= 500:
            raise TimeoutError(errno.ETIMEDOUT, status) from None
        if error.code in (401, 403):
            why = about_page(error.read().decode("utf-8", "replace"), forbidden=True)
        raise StageError(f"{url}: {status}: {why}.", entry=PAGE) from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
        reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise TimeoutError(errno.ETIMEDOUT, reason) from None


def about_page(page: str, forbidden: bool = False) -> str:
    """Return why a web page came instead of a file, in its own words: Drive's have the same form in every language."""
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


def files_at(address: str) -> dict[str, File]:
    """Return relative name → file behind a link to Drive, "" for a single file, or of the archive at an address: past
    Drive's page about its virus scan, and what a shortcut or `open?id=` stands for. Raises StageError."""
    page, _, query = (link := drive_address(address)).rpartition("/")[2].partition("?")
    if link and page != "uc":
        return files_in_folder(link)
    file, key = probe(link or address), query.partition("&")[2]
    if link and file.page:
        from gdown.download import get_url_from_gdrive_confirmation  # which follows the changes of that page
        from gdown.exceptions import FileURLRetrievalError

        with suppress(FileURLRetrievalError):  # it is another page, or the file
            for _ in range(2):
                past = urljoin(str(file.place), get_url_from_gdrive_confirmation(file.page))
                file = probe(f"{past}&{key}".rstrip("&"))
    if file.page:
        there = str(probe(f"{SITE}/open?{query}").place) if link else ""
        if drive_address(there).partition("&")[0] not in ("", link.partition("&")[0]):
            return files_at(there)
        raise StageError(f"{file.place}: {about_page(file.page)}", entry=PAGE)
    return {"": file if link else replace(file, place=address)}  # what it redirects to may expire amid a retry


def files_in_folder(address: str) -> dict[str, File]:
    """Return the files of a shared Drive folder and those below it; gdown loses their keys (its #281)."""
    files: dict[str, File] = {}
    for href, title in re.findall(r'(?is)<a\b[^>]*\bhref="(https://d[^"]+)"[^>]*>(.*?)</a>', probe(address).page):
        name = html.unescape(re.sub(r"<[^>]*>", "", title)).strip().replace("/", "_")
        if urlsplit(href).hostname == "docs.google.com":
            say(f"{name}: a Google document, left out")
            continue
        for below, file in files_at(html.unescape(href)).items():
            path = "/".join(archive.safe_parts(f"{name}/{below}"))
            if path in files:
                raise StageError(f"{address}: two files in this Drive folder have the name {path!r}. Rename one.")
            files[path] = file
    if not files:
        raise StageError(f"{address}: Drive lists no files in this folder. Put them into one tar instead; {SHARE}.")
    return files
