"""What is wrong with a data set, as one table of severity, file, key, rule, value and fix. An error is what a pack
leaves out; a warning stays in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from nbtools import show
from nbtools.errors import PackError

ERROR, WARNING = "error", "warning"
COLUMNS = "severity", "file", "key", "rule", "value", "fix"
ALIKE = 3  # rows that differ in file and value only; more of them are shown as one


@dataclass(frozen=True)
class Row:
    """A broken rule. key: the part of a file, such as an array or a column of a CSV; value: the offending one; file:
    where."""

    key: str
    rule: str
    value: str
    fix: str
    severity: str = ERROR
    file: str = ""

    def at(self, file: str) -> Self:
        return replace(self, file=file)

    @property
    def reasons(self) -> tuple[str, str, str]:
        """Return (value, rule, fix) as a pack's table has them, where there is no column for the key."""
        return self.value, self.rule if self.key in self.rule else f"{self.key}: {self.rule}", self.fix


class Refused(PackError):
    """A sample cannot be used; the row says why. Its args are a row of a pack's table of bad samples."""

    def __init__(self, row: Row):
        super().__init__(*row.reasons)
        self.row = row

    def __str__(self) -> str:
        value, rule, fix = self.row.reasons
        return f"{self.row.file}: {rule}, got {value}; {fix}".removeprefix(": ")


@dataclass(frozen=True)
class Report(show.Table):
    """What is wrong with a data set; about: what was looked at, `4 clips`. Shows as a table in which many rows of a
    kind are one: `a.npz and 199 more`. A task's own report has more fields."""

    rows: tuple[Row, ...]
    about: str

    @property
    def errors(self) -> int:
        return sum(row.severity == ERROR for row in self.rows)

    @property
    def ok(self) -> bool:
        """Return whether there is no error: warnings leave every sample in the pack."""
        return self.errors == 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {**asdict(self), "errors": self.errors, "warnings": len(self.rows) - self.errors, "ok": self.ok}

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        kinds: dict[tuple[str, ...], list[Row]] = defaultdict(list)
        for row in self.rows:
            kinds[row.severity, row.key, row.rule, row.fix].append(row)
        shown = [row for rows in kinds.values() for row in (rows if len(rows) <= ALIKE else [merged(rows)])]
        return COLUMNS, [tuple(getattr(row, name) for name in COLUMNS) for row in shown]

    def footer(self) -> str:
        warnings = show.plural(len(self.rows) - self.errors, WARNING)
        return f"{self.about}: {show.plural(self.errors, ERROR)} and {warnings}"


def merged(rows: list[Row]) -> Row:
    value = rows[0].value if len({row.value for row in rows}) == 1 else f"{rows[0].value}, …"
    return replace(rows[0], value=value, file=f"{rows[0].file} and {len(rows) - 1:,} more")


def ordered(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return errors first, then by file."""
    return tuple(sorted(rows, key=lambda row: (row.severity != ERROR, row.file)))
