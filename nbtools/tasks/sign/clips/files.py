"""What a folder of clips holds: the files, their splits and their labels, and what is wrong with these.

    train/CLIP.npz  train/labels.csv  val/…  test/…      one list in each folder
    FSL105_train/CLIP.npz  FSL105_train.csv  …           a list beside the folder of its name
    CLIP.npz  labels.csv                                 one folder; the splits are drawn by a hash of the names
    labels_reference.csv                                 anywhere: names of the ids

A list speaks for the folder of its name beside it, else for its own folder and all below. A row names a clip from
there on, or by any end of its way that no other clip has; `.npz` may be left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nbtools import disk
from nbtools.data import WARNING, Row
from nbtools.errors import PackError
from nbtools.tasks.sign.clips.labels import LABELS, REFERENCE, Names, is_list, read_names
from nbtools.tasks.sign.clips.matching import SUFFIX, Told

HEAD = 4096  # bytes of a CSV that tell whether it is a list
SPLIT = re.compile(r"(?<![a-z])(?:(train)(?:ing)?|(val)(?:id|idation)?|(test)(?:ing)?)(?![a-z])", re.I)


@dataclass(frozen=True)
class Found:
    """A clip. name: from the source on; label: (gloss, cat), None where it has none that can be used."""

    name: str
    split: str | None
    label: tuple[int, int] | None


@dataclass(frozen=True)
class Survey:
    """All that a folder holds. category_of: of each gloss, -1 for one that neither a clip nor the reference has."""

    clips: list[Found]
    rows: list[Row]
    classes: list[str]
    categories: list[str]
    category_of: list[int]

    @property
    def labelled(self) -> list[Found]:
        return [clip for clip in self.clips if clip.label]


def surveyed(folder: Path) -> Survey:
    """Look at names and lists, not into clips. Raises PackError where there is no clip, DiskError for a list that
    cannot be read."""
    names = sorted(walked(folder))
    clips = [name for name in names if name.lower().endswith(SUFFIX)]
    if not clips:
        there = f"; it has {', '.join(names[:3])}" if names else "; it is empty"
        raise PackError(f"{folder}: no clips ({SUFFIX}){there}. Give the folder that holds train/ and val/")
    told = Told(rows=list(near_names(clips)))
    with disk.explained(f"reading the labels of {folder}", folder):
        lists = list(found_lists(folder, names))
        reference, rows = found_names(folder, names)
    for name, data in lists:
        told.listen(name, data, clips)
    told.agree()
    told.rows += unlabelled(told, clips) if lists else [no_list()]
    splits = {clip: split_of(clip) for clip in clips}
    told.rows += [*rows, *gaps(told, lists), *untrained(told, splits)]
    found = [Found(clip, splits[clip], told.labels.get(clip)) for clip in clips]
    return Survey(found, told.rows, *called(told, reference))


def walked(folder: Path) -> Iterator[str]:
    """Every file's name from the folder on; hidden ones are none."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not hidden(name)]
        way = Path(place).relative_to(folder)
        yield from ((way / name).as_posix() for name in names if not hidden(name))


def hidden(name: str) -> bool:
    """Left behind by systems, not by people: .DS_Store, ._name.npz, __MACOSX."""
    return name.startswith(".") or name == "__MACOSX"


def split_of(name: str) -> str | None:
    """What the nearest folder on a clip's way says: train, FSL105_val, keypoints_test …"""
    for part in reversed(PurePosixPath(name).parts[:-1]):
        if match := SPLIT.search(part):
            return next(word.lower() for word in match.groups() if word)
    return None


def found_lists(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """(name, content) of every list of labels; other CSV files are nobody's."""
    for name in names:
        last = PurePosixPath(name).name.lower()
        if last.endswith(".csv") and last != REFERENCE:
            with open(folder / name, "rb") as file:
                head = disk.read(file, HEAD)
                if last == LABELS or is_list(head):
                    yield name, head + file.read()


def found_names(folder: Path, names: Iterable[str]) -> tuple[Names, list[Row]]:
    for name in names:
        if PurePosixPath(name).name.lower() == REFERENCE:
            return read_names((folder / name).read_bytes(), name)
    return Names(), []


def near_names(clips: Iterable[str]) -> Iterator[Row]:
    """Clips that are one file on a disk that ignores case, as those of Windows and macOS."""
    seen: dict[str, str] = {}
    for clip in clips:
        other = seen.setdefault(clip.casefold(), clip)
        if other != clip:
            rule, fix = "names differ by more than case", "rename one: on Windows and macOS they are the same file"
            yield Row("", rule, f"beside {other}", fix, WARNING, clip)


def unlabelled(told: Told, clips: Iterable[str]) -> Iterator[Row]:
    for clip in clips:
        if clip not in told.labels and clip not in told.spoken:
            fix = f"add its row file,gloss,cat to {LABELS}, or delete it"
            yield Row("", "a clip has a label", "no row in any list", fix, file=clip)


def no_list() -> Row:
    fix = "to train, write the columns file,gloss,cat; to predict, nothing"
    return Row("", "clips have labels", f"no {LABELS}", fix, WARNING, LABELS)


def gaps(told: Told, lists: list[tuple[str, bytes]]) -> Iterator[Row]:
    """Ids that no clip has: a network learns to answer them never."""
    for place, key in enumerate(("gloss", "cat")):
        ids = {label[place] for label in told.labels.values()}
        missing = sorted(set(range(max(ids, default=-1) + 1)) - ids)
        if missing:
            rule, fix = f"{key} ids run from 0 without gaps", "number them anew, or nothing"
            value = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "") + " missing"
            yield Row(key, rule, value, fix, WARNING, lists[0][0])


def untrained(told: Told, splits: dict[str, str | None]) -> Iterator[Row]:
    """Glosses that a folder to validate or test on has, and that to train on does not."""
    trained = {label[0] for clip, label in told.labels.items() if splits[clip] == "train"}
    seen: set[int] = set()
    for clip, (gloss, _) in told.labels.items() if trained else ():
        if splits[clip] in ("val", "test") and gloss not in trained | seen:
            seen.add(gloss)
            rule, fix = f"a gloss of {splits[clip]} is also in train", "move some of its clips to train"
            yield Row("gloss", rule, str(gloss), fix, WARNING, told.places[clip])


def called(told: Told, reference: Names) -> tuple[list[str], list[str], list[int]]:
    """(classes, categories, category of each class), by the reference's names where it has them, else the ids."""
    of = {**reference.category_of, **dict(told.labels.values())}
    categories = {*reference.categories, *of.values()}
    return (
        [reference.glosses.get(i, str(i)) for i in range(max(of, default=-1) + 1)],
        [reference.categories.get(i, str(i)) for i in range(max(categories, default=-1) + 1)],
        [of.get(i, -1) for i in range(max(of, default=-1) + 1)],
    )
