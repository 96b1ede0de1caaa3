"""A folder of images by class, `class/*.png`, in splits of its own or not, as Datasets.

What a folder is follows from the images that it holds: hidden ones and those in __MACOSX do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from nbtools import disk
from nbtools.data.build import fingerprint
from nbtools.data.images import IMAGES, open_image
from nbtools.data.items import TARGET, composed
from nbtools.data.progress import say
from nbtools.errors import PackError
from nbtools.show import plural

SPLIT = re.compile(r"(?<![a-z])(?:(train)(?:ing)?|(val)(?:id|idation)?|(test)(?:ing)?)(?![a-z])", re.I)


def split_word(name: str) -> str | None:
    """Return train, val or test where a name has it as a word, also as training_set, valid, seg_test."""
    match = SPLIT.search(name)
    return match[match.lastindex or 0].lower() if match else None


class Images(Dataset):
    """The images of the class folders in a place below root; front: what their names in the pack begin with."""

    def __init__(self, root: Path, names: Iterable[str], place: str, front: str = ""):
        start = len(place)
        self.root = root
        self.files = [name for name in sorted(names) if name.startswith(place) and "/" in name[start:]]
        self.names = [front + name for name in self.files]
        self.targets = [composed(name[start:].split("/")[0]) for name in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"image": open_image(self.root / self.files[i]), TARGET: self.targets[i]}

    def content(self) -> bytes:
        """Return what identifies its files."""
        return fingerprint("images", self.root, {}).encode()


def image_folders(root: Path, split: str | None, one: bool, progress: bool) -> list[tuple[str | None, Images]]:
    """Return (split, images by class) of a folder of classes, or of its folders train, val and test; what is left out
    is said. one: there may be one class. Raises PackError where images do not lie in class folders."""
    files = [Path(entry.path).relative_to(root).as_posix() for entry in disk.walk(root)]
    files = [name for name in files if not any(part[0] == "." or part == "__MACOSX" for part in name.split("/"))]
    names = [name for name in files if name.lower().endswith(IMAGES)]
    place = descend(names, "")
    words = {folder: split_word(folder) for folder in inside(names, place)}
    deep = {folder: word for folder, word in words.items() if word and inside(names, f"{place}{folder}/")}
    parts: list[tuple[str | None, Images]]
    if split is None and "train" in deep.values():
        parts = [(word, Images(root, names, descend(names, f"{place}{folder}/"))) for folder, word in deep.items()]
        parts = parts if len({*deep.values()}) > 1 else [(None, images) for _, images in parts]
    elif len(words) > 1 or (words and (split is not None or one)):
        parts = [(split, Images(root, names, place, f"{split}/" if split else ""))]
    else:
        came = f"one folder, {min(words)!r}" if words else "no folder with images"
        raise PackError(f"{root} must hold a folder of images for each class, got {came}; name the folder above")
    if progress and (left_out := sorted({*files}.difference(*(images.files for _, images in parts)))):
        say(f"{plural(len(left_out), 'file')} left out, such as {left_out[0]}: no images in a folder for their class")
    return parts


def inside(names: Iterable[str], place: str) -> list[str]:
    """Return the folders directly below a place."""
    rest = (name[len(place) :] for name in names if name.startswith(place))
    return sorted({name.partition("/")[0] for name in rest if "/" in name})


def descend(names: list[str], place: str) -> str:
    """Return the place where the classes are: below folders that hold nothing but another one of folders."""
    while len(only := inside(names, place)) == 1:
        below = f"{place}{only[0]}/"
        if not all("/" in name[len(below) :] for name in names if name.startswith(below)):
            break
        place = below
    return place
