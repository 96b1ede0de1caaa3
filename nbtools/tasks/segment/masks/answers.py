"""Answers as files: a class map at the size of the picture it answers to, as a PNG whose colours are the classes'."""

from __future__ import annotations

import contextlib
import hashlib
import io
from pathlib import Path

import numpy as np
from PIL import Image, PngImagePlugin

from nbtools import disk
from nbtools.data import Card, Pack, Refused
from nbtools.errors import PackError
from nbtools.tasks.segment.masks.images import UNREADABLE, Recipe, Size, opened, size_of
from nbtools.tasks.segment.masks.pairs import told


def save(answer: np.ndarray, picture: str | Path, folder: str | Path, card: Card | Pack) -> Path:
    """Write the class map (h, w) uint8 predicted for a picture as `folder/NAME.png`, as large as the picture: a palette
    PNG, whose numbers are places in card.classes and whose colours are the classes'.

    Raises PackError where the picture cannot be read, or another file than its answer has that name, DiskError where
    the file cannot be written.
    """
    picture, target = Path(picture), Path(folder) / f"{Path(picture).stem}.png"
    try:
        with opened(picture, "image") as image:
            size = size_of(image)
        found = Image.fromarray(restored(answer, size, Recipe.of(card.options)), "L")
    except Refused as refusal:
        raise told(refusal.row, picture.name) from None
    found.putpalette([value for colour in card.options["colours"] for value in colour])
    content, comment = io.BytesIO(), PngImagePlugin.PngInfo()
    comment.add_text("Comment", signature(picture))
    found.save(content, "png", pnginfo=comment)
    with disk.explained("writing an answer", target):
        require_own(target, picture)
        disk.make_folder(target.parent)
        disk.write_atomic(target, content.getvalue())
    return target


def signature(picture: Path) -> str:
    """The comment of an answer: by it the next one to the same picture may replace it."""
    way = str(picture.resolve()).encode(errors="surrogateescape")
    return f"nbtools answer {hashlib.blake2b(way, digest_size=8).hexdigest()}"


def require_own(target: Path, picture: Path) -> None:
    """Raise PackError where a label, the picture itself, or the answer to one of the same name would be lost."""
    comment = None
    if target.exists():
        with contextlib.suppress(*UNREADABLE), Image.open(target) as image:
            comment = image.info.get("Comment")
        if comment != signature(picture):
            raise PackError(
                f"{target} is no answer to {picture}, and would be lost: choose another folder, one for each folder of "
                "pictures"
            )


def restored(answer: np.ndarray, size: Size, recipe: Recipe) -> np.ndarray:
    """(h, w) uint8 at the packed size → at the picture's (height, width), by the nearest pixel, without the padding."""
    place = recipe.place(size)
    inner = Image.fromarray(np.ascontiguousarray(answer[place.rows, place.columns]))
    return np.asarray(inner.resize((size[1], size[0]), Image.Resampling.NEAREST))
