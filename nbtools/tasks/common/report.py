"""What is wrong with a data set, as one table of severity, file, key, rule, value and fix. An error is what a pack
leaves out; a warning stays in."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from nbtools import show
from nbtools.errors import PackError

if TYPE_CHECKING:
    import pandas as pd

ERROR, WARNING = "error", "warning"
COLUMNS = ("severity", "file", "key", "rule", "value", "fix")
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
        return dataclasses.replace(self, file=file)

    def warned(self) -> Self:
        return dataclasses.replace(self, severity=WARNING)

    @property
    def reasons(self) -> tuple[str, str, str]:
        """(value, rule, fix) as a pack's table has them, where there is no column for the key."""
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
class Report:
    """What was found in a data set; about: what was looked at, `4 clips`. Shows as a table in which many rows of a kind
    are one. A task's own report has more fields."""

    rows: tuple[Row, ...]
    about: str

    @property
    def errors(self) -> int:
        return sum(row.severity == ERROR for row in self.rows)

    @property
    def warnings(self) -> int:
        return len(self.rows) - self.errors

    @property
    def ok(self) -> bool:
        """Whether there is no error: warnings leave every sample in the pack."""
        return self.errors == 0

    @property
    def table(self) -> pd.DataFrame:
        """Every row: severity, file, key, rule, value, fix."""
        import pandas as pd

        return pd.DataFrame(listed(self.rows), columns=list(COLUMNS))

    @property
    def summary(self) -> str:
        return f"{self.about}: {show.plural(self.errors, ERROR)} and {show.plural(self.warnings, WARNING)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**dataclasses.asdict(self), "errors": self.errors, "warnings": self.warnings, "ok": self.ok}

    def __str__(self) -> str:
        return f"{show.text(COLUMNS, listed(gathered(self.rows)))}\n\n{self.summary}" if self.rows else self.summary

    def _repr_html_(self) -> str:
        return show.html(COLUMNS, listed(gathered(self.rows)), self.summary)


def listed(rows: Iterable[Row]) -> list[list[str]]:
    return [[getattr(row, name) for name in COLUMNS] for row in rows]


def ordered(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Errors first, then by file."""
    return tuple(sorted(rows, key=lambda row: (row.severity != ERROR, row.file)))


def gathered(rows: Sequence[Row]) -> Iterator[Row]:
    """Rows with many of a kind made one: `a.npz and 199 more`."""
    kinds: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        kinds[row.severity, row.key, row.rule, row.fix].append(row)
    for kind in kinds.values():
        if len(kind) <= ALIKE:
            yield from kind
        else:
            alike = len({row.value for row in kind}) == 1
            value, file = kind[0].value, f"{kind[0].file} and {len(kind) - 1:,} more"
            yield dataclasses.replace(kind[0], value=value if alike else f"{value}, …", file=file)
