"""Archives, unpacked safely. Links escape from `extractall` of tarfile, even with `filter="data"`, and truncated tars
pass in silence. So every entry is checked before anything is written; only plain files are read, each is created anew
below a new folder, and the unpacked size has a limit. What is compressed is read twice, so that no disk must hold its
tar."""

import contextlib
import errno
import gzip
import lzma
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from nbtools import disk, show
from nbtools.data.progress import BYTES, bar, say
from nbtools.errors import ArchiveError, DiskError

OPENERS: dict[bytes, Callable] = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\0": lzma.open}  # by the first bytes
ZIP = b"PK\3\4", b"PK\5\6"
RATIO, FLOOR = 200, 100_000_000  # bytes unpacked: at most this many times the archive (deflate can 1,032), or the floor
LITTER = re.compile(r"(^|/)(__MACOSX|@eaDir|\.DS_Store|\._[^/]*)(/|$)")  # of macOS and Synology
PAGES = [("utf-8", "utf-8"), ("gbk", "gb2312"), ("cp932", "cp932"), ("gbk", "gbk")]  # encoding, its common part
OF_NAMES = errno.EINVAL, errno.ENAMETOOLONG, errno.EILSEQ
ODD = re.compile(r"^/|\\|\0|^[A-Za-z]:|(^|/)\.\.(/|$)")  # could lead outside a folder


class Entry(NamedTuple):
    """A file of an archive. name: bytes where no encoding is marked; open: gives a stream at the file's first byte."""

    name: str | bytes
    size: int
    open: Callable[[], IO[bytes]]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], Iterator[Entry]]]:
    """Yield an archive's file, and the entries of the tar or zip in it, by its first bytes. Raises ArchiveError."""
    with open(path, "rb") as raw:
        head = raw.read(tarfile.BLOCKSIZE)
        raw.seek(0)
        opener = next((OPENERS[magic] for magic in OPENERS if head.startswith(magic)), contextlib.nullcontext)
        with opener(raw) as file:
            head, is_tar = file.read(tarfile.BLOCKSIZE), False
            with contextlib.suppress(tarfile.HeaderError, ValueError):
                is_tar = head == bytes(tarfile.BLOCKSIZE) or bool(tarfile.TarInfo.frombuf(head, "utf-8", "replace"))
            if not (is_tar or head.startswith(ZIP)):
                fix = "Give a folder, tar (plain, gz, xz) or zip; nb.pack also takes a DataFrame or arrays"
                raise ArchiveError(f"not an archive: it begins with {head[:16]!r}. {fix}")
            file.seek(0)
            yield raw, in_tar(file) if is_tar else in_zip(file)


def unpack(path: Path, folder: Path, text: str, progress: bool) -> None:
    """Write the files of an archive below a new folder. text: its name in messages.

    Raises ArchiveError, with the entry, for damage, links, devices, names that leave the folder or occur twice, and
    more bytes than the limit; DiskError where there is no room. What was written until then stays.
    """
    packed, size, listed = path.stat().st_size, 0, list[Entry]()
    shown = bar(total=packed, desc=f"unpack {folder.name}", disable=not progress, **BYTES)
    with shown, explain_damage(f"{text}: "), opened(path) as (raw, entries):
        for entry in entries:
            listed.append(entry)
            size += entry.size
            if size + tarfile.BLOCKSIZE * len(listed) > (limit := max(FLOOR, RATIO * packed)):  # empty files cost too
                bomb = f"unpacks to more than {show.size(limit)}, like a decompression bomb"
                raise ArchiveError(f"{bomb}. If it is yours, make it a plain tar")
            shown.update(raw.tell() - shown.n)
        disk.require_space(folder, size)
        shown.reset(size)
        names = decode_names(text, [entry.name for entry in listed])
        paths = ["/".join(safe_parts(name)) * (name[-1:] != "/" and not LITTER.search(name)) for name in names]
        if not any(paths):
            raise ArchiveError("holds no files")
        for name, entry in zip(paths, listed, strict=True):
            with explain_damage(f"entry {name!r} "):
                if name:
                    extract(entry, folder / name, shown.update)


def extract(entry: Entry, target: Path, progress: Callable[[int], object]) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = open(target, "xb")  # noqa: SIM115
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise ArchiveError("has the name of another entry. Rename one") from None
    with file:
        stream, rest = entry.open(), entry.size
        while rest and (data := stream.read(min(disk.PIECE, rest))):
            file.write(data)
            progress(len(data))
            rest -= len(data)
    if rest:
        raise ArchiveError(f"is damaged: {rest} of {entry.size} bytes are missing")


def safe_parts(name: str) -> tuple[str, ...]:
    """Return the components of a relative POSIX name; raise ArchiveError for one that could lead outside its folder."""
    if ODD.search(name):
        rule = "has a name that is absolute, or holds `..`, a backslash, a drive letter or NUL"
        raise ArchiveError(f"entry {name!r} {rule}. Make the archive again with relative names")
    return tuple(part for part in name.split("/") if part not in ("", "."))


def in_tar(file: IO[bytes]) -> Iterator[Entry]:
    tar, end = tarfile.TarFile(fileobj=file, encoding="utf-8"), -1
    while (member := tar.next()) is not None:
        tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue]: it would keep every header of a million files
        name = member.name.encode("utf-8", "surrogateescape")
        if tar.offset <= end:  # endless before CVE-2025-8194
            raise ArchiveError(f"entry {member.name!r} points backwards: the archive is damaged")
        end = tar.offset
        if member.isreg() and not member.issparse():
            yield Entry(name, member.size, partial(at, file, member.offset_data))
        elif not member.isdir():
            fix = "Make the archive again with tar --dereference --hard-dereference"
            raise ArchiveError(f"entry {member.name!r} is a link, a device or sparse, which are not read. {fix}")
    if at(file, tar.offset).read(2 * tarfile.BLOCKSIZE) != bytes(2 * tarfile.BLOCKSIZE):  # else tarfile is silent
        raise ArchiveError("ends before its end-of-archive marker: it is truncated or damaged")
    while file.read(1 << 20):  # to the end, where gzip and xz compare checksums
        pass


def at(file: IO[bytes], start: int) -> IO[bytes]:
    file.seek(start)
    return file


def in_zip(file: IO[bytes]) -> Iterator[Entry]:
    archive = zipfile.ZipFile(file)
    for info in archive.infolist():
        if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise ArchiveError(f"entry {info.filename!r} is a link or a device, which are not read")
        if info.flag_bits & 1:
            raise ArchiveError(f"entry {info.filename!r} is encrypted. Unpack the zip with its password first")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or (info.CRC and not info.file_size):
            fix = "Make the zip again with the usual settings"  # of bzip2 and lzma, a read of zipfile has no bound
            raise ArchiveError(f"entry {info.filename!r} is damaged, or neither stored nor deflated. {fix}")
        name: str | bytes = info.orig_filename
        if not info.flag_bits & 0x800:  # not UTF-8: the bytes, which zipfile has decoded so; or Info-ZIP's field 0x7075
            name = info.orig_filename.encode("cp437")
            marked = re.search(b"up(..)\1" + re.escape(zlib.crc32(name).to_bytes(4, "little")), info.extra, re.DOTALL)
            name = info.extra[marked.end() :][: int.from_bytes(marked[1], "little") - 5].decode() if marked else name
        yield Entry(name, info.file_size, partial(archive.open, info))


def decode_names(text: str, names: list[str | bytes]) -> list[str]:
    """Return names as text, and say so where their encoding was guessed; with slashes where Windows wrote none."""
    raw = b"/".join(name for name in names if isinstance(name, bytes))
    if (encoding := code_page(raw)) != "utf-8":
        first = next(name for name in names if isinstance(name, bytes) and not name.isascii()).decode(encoding)
        rule = f"its names are not UTF-8; the encoding {encoding} was guessed from their bytes, as in {first!r}"
        say(f"{text}: {rule}. If that is wrong, make the archive again with names in UTF-8.")
    whole = [name.decode(encoding) if isinstance(name, bytes) else name for name in names]
    return whole if any("/" in name for name in whole) else [name.replace("\\", "/") for name in whole]


def code_page(raw: bytes) -> str:
    """Return the encoding that unmarked names most likely have; in cp437 Asian ones have signs for drawing boxes."""
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
    except Exception as error:  # readers let nearly anything escape on damaged input, as mutation shows
        of_disk = isinstance(error, OSError) and error.errno not in (None, *OF_NAMES)  # None: a decompressor's
        if of_disk or isinstance(error, DiskError):
            raise
        reason = f"is damaged: {type(error).__name__}: {error}. Copy or download it again"
        raise ArchiveError(f"{what}{error if isinstance(error, ArchiveError) else reason}") from None
