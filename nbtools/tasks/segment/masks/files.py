"""What a folder of images holds: which label belongs to which image, their splits, and what is wrong with that.

    images/a.jpg  labels/a.png                     or masks/; train/, val/ and test/ above or below either
    a.jpg         a_mask.png                       or a_label.png, beside each other
    train/a.png   trainannot/a.png                 CamVid's and SegNet's
    JPEGImages/a.jpg  SegmentationClass/a.png      Pascal VOC's, with ImageSets/Segmentation/train.txt
    leftImg8bit/…     gtFine/…                     Cityscapes', by its train ids where they were made
    train.txt     of lines image,label             any names; see `lists`
    annotations.xml                                CVAT for images, beside the images or images/; see `cvat`

An image's label is the one that a list names, else the label image of its name, else what was drawn in CVAT.
"""

from __future__ import annotations

import dataclasses
import os.path
from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from nbtools import disk
from nbtools.data import SPLITS, WARNING, Refused, Row
from nbtools.errors import PackError
from nbtools.tasks.segment.masks import cvat, lists
from nbtools.tasks.segment.masks.images import SUFFIXES
from nbtools.tasks.segment.masks.naming import FILES
from nbtools.tasks.segment.masks.ways import APART, Way, deep, head_of, split_named, walked, way_of, ways_of

LABELS = ("auto", "lists", "images", "cvat")


@dataclass(frozen=True)
class Found:
    """An image with its label. name: from the source on; label: the file that holds it; drawing: what was drawn."""

    name: str
    split: str | None
    label: str
    drawing: cvat.Drawing | None = None


@dataclass
class Survey:
    """pairs: by the image's name; classes: those of CVAT's files; table: the file of the class table, if any."""

    images: int = 0
    pairs: dict[str, Found] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    document: cvat.Document = field(default_factory=cvat.Document)
    table: str | None = None

    def add(self, found: Found, where: str) -> None:
        """Take a pair, unless its image has another."""
        other = self.pairs.setdefault(found.name, found)
        if other is found:
            return
        if other == found:
            rule, fix = "an image is named once", "nothing: both say the same; or delete one of them"
            self.rows.append(Row("image", rule, found.name, fix, WARNING, where))
        else:
            said = [f"{one.label} for {one.split or 'no split'}" for one in (found, other)]
            value = f"{said[0]}, before: {said[1]}" if said[0] != said[1] else "other shapes, before"
            rule, fix = "an image has one label and one split", "delete the wrong one; the first is read"
            self.rows.append(Row("image", rule, f"{found.name}: {value}", fix, file=where))


def surveyed(folder: Path, labels: str = "auto") -> Survey:
    """Look at names, lists and XML, not into images. labels: where they are, `auto` looks everywhere.

    Raises PackError where there is no image, DiskError for a list that cannot be read.
    """
    with disk.explained(f"looking at {folder}", folder):
        names = sorted(walked(folder))
    survey = Survey(table=next((n for n in sorted(names, key=deep) if PurePosixPath(n).name.lower() in FILES), None))
    ways = ways_of(name for name in names if name.lower().endswith(SUFFIXES))
    others = [n for n in names if n.lower().endswith((*lists.ENDINGS, ".xml")) and not APART.fullmatch(n)]
    with disk.explained(f"reading the lists of {folder}", folder):
        texts = [(name, head_of(folder / name)) for name in others]
        source = lists.Source(set(names), stems(ways))
        lines = listed(folder, [name for name, head in texts if lists.is_list(name, head, source)], source, survey)
    if labels in ("auto", "lists"):
        for line in lines:
            if line.label is not None:
                survey.add(Found(line.image, line.split, line.label), line.where)
    if labels in ("auto", "images"):
        beside(ways, survey)
    if labels in ("auto", "cvat"):
        for name in (name for name, head in texts if name.lower().endswith(".xml") and cvat.is_cvat(name, head)):
            annotated(folder, name, source.names, survey)
    divide(survey, [line for line in lines if line.label is None or labels in ("images", "cvat")])
    complete(folder, ways, names, survey)
    return survey


def stems(ways: Iterable[Way]) -> dict[str, str]:
    """Stem → the one image that has it; where there are several, the one that has a label."""
    ways = list(ways)
    labels = {way.key for way in ways if way.is_label}
    images = [way for way in ways if not way.is_label]
    found: dict[str, str] = {}
    for some in (images, [way for way in images if way.key in labels]):
        count = Counter(PurePosixPath(way.name).stem for way in some)
        found |= {stem: way.name for way in some if count[stem := PurePosixPath(way.name).stem] == 1}
    return found


def divide(survey: Survey, lines: Iterable[lists.Line]) -> None:
    """Give the images of lists without labels their splits."""
    said: dict[str, str | None] = {}
    for line in lines:
        if line.image not in survey.pairs:
            fix = "write its label behind a comma, or put one of its name into labels/"
            survey.rows.append(Row("label", lists.RULE, PurePosixPath(line.image).name, fix, file=line.where))
        elif said.setdefault(line.image, line.split) != line.split:
            rule, fix = "an image has one label and one split", "delete the wrong one; the first is read"
            value = f"{line.image}: {line.split}, before: {said[line.image]}"
            survey.rows.append(Row("image", rule, value, fix, file=line.where))
        elif line.split is not None:
            survey.pairs[line.image] = dataclasses.replace(survey.pairs[line.image], split=line.split)


def complete(folder: Path, ways: Iterable[Way], names: list[str], survey: Survey) -> None:
    """Count the images, and tell of those without a label. Raises PackError where there is none."""
    labelled = {found.label for found in survey.pairs.values()}
    images = [way.name for way in ways if not way.is_label and way.name not in labelled]
    survey.images = len({*images, *survey.pairs})
    if not survey.images:
        there = f"; it has {', '.join(names[:3])}" if names else "; it is empty"
        raise PackError(f"{folder}: no images ({', '.join(SUFFIXES[:5])} …){there}. Give the folder above images/")
    known = survey.pairs.keys() | {row.file for row in survey.rows}
    fix = "annotate it, add it to a list, or delete it"
    survey.rows += [Row("label", "an image has a label", "none", fix, file=n) for n in images if n not in known]


def beside(ways: Iterable[Way], survey: Survey) -> None:
    """Images and the label images of their names."""
    images: dict[tuple, Way] = {}
    labels: dict[tuple, Way] = {}
    for way in ways:
        other = (labels if way.is_label else images).setdefault(way.key, way)
        if other is not way:
            key = "label" if way.is_label else "image"
            fix = "rename or delete one of them; labels lie in labels/, or are called a_mask.png beside a.jpg"
            rule = f"{key}s differ in more than their endings"
            survey.rows.append(Row(key, rule, f"{other.name} beside it", fix, file=way.name))
    listed = {found.label for found in survey.pairs.values()}
    for key, label in labels.items():
        if key in images:
            image = images[key]
            if image.name not in survey.pairs:
                survey.add(Found(image.name, image.split, label.name), label.name)
        elif label.name not in listed:
            fix = f"copy its image too, called {key[2]}; or write a list of lines image,label; or delete it"
            survey.rows.append(Row("image", "a label has an image", "none of its name", fix, file=label.name))


def listed(folder: Path, files: Iterable[str], source: lists.Source, survey: Survey) -> list[lists.Line]:
    """The lines of all lists; what is wrong with others becomes rows."""
    lines = []
    for name in files:
        match = lists.NAME.fullmatch(PurePosixPath(name).stem)
        said = match[1].lower() if match else ""
        split = said if said in SPLITS else way_of(name).split
        try:
            text = (folder / name).read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            survey.rows.append(Row("", "a list is text in UTF-8", str(error)[:80], "save it as UTF-8", file=name))
            continue
        found = list(lists.read_list(text, name, split, source))
        survey.rows += [one for one in found if isinstance(one, Row)]
        lines += [one for one in found if isinstance(one, lists.Line)]
    return lines


def annotated(folder: Path, name: str, names: AbstractSet[str], survey: Survey) -> None:
    """The images of one CVAT file, those that no list and no label image speaks for."""
    try:
        document = cvat.parsed(folder / name, name)
    except Refused as refusal:
        survey.rows.append(refusal.row)
        return
    known = {label for label, _ in survey.document.labels}
    survey.document.labels += [label for label in document.labels if label[0] not in known]
    unread = 0
    for drawing in document.drawings:
        image = image_of(drawing, str(PurePosixPath(name).parent), names)
        if image is None:
            fix = "copy the image too, beside the XML or into images/; or delete it there"
            survey.rows.append(Row("image", "an annotated image is there", drawing.name or "nothing", fix, file=name))
        elif image in survey.pairs and survey.pairs[image].drawing is None:
            unread += 1
        else:
            split = split_named(drawing.subset) or way_of(image).split
            survey.add(Found(image, split, name, drawing), name)
    if unread:
        rule, fix = "an image has one label", 'nothing; or labels="cvat" reads the shapes'
        survey.rows.append(Row("", rule, f"{unread} images have label images, which are read", fix, WARNING, name))


def image_of(drawing: cvat.Drawing, folder: str, names: AbstractSet[str]) -> str | None:
    """The file of an annotated image: below images/ or beside the XML, in a folder of its subset or not."""
    called = drawing.name.replace("\\", "/")
    ways = (("images", called), (called,), ("images", drawing.subset, called))
    found = (os.path.normpath("/".join((folder, *parts))) for parts in ways)
    return next((name for name in found if name in names), None)
