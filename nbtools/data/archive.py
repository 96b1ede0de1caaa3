"""Safe extraction of tar and zip, and the one plain tar that a pack is kept as.

`extractall`, even with `filter="data"`, was escaped on 3.11.7, 3.12.1 and 3.13.0 by a dangling link and a hard link,
takes truncated tars in silence and never reads gzip's checksum. So: files and folders only, as `entries` lets them
through, every file made new (O_EXCL) below a folder made new, budgets while writing.
"""

import tarfile
import zipfile
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import IO

from nbtools import disk
from nbtools.data import entries
from nbtools.data.entries import CHUNK, OPENERS, Forward, Names, kind
from nbtools.errors import ArchiveError


def unpacked_size(path: Path) -> int:
    """Bytes that `extract` writes: exact for a zip, some headers too many for a tar, a lower bound for the others.

    It is also how far `extract`'s progress runs.
    """
    size = path.stat().st_size
    if kind(path) == "zip":
        with entries.refusals(path), zipfile.ZipFile(path) as reader:
            return sum(info.file_size for info in reader.infolist())
    return size


def extract(path: Path, folder: Path, progress: Callable[[int], object] = lambda count: None) -> int:
    """Write an archive's files below `folder`, which must not exist yet → number of files.

    Raises ArchiveError, with file and entry, for links, devices, names that leave the folder or collide (by case or
    Unicode form too), damage of any kind, a missing end, and more than the budgets of `entries`. What was written
    until then stays in `folder`: the caller extracts into a `.part` and publishes afterwards.
    """
    tree = _Tree(folder)
    with entries.refusals(path, lambda: tree.entry):
        form = kind(path)
        if form is None:
            raise ArchiveError("is not a tar, tar.gz, tar.xz, tar.bz2 or zip")
        disk.make_folder(folder, fresh=True)
        if form == "zip":
            _extract_zip(path, tree, progress)
        else:
            with open(path, "rb") as raw, OPENERS[form](raw) as file:
                _extract_tar(Forward(raw, file, entries.budget(path.stat().st_size), progress), tree)
        if not tree.files:
            raise ArchiveError("holds no files")
    return len(tree.files)


def plain(path: Path, target: Path, progress: Callable[[int], object] = lambda count: None) -> None:
    """Write the plain tar that a compressed one is made of, within the same budget; a plain one and a zip as they are.
    Its files are not looked at."""
    with entries.refusals(path), open(path, "rb") as raw, OPENERS.get(kind(path) or "", OPENERS["tar"])(raw) as file:
        stream = Forward(raw, file, entries.budget(path.stat().st_size), progress)
        with disk.create(target) as unpacked:
            while data := stream.read(CHUNK):
                disk.write(unpacked, data)


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
            entries.pour(content, file, info.size)
        disk.write(file, bytes(-info.size % tarfile.BLOCKSIZE))


class _Tree(Names):
    """The folder that an extraction fills: the only place that turns a name from an archive into a path."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def enter(self, parts: tuple[str, ...]) -> None:
        disk.make_folder(self.folder.joinpath(*parts), fresh=True)

    def add(self, parts: tuple[str, ...], content: IO[bytes], size: int) -> None:
        with disk.create(self.folder.joinpath(*parts)) as file:
            entries.pour(content, file, size)


def _extract_tar(stream: Forward, tree: _Tree) -> None:
    for parts, tar, member in entries.in_tar(stream, tree):
        content = tar.extractfile(member)
        assert content is not None
        tree.add(parts, content, member.size)


def _extract_zip(path: Path, tree: _Tree, progress: Callable[[int], object]) -> None:
    with open(path, "rb") as file, zipfile.ZipFile(file) as reader:
        for parts, info, _ in entries.in_zip(file, reader, tree, entries.budget(path.stat().st_size)):
            if parts:
                with reader.open(info) as content:  # compares the CRC at the end
                    tree.add(parts, content, info.file_size)
            progress(info.file_size)
