"""Which label belongs to which image of a folder, their splits, and what is wrong with that.

    images/a.jpg  labels/a.png                     or masks/; train/, val/ and test/ above or below either
    train/a.png   trainannot/a.png                 CamVid's
    train.txt     lines image,label                any names and separator; a header is allowed
    annotations.xml                                CVAT for images, next to the images or images/; see `cvat`

An image's label is the one that a list names, else the label image of its name, else its shapes in CVAT. Paths in a
list are relative to its folder or to one above it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os.path
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from nbtools import disk
from nbtools.data import IMAGES
from nbtools.errors import PackError
from nbtools.show import plural
from nbtools.tasks.common.files import walk
from nbtools.tasks.common.lists import decode_text, read_rows, slashed
from nbtools.tasks.common.report import WARNING, Refused, Row
from nbtools.tasks.segment import cvat
from nbtools.tasks.segment.classes import FILE

HEAD = 4096  # bytes of a text file that show what it is
FOLDER = re.compile(
    r"(?P<split>train|val|test)?(?:ing|id|idation)?[_-]?(?:(?P<image>images?)|(?P<label>labels?|masks?|annot))?"
    r"(?:[_-](?P<after>train|val|test)(?:ing|id|idation)?)?",
    re.I,
)
LIST = re.compile(r"(?:.*[^a-z])?(train|val|test)(?:ing|id|idation)?", re.I)


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
    return Parsed(name, split, is_label, (split, "/".join(rest), path.stem))


class Contents:
    """The contents of a folder by its names, lists and XML, without opening images.

    images: how many there are; labelled: by the image's name; document: the labels of CVAT's files; table: the file of
    the class table, if any; rows: what is wrong.

    Raises PackError without any image, DiskError for a file that cannot be read.
    """

    def __init__(self, folder: Path):
        self.labelled: dict[str, Labelled] = {}
        self.document = cvat.Document()
        self.rows: list[Row] = []
        with disk.explained(f"looking at {folder}", folder):
            self.folder, self.names = folder, walk(folder)
            self.files, self.paths = set(self.names), [parse_path(n) for n in self.names if n.lower().endswith(IMAGES)]
            tables = [name for name in self.names if PurePosixPath(name).name.lower() == FILE]
            self.table = min(tables, key=lambda name: (name.count("/"), name), default=None)
            heads = {name: self.head_of(name) for name in self.names if name.lower().endswith((".txt", ".csv", ".xml"))}
            for name, head in heads.items():
                if not name.lower().endswith(".xml") and is_list(head):
                    self.read_list(name)
            self.pair_by_name()
            for name, head in heads.items():
                if name.lower().endswith(".xml") and cvat.is_cvat(name, head):
                    self.read_annotations(name)
        for name, found in self.labelled.items():
            self.labelled[name] = dataclasses.replace(found, split=found.split or parse_path(name).split)
        self.images = self.count_images()

    def head_of(self, name: str) -> bytes:
        with open(self.folder / name, "rb") as file:
            return file.read(HEAD)

    def add(self, found: Labelled, where: str) -> None:
        """Take a labelled image, unless it has another label or split."""
        other = self.labelled.get(found.name, found)
        split = other.split or found.split
        if (other.label, other.drawing, split) == (found.label, found.drawing, found.split or split):
            self.labelled[found.name] = dataclasses.replace(found, split=split)
            return
        now, before = (f"{one.label} ({one.split or 'no split'})" for one in (found, other))
        rule, fix = "an image must have one label and one split", "delete the wrong one; the first is read"
        self.rows.append(Row("image", rule, f"{found.name}: {now}, before: {before}", fix, file=where))

    def pair_by_name(self) -> None:
        by_key: dict[bool, dict[tuple, Parsed]] = {True: {}, False: {}}
        for path in self.paths:
            other = by_key[path.is_label].setdefault(path.key, path)
            if other is not path:
                key = "label" if path.is_label else "image"
                rule, fix = f"{key}s must differ in more than their suffixes", "rename or delete one of them"
                self.rows.append(Row(key, rule, f"{other.name} next to it", fix, file=path.name))
        listed = {found.label for found in self.labelled.values()}
        for key, label in by_key[True].items():
            if image := by_key[False].get(key):
                if image.name not in self.labelled:
                    self.add(Labelled(image.name, image.split, label.name), label.name)
            elif label.name not in listed:
                fix = f"copy its image too, named {key[2]}, or delete it"
                self.rows.append(Row("image", "a label must have an image", "none with its name", fix, file=label.name))

    def count_images(self) -> int:
        """Count the images, and list those without a label."""
        labels = {found.label for found in self.labelled.values()}
        images = [path.name for path in self.paths if not path.is_label and path.name not in labels]
        if not images and not self.labelled:
            kinds = ", ".join(IMAGES[:5])
            raise PackError(f"{self.folder}: no images ({kinds} …). Give the folder above images/")
        known = self.labelled.keys() | {row.file for row in self.rows}
        fix, rule = "annotate it, add it to a list, or delete it", "an image must have a label"
        self.rows += [Row("label", rule, "none", fix, file=name) for name in images if name not in known]
        return len({*images, *self.labelled})

    # Lists

    def read_list(self, name: str) -> None:
        """Take the labels and splits of a list; lines that cannot be used become rows."""
        path = PurePosixPath(name)
        match = LIST.fullmatch(path.stem)
        split = match[1].lower() if match else parse_path(name).split
        try:
            rows = read_rows(decode_text((self.folder / name).read_bytes(), name), name, is_pair)
        except Refused as refusal:
            self.rows.append(refusal.row)
            return
        for i, cells in rows:
            given = (*cells, "")[:2]
            image, label = (self.find(cell, str(path.parent)) for cell in given)
            for key, cell, there in zip(("image", "label"), given, (image, label), strict=True):
                if there is None:
                    rule, fix = f"the {key} of a line must exist", "copy the file too, correct the line, or delete it"
                    self.rows.append(Row(key, rule, (cell or "nothing")[:120], fix, file=f"{name}:{i}"))
            if image and label:
                self.add(Labelled(image, split, label), f"{name}:{i}")

    def find(self, path: str, folder: str) -> str | None:
        """The file that a path in a list of this folder names, relative to it or above, never outside the source."""
        bases = (folder, *map(str, PurePosixPath(folder).parents))
        tries = (os.path.normpath("/".join((base, slashed(path)))) for base in bases)
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
            rule, fix = "an image should have one label", "nothing; or delete its label image, to read the shapes"
            value = f"{plural(unread, 'image')} with a label image, which is read"
            self.rows.append(Row("", rule, value, fix, WARNING, name))

    def image_of(self, drawing: cvat.Drawing, folder: str) -> str | None:
        """The file of an annotated image: under images/ or next to the XML, in a folder of its subset or not."""
        called = drawing.name.replace("\\", "/")
        places = (("images", called), (called,), ("images", drawing.subset, called))
        found = (os.path.normpath("/".join((folder, *parts))) for parts in places)
        return next((name for name in found if name in self.files), None)


def is_list(head: bytes) -> bool:
    """Whether a text file has a line of two images."""
    with contextlib.suppress(Refused):
        return any(is_pair(cells) for _, cells in read_rows(head.decode("utf-8-sig", "replace"), "", is_pair))
    return False


def is_pair(cells: list[str]) -> bool:
    """Whether a row is image, label."""
    return len(cells) > 1 and all(cell.lower().endswith(IMAGES) for cell in cells[:2])
