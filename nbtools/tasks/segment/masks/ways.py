"""What the ways of a folder's files say: which are images, which labels, of what split, and what belongs together."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nbtools import disk

HEAD = 4096  # bytes of a text file that tell what it is
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
TRAIN_IDS, ALL_IDS = "_labeltrainids.png", "_labelids.png"  # its 19 classes, where they were made, and all 34
# What Pascal VOC's, CVAT's, labelme's and Cityscapes' folders have beside images and labels of classes
APART = re.compile(
    r"(?:.*/)?(?:segmentationobject|segmentation(?:class|object)visualization|imagesets/(?!segmentation/)[^/]*)/.*"
    r"|.*_gt(?:fine|coarse)_(?:color|instance(?:train)?ids)\.png",
    re.I,
)


@dataclass(frozen=True)
class Way:
    """A file's name in parts. key: (split, folders that say neither split nor kind, stem): a pair's are equal."""

    name: str
    split: str | None
    is_label: bool
    key: tuple[str | None, str, str]


def deep(name: str) -> tuple[int, str]:
    return name.count("/"), name


def walked(folder: Path) -> Iterator[str]:
    """Every file's name from the folder on, through links as packing's own look at it; hidden ones, which systems leave
    behind, are none."""
    for item in disk.walk(folder):
        name = PurePosixPath(os.path.relpath(item.path, folder))
        if not any(part.startswith(".") or part == "__MACOSX" for part in name.parts):
            yield name.as_posix()


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
    return Way(name, split, is_label, (split, "/".join(rest), (MARK if is_label else IMAGE_MARK).sub("", way.stem)))


def ways_of(names: Iterable[str]) -> list[Way]:
    """The ways of images and labels. What is called as the image beside it, with a mark, is its label: a_mask.png."""
    ways = [way_of(name) for name in names if not APART.fullmatch(name)]
    images = {way.key for way in ways if not way.is_label}
    ways = [marked(way, images) for way in ways]
    trained = {way.key for way in ways if way.name.lower().endswith(TRAIN_IDS)}
    return [way for way in ways if way.key not in trained or not way.name.lower().endswith(ALL_IDS)]


def marked(way: Way, images: AbstractSet[tuple[str | None, str, str]]) -> Way:
    key = (*way.key[:2], MARK.sub("", way.key[2]))
    return way if way.is_label or key == way.key or key not in images else Way(way.name, way.split, True, key)


def split_named(text: str) -> str | None:
    """train, val or test where a folder's name, or a subset's, says so: Validation, val_images."""
    match = FOLDER.fullmatch(text)
    return ((match["split"] or match["after"] or "").lower() or None) if match else None
