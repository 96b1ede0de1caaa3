"""A folder of images by class, `class/*.png`, in splits of its own or not, as Datasets.

What a folder is follows from what it holds: hidden ones, __MACOSX and those without images do not count.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from nbtools import disk
from nbtools.data.images import IMAGES, open_image
from nbtools.data.progress import say
from nbtools.errors import PackError
from nbtools.show import plural

SPLIT = re.compile(r"(?<![a-z])(?:(train)(?:ing)?|(val)(?:id|idation)?|(test)(?:ing)?)(?![a-z])", re.I)


def split_word(name: str) -> str | None:
    """Return train, val or test where a name has it as a word, also as training_set, valid, seg_test."""
    match = SPLIT.search(name)
    return next(word.lower() for word in match.groups() if word) if match else None


class Images(Dataset):
    """Images by class, `class/*.png`. files: relative to root; front: what their names in the pack begin with; skip:
    how many folders come before the class; bad: the rows of files that cannot be used."""

    def __init__(self, root: Path, files: Iterable[str], skip: int, front: str = ""):
        self.root, self.skip, self.files, self.bad = root, skip, [], []
        for name in sorted(files):
            if name.count("/") == skip:
                rule, fix = "images must lie in class folders, class/*.png", "move it into one, or away"
                self.bad.append((front + name, "a loose file", rule, fix))
            elif not name.lower().endswith(IMAGES):
                rule = f"images must end in {', '.join(IMAGES)}"
                self.bad.append((front + name, Path(name).suffix or "no suffix", rule, "convert it, or move it away"))
            else:
                self.files.append(name)
        self.names = [front + name for name in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def label(self, i: int) -> str:
        """Return the class: composed, since macOS writes é as e and an accent."""
        return unicodedata.normalize("NFC", self.files[i].split("/")[self.skip])

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"image": open_image(self.root / self.files[i]), "y": self.label(i)}


def image_folders(root: Path, split: str | None, one: bool = False) -> list[tuple[str | None, Images]]:
    """Return (split, images by class) of a folder of classes, or of its folders train, val and test; what is left out
    of these is said; one: it may be of one class. Raises PackError where images do not lie in class folders."""
    start = len(str(root)) + 1
    names = [Path(item.path).as_posix()[start:] for item in disk.walk(root)]
    names = [name for name in names if not any(part[0] == "." or part == "__MACOSX" for part in name.split("/"))]
    pictured = {name.rpartition("/")[0] for name in names if name.lower().endswith(IMAGES)}
    names = [name for name in names if name.rpartition("/")[0] in pictured]
    front = descend(names, "")
    folders = {top: split_word(top) for top in tops(names, front)}
    deep = [top for top, word in folders.items() if word and tops(names, f"{front}{top}/")]
    if split or "train" not in {folders[top] for top in deep}:
        if not folders or (len(folders) == 1 and not split and not one):
            came = f"one folder, {next(iter(folders))!r}" if folders else "no folder with images"
            raise PackError(f"{root} must hold a folder of images for each class, got {came}; name the folder above")
        return [(split, Images(root, below(names, front), front.count("/"), f"{split}/" if split else ""))]
    if left_out := sorted(folders.keys() - deep):
        count = sum(len(below(names, f"{front}{top}/")) for top in left_out)
        listed = ", ".join(f"{front}{top}" for top in left_out)
        listed = f"{listed} beside {front}{deep[0]} is no split with a folder for each class"
        say(f"{plural(count, 'file')} left out: {listed}")
    fronts = {top: descend(names, f"{front}{top}/") for top in deep}
    parts = [(folders[top], Images(root, below(names, each), each.count("/"))) for top, each in fronts.items()]
    return parts if len({word for word, _ in parts}) > 1 else [(None, images) for _, images in parts]


def below(names: Iterable[str], front: str) -> list[str]:
    return [name for name in names if name.startswith(front)]


def tops(names: Iterable[str], front: str) -> list[str]:
    """Return the folders directly below a place."""
    rest = (name[len(front) :] for name in below(names, front))
    return sorted({name.partition("/")[0] for name in rest if "/" in name})


def descends(names: Iterable[str], front: str) -> bool:
    """Return whether a folder holds images in folders of its own, and none directly."""
    inside = below(names, front)
    return bool(inside) and all("/" in name[len(front) :] for name in inside)


def descend(names: Iterable[str], front: str) -> str:
    """Return the place where the classes are: below folders that hold nothing but another one of folders."""
    while len(found := tops(names, front)) == 1 and descends(names, f"{front}{found[0]}/"):
        front += f"{found[0]}/"
    return front
