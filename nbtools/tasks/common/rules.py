"""The rules that files of a source break, in one table, and how a source is validated."""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from nbtools import show
from nbtools.data import bar, read_entry, side_by_side, stage
from nbtools.errors import PackError

ERROR, WARNING = "error", "warning"  # what a pack leaves out, and what stays
SHOWN = 60  # broken rules, as pandas shows


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
    """The rules that a data set breaks, errors first, then by file; about: what was checked, `4 clips`."""

    def __init__(self, rows: Iterable[Row], about: str):
        self.rows = sorted(rows, key=lambda row: (row.severity != ERROR, row.file))
        self.about = about
        self.errors = sum(row.severity == ERROR for row in self.rows)

    @property
    def ok(self) -> bool:
        return not self.errors

    @property
    def frame(self) -> Any:
        """Return all rows as a pandas table."""
        import pandas as pd

        return pd.DataFrame(self.rows, columns=list(Row._fields))

    def table(self) -> tuple[list[str], list[list[Any]]]:
        return list(Row._fields), [list(row) for row in self.rows[:SHOWN]]

    def footer(self) -> str:
        counts = f"{show.plural(self.errors, ERROR)} and {show.plural(len(self.rows) - self.errors, WARNING)}"
        return f"{self.about}: {counts}" + (f", of which {SHOWN} are shown; .frame has all" * (len(self.rows) > SHOWN))


def check_each(look: Callable[[Any], Iterable[Any]], names: Collection[Any], progress: bool) -> list[Any]:
    """Return what `look` finds in each file, one list of all, by all cores; for a file that it refuses, the Row."""

    def check(name: Any) -> list[Any]:
        try:
            return [*look(name)]
        except PackError as refusal:
            if len(refusal.args) != 3:  # of all files
                raise
            return [Row(getattr(refusal, "file", "") or str(name), *refusal.args)]

    checks = bar(side_by_side(check, names), "validating", len(names), leave=False, disable=not progress)
    return [one for each in checks for one in each]


def check_source(source: str | Path, options: Any, survey: Any, read: Any, progress: bool) -> Report:
    """Return what a pack of a source would leave out: each sample is read as `build_pack` does, and none is written."""
    folder = stage(source, progress=progress)
    inventory = survey(folder, options)
    places = {entry.name: i for i, entry in enumerate(inventory.entries)}

    def look(name: str) -> Iterable[Row]:
        read_entry(read, folder, inventory, places[name])
        return ()

    rows = [*(Row(*row) for row in inventory.bad), *check_each(look, places, progress)]
    return Report(rows, f"{show.plural(len(places), 'sample')} with a text")
