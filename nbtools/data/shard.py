"""Write a folder as a few large tars, which Drive copies many times faster than many small files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from nbtools import disk
from nbtools.data import archive, drive
from nbtools.data.progress import bar
from nbtools.data.sources import SHARDS, Shard, listing
from nbtools.data.stage import stage
from nbtools.data.transfer import patient
from nbtools.errors import StageError

LEAST, MOST = 500_000_000, 2_000_000_000  # bytes: smaller ones are many, larger ones long to copy again
SHARD = 1_000_000_000
NAME = "shard-"
OURS = re.compile(  # all that a call writes or leaves: other files of such a name, as WebDataset's, are not touched
    rf"{NAME}\d{{5,}}(-[0-9a-f]{{12}}\.(tar|json(\.\d+-\d+\.part)?)|\.new(\.part)?)|{SHARDS}\.\d+-\d+\.part"
)


def shard(folder: str | Path, to: str | Path, size: int = SHARD, progress: bool = True) -> Path | None:
    """Write the files of a folder to plain tars of about `size` bytes (0.5 to 2 GB) in another, `drive:…` or a path,
    with a manifest of their SHA-256, `shards.json`; `nb.stage` of that folder copies, compares and unpacks several at
    once.

    The same names and contents give the same tars. A call that was interrupted resumes, and one whose files have
    changed writes the tars that differ; those that are there are read, and written again where they are damaged. A
    larger file has a tar of its own. Left out are empty folders and what macOS adds: `._x`, `.DS_Store`, `__MACOSX`.
    folder: anything that `stage` takes; `to` lies outside it. Errors of a mount are tried again.
    Returns the folder; None, and a sentence, if access to Drive was declined. Raises StageError or DiskError; the
    manifest, if there is one, names whole tars only.
    """
    if not LEAST <= size <= MOST:
        raise StageError(f"size must be from {LEAST:,} to {MOST:,} bytes, got {size:,}.")
    target = patient(lambda: drive.place_to_keep(to), Path(to))
    if target is None:
        return None
    if target.resolve().is_relative_to(drive.local(str(folder)).resolve()):
        raise StageError(
            f"{to}: is in {folder} itself: the next call would shard the shards. Choose a folder outside it."
        )
    source = stage(folder, progress=progress)
    if not source.is_dir():
        raise StageError(f"{folder}: is one file, and shards are made of a folder.")
    with disk.explained(f"sharding {source}", target):
        taken = archive.Names()
        with archive.explained(source, taken):  # before hours of writing what `stage` refuses
            files = {name: found for name, found in sorted(listing(source).items()) if taken.take(name, is_file=True)}
        known, shards = patient(lambda: written(target), target), []
        total = sum(length for length, _ in files.values())
        with bar(total=total, desc=f"shard {source.name}", unit="B", unit_scale=True, disable=not progress) as shown:
            for number, names in enumerate(groups(files, size)):
                of = hashlib.sha256(repr([(name, files[name]) for name in names]).encode("utf-8", "surrogateescape"))
                found = known.get(of.hexdigest())
                if found is None or not is_whole(target / found.file, found):
                    found = patient(partial(write, source, names, target, number, of.hexdigest()), target)
                shards.append(found)
                shown.update(sum(files[name][0] for name in names))
        patient(lambda: publish(target, shards), target)
    return target


def groups(files: dict[str, tuple[int, int]], size: int) -> Iterator[list[str]]:
    """The names in order, as many at a time as have `size` bytes in a tar."""
    group: list[str] = []
    full = 0
    for name, (length, _) in files.items():
        room = length + 2 * 512  # its header, and up to the next block
        if group and full + room > size:
            yield group
            group, full = [], 0
        group.append(name)
        full += room
    if group:
        yield group


def write(source: Path, names: list[str], target: Path, number: int, of: str) -> Shard:
    """One tar, named by its content, and a note that vouches for it."""
    part = target / f"{NAME}{number:05d}.new"
    digest = archive.write({name: source / name for name in names}, part)
    path = part.with_name(f"{NAME}{number:05d}-{digest[:12]}.tar")
    found = Shard(path.name, part.stat().st_size, digest, len(names), of)
    disk.rename(part, path)
    disk.write_atomic(path.with_suffix(".json"), json.dumps(asdict(found)))
    return found


def publish(target: Path, shards: list[Shard]) -> None:
    """Write the manifest; remove tars of other files, notes of what an interrupted call had done, and what it left."""
    disk.write_atomic(target / SHARDS, json.dumps({"version": 1, "shards": list(map(asdict, shards))}, indent=1))
    for path in target.iterdir():
        if OURS.fullmatch(path.name) and path.name not in {one.file for one in shards}:
            disk.remove(path)


def written(target: Path) -> dict[str, Shard]:
    """What the manifest and an interrupted call's notes say is there, by what it is of. One that is damaged says
    nothing."""
    found = {}
    disk.make_folder(target)
    for path in target.iterdir():
        if path.name == SHARDS or (path.suffix == ".json" and OURS.fullmatch(path.name)):
            try:
                noted = json.loads(path.read_text())
                shards = [Shard(**one) for one in (noted["shards"] if path.name == SHARDS else [noted])]
                found |= {one.of: one for one in shards if OURS.fullmatch(one.file)}
            except (ValueError, LookupError, TypeError):
                continue
    return found


def is_whole(path: Path, one: Shard) -> bool:
    """By its hash: `stage` refuses a damaged one. One that cannot be read is written anew too."""
    try:
        return path.stat().st_size == one.size and disk.sha256(path) == one.sha256
    except OSError:
        return False
