"""The files of a source: listing them, the split that a folder's name gives, and opening images."""

from __future__ import annotations

import os
import re
from pathlib import Path

from PIL import Image

from nbtools import disk
from nbtools.data import open_image
from nbtools.errors import PackError
from nbtools.tasks.common.report import Refused, Row

DAMAGED = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)  # Pillow on damaged files
SPLIT = re.compile(r"(?<![a-z])(?:(train)(?:ing)?|(val)(?:id|idation)?|(test)(?:ing)?)(?![a-z])", re.I)


def walk(folder: Path) -> list[str]:
    """Return all files below a folder, relative to it, with forward slashes, sorted; hidden ones are left out."""
    start = len(os.path.join(folder, ""))
    names = (item.path[start:] for item in disk.walk(folder))
    return sorted(name for name in names if not is_hidden(name))


def is_hidden(name: str) -> bool:
    """Return whether a relative path has what systems leave behind: .DS_Store, ._name.png, __MACOSX."""
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def split_of(name: str) -> str | None:
    """Return the split that the nearest folder (or archive) on a path names: HWDB2.0Train, valid, test_1; None if no
    folder does: the pack then draws the split by a hash of the name."""
    return next(filter(None, map(split_word, reversed(name.split("/")[:-1]))), None)


def split_word(text: str) -> str | None:
    """Return train, val or test if a text has it as a separate word, also as training, valid, validation or testing."""
    match = SPLIT.search(text)
    return next(word.lower() for word in match.groups() if word) if match else None


def decode_image(source: Path | bytes, mode: str = "", key: str = "image", side: int = 0) -> Image.Image:
    """Return an image, upright, as RGB or L (grey) on white paper where it is transparent, or without a mode as it is.
    side: as of `open_image`.

    Raises Refused, a row of the table of bad samples with this key, for what is no whole image, or not of 8 bits.
    """
    try:
        image = open_image(source, side)
    except PackError as error:
        value, rule, fix = error.args
        raise Refused(Row(key, rule, str(value), fix)) from None
    return on_white(image, mode) if mode else image


def on_white(image: Image.Image, mode: str = "RGB") -> Image.Image:
    """Return the image as RGB or L (grey), on white paper where it is transparent: a plain conversion shows hidden
    colours. Raises Refused for more than 8 bits a channel."""
    if image.mode.startswith(("I", "F")):
        fix = "convert it to 8 bits"
        raise Refused(Row("image", "an image must have 8 bits per channel", f"mode {image.mode}", fix))
    if image.has_transparency_data:
        paper = Image.new("RGBA", image.size, "white")
        paper.alpha_composite(image.convert("RGBA"))
        image = paper
    return image.convert(mode)
