"""The clips of a folder, their splits and labels, and what is wrong with these.

    train/CLIP.npz  train/labels.csv  val/…  test/…      one list in each folder
    FSL105_train/CLIP.npz  FSL105_train.csv  …           a list next to the folder of its name
    CLIP.npz  labels.csv                                 one folder; the splits are drawn by a hash of the names
    labels_reference.csv                                 anywhere: the names of the ids

A list is a CSV with the columns file, gloss and cat, ids from 0, and perhaps others. It covers the folder of its name
next to it, else its own folder and all below. A row names a clip by its path from there, or by any end of its path that
no other clip has; `.npz` may be left out. The reference has the columns gloss_id, label, cat_id and category.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from nbtools import disk
from nbtools.errors import PackError
from nbtools.table import plural
from nbtools.tasks.common.files import split_of, walk
from nbtools.tasks.common.labels import csv_rows
from nbtools.tasks.common.report import WARNING, Refused, Row

CLIP, LABELS, REFERENCE = ".npz", "labels.csv", "labels_reference.csv"
COLUMNS = ("file", "gloss", "cat")
NAMES = ("gloss_id", "label", "cat_id", "category")
HEAD = 4096  # bytes of a CSV that tell whether it is a list
ID = re.compile("[0-9]{1,4}")  # a mistyped id must not make a network of a billion outputs

Ids = tuple[int, int]  # (gloss, category)


@dataclass(frozen=True)
class Clip:
    """A clip's file, relative to the source; label: None where it has none that can be used."""

    name: str
    split: str | None
    label: Ids | None


@dataclass(frozen=True)
class Labels:
    """What a folder holds. category_of: of each gloss, -1 for one that neither a clip nor the reference has."""

    clips: list[Clip]
    rows: list[Row]
    classes: list[str]
    categories: list[str]
    category_of: list[int]

    @property
    def labelled(self) -> list[Clip]:
        return [clip for clip in self.clips if clip.label]


def labels_of(folder: Path) -> Labels:
    """Read names and lists, not clips. Raises PackError where there is no clip, DiskError for a list that cannot be
    opened."""
    names = walk(folder)
    clips = [name for name in names if name.lower().endswith(CLIP)]
    if not clips:
        there = f"; it has {', '.join(names[:3])}" if names else "; it is empty"
        raise PackError(f"{folder}: no clips ({CLIP}){there}. Give the folder that holds train/ and val/")
    with disk.explained(f"reading the labels of {folder}", folder):
        lists = dict(label_lists(folder, names))
        glosses, categories, category_of, broken = read_reference(folder, names)
    matched = match(lists, clips)
    splits = {clip: split_of(clip) for clip in clips}
    rows = [*same_but_for_case(clips), *matched.rows, *unlabelled(matched, clips, lists), *broken]
    rows += [*gaps(matched, lists), *untrained(matched, splits)]
    category_of |= dict(matched.labels.values())
    ids = range(max(category_of, default=-1) + 1)
    last = max([*categories, *category_of.values()], default=-1)
    return Labels(
        [Clip(clip, splits[clip], matched.labels.get(clip)) for clip in clips],
        rows,
        classes=[glosses.get(i, str(i)) for i in ids],
        categories=[categories.get(i, str(i)) for i in range(last + 1)],
        category_of=[category_of.get(i, -1) for i in ids],
    )


def label_lists(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each list of labels, whatever it is called; other CSV files are passed over."""
    for name in names:
        last = PurePosixPath(name).name.lower()
        if last.endswith(".csv") and last != REFERENCE:
            with open(folder / name, "rb") as file:
                head = disk.read(file, HEAD)
                columns = head.partition(b"\n")[0].decode("utf-8-sig", "replace").split(",")
                if last == LABELS or set(COLUMNS) <= set(folded(columns)):
                    yield name, head + file.read()


def folded(cells: Sequence[str]) -> list[str]:
    return [cell.strip().strip('"').casefold() for cell in cells]


def read_reference(
    folder: Path, names: Iterable[str]
) -> tuple[dict[int, str], dict[int, str], dict[int, int], list[Row]]:
    """(gloss → name, category → name, gloss → category, a warning where the reference cannot be read: names are for
    people only)."""
    glosses: dict[int, str] = {}
    categories: dict[int, str] = {}
    category_of: dict[int, int] = {}
    name = next((name for name in names if PurePosixPath(name).name.lower() == REFERENCE), None)
    try:
        table = list(csv_rows((folder / name).read_bytes(), name)) if name else [(1, list(NAMES))]
        head = folded(table[0][1]) if table else []
        gloss, label, cat, category = (head.index(column) for column in NAMES)
        for line, cells in table[1:]:
            if not ID.fullmatch(cells[gloss]) or not ID.fullmatch(cells[cat]):
                raise ValueError(f"ids {cells[gloss]!r} and {cells[cat]!r} in line {line}")
            glosses[int(cells[gloss])] = cells[label].strip()
            categories[int(cells[cat])] = cells[category].strip()
            category_of[int(cells[gloss])] = int(cells[cat])
    except (Refused, ValueError, IndexError) as error:
        value = error.row.value if isinstance(error, Refused) else str(error)[:80]
        rule, fix = f"a reference has the columns {', '.join(NAMES)}", "correct it; until then ids are shown"
        return {}, {}, {}, [Row("", rule, value, fix, WARNING, name or "")]
    return glosses, categories, category_of, []


@dataclass(frozen=True)
class Label:
    """One row of a list. where: `train/labels.csv:14`; ids: None where they cannot be read."""

    file: str
    where: str
    ids: Ids | None


@dataclass
class Matched:
    """What the lists say: clip → ids, and where that stands. mentioned: clips that are in a list at all, so that an
    unusable label is reported once."""

    labels: dict[str, Ids] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    mentioned: set[str] = field(default_factory=set)
    rows: list[Row] = field(default_factory=list)

    def take(self, clip: str, label: Label, before: str | None) -> None:
        """One row about a clip; before: where an earlier row of the same list is about it."""
        known = self.labels.get(clip)
        self.mentioned.add(clip)
        if label.ids is None:
            return
        if known is not None and known != label.ids:
            rule = f"a clip has one label, and {self.where[clip]} says {known[0]}, {known[1]}"
            value = f"{label.ids[0]}, {label.ids[1]}"
            self.refuse(clip, Row("gloss, cat", rule, value, "delete the wrong one of the rows", file=label.where))
            return
        if before is not None:
            rule = f"a clip is in a list once, and this one is in {before} already"
            self.rows.append(Row("file", rule, label.file, "delete one of the rows", WARNING, label.where))
        if clip not in self.where:
            self.labels[clip], self.where[clip] = label.ids, label.where

    def refuse(self, clip: str, row: Row) -> None:
        """A clip with contradictory labels has none."""
        del self.labels[clip]
        self.rows.append(row)


def match(lists: dict[str, bytes], clips: Sequence[str]) -> Matched:
    """The labels of clips by the rows of all lists, and the rows that name no clip or contradict each other."""
    matched = Matched()
    for name, data in lists.items():
        above = covered(name, clips)
        below = [clip for clip in clips if clip.startswith(above)]
        try:
            labels, rows = read_list(data, name)
        except Refused as refusal:
            matched.mentioned.update(below)
            matched.rows.append(refusal.row)
            continue
        matched.rows += rows
        index, here = Index(above, below), {}
        for label in labels:
            clip = index.find(label)
            if isinstance(clip, Row):
                matched.rows.append(clip)
            else:
                matched.take(clip, label, here.get(clip))
                here[clip] = label.where
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for gloss, cat in matched.labels.values():
        counts[gloss][cat] += 1
    for clip, (gloss, cat) in list(matched.labels.items()):
        most, times = counts[gloss].most_common(1)[0]
        if cat != most:
            rule = f"a gloss has one category: {gloss} has {most} in {plural(times, 'row')}"
            matched.refuse(clip, Row("cat", rule, str(cat), "correct gloss or cat", file=matched.where[clip]))
    return matched


def read_list(data: bytes, name: str) -> tuple[list[Label], list[Row]]:
    """The rows of a list, and what is wrong with them. Raises Refused for what is no list at all."""
    table = list(csv_rows(data, name))
    head = folded(table[0][1]) if table else []
    if missing := [column for column in COLUMNS if column not in head]:
        rule = "a list has the columns file, gloss and cat"
        fix = "write file,gloss,cat as the first line, with commas between"
        raise Refused(Row(", ".join(missing), rule, ",".join(head)[:60] or "an empty file", fix, file=name))
    places, labels, rows = [head.index(column) for column in COLUMNS], [], []
    for line, cells in table[1:]:
        file, *ids = (cells[place].strip() if place < len(cells) else "" for place in places)
        wrong = next(((key, text) for key, text in zip(COLUMNS[1:], ids, strict=True) if not ID.fullmatch(text)), None)
        fault = None
        if len(cells) != len(head):
            fix = "correct the row; quote a name that holds a comma"
            fault = "", "a row has as many cells as the first line", f"{len(cells)} of {len(head)}", fix
        elif not file:
            fault = "file", "a row names its clip", "nothing", "write the clip's name, or delete the row"
        elif wrong:
            fix = "write its id, and names into labels_reference.csv"
            fault = wrong[0], f"{wrong[0]} is a whole number from 0 to 9999", wrong[1] or "nothing", fix
        if fault:
            rows.append(Row(*fault, file=f"{name}:{line}"))
        if file:
            labels.append(Label(file, f"{name}:{line}", None if fault else (int(ids[0]), int(ids[1]))))
    return labels, rows


def covered(name: str, clips: Iterable[str]) -> str:
    """The folder that a list covers, with a slash at its end, or ''."""
    path = PurePosixPath(name)
    named = f"{path.with_suffix('')}/"
    if any(clip.startswith(named) for clip in clips):
        return named
    return "" if path.parent == PurePosixPath() else f"{path.parent}/"


class Index:
    """The clips below a folder by their paths from there, and by every end of a path."""

    def __init__(self, above: str, below: Iterable[str]):
        self.paths: dict[str, str] = {}
        self.ends: dict[str, list[str]] = defaultdict(list)
        for clip in below:
            path = clip[: -len(CLIP)]
            self.paths[path[len(above) :]] = clip
            parts = path.split("/")
            for first in range(len(parts)):
                self.ends["/".join(parts[first:])].append(clip)
        self.folded = {end.casefold(): end for end in (*self.ends, *self.paths)}

    def find(self, label: Label) -> str | Row:
        """The clip that a row names, or what is wrong with the row."""
        name = PurePosixPath(label.file.replace("\\", "/")).as_posix()
        name = name[: -len(CLIP)] if name.lower().endswith(CLIP) else name
        some = [self.paths[name]] if name in self.paths else self.ends.get(name, [])
        if len(some) == 1:
            return some[0]
        if some:
            came, fix = f"{label.file}: {', '.join(some[:3])}", "write its folder too, as train/CLIP"
            return Row("file", "a name means one clip", came, fix, file=label.where)
        near = self.folded.get(name.casefold())
        fix = f"write {near}, as the file is called" if near else "copy the clip too, or delete the row"
        return Row("file", "the clip of a row is there", label.file, fix, file=label.where)


def same_but_for_case(clips: Iterable[str]) -> Iterator[Row]:
    seen: dict[str, str] = {}
    for clip in clips:
        other = seen.setdefault(clip.casefold(), clip)
        if other != clip:
            rule, fix = "names differ by more than case", "rename one: on Windows and macOS they are the same file"
            yield Row("", rule, f"next to {other}", fix, WARNING, clip)


def unlabelled(matched: Matched, clips: Iterable[str], lists: dict[str, bytes]) -> Iterator[Row]:
    if not lists:
        fix = "to train, write the columns file,gloss,cat; to predict, nothing"
        yield Row("", "clips have labels", f"no {LABELS}", fix, WARNING, LABELS)
        return
    for clip in clips:
        if clip not in matched.labels and clip not in matched.mentioned:
            fix = f"add its row file,gloss,cat to {LABELS}, or delete it"
            yield Row("", "a clip has a label", "no row in any list", fix, file=clip)


def gaps(matched: Matched, lists: Iterable[str]) -> Iterator[Row]:
    """Ids that no clip has: a network never learns to answer them."""
    for place, key in enumerate(COLUMNS[1:]):
        ids = {label[place] for label in matched.labels.values()}
        missing = sorted(set(range(max(ids, default=-1) + 1)) - ids)
        if missing:
            rule, fix = f"{key} ids run from 0 without gaps", "renumber them, or nothing"
            value = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "") + " missing"
            yield Row(key, rule, value, fix, WARNING, next(iter(lists)))


def untrained(matched: Matched, splits: dict[str, str | None]) -> Iterator[Row]:
    """Glosses that val or test has and train does not, where the folders give the splits."""
    trained = {gloss for clip, (gloss, _) in matched.labels.items() if splits[clip] == "train"}
    seen: set[int] = set()
    for clip, (gloss, _) in matched.labels.items() if trained else ():
        if splits[clip] in ("val", "test") and gloss not in trained | seen:
            seen.add(gloss)
            rule, fix = f"a gloss of {splits[clip]} is also in train", "move some of its clips to train"
            yield Row("gloss", rule, str(gloss), fix, WARNING, matched.where[clip])
