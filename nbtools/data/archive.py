"""Archives: extracted safely, read in place, and written as the one plain tar that a pack is kept as.

`extractall` of tarfile, even with `filter="data"`, was escaped on 3.11.7, 3.12.1 and 3.13.0 by a dangling link and a
hard link; truncated tars pass in silence, and gzip's checksum is not read. So every name is checked here, only plain
files are read, each is created anew below a new folder, and the unpacked size has a limit.
"""

import bz2
import contextlib
import errno
import gzip
import hashlib
import lzma
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

from nbtools import disk, show
from nbtools.data.progress import say
from nbtools.errors import ArchiveError

Progress = Callable[[int], object]  # called with the bytes that came
CHUNK = 1 << 20
MAGIC = {b"\x1f\x8b": "tar.gz", b"\xfd7zXZ\0": "tar.xz", b"BZh": "tar.bz2", b"PK\3\4": "zip", b"PK\5\6": "zip"}
OPENERS: dict[str | None, Callable] = {"tar.gz": gzip.open, "tar.xz": lzma.open, "tar.bz2": bz2.open}
IN_PLACE = ("tar", "zip")  # files can be read from these without unpacking them
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # bzip2 and lzma make 20 GB of a MB, and zipfile sets no bound
ENTRIES = 5_000_000  # more than this is an attack on memory
RATIO, FLOOR = 200, 100_000_000  # bytes unpacked: at most this many times the archive (deflate can 1,032), or the floor
COPY = "Copy or download it again"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a file is in an archive: in a tar its bytes, in a zip its header, which also has a method and a CRC."""

    start: int
    packed: int
    size: int
    method: int | None = None
    crc: int = 0


@dataclass(frozen=True)
class Index:
    """All files of an archive. top: the only folder that holds them all, "" if there is none."""

    files: dict[str, Place]
    top: str


File = tuple[str, Place, Callable[[], Any]]  # name, place, how to open it


def kind(path: Path) -> str | None:
    """Return `tar`, `tar.gz`, `tar.xz`, `tar.bz2` or `zip` by the first bytes, whatever the name says; else None."""
    with open(path, "rb") as file:
        head = file.read(tarfile.BLOCKSIZE)
    for magic, name in MAGIC.items():
        if head.startswith(magic):
            return name
    with contextlib.suppress(tarfile.HeaderError, ValueError):
        return "tar" if tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape") else None
    return "tar" if head == bytes(tarfile.BLOCKSIZE) else None


def unpacked_size(path: Path) -> int:
    """Return the bytes that `extract` writes: exact for a zip, about that for a tar, a lower bound for the others."""
    with explained(path):
        infos = zipfile.ZipFile(path).infolist() if kind(path) == "zip" else []
    return sum(info.file_size for info in infos) or path.stat().st_size


def extract(path: Path, folder: Path, progress: Progress) -> None:
    """Write an archive's files below `folder`, which must not exist yet. progress: by bytes of the archive.

    Raises ArchiveError, with file and entry, for links, devices, names that leave the folder or are there already,
    damage of any kind, a missing end, and more bytes or entries than the limits. What was written until then stays in
    `folder`: the caller extracts into a `.part` and publishes afterwards.
    """
    with explained(path, names := Names(path)):
        folder.mkdir(parents=True)
        made = {folder, *folder.parents}
        for name, place, content in files_in(path, names, progress):
            target = folder / name
            try:
                for above in [above for above in reversed(target.parents) if above not in made]:
                    above.mkdir()
                    made.add(above)
                with open(target, "xb", buffering=0) as file, content() as stream:
                    while data := stream.read(disk.PIECE):
                        disk.write(file, data)
                    require_whole(file.tell(), place)
            except FileExistsError:
                raise ArchiveError("has the name of another entry, on this disk, which ignores case") from None


def plain(path: Path, target: Path, progress: Progress) -> None:
    """Write the plain tar that a compressed one is made of, within the same limit; a plain one and a zip unchanged.
    Its files are not examined."""
    limit, done = budget(path.stat().st_size), 0
    with explained(path), opened(path) as (raw, file), open(target, "xb", buffering=0) as unpacked:
        while data := file.read(CHUNK):
            disk.write(unpacked, data)
            require_below(unpacked.tell(), limit)
            before, done = done, raw.tell()
            progress(done - before)


def archive_index(path: Path) -> Index:
    """Return where each file of a plain tar or a zip lies; looked up once, as long as the archive does not change.
    Raises ArchiveError, with file and entry, for all that `extract` would refuse."""
    return index_of(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=32)
def index_of(path: Path, mtime: int) -> Index:
    with explained(path, names := Names(path)):
        if kind(path) not in IN_PLACE:
            raise ArchiveError("has no files that can be read in place: it is neither a plain tar nor a zip")
        files = {name: place for name, place, _ in files_in(path, names)}
    tops = {name.partition("/")[0] for name in files}
    return Index(files, tops.pop() if len(tops) == 1 and not tops & files.keys() else "")


def read_member(path: Path, name: str) -> bytes:
    """Return a file of a plain tar or a zip, whole; many threads and processes may call it at once, since no handle is
    kept. Raises ArchiveError, with archive and entry, where it is damaged, absent, or larger than fits the archive."""
    with explained(path, name):
        place = archive_index(path).files.get(name)
        if place is None:
            raise ArchiveError("is not in it")
        require_below(place.size, budget(place.packed))
        with open(path, "rb", buffering=0) as file:
            file.seek(place.start)
            if place.method is not None:
                file.seek(sum(struct.unpack("<26x2H", file.read(30))), os.SEEK_CUR)  # past its name and extra fields
            data = file.read(place.packed)
        if place.method == zipfile.ZIP_DEFLATED:
            data = zlib.decompressobj(-15).decompress(data, place.size + 1)
        require_whole(len(data), place, zlib.crc32(data))
        return data


def write(files: Mapping[str, Path], path: Path, ready: Callable[[], None] = lambda: None) -> str:
    """Put files (name → where) into one plain tar, atomically, and read it back → its SHA-256. The same bytes whenever
    names and contents are the same. ready: called once it is whole, before it gets its name."""
    part = path.with_name(path.name + ".part")
    with disk.explained(f"writing {path.name}", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(part, "wb") as file, tarfile.open(fileobj=(summed := Summed(file)), mode="w|") as tar:  # pyright: ignore
                for name, source in sorted(files.items()):
                    info = tarfile.TarInfo(name)  # mtime, owner, mode: the defaults
                    info.size = source.stat().st_size
                    with open(source, "rb") as content:
                        tar.addfile(info, content)
            if disk.sha256(part) != summed.digest.hexdigest():
                raise OSError(errno.EIO, "reads back differently from what was written", str(part))
            ready()
            disk.sync_path(part)
            disk.rename(part, path)
        except BaseException:  # also where the user interrupts: a full Drive has no room for it
            with contextlib.suppress(OSError):  # the disk that failed may refuse this too: the first error counts
                disk.remove(part)
            raise
    return summed.digest.hexdigest()


class Summed:
    """A file that is only written to, and the SHA-256 of that."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.file.write(data)


class Names:
    """The names of an archive: each stays below its folder and occurs once."""

    def __init__(self, path: Path) -> None:
        self.path, self.entry, self.encoding = path, "", "utf-8"
        self.seen: dict[str, bool] = {}  # relative path → whether it is a file

    def __str__(self) -> str:
        """Return the entry being examined."""
        return self.entry

    def take(self, name: str, is_file: bool) -> str:
        """Return the relative path of an entry, claimed; "" if it is litter of macOS."""
        self.entry = name
        parts = safe_parts(name)
        if "__MACOSX" in parts or any(part.startswith("._") or part == ".DS_Store" for part in parts):
            return ""
        for end in range(1, len(parts) + 1):
            path, whole = "/".join(parts[:end]), is_file and end == len(parts)
            if (whole and path in self.seen) or self.seen.setdefault(path, whole) != whole:
                raise ArchiveError("has the name of another entry. Rename one")
        if len(self.seen) > ENTRIES:
            raise ArchiveError(f"is one of more than {ENTRIES} entries. Combine small files into fewer")
        return "/".join(parts)

    def code_page(self, raw: bytes) -> str:
        """Return the encoding of names that are not marked; it is said where that is not UTF-8."""
        if self.encoding == "utf-8":
            self.encoding = code_page(raw)
            if self.encoding != "utf-8":
                text = raw.decode(self.encoding, "replace").partition("/")[0]
                rule = f"its names are not UTF-8, and by their bytes the encoding {self.encoding} was guessed, as in {text!r}"
                say(f"{self.path}: {rule}. If that is wrong, make the archive again with names in UTF-8.")
        return self.encoding


def safe_parts(name: str) -> tuple[str, ...]:
    """Return the components of a relative POSIX name; raise ArchiveError for one that could lead outside its folder."""
    if name.startswith("/") or re.search(r"\\|\0|^[A-Za-z]:", name) or ".." in name.split("/"):
        rule = "has a name that is absolute, or holds `..`, a backslash, a drive letter or NUL"
        raise ArchiveError(f"{rule}. Make the archive again with relative names")
    return tuple(part for part in name.split("/") if part not in ("", "."))


def code_page(raw: bytes) -> str:
    """Return the encoding that names without a mark most likely have: UTF-8, or of Windows in China, Japan, or the West.

    A Western name has a few Latin letters among others: read as such, Asian ones have signs for drawing boxes, capitals
    behind small letters, or nothing but such letters. Common Chinese characters are those of GB 2312.
    """
    western = raw.decode("cp437")
    asian = re.search(r"[^\0-\x7f\u00c0-\u00ff]|[\u00df-\u00ff][A-Z]|(^|/)[\u00c0-\u00ff]{2,}([/.]|$)", western)
    choices = [("gbk", "gb2312"), ("cp932", "cp932"), ("gbk", "gbk")] if asian else []
    for encoding, common in (("utf-8", "utf-8"), *choices):
        with contextlib.suppress(UnicodeError):
            raw.decode(encoding).encode(common)
            return encoding
    return "cp437"


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open an archive → (its own bytes, those of the tar in it)."""
    with open(path, "rb") as raw, OPENERS.get(kind(path), contextlib.nullcontext)(raw) as file:
        yield raw, file


def files_in(path: Path, names: Names, progress: Progress = int) -> Iterator[File]:
    """Yield the files of any archive in order, to be iterated to the end: damage may follow the last. Of a compressed
    tar the places are those in the tar within it."""
    limit, done = budget(path.stat().st_size), 0
    is_zip = kind(path) == "zip"
    with opened(path) as (raw, file):
        for one in in_zip(raw, names, limit) if is_zip else in_tar(file, names, limit):
            yield one
            before, done = done, done + one[1].packed if is_zip else raw.tell()
            progress(done - before)
        while file is not raw and file.read(CHUNK):
            pass  # so that gzip, xz and bzip2 compare their checksums
    if not done:
        raise ArchiveError("holds no files")


def in_tar(file: IO[bytes], names: Names, limit: int) -> Iterator[File]:
    tar, end = tarfile.TarFile(fileobj=Capped(file), encoding="utf-8"), -1  # pyright: ignore[reportArgumentType]
    while (member := tar.next()) is not None:
        tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue]: it would keep every header of a million files
        require_below(tar.offset, limit)
        if tar.offset <= end:
            raise ArchiveError("has a header that points backwards")  # an endless loop before CVE-2025-8194
        end, is_file = tar.offset, member.isreg() and not member.issparse()
        raw = member.name.encode("utf-8", "surrogateescape")
        name = names.take(raw.decode(names.code_page(raw), "replace"), is_file)
        if not (is_file or member.isdir()):
            raise ArchiveError(
                "is a link, a device or sparse: only plain files and folders are read. Make the archive again "
                "with tar --dereference --hard-dereference"
            )
        if name and is_file:
            yield name, Place(member.offset_data, member.size, member.size), partial(tar.extractfile, member)
    names.entry = ""
    file.seek(tar.offset)
    if file.read(2 * tarfile.BLOCKSIZE) != bytes(2 * tarfile.BLOCKSIZE):  # tarfile ends at any bad header in silence
        raise ArchiveError(f"ends before its end-of-archive marker: it is truncated or damaged. {COPY}")


class Capped:
    """What tarfile reads from: an extended header that claims gigabytes would be held in memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, count: int) -> bytes:
        if not 0 <= count <= 16 * CHUNK:
            raise ArchiveError(f"has a header of {show.size(count)}")
        return self.file.read(count)


def in_zip(file: IO[bytes], names: Names, limit: int) -> Iterator[File]:
    reader = zipfile.ZipFile(file)
    infos = reader.infolist()
    require_below(sum(info.file_size for info in infos), limit)
    for info, text in zip(infos, names_in_zip(infos, names), strict=True):
        is_file = not text.endswith("/")
        name = names.take(text, is_file)
        if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR) or info.flag_bits & 1:
            raise ArchiveError("is a link, a device or encrypted: only plain files and folders are read")
        if info.compress_type not in METHODS:
            method = f"is compressed by method {info.compress_type}, but only stored and deflated entries are read"
            raise ArchiveError(f"{method}. Make the zip again with the usual settings")
        place = Place(info.header_offset, info.compress_size, info.file_size, info.compress_type, info.CRC)
        if is_file and name:
            if not place.size:
                require_whole(0, place, 0)  # zipfile compares no checksum where nothing is to be read
            yield name, place, partial(reader.open, info)  # compares the CRC at the end


def names_in_zip(infos: list[zipfile.ZipInfo], names: Names) -> list[str]:
    """Return the names, with slashes where Windows PowerShell 5.1 wrote none."""
    marked = [marked_name(info) for info in infos]
    encoding = names.code_page(b"/".join(name for name in marked if isinstance(name, bytes)))
    texts = [name.decode(encoding) if isinstance(name, bytes) else name for name in marked]
    return texts if any("/" in text for text in texts) else [text.replace("\\", "/") for text in texts]


def marked_name(info: zipfile.ZipInfo) -> str | bytes:
    """Return a name as the zip marks it: by Info-ZIP's extra field, or as UTF-8; its bytes where nothing does."""
    if info.flag_bits & 0x800 or info.orig_filename.isascii():
        return info.orig_filename
    raw, extra = info.orig_filename.encode("cp437"), info.extra  # zipfile has decoded it so
    while len(extra) >= 4:
        field, size = struct.unpack("<HH", extra[:4])
        if field == 0x7075 and extra[4:9] == struct.pack("<BI", 1, zlib.crc32(raw)):
            return extra[9 : 4 + size].decode()
        extra = extra[4 + size :]
    return raw


def budget(packed: int) -> int:
    """Return the bytes that this many may unpack to."""
    return max(FLOOR, RATIO * packed)


def require_below(size: int, limit: int) -> None:
    if size > limit:
        bomb = f"unpacks to more than {show.size(limit)}, like a decompression bomb"
        raise ArchiveError(f"{bomb}. If it is yours, make it a plain tar")


def require_whole(size: int, place: Place, crc: int | None = None) -> None:
    if size != place.size:
        raise ArchiveError(f"is damaged: {size} bytes long instead of the {place.size} announced. {COPY}")
    if place.method is not None and crc not in (None, place.crc):
        raise ArchiveError(f"is damaged: its checksum is another. {COPY}")


@contextlib.contextmanager
def explained(path: Path, entry: object = "") -> Iterator[None]:
    """Put file and entry into whatever goes wrong inside; an OSError that is the disk's own passes."""
    try:
        yield
    except ArchiveError as error:
        reason = str(error)
    except OSError as error:
        if error.errno not in (None, errno.EINVAL, errno.ENAMETOOLONG, errno.EILSEQ):  # None: a decompressor's
            raise
        reason = f"is damaged: {error}. {COPY}"
    except Exception as error:  # readers let nearly anything escape on damaged input, as mutation shows
        reason = f"is damaged: {type(error).__name__}: {error}. {COPY}"
    else:
        return
    raise ArchiveError(f"{path}: {f'entry {str(entry)!r} ' if str(entry) else ''}{reason}.") from None
