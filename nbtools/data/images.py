"""Images: opened upright from any file, resized, and what is marked on them with them."""

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
ORIENTATION = 0x0112  # the EXIF tag
AGAIN = "delete it, or copy it again from its origin"
RESIZES = ("crop", "pad", "squash")

Place = tuple[tuple[float, float], tuple[float, float]]  # of y and of x: a factor, and what is added


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
        data = io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb")  # noqa: SIM115
        with data, Image.open(data) as image:
            if side:
                image.draft("RGB", (side, side))
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


def mode_of(image: Image.Image) -> str:
    """Return the mode that an image is packed in: RGB, L (grey), or F, float32, for more than 8 bits."""
    return "F" if image.mode.startswith(("I", "F")) else "L" if image.mode in ("1", "L", "LA", "La") else "RGB"


def pixels(image: Image.Image, mode: str, size: Sequence[int] = (), resize: str = "") -> np.ndarray:
    """Return an image as (H, W, 3) or (H, W) uint8 for the modes RGB and L, on white where it is transparent, and as
    (H, W) float32 for F, 16 bits in 0…1; resized to size where `resize` says how."""
    from PIL import Image

    if mode == "F":
        deep = np.asarray(image, np.float32)
        image = Image.fromarray(deep / np.float32(65535) if image.mode.startswith("I;16") else deep)
    elif image.has_transparency_data:  # a plain conversion shows hidden colours
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image = image if image.mode == mode else image.convert(mode)
    return np.asarray(resized(image, size, resize) if resize else image)


def place_of(shape: Sequence[int], size: Sequence[int], resize: str) -> Place:
    """Return where a pixel of an image (H, W) comes to lie when it is resized: y and x times a factor, plus an offset.
    crop: the middle, as much as fills the size; pad: all of it, in the middle; squash: all, in the size's ratio."""
    ratios = [after / before for after, before in zip(size, shape, strict=True)]
    if resize == "crop":
        ratios = [max(ratios)] * 2
    elif resize == "pad":  # to whole pixels
        ratios = [max(1, round(min(ratios) * before)) / before for before in shape]
    rest = [after - ratio * before for after, ratio, before in zip(size, ratios, shape, strict=True)]
    y, x = (n / 2 if resize == "crop" else round(n) // 2 for n in rest)
    return (ratios[0], y), (ratios[1], x)


def resized(image: Image.Image, size: Sequence[int], resize: str) -> Image.Image:
    """Return an image bilinear in another size (H, W), black where it is padded."""
    from PIL import Image

    (fy, y), (fx, x) = place_of((image.height, image.width), size, resize)
    bilinear = Image.Resampling.BILINEAR
    if resize == "pad":
        whole = Image.new(image.mode, (size[1], size[0]))
        whole.paste(image.resize((round(fx * image.width), round(fy * image.height)), bilinear), (int(x), int(y)))
        return whole
    left, top = max(0.0, -x / fx), max(0.0, -y / fy)
    box = left, top, min(image.width, left + size[1] / fx), min(image.height, top + size[0] / fy)
    return image.resize((size[1], size[0]), bilinear, box)


def nearest(ids: np.ndarray, size: Sequence[int], resize: str) -> np.ndarray:
    """Return ids (H, W, …) in another size, each the one in the pixel's middle, 0 where they are padded."""
    from PIL import Image

    (fy, y), (fx, x) = place_of(ids.shape[:2], size, resize)
    image = Image.fromarray(ids if ids.dtype == np.uint8 else ids.astype(np.int32))
    back = (1 / fx, 0, -x / fx, 0, 1 / fy, -y / fy)
    return np.asarray(image.transform((size[1], size[0]), Image.Transform.AFFINE, back))


def moved(points: np.ndarray, place: Place) -> np.ndarray:
    """Return points (…, 2) x, y or boxes (…, 4) x1, y1, x2, y2 in pixels of the resized image."""
    (fy, y), (fx, x) = place
    pairs = points.reshape(*points.shape[:-1], -1, 2) * (fx, fy) + (x, y)
    return pairs.reshape(points.shape).astype(np.float32)
