"""Images with labels → pack: image (H, W, C), label (H, W) and distance (H, W), all uint8 and of one size.

label: class indices, 255 where a pixel is ignored. distance: eighths of a pixel to the nearest class boundary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin

from nbtools import disk
from nbtools.data import Card, Entry, Pack, Sample, Survey, bar, build_pack, side_by_side, stage
from nbtools.errors import PackError
from nbtools.show import percent, plural, sized
from nbtools.tasks.common.files import DAMAGED, decode_image
from nbtools.tasks.common.report import ERROR, WARNING, Refused, Report, Row, ordered
from nbtools.tasks.segment import cvat
from nbtools.tasks.segment.classes import IGNORE, MOST_CLASSES, Class, Given, Table, class_table, parse_classes
from nbtools.tasks.segment.folders import Contents, Labelled
from nbtools.tasks.segment.images import Recipe, header_size, ids_in, read_image, read_label
from nbtools.tasks.segment.scores import distance_map

MIXED = 384, 384  # pixels to which images of several sizes are scaled: the guide's
LARGEST = 1024 * 2048  # pixels of images that are packed at their own size: Cityscapes'
LEAST, MOST = 32, 4096  # pixels of a side
Ignored = int | str | Iterable[int | str] | None


def pack(
    source: str | Path,
    *,
    size: int | tuple[int, int] | None = None,
    channels: int = 3,
    classes: Given | None = None,
    ignore: Ignored = None,
    val: float = 0.1,
    test: float = 0.1,
    into: str | Path | None = None,
    progress: bool = True,
) -> Pack:
    """The pack of images with labels, from a folder, archive or link. A second call opens the finished pack, and
    interrupted packing resumes. Needs scipy for the distances to the class boundary.

    size: (height, width) or one side, in pixels; by default the images' own if they have one size, else 384 × 384.
    Others are scaled to fit inside; the rest is 0, and ignored.
    channels: 3 (transparency lies on white) or 4 (RGBA). classes: names, in order of their ids from 0; or a mapping
    id → name; or a file, see `classes.py`; by default the file `classes.txt` of the source, else the labels of CVAT's
    file, else the ids in the label images. ignore: raw ids, or names, that are no class, besides 255, which is none
    unless `classes` names it.
    val, test: shares, or whole numbers for exactly that many; the source's own folders and lists come first.
    test=1.0 makes all of them test, for a source that a run is evaluated on.
    Raises PackError if nothing can be used. `validate` also reports what is wrong with single files.
    """
    asked = requested(size, channels, classes, ignore)
    reader = cache(Reader)  # scans the folder once, for the pack and for its samples

    def found(folder: Path, asked: Mapping[str, Any]) -> Survey:
        return survey(folder, asked, reader(folder).contents)

    more = {"val": val, "test": test, "into": into, "progress": progress}
    return build_pack(source, "segment", asked, found, read, reader=reader, **more)


def pack_options(card: Card) -> dict[str, Any]:
    """Options of `pack` with which another source has the classes and the preprocessing of a card."""
    table = Table.of(card.options)
    own = {name: card.options[name] for name in ("size", "channels")}
    named = [one for one in (*table.classes, *table.ignored) if one.name]  # an id that no class has is a number alone
    return {**own, "classes": named, "ignore": [one.id for one in table.ignored if one.name or one.id != IGNORE]}


def requested(
    size: int | tuple[int, int] | None, channels: int, classes: Given | None, ignore: Ignored
) -> dict[str, Any]:
    """The options of `pack` and `validate` as plain values; what is None is decided from the files.

    Raises PackError for impossible values, before reading the source.
    """
    sides = size if isinstance(size, tuple | list) else (size, size)
    if size is not None and (len(sides) != 2 or not all(type(s) is int and LEAST <= s <= MOST for s in sides)):
        raise PackError(f"size must be (height, width) in pixels, {LEAST} to {MOST} each, or one side, got {size!r}")
    if channels not in (3, 4) or isinstance(channels, bool):
        raise PackError(f"channels must be 3 (RGB) or 4 (RGBA), got {channels!r}")
    entries = None if classes is None else [dataclasses.astuple(one) for one in parse_classes(classes)]
    return {
        "size": None if size is None else list(sides),
        "channels": channels,
        "classes": entries,
        "ignore": ignored(ignore),
    }


def ignored(ignore: Ignored) -> list[int | str]:
    """Raises PackError for anything that is neither an id nor a name."""
    with contextlib.suppress(TypeError):
        every: list[Any] = [] if ignore is None else [ignore] if isinstance(ignore, int | str) else list(ignore)
        if not any(isinstance(one, bool) for one in every):
            return [one if isinstance(one, str) else operator.index(one) for one in every]
    raise PackError(f"ignore must be raw ids, or names of classes, got {ignore!r}")


def survey(folder: Path, asked: Mapping[str, Any], contents: Contents | None = None) -> Survey:
    """The labelled images of a folder, and the options that the files decide. contents: those of the folder, if already
    known."""
    contents = contents or Contents(folder)
    options = completed(contents, asked)

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


def completed(contents: Contents, asked: Mapping[str, Any]) -> dict[str, Any]:
    """A pack's options, complete. Reads sizes from images, and ids from labels, if nothing else has them.

    Raises PackError if no image has a label, or there is no class table.
    """
    if not contents.labelled:
        raise PackError(f"{contents.folder}: {unlabelled(contents)}")
    size = asked["size"]
    if size is None:
        own = {one for one in side_by_side(lambda name: header_size(contents.folder / name), contents.labelled) if one}
        [one, *others] = own or [MIXED]
        size = list(MIXED if others or min(one) < LEAST or one[0] * one[1] > LARGEST else one)
    if asked["classes"] is not None:
        entries = [Class(*one) for one in asked["classes"]]
    elif contents.table is not None:
        entries = parse_classes(contents.folder / contents.table)
    elif any(one.drawing for one in contents.labelled.values()):
        entries = contents.document.classes
    else:
        entries = [Class(i, f"class {i}") for i in found_ids(contents)]
    table = class_table(entries, asked["ignore"])
    return {"size": size, "channels": asked["channels"], **table.options}


def unlabelled(contents: Contents) -> str:
    for row in contents.rows:
        if row.severity == ERROR and row.value != "none":
            value, rule, fix = row.reasons
            return f"no image has a label. The first error: {row.file}: {rule}, got {value}; {fix}"
    return (
        f"{plural(contents.images, 'image')} and no label: put label images of the same names into labels/ next to "
        "images/, or write train.txt of lines image,label, or export CVAT for images 1.1 as annotations.xml"
    )


def found_ids(contents: Contents) -> list[int]:
    """The ids in all labels but 255. Raises PackError unless they can be classes."""
    files = {contents.folder / one.label for one in contents.labelled.values()}
    known = sorted(set().union(*side_by_side(ids_in, files)) - {IGNORE})
    if not 2 <= len(known) <= MOST_CLASSES:
        raise PackError(
            f"{contents.folder}: labels have {len(known)} different ids besides {IGNORE}, which is ignored, and a pack "
            f"has 2 to {MOST_CLASSES}; give classes=, for a mask of 0 and 255 {{0: 'background', 255: 'object'}}"
        )
    return known


# One image


@dataclass(frozen=True)
class Reader:
    """Reads an image with its label from the source files, whole, at each access: packing calls it once per image, and
    `feed="workers"` at every step, as scripts do. Picklable: each worker scans the folder once."""

    folder: Path

    @cached_property
    def contents(self) -> Contents:
        return Contents(self.folder)

    def __call__(self, path: Path, options: Mapping[str, Any]) -> Sample:
        """Raises PackError(value, rule, fix) on what cannot be used."""
        name = Path(path).relative_to(self.folder).as_posix()
        found = self.contents.labelled.get(name)
        if found is None:
            raise PackError("none", "an image must have a label", "annotate it, or pack again: the folder has changed")
        try:
            image, label = read_labelled(self.folder, found, Recipe.of(options))
        except Refused as refusal:  # with the label's file in the value, since a table of bad samples has the image's
            row = refusal.row
            value = row.value if row.file == name else f"{row.file}: {row.value}"
            raise Refused(dataclasses.replace(row, value=value)) from None
        return {"image": image, "label": label, "distance": distance_map(label)}

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}


def read(path: Path, options: Mapping[str, Any]) -> Sample:
    """One image file → {"image": …} as the pack holds it, for predictions.

    Raises PackError(value, rule, fix) on what cannot be used.
    """
    return {"image": read_image(Path(path), Recipe.of(options))[0]}


def read_labelled(folder: Path, found: Labelled, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """(image, label) at the packed size. Raises Refused, whose row names the file."""
    at = found.name
    try:
        image, size = read_image(folder / found.name, recipe)
        if found.drawing is not None:
            return image, cvat.draw(found.drawing, recipe, size)
        at = found.label
        return image, read_label(folder / found.label, recipe, size)
    except Refused as refusal:
        raise Refused(refusal.row.at(at)) from None


# The validator


def validate(
    source: str | Path,
    *,
    size: int | tuple[int, int] | None = None,
    channels: int = 3,
    classes: Given | None = None,
    ignore: Ignored = None,
    progress: bool = True,
) -> Report:
    """Check every image and every label of a folder, archive or link: each rule broken is a row; and how classes are
    balanced.

    Options as for `pack`: an error is what a pack with the same ones leaves out. Raises PackError if no image has a
    label, or there is no class table.
    """
    asked = requested(size, channels, classes, ignore)
    contents = Contents(stage(source, progress=progress))
    recipe = Recipe.of(completed(contents, asked))

    def check(found: Labelled) -> tuple[list[Row], np.ndarray]:
        """(what is wrong with one image and its label, pixels (256,) of the label unless it is left out)."""
        try:
            _, label = read_labelled(contents.folder, found, recipe)
        except Refused as refusal:
            return [refusal.row], np.zeros(256, np.int64)
        rows = []
        if found.drawing is not None and not found.drawing.shapes:
            fix = "nothing, if there is nothing on it; else draw it, or delete the image"
            rule, value = "an image should have shapes", "none: all of it is background"
            rows = [Row("shapes", rule, value, fix, WARNING, found.name)]
        return rows, np.bincount(label.ravel(), minlength=256)

    pixels, rows = np.zeros(256, np.int64), list(contents.rows)
    checks = side_by_side(check, contents.labelled.values())
    for found, counts in bar(checks, "validating", len(contents.labelled), leave=False, disable=not progress):
        rows += found
        pixels += counts
    for k, one in enumerate(recipe.table.classes if pixels.any() else ()):
        if pixels[k] == 0:
            fix = "nothing, or annotate some; or correct its id in classes="
            rows.append(Row("class", "every class should have pixels", f"{one.id} {one.name}: none", fix, WARNING))
    shares = pixels / max(int(pixels[:IGNORE].sum()), 1)
    balance = ", ".join(f"{name} {percent(shares[k], 1)}" for k, name in enumerate(recipe.table.names))
    about = (
        f"{plural(contents.images, 'image')}, {len(contents.labelled):,} with a label, packed at "
        f"{sized(*recipe.size)}; {balance}; ignored {percent(pixels[IGNORE] / max(int(pixels.sum()), 1), 1)}"
    )
    return Report(ordered(rows), about)


# Predictions as files


def save(answer: np.ndarray, picture: str | Path, folder: str | Path, card: Card | Pack) -> Path:
    """Write the class map (h, w) uint8 predicted for a picture as `folder/NAME.png`, at the picture's size: a palette
    PNG, whose values are indices into card.classes and whose colours are the classes'.

    Raises PackError if the picture cannot be read, or the name is taken by anything but its own prediction; DiskError
    if the file cannot be written.
    """
    picture, target = Path(picture), Path(folder) / f"{Path(picture).stem}.png"
    try:
        image = decode_image(picture)
    except Refused as refusal:
        raise Refused(refusal.row.at(picture.name)) from None
    area = Recipe.of(card.options).area((image.height, image.width))
    inner = Image.fromarray(np.ascontiguousarray(answer[area]))
    found = inner.resize(image.size, Image.Resampling.NEAREST)
    found.putpalette([value for colour in card.options["colours"] for value in colour])
    path = str(picture.resolve()).encode(errors="surrogateescape")
    own = f"nbtools answer {hashlib.blake2b(path, digest_size=8).hexdigest()}"  # by which the next one may replace it
    content, comment = io.BytesIO(), PngImagePlugin.PngInfo()
    comment.add_text("Comment", own)
    found.save(content, "png", pnginfo=comment)
    with disk.explained("writing a prediction", target):
        there = None
        with contextlib.suppress(*DAMAGED), Image.open(target) as image:
            there = image.info.get("Comment")
        if target.exists() and there != own:
            raise PackError(
                f"{target} is not a prediction for {picture} and would be overwritten: choose another folder, one for "
                "each folder of pictures"
            )
        disk.write_atomic(target, content.getvalue())
    return target
