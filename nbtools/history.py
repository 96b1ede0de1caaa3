"""Record and History: what a run reports, as rows for a CSV file and a DataFrame. The store knows nothing of drawing."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtools import disk

if TYPE_CHECKING:
    import pandas as pd

KEYS = ("kind", "epoch", "step", "samples")  # the first columns of every row


@dataclass(frozen=True, slots=True)
class Record:
    """One event of the loop.

    kind: `step` (an optimizer step; values only on log steps), `evaluating` (one batch of it), `epoch` (a row of the
    epoch table), `change` (a knob was turned), `event` (out of memory, a bad step, a rollback).
    epoch counts from 0, step and samples from the start of the run.
    """

    kind: str
    epoch: int
    step: int
    samples: int
    values: dict[str, Any] = field(default_factory=dict)


class History:
    """The rows of one run, in memory and, given a path, in a CSV file that grows by a line a row.

    The header is rewritten when a new column first appears. Cells that a spreadsheet would run as a formula (text that
    begins with = + - @) are written with a leading apostrophe.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None):
        self.path = Path(path) if path is not None else None
        self.rows: list[dict[str, Any]] = []
        self.columns: list[str] = list(KEYS)
        if self.path is not None and self.path.exists():
            self.rows, self.columns = read(self.path)

    def append(self, record: Record) -> None:
        """Keep a record that carries values; bare steps are not rows."""
        if not record.values:
            return
        row = {
            "kind": record.kind,
            "epoch": record.epoch,
            "step": record.step,
            "samples": record.samples,
            **record.values,
        }
        self.rows.append(row)
        new = [name for name in row if name not in self.columns]
        self.columns += new
        if self.path is not None:
            if new or not self.path.exists():
                self.rewrite()
            else:
                with open(self.path, "a", newline="", encoding="utf-8") as file:
                    csv.writer(file).writerow([cell(row.get(name)) for name in self.columns])

    def cut(self, step: int) -> None:
        """Forget all beyond a step: a resumed run writes those rows again."""
        kept = [row for row in self.rows if row["step"] <= step]
        if len(kept) < len(self.rows):
            self.rows = kept
            if self.path is not None:
                self.rewrite()

    def rewrite(self) -> None:
        """The whole file anew, atomically: a reader never sees half of it."""
        if self.path is None:
            return
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(self.columns)
        writer.writerows([cell(row.get(name)) for name in self.columns] for row in self.rows)
        disk.write_atomic(self.path, text.getvalue())

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


def read(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows and columns of a history file; a last line cut short by a crash is left out."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        lines = list(csv.reader(file))
    columns = lines[0] if lines else list(KEYS)
    rows = []
    for line in lines[1:]:
        if len(line) == len(columns):
            rows.append({name: value(text) for name, text in zip(columns, line, strict=True) if text != ""})
    return rows, columns


def cell(item: Any) -> Any:
    if item is None:
        return ""
    if isinstance(item, float):
        return repr(item)  # every bit: two logs can be compared for equality
    return "'" + item if isinstance(item, str) and item.startswith(("=", "+", "-", "@")) else item


def value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text[1:] if text.startswith("'") else text
