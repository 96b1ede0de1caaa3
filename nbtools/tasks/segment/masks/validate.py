"""The validator: every rule that a folder of images and labels breaks, as one table, and how classes are balanced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from nbtools.data import WARNING, Refused, Row, bar, ordered, report, stage
from nbtools.table import plural, sized
from nbtools.tasks.segment.masks.choices import Choices
from nbtools.tasks.segment.masks.classes import BACKGROUND, IGNORE, Table
from nbtools.tasks.segment.masks.files import Found, Survey, surveyed
from nbtools.tasks.segment.masks.images import Recipe
from nbtools.tasks.segment.masks.naming import Given
from nbtools.tasks.segment.masks.pairs import examined


@dataclass(frozen=True)
class Report(report.Report):
    """What was found in so many images. balance: class → share of the packed pixels that are not ignored; ids: raw id →
    pixels of the label images that can be used."""

    images: int
    labelled: int
    size: tuple[int, int]
    balance: Mapping[str, float]
    ids: Mapping[int, int]


@dataclass(frozen=True)
class Looked:
    """One image with its label. pixels (256,): of each place, as packed; ids: raw id → pixels of the label's file."""

    rows: tuple[Row, ...]
    pixels: np.ndarray
    ids: Mapping[int, int]


def validate(
    source: str | Path,
    *,
    size: int | tuple[int, int] | None = None,
    fit: str = "auto",
    channels: int = 3,
    classes: Given | None = None,
    ignore: int | str | Iterable[int | str] | None = None,
    labels: str = "auto",
    progress: bool = True,
) -> Report:
    """Look at every image and every label of a folder, archive or link.

    Options as for `pack`: an error is what a pack with the same ones leaves out. Raises PackError where there is no
    image with a label, or no class table.
    """
    choices = Choices.of(size, fit, channels, classes, ignore, labels)
    folder = stage(source, progress=progress)
    survey = surveyed(folder, labels)
    recipe = Recipe.of(choices.decided(folder, survey))
    pixels, ids = np.zeros(IGNORE + 1, np.int64), Counter[int]()
    rows = list(survey.rows)
    with ThreadPoolExecutor() as pool:
        look = pool.map(partial(looked, folder, recipe), survey.pairs.values())
        for one in bar(look, "validating", len(survey.pairs), leave=False, disable=not progress):
            rows += one.rows
            pixels += one.pixels
            ids.update(one.ids)
    rows += remarks(survey, recipe.table, pixels, ids)
    valid = max(int(pixels[:IGNORE].sum()), 1)
    balance = {name: float(pixels[k]) / valid for k, name in enumerate(recipe.table.names)}
    about = described(survey, recipe, balance, float(pixels[IGNORE]) / max(int(pixels.sum()), 1))
    return Report(
        ordered(rows), about, survey.images, len(survey.pairs), recipe.size, balance, dict(sorted(ids.items()))
    )


def looked(folder: Path, recipe: Recipe, found: Found) -> Looked:
    try:
        seen, mask = examined(folder, found, recipe)
    except Refused as refusal:
        return Looked((refusal.row,), np.zeros(IGNORE + 1, np.int64), {})
    where = found.label if found.drawing is None else found.name
    rows = [row.at(found.name) for row in seen.rows] + [row.at(where) for row in mask.rows]
    return Looked(tuple(rows), np.bincount(mask.label.ravel(), minlength=IGNORE + 1), mask.ids)


def remarks(survey: Survey, table: Table, pixels: np.ndarray, ids: Mapping[int, int]) -> Iterator[Row]:
    """What only all labels together show."""
    if not pixels.any():
        return
    for k, one in enumerate(table.classes):
        if pixels[k] == 0:
            fix = "nothing, or annotate some; or leave it out of classes="
            if IGNORE in ids and table.lookup[IGNORE] == IGNORE:
                fix = f"if 255 means {one.name!r}: classes={{…, 255: {one.name!r}}}; 255 is ignored otherwise"
            yield Row("class", "every class has pixels", f"{one.id} {one.name}: none", fix, WARNING)
    drawn = any(found.drawing for found in survey.pairs.values())
    if drawn and not {name.casefold() for name in table.names} & {*BACKGROUND}:
        fix = f"nothing, if all of it is drawn; or put {BACKGROUND[0]!r} first in classes="
        yield Row("class", "what no shape covers has a class", "it is ignored", fix, WARNING)


def described(survey: Survey, recipe: Recipe, balance: Mapping[str, float], ignored: float) -> str:
    shares = ", ".join(f"{name} {share:.1%}" for name, share in balance.items())
    found = f"{plural(survey.images, 'image')}, {len(survey.pairs):,} with a label"
    return f"{found}, packed at {sized(*recipe.size)}; {shares}; ignored {ignored:.1%}"
