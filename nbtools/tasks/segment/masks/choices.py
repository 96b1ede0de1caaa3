"""How files become samples: what a person chose, and for the rest what the files say."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from nbtools.data import ERROR
from nbtools.errors import PackError
from nbtools.table import plural
from nbtools.tasks.segment.masks.classes import IGNORE, MOST_CLASSES, OF_TWO, Class, Table, table_of
from nbtools.tasks.segment.masks.files import LABELS, Survey
from nbtools.tasks.segment.masks.images import FITS, Size, opened, size_of
from nbtools.tasks.segment.masks.labels import raw_ids
from nbtools.tasks.segment.masks.naming import Given, given

MIXED = 384, 384  # pixels that images of many sizes are brought to: the guide's
LARGEST = 1024 * 2048  # pixels of images that are packed as they are: Cityscapes'
LEAST, MOST = 32, 4096  # pixels of a side


@dataclass(frozen=True)
class Choices:
    """What `pack` and `validate` were asked for; None and `auto` are left to the files."""

    size: Size | None
    fit: str
    channels: int
    classes: tuple[Class, ...] | None
    ignore: tuple[int | str, ...]
    labels: str

    @classmethod
    def of(
        cls,
        size: int | tuple[int, int] | None,
        fit: str,
        channels: int,
        classes: Given | None,
        ignore: int | str | Iterable[int | str] | None,
        labels: str,
    ) -> Self:
        """Raises PackError for what cannot be, without a look at the source."""
        sides = size if isinstance(size, tuple | list) else (size, size)
        if size is not None and (len(sides) != 2 or not all(type(s) is int and LEAST <= s <= MOST for s in sides)):
            raise PackError(
                f"size must be (height, width) in pixels, {LEAST} to {MOST} each, or one side, got {size!r}"
            )
        for name, value, known in (("fit", fit, ("auto", *FITS)), ("labels", labels, LABELS)):
            if value not in known:
                raise PackError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if channels not in (3, 4) or isinstance(channels, bool):
            raise PackError(f"channels must be 3 (RGB) or 4 (RGBA), got {channels!r}")
        both = None if size is None else (sides[0], sides[1])
        entries = None if classes is None else tuple(given(classes))
        return cls(both, fit, channels, entries, several(ignore), labels)  # type: ignore[arg-type]

    @property
    def key(self) -> dict[str, Any]:
        """As JSON takes it: packs of other choices are other packs."""
        return dataclasses.asdict(self)

    def decided(self, folder: Path, survey: Survey) -> dict[str, Any]:
        """A pack's options: with all that was left open. Looks into images for sizes, and into labels for ids, where
        nothing else tells them.

        Raises PackError where no image has a label, or there is no class table.
        """
        if not survey.pairs:
            raise PackError(unlabelled(folder, survey))
        one = False
        if self.size is None:
            found = sizes(folder, survey)
            height, width = size_for(found)
            one = set(found) == {(height, width)}
        else:
            height, width = self.size
        fit = ("same" if one else "pad") if self.fit == "auto" else self.fit
        options = self.table(folder, survey).options
        return {"size": [height, width], "channels": self.channels, "fit": fit, **options}

    def table(self, folder: Path, survey: Survey) -> Table:
        """The class table: what was given, else the source's file, else CVAT's labels, else the ids of the labels."""
        if self.classes is not None:
            return table_of(self.classes, self.ignore)
        if survey.table is not None:
            return table_of(given(folder / survey.table), self.ignore)
        if any(found.drawing for found in survey.pairs.values()):
            return table_of(survey.document.classes, self.ignore)
        return table_of([Class(i, f"class {i}") for i in found_ids(folder, survey)], self.ignore)


def several(ignore: int | str | Iterable[int | str] | None) -> tuple[int | str, ...]:
    """Raises PackError for what is no id and no name."""
    every: Any = () if ignore is None else (ignore,) if isinstance(ignore, int | str) else ignore
    try:
        found = tuple(one if isinstance(one, str | bool) else operator.index(one) for one in every)
    except TypeError:
        found = (True,)
    if any(isinstance(one, bool) for one in found):
        raise PackError(f"ignore must be raw ids, or names of classes, got {ignore!r}")
    return found


def unlabelled(folder: Path, survey: Survey) -> str:
    for row in survey.rows:
        if row.severity == ERROR and row.value != "none":
            value, rule, fix = row.reasons
            return f"{folder}: no image has a label. The first fault: {row.file}: {rule}, got {value}; {fix}"
    return (
        f"{folder}: {plural(survey.images, 'image')} and no label: put label images of the same names into labels/ "
        "beside images/, or a_mask.png beside a.jpg, or write train.txt of lines image,label, or export CVAT for "
        "images 1.1 as annotations.xml"
    )


def sizes(folder: Path, survey: Survey) -> Counter[Size]:
    """(height, width) → images, by the headers of all that can be opened."""

    def size(name: str) -> Size | None:
        try:
            with opened(folder / name, "image") as image:
                return size_of(image)
        except PackError:
            return None

    with ThreadPoolExecutor() as pool:
        return Counter(filter(None, pool.map(size, survey.pairs)))


def size_for(found: Mapping[Size, int]) -> Size:
    """Their own where all have one size, of which a network can make something."""
    [size, *others] = found or [MIXED]
    fits = min(size) >= LEAST and size[0] * size[1] <= LARGEST
    return size if not others and fits else MIXED


def found_ids(folder: Path, survey: Survey) -> list[int]:
    """The ids of all labels but 255; of 16-bit ones only where there are no others, as one stray depth map is enough.

    Raises PackError for more than can be classes: those labels are pictures, or smoothed.
    """
    ids: dict[bool, Counter[int]] = {False: Counter(), True: Counter()}
    most = ("", 0)
    files = [found.label for found in survey.pairs.values()]
    with ThreadPoolExecutor() as pool:
        for name, (found, wide) in zip(files, pool.map(lambda name: raw_ids(folder / name), files), strict=True):
            ids[wide].update(found)
            most = max(most, (name, len(found)), key=lambda one: one[1])
    known = sorted({*(ids[False] or ids[True])} - {IGNORE})
    if len(known) > MOST_CLASSES:
        raise PackError(
            f"{folder}: labels have {len(known)} different ids, {most[0]} alone {most[1]}, and a pack has at most "
            f"{MOST_CLASSES} classes: are they pictures, or smoothed? Give classes=, and `validate` names them"
        )
    if len(known) < 2:
        raise PackError(
            f"{folder}: labels have {len(known)} different ids beside {IGNORE}, which is ignored"
            f"{f': {known[0]}' if known else ''}; there is nothing to tell apart. {OF_TWO}; labels of "
            "colours by classes= a file of names and colours"
        )
    return known
