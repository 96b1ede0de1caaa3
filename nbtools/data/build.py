"""The pack of a source: the finished one, or a new one that appears under its name only when it is whole.

A task says what its samples are (`survey`) and how to read one (`read`); the rest is the same for all tasks. Samples
are decoded in parallel, a chunk at a time, so that memory does not grow with the data. What cannot be used is listed in
one table, never dropped silently. Interrupted packing resumes: the `.part` folder keeps what was decoded, and a
journal records how far that is.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import io
import json
import os
import re
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path, PurePosixPath
from time import monotonic
from typing import Any

import numpy as np

from nbtools import disk
from nbtools.data.archive import archive_index
from nbtools.data.cached import require_room, touch
from nbtools.data.pack import (
    BAD,
    FORMAT,
    MANIFEST,
    SPLITS,
    Card,
    Column,
    Pack,
    RawFiles,
    Reader,
    Sample,
    assigned,
    columns_of,
    is_all,
    is_pack,
    mapped,
    require_shares,
)
from nbtools.data.parallel import CHUNK, side_by_side, threaded
from nbtools.data.progress import bar
from nbtools.data.sources import cache, listing
from nbtools.data.stage import stage
from nbtools.errors import PackError
from nbtools.show import plural
from nbtools.version import VERSION

Options = Mapping[str, Any]
Problem = tuple[str, ...]  # a row of the table of bad samples: file, value, rule, fix

DAMAGED = (OSError, ValueError, EOFError, SyntaxError, zlib.error, struct.error, zipfile.BadZipFile)
"""What Pillow, NumPy and the like raise on damaged files."""

NOTED = 1.0  # seconds of packing between two lines, which a process that is killed may lose: each waits for the disk
BLOCK = 1 << 20  # bytes of small samples that are written at once
JOURNAL = "samples.jsonl"
OFFSETS = Column("fixed", "<i8", ())  # of a ragged column: where each sample begins, and the end
SPLIT = Column("fixed", "|u1", ())
CLASS = Column("fixed", "<i8", ())
READABLE = "the file must be readable"


@dataclass(frozen=True)
class Entry:
    """One sample to read. name: its file, relative to the source; split: the source's own, None if it has none.

    label: a number or an array of numbers, which becomes the column `label`; None where `read` gives it, or there is
    none.
    """

    name: str
    split: str | None = None
    label: Any = None
    group: str | None = None


@dataclass(frozen=True)
class Survey:
    """What a task finds in a source without decoding it.

    entries: the samples to read, in the pack's order.
    options: what `read` and `run.predict` need, completed by inspecting the files; None: as requested.
    ragged: columns whose samples differ in their first dimension; bucket_by: the one whose length groups batches.
    bad: (file, value, rule, fix) of each file that cannot be used.
    facts: what else the manifest records.
    drawn: every entry has its final split; else those without one get theirs by a hash of their names.
    check: raises PackError(value, rule, fix) for a decoded sample that has to be left out; called by several threads.
    count: (columns, ids of training samples) → the samples of each class, by what they are classes of.
    named: a column that `read` gives as one text a sample, the name of its class; the pack stores its index in
    `classes`, which are then those that occur, sorted, numbers by value.
    learn: (columns and offsets, ids of training samples) → more options, such as means.
    """

    entries: Sequence[Entry]
    classes: Sequence[str] = ()
    options: Options | None = None
    ragged: Collection[str] = ()
    bucket_by: str | None = None
    bad: Iterable[Problem] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    drawn: bool = False
    check: Callable[[Entry, Sample], None] | None = None
    count: Callable[[Mapping[str, np.ndarray], np.ndarray], dict[str, list[int]]] | None = None
    named: str | None = None
    learn: Callable[[Mapping[str, np.ndarray], np.ndarray], dict[str, Any]] | None = None
    by_content: bool = False
    stratified: bool = False
    elsewhere: Mapping[str, Column] = field(default_factory=dict)


def build_pack(
    source: str | Path,
    task: str,
    options: Options,
    survey: Callable[[Path, Options], Survey],
    read: Reader,
    *,
    reader: Callable[[Path], Reader] | None = None,
    val: float = 0.1,
    test: float = 0.1,
    into: str | Path | None = None,
    progress: bool = True,
    in_place: bool = False,
    processes: bool = True,
) -> Pack:
    """The pack of a source, opened where it is finished.

    source: anything `stage` takes, or a pack (a folder, or the one file that `Pack.keep` wrote).
    options: what was requested, as plain JSON values. With val, test and the source's files it identifies the pack.
    survey: `survey(folder, {**options, "val": val, "test": test})`, called for a pack that is made anew.
    read: `read(path, options)` → the arrays of one sample; called by several threads, and later for the raw files. It
    refuses a file by PackError(value, rule, fix); what decoders raise on damage counts as that too.
    reader: where a sample cannot be read without the rest of its source, `reader(folder)` returns what to call in place
    of `read`; workers get it pickled.
    val, test: shares of the samples without a split of their own, or whole numbers for exactly that many; test=1.0
    makes all of them test, also those with a split of their own: a source that a run is evaluated on. A pack keeps its
    splits.
    into: a folder for the pack alone; by default one under the cache, named by task, options and the source's files.
    in_place: an archive stays one file, `folder` leads into it, and `read` gets paths through it,
    `lines.tar/train/1.png`, which `read_member` reads.
    processes: whether `read` may be called by forked processes too, which share the handles that are open.
    Raises PackError if nothing can be packed, DiskError if it cannot be written; nothing is published then.
    """
    require_shares(val, test)
    reader = reader or (lambda folder: read)
    folder, top = stage(source, extract=not in_place, progress=progress), ""
    if folder.is_file():
        index = archive_index(folder)
        if PurePosixPath(index.top, MANIFEST).as_posix() in index.files:
            folder = stage(folder, progress=progress)  # the files of a pack are mapped
        else:
            top = index.top
    if is_pack(folder):
        pack = of_task(Pack.open(folder), task)
        if is_all(test) and pack.splits["test"] < len(pack):
            raise PackError(
                f"{folder} is a pack, and its splits are fixed; pass the raw source, which test=1.0 makes test data"
            )
        return with_raw(pack, made_from(pack), reader)
    asked = {**options, "val": val, "test": test}
    with disk.explained(f"looking at {folder}", folder):
        key = fingerprint(task, folder, asked)

    def samples(found: Survey, done: int) -> Generator[Sample | Problem, None, None]:
        work = partial(decoded, survey=found, read=reader(folder / top), root=folder / top)
        entries = found.entries[done:]
        return side_by_side(work, entries) if processes else threaded(work, entries, CHUNK)

    made = {"key": key, "keyed": asked, "source": str(folder), "top": top}
    pack = make_pack(
        task, made, into, lambda: survey(folder / top, asked), samples, options, val=val, test=test, progress=progress
    )
    return with_raw(pack, folder, reader)


def make_pack(
    task: str,
    made: Mapping[str, Any],
    into: str | Path | None,
    survey: Callable[[], Survey],
    samples: Callable[[Survey, int], Generator[Sample | Problem, None, None]],
    options: Options,
    *,
    val: float,
    test: float,
    progress: bool,
    seed: int = 0,
) -> Pack:
    """The pack with a key: the finished one, or a new one, without its source.

    made: what the manifest records of the source: `key`, which says of what files and options it is made, `source`, and
    what else. samples: (survey, number of entries done) → what became of each entry from there on, in order. options:
    where the survey has none. The rest as for `build_pack`.
    """
    source, key = made["source"], made["key"]
    target = (Path(into) if into is not None else cache() / "packs" / f"{task}-{key}").absolute()
    lock = hashlib.blake2b(str(target).encode(errors="surrogateescape"), digest_size=8).hexdigest()
    touch(target)
    with disk.explained(f"packing {source}", target), disk.Lock(cache() / "locks" / f"pack-{lock}.lock"):
        if not finished(target, task, key):
            part = target.with_name(f"{target.name}.part")
            part.mkdir(parents=True, exist_ok=True)
            try:
                found = survey()
                if found.options is None:
                    found = dataclasses.replace(found, options=options)
                with contextlib.closing(Writer(part, found)) as writer:
                    done = writer.resume(key)
                    with contextlib.closing(samples(found, done)) as stream:
                        writer.write(stream, done, progress)
                    if not writer.kept:
                        raise PackError(nothing(source, writer.bad), entry="Keys, columns and paths")
                    writer.finish(task, val, test, {"nbtools": VERSION, **made})
            except PackError:
                disk.remove(part)  # the data's fault: there is nothing to resume
                raise
            disk.remove(part / JOURNAL)
            disk.publish_folder(part, target)
    return Pack.open(target)


def with_raw(pack: Pack, source: Path | None, reader: Callable[[Path], Reader]) -> Pack:
    """With the Dataset over the source files, where they are."""
    if source is None:
        return pack
    root = source / pack.manifest.get("top", "")
    return dataclasses.replace(pack, raw=RawFiles(pack.folder, root, reader(root)))


def finished(target: Path, task: str, key: str) -> bool:
    """Whether the pack already exists. Raises PackError if something else is there."""
    if is_pack(target):
        if of_task(Pack.open(target), task).manifest.get("key") == key:
            return True
        raise PackError(f"{target} holds a pack of other files or options; delete it, or choose another folder")
    if target.exists() and not (target.is_dir() and not os.listdir(target)):
        raise PackError(f"{target} is not a pack, and not empty; choose a new folder for the pack")
    return False


def made_from(pack: Pack) -> Path | None:
    """The source of a kept pack, where it is still on this machine and unchanged: the receipt can then measure the raw
    files too."""
    made = pack.manifest
    source = Path(made.get("source", ""))
    try:
        same = "keyed" in made and source.exists() and fingerprint(pack.card.task, source, made["keyed"]) == made["key"]
    except OSError:  # another user's, or on a disk that does not respond: the pack is complete without it
        return None
    return source if same else None


def of_task(pack: Pack, task: str) -> Pack:
    if pack.card.task != task:
        raise PackError(
            f"{pack.folder} is a pack of the task {pack.card.task!r}, not of {task!r}; use that task, or other data",
            entry="Wrong script or mode",
        )
    return pack


def nothing(source: str, bad: Sequence[Problem]) -> str:
    if not bad:
        return f"{source}: no samples found; is this the right folder?"
    file, value, rule, fix = bad[0]
    return f"{source}: 0 of {plural(len(bad), 'file')} can be used. The first: {file}: {rule}, got {value}; {fix}"


def fingerprint(task: str, folder: Path, asked: Options) -> str:
    """A key of the files (relative name, size, time of change) and of what is to be made of them."""
    text = json.dumps([FORMAT, task, str(folder.resolve()), asked], sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    files = "".join(f"{name}\0{size}\0{mtime}\n" for name, (size, mtime) in sorted(listing(folder).items()))
    digest.update(files.encode(errors="surrogateescape"))
    return digest.hexdigest()


class Writer:
    """The arrays of a new pack, appended sample by sample. What is added in about a second has a line of JSON in a
    journal, written once its bytes are on disk: a process that is killed leaves whole lines and perhaps a torn last
    one."""

    def __init__(self, folder: Path, survey: Survey):
        self.folder, self.survey = folder, survey
        self.columns: dict[str, Column] = {}
        self.ends: dict[str, int] = {}  # ragged column → rows so far
        self.files: dict[str, FileIO] = {}  # of columns, and of the offsets of ragged ones
        self.blocks: dict[str, bytearray] = {}  # what is not yet written to them
        self.journal: FileIO | None = None
        self.kept: list[int] = []  # positions of the entries that became samples
        self.labels: list[str] = []  # their classes, where the survey has a column of names
        self.bad: list[Problem] = list(survey.bad)

    def resume(self, key: str) -> int:
        """Take over what an earlier process recorded of the very same entries, and cut off what it wrote after that →
        entries that are done. key: of what is packed, and how. All other files in the folder are deleted."""
        survey = self.survey
        entries = [(e.name, e.split, None if e.label is None else np.asarray(e.label).tolist()) for e in survey.entries]
        what = repr([JOURNAL, VERSION, key, survey.options, list(survey.classes), entries])
        head = {"entries": hashlib.blake2b(what.encode(errors="surrogateescape"), digest_size=16).hexdigest()}
        there = {path.stem: path.stat().st_size for path in self.folder.glob("*.npy")}
        lines = whole_lines(self.folder / JOURNAL)
        notes = [
            (note, end)  # after a power cut the journal may be on the disk, and the bytes not
            for note, end in (lines[1:] if lines and lines[0][0] == head else [])
            if all(there.get(name, -1) >= size for name, size in note["sizes"].items())
        ]
        last, end = notes[-1] if notes else ({"done": 0, "columns": {}, "ends": {}, "sizes": {}}, 0)
        for path in self.folder.iterdir():
            if path.name != JOURNAL and path.stem not in last["sizes"]:
                disk.remove(path)
        self.journal = FileIO(self.folder / JOURNAL, "ab")
        self.journal.truncate(end)
        if not notes:
            self.note(head)
        for note, _ in notes:
            self.kept += note["kept"]
            self.labels += map(sys.intern, note.get("labels", ()))  # many samples, few texts
            self.bad += map(tuple, note["bad"])
        self.columns = columns_of(last["columns"])
        self.ends = last["ends"]
        for name, size in last["sizes"].items():
            self.files[name] = open(self.folder / f"{name}.npy", "r+b", buffering=0)  # noqa: SIM115
            self.files[name].truncate(size)
            self.files[name].seek(size)
        return last["done"]

    def write(self, samples: Iterator[Sample | Problem], done: int, progress: bool) -> None:
        """Append what became of the entries from `done` on, in order."""
        total = len(self.survey.entries)
        known = {"total": total, "initial": done, "unit": " samples"}
        begun = sum(file.tell() for file in self.files.values())
        with bar(desc="packing", **known, mininterval=0.5, disable=not progress, leave=False) as shown:
            since, kept, bad, labels = monotonic(), len(self.kept), len(self.bad), len(self.labels)
            for start in range(done, total, CHUNK):
                end = min(start + CHUNK, total)
                for i, sample in zip(range(start, end), samples, strict=False):
                    shown.update()
                    if isinstance(sample, tuple):
                        self.bad.append(sample)
                    else:
                        self.add(i, sample)
                if start == done:  # as the first ones take, so will the others
                    for name in self.files:
                        self.flush(name)
                    written = sum(file.tell() for file in self.files.values()) - begun
                    rest = written * (total - end) // (end - start)
                    require_room(self.folder, rest, f"The first {end - start:,} of {total - done:,} samples say so.")
                if end < total and monotonic() - since < NOTED:
                    continue
                for name, file in self.files.items():
                    self.flush(name)
                    os.fsync(file.fileno())
                self.note(
                    {
                        "done": end,
                        "columns": {name: dataclasses.asdict(column) for name, column in self.columns.items()},
                        "ends": self.ends,
                        "sizes": {name: file.tell() for name, file in self.files.items()},
                        "kept": self.kept[kept:],
                        "bad": self.bad[bad:],
                        "labels": self.labels[labels:],
                    }
                )
                since, kept, bad, labels = monotonic(), len(self.kept), len(self.bad), len(self.labels)

    def add(self, i: int, arrays: Sample) -> None:
        """Append the sample of entry i. Raises PackError, and writes nothing, unless names, dtypes and shapes of the
        arrays are the first sample's, but for the length of a ragged one."""
        entry, named = self.survey.entries[i], self.survey.named
        sample = {name: np.asarray(array, order="C") for name, array in arrays.items() if name != named}
        if entry.split is not None and entry.split not in SPLITS:
            raise PackError(f"{entry.name}: split must be one of {', '.join(SPLITS)}, or None, got {entry.split!r}")
        known = self.columns
        if sample.keys() != known.keys() or not all(fits(array, known[name]) for name, array in sample.items()):
            columns = {name: column_of(name, array, name in self.survey.ragged) for name, array in sample.items()}
            if self.kept:
                came, first = (", ".join(f"{name} {c}" for name, c in one.items()) for one in (columns, known))
                raise PackError(f"{entry.name}: its columns are {came}; the first sample's are {first}")
            self.begin(columns)
        for name, array in sample.items():
            if array.size:
                self.append(name, array.data)
            if name in self.ends:
                self.ends[name] += len(array)
                self.append(f"{name}.offsets", np.int64(self.ends[name]).data)
        self.kept.append(i)
        if named is not None:
            self.labels.append(sys.intern(str(arrays[named])))

    def append(self, name: str, data: memoryview) -> None:
        """To a file, at the latest by `flush`: each write lets go of the interpreter's lock and waits for it again."""
        block = self.blocks.setdefault(name, bytearray())
        block += data
        if len(block) >= BLOCK:
            self.flush(name)

    def flush(self, name: str) -> None:
        disk.write(self.files[name], self.blocks.pop(name, b""))

    def begin(self, columns: dict[str, Column]) -> None:
        """Create the files, as arrays without any row; offsets begin with 0. Raises PackError for a column whose name
        the pack's own files or a batch need."""
        self.columns, self.ends = columns, {name: 0 for name, column in columns.items() if column.kind == "ragged"}
        own = {"split", "id", *(f"{name}{end}" for name in self.ends for end in (".offsets", "_length"))}
        if taken := sorted(own & columns.keys()):
            raise PackError(f"column {taken[0]!r}: nbtools reserves {', '.join(sorted(own))}; rename it in `read`")
        for name, column in [*columns.items(), *((f"{name}.offsets", OFFSETS) for name in self.ends)]:
            self.files[name] = (self.folder / f"{name}.npy").open("xb", buffering=0)
            disk.write(self.files[name], header(column, 0) + (bytes(8) if column is OFFSETS else b""))

    def note(self, line: Mapping[str, Any]) -> None:
        assert self.journal is not None, "resume comes first"
        disk.write(self.journal, json.dumps(line).encode() + b"\n")

    def finish(self, task: str, val: float, test: float, made: Mapping[str, Any]) -> None:
        """Close the arrays and write the manifest; the folder is then a whole pack."""
        survey, entries, columns = self.survey, [self.survey.entries[i] for i in self.kept], self.columns
        for name, file in self.files.items():
            column = columns.get(name, OFFSETS)
            rows = len(entries) + 1 if column is OFFSETS else self.ends.get(name, len(entries))
            file.seek(0)
            disk.write(file, header(column, rows))
            file.close()
        classes = list(survey.classes)
        if survey.named is not None:
            classes = classes or in_value_order(set(self.labels))
            index = {name: i for i, name in enumerate(classes)}
            numbers = np.array([index[name] for name in self.labels], CLASS.dtype)
            self.save(f"{survey.named}.npy", header(CLASS, len(numbers)) + numbers.tobytes())
            columns = {**columns, survey.named: CLASS}
        names, own = [entry.name for entry in entries], [entry.split for entry in entries]
        drawn = survey.drawn and not is_all(test)
        splits = [split or "train" for split in own] if drawn else assigned(names, own, val, test)
        self.save("split.npy", header(SPLIT, len(splits)) + bytes(map(SPLITS.index, splits)))
        self.save("names.json", json.dumps(names).encode())
        self.save("bad.csv", bad_csv(self.bad))
        paths = sorted(path for path in self.folder.iterdir() if path.name != JOURNAL)
        files = {path.name: {"size": path.stat().st_size, "sha256": disk.sha256(path)} for path in paths}
        arrays = {path.stem: mapped(path) for path in paths if path.suffix == ".npy"}
        train = np.flatnonzero(arrays["split"] == SPLITS.index("train"))
        card = Card(
            task,
            classes,
            {**(survey.options or {}), **(survey.learn(arrays, train) if survey.learn else {})},
            {**columns, **survey.elsewhere},
            splits={split: splits.count(split) for split in SPLITS},
            bucket_by=survey.bucket_by,
            digest=hashlib.sha256("".join(entry["sha256"] for entry in files.values()).encode()).hexdigest(),
            counts=survey.count(arrays, train) if survey.count else {},
        )
        manifest = {"version": FORMAT, "card": card.to_dict(), "bad": len(self.bad), "files": files}
        self.save(MANIFEST, json.dumps({**manifest, **survey.facts, **made}, indent=1).encode())

    def save(self, name: str, data: bytes) -> None:
        with open(self.folder / name, "xb", buffering=0) as file:
            disk.write(file, data)

    def close(self) -> None:
        for file in [*self.files.values(), *([self.journal] if self.journal else [])]:
            file.close()


def decoded(entry: Entry, survey: Survey, read: Reader, root: Path) -> Sample | Problem:
    """A sample with its label, or its row of the table of bad samples."""
    try:
        try:
            sample = read(root / entry.name, survey.options or {})
        except DAMAGED as error:
            if isinstance(error, OSError) and disk.is_away(error):  # a moment's trouble must not leave it out for ever
                raise OSError(error.errno, error.strerror, str(root / entry.name)) from None
            came = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise PackError(came, READABLE, "copy it again, or delete it") from None
        if entry.label is not None:
            sample = {**sample, "label": np.asarray(entry.label)}
        if survey.check is not None:
            survey.check(entry, sample)
    except PackError as error:
        return entry.name, *why(error)
    return sample


def why(error: PackError) -> tuple[str, str, str]:
    """(value, rule, fix) of an error that refuses a sample."""
    value, rule, fix = error.args if len(error.args) == 3 else (error, READABLE, "fix it")
    return str(value), str(rule), str(fix)


def whole_lines(path: Path) -> list[tuple[dict[str, Any], int]]:
    """The lines up to the first that was not written to its end, each with the bytes up to its own."""
    lines, end = [], 0
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        try:
            lines.append((json.loads(line), end := end + len(line) + 1))
        except ValueError:
            break
    return lines


def in_value_order(classes: Collection[str]) -> list[str]:
    """Sorted as numbers where all are whole numbers, so that 10 follows 9, else as texts."""
    numbers = all(re.fullmatch(r"-?\d+", name) for name in classes)
    return sorted(classes, key=int if numbers else None)


def column_of(name: str, array: np.ndarray, ragged: bool) -> Column:
    if array.dtype.kind not in "biuf":
        raise PackError(f"{name}: a pack can hold numbers and booleans only, got {array.dtype}; store class indices")
    return Column("ragged" if ragged else "fixed", array.dtype.str, array.shape[1:] if ragged else array.shape)


def fits(array: np.ndarray, column: Column) -> bool:
    shape = array.shape[1:] if column.kind == "ragged" else array.shape
    return array.dtype.str == column.dtype and shape == column.shape


def header(spec: Column, rows: int) -> bytes:
    """The .npy header of a column; NumPy leaves room for the rows to grow, so its length does not depend on them."""
    text = io.BytesIO()
    described = {"descr": spec.dtype, "fortran_order": False, "shape": (rows, *spec.shape)}
    np.lib.format.write_array_header_1_0(text, described)
    return text.getvalue()


def bad_csv(rows: Sequence[Problem]) -> bytes:
    """The table of bad samples; a cell that a spreadsheet would take for a formula is escaped."""
    text = io.StringIO(newline="")
    escaped = [["'" + cell if cell.startswith(("=", "+", "-", "@")) else cell for cell in row] for row in rows]
    csv.writer(text).writerows([BAD, *escaped])
    return text.getvalue().encode("utf-8-sig", "backslashreplace")
