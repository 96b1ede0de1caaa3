"""What is wrong with a data set, as one table of rules: an error is what a pack leaves out, a warning stays in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from nbtools import show
from nbtools.errors import PackError

if TYPE_CHECKING:
    import pandas as pd

ERROR, WARNING = "error", "warning"
SHOWN = 60  # rows, as pandas shows


@dataclass(frozen=True)
class Row:
    """A broken rule. key: the part of a file, such as an array or a column of a CSV; value: what came; file: where."""

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
        """Return (value, rule, fix) as in `pack.bad`, which has no column for the key."""
        return self.value, self.rule if self.key in self.rule else f"{self.key}: {self.rule}", self.fix


class Refused(PackError):
    """A sample cannot be used; its args are the reasons of its row."""

    def __init__(self, row: Row):
        super().__init__(*row.reasons)
        self.row = row

    def __str__(self) -> str:
        value, rule, fix = self.args
        return f"{self.row.file}: {rule}, got {value}; {fix}".removeprefix(": ")


@dataclass(frozen=True)
class Report(show.Table):
    """The broken rules of a data set; about: what was checked, `4 clips`. A task's own report may have more fields."""

    rows: tuple[Row, ...]
    about: str

    @property
    def errors(self) -> int:
        return sum(row.severity == ERROR for row in self.rows)

    @property
    def ok(self) -> bool:
        return not self.errors

    @property
    def frame(self) -> pd.DataFrame:
        """Return all rows as a pandas table."""
        import pandas as pd

        return pd.DataFrame(list(self.rows), columns=["severity", "file", "key", "rule", "value", "fix"])

    def table(self) -> tuple[list[str], list[list[Any]]]:
        return list(self.frame), self.frame.head(SHOWN).to_numpy().tolist()

    def footer(self) -> str:
        counts = f"{show.plural(self.errors, ERROR)} and {show.plural(len(self.rows) - self.errors, WARNING)}"
        return f"{self.about}: {counts}" + (f", of which {SHOWN} are shown; all: .frame" * (len(self.rows) > SHOWN))


def ordered(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return errors first, then by file."""
    return tuple(sorted(rows, key=lambda row: (row.severity != ERROR, row.file)))
