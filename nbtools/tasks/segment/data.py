"""Images with labels → pack: image (H, W, C), label (H, W) and distance (H, W), all uint8 and of one size.

label: class indices, 255 where a pixel is ignored. distance: eighths of a pixel to the nearest class boundary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin

from nbtools import disk
from nbtools.data import Card, Entry, Pack, Sample, Survey, bar, build_pack, stage
from nbtools.errors import PackError
from nbtools.table import plural, sized
from nbtools.tasks.common import report
from nbtools.tasks.common.files import UNREADABLE, in_threads, open_image
from nbtools.tasks.common.report import ERROR, WARNING, Refused, Row, ordered
from nbtools.tasks.segment import cvat
from nbtools.tasks.segment.classes import (
    BACKGROUND,
    IGNORE,
    MOST_CLASSES,
    TWO_CLASSES,
    Class,
    Given,
    Table,
    class_table,
    parse_classes,
)
from nbtools.tasks.segment.files import LABELS, Contents, Labelled, contents_of
from nbtools.tasks.segment.images import FITS, Mask, Picture, Recipe, Size, raw_ids, read_image, read_mask, size_of
from nbtools.tasks.segment.scores import distance_map

MIXED = 384, 384  # pixels to which images of several sizes are scaled: the guide's
LARGEST = 1024 * 2048  # pixels of images that are packed at their own size: Cityscapes'
LEAST, MOST = 32, 4096  # pixels of a side
Ignored = int | str | Iterable[int | str] | None


def pack(
    source: str | Path,
    *,
    size: int | tuple[int, int] | None = None,
    fit: str = "auto",
    channels: int = 3,
    classes: Given | None = None,
    ignore: Ignored = None,
    labels: str = "auto",
    val: float = 0.1,
    test: float = 0.1,
    into: str | Path | None = None,
    progress: bool = True,
) -> Pack:
    """The pack of images with labels, from a folder, archive or link. A second call opens the finished pack, and
    interrupted packing resumes. Needs scipy for the distances to the class boundary.

    size: (height, width) or one side, in pixels; by default the images' own if they have one size, else 384 × 384.
    fit: `pad` scales to fit inside and leaves the rest 0, and ignored; `stretch` scales each side by itself; `same`
    takes images of exactly this size; `auto` is `same` if no size is given and all have one, else `pad`.
    channels: 3 (transparency lies on white) or 4 (RGBA). classes: names, in order of their ids from 0; or a mapping
    id → name; or a file, see `classes.py`; by default the file `classes.txt` of the source, else the labels of CVAT's
    file, else the ids in the label images. ignore: raw ids, or names, that are no class, besides 255, which is none
    unless `classes` names it. labels: `lists`, `images` or `cvat` if a source has several.
    val, test: shares, or whole numbers for exactly so many; the source's own folders and lists come first.
    Raises PackError if nothing can be used. What is wrong with single files, `validate` reports too.
    """
    asked = requested(size, fit, channels, classes, ignore, labels)
    reader = cache(partial(Reader, labels=labels))  # surveys the folder once, for the pack and for its samples

    def found(folder: Path, asked: Mapping[str, Any]) -> Survey:
        return survey(folder, asked, reader(folder).contents)

    more = {"val": val, "test": test, "into": into, "progress": progress}
    return build_pack(source, "segment", asked, found, read, reader=reader, **more)


def requested(
    size: int | tuple[int, int] | None,
    fit: str,
    channels: int,
    classes: Given | None,
    ignore: Ignored,
    labels: str,
) -> dict[str, Any]:
    """The options of `pack` and `validate` as plain values; None and `auto` are left to the files.

    Raises PackError for what is impossible, without a look at the source.
    """
    sides = size if isinstance(size, tuple | list) else (size, size)
    if size is not None and (len(sides) != 2 or not all(type(s) is int and LEAST <= s <= MOST for s in sides)):
        raise PackError(f"size must be (height, width) in pixels, {LEAST} to {MOST} each, or one side, got {size!r}")
    for name, value, known in (("fit", fit, ("auto", *FITS)), ("labels", labels, LABELS)):
        if value not in known:
            raise PackError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if channels not in (3, 4) or isinstance(channels, bool):
        raise PackError(f"channels must be 3 (RGB) or 4 (RGBA), got {channels!r}")
    entries = None if classes is None else [dataclasses.astuple(one) for one in parse_classes(classes)]
    return {
        "size": None if size is None else list(sides),
        "fit": fit,
        "channels": channels,
        "classes": entries,
        "ignore": ignored(ignore),
        "labels": labels,
    }


def ignored(ignore: Ignored) -> list[int | str]:
    """Raises PackError for what is no id and no name."""
    with contextlib.suppress(TypeError):
        every: list[Any] = [] if ignore is None else [ignore] if isinstance(ignore, int | str) else list(ignore)
        if not any(isinstance(one, bool) for one in every):
            return [one if isinstance(one, str) else operator.index(one) for one in every]
    raise PackError(f"ignore must be raw ids, or names of classes, got {ignore!r}")


# What a folder holds, and the options that follow from it


def survey(folder: Path, asked: Mapping[str, Any], contents: Contents | None = None) -> Survey:
    """The labelled images of a folder, and the options that were left to the files. contents: what is in the folder, if
    it is known already."""
    contents = contents or contents_of(folder, asked["labels"])
    options = completed(folder, contents, asked)

    def pixels(columns: Mapping[str, np.ndarray], ids: np.ndarray) -> dict[str, list[int]]:
        counts = sum((np.bincount(columns["label"][i].ravel(), minlength=256) for i in ids), np.zeros(256, np.int64))
        return {"pixels": counts[: len(options["names"])].tolist()}

    return Survey(
        [Entry(one.name, split=one.split) for one in contents.labelled.values()],
        classes=options["names"],
        options=options,
        bad=[(row.file, *row.reasons) for row in contents.rows if row.severity == ERROR],
        count=pixels,
    )


def completed(folder: Path, contents: Contents, asked: Mapping[str, Any]) -> dict[str, Any]:
    """A pack's options, with all that was left open. Looks into images for sizes, and into labels for ids, if nothing
    else has them.

    Raises PackError if no image has a label, or there is no class table.
    """
    if not contents.labelled:
        raise PackError(unlabelled(folder, contents))
    one_size, size = False, asked["size"]
    if size is None:
        found = sizes_of(folder, contents.labelled)
        size = list(size_for(found))
        one_size = list(map(list, found)) == [size]
    fit = ("same" if one_size else "pad") if asked["fit"] == "auto" else asked["fit"]
    table = table_of(folder, contents, asked)
    return {"size": size, "channels": asked["channels"], "fit": fit, **table.options}


def table_of(folder: Path, contents: Contents, asked: Mapping[str, Any]) -> Table:
    """The class table: the given one, else the source's file, else CVAT's labels, else the ids of the labels."""
    if asked["classes"] is not None:
        entries = [Class(*one) for one in asked["classes"]]
    elif contents.table is not None:
        entries = parse_classes(folder / contents.table)
    elif any(one.drawing for one in contents.labelled.values()):
        entries = contents.document.classes
    else:
        entries = [Class(i, f"class {i}") for i in found_ids(folder, contents)]
    return class_table(entries, asked["ignore"])


def unlabelled(folder: Path, contents: Contents) -> str:
    for row in contents.rows:
        if row.severity == ERROR and row.value != "none":
            value, rule, fix = row.reasons
            return f"{folder}: no image has a label. The first fault: {row.file}: {rule}, got {value}; {fix}"
    return (
        f"{folder}: {plural(contents.images, 'image')} and no label: put label images of the same names into labels/ "
        "next to images/, or a_mask.png next to a.jpg, or write train.txt of lines image,label, or export CVAT for "
        "images 1.1 as annotations.xml"
    )


def sizes_of(folder: Path, names: Iterable[str]) -> Counter[Size]:
    """(height, width) → images, by the headers of all that can be opened."""

    def size(name: str) -> Size | None:
        with contextlib.suppress(PackError), open_image(folder / name) as image:
            return size_of(image)

    return Counter(filter(None, in_threads(size, names)))


def size_for(found: Mapping[Size, int]) -> Size:
    """Their own size if all have the same, and a network can work with it."""
    [size, *others] = found or [MIXED]
    fits = min(size) >= LEAST and size[0] * size[1] <= LARGEST
    return size if not others and fits else MIXED


def found_ids(folder: Path, contents: Contents) -> list[int]:
    """The ids in all labels but 255; of 16-bit ones only if there are no others, since one stray depth map is enough.

    Raises PackError for more than can be classes: such labels are pictures, or smoothed.
    """
    ids: dict[bool, set[int]] = {False: set(), True: set()}
    most = ("", 0)
    files = [one.label for one in contents.labelled.values()]
    for name, (found, wide) in zip(files, in_threads(lambda name: raw_ids(folder / name), files), strict=True):
        ids[wide].update(found)
        most = max(most, (name, len(found)), key=lambda one: one[1])
    known = sorted((ids[False] or ids[True]) - {IGNORE})
    if len(known) > MOST_CLASSES:
        raise PackError(
            f"{folder}: labels have {len(known)} different ids, {most[0]} alone {most[1]}, and a pack has at most "
            f"{MOST_CLASSES} classes: are they pictures, or smoothed? Give classes=, and `validate` names them"
        )
    if len(known) < 2:
        raise PackError(
            f"{folder}: labels have {len(known)} different ids besides {IGNORE}, which is ignored"
            f"{f': {known[0]}' if known else ''}; there is nothing to tell apart. {TWO_CLASSES}; labels of "
            "colours with classes= a file of names and colours"
        )
    return known


# One image


@dataclass(frozen=True)
class Reader:
    """Reads an image with its label from the source files, whole, at each access: packing calls it once an image, and
    `feed="workers"` at every step, as scripts do. Picklable: each worker surveys the folder once."""

    folder: Path
    labels: str = "auto"

    @cached_property
    def contents(self) -> Contents:
        return contents_of(self.folder, self.labels)

    def __call__(self, path: Path, options: Mapping[str, Any]) -> Sample:
        """Raises PackError(value, rule, fix) on what cannot be used."""
        name = Path(path).relative_to(self.folder).as_posix()
        found = self.contents.labelled.get(name)
        if found is None:
            raise PackError("none", "an image has a label", "annotate it, or pack again: the folder has changed")
        try:
            picture, mask = read_labelled(self.folder, found, Recipe.of(options))
        except Refused as refusal:
            raise located(refusal.row, name) from None
        return {"image": picture.pixels, "label": mask.label, "distance": distance_map(mask.label)}

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "labels": self.labels}


def read(path: Path, options: Mapping[str, Any]) -> Sample:
    """One image file → {"image": …} as the pack holds it, for predictions.

    Raises PackError(value, rule, fix) on what cannot be used.
    """
    return {"image": read_image(Path(path), Recipe.of(options)).pixels}


def read_labelled(folder: Path, found: Labelled, recipe: Recipe) -> tuple[Picture, Mask]:
    """An image and its label at the packed size. Raises Refused, whose row names the file."""
    at = found.name
    try:
        picture = read_image(folder / found.name, recipe)
        if found.drawing is not None:
            return picture, cvat.draw(found.drawing, recipe, picture.size)
        at = found.label
        return picture, read_mask(folder / found.label, recipe, picture.size)
    except Refused as refusal:
        raise Refused(refusal.row.at(at)) from None


def located(row: Row, name: str) -> Refused:
    """With the label's file in the value, since a table of bad samples has the image's."""
    return Refused(row if row.file == name else dataclasses.replace(row, value=f"{row.file}: {row.value}"))


# The validator


@dataclass(frozen=True)
class Report(report.Report):
    """balance: class → share of the packed pixels that are not ignored; ids: raw id → pixels of the label images that
    can be used; size: (height, width) of the pack."""

    images: int
    labelled: int
    size: Size
    balance: Mapping[str, float]
    ids: Mapping[int, int]


def validate(
    source: str | Path,
    *,
    size: int | tuple[int, int] | None = None,
    fit: str = "auto",
    channels: int = 3,
    classes: Given | None = None,
    ignore: Ignored = None,
    labels: str = "auto",
    progress: bool = True,
) -> Report:
    """Check every image and every label of a folder, archive or link: each rule broken is a row; and how classes are
    balanced.

    Options as for `pack`: an error is what a pack with the same ones leaves out. Raises PackError if no image has a
    label, or there is no class table.
    """
    asked = requested(size, fit, channels, classes, ignore, labels)
    folder = stage(source, progress=progress)
    contents = contents_of(folder, labels)
    recipe = Recipe.of(completed(folder, contents, asked))
    pixels, ids, rows = np.zeros(IGNORE + 1, np.int64), Counter[int](), list(contents.rows)
    checks = in_threads(partial(check, folder, recipe), contents.labelled.values())
    for found, mask in bar(checks, "validating", len(contents.labelled), leave=False, disable=not progress):
        rows += found
        if mask is not None:
            pixels += np.bincount(mask.label.ravel(), minlength=IGNORE + 1)
            ids.update(mask.ids)
    rows += remarks(contents, recipe.table, pixels, ids)
    valid = max(int(pixels[:IGNORE].sum()), 1)
    balance = {name: float(pixels[k]) / valid for k, name in enumerate(recipe.table.names)}
    shares = ", ".join(f"{name} {share:.1%}" for name, share in balance.items())
    summary = (
        f"{plural(contents.images, 'image')}, {len(contents.labelled):,} with a label, packed at "
        f"{sized(*recipe.size)}; {shares}; ignored {pixels[IGNORE] / max(int(pixels.sum()), 1):.1%}"
    )
    counts = contents.images, len(contents.labelled)
    return Report(ordered(rows), summary, *counts, recipe.size, balance, dict(sorted(ids.items())))


def check(folder: Path, recipe: Recipe, found: Labelled) -> tuple[list[Row], Mask | None]:
    """(what is wrong with one image and its label, the label unless it is left out)."""
    try:
        picture, mask = read_labelled(folder, found, recipe)
    except Refused as refusal:
        return [refusal.row], None
    where = found.label if found.drawing is None else found.name
    return [*(row.at(found.name) for row in picture.rows), *(row.at(where) for row in mask.rows)], mask


def remarks(contents: Contents, table: Table, pixels: np.ndarray, ids: Mapping[int, int]) -> Iterator[Row]:
    """What only all labels together show."""
    if not pixels.any():
        return
    for k, one in enumerate(table.classes):
        if pixels[k] == 0:
            fix = "nothing, or annotate some; or leave it out of classes="
            if IGNORE in ids and table.lookup[IGNORE] == IGNORE:
                fix = f"if 255 means {one.name!r}: classes={{…, 255: {one.name!r}}}; 255 is ignored otherwise"
            yield Row("class", "every class has pixels", f"{one.id} {one.name}: none", fix, WARNING)
    drawn = any(one.drawing for one in contents.labelled.values())
    if drawn and not {name.casefold() for name in table.names} & {*BACKGROUND}:
        fix = f"nothing, if all of it is drawn; or put {BACKGROUND[0]!r} first in classes="
        yield Row("class", "what no shape covers has a class", "it is ignored", fix, WARNING)


# Predictions as files


def save(answer: np.ndarray, picture: str | Path, folder: str | Path, card: Card | Pack) -> Path:
    """Write the class map (h, w) uint8 predicted for a picture as `folder/NAME.png`, at the picture's size: a palette
    PNG, whose values are indices into card.classes and whose colours are the classes'.

    Raises PackError if the picture cannot be read, or the name is taken by anything but its own prediction; DiskError
    if the file cannot be written.
    """
    picture, target = Path(picture), Path(folder) / f"{Path(picture).stem}.png"
    try:
        with open_image(picture, key="image") as image:
            size = size_of(image)
        place = Recipe.of(card.options).place(size)
    except Refused as refusal:
        raise located(refusal.row, picture.name) from None
    inner = Image.fromarray(np.ascontiguousarray(answer[place.area]))
    found = inner.resize((size[1], size[0]), Image.Resampling.NEAREST)
    found.putpalette([value for colour in card.options["colours"] for value in colour])
    content, comment = io.BytesIO(), PngImagePlugin.PngInfo()
    comment.add_text("Comment", signature(picture))
    found.save(content, "png", pnginfo=comment)
    with disk.explained("writing a prediction", target):
        require_own(target, picture)
        disk.write_atomic(target, content.getvalue())
    return target


def signature(picture: Path) -> str:
    """The comment in a prediction's file, by which the next one for the same picture may replace it."""
    path = str(picture.resolve()).encode(errors="surrogateescape")
    return f"nbtools answer {hashlib.blake2b(path, digest_size=8).hexdigest()}"


def require_own(target: Path, picture: Path) -> None:
    """Raise PackError rather than overwrite a label, the picture itself, or the prediction for one of the same name."""
    comment = None
    if target.exists():
        with contextlib.suppress(*UNREADABLE), Image.open(target) as image:
            comment = image.info.get("Comment")
        if comment != signature(picture):
            raise PackError(
                f"{target} is not a prediction for {picture} and would be overwritten: choose another folder, one for "
                "each folder of pictures"
            )
