"""Writing a pack: find, decode in parallel, split, publish. What cannot be used is listed in one table, never dropped
in silence; a pack appears under its name only when it is whole.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from nbtools import disk
from nbtools.errors import PackError
from nbtools.gpu import cores
from nbtools.pack import BAD, MANIFEST, VERSION, Card, Column, Pack, Reader, Sample
from nbtools.splits import SPLITS, assigned, require_shares
from nbtools.stage import cache, stage

DAMAGED = (OSError, ValueError, EOFError, SyntaxError, zlib.error, struct.error, zipfile.BadZipFile)
"""What Pillow, NumPy and the like raise on damaged files."""

CHUNK = 256  # samples decoded ahead: bounds memory, and the pool idles once in so many


@dataclass(frozen=True)
class Entry:
    """One sample to decode. name: its file relative to the source; label: whatever the task makes of it."""

    name: str
    file: Path
    split: str | None = None
    label: Any = None


class Writer:
    """Appends samples to the flat arrays of a new pack, in memory that does not grow with the data.

    val, test: the share of samples without a split of their own that go there, by a hash of the name; a whole number
    takes exactly so many.
    """

    def __init__(self, folder: Path, ragged: Collection[str] = (), val: float = 0.1, test: float = 0.1, progress=True):
        self.folder, self.ragged, self.val, self.test, self.progress = folder, set(ragged), val, test, progress
        self.columns: dict[str, Column] = {}
        self.files: dict[str, Any] = {}
        self.offsets: dict[str, list[int]] = {}
        self.names: list[str] = []
        self.splits: list[str | None] = []
        self.bad: list[dict[str, str]] = []
        self.classes: list[str] = []

    def add(self, name: str, split: str | None, **arrays: np.ndarray) -> None:
        """Append one sample. Raises PackError, and writes nothing, unless names, dtypes and shapes of the arrays are
        the first sample's, but for the length of a ragged one."""
        sample = {column: np.asarray(array, order="C") for column, array in arrays.items()}
        specs = {column: self.spec(column, array) for column, array in sample.items()}
        if split is not None and split not in SPLITS:
            raise PackError(f"{name}: split must be one of {', '.join(SPLITS)}, or None, got {split!r}")
        if not self.names:
            for column, spec in specs.items():
                self.begin(column, spec)
        if specs != self.columns:
            raise PackError(f"{name}: its columns are {shown(specs)}; the first sample's are {shown(self.columns)}")
        for column, array in sample.items():
            if array.size:
                disk.write(self.files[column], array.reshape(-1).view(np.uint8).data)
            if column in self.ragged:
                self.offsets[column].append(self.offsets[column][-1] + len(array))
        self.names.append(name)
        self.splits.append(split)

    def spec(self, column: str, array: np.ndarray) -> Column:
        if array.dtype.kind not in "biuf":
            raise PackError(f"{column}: a pack holds numbers and truth values, got {array.dtype}; store class indices")
        if column in self.ragged:
            return Column("ragged", array.dtype.str, array.shape[1:])
        return Column("fixed", array.dtype.str, array.shape)

    def begin(self, column: str, spec: Column) -> None:
        self.columns[column] = spec
        self.offsets[column] = [0]
        self.files[column] = disk.create(self.folder / f"{column}.npy")
        disk.write(self.files[column], header(spec, 0))

    def reject(self, file: str, value: object, rule: str, fix: str) -> None:
        """List a sample that is left out: what came, the rule it breaks, what to do."""
        self.bad.append(dict(zip(BAD, (file, str(value), rule, fix), strict=True)))

    def decode(
        self, entries: Sequence[Entry], read: Reader, options: Mapping[str, Any]
    ) -> Iterator[tuple[Entry, Sample]]:
        """Read entries in a thread pool (decoders release the GIL), in order; what fails is rejected.

        `read` refuses a file by raising PackError(value, rule, fix); what decoders raise on damage counts too.
        """

        def attempt(entry: Entry) -> Sample | PackError:
            try:
                return read(entry.file, options)
            except PackError as error:
                return error
            except DAMAGED as error:
                came = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                return PackError(came, "the file can be read", "copy it again, or delete it")

        bar = tqdm(entries, "packing", unit=" samples", mininterval=0.5, disable=not self.progress, leave=False)
        with bar, ThreadPoolExecutor(max_workers=cores()) as pool:
            source = iter(entries)
            while chunk := list(islice(source, CHUNK)):
                for entry, found in zip(chunk, pool.map(attempt, chunk), strict=True):
                    bar.update()
                    if isinstance(found, PackError):
                        value, rule, fix = (
                            found.args if len(found.args) == 3 else (found, "the file can be read", "fix it")
                        )
                        self.reject(entry.name, value, rule, fix)
                    else:
                        yield entry, found

    def finish(self, task: str, options: Mapping[str, Any], bucket_by: str | None, facts: Mapping[str, Any]) -> Card:
        """Close the arrays and write the manifest; the folder is then a whole pack."""
        count = len(self.names)
        for column, file in self.files.items():
            rows = self.offsets[column][-1] if column in self.ragged else count
            file.seek(0)
            disk.write(file, header(self.columns[column], rows))
            file.close()
            if column in self.ragged:
                self.save(f"{column}.offsets.npy", npy(np.array(self.offsets[column], np.int64)))
        splits = assigned(self.names, self.splits, self.val, self.test)
        self.save("split.npy", npy(np.array([SPLITS.index(s) for s in splits], np.uint8)))
        self.save("names.json", json.dumps(self.names).encode())
        self.save("bad.csv", bad_csv(self.bad))
        counts = {s: splits.count(s) for s in SPLITS}
        files = {path.name: described(path) for path in sorted(self.folder.iterdir())}
        digest = hashlib.sha256("".join(entry["sha256"] for entry in files.values()).encode()).hexdigest()
        card = Card(task, list(self.classes), dict(options), self.columns, counts, bucket_by, digest)
        manifest = {"version": VERSION, "card": card.to_dict(), "bad": len(self.bad), "files": files, **facts}
        self.save(MANIFEST, json.dumps(manifest, indent=1).encode())
        return card

    def save(self, name: str, data: bytes) -> None:
        with disk.create(self.folder / name) as file:
            disk.write(file, data)

    def close(self) -> None:
        for file in self.files.values():
            file.close()


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
) -> Pack:
    """The pack of a source: the finished one if there is one, else made by `fill(writer, folder)` and published whole.

    source: anything `stage` takes, or a pack (a folder, or the one file that `Pack.keep` wrote). into: a folder of the
    pack's own; by default one under the cache, named by task, options and the source's files.
    Raises PackError where nothing can be packed, DiskError where it cannot be written; then nothing is left behind.
    """
    require_shares(val, test)
    folder = stage(source, progress=progress)
    if (folder / MANIFEST).is_file():
        return of_task(Pack.open(folder), task)
    with disk.explained(f"looking at {folder}", folder):
        key = fingerprint(task, folder, {**options, "val": val, "test": test})
    target = (Path(into) if into is not None else cache() / "packs" / f"{task}-{key}").absolute()
    lock = hashlib.blake2b(str(target).encode(errors="surrogateescape"), digest_size=8).hexdigest()
    with disk.explained(f"packing {folder}", target), disk.Lock(cache() / "locks" / f"pack-{lock}.lock"):
        if (target / MANIFEST).is_file():
            pack = of_task(Pack.open(target, source=folder, read=read), task)
            if pack.manifest.get("key") == key:
                return pack
            raise PackError(f"{target} holds a pack of other files or options; delete it, or choose another folder")
        if target.exists() and not (target.is_dir() and not os.listdir(target)):
            raise PackError(f"{target} is no pack and not empty; choose a new folder for the pack")
        part = target.with_name(f"{target.name}.part")
        disk.remove(part)
        disk.make_folder(part)
        writer = Writer(part, ragged, val, test, progress)
        try:
            fill(writer, folder)
            if not writer.names:
                raise PackError(nothing(folder, writer.bad))
            writer.finish(task, options, bucket_by, {"key": key, "source": str(folder)})
            disk.publish_folder(part, target)
        finally:
            writer.close()
            disk.remove(part)
    return Pack.open(target, source=folder, read=read)


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
        f"{folder}: none of {len(bad)} files can be used. The first: {first['file']}: {first['rule']}, "
        f"got {first['value']}; {first['fix']}"
    )


def fingerprint(task: str, folder: Path, options: Mapping[str, Any]) -> str:
    """A key of the files (relative name, size, time of change) and of what is made of them."""
    digest = hashlib.blake2b(
        json.dumps([VERSION, task, str(folder.resolve()), options], sort_keys=True).encode(), digest_size=8
    )
    for name, stat in sorted(listing(folder)):
        digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def listing(folder: Path) -> Iterable[tuple[str, os.stat_result]]:
    stack = [folder]
    while stack:
        with os.scandir(stack.pop()) as found:
            for item in found:
                if item.is_dir():
                    stack.append(Path(item.path))
                elif item.is_file():  # no dangling links: reading one is refused by name
                    yield os.path.relpath(item.path, folder), item.stat()


def shown(columns: Mapping[str, Column]) -> str:
    return ", ".join(f"{name} {c.kind} {np.dtype(c.dtype)} {c.shape}" for name, c in columns.items())


def header(spec: Column, rows: int) -> bytes:
    """The .npy header of a column; NumPy leaves room for the rows to grow, so its length does not depend on them."""
    shape = (rows, *spec.shape)
    text = io.BytesIO()
    np.lib.format.write_array_header_1_0(text, {"descr": spec.dtype, "fortran_order": False, "shape": shape})
    return text.getvalue()


def npy(array: np.ndarray) -> bytes:
    text = io.BytesIO()
    np.save(text, array)
    return text.getvalue()


def bad_csv(rows: Sequence[Mapping[str, str]]) -> bytes:
    text = io.StringIO(newline="")
    cells = [[row[name] for name in BAD] for row in rows]
    escaped = [["'" + v if v.startswith(("=", "+", "-", "@")) else v for v in line] for line in cells]
    csv.writer(text).writerows([BAD, *escaped])
    return text.getvalue().encode("utf-8-sig", "backslashreplace")


def described(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
