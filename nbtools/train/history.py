"""Record and History: the rows of a run, in memory and as a CSV file that grows by one line per row."""

import csv
import io
from contextlib import suppress
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
    """One event of the loop. epoch counts from 0, step and samples from the start of the run.

    kind: `step` (of the optimizer; with values, such as the mean loss since the last such row, on log steps only),
    `evaluating` (a batch), `epoch`, `evaluation` (one that was requested between steps), `change` (of settings),
    `event` (out of memory, a skipped step, a return to a checkpoint).
    """

    kind: str
    epoch: int
    step: int
    samples: int
    values: dict[str, Any] = field(default_factory=dict)


class History:
    """The rows of a run as dicts and, given a path, in a CSV file, which only `append` and `cut` write."""

    def __init__(self, path: str | Path | None = None):
        self.path = Path(path) if path is not None else None
        self.rows: list[dict[str, Any]] = []
        self.columns: list[str] = list(KEYS)
        self.text, self.whole = b"", False  # of the file as read; whether it has no half line, which a crash leaves
        self.refresh()

    def refresh(self) -> bool:
        """Read the file again; return whether another process has written to it since."""
        if self.path is None or not self.path.exists():
            return False
        with disk.explained("reading the history", self.path):
            text = self.path.read_bytes()
        text = text[: text.rfind(b"\n") + 1]  # before decoding: a crash may cut the last line within a character
        if text in (b"", self.text):
            return False
        self.columns, *rows = csv.reader(io.StringIO(text.decode("utf-8-sig"), newline=""))
        self.rows = [{n: value(cell) for n, cell in zip(self.columns, row, strict=False) if cell} for row in rows]
        self.text = text
        return True

    def append(self, record: Record) -> None:
        """Keep a record that carries values; bare steps are not rows. Raises DiskError."""
        if not record.values:
            return
        row = {**{name: getattr(record, name) for name in KEYS}, **record.values}
        self.rows.append(row)
        if self.path is not None and self.whole and row.keys() <= {*self.columns}:
            with disk.explained("writing the history", self.path), self.path.open("ab") as file:
                file.write(self.lines([row]))
        else:
            self.columns += [name for name in row if name not in self.columns]
            self.write()

    def cut(self, count: int) -> None:
        """Keep the first rows only: a resumed run writes those beyond its checkpoint again."""
        if len(self.rows) > count:
            del self.rows[count:]
            self.write()

    def write(self) -> None:
        if self.path is not None:
            with disk.explained("writing the history", self.path):
                disk.write_atomic(self.path, self.lines([{name: name for name in self.columns}, *self.rows]))
            self.whole = True

    def lines(self, rows: list[dict[str, Any]]) -> bytes:
        text = io.StringIO(newline="")
        csv.writer(text).writerows([cell(row.get(name)) for name in self.columns] for row in rows)
        return text.getvalue().encode()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind]

    def frame(self, kind: str | None = None) -> "pd.DataFrame":
        """Return the rows as a DataFrame; of a kind: with only the columns that they use."""
        import pandas as pd  # takes its time

        return pd.DataFrame(self.rows if kind is None else self.of(kind))

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"History: {plural(len(self), 'row')}; frame() is a table of them"


def cell(item: Any) -> Any:
    """Return an item as a cell of one line that `value` reads back. Text that a spreadsheet would run as a formula, or
    that would be read as a number, gets an apostrophe; str(float) has every bit."""
    if isinstance(item, str):
        item = " ".join(item.splitlines())
        return f"'{item}" if item[:1] in tuple("=+-@'") or value(item) != item else item
    return item


def value(text: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text.removeprefix("'")
