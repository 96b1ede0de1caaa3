"""The arrays of a new pack, appended sample by sample, so that memory does not grow with the data.

Now and then a journal notes how far that is, once the bytes are on the disk. A process that is killed leaves it: the
next one cuts the files to what it says, and continues.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

import numpy as np

from nbtools import disk
from nbtools.data.pack import Column, Sample, columns_of
from nbtools.data.progress import bar
from nbtools.errors import PackError

JOURNAL = "journal.json"
NOTED = 1.0  # seconds between two notes, or a twentieth of the time so far: a note grows with the samples
KEPT = ("done", "kept", "bad", "classes", "ends")
Problem = tuple[str, ...]  # a row of the table of bad samples: file, value, rule, fix


class Writer:
    """Appends samples to the files of a folder, from where an earlier one with the same mark ended.

    named: the column that is a text, the name of a class; ragged: columns whose samples differ in length.
    """

    def __init__(self, folder: Path, mark: list[Any], named: str | None, ragged: Collection[str]):
        self.folder, self.mark, self.named, self.ragged = folder, mark, named, ragged
        self.done = 0  # entries read
        self.kept: list[int] = []  # those that became samples
        self.bad: list[Problem] = []
        self.classes: list[str] = []  # of each sample
        self.columns: dict[str, Column] = {}
        self.ends: dict[str, list[int]] = {}  # ragged column → where each sample begins, and the end
        self.files: dict[str, BinaryIO] = {}
        path = folder / JOURNAL
        noted: dict[str, Any] = disk.from_json(path.read_bytes()) if path.exists() else {"mark": None}
        if noted.pop("mark") != mark:
            disk.remove(folder)
            folder.mkdir(parents=True)
            return
        sizes = noted.pop("sizes")
        for other in folder.iterdir():  # of a process that was killed as it began or finished
            if other.name != JOURNAL and other.stem not in sizes:
                disk.remove(other)
        for name, size in sizes.items():
            self.files[name] = open(folder / f"{name}.npy", "r+b", 1 << 20)  # noqa: SIM115
            self.files[name].truncate(size)
            self.files[name].seek(size)
        vars(self).update(noted, columns=columns_of(noted["columns"]))

    def write(self, names: Sequence[str], samples: Iterable[Sample | Problem], progress: bool) -> None:
        """Append what became of the entries of these names after those that are done, in order."""
        start = last = monotonic()
        look = {"unit": " samples", "disable": not progress, "leave": False}
        with bar(desc="packing", total=len(names), initial=self.done, **look) as shown:
            for sample in samples:
                if isinstance(sample, tuple):
                    self.bad.append(sample)
                else:
                    self.add(names[self.done], sample)
                self.done += 1
                shown.update()
                if monotonic() - last > max(NOTED, (last - start) / 20):
                    self.note()
                    last = monotonic()

    def add(self, name: str, sample: Sample) -> None:
        """Append a sample. Raises PackError unless names, dtypes and shapes of the arrays are the first sample's, but
        for the length of a ragged one."""
        arrays = {column: np.asarray(array, order="C") for column, array in sample.items() if column != self.named}
        columns = {column: column_of(column, array, column in self.ragged) for column, array in arrays.items()}
        if not self.kept:
            self.begin(columns)
        if columns != self.columns:
            came, first = (", ".join(f"{name} {c}" for name, c in one.items()) for one in (columns, self.columns))
            raise PackError(f"{name}: its columns are {came}; the first sample's are {first}")
        for column, array in arrays.items():
            self.files[column].write(array.data)
            if column in self.ends:
                self.ends[column].append(self.ends[column][-1] + len(array))
        if self.named is not None:
            self.classes.append(sys.intern(str(sample[self.named])))
        self.kept.append(self.done)

    def begin(self, columns: dict[str, Column]) -> None:
        """Create the arrays, without any row. Raises PackError for a column whose name the pack or a batch needs."""
        self.columns = columns
        self.ends = {name: [0] for name, column in columns.items() if column.kind == "ragged"}
        own = {"split", "id", *(f"{name}{end}" for name in self.ends for end in (".offsets", "_length"))}
        if taken := sorted(own & columns.keys()):
            raise PackError(f"column {taken[0]!r}: nbtools reserves {', '.join(sorted(own))}; rename it in `read`")
        for name, column in columns.items():
            self.files[name] = open(self.folder / f"{name}.npy", "xb", 1 << 20)  # noqa: SIM115
            self.files[name].write(header(column, 0))

    def note(self) -> None:
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        state = {"mark": self.mark, **{name: getattr(self, name) for name in KEPT}}
        state["columns"] = {name: vars(column) for name, column in self.columns.items()}
        state["sizes"] = {name: file.tell() for name, file in self.files.items()}
        disk.write_atomic(self.folder / JOURNAL, json.dumps(state))

    def finish(self) -> None:
        """Write the numbers of rows, and offsets."""
        for name, column in self.columns.items():
            ends = self.ends.get(name, [len(self.kept)])
            self.files[name].seek(0)
            self.files[name].write(header(column, ends[-1]))
            if name in self.ends:
                np.save(self.folder / f"{name}.offsets.npy", np.array(ends, np.int64))
        self.close()

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def column_of(name: str, array: np.ndarray, ragged: bool) -> Column:
    if array.dtype.kind not in "biuf":
        raise PackError(f"{name}: a pack can hold numbers and booleans only, got {array.dtype}; store class indices")
    return Column("ragged" if ragged else "fixed", array.dtype.str, array.shape[1:] if ragged else array.shape)


def header(column: Column, rows: int) -> bytes:
    """Return the .npy header of a column: always of one length, since NumPy leaves room for the rows to grow."""
    text = io.BytesIO()
    described = {"descr": column.dtype, "fortran_order": False, "shape": (rows, *column.shape)}
    np.lib.format.write_array_header_1_0(text, described)
    return text.getvalue()
