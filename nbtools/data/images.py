"""Images: opened upright from any file, and resized together with what is marked on them."""

from __future__ import annotations

import contextlib
import io
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nbtools import disk
from nbtools.errors import PackError

if TYPE_CHECKING:
    from PIL import Image

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
DAMAGED = (OSError, SyntaxError, ValueError, EOFError, struct.error)  # what Pillow raises on damaged files
RESIZES = ("crop", "pad", "squash")
ORIENTATION = 0x0112  # the EXIF tag
TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # its values → Pillow's transpositions


def is_image(value: Any) -> bool:
    """Return whether it is a PIL image. Nobody has one where Pillow, which is slow to import, is not loaded."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def open_image(source: str | Path | bytes, side: int = 0) -> Image.Image:
    """Return the image in a file, or in its bytes, decoded, and turned upright as its EXIF says. side: a JPEG may be
    decoded at a half, a quarter or an eighth, if no side is then shorter than this: in a fifth of the time.

    Raises PackError(value, rule, fix) for a file that is empty, damaged, too large, or no image.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            if side:
                image.draft("RGB", (side, side))
            image.load()
        return upright(image)
    except (*DAMAGED, Image.DecompressionBombError) as error:
        if disk.is_away(error):
            raise
        came = "no image" if isinstance(error, UnidentifiedImageError) else getattr(error, "strerror", None) or error
        raise PackError(came, "the file must be a whole image", "delete it, or copy it again from its origin") from None


def upright(image: Image.Image) -> Image.Image:
    """Return a decoded image turned as its EXIF says; a TIFF was turned by Pillow when it was decoded."""
    from PIL import Image

    with contextlib.suppress(*DAMAGED):  # EXIF often is
        if (turn := image.getexif().get(ORIENTATION)) in TURNS:
            image = image.transpose(Image.Transpose(TURNS[turn]))
            image.info = {key: value for key, value in image.info.items() if key == "transparency"}  # turned once
    return image


def is_grey(image: Image.Image) -> bool:
    return image.mode in ("1", "L", "LA", "La")


def converted(image: Image.Image, mode: str) -> Image.Image:
    """Return an image in the mode RGB or L, on white where it is transparent. Raises PackError for over 8 bits."""
    from PIL import Image

    if image.mode.startswith(("I", "F")):
        raise PackError(image.mode, "images must have 8 bits per channel", "return an array from a Dataset")
    if image.has_transparency_data:  # a plain conversion shows hidden colours
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image if image.mode == mode else image.convert(mode)


def resized(image: Image.Image, size: Sequence[int], resize: str, ids: bool = False) -> Image.Image:
    """Return an image in another size (H, W). crop: the middle, as much as fills it; pad: all, in the middle of 0;
    squash: all, in the size's ratio. Bilinear; of ids each the nearest one."""
    from PIL import Image, ImageOps

    how = {"crop": ImageOps.fit, "pad": ImageOps.pad, "squash": Image.Image.resize}[resize]
    return how(image, (size[1], size[0]), Image.Resampling.NEAREST if ids else Image.Resampling.BILINEAR)


def moved(points: np.ndarray, shape: Sequence[int], size: Sequence[int], resize: str) -> np.ndarray:
    """Return points (…, 2) x, y or boxes (…, 4) x1, y1, x2, y2 of an image (H, W) where `resized` moves them; padded
    to within half a pixel, as Pillow pads by whole ones."""
    before, after = np.array(shape[::-1]), np.array(size[::-1])  # x, y
    ratio = after / before
    if resize != "squash":
        ratio = np.full(2, ratio.max() if resize == "crop" else ratio.min())
    pairs = points.reshape(*points.shape[:-1], -1, 2) * ratio + (after - ratio * before) / 2
    return pairs.reshape(points.shape).astype(np.float32)
