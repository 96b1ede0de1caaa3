"""What a folder of images holds: which label belongs to which image, their splits, and what is wrong with that.

    images/a.jpg  labels/a.png                     or masks/; train/, val/ and test/ above or below either
    train/a.png   trainannot/a.png                 CamVid's and SegNet's
    train.txt     of lines image,label             any names; see `lists`
    annotations.xml                                CVAT for images, beside the images or images/; see `cvat`

An image's label is the one that a list names, else the label image of its name, else what was drawn in CVAT.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from nbtools import disk
from nbtools.errors import PackError
from nbtools.report import WARNING, Refused, Row
from nbtools.tasks.segment.masks import cvat, lists
from nbtools.tasks.segment.masks.classes import FILES
from nbtools.tasks.segment.masks.images import SUFFIXES

LABELS = ("auto", "lists", "images", "cvat")
HEAD = 4096  # bytes of a text file that tell what it is
FOLDER = re.compile(
    r"(?P<split>train|val|test)?(?:ing|id|idation)?[_-]?"
    r"(?:(?P<image>images?|imgs?|jpegimages)|(?P<label>labels?|masks?|annot(?:ation)?s?|segmentationclass|gt))?"
    r"(?:[_-](?P<after>train|val|test)(?:ing|id|idation)?)?",
    re.I,
)
MARK = re.compile(r"[_-](?:mask|label|seg|gt)s?$", re.I)  # at the end of a label's name: a_mask.png is a.jpg's


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
            rule, fix = "an image has one label and one split", "delete the wrong one; the first is read"
            self.rows.append(Row("image", rule, f"{found.name}: {said[0]}, before: {said[1]}", fix, file=where))


@dataclass(frozen=True)
class Way:
    """A file's name in parts. key: (split, folders that say neither split nor kind, stem): a pair's are equal."""

    name: str
    split: str | None
    is_label: bool
    key: tuple[str | None, str, str]


def surveyed(folder: Path, labels: str = "auto") -> Survey:
    """Look at names, lists and XML, not into images. labels: where they are, `auto` looks everywhere.

    Raises PackError where there is no image, DiskError for a list that cannot be read.
    """
    names = sorted(walked(folder))
    survey = Survey(table=next((n for n in sorted(names, key=deep) if PurePosixPath(n).name.lower() in FILES), None))
    ways = [way_of(name) for name in names if name.lower().endswith(SUFFIXES)]
    with disk.explained(f"reading the lists of {folder}", folder):
        texts = [(name, head_of(folder / name)) for name in names if name.lower().endswith((".txt", ".csv", ".xml"))]
        if labels in ("auto", "lists"):
            listed(folder, [name for name, head in texts if lists.is_list(name, head)], names, survey)
    if labels in ("auto", "images"):
        beside(ways, survey)
    documents = [name for name, head in texts if name.lower().endswith(".xml") and cvat.is_cvat(head)]
    if labels in ("auto", "cvat"):
        for name in documents:
            annotated(folder, name, set(names), survey)
    labelled = {found.label for found in survey.pairs.values()}
    images = [way.name for way in ways if not way.is_label and way.name not in labelled]
    survey.images = len({*images, *survey.pairs})
    if not survey.images:
        there = f"; it has {', '.join(names[:3])}" if names else "; it is empty"
        raise PackError(f"{folder}: no images ({', '.join(SUFFIXES[:5])} …){there}. Give the folder above images/")
    fix = "annotate it, add it to a list, or delete it"
    alone = (Row("label", "an image has a label", "none", fix, file=n) for n in images if n not in survey.pairs)
    survey.rows += alone
    return survey


def deep(name: str) -> tuple[int, str]:
    return name.count("/"), name


def walked(folder: Path) -> Iterator[str]:
    """Every file's name from the folder on; hidden ones, which systems leave behind, are none."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not hidden(name)]
        way = Path(place).relative_to(folder)
        yield from ((way / name).as_posix() for name in names if not hidden(name))


def hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def head_of(path: Path) -> bytes:
    with open(path, "rb") as file:
        return disk.read(file, HEAD)


def way_of(name: str) -> Way:
    """What the folders on a file's way say of it."""
    way, split, is_label, rest = PurePosixPath(name), None, False, []
    for part in way.parts[:-1]:
        if match := FOLDER.fullmatch(part):
            split = (match["split"] or match["after"] or split or "").lower() or None
            is_label = is_label or match["label"] is not None
        else:
            rest.append(part)
    stem = MARK.sub("", way.stem) if is_label else way.stem
    return Way(name, split, is_label, (split, "/".join(rest), stem))


def beside(ways: Iterable[Way], survey: Survey) -> None:
    """Images and the label images of their names."""
    images: dict[tuple, Way] = {}
    labels: dict[tuple, Way] = {}
    for way in ways:
        other = (labels if way.is_label else images).setdefault(way.key, way)
        if other is not way:
            key = "label" if way.is_label else "image"
            fix = "rename or delete one of them: labels are found by the image's name"
            survey.rows.append(Row(key, f"names of {key}s differ", f"beside {other.name}", fix, file=way.name))
    for key, label in labels.items():
        if key in images:
            image = images[key]
            if image.name not in survey.pairs:
                survey.add(Found(image.name, image.split, label.name), label.name)
        elif label.name not in {found.label for found in survey.pairs.values()}:
            fix = f"copy its image too, called {key[2]}, or delete it"
            survey.rows.append(Row("image", "a label has an image", "none of its name", fix, file=label.name))


def listed(folder: Path, files: Iterable[str], names: Iterable[str], survey: Survey) -> None:
    known = set(names)
    for name in files:
        match = lists.NAME.fullmatch(PurePosixPath(name).stem)
        said = match[1].lower() if match else ""
        split = said if said in ("train", "val", "test") else way_of(name).split
        try:
            text = (folder / name).read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            survey.rows.append(Row("", "a list is text in UTF-8", str(error)[:80], "save it as UTF-8", file=name))
            continue
        for line in lists.read_list(text, name, known):
            if isinstance(line, Row):
                survey.rows.append(line)
            else:
                survey.add(Found(line.image, split, line.label), line.where)


def annotated(folder: Path, name: str, names: set[str], survey: Survey) -> None:
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
            split = FOLDER.fullmatch(drawing.subset)
            survey.add(
                Found(image, ((split and split["split"]) or "").lower() or way_of(image).split, name, drawing), name
            )
    if unread:
        rule, fix = "an image has one label", 'nothing; or labels="cvat" reads the shapes'
        survey.rows.append(Row("", rule, f"{unread} images have label images, which are read", fix, WARNING, name))


def image_of(drawing: cvat.Drawing, folder: str, names: set[str]) -> str | None:
    """The file of an annotated image: below images/ or beside the XML, in a folder of its subset or not."""
    below: Callable[..., str] = lambda *parts: os.path.normpath("/".join((folder, *parts)))  # noqa: E731
    ways = (("images", drawing.name), (drawing.name,), ("images", drawing.subset, drawing.name))
    return next((way for parts in ways if (way := below(*parts)) in names), None)
