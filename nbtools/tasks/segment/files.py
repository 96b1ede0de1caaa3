"""Which label belongs to which image of a folder, their splits, and what is wrong with that.

    images/a.jpg  labels/a.png                     or masks/; train/, val/ and test/ above or below either
    a.jpg         a_mask.png                       or a_label.png, next to each other
    train/a.png   trainannot/a.png                 CamVid's and SegNet's
    JPEGImages/a.jpg  SegmentationClass/a.png      Pascal VOC's, with ImageSets/Segmentation/train.txt
    leftImg8bit/…     gtFine/…                     Cityscapes', by its train ids if they exist
    train.txt     lines image,label                any names; see below
    annotations.xml                                CVAT for images, next to the images or images/; see `cvat`

An image's label is the one that a list names, else the label image of its name, else its shapes in CVAT.

A list is a text file of lines `image,label`, or of two paths separated by a blank as SegNet's; a header is allowed.
Paths are relative to the list's folder or one above it; absolute paths of other machines, /SegNet/CamVid/train/1.png,
are resolved by their ends. A line of one name, or of a stem as Pascal VOC's, gives the split only.
"""

from __future__ import annotations

import codecs
import dataclasses
import os.path
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from nbtools import disk
from nbtools.data import SPLITS
from nbtools.errors import PackError
from nbtools.tasks.common.files import IMAGES, decode_text, walk
from nbtools.tasks.common.report import WARNING, Refused, Row
from nbtools.tasks.segment import cvat
from nbtools.tasks.segment.classes import FILES

LABELS = ("auto", "lists", "images", "cvat")
HEAD = 4096  # bytes of a text file that show what it is
FOLDER = re.compile(
    r"(?P<split>train|val|test)?(?:ing|id|idation)?[_-]?"
    r"(?:(?P<image>images?|imgs?|jpegimages|leftimg8bit)"
    r"|(?P<label>labels?|masks?|annot(?:ation)?s?|segmentations?|segmentationclass(?:png)?|gt(?:fine|coarse)?"
    r"|ground[_-]?truths?))?"
    r"(?:[_-](?P<after>train|val|test)(?:ing|id|idation)?)?",
    re.I,
)
MARK = re.compile(r"[_-](?:mask|label|seg|gt|l)s?$|_gt(?:fine|coarse)_label(?:train)?ids$", re.I)  # a_mask.png: a.jpg's
IMAGE_MARK = re.compile(r"_leftimg8bit$", re.I)  # Cityscapes'
TRAIN_IDS, ALL_IDS = "_labeltrainids.png", "_labelids.png"  # its 19 classes, if they were made, and all 34
# What the folders of Pascal VOC, CVAT, labelme and Cityscapes hold for other tasks
OTHER_TASKS = re.compile(
    r"(?:.*/)?(?:segmentationobject|segmentation(?:class|object)visualization|imagesets/(?!segmentation/)[^/]*)/.*"
    r"|.*_gt(?:fine|coarse)_(?:color|instance(?:train)?ids)\.png",
    re.I,
)
LIST = re.compile(r"(?:.*[^a-z])?(train|val|test|list|pairs|all)(?:ing|id|idation)?", re.I)
LIST_ENDINGS = (".txt", ".csv")
HEADERS = ("image", "images", "file", "img", "image_path")
SAMPLED = 20  # lines that show whether a file is a list
ONE_NAME = "a line is image,label, or names an image whose label has its name"
ONE_LABEL = "an image has one label and one split"
FIRST_IS_READ = "delete the wrong one; the first is read"


@dataclass(frozen=True)
class Labelled:
    """An image with its label. name: relative to the source; label: the file that holds it; drawing: CVAT's shapes."""

    name: str
    split: str | None
    label: str
    drawing: cvat.Drawing | None = None


@dataclass
class Contents:
    """images: how many there are; labelled: by the image's name; document: the labels of CVAT's files; table: the file
    of the class table, if any; rows: what is wrong."""

    images: int = 0
    labelled: dict[str, Labelled] = field(default_factory=dict)
    document: cvat.Document = field(default_factory=cvat.Document)
    table: str | None = None
    rows: list[Row] = field(default_factory=list)

    def add(self, found: Labelled, where: str) -> None:
        """Take a labelled image, unless it has another label."""
        other = self.labelled.setdefault(found.name, found)
        if other is found:
            return
        if other == found:
            rule, fix = "an image is named once", "nothing: both are the same; or delete one of them"
            self.rows.append(Row("image", rule, found.name, fix, WARNING, where))
        else:
            both = [f"{one.label} for {one.split or 'no split'}" for one in (found, other)]
            value = f"{both[0]}, before: {both[1]}" if both[0] != both[1] else "other shapes, before"
            self.rows.append(Row("image", ONE_LABEL, f"{found.name}: {value}", FIRST_IS_READ, file=where))


@dataclass(frozen=True)
class Parsed:
    """The path of an image file. key: (split, folders that give neither split nor kind, stem); an image and its label
    have the same."""

    name: str
    split: str | None
    is_label: bool
    key: tuple[str | None, str, str]


@dataclass(frozen=True)
class Line:
    """A line of a list. where: `train.txt:14`; label: None where the line has none."""

    where: str
    split: str | None
    image: str
    label: str | None


def contents_of(folder: Path, labels: str = "auto") -> Contents:
    """Look at names, lists and XML, not into images. labels: where they are; `auto` looks everywhere.

    Raises PackError without any image, DiskError for a list that cannot be read.
    """
    with disk.explained(f"looking at {folder}", folder):
        names = walk(folder)
    tables = [name for name in names if PurePosixPath(name).name.lower() in FILES]
    contents = Contents(table=min(tables, key=lambda name: (name.count("/"), name), default=None))
    paths = parse_paths(name for name in names if name.lower().endswith(IMAGES))
    texts = [n for n in names if n.lower().endswith((*LIST_ENDINGS, ".xml")) and not OTHER_TASKS.fullmatch(n)]
    with disk.explained(f"reading the lists of {folder}", folder):
        heads = {name: head_of(folder / name) for name in texts}
        source = Source(set(names), stems(paths))
        lists = [name for name, head in heads.items() if is_list(name, head, source)]
        lines = [line for name in lists for line in read_list(folder, name, source, contents.rows)]
    if labels in ("auto", "lists"):
        for line in lines:
            if line.label is not None:
                contents.add(Labelled(line.image, line.split, line.label), line.where)
    if labels in ("auto", "images"):
        pair_by_name(paths, contents)
    if labels in ("auto", "cvat"):
        for name, head in heads.items():
            if name.lower().endswith(".xml") and cvat.is_cvat(name, head):
                read_annotations(folder, name, source.names, contents)
    take_splits([line for line in lines if line.label is None or labels in ("images", "cvat")], contents)
    count_images(folder, paths, names, contents)
    return contents


def head_of(path: Path) -> bytes:
    with open(path, "rb") as file:
        return disk.read(file, HEAD)


# Label images, paired by their names


def parse_path(name: str) -> Parsed:
    path, split, is_label, rest = PurePosixPath(name), None, False, []
    for part in path.parts[:-1]:
        if match := FOLDER.fullmatch(part):
            split = (match["split"] or match["after"] or split or "").lower() or None
            is_label = is_label or match["label"] is not None
        else:
            rest.append(part)
    stem = (MARK if is_label else IMAGE_MARK).sub("", path.stem)
    return Parsed(name, split, is_label, (split, "/".join(rest), stem))


def split_of(text: str) -> str | None:
    """train, val or test where the name of a folder or a subset has it: Validation, val_images."""
    return parse_path(f"{text}/_").split


def parse_paths(names: Iterable[str]) -> list[Parsed]:
    """Images and labels. A file next to an image that is called as it, with a mark, is its label: a_mask.png."""
    paths = [parse_path(name) for name in names if not OTHER_TASKS.fullmatch(name)]
    images = {path.key for path in paths if not path.is_label}
    for i, path in enumerate(paths):
        key = (*path.key[:2], MARK.sub("", path.key[2]))
        if not path.is_label and key != path.key and key in images:
            paths[i] = Parsed(path.name, path.split, True, key)
    trained = {path.key for path in paths if path.name.lower().endswith(TRAIN_IDS)}
    return [path for path in paths if path.key not in trained or not path.name.lower().endswith(ALL_IDS)]


def pair_by_name(paths: Iterable[Parsed], contents: Contents) -> None:
    by_key: dict[bool, dict[tuple, Parsed]] = {True: {}, False: {}}
    for path in paths:
        other = by_key[path.is_label].setdefault(path.key, path)
        if other is not path:
            key = "label" if path.is_label else "image"
            fix = "rename or delete one of them; labels lie in labels/, or are called a_mask.png next to a.jpg"
            rule = f"{key}s differ in more than their endings"
            contents.rows.append(Row(key, rule, f"{other.name} next to it", fix, file=path.name))
    listed = {found.label for found in contents.labelled.values()}
    for key, label in by_key[True].items():
        if image := by_key[False].get(key):
            if image.name not in contents.labelled:
                contents.add(Labelled(image.name, image.split, label.name), label.name)
        elif label.name not in listed:
            fix = f"copy its image too, called {key[2]}; or write a list of lines image,label; or delete it"
            contents.rows.append(Row("image", "a label has an image", "none of its name", fix, file=label.name))


def count_images(folder: Path, paths: Iterable[Parsed], names: list[str], contents: Contents) -> None:
    """Count the images, and list those without a label. Raises PackError without any image."""
    labels = {found.label for found in contents.labelled.values()}
    images = [path.name for path in paths if not path.is_label and path.name not in labels]
    contents.images = len({*images, *contents.labelled})
    if not contents.images:
        there = f"; it has {', '.join(names[:3])}" if names else "; it is empty"
        raise PackError(f"{folder}: no images ({', '.join(IMAGES[:5])} …){there}. Give the folder above images/")
    known = contents.labelled.keys() | {row.file for row in contents.rows}
    fix = "annotate it, add it to a list, or delete it"
    rule = "an image has a label"
    contents.rows += [Row("label", rule, "none", fix, file=name) for name in images if name not in known]


# Lists


@dataclass(frozen=True)
class Source:
    """names: all files; stems: those that one image alone has, with its name."""

    names: AbstractSet[str]
    stems: Mapping[str, str]

    def find(self, path: str, folder: str) -> str | None:
        """The file that a path in a list of this folder names, relative to it or above, never outside the source."""
        bases = (folder, *map(str, PurePosixPath(folder).parents))
        parts = [part for part in path.replace("\\", "/").split("/") if part]
        for first in range(len(parts)):
            rest = "/".join(parts[first:])
            for base in bases:
                if (name := os.path.normpath(f"{base}/{rest}")) in self.names:
                    return name
        return None


def stems(paths: list[Parsed]) -> dict[str, str]:
    """Stem → the one image that has it; if there are several, the one that has a label."""
    labels = {path.key for path in paths if path.is_label}
    images = [path for path in paths if not path.is_label]
    found: dict[str, str] = {}
    for some in (images, [path for path in images if path.key in labels]):
        count = Counter(PurePosixPath(path.name).stem for path in some)
        found |= {stem: path.name for path in some if count[stem := PurePosixPath(path.name).stem] == 1}
    return found


def is_list(name: str, head: bytes, source: Source) -> bool:
    """Whether a text file is a list: by a line of two images; or by its name and a line of one, or its stem."""
    path = PurePosixPath(name)
    if path.suffix.lower() not in LIST_ENDINGS:
        return False
    coding = "utf-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"  # PowerShell's >
    lines = [cells(line) for line in head.decode(coding, "replace").splitlines()[:SAMPLED]]
    if any(is_image(image) and is_image(label) for image, label in lines):
        return True
    return LIST.fullmatch(path.stem) is not None and any(
        is_image(image) or is_image(label) or image in source.stems for image, label in lines
    )


def is_image(cell: str | None) -> bool:
    return (cell or "").strip().lower().endswith(IMAGES)


def cells(line: str) -> tuple[str, str | None]:
    """(image, label or None) of a line: up to the first comma, else up to the first blank after an image's name."""
    first, comma, rest = line.partition(",")
    if not comma:
        parts = re.split(r"(?<=\.\w{3})\s+|(?<=\.\w{4})\s+", line.strip(), maxsplit=1)
        first, rest = parts[0], parts[1] if len(parts) == 2 else ""
    return first.strip().strip('"'), rest.strip().strip('"') or None


def read_list(folder: Path, name: str, source: Source, rows: list[Row]) -> Iterator[Line]:
    """The usable lines of a list; the others become rows."""
    path = PurePosixPath(name)
    match = LIST.fullmatch(path.stem)
    named = match[1].lower() if match else ""
    split = named if named in SPLITS else parse_path(name).split
    try:
        text = decode_text((folder / name).read_bytes(), name)
    except Refused as refusal:
        rows.append(refusal.row)
        return
    for i, line in enumerate(text.splitlines(), 1):
        image, label = cells(line)
        if not line.strip() or (i == 1 and image.casefold() in HEADERS):
            continue
        given = {"image": image, "label": label}
        found = {key: source.find(cell, str(path.parent)) for key, cell in given.items() if cell is not None}
        if label is None:
            found["image"] = found["image"] or source.stems.get(PurePosixPath(image).stem if is_image(image) else image)
        for key in [key for key, there in found.items() if there is None]:
            fix = "copy the file too, correct the line, or delete it"
            rule = f"the {key} of a line is there" if label else ONE_NAME
            rows.append(Row(key, rule, (given[key] or "nothing")[:120], fix, file=f"{name}:{i}"))
        if found["image"] and (label is None or found["label"]):
            yield Line(f"{name}:{i}", split, found["image"], found.get("label"))


def take_splits(lines: Iterable[Line], contents: Contents) -> None:
    """Give images the splits of lists whose labels are not read."""
    known: dict[str, str | None] = {}
    for line in lines:
        if line.image not in contents.labelled:
            fix = "write its label after a comma, or put one of its name into labels/"
            contents.rows.append(Row("label", ONE_NAME, PurePosixPath(line.image).name, fix, file=line.where))
        elif known.setdefault(line.image, line.split) != line.split:
            value = f"{line.image}: {line.split}, before: {known[line.image]}"
            contents.rows.append(Row("image", ONE_LABEL, value, FIRST_IS_READ, file=line.where))
        elif line.split is not None:
            contents.labelled[line.image] = dataclasses.replace(contents.labelled[line.image], split=line.split)


# CVAT


def read_annotations(folder: Path, name: str, names: AbstractSet[str], contents: Contents) -> None:
    """The images of one CVAT file, unless they have a label by a list or a label image."""
    try:
        document = cvat.parse(folder / name, name)
    except Refused as refusal:
        contents.rows.append(refusal.row)
        return
    known = {label for label, _ in contents.document.labels}
    contents.document.labels += [label for label in document.labels if label[0] not in known]
    unread = 0
    for drawing in document.drawings:
        image = image_of(drawing, str(PurePosixPath(name).parent), names)
        if image is None:
            fix = "copy the image too, next to the XML or into images/; or delete it there"
            rule = "an annotated image is there"
            contents.rows.append(Row("image", rule, drawing.name or "nothing", fix, file=name))
        elif image in contents.labelled and contents.labelled[image].drawing is None:
            unread += 1
        else:
            split = split_of(drawing.subset) or parse_path(image).split
            contents.add(Labelled(image, split, name, drawing), name)
    if unread:
        rule, fix = "an image has one label", 'nothing; or labels="cvat" reads the shapes'
        contents.rows.append(Row("", rule, f"{unread} images have label images, which are read", fix, WARNING, name))


def image_of(drawing: cvat.Drawing, folder: str, names: AbstractSet[str]) -> str | None:
    """The file of an annotated image: under images/ or next to the XML, in a folder of its subset or not."""
    called = drawing.name.replace("\\", "/")
    places = (("images", called), (called,), ("images", drawing.subset, called))
    found = (os.path.normpath("/".join((folder, *parts))) for parts in places)
    return next((name for name in found if name in names), None)
