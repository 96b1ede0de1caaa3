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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

from nbtools import disk
from nbtools.errors import PackError
from nbtools.tasks.common.files import walk
from nbtools.tasks.common.labels import csv_rows
from nbtools.tasks.common.report import WARNING, Refused, Row

CLIP, LABELS, REFERENCE = ".npz", "labels.csv", "labels_reference.csv"
COLUMNS = ("file", "gloss", "cat")
NAMES = ("gloss_id", "label", "cat_id", "category")
ID = re.compile("[0-9]{1,4}")  # a mistyped id must not make a network of a billion outputs

T = TypeVar("T")
Ids = tuple[int, int]  # (gloss, category)
Named = tuple[int, str, int, str]  # gloss, its name, category, its name


@dataclass(frozen=True)
class Labels:
    """What a folder holds: the clips' files, relative to it, and the labels of those that have one that can be used.
    category_of: of each gloss, -1 for one that neither a clip nor the reference has."""

    clips: list[str]
    labels: dict[str, Ids]
    rows: list[Row]
    classes: list[str]
    categories: list[str]
    category_of: list[int]


def labels_of(folder: Path) -> Labels:
    """Read names and lists, not clips. Raises PackError if there is no clip, DiskError for a list that cannot be
    opened."""
    names = walk(folder)
    clips = [name for name in names if name.lower().endswith(CLIP)]
    if not clips:
        there = f"; it has {', '.join(names[:3])}" if names else "; it is empty"
        raise PackError(f"{folder}: no clips ({CLIP}){there}. Give the folder that holds train/ and val/")
    with disk.explained(f"reading the labels of {folder}", folder):
        lists = label_lists(folder, names)
        reference, broken = read_reference(folder, names)
    labels, rows = match(lists, clips)
    fix = f"write its row file,gloss,cat into {LABELS}; to predict, nothing"
    if not lists:
        rows = [Row("", "clips have labels", f"no {LABELS}", fix, WARNING, LABELS)]
    else:
        bare = (clip for clip in clips if clip not in labels)
        rows += [Row("", "a clip has a label", "no row that can be used", fix, file=clip) for clip in bare]
    glosses = {gloss: name for gloss, name, _, _ in reference}
    categories = {cat: name for _, _, cat, name in reference}
    category_of = {gloss: cat for gloss, _, cat, _ in reference} | dict(labels.values())
    ids = range(max(category_of, default=-1) + 1)
    last = max(category_of.values(), default=-1)
    return Labels(
        clips,
        labels,
        [*rows, *broken],
        classes=[glosses.get(i, str(i)) for i in ids],
        categories=[categories.get(i, str(i)) for i in range(last + 1)],
        category_of=[category_of.get(i, -1) for i in ids],
    )


def label_lists(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """name → content of each list of labels, whatever it is called; other CSV files are skipped."""
    lists = {}
    for name in names:
        last = PurePosixPath(name).name.lower()
        if last.endswith(".csv") and last != REFERENCE:
            data = (folder / name).read_bytes()
            head = data.partition(b"\n")[0].decode("utf-8-sig", "replace").split(",")
            if last == LABELS or set(COLUMNS) <= set(folded(head)):
                lists[name] = data
    return lists


def folded(cells: Iterable[str]) -> list[str]:
    return [cell.strip().strip('"').casefold() for cell in cells]


def read_table(
    data: bytes, name: str, columns: Sequence[str], parse: Callable[..., T]
) -> tuple[list[tuple[str, T]], list[Row]]:
    """([(`train/labels.csv:14`, parse(*cells of these columns)), …] of a CSV file's rows, what is wrong with these or
    with the file); parse raises Refused."""
    found, rows = [], []
    try:
        table = list(csv_rows(data, name))
    except Refused as refusal:
        return [], [refusal.row]
    head = folded(table[0][1]) if table else []
    if missing := [column for column in columns if column not in head]:
        rule, fix = f"a list has the columns {', '.join(columns)}", f"write {','.join(columns)} as the first line"
        return [], [Row(", ".join(missing), rule, ",".join(head)[:60] or "an empty file", fix, file=name)]
    for line, cells in table[1:]:
        try:
            if len(cells) != len(head):
                rule, fix = "a row has as many cells as the first line", "quote a name that holds a comma"
                raise Refused(Row("", rule, f"{len(cells)} of {len(head)}", fix))
            found.append((f"{name}:{line}", parse(*(cells[head.index(column)].strip() for column in columns))))
        except Refused as refusal:
            rows.append(refusal.row.at(f"{name}:{line}"))
    return found, rows


def read_reference(folder: Path, names: Iterable[str]) -> tuple[list[Named], list[Row]]:
    """The names of the ids, and a warning if these cannot be read: they are only for display."""
    name = next((name for name in names if PurePosixPath(name).name.lower() == REFERENCE), None)
    if name is None:
        return [], []
    found, rows = read_table((folder / name).read_bytes(), name, NAMES, named)
    if rows:
        return [], [replace(rows[0], fix=f"{rows[0].fix}; until then ids are shown", severity=WARNING, file=name)]
    return [value for _, value in found], []


def named(gloss: str, label: str, cat: str, category: str) -> Named:
    return id_in("gloss_id", gloss), label, id_in("cat_id", cat), category


def id_in(column: str, cell: str) -> int:
    if not ID.fullmatch(cell):
        fix = "write its id, and names into labels_reference.csv"
        raise Refused(Row(column, f"{column} is a whole number from 0 to 9999", cell or "nothing", fix))
    return int(cell)


def match(lists: Mapping[str, bytes], clips: Sequence[str]) -> tuple[dict[str, Ids], list[Row]]:
    """(clip → its label, what is wrong with the lists). A clip with contradictory labels has none."""
    said: dict[str, dict[Ids, str]] = defaultdict(dict)  # clip → label → the first row that says so
    rows = []
    for name, data in lists.items():
        found, broken = read_table(data, name, COLUMNS, partial(labelled, index_of(name, clips)))
        rows += broken
        for where, (clip, ids) in found:
            said[clip].setdefault(ids, where)
    labels = {clip: next(iter(found)) for clip, found in said.items() if len(found) == 1}
    for found in said.values():
        (first, where), *others = found.items()
        for ids, other in others:
            rule = f"a clip has one label, and {where} says {first[0]}, {first[1]}"
            fix = "delete the wrong one of the rows"
            rows.append(Row("gloss, cat", rule, f"{ids[0]}, {ids[1]}", fix, file=other))
    category_of: dict[int, int] = {}
    for (gloss, cat), _ in Counter(labels.values()).most_common():
        category_of.setdefault(gloss, cat)
    for clip, (gloss, cat) in list(labels.items()):
        if cat != category_of[gloss]:
            rule, where = f"a gloss has one category, and {gloss} mostly has {category_of[gloss]}", said[clip]
            rows.append(Row("cat", rule, str(cat), "correct gloss or cat", file=where[labels.pop(clip)]))
    return labels, rows


def labelled(index: Mapping[str, list[str]], file: str, gloss: str, cat: str) -> tuple[str, Ids]:
    """(clip, label) of a row. Raises Refused for an id that is none, and unless the file means one clip."""
    ids = id_in("gloss", gloss), id_in("cat", cat)
    name = PurePosixPath(file.replace("\\", "/")).as_posix()
    some = index.get(name[: -len(CLIP)] if name.lower().endswith(CLIP) else name, [])
    if not some:
        fix = "correct the name, copy the clip too, or delete the row"
        raise Refused(Row("file", "the clip of a row exists", file or "nothing", fix))
    if len(some) > 1:
        came, fix = f"{file}: {', '.join(some[:3])}", "write its folder too, as train/CLIP"
        raise Refused(Row("file", "a name stands for one clip", came, fix))
    return some[0], ids


def index_of(name: str, clips: Iterable[str]) -> dict[str, list[str]]:
    """Path from the folder that a list covers, or any end of a path → the clips that it may mean."""
    path = PurePosixPath(name)
    above = f"{path.with_suffix('')}/"
    if not any(clip.startswith(above) for clip in clips):
        above = "" if path.parent == PurePosixPath() else f"{path.parent}/"
    index, whole = defaultdict(list), {}
    for clip in clips:
        if clip.startswith(above):
            stem = clip[: -len(CLIP)]
            parts = stem.split("/")
            for first in range(len(parts)):
                index["/".join(parts[first:])].append(clip)
            whole[stem.removeprefix(above)] = [clip]
    return {**index, **whole}
