"""Which row of which list speaks for which clip, and where two of them contradict each other."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from nbtools.data import WARNING, Row
from nbtools.table import plural
from nbtools.tasks.sign.clips.labels import Label, read_labels

SUFFIX = ".npz"


@dataclass
class Told:
    """What the lists say: clip → its label, and the place of the row. spoken: clips that stand in a list at all, so
    that a label which cannot be used is complained of once."""

    labels: dict[str, tuple[int, int]] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    spoken: set[str] = field(default_factory=set)
    rows: list[Row] = field(default_factory=list)

    def listen(self, name: str, data: bytes, clips: list[str]) -> None:
        """Take one list's labels, each for the clip that it names."""
        above = scope(name, clips)
        below = [clip for clip in clips if clip.startswith(above)]
        listed, index = read_labels(data, name), Index(above, below)
        self.rows += listed.rows
        if not listed.whole:
            self.spoken.update(below)
        here: dict[str, str] = {}
        for label in listed.labels:
            clip = index.find(label)
            if isinstance(clip, Row):
                self.rows.append(clip)
            else:
                self.take(clip, label, here.get(clip))
                here[clip] = label.where

    def take(self, clip: str, label: Label, before: str | None) -> None:
        """One row for one clip; before: the place of an earlier one in the same list."""
        known = self.labels.get(clip)
        self.spoken.add(clip)
        if label.label is None:
            return
        if known is not None and known != label.label:
            rule = f"a clip has one label, and {self.places[clip]} says {known[0]}, {known[1]}"
            value = f"{label.label[0]}, {label.label[1]}"
            self.refuse(clip, Row("gloss, cat", rule, value, "delete the wrong one of the rows", file=label.where))
            return
        if before is not None:
            rule = f"a clip stands in a list once, and this one is in {before} already"
            self.rows.append(Row("file", rule, label.file, "delete one of the rows", WARNING, label.where))
        if clip not in self.places:
            self.labels[clip], self.places[clip] = label.label, label.where

    def refuse(self, clip: str, row: Row) -> None:
        """A clip of which two things are said has no label at all."""
        del self.labels[clip]
        self.rows.append(row)

    def agree(self) -> None:
        """A gloss is of one category: the one that most of its clips have."""
        counts: dict[int, Counter[int]] = defaultdict(Counter)
        for gloss, cat in self.labels.values():
            counts[gloss][cat] += 1
        for clip, (gloss, cat) in list(self.labels.items()):
            most, times = counts[gloss].most_common(1)[0]
            if cat != most:
                rule = f"a gloss is of one category: {gloss} is of {most} in {plural(times, 'row')}"
                self.refuse(clip, Row("cat", rule, str(cat), "correct gloss or cat", file=self.places[clip]))


def scope(name: str, clips: Iterable[str]) -> str:
    """The folder, with a slash at its end or '', for which a list speaks."""
    way = PurePosixPath(name)
    beside = f"{way.with_suffix('')}/"
    if any(clip.startswith(beside) for clip in clips):
        return beside
    return "" if way.parent == PurePosixPath() else f"{way.parent}/"


class Index:
    """The clips below a folder, by their way from there on, and by every end of their way that only one of them has."""

    def __init__(self, above: str, below: Iterable[str]):
        self.ways: dict[str, str] = {}
        self.ends: dict[str, list[str]] = defaultdict(list)
        for clip in below:
            way = clip[: -len(SUFFIX)]
            self.ways[way[len(above) :]] = clip
            parts = way.split("/")
            for first in range(len(parts)):
                self.ends["/".join(parts[first:])].append(clip)
        self.folded = {end.casefold(): end for end in (*self.ends, *self.ways)}

    def find(self, label: Label) -> str | Row:
        """The clip that a row names, or what is wrong with the row."""
        name = PurePosixPath(label.file.replace("\\", "/")).as_posix()
        name = name[: -len(SUFFIX)] if name.lower().endswith(SUFFIX) else name
        some = [self.ways[name]] if name in self.ways else self.ends.get(name, [])
        if len(some) == 1:
            return some[0]
        if some:
            came, fix = f"{label.file}: {', '.join(some[:3])}", "write its folder too, as train/CLIP"
            return Row("file", "a name means one clip", came, fix, file=label.where)
        near = self.folded.get(name.casefold())
        fix = f"write {near}, as the file is called" if near else "copy the clip too, or delete the row"
        return Row("file", "the clip of a row is there", label.file, fix, file=label.where)
