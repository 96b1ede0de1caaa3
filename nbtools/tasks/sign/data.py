"""Raw clips → pack: x (T, 156) float32 and mask (T, 78) bool, features (T, 2048) float32 where the clips have them, all
ragged, and label (2,) int64 = (gloss, category). `classes` are the glosses.

Clips are decompressed once: reading a `.npz` at each access takes most of a small network's step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nbtools.data import Entry, Pack, Sample, Survey, bar, build_pack, stage
from nbtools.errors import PackError
from nbtools.table import plural
from nbtools.tasks.common import report
from nbtools.tasks.common.files import in_threads, split_of
from nbtools.tasks.common.report import ERROR, WARNING, Refused, Row, ordered
from nbtools.tasks.sign.clips import Keys, examine, has_array
from nbtools.tasks.sign.labels import LABELS, labels_of


def pack(
    source: str | Path,
    *,
    kp_key: str | None = "X",
    feature_key: str | None = "X2048",
    require_x2048: bool = False,
    val: float = 0.1,
    test: float = 0.1,
    into: str | Path | None = None,
    progress: bool = True,
) -> Pack:
    """The pack of labelled clips from a folder, archive or link; opened if it is finished.

    kp_key: the array of keypoints; None reads none. feature_key: that of features, packed where every clip has them;
    None leaves them out, which makes a pack for the Transformer alone 13 times as small. require_x2048: leave out clips
    without features, instead of the features.
    val, test: shares, or whole numbers for exactly that many; train, val and test folders of the source take
    precedence. Raises PackError if nothing can be used. `validate` reports what is wrong with single clips and
    labels.
    """
    Keys(kp_key, feature_key, require_x2048)
    options = {"kp_key": kp_key, "feature_key": feature_key, "require_x2048": require_x2048}
    return build_pack(source, "sign", options, survey, read, val=val, test=test, into=into, progress=progress)


def survey(folder: Path, options: Mapping[str, Any]) -> Survey:
    found = labels_of(folder)
    bad = [(row.file, *row.reasons) for row in found.rows if row.severity == ERROR]
    if not found.labels:
        first = f". The first fault: {bad[0][0]}: {bad[0][2]}, got {bad[0][1]}; {bad[0][3]}" if bad else ""
        raise PackError(
            f"{folder}: {plural(len(found.clips), 'clip')} and no label that can be used{first}. To train, write "
            f"{LABELS} with the columns file,gloss,cat; run.predict(files) reads clips without labels"
        )
    asked = Keys(options["kp_key"], options["feature_key"], options["require_x2048"])
    keys, _ = with_features(asked, folder, found.clips)
    sizes = {"gloss": len(found.classes), "category": len(found.categories)}

    def count(columns: Mapping[str, np.ndarray], train: np.ndarray) -> dict[str, list[int]]:
        pairs = zip(sizes.items(), columns["label"][train].T, strict=True)
        return {name: np.bincount(ids, minlength=size).tolist() for (name, size), ids in pairs}

    return Survey(
        [
            Entry(clip, split_of(clip), np.array(found.labels[clip], np.int64))
            for clip in found.clips
            if clip in found.labels
        ],
        found.classes,
        {
            "kp_key": keys.x,
            "feature_key": keys.features if keys.needed else None,
            "categories": found.categories,
            "category_of": found.category_of,
        },
        ragged=("x", "mask", "features"),
        bucket_by="features" if keys.x is None else "x",
        bad=bad,
        count=count,
    )


def with_features(keys: Keys, folder: Path, clips: Iterable[str]) -> tuple[Keys, list[Row]]:
    """The keys with the decision whether features are packed: if every clip that can be opened has them; and a warning
    where only some do."""
    if keys.needed or keys.features is None:
        return keys, []
    have = {clip: has_array(folder / clip, keys.features) for clip in clips}
    without = [clip for clip, has in have.items() if has is False]
    if not without or not any(have.values()):
        return replace(keys, needed=not without), []
    fix = "extract them, or require_x2048=True leaves out these clips; otherwise a pack has no features"
    rule, value = f"all clips have {keys.features}, or none", f"{len(without):,} of {len(have):,} have none"
    return keys, [Row(keys.features, rule, value, fix, WARNING, without[0])]


def read(path: Path, options: Mapping[str, Any]) -> Sample:
    """One clip → {"x": …, "mask": …, "features": …} as the pack holds it.

    Raises PackError(value, rule, fix) with the first error that `validate` reports for it.
    """
    keys = Keys(options["kp_key"], options["feature_key"], needed=options["feature_key"] is not None)
    return examine(Path(path), keys, whole=False)[0]


@dataclass(frozen=True)
class Report(report.Report):
    """What is wrong with a source. clips, labelled: how many there are, and how many have a label that can be used."""

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
    """Check every clip and every label of a folder, archive or link, with or without labels, as one table of severity,
    file, key, rule, value and fix.

    kp_key, feature_key and require_x2048 as for `pack`: an error is what a pack with the same options leaves out.
    Raises PackError if there is no clip, and for impossible keys.
    """
    keys = Keys(kp_key, feature_key, require_x2048)
    folder = stage(source, progress=progress)
    found = labels_of(folder)
    keys, some = with_features(keys, folder, found.clips)
    check = in_threads(partial(checked, folder, keys), found.clips)
    shown = bar(check, "validating", len(found.clips), leave=False, disable=not progress)
    rows, first = [*found.rows, *some], {}
    for clip, (broken, digest) in zip(found.clips, shown, strict=True):
        rows += [row.at(clip) for row in broken]
        if digest and first.setdefault(digest, clip) != clip:
            rule, fix = "each clip occurs once; a clip in train cannot validate", "delete one of them"
            rows.append(Row("", rule, f"the same as {first[digest]}", fix, WARNING, clip))
    about = f"{plural(len(found.clips), 'clip')}, {len(found.labels):,} with a label"
    return Report(ordered(rows), about, len(found.clips), len(found.labels))


def checked(folder: Path, keys: Keys, clip: str) -> tuple[list[Row], bytes]:
    """(what is wrong with a clip, a digest of its contents)."""
    try:
        columns, rows = examine(folder / clip, keys)
    except Refused as refusal:
        return [refusal.row], b""
    except OSError as error:
        fix = "copy the file again, or change its permissions"
        return [Row("", "the file can be read", error.strerror or str(error), fix)], b""
    return rows, hashlib.blake2b(columns["features" if keys.x is None else "x"].tobytes(), digest_size=16).digest()
