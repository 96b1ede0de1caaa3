"""One image and its label → a sample: image (H, W, C), label (H, W) and distance (H, W), all uint8."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nbtools.data import Refused, Row, Sample
from nbtools.errors import PackError
from nbtools.tasks.segment.masks.distance import distance_map
from nbtools.tasks.segment.masks.drawing import drawn
from nbtools.tasks.segment.masks.files import Found, Survey, surveyed
from nbtools.tasks.segment.masks.images import Picture, Recipe, picture
from nbtools.tasks.segment.masks.labels import Mask, mask


@dataclass(frozen=True)
class Pairs:
    """Reads a sample from its source files, whole, at each access: packs call it once an image, and `feed="workers"`
    at every step, as scripts do. labels: where they are. Picklable: a worker looks at the folder once by itself.
    """

    folder: Path
    labels: str = "auto"

    @cached_property
    def survey(self) -> Survey:
        return surveyed(self.folder, self.labels)

    def __call__(self, path: Path, options: Mapping[str, Any]) -> Sample:
        """Raises PackError(value, rule, fix) on what cannot be used."""
        name = Path(path).relative_to(self.folder).as_posix()
        found = self.survey.pairs.get(name)
        if found is None:
            raise PackError("none", "an image has a label", "annotate it, or pack again: the folder has changed")
        try:
            seen, label = examined(self.folder, found, Recipe.of(options))
        except Refused as refusal:
            raise told(refusal.row, name) from None
        return {"image": seen.pixels, "label": label.label, "distance": distance_map(label.label)}

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "labels": self.labels}


def read(path: Path, options: Mapping[str, Any]) -> Sample:
    """One image file → {"image": …} as the pack holds it, for predictions.

    Raises PackError(value, rule, fix) on what cannot be used.
    """
    return {"image": picture(Path(path), Recipe.of(options)).pixels}


def examined(folder: Path, found: Found, recipe: Recipe) -> tuple[Picture, Mask]:
    """An image and its label at the packed size. Raises Refused, whose row has its file."""
    try:
        seen = picture(folder / found.name, recipe)
    except Refused as refusal:
        raise Refused(refusal.row.at(found.name)) from None
    try:
        if found.drawing is None:
            return seen, mask(folder / found.label, recipe, seen.size)
        return seen, drawn(found.drawing, recipe, seen.size)
    except Refused as refusal:
        raise Refused(refusal.row.at(found.label if found.drawing is None else found.name)) from None


def told(row: Row, name: str) -> Refused:
    """With the label's file, where a table of bad samples has the image's."""
    return Refused(row if row.file == name else dataclasses.replace(row, value=f"{row.file}: {row.value}"))
