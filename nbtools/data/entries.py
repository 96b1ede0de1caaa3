"""The entries of a tar or zip in order, every name and header checked: what `archive` writes and `members` reads.

`tarfile` and `zipfile` only read here, and believe too much: links that lead out, headers that point backwards, ends
that are missing, two directories that disagree.
"""

import bz2
import contextlib
import errno
import gzip
import lzma
import re
import stat
import struct
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import IO

from nbtools import disk
from nbtools.errors import ArchiveError

CHUNK = 1 << 20
MAGIC = {b"\x1f\x8b": "tar.gz", b"\xfd7zXZ\0": "tar.xz", b"BZh": "tar.bz2", b"PK\3\4": "zip", b"PK\5\6": "zip"}
OPENERS: dict[str, Callable] = {
    "tar": contextlib.nullcontext,
    "tar.gz": gzip.open,
    "tar.xz": lzma.open,
    "tar.bz2": bz2.open,
}
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # bzip2 and lzma make 20 GB of a MB, and zipfile sets no bound
ENTRIES = 5_000_000  # more than this is an attack on memory
RATIO, FLOOR = 200, 100_000_000  # bytes unpacked: at most so many times the archive (deflate can 1,032), or the floor
STRAY = (  # what the readers let escape on damaged input, beside their own errors; found by mutation
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError),
    *(ValueError, RuntimeError, ArithmeticError, LookupError, TypeError, MemoryError),
)


def kind(path: Path) -> str | None:
    """`tar`, `tar.gz`, `tar.xz`, `tar.bz2` or `zip` by the first bytes, whatever the name says; else None."""
    with open(path, "rb") as file:
        head = disk.read(file, tarfile.BLOCKSIZE)
    for magic, name in MAGIC.items():
        if head.startswith(magic):
            return name
    try:
        tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except STRAY:
        return "tar" if head == bytes(tarfile.BLOCKSIZE) else None  # an empty tar is all zeros
    return "tar"


def safe_parts(name: str) -> tuple[str, ...]:
    """The components of a relative POSIX name; ArchiveError for one that could lead anywhere but below its folder."""
    if name.startswith("/") or "\\" in name or "\0" in name or re.match("[A-Za-z]:", name) or ".." in name.split("/"):
        raise ArchiveError("has a name that is absolute, or holds `..`, a backslash, a drive letter or NUL")
    return tuple(part for part in name.split("/") if part not in ("", "."))


class Names:
    """The names of an archive: each leads below its folder and stands once, on disks that ignore case too."""

    def __init__(self) -> None:
        self.spelled: dict[str, tuple[str, ...]] = {}  # folded → as first spelled
        self.files: set[str] = set()  # folded
        self.entry, self.entries = "", 0

    def take(self, name: str, is_file: bool) -> tuple[str, ...] | None:
        """The components of an entry's name, claimed; None if it is not wanted."""
        self.entry, self.entries = name, self.entries + 1
        if self.entries > ENTRIES:
            raise ArchiveError(f"is one of more than {ENTRIES} entries. Pack many small files into fewer")
        parts = safe_parts(name)
        if not parts or _is_litter(parts):
            return None
        for depth in range(1, len(parts) + 1):
            self._claim(parts[:depth], is_file and depth == len(parts))
        return parts

    def _claim(self, parts: tuple[str, ...], is_file: bool) -> None:
        nfc = unicodedata.normalize("NFC", "/".join(parts))
        folded = unicodedata.normalize("NFC", nfc.casefold())
        spelled = self.spelled.get(folded)
        if spelled is None:
            self.spelled[folded] = parts
            if is_file:
                self.files.add(folded)
            else:
                self.enter(parts)
        elif is_file or spelled != parts or folded in self.files:
            raise ArchiveError(
                f"has the same name as {'/'.join(spelled)!r} (on disks that ignore case or Unicode form). Rename one"
            )

    def enter(self, parts: tuple[str, ...]) -> None:
        """A folder comes for the first time."""


def _is_litter(parts: tuple[str, ...]) -> bool:
    """What macOS adds to archives."""
    return "__MACOSX" in parts or any(part.startswith("._") or part == ".DS_Store" for part in parts)


class Forward:
    """What tarfile reads from: forward only, so that nothing is decompressed twice, and counted."""

    def __init__(self, raw: IO[bytes], file: IO[bytes], limit: int, progress: Callable[[int], object]) -> None:
        self.raw, self.file, self.limit, self.progress = raw, file, limit, progress
        self.position, self.raw_position, self.last = 0, 0, b""

    def read(self, count: int) -> bytes:
        if not 0 <= count <= 16 * CHUNK:  # an extended header that claims gigabytes would be held in memory
            raise ArchiveError(f"has a header of {disk.human(count)}")
        self.last = disk.read(self.file, count)
        self.position += len(self.last)
        if self.position > self.limit:
            raise bomb(self.limit)
        before, self.raw_position = self.raw_position, self.raw.tell()
        self.progress(self.raw_position - before)
        return self.last

    def seek(self, position: int) -> None:
        if position < self.position:
            raise ArchiveError("has a header that points backwards")
        if self.file is self.raw:  # a plain tar: what nobody wants is not read
            self.position = self.file.seek(position)
        while self.position < position and self.read(min(CHUNK, position - self.position)):
            pass

    def tell(self) -> int:
        return self.position


def in_tar(stream: Forward, names: Names) -> Iterator[tuple[tuple[str, ...], tarfile.TarFile, tarfile.TarInfo]]:
    """The files of a tar in order, as (components of the name, reader, header). To be read on to the end: damage may
    be found behind the last."""
    tar = tarfile.TarFile(fileobj=stream, mode="r", encoding="utf-8")  # pyright: ignore[reportArgumentType]
    end = -1
    while (member := tar.next()) is not None:
        tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue]: it would keep every header of a million files
        if tar.offset <= end:
            raise ArchiveError("has a header that points backwards")  # an endless loop before CVE-2025-8194
        end, is_file = tar.offset, member.isreg() and not member.issparse()
        parts = names.take(member.name, is_file)
        if not (is_file or member.isdir()):
            raise ArchiveError(
                "is a link, a device or sparse: only plain files and folders are read. Make the archive again "
                "with tar --dereference --hard-dereference"
            )
        if parts is not None and is_file:
            yield parts, tar, member
    names.entry = ""
    zeros = bytes(tarfile.BLOCKSIZE)
    if stream.last != zeros or stream.read(tarfile.BLOCKSIZE) != zeros:  # tarfile ends at any bad header in silence
        raise ArchiveError("ends before its end mark: it is truncated or damaged. Copy or download it again")
    while stream.file is not stream.raw and stream.read(CHUNK):  # so that gzip, xz and bzip2 compare their checksums
        pass


def in_zip(
    file: IO[bytes], reader: zipfile.ZipFile, names: Names, limit: int
) -> Iterator[tuple[tuple[str, ...] | None, zipfile.ZipInfo, int]]:
    """Every entry of a zip, as (components of a file's name, entry, first byte of its data)."""
    infos = reader.infolist()
    if sum(info.file_size for info in infos) > limit:
        raise bomb(limit)
    starts = _compare_directories(file, infos, reader.start_dir, names)
    for info in infos:
        mode = stat.S_IFMT(info.external_attr >> 16)
        parts = names.take(info.orig_filename, not info.is_dir())
        if mode not in (0, stat.S_IFREG, stat.S_IFDIR) or info.flag_bits & 1:
            raise ArchiveError("is a link, a device or encrypted: only plain files and folders are read")
        if info.compress_type not in METHODS:
            raise ArchiveError(
                f"is compressed by method {info.compress_type}, and entries are stored or deflated. Make the zip again "
                "in the usual way"
            )
        yield None if info.is_dir() else parts, info, starts[info.header_offset]


def _compare_directories(file: IO[bytes], infos: list[zipfile.ZipInfo], end: int, names: Names) -> dict[int, int]:
    """First byte of each header → that of its data. Raise unless the entries' own headers agree with the directory, one
    after the other and nothing between them.

    Else one reader sees other files than the next one: what was checked is not what is used.
    """
    position, slack, starts = 0, 0, {}
    for info in sorted(infos, key=lambda info: info.header_offset):
        names.entry = info.orig_filename
        if not position <= info.header_offset <= position + slack:
            raise ArchiveError("overlaps another entry, or follows bytes that the zip's directory does not list")
        file.seek(info.header_offset)
        magic, _, flags, method, _, _, crc, packed, size, name, extra = struct.unpack("<4s5H3L2H", disk.read(file, 30))
        known = [(crc, info.CRC), (packed, info.compress_size), (size, info.file_size)]
        if flags & 8:  # sizes follow the data; then the header holds zeros
            known = [pair for pair in known if pair[0]]
        differs = any(here != there and here != 0xFFFFFFFF for here, there in known)  # 0xFFFFFFFF: in the zip64 field
        spelled = disk.read(file, name).decode("utf-8" if info.flag_bits & 0x800 else "cp437")
        if magic != b"PK\3\4" or method != info.compress_type or differs or spelled != info.orig_filename:
            raise ArchiveError("is described differently by the zip's directory and by its own header")
        starts[info.header_offset] = info.header_offset + 30 + name + extra
        position = starts[info.header_offset] + info.compress_size
        slack = 24 if flags & 8 else 0
    if not position <= end <= position + slack:
        raise ArchiveError("is followed by bytes that the zip's directory does not list")
    return starts


def budget(packed: int) -> int:
    """Bytes that so many may unpack to."""
    return max(FLOOR, RATIO * packed)


def bomb(limit: int) -> ArchiveError:
    return ArchiveError(
        f"unpacks to more than {disk.human(limit)}, like a decompression bomb. If it is yours, make it a plain tar"
    )


def pour(content: IO[bytes], file: FileIO, size: int) -> None:
    """Copy `size` bytes; raise where there are fewer."""
    rest = size
    while data := disk.read(content, min(CHUNK, rest)):
        rest -= len(data)
        disk.write(file, data)
    require_size(size - rest, size)


def require_size(came: int, size: int) -> None:
    if came != size:
        raise ArchiveError(f"is {came} bytes long where {size} were announced")


@contextlib.contextmanager
def refusals(path: Path, entry: Callable[[], str] = str) -> Iterator[None]:
    """Put file and entry into whatever goes wrong inside; an OSError that is the disk's own passes."""
    try:
        yield
    except ArchiveError as error:
        reason = str(error)
    except STRAY as error:
        reason = f"is damaged: {type(error).__name__}: {error}. Copy or download it again"
    except OSError as error:
        if error.errno not in (None, errno.EINVAL, errno.ENAMETOOLONG, errno.EILSEQ):  # None: a decompressor's
            raise
        reason = f"is damaged: {error}. Copy or download it again"
    else:
        return
    raise ArchiveError(f"{path}: {f'entry {entry()!r} ' if entry() else ''}{reason}.") from None
