"""Record and History: the rows of a run, in memory and as a CSV file."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtools import disk
from nbtools.show import plural

if TYPE_CHECKING:
    import pandas as pd

KEYS = ("kind", "epoch", "step", "samples")  # the first columns of every row


@dataclass(frozen=True, slots=True)
class Record:
    """One event of the loop.

    kind: `step` (an optimizer step; values only on log steps, where `loss` is the mean since the one before),
    `evaluating` (one batch of it), `epoch` (`train_loss` is the mean over its samples), `evaluation` (requested between
    steps), `change` (of a setting), `event` (out of memory, a bad step, a rollback). epoch counts from 0, step and
    samples from the start of the run.
    """

    kind: str
    epoch: int
    step: int
    samples: int
    values: dict[str, Any] = field(default_factory=dict)


class History:
    """The rows of a run as dicts and, given a path, as a CSV file that grows by a line a row. It is rewritten where a
    column is new, or a crash cut the last line; reading never writes. Text that a spreadsheet would run as a formula
    (= + - @), or that would be read back as a number, has a leading apostrophe in the file."""

    def __init__(self, path: str | os.PathLike[str] | None = None):
        self.path = Path(path) if path is not None else None
        self.rows: list[dict[str, Any]] = []
        self.columns: list[str] = list(KEYS)
        self.seen, self.whole = b"", False  # whole lines of the file; whether it ends with one
        self.refresh()

    def refresh(self) -> bool:
        """Read what another process has written to the file since; return whether there was anything."""
        if self.path is None or not self.path.exists():
            return False
        with disk.explained("reading the history", self.path):
            data = self.path.read_bytes()
        lines = data[: data.rfind(b"\n") + 1]  # before decoding: a crash may cut the last line within a character
        self.whole = 0 < len(lines) == len(data)
        if lines == self.seen:
            return False
        if not self.seen or not lines.startswith(self.seen):  # another file, such as one with a new column
            self.rows, self.columns, self.seen = [], [], b""
        for cells in csv.reader(io.StringIO(lines[len(self.seen) :].decode("utf-8-sig"), newline="")):
            if not self.columns:
                self.columns = cells
            elif len(cells) == len(self.columns):
                self.rows.append({name: value(text) for name, text in zip(self.columns, cells, strict=True) if text})
        self.seen = lines
        return True

    def append(self, record: Record) -> None:
        """Keep a record that carries values; bare steps are not rows. Raises DiskError."""
        if not record.values:
            return
        self.rows.append(row := {**{name: getattr(record, name) for name in KEYS}, **record.values})
        new = [name for name in row if name not in self.columns]
        self.columns += new
        if self.path is None or new or not self.whole or not self.path.exists():
            return self.rewrite()  # a row after half a line would be lost with it
        with disk.explained("writing the history", self.path), self.path.open("ab") as file:
            file.write(self.lines([row]).encode())

    def cut(self, count: int) -> None:
        """Keep the first rows only: a resumed run writes those beyond its checkpoint again."""
        if len(self.rows) > count:
            del self.rows[count:]
            self.rewrite()

    def rewrite(self) -> None:
        if self.path is not None:
            with disk.explained("writing the history", self.path):
                disk.write_atomic(self.path, self.lines([{name: name for name in self.columns}, *self.rows]))
            self.whole = True

    def sync(self) -> None:
        """Make the rows so far durable, before a checkpoint that counts on them."""
        if self.path is not None and self.path.exists():
            with disk.explained("writing the history", self.path), self.path.open("rb") as file:
                os.fsync(file.fileno())

    def lines(self, rows: Iterable[Mapping[str, Any]]) -> str:
        text = io.StringIO(newline="")
        csv.writer(text).writerows([cell(row.get(name)) for name in self.columns] for row in rows)
        return text.getvalue()

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the rows of a kind."""
        return [row for row in self.rows if row["kind"] == kind]

    def series(self, name: str, kind: str | None = None) -> tuple[list[int], list[float]]:
        """Return (steps, values) of one column, without the rows that lack it."""
        rows = [row for row in self.rows if kind in (None, row["kind"]) and isinstance(row.get(name), (int, float))]
        return [row["step"] for row in rows], [float(row[name]) for row in rows]

    def frame(self, kind: str | None = None) -> pd.DataFrame:
        """Return the rows as a DataFrame; of a kind: with only the columns that they use."""
        import pandas as pd

        return pd.DataFrame(self.rows if kind is None else self.of(kind))

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        upto = f" up to step {self.rows[-1]['step']:,}; frame() is a table of them" if self.rows else ""
        return f"History{f' {self.path}' if self.path else ''}: {plural(len(self), 'row')}{upto}"


def cell(item: Any) -> Any:
    """Return an item as a cell of one line, which `value` reads back. str(float) has every bit of it."""
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
