"""Raw clips → pack: x (T, 156) float32 and mask (T, 78) bool, features (T, 2048) float32, all ragged, and label (2,)
int64 = (gloss, category). `classes` are the glosses. A column that no clip has is left out; in one that only some have,
the others have 0 frames.

Clips are decompressed once: reading a `.npz` at each access takes most of a small network's step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

from nbtools import disk
from nbtools.data import (
    Card,
    Entry,
    Pack,
    Sample,
    Survey,
    bar,
    build_pack,
    cache,
    drive_path,
    is_pack,
    side_by_side,
    stage,
)
from nbtools.errors import PackError
from nbtools.show import plural
from nbtools.tasks.common import report
from nbtools.tasks.common.report import ERROR, WARNING, Refused, Row, ordered
from nbtools.tasks.sign.clips import FEATURES, WIDTH, Keys, arrays_in, columns_in, examine
from nbtools.tasks.sign.keypoints import POINTS
from nbtools.tasks.sign.labels import GUIDE, LABELS, labels_of, split_in

NONE: Sample = {
    "x": np.zeros((0, WIDTH), np.float32),
    "mask": np.zeros((0, POINTS), bool),
    "features": np.zeros((0, FEATURES), np.float32),
}
"""The columns of a clip that lacks them."""


def pack(
    source: str | Path,
    *,
    val: float | str | Path = 0.1,
    test: float | str | Path = 0.1,
    labels: str | Path | None = None,
    labels_val: str | Path | None = None,
    labels_test: str | Path | None = None,
    kp_key: str | None = "X",
    feature_key: str | None = "X2048",
    require_x2048: bool = False,
    glosses: int | Sequence[str] | None = None,
    categories: int | Sequence[str] | None = None,
    into: str | Path | None = None,
    progress: bool = True,
) -> Pack:
    """The pack of labelled clips from a folder, archive or link; opened if it is finished.

    val, test: shares, or whole numbers for exactly that many; train, val and test folders of the source take
    precedence, and so do the guide's: `transformer_only` and `iv3_gru_only` train, `test_15fps` validates, and there is
    no test split. Or a source of its own, folder, archive or link: the first source then trains.
    labels, labels_val, labels_test: the CSV of the source, and of a val or test of its own, in place of those in them.
    kp_key: the array of keypoints; None reads none. feature_key: that of features; None leaves them out, which makes a
    pack for the Transformer alone 13 times as small. A clip may lack one of the two: a network trains and is evaluated
    on those that it can read. require_x2048: leave out clips without features.
    glosses, categories: how many classes there are, or their names, where no clip has the last; None: up to the largest
    id. Raises PackError if nothing can be used. `validate` reports what is wrong with single clips and labels.
    """
    Keys(kp_key, feature_key, require_x2048)
    lists = {"train": labels, "val": labels_val, "test": labels_test}
    source, given = arranged(source, {"val": val, "test": test}, lists, progress)
    val, test = (0.0 if isinstance(share, str | Path) else share for share in (val, test))
    options = {"kp_key": kp_key, "feature_key": feature_key, "require_x2048": require_x2048}
    more = {"given": given or None, "glosses": glosses, "categories": categories}
    options |= {name: value for name, value in more.items() if value is not None}
    return build_pack(source, "sign", options, survey, read, val=val, test=test, into=into, progress=progress)


def pack_options(card: Card) -> dict[str, Any]:
    """A new source is read by the same arrays, and its ids mean the same classes."""
    names = ("kp_key", "feature_key", "require_x2048", "categories")
    return {**{name: card.options[name] for name in names if name in card.options}, "glosses": card.classes}


def arranged(
    source: str | Path, shares: Mapping[str, Any], lists: Mapping[str, str | Path | None], progress: bool
) -> tuple[str | Path, list[str]]:
    """(one folder of links to the sources and their lists, the links that have a list); the source unchanged where it
    is all there is, or a pack, which opens as it is. Raises PackError for a list without its source, and for one source
    within another."""
    places = {split: place for split, place in shares.items() if isinstance(place, str | Path)}
    named = {split: name for split, name in lists.items() if name is not None}
    for split in named.keys() - {"train"} - places.keys():
        raise PackError(f"labels_{split} is the list of labels of {split}=, which is missing; give both")
    if not places and not named:
        return source, []
    folders = {"train": stage(source, progress=progress)}
    if is_pack(folders["train"]):
        return folders["train"], []
    folders |= {split: stage(place, progress=progress) for split, place in places.items()}
    for (one, folder), (other, inner) in permutations(folders.items(), 2):
        if inner.resolve().is_relative_to(folder.resolve()):
            raise PackError(
                f"{inner}, the source of {other}, lies within {folder}, that of {one}, so its clips would be in both; "
                f"name a folder that holds the clips of {one} alone"
            )
    only = folders["train"].name if folders["train"].name in GUIDE else "clips"  # of `train` none would be test
    titles = {split: split if places else only for split in folders}
    links = {titles[split]: folder for split, folder in folders.items()}
    for split, name in named.items():
        links[f"{titles[split]}.csv"] = list_file(name)
    return linked(links), [titles[split] for split in named]


def list_file(name: str | Path) -> Path:
    path = drive_path(name).absolute()
    if not path.is_file():
        raise PackError(f"a list of labels must be a CSV file, and {path} is a folder; name the file")
    return path


def linked(links: Mapping[str, Path]) -> Path:
    """A folder with these links, always the same one for the same links."""
    text = json.dumps({name: str(path) for name, path in links.items()})
    folder = cache() / "linked" / hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).hexdigest()
    with disk.explained(f"linking {', '.join(links)}", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in links.items():
            with contextlib.suppress(FileExistsError):
                (folder / name).symlink_to(path)
    return folder


def survey(folder: Path, options: Mapping[str, Any]) -> Survey:
    found = labels_of(folder, options.get("given", ()), options.get("glosses"), options.get("categories"))
    bad = [(row.file, *row.reasons) for row in found.rows if row.severity == ERROR]
    if not found.labels:
        first = f". The first error: {bad[0][0]}: {bad[0][2]}, got {bad[0][1]}; {bad[0][3]}" if bad else ""
        raise PackError(
            f"{folder}: {plural(len(found.clips), 'clip')} and no label that can be used{first}. To train, write "
            f"{LABELS} with the columns file,gloss,cat; run.predict(files) reads clips without labels"
        )
    asked = Keys(options["kp_key"], options["feature_key"], options["require_x2048"])
    keys, _ = there(asked, folder, found.clips)
    sizes = {"gloss": len(found.classes), "category": len(found.categories)}

    def count(columns: Mapping[str, np.ndarray], train: np.ndarray) -> dict[str, list[int]]:
        pairs = zip(sizes.items(), columns["label"][train].T, strict=True)
        return {name: np.bincount(ids, minlength=size).tolist() for (name, size), ids in pairs}

    return Survey(
        [
            Entry(clip, split_in(clip, folder.name), np.array(found.labels[clip], np.int64))
            for clip in found.clips
            if clip in found.labels
        ],
        found.classes,
        {
            "kp_key": keys.x,
            "feature_key": keys.features,
            "categories": found.categories,
            "category_of": found.category_of,
            **({"require_x2048": True} if keys.needed else {}),
        },
        ragged=("x", "mask", "features"),
        bucket_by="features" if keys.x is None else "x",
        bad=bad,
        count=count,
    )


def there(keys: Keys, folder: Path, clips: Sequence[str]) -> tuple[Keys, list[Row]]:
    """(the keys of what some clip has, a warning for what only some have). Raises PackError for a key of the user's own
    that no clip has."""
    have = dict(zip(clips, side_by_side(lambda clip: columns_in(folder / clip, keys), clips), strict=True))
    some = set().union(*filter(None, have.values()))
    rows, kept = [], {}
    for column, option, network in (("x", "kp_key", "Transformer"), ("features", "feature_key", "GRU")):
        key = getattr(keys, column)
        needed = keys.needed and column == "features"
        kept[column] = key if column in some or not some or needed else None
        if key not in (None, getattr(Keys, column)) and kept[column] is None:
            clip = next(clip for clip, columns in have.items() if columns)
            raise PackError(f"no clip has {option} {key!r}; {clip} has {', '.join(arrays_in(folder / clip))}")
        without = [clip for clip, columns in have.items() if columns and column not in columns]
        if key and kept[column] and without and not needed:
            value = f"{len(without):,} of {len(have):,} have none"
            fix = f"extract them; or nothing: the {network} leaves out clips that have none"
            rows.append(Row(key, f"all clips should have {key}, or none", value, fix, WARNING, without[0]))
    return Keys(kept["x"], kept["features"], keys.needed), rows


def read(path: Path, options: Mapping[str, Any]) -> Sample:
    """One clip → {"x": …, "mask": …, "features": …} as the pack holds it: of 0 frames what this clip lacks and others
    have.

    Raises PackError(value, rule, fix) with the first error that `validate` reports for it.
    """
    keys = Keys(options["kp_key"], options["feature_key"], options.get("require_x2048", False))
    found = examine(Path(path), keys, whole=False)[0]
    wanted = {"x": keys.x, "mask": keys.x, "features": keys.features}
    return {column: found.get(column, NONE[column]) for column, key in wanted.items() if key is not None}


@dataclass(frozen=True)
class Report(report.Report):
    """What is wrong with a source. clips, labelled: how many there are, and how many have a label that can be used."""

    clips: int
    labelled: int


def validate(
    source: str | Path,
    *,
    val: float | str | Path = 0.1,
    test: float | str | Path = 0.1,
    labels: str | Path | None = None,
    labels_val: str | Path | None = None,
    labels_test: str | Path | None = None,
    kp_key: str | None = "X",
    feature_key: str | None = "X2048",
    require_x2048: bool = False,
    glosses: int | Sequence[str] | None = None,
    categories: int | Sequence[str] | None = None,
    progress: bool = True,
) -> Report:
    """Check every clip and every label of a folder, archive or link, with or without labels, as one table of severity,
    file, key, rule, value and fix.

    Options as for `pack`: an error is what a pack with the same ones leaves out. Raises PackError if there is no clip,
    and for what `pack` refuses.
    """
    keys = Keys(kp_key, feature_key, require_x2048)
    lists = {"train": labels, "val": labels_val, "test": labels_test}
    source, given = arranged(source, {"val": val, "test": test}, lists, progress)
    folder = stage(source, progress=progress)
    found = labels_of(folder, given, glosses, categories)
    keys, some = there(keys, folder, found.clips)
    check = side_by_side(partial(checked, folder, keys), found.clips)
    shown = bar(check, "validating", len(found.clips), leave=False, disable=not progress)
    rows, first = [*found.rows, *some], {}
    for clip, (broken, digest) in zip(found.clips, shown, strict=True):
        rows += [row.at(clip) for row in broken]
        if digest and first.setdefault(digest, clip) != clip:
            rule, fix = "each clip should occur only once: one in train cannot validate", "delete one of them"
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
        if disk.is_away(error):
            raise
        fix = "copy the file again, or change its permissions"
        return [Row("", "the file must be readable", error.strerror or str(error), fix)], b""
    return rows, hashlib.blake2b(columns["x" if "x" in columns else "features"].tobytes(), digest_size=16).digest()
