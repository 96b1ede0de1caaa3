"""Raw clips → pack: x (T, 156) float32 and mask (T, 78) bool, features (T, 2048) float32 where the clips have them, all
ragged, and label (2,) int64 = (gloss, category). `classes` are the glosses.

Clips are decompressed once: reading a `.npz` at each access takes most of a small network's step.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nbtools.data import Entry, Pack, Sample, Survey, bar, build_pack, stage
from nbtools.errors import PackError
from nbtools.table import plural
from nbtools.tasks.common import report
from nbtools.tasks.common.files import in_threads
from nbtools.tasks.common.report import ERROR, WARNING, Row, ordered
from nbtools.tasks.sign.clips import Keys, examine, has_features
from nbtools.tasks.sign.labels import LABELS, Clip, Labels, labels_of


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
    """The pack of labelled clips from a folder, archive or link; opened where it is finished.

    kp_key: the array of keypoints; None reads none. feature_key: that of features, packed where every clip has them;
    None leaves them out, which makes a pack for the Transformer alone 13 times as small. require_x2048: leave out clips
    without features, instead of the features.
    val, test: shares, or whole numbers for exactly so many; train, val and test folders of the source take precedence.
    Raises PackError where nothing can be used. `validate` reports what is wrong with single clips and labels.
    """
    Keys(kp_key, feature_key, require_x2048)
    options = {"kp_key": kp_key, "feature_key": feature_key, "require_x2048": require_x2048}
    return build_pack(source, "sign", options, survey, read, val=val, test=test, into=into, progress=progress)


def survey(folder: Path, options: Mapping[str, Any]) -> Survey:
    labels = labels_of(folder)
    if not labels.labelled:
        raise PackError(no_labels(folder, labels))
    keys = with_features(Keys(options["kp_key"], options["feature_key"], options["require_x2048"]), folder, labels)
    sizes = {"gloss": len(labels.classes), "category": len(labels.categories)}

    def count(columns: Mapping[str, np.ndarray], train: np.ndarray) -> dict[str, list[int]]:
        pairs = zip(sizes.items(), columns["label"][train].T, strict=True)
        return {name: np.bincount(ids, minlength=size).tolist() for (name, size), ids in pairs}

    return Survey(
        [Entry(clip.name, split=clip.split, label=np.array(clip.label, np.int64)) for clip in labels.labelled],
        labels.classes,
        {
            "kp_key": keys.x,
            "feature_key": keys.features if keys.needed else None,
            "categories": labels.categories,
            "category_of": labels.category_of,
        },
        ragged=("x", "mask", "features"),
        bucket_by="features" if keys.x is None else "x",
        bad=[(row.file, *row.reasons) for row in labels.rows if row.severity == ERROR],
        count=count,
    )


def no_labels(folder: Path, labels: Labels) -> str:
    for row in labels.rows:
        if row.severity == ERROR:
            value, rule, fix = row.reasons
            first = f"The first fault: {row.file}: {rule}, got {value}; {fix}"
            return f"{folder}: no clip has a label that can be used. {first}"
    return (
        f"{folder}: {plural(len(labels.clips), 'clip')} and no {LABELS}, so there is nothing to train on; write one "
        "with the columns file,gloss,cat. Clips without labels can be validated, and read by run.predict(files)"
    )


def with_features(keys: Keys, folder: Path, labels: Labels) -> Keys:
    """The keys with the decision whether a pack takes the features: if every clip that can be opened has them."""
    if keys.needed or keys.features is None:
        return keys
    answers = (has_features(folder / clip.name, keys.features) for clip in labels.clips)
    return dataclasses.replace(keys, needed=all(answer for answer in answers if answer is not None))


def read(path: Path, options: Mapping[str, Any]) -> Sample:
    """One clip → {"x": …, "mask": …, "features": …} as the pack holds it.

    Raises PackError(value, rule, fix) with the first error that `validate` reports for it.
    """
    keys = Keys(options["kp_key"], options["feature_key"], needed=options["feature_key"] is not None)
    return examine(Path(path), keys, whole=False).sample(keys)


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
    Raises PackError where there is no clip, and for impossible keys.
    """
    keys = Keys(kp_key, feature_key, require_x2048)
    folder = stage(source, progress=progress)
    labels = labels_of(folder)
    check = partial(checked, folder, with_features(keys, folder, labels))
    shown = bar(in_threads(check, labels.clips), "validating", len(labels.clips), leave=False, disable=not progress)
    digests, faults = zip(*shown, strict=True)
    rows = [*labels.rows, *(row for some in faults for row in some), *repeated(labels.clips, digests)]
    about = f"{plural(len(labels.clips), 'clip')}, {len(labels.labelled):,} with a label"
    return Report(ordered(rows), about, len(labels.clips), len(labels.labelled))


def checked(folder: Path, keys: Keys, clip: Clip) -> tuple[str, list[Row]]:
    """(digest of what a clip shows, '' where that cannot be read; what is wrong with it)."""
    try:
        examined = examine(folder / clip.name, keys)
    except OSError as error:
        fix = "copy the file again, or change its permissions"
        return "", [Row("", "the file can be read", error.strerror or str(error), fix, file=clip.name)]
    shows = examined.arrays.get("features" if keys.x is None else "x")
    digest = "" if shows is None else hashlib.blake2b(shows.tobytes(), digest_size=16).hexdigest()
    return digest, [row.at(clip.name) for row in examined.rows]


def repeated(clips: Iterable[Clip], digests: Iterable[str]) -> Iterator[Row]:
    """Clips that show the same as an earlier one, frame by frame."""
    first: dict[str, Clip] = {}
    for clip, digest in zip(clips, digests, strict=True):
        other = first.setdefault(digest, clip) if digest else clip
        if other is not clip:
            twice = "both are trained and judged on" if other.split != clip.split else "it counts twice"
            rule, fix = f"a clip is there once; {twice} otherwise", "delete one of them"
            yield Row("", rule, f"the same as {other.name}", fix, WARNING, clip.name)
