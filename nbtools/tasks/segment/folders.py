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

import dataclasses
import os.path
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

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
HEADERS = ("image", "images", "file", "img", "image_path")
SAMPLED = 20  # lines that show whether a file is a list
ONE_NAME = "a line must be image,label, or name an image whose label has its name"
ONE_LABEL = "an image must have one label and one split"
FIRST_IS_READ = "delete the wrong one; the first is read"


@dataclass(frozen=True)
class Labelled:
    """An image with its label. name: relative to the source; label: the file that holds it; drawing: CVAT's shapes."""

    name: str
    split: str | None
    label: str
    drawing: cvat.Drawing | None = None


class Parsed(NamedTuple):
    """The path of an image file. key: (split, folders that give neither split nor kind, stem); an image and its label
    have the same."""

    name: str
    split: str | None
    is_label: bool
    key: tuple[str | None, str, str]


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


def parse_paths(names: Iterable[str]) -> list[Parsed]:
    """Images and labels. A file next to an image with its name and a suffix is its label: a_mask.png."""
    paths = [parse_path(name) for name in names if not OTHER_TASKS.fullmatch(name)]
    images = {path.key for path in paths if not path.is_label}
    for i, path in enumerate(paths):
        key = (*path.key[:2], MARK.sub("", path.key[2]))
        if not path.is_label and key != path.key and key in images:
            paths[i] = Parsed(path.name, path.split, True, key)
    trained = {path.key for path in paths if path.name.lower().endswith(TRAIN_IDS)}
    return [path for path in paths if path.key not in trained or not path.name.lower().endswith(ALL_IDS)]


class Contents:
    """The contents of a folder by its names, lists and XML, without opening images. labels: where they are; `auto`
    searches everywhere.

    images: how many there are; labelled: by the image's name; document: the labels of CVAT's files; table: the file of
    the class table, if any; rows: what is wrong.

    Raises PackError without any image, DiskError for a list that cannot be read.
    """

    def __init__(self, folder: Path, labels: str = "auto"):
        with disk.explained(f"looking at {folder}", folder):
            self.folder, self.names = folder, walk(folder)
        self.files, self.paths = set(self.names), parse_paths(n for n in self.names if n.lower().endswith(IMAGES))
        tables = [name for name in self.names if PurePosixPath(name).name.lower() in FILES]
        self.table = min(tables, key=lambda name: (name.count("/"), name), default=None)
        self.labelled: dict[str, Labelled] = {}
        self.document = cvat.Document()
        self.rows: list[Row] = []
        self.splits: dict[str, str] = {}  # of images in lists
        self.stems = self.known_stems()
        texts = [n for n in self.names if n.lower().endswith((".txt", ".csv", ".xml")) and not OTHER_TASKS.fullmatch(n)]
        with disk.explained(f"reading the lists of {folder}", folder):
            heads = {name: self.head_of(name) for name in texts}
            for name, head in heads.items():
                if self.is_list(name, head):
                    self.read_list(name, labels in ("auto", "lists"))
        if labels in ("auto", "images"):
            self.pair_by_name()
        if labels in ("auto", "cvat"):
            for name, head in heads.items():
                if name.lower().endswith(".xml") and cvat.is_cvat(name, head):
                    self.read_annotations(name)
        for name in self.labelled.keys() & self.splits.keys():
            self.labelled[name] = dataclasses.replace(self.labelled[name], split=self.splits[name])
        self.images = self.count_images()

    def add(self, found: Labelled, where: str) -> None:
        """Take a labelled image, unless it has another label."""
        other = self.labelled.setdefault(found.name, found)
        if (other.label, other.drawing) != (found.label, found.drawing):
            before = f"before: {other.label}" if other.label != found.label else "before: other shapes"
            value = f"{found.name}: {found.label}, {before}"
            self.rows.append(Row("image", ONE_LABEL, value, FIRST_IS_READ, file=where))

    def pair_by_name(self) -> None:
        by_key: dict[bool, dict[tuple, Parsed]] = {True: {}, False: {}}
        for path in self.paths:
            other = by_key[path.is_label].setdefault(path.key, path)
            if other is not path:
                key = "label" if path.is_label else "image"
                fix = "rename or delete one of them; labels lie in labels/, or are called a_mask.png next to a.jpg"
                rule = f"{key}s must differ in more than their suffixes"
                self.rows.append(Row(key, rule, f"{other.name} next to it", fix, file=path.name))
        listed = {found.label for found in self.labelled.values()}
        for key, label in by_key[True].items():
            if image := by_key[False].get(key):
                if image.name not in self.labelled:
                    self.add(Labelled(image.name, image.split, label.name), label.name)
            elif label.name not in listed:
                fix = f"copy its image too, named {key[2]}; or write a list of lines image,label; or delete it"
                self.rows.append(Row("image", "a label must have an image", "none with its name", fix, file=label.name))

    def count_images(self) -> int:
        """Count the images, and list those without a label."""
        labels = {found.label for found in self.labelled.values()}
        images = [path.name for path in self.paths if not path.is_label and path.name not in labels]
        if not images and not self.labelled:
            there = f"; it has {', '.join(self.names[:3])}" if self.names else "; it is empty"
            kinds = ", ".join(IMAGES[:5])
            raise PackError(f"{self.folder}: no images ({kinds} …){there}. Give the folder above images/")
        known = self.labelled.keys() | {row.file for row in self.rows}
        fix, rule = "annotate it, add it to a list, or delete it", "an image must have a label"
        self.rows += [Row("label", rule, "none", fix, file=name) for name in images if name not in known]
        return len({*images, *self.labelled})

    # Lists

    def known_stems(self) -> dict[str, str]:
        """Stem → the one image that has it; if there are several, the one that has a label."""
        labels, found = {path.key for path in self.paths if path.is_label}, {}
        for path in self.paths:
            if not path.is_label:
                found.setdefault(PurePosixPath(path.name).stem, []).append(path)
        for stem, several in found.items():
            found[stem] = several if len(several) == 1 else [path for path in several if path.key in labels]
        return {stem: some[0].name for stem, some in found.items() if len(some) == 1}

    def head_of(self, name: str) -> bytes:
        with open(self.folder / name, "rb") as file:
            return disk.read(file, HEAD)

    def is_list(self, name: str, head: bytes) -> bool:
        """Whether a text file is a list: by a line of two images; or by its name and a line of one, or its stem."""
        if name.lower().endswith(".xml"):
            return False
        coding = "utf-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"  # PowerShell's > writes UTF-16
        lines = [cells(line) for line in head.decode(coding, "replace").splitlines()[:SAMPLED]]
        if any(is_image(image) and is_image(label) for image, label in lines):
            return True
        named = LIST.fullmatch(PurePosixPath(name).stem) is not None
        return named and any(is_image(i) or is_image(label) or i in self.stems for i, label in lines)

    def read_list(self, name: str, with_labels: bool) -> None:
        """Take the labels and splits of a list; lines that cannot be used become rows."""
        path = PurePosixPath(name)
        match = LIST.fullmatch(path.stem)
        split = match[1].lower() if match and match[1].lower() in SPLITS else parse_path(name).split
        try:
            text = decode_text((self.folder / name).read_bytes(), name)
        except Refused as refusal:
            self.rows.append(refusal.row)
            return
        for i, line in enumerate(text.splitlines(), 1):
            where, (image, label) = f"{name}:{i}", cells(line)
            if not line.strip() or (i == 1 and image.casefold() in HEADERS):
                continue
            given = {"image": image} if label is None else {"image": image, "label": label}
            found = {key: self.find(cell, str(path.parent)) for key, cell in given.items()}
            if label is None:
                stem = PurePosixPath(image).stem if is_image(image) else image
                found["image"] = found["image"] or self.stems.get(stem)
            for key in [key for key, there in found.items() if there is None]:
                rule = f"the {key} of a line must exist" if label else ONE_NAME
                fix = "copy the file too, correct the line, or delete it"
                self.rows.append(Row(key, rule, (given[key] or "nothing")[:120], fix, file=where))
            if (known := found["image"]) is None or None in found.values():
                continue
            if split is not None and self.splits.setdefault(known, split) != split:
                value = f"{known}: {split}, before: {self.splits[known]}"
                self.rows.append(Row("image", ONE_LABEL, value, FIRST_IS_READ, file=where))
            elif with_labels and (file := found.get("label")):
                self.add(Labelled(known, parse_path(known).split, file), where)

    def find(self, path: str, folder: str) -> str | None:
        """The file that a path in a list of this folder names, relative to it or above, never outside the source."""
        bases = (folder, *map(str, PurePosixPath(folder).parents))
        parts = [part for part in path.replace("\\", "/").split("/") if part]
        tries = (os.path.normpath("/".join((base, *parts[i:]))) for i in range(len(parts)) for base in bases)
        return next((name for name in tries if name in self.files), None)

    # CVAT

    def read_annotations(self, name: str) -> None:
        """The images of one CVAT file, unless they have a label by a list or a label image."""
        try:
            document = cvat.parse(self.folder / name, name)
        except Refused as refusal:
            self.rows.append(refusal.row)
            return
        known, unread = {label for label, _ in self.document.labels}, 0
        self.document.labels += [label for label in document.labels if label[0] not in known]
        for drawing in document.drawings:
            image = self.image_of(drawing, str(PurePosixPath(name).parent))
            if image is None:
                fix = "copy the image too, next to the XML or into images/; or delete it there"
                rule = "an annotated image must exist"
                self.rows.append(Row("image", rule, drawing.name or "nothing", fix, file=name))
            elif image in self.labelled and self.labelled[image].drawing is None:
                unread += 1
            else:
                split = parse_path(f"{drawing.subset}/_").split or parse_path(image).split
                self.add(Labelled(image, split, name, drawing), name)
        if unread:
            rule, fix = "an image should have one label", 'nothing; or labels="cvat" reads the shapes'
            value = f"{unread} images have label images, which are read"
            self.rows.append(Row("", rule, value, fix, WARNING, name))

    def image_of(self, drawing: cvat.Drawing, folder: str) -> str | None:
        """The file of an annotated image: under images/ or next to the XML, in a folder of its subset or not."""
        called = drawing.name.replace("\\", "/")
        places = (("images", called), (called,), ("images", drawing.subset, called))
        found = (os.path.normpath("/".join((folder, *parts))) for parts in places)
        return next((name for name in found if name in self.files), None)


def is_image(cell: str | None) -> bool:
    return (cell or "").strip().lower().endswith(IMAGES)


def cells(line: str) -> tuple[str, str | None]:
    """(image, label or None) of a line: up to the first comma, else up to the first blank after an image's name."""
    first, comma, rest = line.partition(",")
    if not comma:
        parts = re.split(r"(?<=\.\w{3})\s+|(?<=\.\w{4})\s+", line.strip(), maxsplit=1)
        first, rest = parts[0], parts[1] if len(parts) == 2 else ""
    return first.strip().strip('"'), rest.strip().strip('"') or None
