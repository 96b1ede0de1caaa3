"""Archives: extracted safely, read in place, and written as the one plain tar that a pack is kept as.

`tarfile` and `zipfile` only read here, and believe too much: `extractall`, even with `filter="data"`, was escaped on
3.11.7, 3.12.1 and 3.13.0 by a dangling link and a hard link; truncated tars pass in silence, gzip's checksum is not
read, the two directories of a zip may disagree. So every name and header is checked, only files are read, every file
is created anew (O_EXCL) below a new folder, and the unpacked size has a limit.
"""

import bz2
import contextlib
import errno
import gzip
import hashlib
import lzma
import re
import stat
import struct
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from io import FileIO
from pathlib import Path
from typing import IO, Any, Self

from nbtools import disk, show
from nbtools.errors import ArchiveError

Progress = Callable[[int], object]  # called with the bytes that came
CHUNK = 1 << 20
MAGIC = {b"\x1f\x8b": "tar.gz", b"\xfd7zXZ\0": "tar.xz", b"BZh": "tar.bz2", b"PK\3\4": "zip", b"PK\5\6": "zip"}
OPENERS: dict[str, Callable] = {
    "tar": contextlib.nullcontext,
    "tar.gz": gzip.open,
    "tar.xz": lzma.open,
    "tar.bz2": bz2.open,
}
IN_PLACE = ("tar", "zip")  # files can be read from these without unpacking them
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # bzip2 and lzma make 20 GB of a MB, and zipfile sets no bound
ENTRIES = 5_000_000  # more than this is an attack on memory
LARGEST = 1 << 28  # bytes of a file that is read into memory; a scanned page has 3 MB
RATIO, FLOOR = 200, 100_000_000  # bytes unpacked: at most this many times the archive (deflate can 1,032), or the floor
STRAY = (  # what the readers let escape on damaged input, besides their own errors; found by mutation
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError),
    *(ValueError, RuntimeError, ArithmeticError, LookupError, TypeError, MemoryError),
)


def ignored(count: int) -> None:
    """Progress that is not shown."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of a file in an archive are. method and crc: of a zip; a tar has neither."""

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


def kind(path: Path) -> str | None:
    """`tar`, `tar.gz`, `tar.xz`, `tar.bz2` or `zip` by the first bytes, whatever the name says; else None."""
    with open(path, "rb") as file:
        head = file.read(tarfile.BLOCKSIZE)
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
    if kind(path) == "zip":
        with explained(path), zipfile.ZipFile(path) as reader:
            return sum(info.file_size for info in reader.infolist())
    return path.stat().st_size


def extract(path: Path, folder: Path, progress: Progress = ignored, again: bool = False) -> None:
    """Write an archive's files below `folder`, which must not exist yet. again: it may, and what an interrupted call
    wrote there is replaced.

    Raises ArchiveError, with file and entry, for links, devices, names that leave the folder or collide (by case or
    Unicode form too), damage of any kind, a missing end, and more bytes or entries than the limits. What was written
    until then stays in `folder`: the caller extracts into a `.part` and publishes afterwards.
    """
    names = Names()
    with explained(path, names):
        if kind(path) is None:
            raise ArchiveError("is not a tar, tar.gz, tar.xz, tar.bz2 or zip")
        folder.mkdir(parents=True, exist_ok=again)
        made = {folder}
        for name, place, content in files_in(path, names, progress):
            target = folder / name
            if target.parent not in made:
                target.parent.mkdir(parents=True, exist_ok=True)
                made.add(target.parent)
            if again:
                disk.remove(target)
            with content() as stream, open(target, "xb", buffering=0) as file:
                pour(stream, file, place.size)
        if not names.files:
            raise ArchiveError("holds no files")
        for folded, parts in names.spelled.items():
            if folded not in names.files:
                folder.joinpath(*parts).mkdir(parents=True, exist_ok=True)  # the empty ones too


def plain(path: Path, target: Path, progress: Progress = ignored) -> None:
    """Write the plain tar that a compressed one is made of, within the same limit; a plain one and a zip unchanged.
    Its files are not examined."""
    with explained(path), open(path, "rb") as raw, OPENERS.get(kind(path) or "", OPENERS["tar"])(raw) as file:
        stream = Forward(raw, file, budget(path.stat().st_size), progress)
        with open(target, "xb", buffering=0) as unpacked:
            while data := stream.read(CHUNK):
                disk.write(unpacked, data)


def archive_index(path: Path) -> Index:
    """Where each file of a plain tar or a zip lies; looked up once, as long as the archive does not change.

    Raises ArchiveError, with file and entry, for all that `extract` would refuse.
    """
    seen = path.stat()
    return index_of(path, seen.st_size, seen.st_mtime_ns)


@lru_cache(maxsize=32)
def index_of(path: Path, size: int, mtime: int) -> Index:
    names = Names()
    with explained(path, names):
        if kind(path) not in IN_PLACE:
            raise ArchiveError("has no files that can be read in place: it is neither a plain tar nor a zip")
        files = {name: place for name, place, _ in files_in(path, names, ignored)}
        if not files:
            raise ArchiveError("holds no files")
    tops = {parts[0] for parts in names.spelled.values()}
    return Index(files, tops.pop() if len(tops) == 1 and not tops & files.keys() else "")


def read_member(path: Path, name: str) -> bytes:
    """A file of a plain tar or a zip, whole; many threads and processes may call it at once, since no handle is kept.

    Raises ArchiveError, with archive and entry, where it is damaged, absent, or larger than fits the archive.
    """
    with explained(path, name):
        place = archive_index(path).files.get(name)
        if place is None:
            raise ArchiveError("is not in it")
        if place.size > (most := min(LARGEST, budget(place.packed))):
            raise ArchiveError(f"has {show.size(place.size)}, more than {show.size(most)}. Give the unpacked folder")
        with open(path, "rb", buffering=0) as file:
            file.seek(place.start)
            data = (file if place.method is None else inflated(file, name, place)).read(place.size)
        require_size(len(data), place.size)
        return data


def inflated(file: FileIO, name: str, place: Place) -> zipfile.ZipExtFile:
    """A zip entry's bytes, no more of them than its header says, compared with its CRC at the end."""
    info = zipfile.ZipInfo(name)
    info.compress_type, info.compress_size = place.method or 0, place.packed
    info.file_size, info.CRC = place.size, place.crc
    return zipfile.ZipExtFile(file, "r", info)


def write(files: Mapping[str, Path], path: Path, ready: Callable[[], None] = lambda: None) -> str:
    """Put files (name → where) into one plain tar, atomically, and read it back → its SHA-256. The same bytes whenever
    names and contents are the same. ready: called once it is whole, before it gets its name."""
    part, digest = path.with_name(path.name + ".part"), hashlib.sha256()

    def put(file: FileIO, data: bytes) -> None:
        disk.write(file, data)
        digest.update(data)

    with disk.explained(f"writing {path.name}", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.remove(part)
        try:
            with open(part, "xb", buffering=0) as file:
                for name, source in sorted(files.items()):
                    info = tarfile.TarInfo(name)  # mtime, owner, mode: the defaults
                    info.size = rest = source.stat().st_size
                    put(file, info.tobuf(tarfile.PAX_FORMAT))
                    with open(source, "rb") as content:
                        while data := content.read(min(CHUNK, rest)):
                            rest -= len(data)
                            put(file, data)
                    if rest or source.stat().st_size != info.size:
                        raise ArchiveError(f"{source}: changed while it was archived. Try again.")
                    put(file, bytes(-info.size % tarfile.BLOCKSIZE))
                put(file, bytes(2 * tarfile.BLOCKSIZE))
            if disk.sha256(part) != digest.hexdigest():
                raise OSError(errno.EIO, "reads back differently from what was written", str(part))
            ready()
            disk.sync_path(part)
            disk.rename(part, path)
        except BaseException:  # also where the user interrupts: a full Drive has no room for it
            with contextlib.suppress(OSError):  # the disk that failed may refuse this too: the first error counts
                disk.remove(part)
            raise
    return digest.hexdigest()


class Names:
    """The names of an archive: each stays below its folder and occurs once, also on disks that ignore case."""

    def __init__(self) -> None:
        self.spelled: dict[str, tuple[str, ...]] = {}  # folded → as first spelled
        self.files: set[str] = set()  # folded
        self.entry, self.entries = "", 0

    def __str__(self) -> str:
        """The entry being examined."""
        return self.entry

    def take(self, name: str, is_file: bool) -> str | None:
        """The relative path of an entry, claimed; None if it is not wanted."""
        self.entry, self.entries = name, self.entries + 1
        if self.entries > ENTRIES:
            raise ArchiveError(f"is one of more than {ENTRIES} entries. Combine small files into fewer")
        parts = safe_parts(name)
        litter = "__MACOSX" in parts or any(part.startswith("._") or part == ".DS_Store" for part in parts)  # of macOS
        if not parts or litter:
            return None
        for depth in range(1, len(parts) + 1):
            self.claim(parts[:depth], is_file and depth == len(parts))
        return "/".join(parts)

    def claim(self, parts: tuple[str, ...], is_file: bool) -> None:
        nfc = unicodedata.normalize("NFC", "/".join(parts))
        folded = unicodedata.normalize("NFC", nfc.casefold())
        spelled = self.spelled.get(folded)
        if spelled is None:
            self.spelled[folded] = parts
            if is_file:
                self.files.add(folded)
        elif is_file or spelled != parts or folded in self.files:
            raise ArchiveError(
                f"has the same name as {'/'.join(spelled)!r} (on disks that ignore case or Unicode form). Rename one"
            )


def safe_parts(name: str) -> tuple[str, ...]:
    """The components of a relative POSIX name; ArchiveError for one that could lead outside its folder."""
    if name.startswith("/") or "\\" in name or "\0" in name or re.match("[A-Za-z]:", name) or ".." in name.split("/"):
        raise ArchiveError("has a name that is absolute, or holds `..`, a backslash, a drive letter or NUL. Rename it")
    return tuple(part for part in name.split("/") if part not in ("", "."))


File = tuple[str, Place, Callable[[], Any]]  # name, place, how to open it while it is the current one


def files_in(path: Path, names: Names, progress: Progress) -> Iterator[File]:
    """The files of any archive in order, to be iterated to the end: damage may follow the last. Of a compressed tar
    the places are those in the tar within it."""
    form, limit = kind(path), budget(path.stat().st_size)
    with open(path, "rb") as raw:
        if form == "zip":
            with zipfile.ZipFile(raw) as reader:
                yield from in_zip(raw, reader, names, limit, progress)
        else:
            with OPENERS[form or "tar"](raw) as file:
                yield from in_tar(Forward(raw, file, limit, progress), names)


class Forward:
    """What tarfile reads from: forward only, so that nothing is decompressed twice, and counted."""

    def __init__(self, raw: IO[bytes], file: IO[bytes], limit: int, progress: Progress) -> None:
        self.raw, self.file, self.limit, self.progress = raw, file, limit, progress
        self.position, self.raw_position, self.last = 0, 0, b""

    def read(self, count: int) -> bytes:
        if not 0 <= count <= 16 * CHUNK:  # an extended header that claims gigabytes would be held in memory
            raise ArchiveError(f"has a header of {show.size(count)}")
        self.last = self.file.read(count)
        self.position += len(self.last)
        if self.position > self.limit:
            raise bomb(self.limit)
        before, self.raw_position = self.raw_position, self.raw.tell()
        self.progress(self.raw_position - before)
        return self.last

    def seek(self, position: int) -> None:
        if position < self.position:
            raise ArchiveError("has a header that points backwards")
        if self.file is self.raw:  # a plain tar: what is not wanted is not read
            self.position = self.file.seek(position)
        while self.position < position and self.read(min(CHUNK, position - self.position)):
            pass

    def tell(self) -> int:
        return self.position

    def at(self, position: int) -> contextlib.AbstractContextManager[Self]:
        """To read on from there: without the copies that tarfile makes."""
        self.seek(position)
        return contextlib.nullcontext(self)


def in_tar(stream: Forward, names: Names) -> Iterator[File]:
    tar = tarfile.TarFile(fileobj=stream, mode="r", encoding="utf-8")  # pyright: ignore[reportArgumentType]
    end = -1
    while (member := tar.next()) is not None:
        tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue]: it would keep every header of a million files
        if tar.offset <= end:
            raise ArchiveError("has a header that points backwards")  # an endless loop before CVE-2025-8194
        end, is_file = tar.offset, member.isreg() and not member.issparse()
        name = names.take(member.name, is_file)
        if not (is_file or member.isdir()):
            raise ArchiveError(
                "is a link, a device or sparse: only plain files and folders are read. Make the archive again "
                "with tar --dereference --hard-dereference"
            )
        if name is not None and is_file:
            place = Place(member.offset_data, member.size, member.size)
            yield name, place, partial(stream.at, place.start)
    names.entry = ""
    zeros = bytes(tarfile.BLOCKSIZE)
    if stream.last != zeros or stream.read(tarfile.BLOCKSIZE) != zeros:  # tarfile ends at any bad header in silence
        raise ArchiveError(
            "ends before its end-of-archive marker: it is truncated or damaged. Copy or download it again"
        )
    while stream.file is not stream.raw and stream.read(CHUNK):  # so that gzip, xz and bzip2 compare their checksums
        pass


def in_zip(file: IO[bytes], reader: zipfile.ZipFile, names: Names, limit: int, progress: Progress) -> Iterator[File]:
    infos = reader.infolist()
    if sum(info.file_size for info in infos) > limit:
        raise bomb(limit)
    starts = compare_directories(file, infos, reader.start_dir, names)
    for info in infos:
        mode = stat.S_IFMT(info.external_attr >> 16)
        name = names.take(info.orig_filename, not info.is_dir())
        if mode not in (0, stat.S_IFREG, stat.S_IFDIR) or info.flag_bits & 1:
            raise ArchiveError("is a link, a device or encrypted: only plain files and folders are read")
        if info.compress_type not in METHODS:
            raise ArchiveError(
                f"is compressed by method {info.compress_type}, but only stored and deflated entries are "
                "read. Make the zip again with the usual settings"
            )
        if name is not None and not info.is_dir():
            if info.CRC and not info.file_size:  # zipfile compares no checksum where nothing is to be read
                raise ArchiveError(
                    "is empty, but has the checksum of a file that is not: copy or download the archive again"
                )
            start = starts[info.header_offset]
            place = Place(start, info.compress_size, info.file_size, info.compress_type, info.CRC)
            yield name, place, partial(reader.open, info)  # compares the CRC at the end
        progress(info.file_size)


def compare_directories(file: IO[bytes], infos: list[zipfile.ZipInfo], end: int, names: Names) -> dict[int, int]:
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
        magic, _, flags, method, _, _, crc, packed, size, name, extra = struct.unpack("<4s5H3L2H", file.read(30))
        known = [(crc, info.CRC), (packed, info.compress_size), (size, info.file_size)]
        if flags & 8:  # sizes follow the data; then the header holds zeros
            known = [pair for pair in known if pair[0]]
        differs = any(here != there and here != 0xFFFFFFFF for here, there in known)  # 0xFFFFFFFF: in the zip64 field
        spelled = file.read(name).decode("utf-8" if info.flag_bits & 0x800 else "cp437")
        if magic != b"PK\3\4" or method != info.compress_type or differs or spelled != info.orig_filename:
            raise ArchiveError("is described differently by the zip's directory and by its own header")
        starts[info.header_offset] = info.header_offset + 30 + name + extra
        position = starts[info.header_offset] + info.compress_size
        slack = 24 if flags & 8 else 0
    if not position <= end <= position + slack:
        raise ArchiveError("is followed by bytes that the zip's directory does not list")
    return starts


def budget(packed: int) -> int:
    """Bytes that this many may unpack to."""
    return max(FLOOR, RATIO * packed)


def bomb(limit: int) -> ArchiveError:
    return ArchiveError(
        f"unpacks to more than {show.size(limit)}, like a decompression bomb. If it is yours, make it a plain tar"
    )


def pour(content: IO[bytes], file: FileIO, size: int) -> None:
    """Copy `size` bytes; raise if there are fewer."""
    rest = size
    while data := content.read(min(disk.PIECE, rest)):
        rest -= len(data)
        disk.write(file, data)
    require_size(size - rest, size)


def require_size(came: int, size: int) -> None:
    if came != size:
        raise ArchiveError(f"is damaged: {came} bytes long instead of the {size} announced. Copy or download it again")


@contextlib.contextmanager
def explained(path: Path, entry: object = "") -> Iterator[None]:
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
    raise ArchiveError(f"{path}: {f'entry {str(entry)!r} ' if str(entry) else ''}{reason}.") from None
