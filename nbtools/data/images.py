"""Images: opened upright from any file, and resized."""

from __future__ import annotations

import contextlib
import io
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from nbtools import disk
from nbtools.errors import PackError

if TYPE_CHECKING:
    from PIL import Image

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
DAMAGED = (OSError, SyntaxError, ValueError, EOFError, struct.error)  # what Pillow raises on damaged files
ORIENTATION = 0x0112  # the EXIF tag
AGAIN = "delete it, or copy it again from its origin"


def open_image(source: str | Path | bytes) -> Image.Image:
    """Return the image in a file, or in its bytes, decoded, and turned upright as its EXIF says.

    Raises PackError(value, rule, fix) for a file that is empty, damaged, too large, or no image.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        data = io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb")  # noqa: SIM115
        with data, Image.open(data) as image:
            image.load()
        return upright(image)
    except Image.DecompressionBombError:
        rule = f"an image must have at most {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels"
        raise PackError("more", rule, "cut it into pieces, or make it smaller") from None
    except DAMAGED as error:
        if disk.is_away(error):
            raise
        came = "no image" if isinstance(error, UnidentifiedImageError) else getattr(error, "strerror", None) or error
        raise PackError(came, "the file must be a whole image", AGAIN) from None


def upright(image: Image.Image) -> Image.Image:
    """Return a decoded image turned as its EXIF says; a TIFF was turned by Pillow when it was decoded."""
    from PIL import Image

    turns = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # EXIF's numbers → Pillow's
    with contextlib.suppress(*DAMAGED):  # other tags often are
        if (turn := image.getexif().get(ORIENTATION)) in turns:
            image = image.transpose(Image.Transpose(turns[turn]))
            image.info = {key: value for key, value in image.info.items() if key == "transparency"}  # turned once
    return image
