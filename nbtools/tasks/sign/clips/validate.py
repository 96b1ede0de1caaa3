"""The validator: every rule that a folder of clips breaks, as one table of severity, file, key, rule, value and fix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nbtools.data import WARNING, Row, bar, ordered, report, stage
from nbtools.table import plural
from nbtools.tasks.sign.clips.clip import Keys, examined
from nbtools.tasks.sign.clips.data import decided
from nbtools.tasks.sign.clips.files import Found, surveyed


@dataclass(frozen=True)
class Report(report.Report):
    """What was found in so many clips."""

    clips: int
    labelled: int


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
        found = bar(pool.map(look, survey.clips), "validating", len(survey.clips), leave=False, disable=not progress)
        seen = list(found)
    rows = [*survey.rows, *(row for _, broken in seen for row in broken)]
    rows += repeated(zip(survey.clips, (digest for digest, _ in seen), strict=True))
    about = f"{plural(len(survey.clips), 'clip')}, {len(survey.labelled):,} with a label"
    return Report(ordered(rows), about, len(survey.clips), len(survey.labelled))


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
