"""What all samples have in common under one name: how their values are packed, and later those to predict.

A pack holds uint8, whole numbers, booleans and float32: other floats become float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from nbtools.data.images import converted, is_grey, is_image, resized
from nbtools.data.items import TARGET, bare, class_text, composed, is_names, numeric
from nbtools.data.pack import Column
from nbtools.errors import PackError

AWAY = "correct it, or leave it out"
BLOCK = 2**17  # numbers whose mean is computed at once, in the processor's cache
WIDE = 4096  # values of a vector, above which they have one mean


@dataclass(frozen=True)
class Form:
    """The form of a column, which a pack's card keeps.

    kind: class (its text), labels (K,) of 0 and 1, image (PIL), mask (of ids, a target), or array; of a single value
    also text, whole (number) or names. shape: its first axis is None where samples differ in it; layout: `hwc`, `chw`
    or `hw` of images, "" of all else; resize: how PIL images come to the shape, or ""; names: the classes allowed.
    """

    kind: str
    dtype: str = "<i8"
    shape: tuple[int | None, ...] = ()
    layout: str = ""
    resize: str = ""
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any], names: Sequence[str] = ()) -> Self:
        """Return the form that a card keeps; names: the card's classes."""
        return cls(**{**values, "shape": tuple(values["shape"]), "names": tuple(names)})

    @classmethod
    def of_value(cls, name: str, value: Any) -> Self:
        """Return the form of one value. Raises PackError(value, rule, fix) where it has none."""
        plain = bare(value) if name == TARGET else value
        if is_image(plain) and name == TARGET and plain.mode in ("P", "I", "I;16"):  # ids, of a palette or a map
            return cls("mask", "|u1" if plain.mode == "P" else "<i4", (plain.height, plain.width))
        if is_image(plain):
            shape = (plain.height, plain.width, *([] if is_grey(plain) else [3]))
            return cls("mask" if name == TARGET else "image", "|u1", shape)
        if name == TARGET and (isinstance(plain, str | int) or is_names(plain)):
            return cls("text" if isinstance(plain, str) else "whole" if isinstance(plain, int) else "names")
        array = numeric(name, value)
        return cls("array", array.dtype.str, array.shape)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a card, which has the names of its classes itself."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "names"}

    @property
    def unit(self) -> int:
        """What 1 is kept as: 255 in images of bytes."""
        return 255 if self.dtype == "|u1" and self.layout else 1

    @property
    def ragged(self) -> bool:
        return self.shape[:1] == (None,)

    @property
    def channels(self) -> int | None:
        return {"hwc": self.shape[-1], "chw": self.shape[0]}.get(self.layout, 1) if self.layout else None

    @property
    def size(self) -> tuple[int, ...]:
        """(H, W) of an image that is packed from PIL."""
        return tuple(n or 0 for n in self.shape[:2])

    @property
    def column(self) -> Column:
        shape = tuple(n or 0 for n in self.shape[self.ragged :])
        return Column("ragged" if self.ragged else "fixed", self.dtype, shape)

    def fit(self, name: str, value: Any) -> Any:
        """Return the array of a value as it is packed; a class as its text. Raises PackError(value, rule, fix)."""
        if self.kind == "class":
            return self.allowed(class_text(value, self.names))
        if self.kind == "labels":
            return self.multi_hot(value)
        array = numeric(name, self.pixels(value) if self.kind in ("image", "mask") else value)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            came = "nan" if np.isnan(array).any() else "inf"
            raise PackError(came, f"all numbers of {name} must be finite", "replace it, or leave the item out")
        made, shape = array.astype(self.dtype, copy=False), tuple(n or 0 for n in self.shape[self.ragged :])
        both_float = made.dtype.kind == array.dtype.kind == "f"
        fits = both_float or (np.array_equal(made, array) and not (self.layout and made.dtype.kind == "f"))
        if array.ndim != len(self.shape) or array.shape[self.ragged :] != shape or not array.size or not fits:
            came = f"{array.dtype} {array.shape}"
            raise PackError(came, f"{name} must be {self.column}, as in other items", AWAY)
        return made

    def pixels(self, value: Any) -> Any:
        """Return a PIL image, an array of bytes like one, or a mask, in the form's colours and size."""
        from PIL import Image

        ids = self.kind == "mask"
        if not is_image(value):
            array = numeric("", value)
            if (array.ndim != 2 and (array.ndim != 3 or array.shape[2] not in (3, 4))) or not (
                ids or array.dtype == "u1"
            ):
                return array
            value = Image.fromarray(array if array.dtype == np.uint8 else array.astype(np.int32))
        if not ids or len(value.getbands()) > 1:
            value = converted(value, "RGB" if len(self.shape) == 3 else "L")
        return np.asarray(resized(value, self.size, self.resize, ids) if self.resize else value)

    def allowed(self, name: str) -> str:
        if self.names and name not in self.names:
            listed = ", ".join(self.names[:5]) + " …" * (len(self.names) > 5)
            raise PackError(name, f"the class must be one of {len(self.names):,}: {listed}", AWAY)
        return name

    def multi_hot(self, value: Any) -> np.ndarray:
        """Return a 1 for each class that a sample has, by name, or for each of K numbers that is one."""
        if is_names(value):
            labels = {self.allowed(composed(name)) for name in value}
            return np.array([name in labels for name in self.names], np.uint8)
        ones = numeric(TARGET, value)
        if ones.shape != self.shape or not np.isin(ones, (0, 1)).all():
            raise PackError(value, f"y must be names of classes, or {len(self.names)} numbers 0 or 1", AWAY)
        return ones.astype(np.uint8)


def forms_in(options: Mapping[str, Any], classes: Sequence[str] = ()) -> dict[str, Form]:
    """Return the forms that a card's options keep."""
    return {name: Form.of(form, classes) for name, form in options["forms"].items()}


# -- what values have in common


def common_form(name: str, seen: Sequence[Form], classes: Any, size: Sequence[int] | None, resize: str) -> Form:
    """Return the form of values looked at. Raises PackError with a sentence where they share none. classes: the names
    of classes, where there are some; False: whole numbers are values."""
    kinds, names, shapes = {form.kind for form in seen}, tuple(classes or ()), [form.shape for form in seen]
    if classes is not False and ("text" in kinds or kinds == {"whole"}):
        return Form("class", names=names)
    if kinds == {"names"} or (name == TARGET and names and {*shapes} == {(len(names),)}):
        return Form("labels", "|u1", (len(names),), names=names)
    kinds = {"array" if kind == "whole" else kind for kind in kinds}
    if len(kinds) > 1 or "text" in kinds:
        came = ", ".join(sorted(kinds))
        raise PackError(f"{name} must be numbers, or images, in all items, got {came}; make them match")
    [kind], dtype = kinds, np.result_type(*{form.dtype for form in seen})
    dtype = np.dtype(np.float32) if dtype.kind == "f" else dtype
    if name == TARGET and size and len(shapes[0]) == 2 and dtype.kind in "iu":
        kind = "mask"
    if kind != "array":
        colours = [3] * any(len(shape) > 2 for shape in shapes)  # greys become RGB beside it
        shapes = [(*(size or shape[:2]), *colours) for shape in shapes]
    shape = common_shape(name, kind, [*dict.fromkeys(shapes)])
    layout = layout_of(kind, dtype, shape, name == TARGET)
    return Form(kind, dtype.str, shape, layout, resize if size and kind != "array" else "")


def common_shape(name: str, kind: str, shapes: Sequence[tuple[int | None, ...]]) -> tuple[int | None, ...]:
    """Return the shape that items share; None in front where their first axes differ."""
    if len(shapes) == 1:
        return shapes[0]
    came = ", ".join(map(str, shapes[:3]))
    if kind != "array":
        raise PackError(f"{name} must be of one size, got images (height, width) {came} …; pass size= to resize")
    if len({(len(shape), shape[1:]) for shape in shapes}) > 1 or not shapes[0]:
        raise PackError(f"{name} must have one shape, apart from its first axis, got {came} …; make them match")
    return (None, *shapes[0][1:])


def layout_of(kind: str, dtype: np.dtype, shape: tuple[int | None, ...], target: bool) -> str:
    """Return which axes an image has: those of PIL, or those of bytes or float32 of which one can be channels."""
    if None in shape or dtype not in (np.uint8, np.float32):
        return ""
    if len(shape) == 2:
        return "hw" if kind == "image" or (dtype == np.uint8 and not target) else ""
    if len(shape) != 3 or kind != "array":
        return "hwc" if len(shape) == 3 else ""
    return "chw" if shape[0] in (1, 3, 4) else "hwc" if shape[2] in (1, 3, 4) else ""


def images_in(forms: Mapping[str, Form]) -> list[str]:
    """Return the columns of inputs that are images."""
    return [name for name, form in forms.items() if form.layout and name != TARGET]


def points_of(forms: Mapping[str, Form], given: Any) -> dict[str, list[str]]:
    """Return column → [the column of its image, "points" or "boxes"] of those that are named."""
    images, points = images_in(forms), {}
    for name in [given] if isinstance(given, str) else given or ():
        name = TARGET if name == "target" else name
        last = forms[name].shape[-1:] if name in forms else ()
        if last not in ((2,), (4,)) or len(images) != 1:
            came = ", ".join(f"{each} {form.column}" for each, form in forms.items())
            rule = "points must name columns (…, 2) of x, y or (…, 4) of x1, y1, x2, y2 beside one image"
            raise PackError(f"{rule}, got {name!r} of {came}")
        points[name] = [images[0], "points" if last == (2,) else "boxes"]
    return points


# -- mean and standard deviation


def blocks_of(array: np.ndarray, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the chosen rows, (n,) bool, of an array, so many at once that they stay in the processor's cache."""
    step = max(1, BLOCK * len(array) // max(array.size, 1))
    for start in range(0, len(array), step):
        yield array[start : start + step][rows[start : start + step]]


def moments_of(form: Form, blocks: Iterable[np.ndarray]) -> tuple[list[float], list[float]]:
    """Return (mean, standard deviation, 1 of what never varies) of a column, of images in 0…1: per channel of images;
    per value of vectors and of each step of ragged columns; else one of all, as nothing says which axis holds what."""
    vectors = len(form.shape) == 1 + form.ragged and (form.shape[-1] or 0) <= WIDE
    axis = {"chw": 1, "hwc": 3}.get(form.layout, 1 if vectors else None)
    mean, squares, count = np.zeros(1), np.zeros(1), 0
    for block in blocks:  # Chan's update: far from 0 a difference of squares says nothing
        if len(block):
            flat = np.moveaxis(block, axis or 0, 0).reshape(1 if axis is None else block.shape[axis], -1)
            flat, n = flat.astype(np.float64), flat.shape[1]
            now = flat.mean(1)
            squares = squares + flat.var(1) * n + np.square(now - mean) * count * n / (count + n)
            mean, count = mean + (now - mean) * n / (count + n), count + n
    std = np.sqrt(squares / max(count, 1))
    return (mean / form.unit).tolist(), np.where(std > 0, std / form.unit, 1).tolist()
