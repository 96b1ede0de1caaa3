"""Which label belongs to which image of a folder, their splits, and what is wrong with that.

    images/a.jpg  labels/a.png       or masks/; train/, val/ and test/ above or below either
    train/a.png   trainannot/a.png   CamVid's
    train.txt         lines image,label with any separator; paths from its folder, or from one above it, or absolute
                      ones of another machine; or lines of images alone, with or without folder and suffix: their
                      split, of any that has no other
    annotations.xml   CVAT for images, next to the images or to images/; see `cvat`

A list's label comes before a mask of the image's name, and that before CVAT's shapes.
"""

import os.path
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from nbtools.data import IMAGES, compose
from nbtools.tasks.common.files import decode_text, read_rows, split_of, split_word, walk, with_slashes
from nbtools.tasks.common.rules import Refused, Row
from nbtools.tasks.segment import cvat

SPLIT = r"(train|val|test)?(?:ing|id|idation)?"
FOLDER = re.compile(rf"{SPLIT}[_ -]?(?:images?|imgs?|(labels?|masks?|annot(?:ations?)?))?[_ -]?{SPLIT}", re.I)
LAYOUTS = "name masks/ as images/ are, write a list with lines image,label, or add CVAT's annotations.xml"


@dataclass(frozen=True)
class Item:
    """An image with its label. name, label: files of the source; drawing: CVAT's shapes, where the label is its XML."""

    name: str
    split: str | None
    label: str
    drawing: cvat.Drawing | None = None


class Source:
    """The contents of a folder by names, lists and XML, without opening images. items: by the image's name; rows: what
    is wrong; labels: CVAT's; names: as lists have them → the files'."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.items: dict[str, Item] = {}
        self.rows: list[Row] = []
        self.labels: list[str] = []
        self.splits: dict[str, str] = {}  # of images that a list names without their labels
        self.names = {compose(name): name for name in walk(folder)}
        self.bare = {bare(compose(name)): name for name in self.having(*IMAGES)}
        for name in self.having(".txt", ".csv"):
            self.read_list(name)
        self.pair()

    def having(self, *suffixes: str) -> list[str]:
        return [name for name in self.names.values() if name.lower().endswith(suffixes)]

    def add(self, item: Item, where: str) -> None:
        """Take a labelled image, unless it has another label or split."""
        other = self.items.setdefault(item.name, item)
        if other != item:
            now, before = (f"{one.label} ({one.split or 'no split'})" for one in (item, other))
            rule, fix = "an image must have one label and one split", "delete the wrong one; the first is read"
            self.rows.append(Row(where, f"{item.name}: {now}, before: {before}", rule, fix))

    def find(self, path: str, where: str) -> str | None:
        """Return the file that a path in a list or an XML names, relative to its folder or to one above it; an absolute
        path, as it was elsewhere, by its longest end that is here. A video's XML names its frames without `.png`."""
        path = with_slashes(path)
        parts = path.split("/")[1:] if re.match("([a-z]:)?/", path, re.I) else []
        ends = ["/".join(parts[k:]) for k in range(len(parts))] or [path]
        names = [compose(os.path.normpath(folder / end)) for end in ends for folder in PurePosixPath(where).parents]
        return next((known[name] for known in (self.names, self.bare) for name in names if name in known), None)

    def read_list(self, name: str) -> None:
        """Take the image and the label of each line; a text without such lines is no list."""
        rows, word = [], split_word(PurePosixPath(name).stem)
        try:
            rows = read_rows(decode_text((self.folder / name).read_bytes(), name), name, is_pair)
        except Refused as refusal:  # no text, or no CSV
            self.rows += [refusal.row(name)] * bool(word)
        if not any(is_pair(cells) for _, cells in rows):
            if word and len({*re.findall("train|val|test", PurePosixPath(name).stem.lower())}) == 1:  # not train_val
                self.read_names(name, rows, word)
            return
        for number, cells in rows:
            image, label = (self.find(cell, name) for cell in (*cells, "")[:2])
            if image and label and image != label:
                self.add(Item(image, word or parse_path(name)[0] or parse_path(image)[0], label), f"{name}:{number}")
            else:
                rule, fix = "image and label of a line must exist", "copy the files too, correct the line, or delete it"
                self.rows.append(Row(f"{name}:{number}", ",".join(cells)[:120], rule, fix))

    def read_names(self, name: str, rows: list[tuple[int, list[str]]], split: str) -> None:
        """Take the split of the image that each line names; sentences are no list, nor what names no image."""
        images, matches = defaultdict[str, list[str]](list), list[list[str]]()
        for image in (each for each in self.having(*IMAGES) if parse_path(each)[:2] in ((None, False), (split, False))):
            images[PurePosixPath(bare(image)).name].append(image)
        for _, cells in rows:
            line = f"/{bare(cells[0])}"
            some = [(f"/{bare(image)}", image) for image in images[PurePosixPath(line).name] if len(cells) == 1]
            matches.append([image for path, image in some if path.endswith(line) or line.endswith(path)])
        listed = 2 * sum(map(bool, matches)) >= len(rows) or not any(" " in cells[0] for _, cells in rows)
        for (number, cells), some in zip(rows if any(matches) and listed else (), matches, strict=False):
            if len(some) != 1 or self.splits.setdefault(some[0], split) != split:
                rule, fix = "a line must name one image, in one split", "correct it, add its folder, or delete it"
                self.rows.append(Row(f"{name}:{number}", f"{cells[0]}, of {len(some)} images", rule, fix))

    def pair(self) -> None:
        """Pair images with masks by their names, then with CVAT's shapes; what is left has no label, or no image."""
        parsed = {name: parse_path(name) for name in self.having(*IMAGES)}
        images = {key: name for name, (_, is_mask, key) in reversed(parsed.items()) if not is_mask}
        self.items = {n: replace(one, split=one.split or self.splits.get(n)) for n, one in self.items.items()}
        paired = "train" in [one.split for one in self.items.values()]  # then what no list names is left out
        named = "train" in self.splits.values()  # or what neither a list nor a folder gives a split
        for name, (split, is_mask, key) in parsed.items():
            image = images.get(key, "")
            if is_mask and image and (image in self.splits or not (paired or (named and not split))):
                self.items.setdefault(image, Item(image, self.splits.get(image, split), name))
        for name in self.having(".xml"):
            self.read_annotations(name)
        used = self.items.keys() | {item.label for item in self.items.values()}
        fix = "add the missing file, or delete this one" if self.items else LAYOUTS
        for name, (_, is_mask, key) in parsed.items():
            if name not in used:
                rule = "a label must have an image of its own" if is_mask else "an image must have a label"
                other = self.items.get(images.get(key, "")) if is_mask else None
                came = f"one with {other.label}" if other else "in no list" if paired or named else "none of that name"
                self.rows.append(Row(name, came, rule, fix))

    def read_annotations(self, name: str) -> None:
        try:
            labels, drawings = cvat.read(self.folder / name)
        except Refused as refusal:
            self.rows.append(refusal.row(name))
            return
        self.labels += [label for label in labels if label not in self.labels]
        for drawing in drawings:
            called = with_slashes(drawing.name)
            places = (f"images/{called}", called, f"images/{drawing.subset}/{called}")
            image = next(filter(None, (self.find(place, name) for place in places)), None)
            if image is None:
                fix = "copy the image too, next to the XML or into images/; or delete it from the XML"
                self.rows.append(Row(name, called or "nothing", "an annotated image must exist", fix))
            elif image not in self.items or self.items[image].drawing:
                split = self.splits.get(image) or split_word(drawing.subset) or parse_path(image)[0]
                self.add(Item(image, split, name, drawing), name)


def parse_path(name: str) -> tuple[str | None, bool, tuple[str | None, str, str]]:
    """Return the split that the path of an image names, whether it is a mask, and what its mask or image shares."""
    path, split, is_mask, rest = PurePosixPath(compose(name)), None, False, []
    for part in path.parts[:-1]:
        if match := FOLDER.fullmatch(part):
            split = (match[1] or match[3] or split or "").lower() or None
            is_mask = is_mask or match[2] is not None
        else:
            rest.append(part)
    return split or split_of(compose(name)), is_mask, (split, "/".join(rest), path.stem)


def bare(name: str) -> str:
    name = with_slashes(name)
    return name[: name.rfind(".")] if name.lower().endswith(IMAGES) else name


def is_pair(cells: list[str]) -> bool:
    return len(cells) > 1 and all(cell.lower().endswith(IMAGES) for cell in cells[:2])
