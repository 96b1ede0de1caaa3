"""The pack of a source: the finished one, or a new one that appears under its name only when it is whole.

A task says what its samples are (`survey`) and how to read one (`read`). Samples are read in parallel and appended to
the arrays one by one, so that memory does not grow with the data. What cannot be used is listed in one table, never
dropped silently.
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
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

import numpy as np
from torch.utils.data import Dataset

from nbtools import disk
from nbtools.data import splits
from nbtools.data.cached import touch
from nbtools.data.pack import (
    FORMAT,
    MANIFEST,
    Card,
    Column,
    Pack,
    Reader,
    Sample,
    columns_of,
    digest_of,
    is_pack,
    lock_of,
    mapped,
    split_bytes,
)
from nbtools.data.parallel import side_by_side, threaded
from nbtools.data.progress import bar, say
from nbtools.data.sources import cache, listing
from nbtools.data.splits import SPLITS
from nbtools.data.stage import stage
from nbtools.errors import PackError
from nbtools.show import plural
from nbtools.version import VERSION

Options = Mapping[str, Any]
Problem = tuple[str, ...]  # a row of the table of bad samples: file, value, rule, fix

DAMAGED = (OSError, ValueError, EOFError, SyntaxError, zlib.error, struct.error, zipfile.BadZipFile)
"""What Pillow, NumPy and the like raise on damaged files."""

READABLE = "the file must be readable"
JOURNAL = "journal"
NOTED = 1.0  # seconds of packing that a killed process may lose: each note waits for the disk
BLOCK = 1 << 20  # bytes that are written at once


@dataclass(frozen=True)
class Entry:
    """One sample to read. name: its file, relative to the source; split: the source's own, None if it has none.

    label: a number or an array of numbers, which becomes the column `label`; None where `read` gives it, or there is
    none. group: samples of one group stay in one split.
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
    drawn: every entry has its final split; else those without one get theirs by a hash of their group or name, or with
    by_content of their arrays; with stratified each class is divided by the shares.
    check: raises PackError(value, rule, fix) for a decoded sample that has to be left out; called by several threads.
    count: (columns, ids of training samples) → the samples of each class, by what they are classes of.
    named: a column that `read` gives as one text a sample, the name of its class; the pack stores its index in
    `classes`, which are then those that occur, sorted, numbers by value.
    learn: (columns and offsets, ids of training samples) → more options, such as means.
    elsewhere: columns of the samples that `read` leaves out, as the pack is not to store them.
    """

    entries: Sequence[Entry]
    classes: Sequence[str] = ()
    options: Options | None = None
    ragged: Collection[str] = ()
    bucket_by: str | None = None
    bad: Sequence[Problem] = ()
    drawn: bool = False
    by_content: bool = False
    stratified: bool = False
    check: Callable[[Entry, Sample], None] | None = None
    count: Callable[[Mapping[str, np.ndarray], np.ndarray], dict[str, list[int]]] | None = None
    named: str | None = None
    learn: Callable[[Mapping[str, np.ndarray], np.ndarray], dict[str, Any]] | None = None
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
    seed: int = 0,
    into: str | Path | None = None,
    progress: bool = True,
    processes: bool = True,
) -> Pack:
    """Return the pack of a source, opened where it is finished.

    source: anything `stage` takes, or a pack (a folder, or the one file that `Pack.keep` wrote).
    options: what was requested, as plain JSON values. With val, test, seed and the source's files it identifies the
    pack. survey: `survey(folder, {**options, "val": val, "test": test})`, called for a pack that is made anew.
    read: `read(path, options)` → the arrays of one sample; called by several threads, and later for the raw files. It
    refuses a file by PackError(value, rule, fix); what decoders raise on damage counts as that too.
    reader: where a sample cannot be read without the rest of its source, `reader(folder)` returns what to call in place
    of `read`; workers get it pickled. processes: whether forked processes may call `read` too.
    val, test: shares of the samples without a split of their own, or whole numbers for exactly that many; test=1.0
    makes all of them test, also those with a split of their own: a source that a run is evaluated on. A pack keeps its
    splits. seed: of another draw.
    into: a folder for the pack alone; by default one under the cache, named by task, options and the source's files.
    Raises PackError if nothing can be packed, DiskError if it cannot be written; nothing is published then.
    """
    splits.require_shares(val, test)
    folder = stage(source, progress=progress)
    if is_pack(folder):
        pack = of_task(Pack.open(folder), task)
        if splits.is_all(test) and pack.splits["test"] < len(pack):
            fix = "pass the raw source, which test=1.0 makes test data"
            raise PackError(f"{folder} is a pack, and its splits are fixed; {fix}")
        return pack
    given = {**options, "val": val, "test": test, **({"seed": seed} if seed else {})}
    with disk.explained(f"looking at {folder}", folder):
        made = {"key": fingerprint(task, folder, given), "source": str(folder)}
    read = reader(folder) if reader else read

    def samples(found: Survey, done: int) -> Generator[Sample | Problem, None, None]:
        work = partial(decoded, survey=found, read=read, folder=folder)
        return (side_by_side if processes else threaded)(work, found.entries[done:])

    ends: Any = {"val": val, "test": test, "seed": seed, "progress": progress}
    pack = make_pack(task, made, into, lambda: survey(folder, given), samples, options, **ends)
    return dataclasses.replace(pack, raw=RawFiles(pack.folder, folder, read))


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
    seed: int = 0,
    progress: bool = True,
) -> Pack:
    """Return the pack with a key: the finished one, or a new one, without its source.

    made: what the manifest records of the source: `key`, which says of what files and options it is made, and `source`.
    samples: (survey, number of entries done) → what became of each entry from there on, in order. options: where the
    survey has none. The rest as for `build_pack`.
    """
    target = (Path(into) if into is not None else cache() / "packs" / f"{task}-{made['key']}").absolute()
    touch(target)
    with disk.explained(f"packing {made['source']}", target), lock_of(target):
        if is_finished(target, task, made["key"]):
            return Pack.open(target)
        part = target.with_name(f"{target.name}.part")
        part.mkdir(parents=True, exist_ok=True)
        try:
            found = survey()
            found = dataclasses.replace(found, options=options if found.options is None else found.options)
            writer = Writer(part, found, made["key"])
            with contextlib.closing(writer), contextlib.closing(samples(found, writer.done)) as stream:
                writer.write(stream, progress)
            finish(part, found, writer.columns, task, made, (val, test, seed))
        except PackError:
            disk.remove(part)  # the data's fault: there is nothing to resume
            raise
        disk.remove(part / JOURNAL)
        disk.publish_folder(part, target)
    pack = Pack.open(target)
    for line in pack.remarks if progress else ():
        say(line)
    return pack


def is_finished(target: Path, task: str, key: str) -> bool:
    """Return whether the pack exists. Raises PackError if something else is there."""
    if is_pack(target):
        if of_task(Pack.open(target), task).manifest.get("key") == key:
            return True
        raise PackError(f"{target} holds a pack of other files or options; delete it, or choose another folder")
    if target.exists() and not (target.is_dir() and not os.listdir(target)):
        raise PackError(f"{target} is not a pack, and not empty; choose a new folder for the pack")
    return False


def of_task(pack: Pack, task: str) -> Pack:
    if pack.card.task != task:
        reason = f"{pack.folder} is a pack of the task {pack.card.task!r}, not of {task!r}"
        raise PackError(f"{reason}; use that task, or other data", entry="Wrong script or mode")
    return pack


def fingerprint(task: str, folder: Path, given: Options) -> str:
    """Return a key of the files (relative name, size, time of change) and of what is to be made of them."""
    text = json.dumps([FORMAT, task, str(folder.resolve()), given], sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    files = "".join(f"{name}\0{size}\0{mtime}\n" for name, (size, mtime) in sorted(listing(folder).items()))
    digest.update(files.encode(errors="surrogateescape"))
    return digest.hexdigest()


@dataclass(eq=False)
class RawFiles(Dataset):
    """The source files of a pack, decoded at each access, as a DataLoader reads them: for comparison. Item i has the
    same values as the pack's sample i."""

    folder: Path
    source: Path
    read: Reader = field(repr=False)

    @cached_property
    def pack(self) -> Pack:
        return Pack.open(self.folder)

    def __len__(self) -> int:
        return len(self.pack)

    def __getitem__(self, i: int) -> Sample:
        decoded = self.read(self.source / self.pack.names[i], self.pack.options)
        return {**self.pack.sample(i), **decoded, "id": np.asarray(i, np.int64)}

    def __getstate__(self) -> dict[str, Any]:  # each worker opens the arrays itself
        return {"folder": self.folder, "source": self.source, "read": self.read}


# -- reading


def decoded(entry: Entry, survey: Survey, read: Reader, folder: Path) -> Sample | Problem:
    """Return a sample with its label, or its row of the table of bad samples."""
    path = folder / entry.name
    try:
        try:
            sample = read(path, survey.options or {})
        except DAMAGED as error:
            if isinstance(error, OSError) and disk.is_away(error):  # a moment's trouble must not leave it out for ever
                raise OSError(error.errno, error.strerror, str(path)) from None
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
    """Return (value, rule, fix) of an error that refuses a sample."""
    value, rule, fix = error.args if len(error.args) == 3 else (error, READABLE, "fix it")
    return str(value), str(rule), str(fix)


# -- writing


class Writer:
    """Appends samples to the files of a new pack. Once a second a journal says how long each file is, after its bytes
    are on the disk: the next process cuts them to that, and continues after the `done` entries."""

    def __init__(self, folder: Path, survey: Survey, key: str):
        self.folder, self.survey = folder, survey
        what = repr([VERSION, key, survey.options, survey.classes, survey.entries])
        self.key = hashlib.blake2b(what.encode(errors="surrogateescape"), digest_size=16).hexdigest()
        state = folder / JOURNAL / "state.json"
        noted = disk.from_json(state.read_bytes()) if state.exists() else {"key": None, "sizes": {}}
        sizes = {name: (folder / name).stat().st_size for name in noted["sizes"] if (folder / name).exists()}
        if noted["key"] != self.key or any(sizes.get(name, -1) < size for name, size in noted["sizes"].items()):
            disk.remove(folder)
            (folder / JOURNAL).mkdir(parents=True)
            noted = {"done": 0, "sizes": {}, "columns": {}}
        self.done, self.columns = noted["done"], columns_of(noted["columns"])
        self.files: dict[str, BinaryIO] = {}
        for name, size in noted["sizes"].items():
            self.append(name, b"")
            self.files[name].truncate(size)
        if not self.done:
            self.append("bad.csv", csv_bytes([("\ufefffile", "value", "rule", "fix"), *survey.bad]))

    def write(self, samples: Iterable[Sample | Problem], progress: bool) -> None:
        """Append what became of the entries after those that are done, in order."""
        total, since = len(self.survey.entries), monotonic()
        look = {"unit": " samples", "mininterval": 0.5, "disable": not progress, "leave": False}
        with bar(desc="packing", total=total, initial=self.done, **look) as shown:
            for sample in samples:
                if isinstance(sample, tuple):
                    self.append("bad.csv", csv_bytes([sample]))
                else:
                    self.add(sample)
                self.done += 1
                shown.update()
                if monotonic() - since > NOTED:
                    self.note()
                    since = monotonic()

    def add(self, sample: Sample) -> None:
        """Append a sample. Raises PackError unless names, dtypes and shapes of the arrays are the first sample's, but
        for the length of a ragged one."""
        named, ragged = self.survey.named, self.survey.ragged
        arrays = {name: np.asarray(array, order="C") for name, array in sample.items() if name != named}
        columns = {name: column_of(name, array, name in ragged) for name, array in arrays.items()}
        if not self.columns:
            self.begin(columns)
        if columns != self.columns:
            came, first = (", ".join(f"{name} {c}" for name, c in one.items()) for one in (columns, self.columns))
            entry = self.survey.entries[self.done]
            raise PackError(f"{entry.name}: its columns are {came}; the first sample's are {first}")
        for name, array in arrays.items():
            self.append(f"{name}.npy", array.data)
            if name in ragged:
                self.append(f"{JOURNAL}/{name}.lengths", np.int64(len(array)).tobytes())
        if named is not None:
            self.append(f"{JOURNAL}/classes", json.dumps(str(sample[named])).encode() + b"\n")
        self.append(f"{JOURNAL}/kept", np.int64(self.done).tobytes())

    def begin(self, columns: dict[str, Column]) -> None:
        """Create the arrays, without any row. Raises PackError for a column that is named like a file of the pack, or
        what a batch has besides."""
        own = {"split", "id", *(f"{name}{end}" for name in self.survey.ragged for end in (".offsets", "_length"))}
        if taken := sorted(own & columns.keys()):
            raise PackError(f"column {taken[0]!r}: nbtools reserves {', '.join(sorted(own))}; rename it in `read`")
        self.columns = columns
        for name, column in columns.items():
            self.append(f"{name}.npy", header(column, 0))

    def append(self, name: str, data: bytes | memoryview) -> None:
        if name not in self.files:
            self.files[name] = open(self.folder / name, "ab", buffering=BLOCK)  # noqa: SIM115
        self.files[name].write(data)

    def note(self) -> None:
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in self.files.items()}
        columns = {name: dataclasses.asdict(column) for name, column in self.columns.items()}
        state = {"key": self.key, "done": self.done, "sizes": sizes, "columns": columns}
        disk.write_atomic(self.folder / JOURNAL / "state.json", json.dumps(state))

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def column_of(name: str, array: np.ndarray, ragged: bool) -> Column:
    if array.dtype.kind not in "biuf":
        raise PackError(f"{name}: a pack can hold numbers and booleans only, got {array.dtype}; store class indices")
    return Column("ragged" if ragged else "fixed", array.dtype.str, array.shape[1:] if ragged else array.shape)


def header(column: Column, rows: int) -> bytes:
    """Return the .npy header of a column; NumPy leaves room for the rows to grow, so its length does not depend on
    them."""
    text = io.BytesIO()
    described = {"descr": column.dtype, "fortran_order": False, "shape": (rows, *column.shape)}
    np.lib.format.write_array_header_1_0(text, described)
    return text.getvalue()


def csv_bytes(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode("utf-8", "backslashreplace")


# -- what all samples together decide


def finish(
    folder: Path,
    survey: Survey,
    columns: Mapping[str, Column],
    task: str,
    made: Mapping[str, Any],
    draw: tuple[float, float, int],
) -> None:
    """Complete the files that a Writer left, and write the manifest: the folder is then a whole pack."""
    kept = folder / JOURNAL / "kept"
    entries = [survey.entries[i] for i in np.fromfile(kept, np.int64)] if kept.exists() else []
    if not entries:
        raise PackError(nothing(made["source"], folder / "bad.csv"), entry="Keys, columns and paths")
    columns, classes, label = complete(folder, survey, columns, len(entries))
    arrays = {path.stem: mapped(path) for path in folder.glob("*.npy")}
    labels = None if label is None else [classes[i] for i in arrays[label].ravel()]
    split, remarks = split_entries(entries, survey, columns, arrays, labels, draw)
    (folder / "split.npy").write_bytes(split_bytes(split))
    (folder / "names.json").write_text(json.dumps([entry.name for entry in entries]))
    if any(entry.group is not None for entry in entries):
        (folder / "groups.json").write_text(json.dumps([entry.group for entry in entries]))
    paths = sorted(path for path in folder.iterdir() if path.name not in (JOURNAL, MANIFEST))
    files = {path.name: {"size": path.stat().st_size, "sha256": disk.sha256(path)} for path in paths}
    train = np.array([i for i, one in enumerate(split) if one == "train"], np.int64)
    card = Card(
        task,
        classes,
        {**(survey.options or {}), **(survey.learn(arrays, train) if survey.learn else {})},
        {**columns, **survey.elsewhere},
        splits={one: split.count(one) for one in SPLITS},
        bucket_by=survey.bucket_by,
        digest=digest_of(files),
        counts=survey.count(arrays, train) if survey.count else {},
    )
    bad = len(survey.bad) + len(survey.entries) - len(entries)
    about = {"version": FORMAT, "nbtools": VERSION, "card": card.to_dict(), "files": files, "bad": bad}
    manifest = {**about, "label": label, "remarks": remarks, **made}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def complete(
    folder: Path, survey: Survey, columns: Mapping[str, Column], count: int
) -> tuple[dict[str, Column], list[str], str | None]:
    """Give the arrays their lengths, offsets and the column of classes; return (columns, classes, the column that has
    one class a sample)."""
    for name, column in columns.items():
        rows = count
        if column.kind == "ragged":
            lengths = np.fromfile(folder / JOURNAL / f"{name}.lengths", np.int64)
            np.save(folder / f"{name}.offsets.npy", np.concatenate([[0], np.cumsum(lengths)]))
            rows = int(lengths.sum())
        with open(folder / f"{name}.npy", "r+b") as file:
            file.write(header(column, rows))
    classes = list(survey.classes)
    if survey.named is not None:
        texts = [json.loads(line) for line in (folder / JOURNAL / "classes").read_bytes().splitlines()]
        classes = classes or in_value_order(set(texts))
        index = {name: i for i, name in enumerate(classes)}
        np.save(folder / f"{survey.named}.npy", np.array([index[text] for text in texts], np.int64))
        return {**columns, survey.named: Column("fixed", "<i8", ())}, classes, survey.named
    label = columns.get("label")
    single = label is not None and label.kind == "fixed" and label.dtype[1] == "i" and label.shape in ((), (1,))
    return dict(columns), classes, "label" if classes and single else None


def split_entries(
    entries: Sequence[Entry],
    survey: Survey,
    columns: Mapping[str, Column],
    arrays: Mapping[str, np.ndarray],
    labels: list[str] | None,
    draw: tuple[float, float, int],
) -> tuple[list[str], list[str]]:
    """Return (the split of every sample, remarks)."""
    val, test, seed = draw
    given = [entry.split for entry in entries]
    if survey.drawn and not splits.is_all(test):
        split = [one or "train" for one in given]
    else:
        groups = [entry.group for entry in entries]
        texts = contents(arrays, columns.keys() - {survey.named}, len(entries)) if survey.by_content else ()
        places = [splits.position(e.group or text or e.name, seed) for e, text in zip_longest(entries, texts)]
        mix, exact = labels if survey.stratified else None, survey.stratified or survey.by_content
        split = splits.assign(places, given, val, test, groups=groups, labels=mix, exact=exact)
    every, left = Counter(entry.split for entry in survey.entries), Counter(given)
    refused = {one: (count - left[one], count) for one, count in every.items()}
    wanted = {"train": 1, "val": val, "test": 0 if set(given) - {None} else test}
    wanted = {} if splits.is_all(test) else wanted
    return split, splits.remarks(split, wanted, refused, labels)


def contents(arrays: Mapping[str, np.ndarray], names: Collection[str], count: int) -> Iterator[bytes]:
    """Yield what each sample holds."""
    for i in range(count):
        parts = []
        for name in sorted(names):
            ends = arrays.get(f"{name}.offsets")
            parts.append(arrays[name][i if ends is None else slice(ends[i], ends[i + 1])].tobytes())
        yield b"".join(parts)


def in_value_order(classes: Collection[str]) -> list[str]:
    """Return classes sorted as numbers where all are whole numbers, so that 10 follows 9, else as texts."""
    numbers = all(re.fullmatch(r"-?\d+", name) for name in classes)
    return sorted(classes, key=int if numbers else None)


def nothing(source: str, table: Path) -> str:
    with open(table, encoding="utf-8-sig", newline="") as file:
        bad = [*csv.reader(file)][1:]
    if not bad:
        return f"{source}: no samples found; is this the right folder?"
    name, value, rule, fix = bad[0]
    return f"{source}: 0 of {plural(len(bad), 'file')} can be used. The first: {name}: {rule}, got {value}; {fix}"
