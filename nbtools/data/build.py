"""The pack of a source: the finished one, or a new one that appears under its name only when it is whole.

A task says what its samples are (`survey`) and how to read one (`read`). Samples are read in parallel; what cannot be
used is listed in one table, never dropped silently.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import json
import re
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from nbtools import disk
from nbtools.data import splits
from nbtools.data.drive import cache
from nbtools.data.fetch import listing
from nbtools.data.pack import FORMAT, MANIFEST, Card, Column, Pack, Sample, class_names, is_pack, memory_map, touch
from nbtools.data.parallel import side_by_side
from nbtools.data.progress import say
from nbtools.data.stage import stage
from nbtools.data.writer import JOURNAL, Problem, Writer
from nbtools.disk import VERSION
from nbtools.errors import PackError
from nbtools.show import plural

Options = Mapping[str, Any]
Arrays = Mapping[str, np.ndarray]  # columns, and the offsets of ragged ones
Reader = Callable[[Path, Options], Sample]

DAMAGED = (OSError, ValueError, EOFError, SyntaxError, zlib.error, struct.error, zipfile.BadZipFile)
"""What Pillow, NumPy and the like raise on damaged files."""
READABLE = "the file must be readable"


@dataclass(frozen=True)
class Entry:
    """One sample to read."""

    name: str  # its file, relative to the source
    split: str | None = None  # the source's own
    label: Any = None  # a number or an array of numbers, which becomes the column `label`; None where `read` gives it
    group: str | None = None  # samples of one group stay in one split


@dataclass(frozen=True)
class Survey:
    """What a task finds in a source without decoding it. Entries without a split get theirs by a hash of their group or
    name, or with by_content of their arrays."""

    entries: Sequence[Entry]  # in the pack's order
    classes: Sequence[str] = ()
    options: Options = field(default_factory=dict)  # what `read` and `run.predict` need
    ragged: Collection[str] = ()  # columns whose samples differ in their first dimension
    bucket_by: str | None = None  # the ragged column whose length groups batches
    bad: Sequence[Problem] = ()  # (file, value, rule, fix) of each file that cannot be used
    by_content: bool = False
    stratified: bool = False  # each class is divided by the shares
    check: Callable[[Entry, Sample], None] | None = None  # raises PackError(value, rule, fix)
    count: Callable[[Arrays, np.ndarray], dict[str, list[int]]] | None = None  # (…, training ids) → samples a class
    named: str | None = None  # a column that `read` gives as the name of a class; None of `classes`: those that occur
    learn: Callable[[Arrays, np.ndarray], dict[str, Any]] | None = None  # (…, training ids) → more options, as means
    elsewhere: Mapping[str, Column] = field(default_factory=dict)  # columns that are not to be stored


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
) -> Pack:
    """Return the pack of a source, opened where it is finished.

    source: anything `stage` takes, or a pack. options: what was requested, as plain JSON values; with val, test, seed
    and the source's files it identifies the pack. survey: `survey(folder, {**options, "val": val, "test": test})`.
    read: `read(path, options)` → the arrays of one sample, called by forked processes, and later for the raw files. It
    refuses a file by PackError(value, rule, fix); what decoders raise on damage counts as that too. reader: where that
    takes the rest of the source, `reader(folder)` returns what to call in place of `read`. val, test: shares of the
    samples without a split of their own, or whole numbers for exactly that many; test=1.0 makes all of them test.
    into: a folder for the pack alone; by default one under the cache. Raises PackError if nothing can be packed,
    DiskError if it cannot be written.
    """
    splits.require_shares(val, test)
    folder = stage(source, progress=progress)
    if is_pack(folder):
        pack = of_task(Pack.open(folder), task)
        if splits.is_all(test) and pack.splits["test"] < len(pack):
            fix = "pass the raw source, which test=1.0 makes test data"
            raise PackError(f"{folder} is a pack, and its splits are fixed; {fix}")
        where = source_of(pack)
        return dataclasses.replace(pack, raw=where and RawFiles(pack, where, reader(where) if reader else read))
    given = {**options, "val": val, "test": test, **({"seed": seed} if seed else {})}
    with disk.explained(f"looking at {folder}", folder):
        made = {"key": fingerprint(task, folder, given), "keyed": given, "source": str(folder)}
    read = reader(folder) if reader else read

    def samples(inventory: Survey, done: int) -> Generator[Sample | Problem, None, None]:
        return side_by_side(partial(decode, inventory, read, folder), inventory.entries[done:])

    draw = (val, test, seed)
    pack = make_pack(task, made, into, lambda: survey(folder, given), samples, draw, progress)
    return dataclasses.replace(pack, raw=RawFiles(pack, folder, read))


def make_pack(
    task: str,
    made: Mapping[str, Any],
    into: str | Path | None,
    survey: Callable[[], Survey],
    samples: Callable[[Survey, int], Generator[Sample | Problem, None, None]],
    draw: tuple[float, float, int],
    progress: bool,
) -> Pack:
    """Return the pack with a key: the finished one, or a new one, without its source.
    made: what the manifest records: `key`, which says of what files and options it is made, and `source`. samples:
    (survey, number of entries done) → what became of each entry from there on, in order; draw: val, test and seed.
    """
    target = (Path(into) if into is not None else cache() / "packs" / f"{task}-{made['key']}").absolute()
    touch(target)
    name = hashlib.blake2b(str(target).encode(errors="surrogateescape"), digest_size=8).hexdigest()
    with disk.explained(f"packing {made['source']}", target), disk.Lock(cache() / "locks" / f"pack-{name}.lock"):
        if is_finished(target, task, made["key"]):
            return Pack.open(target)
        part = target.with_name(f"{target.name}.part")
        try:
            inventory = survey()
            writer = Writer(part, [VERSION, made["key"], len(inventory.entries)], inventory.named, inventory.ragged)
            with contextlib.closing(writer), contextlib.closing(samples(inventory, writer.done)) as stream:
                writer.write([entry.name for entry in inventory.entries], stream, progress)
                writer.finish()
            finish(writer, inventory, task, made, draw)
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
    if target.exists() and any(target.iterdir()):
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
    files = "".join(f"{name}\0{size}\0{mtime}\n" for name, (size, mtime) in sorted(listing(folder).items()))
    return hashlib.blake2b((text + files).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def source_of(pack: Pack) -> Path | None:
    """Return the source of a kept pack where it is here and unchanged, so that a receipt can measure the raw files."""
    made, source = pack.manifest, Path(pack.manifest["source"])
    with contextlib.suppress(OSError):  # another user's, or on a disk that does not respond
        if "keyed" in made and source.exists() and fingerprint(pack.card.task, source, made["keyed"]) == made["key"]:
            return source
    return None


# -- one sample


def decode(survey: Survey, read: Reader, folder: Path, entry: Entry) -> Sample | Problem:
    """Return a sample with its label, or its row of the table of bad samples."""
    try:
        sample = read(folder / entry.name, survey.options)
        if entry.label is not None:
            sample = {**sample, "label": np.asarray(entry.label)}
        if survey.check is not None:
            survey.check(entry, sample)
        return sample
    except PackError as error:
        return entry.name, *why(error)
    except DAMAGED as error:
        if isinstance(error, OSError) and disk.is_away(error):  # a moment's trouble must not leave it out for ever
            raise OSError(error.errno, error.strerror, str(folder / entry.name)) from None
        came = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        return entry.name, came, READABLE, "copy it again, or delete it"


def why(error: PackError) -> tuple[str, str, str]:
    """Return (value, rule, fix) of an error that refuses a sample."""
    value, rule, fix = error.args if len(error.args) == 3 else (error, READABLE, "fix it")
    return str(value), str(rule), str(fix)


@dataclass(eq=False)
class RawFiles(Dataset):
    """The source files of a pack, decoded at each access, as a DataLoader reads them: for comparison. Item i has the
    same values as the pack's sample i."""

    pack: Pack
    source: Path
    read: Reader = field(repr=False)

    def __len__(self) -> int:
        return len(self.pack)

    def __getitem__(self, i: int) -> Sample:
        decoded = self.read(self.source / self.pack.names[i], self.pack.options)
        return {**self.pack.sample(i), **decoded, "id": np.asarray(i, np.int64)}


# -- what all samples together decide


def finish(writer: Writer, survey: Survey, task: str, made: Mapping[str, Any], draw: tuple[float, float, int]) -> None:
    """Write classes, names, splits and the manifest beside what a Writer wrote: the folder is then a whole pack."""
    folder, columns, bad = writer.folder, dict(writer.columns), [*survey.bad, *writer.bad]
    entries = [survey.entries[i] for i in writer.kept]
    if not entries:
        raise PackError(nothing_usable(made["source"], bad), entry="Keys, columns and paths")
    classes = list(survey.classes) or in_value_order({*writer.classes})
    if survey.named is not None:
        index = {name: i for i, name in enumerate(classes)}
        np.save(folder / f"{survey.named}.npy", np.array([index[name] for name in writer.classes], np.int64))
        columns[survey.named] = Column("fixed", "<i8", ())
    (folder / "names.json").write_text(json.dumps([entry.name for entry in entries]))
    if any(entry.group for entry in entries):
        (folder / "groups.json").write_text(json.dumps([entry.group for entry in entries]))
    with open(folder / "bad.csv", "w", encoding="utf-8-sig", errors="backslashreplace", newline="") as file:
        csv.writer(file).writerows([("file", "value", "rule", "fix"), *bad])
    arrays = {path.stem: memory_map(path) for path in folder.glob("*.npy")}
    label = survey.named or ("label" if classes and str(columns.get("label")) in ("int64 ()", "int64 (1)") else None)
    labels = None if label is None else class_names(arrays[label], classes)
    split = split_entries(entries, survey, arrays, labels, draw)
    arrays["split"] = np.array([splits.SPLITS.index(one) for one in split], np.uint8)
    np.save(folder / "split.npy", arrays["split"])
    train = np.flatnonzero(arrays["split"] == 0)
    files = {path.name: {"size": path.stat().st_size, "sha256": disk.sha256(path)} for path in sorted(folder.iterdir())}
    files.pop(JOURNAL, None)
    card = Card(
        task,
        classes,
        {**survey.options, **(survey.learn(arrays, train) if survey.learn else {})},
        {**columns, **survey.elsewhere},
        {one: split.count(one) for one in splits.SPLITS},
        survey.bucket_by,
        hashlib.sha256("".join(entry["sha256"] for entry in files.values()).encode()).hexdigest(),
        survey.count(arrays, train) if survey.count else {},
    )
    more = {"bad": len(bad), "label": label, "remarks": remarks(entries, survey, split, labels, draw)}
    manifest = {**made, **more, "version": FORMAT, "nbtools": VERSION, "card": card.to_dict(), "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def split_entries(entries: Sequence[Entry], survey: Survey, arrays: Arrays, labels: Any, draw: Any) -> list[str]:
    """Return the split of every sample."""
    given, groups = [entry.split for entry in entries], [entry.group for entry in entries]
    columns = sorted(name for name in arrays if name != survey.named and not name.endswith(".offsets"))

    def content(i: int) -> bytes:
        """Return what a sample holds, but for its class."""
        ends = {name: arrays.get(f"{name}.offsets") for name in columns}
        rows = {name: i if end is None else slice(end[i], end[i + 1]) for name, end in ends.items()}
        return b"".join(arrays[name][row].tobytes() for name, row in rows.items())

    texts = (content(i) if survey.by_content else entry.name for i, entry in enumerate(entries))
    places = [splits.position(group or text, draw[2]) for group, text in zip(groups, texts, strict=True)]
    exact = survey.stratified or survey.by_content
    return splits.assign(given, places, groups, labels if survey.stratified else None, draw[:2], exact)


def remarks(entries: Sequence[Entry], survey: Survey, split: list[str], labels: Any, draw: Any) -> list[str]:
    """Return what is to be said of the splits."""
    val, test, _ = draw
    every, kept = (Counter(entry.split for entry in some) for some in (survey.entries, entries))
    lines = [
        f"{count - kept[one]:,} of {plural(count, 'sample')} {f'of the {one} split ' if one else ''}cannot be used, "
        "see pack.bad"
        for one, count in every.items()
        if count - kept[one] > count / 2
    ]
    shares = {"train": 1, "val": val, "test": 0 if kept.keys() - {None} else test}
    drawn = [one for one, share in shares.items() if share and not splits.is_all(test)]
    return lines + splits.remarks(split, labels, drawn)


def in_value_order(classes: Collection[str]) -> list[str]:
    """Return classes sorted as numbers where all are whole numbers, so that 10 follows 9, else as texts."""
    numbers = all(re.fullmatch(r"-?\d+", name) for name in classes)
    return sorted(classes, key=int if numbers else None)


def nothing_usable(source: str, bad: Sequence[Problem]) -> str:
    if not bad:
        return f"{source}: no samples found; is this the right folder?"
    file, value, rule, fix = bad[0]
    return f"{source}: 0 of {plural(len(bad), 'file')} can be used. The first: {file}: {rule}, got {value}; {fix}"
