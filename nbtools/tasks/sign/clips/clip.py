"""One clip's file: which of its arrays are read, whether they keep the rules, and what of them a pack takes.

A pack's columns: x (T, 156) float32, mask (T, 78) bool, features (T, 2048) float32. Where a clip has no mask, it has
seen every point that is not 0 (a hand or a face that was not found is all 0).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nbtools.data import ERROR, WARNING, Refused, Row
from nbtools.errors import PackError
from nbtools.tasks.sign.clips import rules
from nbtools.tasks.sign.clips.npz import Npz, opened
from nbtools.tasks.sign.clips.rules import FEATURES, POINTS, WIDTH

MASK, TIMES, META = "mask", "timestamps_ms", "meta"
TEXT = 1_000_000  # bytes of meta at most
UNREAD = {  # what to do where it is missing
    MASK: "nothing: points that are not 0 count as seen",
    TIMES: "nothing: no model reads it",
    META: "nothing: no model reads it",
}


@dataclass(frozen=True)
class Keys:
    """Under which names a clip has keypoints and features; None: they are not wanted. needed: whether every clip must
    have the features, or a pack of these clips takes them anyway; else what is wrong with them is only a warning.

    Raises PackError for names that cannot be.
    """

    x: str | None = "X"
    features: str | None = "X2048"
    needed: bool = False

    def __post_init__(self) -> None:
        if self.x is None and self.features is None:
            raise PackError("kp_key and feature_key are both None, so nothing would be read; name one of them")
        if self.needed and self.features is None:
            raise PackError("require_x2048 needs feature_key, got None; name it, as X2048")
        for name, key in (("kp_key", self.x), ("feature_key", self.features)):
            if key in (MASK, TIMES, META, "") or not isinstance(key, str | None):
                raise PackError(f"{name} must be the name of an array of numbers, got {key!r}; as X or X2048")
        if self.x == self.features:
            raise PackError(
                f"kp_key and feature_key must differ, got {self.x!r} twice; kp_key=None reads the features alone"
            )
        if self.x is None:
            object.__setattr__(self, "needed", True)

    def taking(self, features: bool) -> Keys:
        """The same keys for clips that all have the features, or not."""
        return dataclasses.replace(self, needed=self.needed or features)


@dataclass(frozen=True)
class Part:
    """One array and its rules. severity: of a broken one; absent: of one that is not there."""

    key: str
    width: int
    kinds: str
    rule: Callable[[str, np.ndarray], Iterable[Row]]
    severity: str = ERROR
    absent: str = WARNING


@dataclass(frozen=True)
class Clip:
    """arrays: column → values, without those that break a rule; digest: of what it shows, '' where that is unknown."""

    arrays: dict[str, np.ndarray]
    rows: tuple[Row, ...]
    digest: str = ""

    @property
    def errors(self) -> list[Row]:
        return [row for row in self.rows if row.severity == ERROR]


def parts(keys: Keys, whole: bool) -> Iterator[tuple[str, Part]]:
    """(column, part) of all that is looked at: what is read and what tells of its frames; all of it where `whole`."""
    if keys.x is not None:
        yield "x", Part(keys.x, WIDTH, "f", rules.points, absent=ERROR)
        yield MASK, Part(MASK, POINTS, "biu", rules.mask)
    if keys.features is not None and (keys.needed or whole):
        severity = ERROR if keys.needed else WARNING
        yield "features", Part(keys.features, FEATURES, "f", rules.floats, severity, severity)
    yield TIMES, Part(TIMES, 0, "iuf", rules.times)


def examined(path: Path, keys: Keys, whole: bool = True) -> Clip:
    """A clip's arrays and every rule that it breaks; whole=False looks at what a pack reads, and no further.

    Raises OSError where there is no such file.
    """
    arrays, rows = {}, []
    try:
        with opened(path) as npz:
            for column, part in parts(keys, whole):
                values, broken = examined_part(npz, part)
                rows += broken
                if values is not None:
                    arrays[column] = values
            if whole:
                rows += examined_meta(npz)
    except Refused as refusal:
        rows.append(refusal.row)
    rows += unequal(arrays, dict(parts(keys, whole)))
    shows = arrays.get("features" if keys.x is None else "x")
    return Clip(arrays, tuple(rows), "" if shows is None or not whole else digest_of(shows))


def digest_of(values: np.ndarray) -> str:
    return hashlib.blake2b(values.tobytes(), digest_size=16).hexdigest()


def examined_part(npz: Npz, part: Part) -> tuple[np.ndarray | None, list[Row]]:
    """(values, or None where a rule makes them useless; the rules that they break, up to the first error)."""
    if part.key not in npz.entries:
        option = "kp_key" if part.width == WIDTH else "feature_key"
        fix = f"name it by {option}= if it is one of these, or extract it"
        if part.absent == WARNING:
            fix = UNREAD.get(part.key, "nothing, unless a model is to read it: then extract it")
        return None, [absent(npz, part.key, fix, part.absent)]
    rows: list[Row] = []
    values = None
    try:
        values = npz.array(part.key)
        for row in broken(part, values):
            rows.append(row)
            if row.severity == ERROR:
                values = None
                break
    except Refused as refusal:
        rows = [refusal.row]
    return values, rows if part.severity == ERROR else [row.warned() for row in rows]


def broken(part: Part, values: np.ndarray) -> Iterator[Row]:
    yield from rules.form(part.key, values.shape, values.dtype, part.width, part.kinds)
    yield from part.rule(part.key, values)


def absent(npz: Npz, key: str, fix: str, severity: str) -> Row:
    return Row(key, f"a clip has {key}", ", ".join(npz.keys[:8]), fix, severity)


def examined_meta(npz: Npz) -> list[Row]:
    if META not in npz.entries:
        return [absent(npz, META, UNREAD[META], WARNING)]
    try:
        return list(rules.meta(META, npz.array(META, TEXT)))
    except Refused as refusal:
        return [refusal.row.warned()]


def unequal(arrays: dict[str, np.ndarray], looked_at: dict[str, Part]) -> Iterator[Row]:
    """Every array has as many frames as the first, which has some."""
    if not arrays:
        return
    head, *others = arrays
    count = len(arrays[head])
    if count == 0:
        part, fix = looked_at[head], "extract the clip again, or delete it"
        yield Row(part.key, "a clip has frames", "none", fix, part.severity)
        return
    for column in others:
        part = looked_at[column]
        if len(arrays[column]) != count:
            rule = f"all arrays have as many frames as {looked_at[head].key}, {count}"
            yield Row(part.key, rule, str(len(arrays[column])), "extract the clip again", part.severity)


def sample(clip: Clip, keys: Keys) -> dict[str, np.ndarray]:
    """A clip's columns as a pack holds them. Raises Refused with the first error."""
    if clip.errors:
        raise Refused(clip.errors[0])
    found = {}
    if keys.x is not None:
        x = rules.single(clip.arrays["x"])
        seen = clip.arrays.get(MASK)
        found["x"] = x
        found[MASK] = x.reshape(-1, POINTS, 2).any(2) if seen is None else seen.astype(bool)
    if keys.needed:
        found["features"] = rules.single(clip.arrays["features"])
    return found


def has_features(path: Path, key: str) -> bool | None:
    """Whether a clip has features of the right form, by their header alone; None where it cannot be opened."""
    try:
        with opened(path) as npz:
            if key not in npz.entries:
                return False
            shape, dtype = npz.header(key)
            return not list(rules.form(key, shape, dtype, FEATURES, "f"))
    except Refused as refusal:
        return None if refusal.row.key == "" else False
    except OSError:
        return None
