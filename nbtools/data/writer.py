"""Samples → the flat arrays of a new pack, decoded in parallel, in memory that does not grow with the data. What cannot
be used is listed in one table, never dropped in silence."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from nbtools import disk
from nbtools.data.build import Entry, cores
from nbtools.data.journal import JOURNAL, Journal
from nbtools.data.pack import BAD, FORMAT, MANIFEST, SPLITS, Card, Column, Reader, Sample, assigned
from nbtools.data.stage import bar
from nbtools.errors import PackError

DAMAGED = (OSError, ValueError, EOFError, SyntaxError, zlib.error, struct.error, zipfile.BadZipFile)
"""What Pillow, NumPy and the like raise on damaged files."""

CHUNK = 256  # samples decoded ahead: bounds memory, and the pool idles once in so many


class Writer:
    """Appends samples to the flat arrays of a new pack, in memory that does not grow with the data.

    val, test: the share of samples without a split of their own that go there, by a hash of the name; a whole number
    takes exactly so many. journal: where a process that comes after a kill finds how far this one was.
    """

    def __init__(
        self,
        folder: Path,
        ragged: Collection[str] = (),
        val: float = 0.1,
        test: float = 0.1,
        progress: bool = True,
        journal: Journal | None = None,
    ):
        self.folder, self.ragged, self.val, self.test, self.progress = folder, set(ragged), val, test, progress
        self.journal = journal
        self.columns: dict[str, Column] = {}
        self.files: dict[str, Any] = {}
        self.offsets: dict[str, list[int]] = {}
        self.names: list[str] = []
        self.splits: list[str | None] = []
        self.bad: list[dict[str, str]] = []
        self.classes: list[str] = []
        self.counts: dict[str, list[int]] = {}
        self.facts: dict[str, Any] = {}  # what the manifest says beside the rest
        self.noted = 0, 0  # names and bad samples that the journal has

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
        With a journal, entries that an earlier process was done with are not read and do not come: one call then makes
        the pack, and each sample is added, or rejected, as it comes.
        """

        def attempt(entry: Entry) -> Sample | PackError:
            try:
                assert entry.file is not None
                return read(entry.file, options)
            except PackError as error:
                return error
            except DAMAGED as error:
                came = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                return PackError(came, "the file can be read", "copy it again, or delete it")

        done = self.take_up(entries)
        known = {"total": len(entries), "initial": done, "unit": " samples"}
        shown_ = bar(desc="packing", **known, mininterval=0.5, disable=not self.progress, leave=False)
        with shown_, ThreadPoolExecutor(max_workers=cores()) as pool:
            source = islice(entries, done, None)
            while chunk := list(islice(source, CHUNK)):
                for entry, found in zip(chunk, pool.map(attempt, chunk), strict=True):
                    shown_.update()
                    if isinstance(found, PackError):
                        value, rule, fix = (
                            found.args if len(found.args) == 3 else (found, "the file can be read", "fix it")
                        )
                        self.reject(entry.name, value, rule, fix)
                    else:
                        yield entry, found
                done += len(chunk)
                self.note(done)

    def take_up(self, entries: Sequence[Entry]) -> int:
        """How many of the entries an earlier process was done with; what it wrote of others is cut off."""
        assert self.journal is None or not self.names, "with a journal one call of decode makes the pack"
        records = self.journal.begin([(e.name, e.split, e.label) for e in entries]) if self.journal else []
        for record in records:
            self.names += record["names"]
            self.splits += record["splits"]
            self.bad += record["bad"]
            for column, (kind, dtype, shape) in record["columns"].items():
                self.columns[column] = Column(kind, dtype, tuple(shape))
                self.offsets.setdefault(column, [0]).extend(record["offsets"][column])
        for column in self.columns:
            self.files[column] = file = open(self.folder / f"{column}.npy", "r+b", buffering=0)  # noqa: SIM115
            file.truncate(records[-1]["sizes"][column])
            file.seek(0, os.SEEK_END)
        self.noted = len(self.names), len(self.bad)
        return records[-1]["done"] if records else 0

    def note(self, done: int) -> None:
        """Tell the journal what came since the last note, once the arrays' bytes are on disk."""
        if self.journal is None:
            return
        names, bad = self.noted
        for file in self.files.values():
            disk.sync(file)
        self.journal.add(
            done=done,
            sizes={column: file.tell() for column, file in self.files.items()},
            columns={column: (spec.kind, spec.dtype, spec.shape) for column, spec in self.columns.items()},
            offsets={column: offsets[1 + names :] for column, offsets in self.offsets.items()},
            names=self.names[names:],
            splits=self.splits[names:],
            bad=self.bad[bad:],
        )
        self.noted = len(self.names), len(self.bad)

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
        splits = self.assigned()
        self.save("split.npy", npy(np.array([SPLITS.index(s) for s in splits], np.uint8)))
        self.save("names.json", json.dumps(self.names).encode())
        self.save("bad.csv", bad_csv(self.bad))
        counts = {s: splits.count(s) for s in SPLITS}
        kept = sorted(path for path in self.folder.iterdir() if path.name != JOURNAL)
        files = {path.name: described(path) for path in kept}
        digest = hashlib.sha256("".join(entry["sha256"] for entry in files.values()).encode()).hexdigest()
        card = Card(task, list(self.classes), dict(options), self.columns, counts, bucket_by, digest, self.counts)
        manifest = {"version": FORMAT, "card": card.to_dict(), "bad": len(self.bad), "files": files}
        manifest |= {**self.facts, **facts}
        self.save(MANIFEST, json.dumps(manifest, indent=1).encode())
        return card

    def assigned(self) -> list[str]:
        """The split of each sample so far."""
        return assigned(self.names, self.splits, self.val, self.test)

    def save(self, name: str, data: bytes) -> None:
        with disk.create(self.folder / name) as file:
            disk.write(file, data)

    def close(self) -> None:
        for file in [*self.files.values(), *([self.journal] if self.journal else [])]:
            file.close()


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
