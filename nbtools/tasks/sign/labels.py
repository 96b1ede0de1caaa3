"""The clips of a folder, their splits and labels, and what is wrong with these.

    train/CLIP.npz  train/labels.csv  val/…  test/…      one list in each folder
    FSL105_train/CLIP.npz  FSL105_train.csv  …           a list next to the folder of its name
    CLIP.npz  labels.csv                                 one folder; the splits are drawn by a hash of the names
    transformer_only/…  iv3_gru_only/…  test_15fps/…     the guide's: the first two train, the third validates
    labels_reference.csv                                 anywhere: the names of the ids

A list is a CSV with any separator and the columns file, gloss and cat, ids from 0. It covers the folder next to it
that its own name holds, else the clips below its folder that are of the split in its name (`labels_val.csv`), else all
of these. A row names a clip by its path from there, or by any end of its path that no other clip has; `.npz` may be
left out. The reference has the columns gloss_id, label, cat_id and category; without one, the guide's names of clips,
`clip_0089_how are you`, name the glosses.

A clip with the same name and label in both of the guide's train folders is one sample.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

from nbtools import disk
from nbtools.errors import PackError
from nbtools.tasks.common.files import split_word, walk
from nbtools.tasks.common.lists import decode_text, read_rows, slashed
from nbtools.tasks.common.report import WARNING, Refused, Row

CLIP, LABELS, REFERENCE = ".npz", "labels.csv", "labels_reference.csv"
COLUMNS = ("file", "gloss", "cat")
NAMES = ("gloss_id", "label", "cat_id", "category")
ID = re.compile("[0-9]{1,4}")  # a mistyped id must not make a network of a billion outputs
TITLE = re.compile(r"clip_\d+_(.+)")
HALVES = ("transformer_only", "iv3_gru_only")  # of a clip: its keypoints, its features
BOTH = "+".join(HALVES)  # in the name of the sample that they make
GUIDE = dict.fromkeys((*HALVES, BOTH), "train") | {"test_15fps": "val"}
"""The guide's folders: it validates both networks on the last, and has no test split."""

T = TypeVar("T")
Ids = tuple[int, int]  # (gloss, category)
Classes = int | Sequence[str] | None
Named = tuple[int, str, int, str]  # gloss, its name, category, its name


@dataclass(frozen=True)
class Labels:
    """What a folder holds: the clips by their files, relative to it (`a+b/CLIP.npz` are two), and the labels of those
    that have one that can be used. category_of: of each gloss, -1 for one that neither a clip nor the reference has."""

    clips: list[str]
    labels: dict[str, Ids]
    rows: list[Row]
    classes: list[str]
    categories: list[str]
    category_of: list[int]


def labels_of(folder: Path, given: Collection[str] = (), glosses: Classes = None, categories: Classes = None) -> Labels:
    """Read names and lists, not clips. given: folders that the list next to them alone covers; glosses, categories: as
    for `pack`. Raises PackError if there is no clip, and for an id beyond these; DiskError for a list that cannot be
    opened."""
    names = walk(folder)
    clips = [name for name in names if name.lower().endswith(CLIP)]
    if not clips:
        there = f"; it has {', '.join(names[:3])}" if names else "; it is empty"
        raise PackError(f"{folder}: no clips ({CLIP}){there}. Give the folder that holds train/ and val/")
    with disk.explained(f"reading the labels of {folder}", folder):
        lists = label_lists(folder, names, given)
        reference, broken = read_reference(folder, names)
    labels, rows = match(lists, clips)
    clips, labels = joined(clips, labels)
    fix = f"write its row file,gloss,cat into {LABELS}; to predict, nothing"
    if not lists:
        rows = [Row("", "clips should have labels", f"no {LABELS}", fix, WARNING, LABELS)]
    else:
        bare = (clip for clip in clips if clip not in labels)
        rows += [Row("", "a clip must have a label", "no row that can be used", fix, file=clip) for clip in bare]
    words = words_of(labels) | {gloss: name for gloss, name, _, _ in reference}
    titles = {cat: name for _, _, cat, name in reference}
    category_of = {gloss: cat for gloss, _, cat, _ in reference} | dict(labels.values())
    clips_of = [{ids[place]: clip for clip, ids in labels.items()} for place in (0, 1)]
    classes = names_of("glosses", category_of, words, glosses, clips_of[0])
    rows += absent(category_of, clips_of[0]) if glosses is None else []
    return Labels(
        clips,
        labels,
        [*rows, *broken],
        classes,
        categories=names_of("categories", category_of.values(), titles, categories, clips_of[1]),
        category_of=[category_of.get(i, -1) for i in range(len(classes))],
    )


def words_of(labels: Mapping[str, Ids]) -> dict[int, str]:
    """The names of glosses whose clips are called `clip_0089_how are you`; {} unless every gloss has one of its own."""
    titles = defaultdict(Counter)
    for clip, (gloss, _) in labels.items():
        title = TITLE.fullmatch(PurePosixPath(clip).stem)
        titles[gloss][title[1] if title else ""] += 1
    words = {gloss: texts.most_common(1)[0][0] for gloss, texts in titles.items()}
    return words if len(set(words.values()) - {""}) == len(words) else {}


def names_of(
    option: str, ids: Iterable[int], known: Mapping[int, str], wanted: Classes, clips: Mapping[int, str]
) -> list[str]:
    """The classes: as wanted, else those up to the largest id. clips: one of each id. Raises PackError if they are too
    few, or not those that the source itself names."""
    if isinstance(wanted, str | float):
        raise PackError(f"{option} must be a whole number or a list of names, got {wanted!r}; give one of them")
    most = max(ids, default=-1)
    count = most + 1 if wanted is None else wanted if isinstance(wanted, int) else len(wanted)
    if count <= most:
        fix = f"give {most + 1} or more, or correct the label of {clips.get(most, REFERENCE)}"
        raise PackError(f"{option} must be above the largest id, {most}, since ids are from 0, got {count}; {fix}")
    if wanted is None or isinstance(wanted, int):
        return [known.get(i, str(i)) for i in range(count)]
    for i, title in enumerate(wanted):
        if known.get(i) and title != str(i) and plain(title) != plain(known[i]):
            fix = f"correct its ids, or the name, in {REFERENCE} or the names of clips"
            raise PackError(f"{option}: id {i} must be {title!r}, and the source calls it {known[i]!r}; {fix}")
    return [*wanted]


def absent(ids: Collection[int], clips: Mapping[int, str]) -> list[Row]:
    """A warning where glosses below the largest id have no clip: a typo there, or a source with some of the glosses.
    Each is an output of the network."""
    most = max(ids, default=-1)
    if most < len(ids):
        return []
    value, fix = f"{most}, and {most + 1 - len(ids)} below it have no clip", "correct the label, or give glosses="
    return [
        Row(
            "gloss",
            "ids should run from 0 without gaps",
            value,
            f"{fix}{most + 1}",
            WARNING,
            clips.get(most, REFERENCE),
        )
    ]


def plain(name: str) -> str:
    """A name as it is compared: its letters and digits."""
    return re.sub(r"[\W_]", "", name.casefold())


def split_in(clip: str, folder: str = "") -> str | None:
    """The split of a clip by the nearest folder that names one; folder: the name of the source itself, which counts
    only if it is one of the guide's."""
    named = (GUIDE.get(part) or split_word(part) for part in reversed(PurePosixPath(clip).parts[:-1]))
    return next(filter(None, named), GUIDE.get(folder))


def whole(clip: str) -> str:
    """The sample that a clip in one of the guide's train folders makes with that of its name in the other."""
    path = PurePosixPath(clip)
    return (path.parent.with_name(BOTH) / path.name).as_posix() if path.parent.name in HALVES else clip


def joined(clips: Sequence[str], labels: Mapping[str, Ids]) -> tuple[list[str], dict[str, Ids]]:
    """(the samples that clips make, their labels): halves with contradictory labels stay apart."""
    halves = defaultdict(list)
    for clip in clips:
        halves[whole(clip), labels.get(clip)].append(clip)
    names = {clip: name if len(some) > 1 else clip for (name, _), some in halves.items() for clip in some}
    return list(dict.fromkeys(names.values())), {names[clip]: ids for clip, ids in labels.items()}


def label_lists(folder: Path, names: Iterable[str], given: Collection[str] = ()) -> dict[str, bytes]:
    """name → content of each list of labels, whatever it is called; other CSV files are skipped, and those in a folder
    that has a given one next to it."""
    lists, stated = {}, {f"{name}.csv" for name in given}
    for name in names:
        last = PurePosixPath(name).name.lower()
        if last.endswith(".csv") and last != REFERENCE and name.partition("/")[0] not in given:
            data = (folder / name).read_bytes()
            head = re.split(r"[,;|\s]+", data.partition(b"\n")[0].decode("utf-8-sig", "replace"))
            if last == LABELS or name in stated or set(COLUMNS) <= set(folded(head)):
                lists[name] = data
    return lists


def folded(cells: Iterable[str]) -> list[str]:
    return [cell.strip().strip('"').casefold() for cell in cells]


def read_table(
    data: bytes, name: str, columns: Sequence[str], parse: Callable[..., T]
) -> tuple[list[tuple[str, T]], list[Row]]:
    """([(`train/labels.csv:14`, parse(*cells of these columns)), …] of a table's rows, what is wrong with these or
    with the file); parse raises Refused. Without a header the columns are in this order."""
    found, rows = [], []

    def is_row(cells: list[str]) -> bool:
        with suppress(Refused):
            return len(cells) == len(columns) and bool(parse(*cells))
        return False

    try:
        text = decode_text(data, name)
        table = read_rows(text, name, lambda cells: is_row(cells) or set(columns) <= set(folded(cells)), heads=())
    except Refused as refusal:
        return [], [refusal.row]
    if table and is_row(table[0][1]):
        table.insert(0, (0, [*columns]))
    head = folded(table[0][1]) if table else []
    if wrong := [column for column in columns if head.count(column) != 1]:
        rule = f"a list must have the columns {', '.join(columns)}, each once"
        fix = f"write {','.join(columns)} as the first line"
        return [], [Row(", ".join(wrong), rule, ",".join(head)[:60] or "an empty file", fix, file=name)]
    for line, cells in table[1:]:
        try:
            if len(cells) != len(head):
                rule, fix = "a row must have as many cells as the first line", "quote a name that holds the separator"
                raise Refused(Row("", rule, f"{len(cells)} of {len(head)}", fix))
            found.append((f"{name}:{line}", parse(*(cells[head.index(column)] for column in columns))))
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
        raise Refused(Row(column, f"{column} must be a whole number from 0 to 9999", cell or "nothing", fix))
    return int(cell)


def match(lists: Mapping[str, bytes], clips: Sequence[str]) -> tuple[dict[str, Ids], list[Row]]:
    """(clip → its label, what is wrong with the lists). A clip with contradictory labels has none."""
    given: dict[str, dict[Ids, str]] = defaultdict(dict)  # clip → label → the first row that says so
    rows = []
    for name, data in lists.items():
        found, broken = read_table(data, name, COLUMNS, partial(labelled, index_of(name, clips)))
        rows += broken
        for where, (some, ids) in found:
            for clip in some:
                given[clip].setdefault(ids, where)
    labels = {clip: next(iter(found)) for clip, found in given.items() if len(found) == 1}
    for found in given.values():
        (first, where), *others = found.items()
        for ids, other in others:
            rule = f"a clip must have one label, and {where} says {first[0]}, {first[1]}"
            fix = "delete the wrong one of the rows"
            rows.append(Row("gloss, cat", rule, f"{ids[0]}, {ids[1]}", fix, file=other))
    category_of: dict[int, int] = {}
    for (gloss, cat), _ in Counter(labels.values()).most_common():
        category_of.setdefault(gloss, cat)
    for clip, (gloss, cat) in list(labels.items()):
        if cat != category_of[gloss]:
            rule, where = f"a gloss must have one category, and {gloss} mostly has {category_of[gloss]}", given[clip]
            rows.append(Row("cat", rule, str(cat), "correct gloss or cat", file=where[labels.pop(clip)]))
    return labels, rows


def labelled(index: Mapping[str, list[str]], file: str, gloss: str, cat: str) -> tuple[list[str], Ids]:
    """(a clip or its two halves, label) of a row. Raises Refused for an id that is none, and unless the file means one
    clip."""
    ids = id_in("gloss", gloss), id_in("cat", cat)
    name = slashed(file)
    some = index.get(name[: -len(CLIP)] if name.lower().endswith(CLIP) else name, [])
    if not some:
        fix = "correct the name, copy the clip too, or delete the row"
        raise Refused(Row("file", "the clip of a row must exist", file or "nothing", fix))
    if len(set(map(whole, some))) > 1:
        came, fix = f"{file}: {', '.join(some[:3])}", "add its folder: train/CLIP"
        raise Refused(Row("file", "a name must stand for one clip", came, fix))
    return some, ids


def index_of(name: str, clips: Iterable[str]) -> dict[str, list[str]]:
    """Path from the folder that a list covers, or any end of a path → the clips that it may mean."""
    above, covered = covered_by(name, clips)
    index, full = defaultdict(list), {}
    for clip in covered:
        stem = clip[: -len(CLIP)]
        parts = stem.split("/")
        for first in range(len(parts)):
            index["/".join(parts[first:])].append(clip)
        full[stem.removeprefix(above)] = [clip]
    return {**index, **full}


def covered_by(name: str, clips: Iterable[str]) -> tuple[str, list[str]]:
    """(the folder that a list covers, "" or ending in "/"; the clips that it may mean)."""
    path = PurePosixPath(name)
    above = "" if path.parent == PurePosixPath() else f"{path.parent}/"
    below = [clip for clip in clips if clip.startswith(above)]
    folders = {clip.removeprefix(above).partition("/")[0] for clip in below if "/" in clip.removeprefix(above)}
    held = [
        folder for folder in folders if re.search(rf"(?<![a-z0-9]){re.escape(folder)}(?![a-z0-9])", path.stem, re.I)
    ]
    if held:
        above += f"{max(held, key=len)}/"
        return above, [clip for clip in below if clip.startswith(above)]
    split = split_word(path.stem)
    return above, [clip for clip in below if split and split_in(clip) == split] or below
