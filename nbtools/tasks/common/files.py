"""The files of a source: listing them, the split that a folder's name gives, and opening images and text."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from nbtools import disk
from nbtools.tasks.common.report import Refused, Row

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
SPLIT = re.compile(r"(?<![a-z])(?:(train)(?:ing)?|(val)(?:id|idation)?|(test)(?:ing)?)(?![a-z])", re.I)
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError)
"""What Pillow raises on a damaged file."""


def walk(folder: Path) -> list[str]:
    """The names of all files below a folder, relative to it, with forward slashes, sorted; hidden ones are left out."""
    start = len(os.path.join(folder, ""))
    names = (item.path[start:] for item in disk.walk(folder))
    return sorted(name for name in names if not is_hidden(name))


def is_hidden(name: str) -> bool:
    """Whether a relative path contains files that operating systems leave behind: .DS_Store, ._name.png, __MACOSX."""
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def split_of(name: str) -> str | None:
    """The split of a file by the nearest folder (or archive) on its path that names one: HWDB2.0Train, valid, test_1.

    None if no folder does: the pack then draws the split by a hash of the name.
    """
    return next(filter(None, map(split_word, reversed(name.split("/")[:-1]))), None)


def split_word(text: str) -> str | None:
    """train, val or test if a text has it as a separate word, also as training, valid, validation or testing."""
    match = SPLIT.search(text)
    return next(word.lower() for word in match.groups() if word) if match else None


@contextlib.contextmanager
def open_image(file: Path | BinaryIO, name: str | None = None, key: str = "file") -> Iterator[Image.Image]:
    """Open an image for the `with` block, which also decodes it. name: what to call it, by default the file's own.

    Raises Refused, a row of the table of bad samples, where the file is empty, damaged, too large or no image.
    """
    try:
        if isinstance(file, Path) and file.stat().st_size == 0:
            raise Refused(Row(key, f"the {key} must be a whole image", "an empty file", "copy it again, or delete it"))
        with Image.open(file) as image:
            yield image
    except Image.DecompressionBombError:
        rule = f"the {key} must have at most {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels"
        raise Refused(Row(key, rule, "more", "cut it into pieces, or make it smaller")) from None
    except UNREADABLE as error:
        if disk.is_away(error):
            raise
        name = name or Path(getattr(file, "name", "image")).name
        value = str(getattr(error, "strerror", None) or error)
        value = value.replace(repr(file), repr(name)).replace(str(file), name)
        fix = "delete it, or copy it again from its origin"
        raise Refused(Row(key, f"the {key} must be a whole image", value, fix)) from None


def on_white(image: Image.Image, mode: str = "RGB") -> Image.Image:
    """The image as RGB or L (grey), on white paper where it is transparent: a plain conversion shows hidden colours.

    Raises Refused for more than 8 bits a channel.
    """
    if image.mode.startswith(("I", "F")):
        raise Refused(
            Row("image", "an image must have 8 bits per channel", f"mode {image.mode}", "convert it to 8 bits")
        )
    if image.has_transparency_data:
        paper = Image.new("RGBA", image.size, "white")
        paper.alpha_composite(image.convert("RGBA"))
        image = paper
    return image.convert(mode)


def read_text(path: Path, fix: str) -> str:
    """The text of a file that the caller names. Raises Refused for one that cannot be read, with this fix, or is not
    UTF-8."""
    try:
        return decode_text(path.read_bytes(), str(path))
    except OSError as error:
        if disk.is_away(error):
            raise
        value = error.strerror or str(error)
        raise Refused(Row("", "the file must be readable", value, fix, file=str(path))) from None


def decode_text(data: bytes, file: str) -> str:
    """Text of UTF-8 with or without a byte order mark. Raises Refused naming the first byte that is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        value = f"byte {error.object[error.start]:#04x} at offset {error.start:,}"
        raise Refused(
            Row("", "the file must be UTF-8 text", value, "save it as UTF-8; it may be GB18030", file=file)
        ) from None
