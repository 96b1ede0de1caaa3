"""How values are packed, and later those to predict: upright images, resized with what is marked on them; all else. A
pack holds uint8, whole numbers, booleans and float32: other floats become float32."""

import contextlib
import io
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nbtools import disk
from nbtools.data.pack import Column
from nbtools.data.splits import some
from nbtools.errors import PackError

if TYPE_CHECKING:
    from PIL import Image

TARGET = "y"
TARGETS = ("y", "label", "labels", "target")  # keys of an item, and columns, that are its target without being named
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".jfif", ".avif")
DAMAGED = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, zipfile.BadZipFile)
"""What Pillow, NumPy and the like raise on damaged files."""
RESIZES = ("crop", "pad", "squash")
WIDER = {"u2": "i4", "u4": "i8", "u8": "i8"}  # torch cannot index wide unsigned numbers
BLOCK = 2**17  # numbers whose mean is computed at once, in the processor's cache
FIX = "correct it, or leave it out"
Resize = Sequence[Any] | None  # (height, width, how)


def is_image(value: Any) -> bool:
    """Return whether it is a PIL image, of which nothing else has the bands; Pillow is slow to import."""
    return hasattr(value, "getbands")


def open_image(source: Any, side: int = 0) -> "Image.Image":
    """Return the image in a file, in its bytes, or itself, decoded, and turned upright as its EXIF says. side: a JPEG
    may be decoded at a half, a quarter or an eighth, if no side is then shorter than this: in a fifth of the time.

    Raises PackError(value, rule, fix) for a file that is empty, damaged, too large, or no image.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        opened: Any = contextlib.nullcontext(source) if is_image(source) else Image.open(file)
        with opened as image:
            if side:
                image.draft("RGB", (side, side))
            image.load()  # a TIFF is turned in that
            with contextlib.suppress(*DAMAGED):  # EXIF often is
                return ImageOps.exif_transpose(image)
            return image
    except (*DAMAGED, Image.DecompressionBombError) as error:
        if disk.is_away(error):
            raise
        came = "no image" if isinstance(error, UnidentifiedImageError) else getattr(error, "strerror", None) or error
        lost = isinstance(error, FileNotFoundError | IsADirectoryError)
        fix = f"check the path {source}, its ending and root=" if lost else "delete it, or copy it from its origin"
        raise PackError(came, "the file must be a whole image", fix) from None


def pixels(image: "Image.Image", resize: Resize, ids: bool) -> np.ndarray:
    """Return an image as (H, W) or (H, W, 3) bytes, on white where it is transparent, or its ids.

    resize: crop takes the middle, as much as fills the size; pad all, in the middle of 0; squash all, in the size's
    ratio: bilinear, of ids each the nearest one. Raises PackError(value, rule, fix) for over 8 bits a channel.
    """
    from PIL import Image, ImageOps

    if not ids and image.mode.startswith(("I", "F")):
        raise PackError(image.mode, "images must have 8 bits per channel", "return an array from a Dataset")
    grey = image.mode in ("1", "L", "LA", "La")
    if not ids and image.has_transparency_data:  # a plain conversion shows hidden colours
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image = image if ids and len(image.getbands()) == 1 else image.convert("L" if grey else "RGB")
    if resize:
        how = {"crop": ImageOps.fit, "pad": ImageOps.pad, "squash": Image.Image.resize}[resize[2]]
        image = how(image, (resize[1], resize[0]), Image.Resampling.NEAREST if ids else Image.Resampling.BILINEAR)
    array = numeric("", np.asarray(image))
    return array.astype(np.uint8) if array.dtype == bool else array


def move_points(points: Any, size: Sequence[int], resize: Resize) -> np.ndarray:
    """Return points (…, 2) or boxes (…, 4) of an image (W, H) where `pixels` moves them; if padded, to half a pixel."""
    points = numeric("points", points).astype(np.float32)
    if not resize:
        return points
    if points.ndim == 0 or points.shape[-1] not in (2, 4):
        raise PackError(points.shape, "points must be (…, 2) of x, y or (…, 4) of boxes", "leave out all else")
    before, after = np.array(size), np.array([resize[1], resize[0]])  # x, y
    ratio = after / before
    if resize[2] != "squash":
        ratio = np.full(2, ratio.max() if resize[2] == "crop" else ratio.min())
    pairs = points.reshape(*points.shape[:-1], -1, 2) * ratio + (after - ratio * before) / 2
    return pairs.reshape(points.shape).astype(np.float32)


def plain_values(parts: Mapping[str, Any], resize: Resize, text: str, marked: Sequence[str] = ()) -> dict[str, Any]:
    """Return column → plain value: an array, of a target also its class, a text or a whole number, or several.

    parts: images, also as paths or bytes of files; text: the function of texts, by name; marked: columns of points on
    the only image. Raises PackError(value, rule, fix) for all else.
    """
    values, sizes = dict[str, Any](), []
    for name, value in parts.items():
        target = name == TARGET
        value = bare(value) if target else value
        if isinstance(value, Path | bytes) or is_image(value):
            sizes.append((image := open_image(value)).size)
            values[name] = pixels(image, resize, target)
        elif target and (isinstance(value, str | int) or is_missing(value)):
            values[name] = value
        elif target and is_names(value):
            values[name] = sorted(value)
        else:
            values[name] = numeric(name, resolve_name(text)(value) if text and isinstance(value, str) else value)
    return values | {name: move_points(values[name], sizes[0], resize) for name in marked if sizes and name in values}


def numeric(name: str, value: Any) -> np.ndarray:
    """Return an array of a dtype that packs hold. Raises PackError(value, rule, fix) for all else."""
    if isinstance(value, list | tuple) and any(getattr(each, "shape", ()) for each in value):
        raise PackError("several", f"{name} must be one array", "return separate parts: (a, b, label), target=2")
    try:
        value = on_host(value)
        array = value.astype(float).filled(np.nan) if np.ma.is_masked(value) else np.asarray(value)
        array = np.array(array.tolist()) if array.dtype == object else array  # of a DataFrame, True among numbers
    except Exception as error:  # lists of unequal lengths, or what an object's own __array__ raises
        raise PackError(error, f"{name} must be an array", "make it one of numbers") from None
    if array.dtype.kind not in "biuf":
        came = f"the text {value[:40]!r}" if isinstance(value, str) else type(value).__name__
        fix = "convert it, a file to a Path, leave it out with inputs=[…], or pass text=function for texts"
        raise PackError(came, f"{name} must hold numbers", fix)
    wide = "f4" if array.dtype.kind == "f" else WIDER.get(f"{array.dtype.kind}{array.dtype.itemsize}", array.dtype)
    return array.astype(np.dtype(wide).newbyteorder("="), copy=False)


def on_host(value: Any) -> Any:
    """Return a tensor as NumPy can read it, on the host and bfloat16 as float32; all else as it is."""
    value = value.detach().cpu() if isinstance(value, torch.Tensor) else value
    return value.float() if getattr(value, "dtype", None) == torch.bfloat16 else value


def bare(value: Any) -> Any:
    """Return a target as a plain number or text, where it is an array of one, or bytes of ASCII, as of loadarff."""
    single = isinstance(value, torch.Tensor | np.ndarray | np.generic) and np.prod(value.shape) == 1
    value = value.item() if single else value
    return value.decode() if isinstance(value, bytes) and value.isascii() else value


def is_missing(value: Any) -> bool:
    return value is None or (np.ndim(value) == 0 and str(value).strip() in ("", "nan", "<NA>", "NaT"))


def is_names(value: Any) -> bool:
    return isinstance(value, list | tuple | set) and all(isinstance(each, str) for each in value)


def compose(name: Any) -> str:
    """Return the name of a class without blanks around it, é as one character, where macOS writes e and an accent."""
    return unicodedata.normalize("NFC", str(name)).strip()


def class_text(value: Any, names: Sequence[str]) -> str:
    """Return the name of a sample's class; a whole number is its place among names that are words.

    Raises PackError(value, rule, fix) where there is none, PackError(sentence) for a place behind the names: then
    labels count from 1, or the names are those of something else, and all are wrong.
    """
    if is_missing(value) or not isinstance(value, str | int):
        rule = "every sample must have a class: a string or a whole number"
        raise PackError("nothing" if is_missing(value) else str(value), rule, FIX)
    if isinstance(value, str) or not names or value < 0:
        return compose(value)
    if value >= len(names):
        rule = f"the {len(names)} classes {some(names)} are numbered from 0"
        raise PackError(f"{rule}, and a label is {value}; subtract 1 where labels count from 1, or return names")
    return names[value]


def fit(name: str, value: Any, column: Column, kind: str = "values", names: Sequence[str] = ()) -> Any:
    """Return the array of a plain value as a pack has it in a column; a class as its text.

    kind: of a target also classes (a text), or labels (K,) of 0 and 1; names: the classes allowed. Raises
    PackError(value, rule, fix).
    """
    if kind == "classes" or (kind == "labels" and isinstance(value, list)):
        words = () if any(name.lstrip("-").isdecimal() for name in names) else names  # else 2 is "2"
        labels = [*map(compose, value)] if kind == "labels" else [class_text(value, words)]
        if names and (other := [label for label in labels if label not in names]):
            raise PackError(other[0], f"the class must be one of {len(names):,}: {some(names)}", FIX)
        return labels[0] if kind == "classes" else np.array([each in labels for each in names], np.uint8)
    array, ragged = numeric(name, value), column.kind == "ragged"
    if column.layout == "hwc" and array.ndim == 2:
        array = np.stack([array] * 3, -1)  # a grey one among colours
    if column.layout == "hw" and array.shape[2:] == (3,) and array.dtype == np.uint8:  # a colour one: Pillow's L
        array = ((array @ np.array([19595, 38470, 7471]) + 2**15) >> 16).astype(np.uint8)
    if array.dtype.kind == "f" and len(odd := array[~np.isfinite(array)]):
        raise PackError(odd[0], f"all numbers in {name} must be finite", "replace it, or leave the item out")
    made = array.astype(column.dtype, copy=False)
    exact = made.dtype.kind == "f" or np.array_equal(made, array)  # of a large number the nearest float
    exact = exact and (not column.layout or made.dtype.kind == array.dtype.kind)  # 0…255 is no 0…1
    exact = exact and (kind != "labels" or bool(np.isin(made, (0, 1)).all()))
    alike = array.ndim == len(column.shape) + ragged and array.shape[ragged:] == column.shape and array.size > 0
    if not (exact and alike):
        raise PackError(f"{array.dtype} {array.shape}", f"{name} must be {column}, as in other items", FIX)
    return made


def common_column(name: str, values: Sequence[Any], classes: Any, picture: bool) -> tuple[str, Column]:
    """Return (kind, as `fit` takes it, column) of plain values. Raises PackError with a sentence where they share none.
    classes: the names of classes, where there are some; False: whole numbers are values; picture: they are images."""
    kinds, count = {type(value) for value in values}, len(classes or ())
    if classes is not False and (str in kinds or kinds <= {int, bool}):
        return "classes", Column("fixed", "<i8", ())
    if kinds == {list} or (name == TARGET and count and {np.shape(value) for value in values} == {(count,)}):
        return "labels", Column("fixed", "|u1", (count,))
    if kinds & {str, list}:
        raise PackError(f"{name} must be numbers, or images, in all items, got texts among them; make them match")
    arrays = [numeric(name, value) for value in values]
    arrays = [array for array in arrays if array.size] or arrays  # an empty one has no dtype
    dtype, shapes = np.result_type(*{array.dtype for array in arrays}), [array.shape for array in arrays]
    dtype = np.dtype(np.float32) if dtype.kind == "f" or kinds <= {int, bool} else dtype
    if picture and any(len(shape) > 2 for shape in shapes):  # greys become RGB beside them
        shapes = [(*shape[:2], 3) for shape in shapes]
    shape, *others = dict.fromkeys(shapes)
    came = ", ".join(map(str, [shape, *others[:2]]))
    if others and picture:
        raise PackError(f"{name} must be of one size, got images (height, width) {came} …; pass size= to resize")
    if others and (not shape or {(len(each), each[1:]) for each in others} != {(len(shape), shape[1:])}):
        raise PackError(f"{name} must have one shape, apart from its first axis, got {came} …; make them match")
    if others:
        return "values", Column("ragged", dtype.str, shape[1:])
    layout = ""  # the axes of an image: those of PIL, or those of bytes or float32 of which one can be channels
    if len(shape) == 2 and dtype == np.uint8 and name != TARGET:  # of a target they are ids
        layout = "hw"
    elif len(shape) == 3 and dtype in (np.uint8, np.float32):
        layout = "chw" if shape[0] in (1, 3, 4) and not picture else "hwc" if shape[2] in (1, 3, 4) else ""
    return "values", Column("fixed", dtype.str, shape, layout)


def moments_of(column: Column, array: np.ndarray, rows: np.ndarray, target: bool) -> tuple[list[Any], list[Any]]:
    """Return (mean, standard deviation, 1 of what never varies) of the chosen rows, (n,) bool, of a column, of images
    in 0…1: per channel of images; per value of vectors and of each step of ragged columns; of inputs (steps, features)
    or (features, steps), in that shape, per feature: the shorter axis; else one of all."""
    axis = {"chw": 1, "hwc": 3}.get(column.layout, 1 if len(column.shape) == 1 else None)
    two = column.kind == "fixed" and len(column.shape) == 2 and not (column.layout or target)
    if two and len({*column.shape}) == 2:
        axis = 1 + int(np.argmin(column.shape))
    mean, squares, count, step = np.zeros(1), np.zeros(1), 0, max(1, BLOCK * len(array) // max(array.size, 1))
    for start in range(0, len(array), step):  # Chan's update: far from 0 a difference of squares says nothing
        block = array[start : start + step][rows[start : start + step]]
        if len(block):
            flat = np.moveaxis(block, axis or 0, 0).reshape(1 if axis is None else block.shape[axis], -1)
            often, n = np.ones(1), flat.shape[1]
            if flat.dtype == np.uint8:  # 256 values and how often each: eleven times as fast
                flat, often = np.arange(256), np.array([np.bincount(row, minlength=256) for row in flat])
            now = (flat * often).sum(1) / n
            squares = squares + (np.square(flat - now[:, None]) * often).sum(1)
            squares = squares + np.square(now - mean) * count * n / (count + n)
            mean, count = mean + (now - mean) * n / (count + n), count + n
    std = np.sqrt(squares / max(count, 1))
    unit = 255 if column.layout and column.dtype == "|u1" and not (target and array.max() < 2) else 1  # 1 is kept as
    shape = (-1, 1) if two and axis == 1 else -1
    return (mean / unit).reshape(shape).tolist(), np.where(std > 0, std / unit, 1).reshape(shape).tolist()
