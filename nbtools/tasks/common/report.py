"""What is wrong with a data set, as one table of broken rules: an error is what a pack leaves out, a warning stays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from nbtools import show
from nbtools.errors import PackError

if TYPE_CHECKING:
    import pandas as pd

ERROR, WARNING = "error", "warning"
SHOWN = 60  # rows, as pandas shows


class Row(NamedTuple):
    """A broken rule: where, what came, the rule, what to do; the first four are a row of `pack.bad`."""

    file: str
    value: str
    rule: str
    fix: str
    severity: str = ERROR


class Refused(PackError):
    """A sample cannot be used: (what came, the rule, what to do). file: where, if not in the sample's own file."""

    def __init__(self, value: object, rule: str, fix: str, file: str = ""):
        super().__init__(str(value), rule, fix)
        self.file = file

    def row(self, file: str) -> Row:
        return Row(self.file or file, *self.args)

    def __str__(self) -> str:
        value, rule, fix = self.args
        return f"{self.file}: {rule}, got {value}; {fix}".removeprefix(": ")


class Report(show.Table):
    """The broken rules of a data set, errors first, then by file; about: what was checked, `4 clips`."""

    def __init__(self, rows: Iterable[Row], about: str):
        self.rows = sorted(rows, key=lambda row: (row.severity != ERROR, row.file))
        self.about = about
        self.errors = sum(row.severity == ERROR for row in self.rows)

    @property
    def ok(self) -> bool:
        return not self.errors

    @property
    def frame(self) -> pd.DataFrame:
        """Return all rows as a pandas table."""
        import pandas as pd

        return pd.DataFrame(self.rows, columns=list(Row._fields))

    def table(self) -> tuple[list[str], list[list[Any]]]:
        return list(Row._fields), [list(row) for row in self.rows[:SHOWN]]

    def footer(self) -> str:
        counts = f"{show.plural(self.errors, ERROR)} and {show.plural(len(self.rows) - self.errors, WARNING)}"
        return f"{self.about}: {counts}" + (f", of which {SHOWN} are shown; all: .frame" * (len(self.rows) > SHOWN))
