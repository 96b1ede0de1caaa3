"""Raw clips → pack: x (T, 156) float32 and mask (T, 78) bool, features (T, 2048) float32 where the clips have them, all
ragged, and label (2,) int64 = (gloss, category). `classes` are the glosses.

Decompressed once: reading a clip from its `.npz` at each access takes most of a small network's step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nbtools.data import ERROR, MANIFEST, Entry, Pack, Sample, Writer, build, stage
from nbtools.errors import PackError
from nbtools.table import plural
from nbtools.tasks.sign.clips.clip import Keys, examined, has_features, sample
from nbtools.tasks.sign.clips.files import Survey, surveyed
from nbtools.tasks.sign.clips.labels import LABELS


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
    """The pack of clips with labels, from a folder, archive or link; a second call opens the finished one, and one that
    was killed is gone on with.

    kp_key: the array of keypoints, None: none are read. feature_key: that of features, packed where every clip has
    them; None leaves them out, which makes a pack for the Transformer alone 13 times as small. require_x2048: clips
    without features are left out, and not the features.
    val, test: shares, or whole numbers for exactly so many; train, val and test folders of the source come first.
    Raises PackError where nothing can be used. What is wrong with single clips and labels, `validate` tells too.
    """
    keys = Keys(kp_key, feature_key, require_x2048)
    folder = stage(source, progress=progress)
    if (folder / MANIFEST).is_file():
        return build(folder, "sign", {}, lambda *_: None, read=read)
    survey = surveyed(folder)
    if not survey.labelled:
        raise PackError(unlabelled(folder, survey))
    keys = decided(keys, folder, survey)
    options = {
        "kp_key": keys.x,
        "feature_key": keys.features if keys.needed else None,
        "categories": survey.categories,
        "category_of": survey.category_of,
    }
    return build(
        folder,
        "sign",
        options,
        partial(fill, survey=survey, options=options),
        read=read,
        ragged=("x", "mask", "features"),
        bucket_by="features" if keys.x is None else "x",
        val=val,
        test=test,
        into=into,
        progress=progress,
        resume=True,
    )


def unlabelled(folder: Path, survey: Survey) -> str:
    faults = [row for row in survey.rows if row.severity == ERROR]
    if faults:
        row = faults[0]
        value, rule, fix = row.reasons
        return (
            f"{folder}: no clip has a label that can be used. The first fault: {row.file}: {rule}, got {value}; {fix}"
        )
    return (
        f"{folder}: {plural(len(survey.clips), 'clip')} and no {LABELS}, so there is nothing to train on; write one "
        "with the columns file,gloss,cat. Clips without labels can be validated, and read by run.predict(files)"
    )


def decided(keys: Keys, folder: Path, survey: Survey) -> Keys:
    """Whether a pack takes the features: if they must be there, or if every clip that can be opened has them."""
    if keys.needed or keys.features is None:
        return keys
    found = (has_features(folder / clip.name, keys.features) for clip in survey.clips)
    return keys.taking(all(one for one in found if one is not None))


def read(path: Path, options: Mapping[str, Any]) -> Sample:
    """One clip → {"x": …, "mask": …, "features": …} as the pack holds it.

    Raises PackError(value, rule, fix) with the first error that `validate` has for it.
    """
    keys = Keys(options["kp_key"], options["feature_key"], needed=options["feature_key"] is not None)
    return sample(examined(Path(path), keys, whole=False), keys)


def fill(writer: Writer, folder: Path, survey: Survey, options: Mapping[str, Any]) -> None:
    """Write every clip that has a label and can be used; the others go to the table of bad ones."""
    for row in survey.rows:
        if row.severity == ERROR:
            writer.reject(row.file, *row.reasons)
    writer.classes = survey.classes
    entries = [Entry(clip.name, folder / clip.name, clip.split, clip.label) for clip in survey.labelled]
    for entry, arrays in writer.decode(entries, read, options):
        writer.add(entry.name, entry.split, **arrays, label=np.array(entry.label, np.int64))
    writer.counts = counted(writer, survey)


def counted(writer: Writer, survey: Survey) -> dict[str, list[int]]:
    """Training clips of each gloss and each category, for the weights of classes."""
    labels = {clip.name: clip.label for clip in survey.labelled}
    train = [labels[name] for name, split in zip(writer.names, writer.assigned(), strict=True) if split == "train"]
    glosses, categories = np.array(train, np.int64).reshape(-1, 2).T
    return {
        "gloss": np.bincount(glosses, minlength=len(survey.classes)).tolist(),
        "category": np.bincount(categories, minlength=len(survey.categories)).tolist(),
    }
