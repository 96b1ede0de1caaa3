"""A source's files, on disk or in archives that stay unopened on the way to them: 50,000 lines are read from one file.

pages/001-P16.dgrl                           a file
HWDB2.0Train.zip/001-P16.dgrl                one in an archive
all.tar/a/HWDB2.2Test.ZIP/501-P16.dgrl       in an archive in an archive, which is put into the cache as one file
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future
from functools import lru_cache
from pathlib import Path, PurePosixPath
from threading import Lock

from nbtools import disk
from nbtools.data import archive_index, cache, read_member, stage
from nbtools.errors import ArchiveError, PackError

ARCHIVE = re.compile(r"\.(tar|tar\.gz|tgz|tar\.xz|txz|tar\.bz2|tbz2?|zip)$", re.I)
DEEPEST = 3  # archives within archives; a zip can hold itself


def hidden(name: str) -> bool:
    """Left behind by systems, not by people: .DS_Store, ._name.png, __MACOSX."""
    return name.startswith(".") or name == "__MACOSX"


def walked(root: Path, progress: bool, prefix: str = "", depth: int = 0) -> Iterator[str]:
    """Every file's name from the source on, those in archives in place of the archives; hidden ones are none.

    root: a folder, an archive, or the way to a folder in one.
    """
    names = list(on_disk(root) if root.is_dir() else in_archive(*way(root)))
    folders = {above.as_posix() for name in names for above in PurePosixPath(name).parents}
    for name in names:
        if depth < DEEPEST and ARCHIVE.search(name) and ARCHIVE.sub("", name) not in folders:
            yield from walked(whole(*way(root / name), progress=progress), progress, f"{prefix}{name}/", depth + 1)
        else:
            yield prefix + name


def on_disk(folder: Path) -> Iterable[str]:
    names = (os.path.relpath(item.path, folder) for item in disk.walk(folder))
    return (name for name in names if not any(map(hidden, name.split("/"))))


def in_archive(archive: Path, top: str) -> Iterable[str]:
    """The names of an archive's files below one of its folders, "" for all of them."""
    start = f"{top}/" if top else ""
    names = (name[len(start) :] for name in archive_index(archive).files if name.startswith(start))
    return (name for name in names if not any(map(hidden, name.split("/"))))


def way(path: Path) -> tuple[Path, str]:
    """(file or folder on disk, name within it): "" where the path is all there on disk, else what an archive holds."""
    if not path.exists():
        for above in path.parents:
            if above.is_file():
                return within(whole(above), path.relative_to(above).as_posix())
    return path, ""


def within(archive: Path, name: str) -> tuple[Path, str]:
    """The same, where the name may lead through further archives in an archive."""
    files = archive_index(archive).files
    if name not in files:
        for above in map(PurePosixPath.as_posix, PurePosixPath(name).parents):
            if above in files:
                return within(whole(archive, above), PurePosixPath(name).relative_to(above).as_posix())
    return archive, name


def whole(file: Path, name: str = "", *, progress: bool = False) -> Path:
    """An archive from which files can be read in place, near at hand; name: it lies in another one."""
    seen = file.stat()
    return _whole(file, name, seen.st_size, seen.st_mtime_ns, progress)


@lru_cache(maxsize=64)
def _whole(file: Path, name: str, size: int, mtime: int, progress: bool) -> Path:
    if not name:
        return stage(file, extract=False, progress=progress)
    key = hashlib.sha256(repr((str(file), name, size, mtime)).encode()).hexdigest()[:16]
    target = cache() / f"inner-{key}" / PurePosixPath(name).name
    with disk.explained(f"taking {name} out of {file}", target), disk.Lock(cache() / "locks" / f"inner-{key}.lock"):
        if not target.exists():
            part = target.with_name(f"{target.name}.part")
            disk.make_folder(part.parent)
            disk.remove(part)
            with disk.create(part) as new:
                disk.write(new, read_member(file, name))
            disk.publish_file(part, target)
    return stage(target, extract=False, progress=progress)


def content(path: Path) -> bytes:
    """All bytes of a file, on disk or in an archive. Raises OSError or ArchiveError."""
    file, name = way(path)
    return read_member(file, name) if name else file.read_bytes()


def sample_bytes(path: Path) -> bytes:
    """The same of one of many; raises PackError(value, rule, fix), of an archive with its name and the entry's."""
    try:
        return content(path)
    except OSError as error:
        value = error.strerror or str(error)
    except ArchiveError as error:
        file, _ = way(path)
        value = str(error).replace(str(file), file.name)
    raise PackError(value, "the file can be read", "copy it again, or delete it")


class Recent:
    """The last contents that were asked for: several threads read lines of one page, and it is inflated once."""

    def __init__(self, most: int):
        self.most = most
        os.register_at_fork(after_in_child=self.clear)  # another thread may hold the lock, or never come to its end
        self.clear()

    def clear(self) -> None:
        self.lock = Lock()
        self.kept: OrderedDict[Hashable, Future[bytes]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """What `make` gives, or raises; called by one thread only, the others wait."""
        with self.lock:
            future = self.kept.pop(key, None)
            found = future is not None
            future = self.kept[key] = future or Future()
            while len(self.kept) > self.most:
                self.kept.popitem(last=False)
        if not found:
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)
                with self.lock:
                    self.kept.pop(key, None)
        return future.result()


PAGES = Recent(8)
"""Pages of archives, about 3 MB each."""
