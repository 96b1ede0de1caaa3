"""The pack of a source: the finished one, or a new one that appears under its name only when it is whole. A resumable
one goes on after a kill: what was decoded stays in its .part folder, with a journal of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from nbtools import disk
from nbtools.data import archive
from nbtools.data.journal import JOURNAL, Journal
from nbtools.data.pack import FORMAT, MANIFEST, Pack, Reader, require_shares
from nbtools.data.sources import cache
from nbtools.data.stage import stage
from nbtools.data.writer import Entry, Writer
from nbtools.errors import PackError
from nbtools.table import plural

__all__ = ["Entry", "Writer", "build"]

FEW = 100  # files of a pack


def build(
    source: str | Path,
    task: str,
    options: Mapping[str, Any],
    fill: Callable[[Writer, Path], None],
    *,
    read: Reader,
    ragged: Collection[str] = (),
    bucket_by: str | None = None,
    val: float = 0.1,
    test: float = 0.1,
    into: str | Path | None = None,
    progress: bool = True,
    chosen: Mapping[str, Any] | None = None,
    resume: bool = False,
    in_place: bool = False,
) -> Pack:
    """The pack of a source: the finished one if there is one, else made by `fill(writer, folder)` and published whole.

    source: anything `stage` takes, or a pack (a folder, or the one file that `Pack.keep` wrote). into: a folder of the
    pack's own; by default one under the cache, named by task, options and the source's files.
    chosen: what else makes it this pack, but is no preprocessing that another pack must share. resume: what was decoded
    outlives a kill, or a full disk, in the .part folder; `fill` then adds nothing but what one `decode` yields.
    in_place: an archive stays one file; `fill` and `read` get names that lead through it, `lines.tar/train/1.png`, its
    only folder left out, and read them with `members`.
    Raises PackError where nothing can be packed, DiskError where it cannot be written; nothing else is left behind.
    """
    require_shares(val, test)
    folder = stage(source, extract=holds_pack if in_place else True, progress=progress)
    if (folder / MANIFEST).is_file():
        return Pack.open(folder, source=source_of(of_task(Pack.open(folder), task)), read=read)
    keyed = {**options, "val": val, "test": test, **(chosen or {})}
    with disk.explained(f"looking at {folder}", folder):
        key = fingerprint(task, folder, keyed)
    target = (Path(into) if into is not None else cache() / "packs" / f"{task}-{key}").absolute()
    lock = hashlib.blake2b(str(target).encode(errors="surrogateescape"), digest_size=8).hexdigest()
    with disk.explained(f"packing {folder}", target), disk.Lock(cache() / "locks" / f"pack-{lock}.lock"):
        if (pack := finished(target, folder, task, key, read)) is not None:
            return pack
        part = target.with_name(f"{target.name}.part")
        with (
            unfinished(part, key, resume) as journal,
            closing(Writer(part, ragged, val, test, progress, journal)) as writer,
        ):
            top = archive.archive_index(folder).top if folder.is_file() else ""
            fill(writer, folder / top)
            if not writer.names:
                raise PackError(nothing(folder, writer.bad))
            writer.finish(task, options, bucket_by, {"key": key, "keyed": keyed, "source": str(folder), "top": top})
            disk.remove(part / JOURNAL)
            disk.publish_folder(part, target)
    return Pack.open(target, source=folder, read=read)


def finished(target: Path, folder: Path, task: str, key: str, read: Reader) -> Pack | None:
    """The pack that is there already. Raises PackError where something else is."""
    if (target / MANIFEST).is_file():
        pack = of_task(Pack.open(target, source=folder, read=read), task)
        if pack.manifest.get("key") == key:
            return pack
        raise PackError(f"{target} holds a pack of other files or options; delete it, or choose another folder")
    if target.exists() and not (target.is_dir() and not os.listdir(target)):
        raise PackError(f"{target} is no pack and not empty; choose a new folder for the pack")
    return None


def source_of(pack: Pack) -> Path | None:
    """What a kept pack was made from, where that is still on this machine and unchanged: the receipt can then measure
    the raw files too."""
    made = pack.manifest
    source = Path(made.get("source", ""))
    try:
        same = "keyed" in made and source.exists() and fingerprint(pack.card.task, source, made["keyed"]) == made["key"]
    except OSError:  # another user's, or of a disk that does not answer: the pack is whole without
        return None
    return source if same else None


@contextmanager
def unfinished(part: Path, key: str, resume: bool) -> Iterator[Journal | None]:
    """A pack's folder while it is made. It is gone in the end, published or not; with resume it outlives what is no
    fault of the data, and its journal says how far it is."""
    journal, kept = Journal(part, key) if resume else None, False
    if journal is None or not journal.path.exists():
        disk.remove(part)
    disk.make_folder(part)
    try:
        yield journal
    except BaseException as error:
        kept = resume and not isinstance(error, PackError)
        raise
    finally:
        if not kept:
            disk.remove(part)


def holds_pack(path: Path) -> bool:
    """Whether an archive is what `Pack.keep` wrote: a few large files, which are mapped and so must be unpacked."""
    return any(name.removeprefix(f"{name.partition('/')[0]}/") == MANIFEST for name in archive.first(path, FEW))


def of_task(pack: Pack, task: str) -> Pack:
    if pack.card.task != task:
        raise PackError(
            f"{pack.folder} is a pack of the task {pack.card.task!r}, not of {task!r}; use that task, or other data"
        )
    return pack


def nothing(folder: Path, bad: Sequence[Mapping[str, str]]) -> str:
    if not bad:
        return f"{folder}: no samples found; is this the right folder?"
    first = bad[0]
    return (
        f"{folder}: 0 of {plural(len(bad), 'file')} can be used. The first: {first['file']}: {first['rule']}, "
        f"got {first['value']}; {first['fix']}"
    )


def fingerprint(task: str, folder: Path, options: Mapping[str, Any]) -> str:
    """A key of the files (relative name, size, time of change) and of what is made of them."""
    digest = hashlib.blake2b(
        json.dumps([FORMAT, task, str(folder.resolve()), options], sort_keys=True).encode(), digest_size=8
    )
    for name, stat in sorted(listing(folder)):
        digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def listing(folder: Path) -> Iterable[tuple[str, os.stat_result]]:
    if folder.is_file():
        yield "", folder.stat()
        return
    for item in disk.walk(folder):
        if item.is_file():  # no dangling links: reading one is refused by name
            yield os.path.relpath(item.path, folder), item.stat()
