"""Record and History: what a run reports, as rows for a CSV file and a DataFrame. Drawing is elsewhere."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtools import disk, show

if TYPE_CHECKING:
    import pandas as pd

KEYS = ("kind", "epoch", "step", "samples")  # the first columns of every row
LAST = 10  # rows that a notebook shows


@dataclass(frozen=True, slots=True)
class Record:
    """One event of the loop.

    kind: `step` (an optimizer step; values only on log steps), `evaluating` (one batch of it), `epoch` (a row of the
    epoch table), `evaluation` (requested between steps), `change` (of a setting), `event` (out of memory, a bad
    step, a rollback, the answer to what was `asked`).
    Among the values, `loss` of a log step is the mean since the log step before it; `train_loss` of an epoch the mean
    over all of its samples, which is what the train loss is wherever a run is shown.
    epoch counts from 0, step and samples from the start of the run.
    """

    kind: str
    epoch: int
    step: int
    samples: int
    values: dict[str, Any] = field(default_factory=dict)


class History:
    """The rows of one run, in memory and, given a path, in a CSV file that grows by one line per row.

    The file is rewritten when a new column first appears, or its last line was cut short by a crash: reading alone
    never writes. Text that a spreadsheet would run as a formula (= + - @), or that would be read back as a number, is
    written with a leading apostrophe.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None):
        self.path = Path(path) if path is not None else None
        self.rows: list[dict[str, Any]] = []
        self.columns: list[str] = list(KEYS)
        self.whole = True
        self.place = (0, b"", 0)  # inode of the file, its header, and its bytes that were read
        self.refresh()

    def refresh(self) -> bool:
        """Read what another process has since written to the file; returns whether there was anything."""
        if self.path is None:
            return False
        with disk.explained("reading the history", self.path):
            try:
                file = self.path.open("rb")
            except FileNotFoundError:
                return False
        with file:
            now, header, (inode, known, end) = os.fstat(file.fileno()), file.readline(), self.place
            same = (now.st_ino, header) == (inode, known) and now.st_size >= end  # a number is given again when free
            file.seek(end if same else 0)
            data = file.read()
        fresh = data[: data.rfind(b"\n") + 1]  # before decoding: a crash may cut the last line within a character
        lines = list(csv.reader(io.StringIO(fresh.decode("utf-8-sig"), newline="")))
        if not same:
            columns: list[str] = lines.pop(0) if lines else list(KEYS)
            self.rows, self.columns, self.whole = [], columns, bool(fresh)
        self.whole = self.whole and len(fresh) == len(data)
        self.rows += [
            {name: value(text) for name, text in zip(self.columns, line, strict=True) if text != ""}
            for line in lines
            if len(line) == len(self.columns)
        ]
        self.place = (now.st_ino, header, (end if same else 0) + len(fresh))
        return bool(fresh) or not same

    def append(self, record: Record) -> None:
        """Keep a record that carries values; bare steps are not rows. Raises DiskError."""
        if not record.values:
            return
        row = {**{name: getattr(record, name) for name in KEYS}, **record.values}
        self.rows.append(row)
        new = [name for name in row if name not in self.columns]
        self.columns += new
        if self.path is None:
            return
        with disk.explained("writing the history", self.path):
            if new or not self.whole or not self.path.exists():
                self.rewrite()  # a row after half a line would be lost with it
            else:
                with disk.append(self.path) as file:
                    disk.write(file, self.lines([row]).encode())

    def cut(self, count: int) -> None:
        """Keep the first rows only: a resumed run writes those beyond its checkpoint again."""
        if len(self.rows) > count:
            del self.rows[count:]
            self.rewrite()

    def rewrite(self) -> None:
        """The whole file anew, atomically: a reader never sees half of it."""
        if self.path is not None:
            header = {name: name for name in self.columns}
            with disk.explained("writing the history", self.path):
                disk.write_atomic(self.path, self.lines([header, *self.rows]))
            self.whole = True

    def sync(self) -> None:
        """Make the rows so far durable, before a checkpoint that counts on them."""
        if self.path is not None and self.path.exists():
            with disk.explained("writing the history", self.path), open(self.path, "rb") as file:
                disk.sync(file)

    def lines(self, rows: Iterable[Mapping[str, Any]]) -> str:
        text = io.StringIO(newline="")
        csv.writer(text).writerows([cell(row.get(name)) for name in self.columns] for row in rows)
        return text.getvalue()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind]

    def series(self, name: str, kind: str | None = None) -> tuple[list[int], list[float]]:
        """(steps, values) of one column, rows without it left out."""
        rows = [r for r in self.rows if (kind is None or r["kind"] == kind) and isinstance(r.get(name), (int, float))]
        return [r["step"] for r in rows], [float(r[name]) for r in rows]

    def frame(self, kind: str | None = None) -> pd.DataFrame:
        """The rows as a DataFrame; with a kind, only its rows and only the columns they use."""
        import pandas as pd

        rows = self.rows if kind is None else self.of(kind)
        return pd.DataFrame(rows, columns=[c for c in self.columns if kind is None or any(c in r for r in rows)])

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        kinds = Counter(row["kind"] for row in self.rows)
        counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        upto = f" up to step {self.rows[-1]['step']:,}: {counts}" if self.rows else ""
        return f"History{f' {self.path}' if self.path else ''}: {show.plural(len(self), 'row')}{upto}"

    def _repr_html_(self) -> str:
        rows = [[row.get(name) for name in self.columns] for row in self.rows[-LAST:]]
        caption = f"{self!r}{f'; the last {LAST}, frame() has all' if len(self) > LAST else ''}"
        return show.html(self.columns, rows, caption)


def cell(item: Any) -> Any:
    """The text in the file: one line, which `value` reads back."""
    if isinstance(item, float):
        return float.__repr__(item)  # every bit: two logs can be compared for equality
    if not isinstance(item, str):
        return item
    item = " ".join(item.splitlines())
    return "'" + item if item.startswith(("=", "+", "-", "@", "'")) or value(item) != item else item


def value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text[1:] if text.startswith("'") else text
