"""Archives, unpacked safely.

`extractall` of tarfile, even with `filter="data"`, was escaped on 3.11.7, 3.12.1 and 3.13.0 by a dangling link and a
hard link; truncated tars pass in silence. So every entry is checked before anything is written; only plain files are
read, each is created anew below a new folder, and the unpacked size has a limit.
"""

import contextlib
import errno
import gzip
import lzma
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

from nbtools import disk, show
from nbtools.data.progress import BYTES, bar, say
from nbtools.errors import ArchiveError, DiskError

MAGIC = {b"\x1f\x8b": "tar.gz", b"\xfd7zXZ\0": "tar.xz", b"PK\3\4": "zip", b"PK\5\6": "zip"}
OPENERS: dict[str, Callable] = {"tar.gz": gzip.open, "tar.xz": lzma.open}
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # of bzip2 and lzma, a read of zipfile has no bound
ENTRIES = 5_000_000  # more than this is an attack on memory
RATIO, FLOOR = 200, 100_000_000  # bytes unpacked: at most this many times the archive (deflate can 1,032), or the floor
LITTER = re.compile(r"(^|/)(__MACOSX|\.DS_Store|\._[^/]*)(/|$)")  # of macOS
PAGES = [("utf-8", "utf-8"), ("gbk", "gb2312"), ("cp932", "cp932"), ("gbk", "gbk")]  # encoding, its common part
ODD = re.compile(r"^/|\\|\0|^[A-Za-z]:|(^|/)\.\.(/|$)")  # could lead outside a folder


class Entry(NamedTuple):
    """A file of an archive. name: its bytes where no encoding is marked; open: returns the archive, or a stream from
    it, at the file's first byte."""

    name: str | bytes
    size: int
    open: Callable[[], IO[bytes]]


def kind(path: Path) -> str:
    """Return `tar`, `tar.gz`, `tar.xz` or `zip` by the first bytes, whatever the name says. Raises ArchiveError."""
    with open(path, "rb") as file:
        head = file.read(tarfile.BLOCKSIZE)
    for magic, name in MAGIC.items():
        if head.startswith(magic):
            return name
    with contextlib.suppress(tarfile.HeaderError, ValueError):
        if head == bytes(tarfile.BLOCKSIZE) or tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape"):
            return "tar"
    raise ArchiveError(f"not an archive: it begins with {head[:16]!r}. Give a folder, tar (plain, gz, xz) or zip")


def unpack(path: Path, folder: Path, text: str, progress: bool) -> None:
    """Write the files of an archive below `folder`, which must not exist yet. text: its name in messages.

    Raises ArchiveError, with the entry, for damage, links, devices, names that leave the folder or occur twice, and
    more bytes or entries than the limits; DiskError where there is no room. What was written until then stays: the
    caller unpacks into a `.part` and publishes afterwards.
    """
    limit, plain = max(FLOOR, RATIO * path.stat().st_size), folder.with_name(f"{folder.name}.tar")
    with explain_damage(f"{text}: "):
        if opener := OPENERS.get(form := kind(path)):
            inflate(path, opener, plain, limit, progress)
            path, form = plain, kind(plain)
        with open(path, "rb") as file:
            files = entries_of(list(islice((in_zip if form == "zip" else in_tar)(file), ENTRIES + 1)), limit, text)
            size = sum(entry.size for _, entry in files)
            disk.require_space(folder, size)
            with bar(total=size, desc=f"unpack {folder.name}", disable=not progress, **BYTES) as shown:
                for name, entry in files:
                    with explain_damage(f"entry {name!r} "):
                        extract(entry, folder / name, shown.update)
        disk.remove(plain)


def inflate(path: Path, opener: Callable, plain: Path, limit: int, progress: bool) -> None:
    """Write what is compressed, within the limit, to the end, where gzip and xz compare checksums."""
    shown = bar(total=path.stat().st_size, desc=f"unpack {path.name}", disable=not progress, **BYTES)
    with shown, open(path, "rb") as raw, opener(raw) as packed, open(plain, "wb", 0) as whole:
        while data := packed.read(1 << 20):
            disk.write(whole, data)
            require_below(whole.tell(), limit)
            shown.update(raw.tell() - shown.n)


def extract(entry: Entry, target: Path, progress: Callable[[int], object]) -> None:
    """Create a file with the bytes of an entry, as many as announced."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = open(target, "xb", 0)  # noqa: SIM115
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise ArchiveError("has the name of another entry. Rename one") from None
    with file:
        stream, rest = entry.open(), entry.size
        while rest and (data := stream.read(min(disk.PIECE, rest))):
            disk.write(file, data)
            progress(len(data))
            rest -= len(data)
    if rest:
        raise ArchiveError(f"is damaged: {rest} of {entry.size} bytes are missing")


def entries_of(entries: list[Entry], limit: int, text: str) -> list[tuple[str, Entry]]:
    """Return (relative path, entry) of all files but litter. Raises ArchiveError."""
    if len(entries) > ENTRIES:
        raise ArchiveError(f"has more than {ENTRIES} entries, which are too many. Combine small files into fewer")
    require_below(sum(entry.size for entry in entries), limit)
    names = decode_names(text, [entry.name for entry in entries])
    paths = ["/".join(safe_parts(name)) * (name[-1:] != "/" and not LITTER.search(name)) for name in names]
    files = [(path, entry) for path, entry in zip(paths, entries, strict=True) if path]
    if not files:
        raise ArchiveError("holds no files")
    return files


def safe_parts(name: str) -> tuple[str, ...]:
    """Return the components of a relative POSIX name; raise ArchiveError for one that could lead outside its folder."""
    if ODD.search(name):
        rule = "has a name that is absolute, or holds `..`, a backslash, a drive letter or NUL"
        raise ArchiveError(f"entry {name!r} {rule}. Make the archive again with relative names")
    return tuple(part for part in name.split("/") if part not in ("", "."))


def require_below(size: int, limit: int) -> None:
    if size > limit:
        bomb = f"unpacks to more than {show.size(limit)}, like a decompression bomb"
        raise ArchiveError(f"{bomb}. If it is yours, make it a plain tar")


def in_tar(file: IO[bytes]) -> Iterator[Entry]:
    tar, end = tarfile.TarFile(fileobj=file, encoding="utf-8"), -1
    while (member := tar.next()) is not None:
        tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue]: it would keep every header of a million files
        name = member.name.encode("utf-8", "surrogateescape")
        if tar.offset <= end:
            raise ArchiveError(f"entry {member.name!r} points backwards")  # endless before CVE-2025-8194
        end = tar.offset
        if member.isreg() and not member.issparse():
            yield Entry(name, member.size, partial(at, file, member.offset_data))
        elif not member.isdir():
            fix = "Make the archive again with tar --dereference --hard-dereference"
            raise ArchiveError(f"entry {member.name!r} is a link, a device or sparse, which are not read. {fix}")
    if at(file, tar.offset).read(2 * tarfile.BLOCKSIZE) != bytes(2 * tarfile.BLOCKSIZE):  # else tarfile is silent
        raise ArchiveError("ends before its end-of-archive marker: it is truncated or damaged")


def at(file: IO[bytes], start: int) -> IO[bytes]:
    file.seek(start)
    return file


def in_zip(file: IO[bytes]) -> Iterator[Entry]:
    archive = zipfile.ZipFile(file)
    for info in archive.infolist():
        if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise ArchiveError(f"entry {info.filename!r} is a link or a device, which are not read")
        if info.compress_type not in METHODS or (info.CRC and not info.file_size):
            fix = "Make the zip again with the usual settings"
            raise ArchiveError(f"entry {info.filename!r} is damaged, or neither stored nor deflated. {fix}")
        yield Entry(marked_name(info), info.file_size, partial(archive.open, info))


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


def decode_names(text: str, names: list[str | bytes]) -> list[str]:
    """Return names as text, and say so where their encoding was guessed; with slashes where Windows wrote none."""
    raw = b"/".join(name for name in names if isinstance(name, bytes))
    if (encoding := code_page(raw)) != "utf-8":
        first = next(name for name in names if isinstance(name, bytes) and not name.isascii()).decode(encoding)
        rule = f"names that are not UTF-8; by their bytes the encoding {encoding} was guessed, as in {first!r}"
        say(f"{text}: {rule}. If that is wrong, make the archive again with names in UTF-8.")
    whole = [name.decode(encoding) if isinstance(name, bytes) else name for name in names]
    return whole if any("/" in name for name in whole) else [name.replace("\\", "/") for name in whole]


def code_page(raw: bytes) -> str:
    """Return the encoding that names without a mark most likely have: UTF-8, or that of China, Japan, or the West,
    where Asian ones have signs for drawing boxes. Common Chinese characters are those of GB 2312."""
    asian = re.search(r"[^\0-\x7f\u00c0-\u00ff]", raw.decode("cp437"))
    for encoding, common in PAGES if asian else PAGES[:1]:
        with contextlib.suppress(UnicodeError):
            raw.decode(encoding).encode(common)
            return encoding
    return "cp437"


@contextlib.contextmanager
def explain_damage(what: str) -> Iterator[None]:
    """Put what is unpacked in front of whatever goes wrong inside; a disk's errors pass."""
    try:
        yield
        return
    except DiskError:
        raise
    except ArchiveError as error:
        reason = str(error)
    except Exception as error:  # readers let nearly anything escape on damaged input, as mutation shows
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL, errno.ENAMETOOLONG, errno.EILSEQ):
            raise  # None: a decompressor's
        reason = f"is damaged: {type(error).__name__}: {error}. Copy or download it again"
    raise ArchiveError(f"{what}{reason}") from None
