"""Archives: extracted safely, read in place, and written as the one plain tar that a pack is kept as.

`extractall` of tarfile, even with `filter="data"`, was escaped on 3.11.7, 3.12.1 and 3.13.0 by a dangling link and a
hard link; truncated tars pass in silence. So an archive is listed, and each name checked, before anything is written;
only plain files are read, each is created anew below a new folder, and the unpacked size has a limit.
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
from functools import lru_cache
from io import FileIO
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import IO, NamedTuple

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
LITTER = re.compile(r"(^|/)(__MACOSX|\.DS_Store|\._[^/]*)(/|$)")  # of macOS
COPY = "Copy or download it again"
PLAIN = "only plain files and folders are read"


class Place(NamedTuple):
    """Where a file is in an archive: in a tar its bytes, in a zip its header, and what zipfile knows of it."""

    start: int
    size: int
    info: zipfile.ZipInfo | None = None


class Index(NamedTuple):
    """All files of an archive. top: the only folder that holds them all, "" if there is none."""

    files: dict[str, Place]
    top: str


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


def plain(path: Path, target: Path, progress: Progress) -> None:
    """Write the plain tar that a compressed one is made of, within the limit; a plain one and a zip unchanged."""
    limit, done, opener = most(path), 0, OPENERS.get(kind(path), contextlib.nullcontext)
    with explained(path), open(path, "rb") as raw, opener(raw) as file, open(target, "wb", 0) as whole:
        while data := file.read(CHUNK):  # to the end, where gzip, xz and bzip2 compare their checksums
            disk.write(whole, data)
            require_below(whole.tell(), limit)
            before, done = done, raw.tell()
            progress(done - before)


def extract(path: Path, folder: Path, progress: Progress) -> None:
    """Write the files of a plain tar or a zip below `folder`, which must not exist yet.

    Raises ArchiveError, with file and entry, for what `archive_index` refuses and for damage. What was written until
    then stays in `folder`: the caller extracts into a `.part` and publishes afterwards.
    """
    files, made = archive_index(path).files, {folder, *folder.parents}
    folder.mkdir(parents=True)
    with explained(path) as where, open(path, "rb", 0) as source:
        for name, place in files.items():
            where.entry, target = name, folder / name
            try:
                for above in [above for above in reversed(target.parents) if above not in made]:
                    above.mkdir()
                    made.add(above)
                with open(target, "xb", 0) as file:
                    for data in pieces(source, place):
                        disk.write(file, data)
                        progress(len(data))
            except FileExistsError:
                raise ArchiveError("has the name of another entry, on this disk, which ignores case") from None


def read_member(path: Path, name: str) -> bytes:
    """Return a file of a plain tar or a zip, whole; many threads and processes may call it at once, since no handle is
    kept. Raises ArchiveError, with archive and entry, where it is damaged or absent."""
    files = archive_index(path).files
    with explained(path, name), open(path, "rb", 0) as source:
        if name not in files:
            raise ArchiveError("is not in it")
        return b"".join(pieces(source, files[name]))


def pieces(source: FileIO, place: Place) -> Iterator[bytes]:
    """Yield the bytes of a file in an archive, as many as announced."""
    stream, rest = source, place.size
    source.seek(place.start)
    if place.info is not None:
        source.seek(sum(struct.unpack("<26x2H", source.read(30))), os.SEEK_CUR)  # past its name and extra fields
        stream = zipfile.ZipExtFile(source, "r", place.info)  # compares the checksum at the end
    while rest and (data := stream.read(min(disk.PIECE, rest))):
        rest -= len(data)
        yield data
    if rest or (place.info and place.info.CRC and not place.size):  # nothing was read, so nothing compared
        raise ArchiveError(f"is damaged: {rest} of {place.size} bytes are missing. {COPY}")


def archive_index(path: Path) -> Index:
    """Return where each file of a plain tar or a zip lies; looked up once, as long as the archive does not change.

    Raises ArchiveError, with file and entry, for links, devices, names that leave the folder or occur twice, damage, a
    missing end, and more bytes or entries than the limits.
    """
    return index_of(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=32)
def index_of(path: Path, mtime: int) -> Index:
    files: dict[str, Place] = {}
    folders: set[str] = set()
    with explained(path) as where, open(path, "rb") as file:
        if (form := kind(path)) not in IN_PLACE:
            raise ArchiveError("is neither a plain tar nor a zip")
        entries = list(islice((in_zip if form == "zip" else in_tar)(file, where), ENTRIES + 1))
        if len(entries) > ENTRIES:
            raise ArchiveError(f"comes after {ENTRIES} entries, which are too many. Combine small files into fewer")
        require_below(sum(place.size for _, place in entries if place), most(path))
        for name, (_, place) in zip(decoded(path, [name for name, _ in entries]), entries, strict=True):
            where.entry = name
            parts, is_file = safe_parts(name), place and not name.endswith("/")
            if LITTER.search(name) or not parts:
                continue
            above = {"/".join(parts[:end]) for end in range(1, len(parts) + (0 if is_file else 1))}
            folders |= above
            whole = "/".join(parts)
            if above & files.keys() or (is_file and (whole in files or whole in folders)):
                raise ArchiveError("has the name of another entry. Rename one")
            if is_file and place:
                files[whole] = place
        where.entry = ""
        if not files:
            raise ArchiveError("holds no files")
    tops = {name.partition("/")[0] for name in files}
    return Index(files, tops.pop() if len(tops) == 1 and not tops & files.keys() else "")


Entry = tuple[str | bytes, Place | None]  # name, or its bytes where no encoding is marked; None: a folder


def in_tar(file: IO[bytes], where: SimpleNamespace) -> Iterator[Entry]:
    tar, end = tarfile.TarFile(fileobj=file, encoding="utf-8"), -1
    while (member := tar.next()) is not None:
        tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue]: it would keep every header of a million files
        where.entry = member.name
        if tar.offset <= end:
            raise ArchiveError("has a header that points backwards")  # an endless loop before CVE-2025-8194
        end, is_file = tar.offset, member.isreg() and not member.issparse()
        if not (is_file or member.isdir()):
            fix = "Make the archive again with tar --dereference --hard-dereference"
            raise ArchiveError(f"is a link, a device or sparse: {PLAIN}. {fix}")
        name = member.name.encode("utf-8", "surrogateescape")
        yield name, Place(member.offset_data, member.size) if is_file else None
    where.entry = ""
    file.seek(tar.offset)
    if file.read(2 * tarfile.BLOCKSIZE) != bytes(2 * tarfile.BLOCKSIZE):  # tarfile ends at any bad header in silence
        raise ArchiveError(f"ends before its end-of-archive marker: it is truncated or damaged. {COPY}")


def in_zip(file: IO[bytes], where: SimpleNamespace) -> Iterator[Entry]:
    for info in zipfile.ZipFile(file).infolist():
        where.entry = info.filename
        if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR) or info.flag_bits & 1:
            raise ArchiveError(f"is a link, a device or encrypted: {PLAIN}")
        if info.compress_type not in METHODS:
            rule = f"is compressed by method {info.compress_type}, not stored or deflated"
            raise ArchiveError(f"{rule}. Make the zip again with the usual settings")
        yield marked_name(info), Place(info.header_offset, info.file_size, info)


def marked_name(info: zipfile.ZipInfo) -> str | bytes:
    """Return a name as the zip marks it: by Info-ZIP's extra field, or as UTF-8; its bytes where nothing does."""
    if info.flag_bits & 0x800:
        return info.orig_filename
    raw, extra = info.orig_filename.encode("cp437"), info.extra  # zipfile has decoded it so
    while len(extra) >= 4:
        field, size = struct.unpack("<HH", extra[:4])
        if field == 0x7075 and extra[4:9] == struct.pack("<BI", 1, zlib.crc32(raw)):
            return extra[9 : 4 + size].decode()
        extra = extra[4 + size :]
    return raw


def decoded(path: Path, names: list[str | bytes]) -> list[str]:
    """Return names as text, and say so where their encoding was guessed; with slashes where Windows wrote none."""
    raw = b"/".join(name for name in names if isinstance(name, bytes))
    encoding = code_page(raw)
    if encoding != "utf-8":
        first = next(name for name in names if isinstance(name, bytes) and not name.isascii()).decode(encoding)
        rule = f"names that are not UTF-8; by their bytes the encoding {encoding} was guessed, as in {first!r}"
        say(f"{path}: {rule}. If that is wrong, make the archive again with names in UTF-8.")
    texts = [name.decode(encoding) if isinstance(name, bytes) else name for name in names]
    return texts if any("/" in text for text in texts) else [text.replace("\\", "/") for text in texts]


def code_page(raw: bytes) -> str:
    """Return the encoding that names without a mark most likely have: UTF-8, or that of China, Japan, or the West.

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


def safe_parts(name: str) -> tuple[str, ...]:
    """Return the components of a relative POSIX name; raise ArchiveError for one that could lead outside its folder."""
    if name.startswith("/") or re.search(r"\\|\0|^[A-Za-z]:", name) or ".." in name.split("/"):
        rule = "has a name that is absolute, or holds `..`, a backslash, a drive letter or NUL"
        raise ArchiveError(f"{rule}. Make the archive again with relative names")
    return tuple(part for part in name.split("/") if part not in ("", "."))


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


def most(path: Path) -> int:
    """Return the bytes that an archive may unpack to."""
    return max(FLOOR, RATIO * path.stat().st_size)


def require_below(size: int, limit: int) -> None:
    if size > limit:
        bomb = f"unpacks to more than {show.size(limit)}, like a decompression bomb"
        raise ArchiveError(f"{bomb}. If it is yours, make it a plain tar")


@contextlib.contextmanager
def explained(path: Path, entry: str = "") -> Iterator[SimpleNamespace]:
    """Put the file, and the entry noted in what this yields, into whatever goes wrong inside; an OSError that is the
    disk's own passes."""
    where = SimpleNamespace(entry=entry)
    try:
        yield where
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
    raise ArchiveError(f"{path}: {f'entry {where.entry!r} ' if where.entry else ''}{reason}.") from None
