"""Safe extraction of tar and zip, and the one plain tar that a pack is kept as.

`tarfile` and `zipfile` only read here: `extractall`, even with `filter="data"`, was escaped on 3.11.7, 3.12.1 and
3.13.0 by a dangling link and a hard link, takes truncated tars in silence and never reads gzip's checksum. So: files
and folders only, every name checked, every file made new (O_EXCL) below a folder made new, budgets while writing.
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


def unpacked_size(path: Path) -> int:
    """Bytes that `extract` writes: exact for a zip, some headers too many for a tar, a lower bound for the others.

    It is also how far `extract`'s progress runs.
    """
    size = path.stat().st_size
    if kind(path) == "zip":
        with _refusals(path), zipfile.ZipFile(path) as reader:
            return sum(info.file_size for info in reader.infolist())
    return size


def extract(path: Path, folder: Path, progress: Callable[[int], object] = lambda count: None) -> int:
    """Write an archive's files below `folder`, which must not exist yet → number of files.

    Raises ArchiveError, with file and entry, for links, devices, names that leave the folder or collide (by case or
    Unicode form too), damage of any kind, a missing end, and more than the budgets above. What was written until then
    stays in `folder`: the caller extracts into a `.part` and publishes afterwards.
    """
    tree = _Tree(folder)
    with _refusals(path, tree):
        form = kind(path)
        if form is None:
            raise ArchiveError("is not a tar, tar.gz, tar.xz, tar.bz2 or zip")
        disk.make_folder(folder, fresh=True)
        limit = max(FLOOR, RATIO * path.stat().st_size)
        if form == "zip":
            _extract_zip(path, tree, limit, progress)
        else:
            with open(path, "rb") as raw, OPENERS[form](raw) as file:
                _extract_tar(_Forward(raw, file, limit, progress), tree)
        if not tree.files:
            raise ArchiveError("holds no files")
    return len(tree.files)


def write(folder: Path, path: Path) -> Path:
    """Put a folder's files into one plain tar, atomically; the same bytes whenever names and contents are the same."""
    part = path.with_name(path.name + ".part")
    with disk.explained(f"archiving {folder}", path):
        disk.make_folder(path.parent)
        disk.remove(part)
        with disk.create(part) as file:
            for source in sorted(folder.rglob("*")):
                _append_member(file, source, source.relative_to(folder).as_posix())
            disk.write(file, bytes(2 * tarfile.BLOCKSIZE))
        return disk.publish_file(part, path)


def _append_member(file: FileIO, source: Path, name: str) -> None:
    if source.is_symlink() or not (source.is_file() or source.is_dir()):
        raise ArchiveError(f"{source}: only files and folders can be archived. Replace it by what it points to.")
    if source.is_file():
        info = tarfile.TarInfo(name)  # mtime, owner and mode stay at their defaults
        info.size = source.stat().st_size
        disk.write(file, info.tobuf(tarfile.PAX_FORMAT))
        with open(source, "rb") as content:
            _pour(content, file, info.size)
        disk.write(file, bytes(-info.size % tarfile.BLOCKSIZE))


def safe_parts(name: str) -> tuple[str, ...]:
    """The components of a relative POSIX name; ArchiveError for one that could lead anywhere but below its folder."""
    if name.startswith("/") or "\\" in name or "\0" in name or re.match("[A-Za-z]:", name) or ".." in name.split("/"):
        raise ArchiveError("has a name that is absolute, or holds `..`, a backslash, a drive letter or NUL")
    return tuple(part for part in name.split("/") if part not in ("", "."))


def _is_litter(parts: tuple[str, ...]) -> bool:
    """What macOS adds to archives."""
    return "__MACOSX" in parts or any(part.startswith("._") or part == ".DS_Store" for part in parts)


class _Tree:
    """The folder that an extraction fills: the only place that turns a name from an archive into a path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, tuple[str, ...]] = {}  # folded → as first spelled
        self.files: set[str] = set()  # folded
        self.entry, self.entries = "", 0

    def place(self, name: str, is_file: bool) -> Path | None:
        """Where an entry goes, its folders made; None if it is not wanted."""
        self.entry, self.entries = name, self.entries + 1
        if self.entries > ENTRIES:
            raise ArchiveError(f"is one of more than {ENTRIES} entries. Pack many small files into fewer")
        parts = safe_parts(name)
        if not parts or _is_litter(parts):
            return None
        for depth in range(1, len(parts) + 1):
            self._claim(parts[:depth], is_file and depth == len(parts))
        return self.folder.joinpath(*parts)

    def _claim(self, parts: tuple[str, ...], is_file: bool) -> None:
        nfc = unicodedata.normalize("NFC", "/".join(parts))
        folded = unicodedata.normalize("NFC", nfc.casefold())
        spelled = self.names.get(folded)
        if spelled is None:
            self.names[folded] = parts
            if is_file:
                self.files.add(folded)
            else:
                disk.make_folder(self.folder.joinpath(*parts), fresh=True)
        elif is_file or spelled != parts or folded in self.files:
            raise ArchiveError(
                f"has the same name as {'/'.join(spelled)!r} (on disks that ignore case or Unicode form). Rename one"
            )

    def add(self, path: Path, content: IO[bytes], size: int) -> None:
        with disk.create(path) as file:
            _pour(content, file, size)


def _pour(content: IO[bytes], file: FileIO, size: int) -> None:
    """Copy a content that must be `size` bytes, neither fewer nor more."""
    rest = size
    while data := disk.read(content, CHUNK):
        rest -= len(data)
        disk.write(file, data)
    if rest:
        raise ArchiveError(f"is {size - rest} bytes long where {size} were announced")


class _Forward:
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
            raise _bomb(self.limit)
        before, self.raw_position = self.raw_position, self.raw.tell()
        self.progress(self.raw_position - before)
        return self.last

    def seek(self, position: int) -> None:
        if position < self.position:
            raise ArchiveError("has a header that points backwards")
        while self.position < position and self.read(min(CHUNK, position - self.position)):
            pass

    def tell(self) -> int:
        return self.position


def _extract_tar(stream: _Forward, tree: _Tree) -> None:
    tar = tarfile.TarFile(fileobj=stream, mode="r", encoding="utf-8")  # pyright: ignore[reportArgumentType]
    end = -1
    while (member := tar.next()) is not None:
        tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue]: it would keep every header of a million files
        if tar.offset <= end:
            raise ArchiveError("has a header that points backwards")  # an endless loop before CVE-2025-8194
        end, is_file = tar.offset, member.isreg() and not member.issparse()
        path = tree.place(member.name, is_file)
        if not (is_file or member.isdir()):
            raise ArchiveError(
                "is a link, a device or sparse: only plain files and folders are extracted. Make the archive again "
                "with tar --dereference --hard-dereference"
            )
        if path is not None and is_file:
            content = tar.extractfile(member)
            assert content is not None
            tree.add(path, content, member.size)
    tree.entry = ""
    zeros = bytes(tarfile.BLOCKSIZE)
    if stream.last != zeros or stream.read(tarfile.BLOCKSIZE) != zeros:  # tarfile ends at any bad header in silence
        raise ArchiveError("ends before its end mark: it is truncated or damaged. Copy or download it again")
    while stream.read(CHUNK):  # so that gzip, xz and bzip2 compare their checksums
        pass


def _extract_zip(path: Path, tree: _Tree, limit: int, progress: Callable[[int], object]) -> None:
    with open(path, "rb") as file, zipfile.ZipFile(file) as reader:
        infos = reader.infolist()
        if sum(info.file_size for info in infos) > limit:
            raise _bomb(limit)
        _compare_directories(file, infos, reader.start_dir, tree)
        for info in infos:
            mode = stat.S_IFMT(info.external_attr >> 16)
            target = tree.place(info.orig_filename, not info.is_dir())
            if mode not in (0, stat.S_IFREG, stat.S_IFDIR) or info.flag_bits & 1:
                raise ArchiveError("is a link, a device or encrypted: only plain files and folders are extracted")
            if target is not None and not info.is_dir():
                with reader.open(info) as content:  # compares the two names, and the CRC at the end
                    tree.add(target, content, info.file_size)
            progress(info.file_size)


def _compare_directories(file: IO[bytes], infos: list[zipfile.ZipInfo], end: int, tree: _Tree) -> None:
    """Raise unless the entries' own headers agree with the directory, one after the other and nothing between them.

    Else one reader sees other files than the next one: what was checked is not what is used.
    """
    position, slack = 0, 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        tree.entry = info.orig_filename
        if not position <= info.header_offset <= position + slack:
            raise ArchiveError("overlaps another entry, or follows bytes that the zip's directory does not list")
        file.seek(info.header_offset)
        magic, _, flags, method, _, _, crc, packed, size, name, extra = struct.unpack("<4s5H3L2H", disk.read(file, 30))
        known = [(crc, info.CRC), (packed, info.compress_size), (size, info.file_size)]
        if flags & 8:  # sizes follow the data; then the header holds zeros
            known = [pair for pair in known if pair[0]]
        differs = any(here != there and here != 0xFFFFFFFF for here, there in known)  # 0xFFFFFFFF: in the zip64 field
        if magic != b"PK\3\4" or method != info.compress_type or differs:
            raise ArchiveError("is described differently by the zip's directory and by its own header")
        position = info.header_offset + 30 + name + extra + info.compress_size
        slack = 24 if flags & 8 else 0
    if not position <= end <= position + slack:
        raise ArchiveError("is followed by bytes that the zip's directory does not list")


def _bomb(limit: int) -> ArchiveError:
    return ArchiveError(
        f"unpacks to more than {disk.human(limit)}, like a decompression bomb. If it is yours, make it a plain tar"
    )


@contextlib.contextmanager
def _refusals(path: Path, tree: _Tree | None = None) -> Iterator[None]:
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
    raise ArchiveError(f"{path}: {f'entry {tree.entry!r} ' if tree and tree.entry else ''}{reason}.") from None
