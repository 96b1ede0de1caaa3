"""Where data comes from: a disk, a mount, an address, a link to Google Drive; each is a list of files to fetch."""

import hashlib
import html
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, urljoin, urlsplit

from nbtools import disk
from nbtools.data import archive, drive
from nbtools.data.progress import say
from nbtools.data.transfer import Mounted, Web, about_page, probe
from nbtools.errors import ArchiveError, StageError

SITE = "https://drive.google.com"
HOSTS = ("drive.google.com", "docs.google.com", "drive.usercontent.google.com")


@dataclass(frozen=True)
class Source:
    """Where data comes from. text: what the user wrote; origin: what distinguishes it from others; name: of the archive
    or folder; path: on a disk, else None; is_far: whether that disk is slow."""

    text: str
    origin: str
    name: str
    look: Callable[[], Mapping[str, Mounted] | Mapping[str, Web]]
    path: Path | None = None
    is_far: bool = False

    @cached_property
    def files(self) -> Mapping[str, Mounted] | Mapping[str, Web]:
        """Relative name → file; "" for the only file of an archive. Behind an address it takes a connection."""
        return self.look()

    @property
    def version(self) -> str:
        """A text that changes whenever the content does."""
        facts = [(name, file.size, file.version) for name, file in self.files.items()]
        return hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def source_of(text: str) -> Source:
    """Return the source that a text names. Raises StageError for nothing usable."""
    if re.match("https?://", text):
        if link := drive_link(text):
            return Source(text, link.id, f"drive-{link.id[:8]}", partial(files_of, link))
        return Source(text, text, PurePosixPath(urlsplit(text).path).name, lambda: {"": web(text)})
    path = Path(text).expanduser().absolute()
    if text.startswith("drive:") or not disk.exists(path):
        path = drive.drive_path(text)  # or an error that names what is there instead
    if path.is_file():
        require_archive(path, text)
    elif not any(True for _ in disk.walk(path)):
        raise StageError(f"{text}: {path} holds no files. Is it the right folder?", entry="Keys, columns and paths")

    def look() -> dict[str, Mounted]:
        return {name: Mounted(path / name, *facts) for name, facts in sorted(listing(path).items())}

    return Source(text, str(path), path.name, look, path, is_far(path))


def web(url: str) -> Web:
    """Return a file behind an address; raise StageError if a web page comes instead."""
    file = probe(url)
    if file.page:
        raise StageError(f"{url}: {about_page(file.page)}", entry="Quota page")
    return file


@dataclass(frozen=True)
class Link:
    """A link to Google Drive. key: what files that were shared before 2021 need besides."""

    id: str
    key: str
    is_folder: bool

    def at(self, page: str) -> str:
        return self.keyed(f"{SITE}/{page}?id={self.id}")

    def keyed(self, url: str) -> str:
        return f"{url}&resourcekey={self.key}" if self.key and "resourcekey=" not in url else url


def drive_link(url: str) -> Link | None:
    """Return what a Drive link in any of its spellings names; None for another text."""
    parts = urlsplit(url)
    if parts.hostname not in HOSTS:
        return None
    query = parse_qs(parts.query)
    match = re.search(r"/(?:d|(folders))/([\w-]+)", parts.path)
    name = match[2] if match else query.get("id", [""])[0]
    if not name:
        raise StageError(f"{url}: no file or folder in this Drive link. Copy it again with Share → Copy link.")
    return Link(name, query.get("resourcekey", [""])[0], bool(match and match[1]))


def files_of(link: Link, followed: bool = False) -> dict[str, Web]:
    """Return the files of a Drive link, past the page that says that a file is too large for the virus scan. A shortcut
    is followed to what it stands for, as `open?id=` is."""
    if link.is_folder:
        return in_folder(link)
    file = probe(f"{link.at('uc')}&export=download")
    for _ in range(2):
        if file.page and (url := confirmed(file.page)):
            file = probe(link.keyed(urljoin(file.place, url)))
    if not file.page:
        return {"": file}
    there = None if followed else drive_link(probe(link.at("open")).place)
    if there and (there.id, there.is_folder) != (link.id, False):
        return files_of(there if there.key else Link(there.id, link.key, there.is_folder), followed=True)
    raise StageError(f"{link.at('open')}: {about_page(file.page)}", entry="Quota page")


def confirmed(page: str) -> str:
    """Return the address behind the page of the virus scan; "" for any other page. gdown follows its changes."""
    from gdown.download import get_url_from_gdrive_confirmation
    from gdown.exceptions import FileURLRetrievalError

    try:
        return get_url_from_gdrive_confirmation(page)
    except FileURLRetrievalError:
        return ""


def in_folder(link: Link) -> dict[str, Web]:
    """Return the files of a shared Drive folder and those below it; gdown loses resource keys there (its #281)."""
    page, files = probe(link.at("embeddedfolderview")).page, {}
    for href, title in re.findall(r'(?is)<a\b[^>]*\bhref="(https://d[^"]+)"[^>]*>(.*?)</a>', page):
        name = html.unescape(re.sub(r"<[^>]*>", "", title)).strip().replace("/", "_")
        there = drive_link(html.unescape(href))
        if there is None or urlsplit(href).hostname == "docs.google.com":
            say(f"{name}: a Google document, left out")
            continue
        for below, file in files_of(there).items():
            path = "/".join(archive.safe_parts(f"{name}/{below}"))
            if path in files:
                raise StageError(f"{link.at('open')}: two files here have the name {path!r}. Rename one.")
            files[path] = file
    if not files:
        fix = "Choose Share → Anyone with the link in Drive. Better: put the files into one tar and share that"
        raise StageError(f"{SITE}/drive/folders/{link.id}: Drive lists no files in this folder. {fix}.")
    return files


def cache() -> Path:
    """Return where staged data and packs are stored by default: local, fast, and lost with the machine."""
    return Path(os.environ.get("NBTOOLS_CACHE") or Path(tempfile.gettempdir()) / "nbtools").absolute()


def is_far(path: Path) -> bool:
    """Return whether a path, or what a link in it leads to, is on Drive or another slow mount, but not in the cache."""
    if path.is_relative_to(cache()):
        return False
    roots = [drive.MOUNT.resolve(), Path(os.environ.get("NBTOOLS_DRIVE") or drive.MOUNT).resolve()]

    def far(place: str | Path) -> bool:
        real = Path(os.path.realpath(place))
        return any(map(real.is_relative_to, roots)) or disk.is_slow(real)

    if far(path) or not path.is_dir():  # without listing its files, which is slow there
        return far(path)
    items = list(disk.walk(path))
    links = {os.path.realpath(item.path) for item in items if item.is_symlink()}
    return any(map(far, {*links, *(os.path.dirname(item.path) for item in items)}))


def listing(path: Path) -> dict[str, tuple[int, int]]:
    """Return relative path → (size, mtime in ns) of the files below a folder, and of a dangling link itself; of a file:
    ""."""
    seen = {"": path.stat()} if path.is_file() else {}
    start = len(os.path.join(path, ""))
    for item in disk.walk(path) if path.is_dir() else ():
        seen[item.path[start:]] = item.stat(follow_symlinks=item.is_file())
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in seen.items()}


def require_archive(path: Path, text: str) -> None:
    """Raise ArchiveError for a file that by its first bytes is none, with what a web page in its place says."""
    if archive.kind(path):
        return
    with open(path, "rb") as file:
        head = file.read(100_000)
    if re.match(rb"(?i)\s*(\xef\xbb\xbf)?\s*(<!doctype html|<html|<head)", head):
        raise ArchiveError(f"{text}: {about_page(head.decode('utf-8', 'replace'))}", entry="Quota page")
    rule = f"not an archive: it begins with {head[:16]!r}"
    raise ArchiveError(f"{text}: {rule}. Give a folder, tar (plain, gz, xz, bz2) or zip.")
