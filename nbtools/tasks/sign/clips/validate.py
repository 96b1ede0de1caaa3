"""The validator: every rule that a folder of clips breaks, as one table of severity, file, key, rule, value and fix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from nbtools import table
from nbtools.stage import stage
from nbtools.tasks.sign.clips.clip import Keys, examined
from nbtools.tasks.sign.clips.data import decided
from nbtools.tasks.sign.clips.files import Found, surveyed
from nbtools.tasks.sign.clips.rules import ERROR, WARNING, Row

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("severity", "file", "key", "rule", "value", "fix")
ALIKE = 3  # rows that differ in file and value only; more of them are shown as one


@dataclass(frozen=True)
class Report:
    """What was found in so many clips; errors first. Shows as a table in which many rows of a kind are one."""

    clips: int
    labelled: int
    rows: tuple[Row, ...]

    @property
    def errors(self) -> int:
        return sum(row.severity == ERROR for row in self.rows)

    @property
    def warnings(self) -> int:
        return len(self.rows) - self.errors

    @property
    def ok(self) -> bool:
        """Whether there is no error: warnings leave every clip in the pack."""
        return self.errors == 0

    @property
    def table(self) -> pd.DataFrame:
        """Every row: severity, file, key, rule, value, fix."""
        import pandas as pd

        return pd.DataFrame([[getattr(row, name) for name in COLUMNS] for row in self.rows], columns=list(COLUMNS))

    @property
    def summary(self) -> str:
        counts = f"{counted(self.errors, ERROR)} and {counted(self.warnings, WARNING)}"
        return f"{counted(self.clips, 'clip')}, {self.labelled:,} with a label: {counts}"

    def shown(self) -> list[list[str | None]]:
        return [[getattr(row, name) or None for name in COLUMNS] for row in gathered(self.rows)]

    def __str__(self) -> str:
        return f"{table.text(COLUMNS, self.shown())}\n\n{self.summary}" if self.rows else self.summary

    def _repr_html_(self) -> str:
        return table.html(COLUMNS if self.rows else (), self.shown(), caption=self.summary)


def validate(
    source: str | Path,
    *,
    kp_key: str | None = "X",
    feature_key: str | None = "X2048",
    require_x2048: bool = False,
    progress: bool = True,
) -> Report:
    """Look at every clip and every label of a folder, archive or link, with or without labels.

    kp_key, feature_key and require_x2048 as for `pack`: an error is what a pack with the same options leaves out.
    Raises PackError where there is no clip, and for keys that cannot be.
    """
    keys = Keys(kp_key, feature_key, require_x2048)
    folder = stage(source, progress=progress)
    survey = surveyed(folder)
    look = partial(looked, folder, decided(keys, folder, survey))
    with ThreadPoolExecutor() as pool:
        found = tqdm(pool.map(look, survey.clips), "validating", len(survey.clips), leave=False, disable=not progress)
        seen = list(found)
    rows = [*survey.rows, *(row for _, broken in seen for row in broken)]
    rows += repeated(zip(survey.clips, (digest for digest, _ in seen), strict=True))
    ordered = sorted(rows, key=lambda row: (row.severity != ERROR, row.file))
    return Report(len(survey.clips), len(survey.labelled), tuple(ordered))


def looked(folder: Path, keys: Keys, clip: Found) -> tuple[str, list[Row]]:
    """(digest of what a clip shows, its rows); the arrays are let go at once."""
    try:
        found = examined(folder / clip.name, keys)
    except OSError as error:
        fix = "copy the file again, or change its permissions"
        return "", [Row("", "the file can be read", error.strerror or str(error), fix, file=clip.name)]
    return found.digest, [row.at(clip.name) for row in found.rows]


def repeated(clips: Iterable[tuple[Found, str]]) -> Iterator[Row]:
    """Clips that show the same as one before, frame by frame."""
    first: dict[str, Found] = {}
    for clip, digest in clips:
        other = first.setdefault(digest, clip) if digest else clip
        if other is not clip:
            twice = "both are trained and judged on" if other.split != clip.split else "it counts twice"
            rule, fix = f"a clip is there once; {twice} otherwise", "delete one of them"
            yield Row("", rule, f"the same as {other.name}", fix, WARNING, clip.name)


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


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
            yield replace(kind[0], value=value if alike else f"{value}, …", file=file)
