"""What all samples have in common under one name: how their values are packed, and later those to predict.

A pack holds uint8, whole numbers, booleans and float32: other floats become float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

from nbtools.data.images import is_image, mode_of, nearest, pixels
from nbtools.data.items import TARGET, bare, class_text, composed, is_names, numeric
from nbtools.data.pack import Column
from nbtools.errors import PackError

AWAY = "correct it, or leave it out"
COLOURS = (1, 3, 4)  # channels of an image
BLOCK = 2**17  # numbers whose mean is computed at once, in the processor's cache
WIDE = 4096  # values of a vector, above which they have one mean


class Sign(NamedTuple):
    """What is remembered of a value that was looked at. kind: text, whole, names, image or array."""

    kind: str
    dtype: str = "<i8"
    shape: tuple[int, ...] = ()
    mode: str = ""

    @classmethod
    def of(cls, name: str, value: Any) -> Self:
        plain = bare(value) if name == TARGET else value
        if is_image(plain):
            mode = "L" if name == TARGET and plain.mode == "P" else mode_of(plain)  # indices, no colours
            return cls("image", "<f4" if mode == "F" else "|u1", (plain.height, plain.width), mode)
        if name == TARGET and (isinstance(plain, str | int) or is_names(plain)):
            return cls("text" if isinstance(plain, str) else "whole" if isinstance(plain, int) else "names")
        array = numeric(name, value)
        return cls("array", array.dtype.str, array.shape)


@dataclass(frozen=True)
class Form:
    """The form of a column, which a pack's card keeps.

    kind: class (its text), labels (K,) of 0 and 1, image (PIL), mask of ids, or array; shape: its first axis is None
    where samples differ in it; layout: `hwc`, `chw` or `hw` of images, "" of all else; mode: that PIL images are
    converted to, "" where there can be none; resize: to the shape, or ""; names: the classes allowed, none: any.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int | None, ...] = ()
    layout: str = ""
    mode: str = ""
    resize: str = ""
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any], names: Sequence[str] = ()) -> Self:
        """Return the form that a card keeps; names: the card's classes."""
        return cls(**{**values, "shape": tuple(values["shape"]), "names": tuple(names)})

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
        """How many an image has."""
        return {"hwc": self.shape[-1], "chw": self.shape[0]}.get(self.layout, 1) if self.layout else None

    @property
    def size(self) -> tuple[int, ...]:
        """(H, W) of an image that is packed from PIL."""
        return tuple(n for n in self.shape[:2] if n)

    @property
    def column(self) -> Column:
        if self.kind == "class":
            return Column("fixed", "<i8", ())
        shape = tuple(n or 0 for n in self.shape[self.ragged :])
        return Column("ragged" if self.ragged else "fixed", self.dtype, shape)

    @cached_property
    def places(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def fit(self, name: str, value: Any) -> Any:
        """Return the array of a value as it is packed; a class as its text. Raises PackError(value, rule, fix)."""
        if self.kind == "class":
            return self.allowed(class_text(value, self.names))
        if self.kind == "labels":
            return self.multi_hot(value)
        array, alike = self.array(name, value), f"{name} must be {self.column}, as in other items"
        if array.ndim != len(self.shape) or array.shape[self.ragged :] != self.shape[self.ragged :] or not array.size:
            shape = str(self.column).partition(" ")[2]
            raise PackError(array.shape, f"{name} must have the shape {shape}, as in other items", AWAY)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            came = "nan" if np.isnan(array).any() else "inf"
            raise PackError(came, f"all numbers of {name} must be finite", "replace it, or leave the item out")
        made = array.astype(self.dtype, copy=False)
        fits = array.dtype.kind == made.dtype.kind if self.layout else np.can_cast(array.dtype, made.dtype, "same_kind")
        if not fits and not (array.dtype.kind in "iu" and made.dtype.kind in "iu" and np.array_equal(array, made)):
            raise PackError(f"{array.dtype} numbers, {array.min()} … {array.max()}", alike, "make them match")
        return made

    def array(self, name: str, value: Any) -> np.ndarray:
        """Return a value as an array of the form's axes, resized."""
        if self.kind == "mask":
            value = value.convert(self.mode) if is_image(value) and len(value.getbands()) > 1 else value
            ids = np.asarray(value) if is_image(value) else numeric(name, value)
            return nearest(ids, self.size, self.resize) if self.resize and ids.ndim > 1 else ids
        if self.resize and getattr(value, "dtype", None) == np.uint8 and value.ndim in (2, 3):  # to predict
            from PIL import Image

            value = Image.fromarray(value)
        if not is_image(value):
            return numeric(name, value)
        if not self.mode:
            raise PackError("an image", f"{name} must be {self.column}, as in other items", "make an array like theirs")
        made = pixels(value, self.mode, self.size, self.resize)
        made = made[..., None] if made.ndim < len(self.shape) else made
        return made.transpose(2, 0, 1) if self.layout == "chw" else made

    def allowed(self, name: str) -> str:
        if self.names and name not in self.places:
            listed = ", ".join(self.names[:5]) + " …" * (len(self.names) > 5)
            raise PackError(name, f"the class must be one of {len(self.names):,}: {listed}", AWAY)
        return name

    def multi_hot(self, value: Any) -> np.ndarray:
        """Return a 1 for each class that a sample has, by name, or for each of K numbers that is one."""
        made = np.zeros(len(self.names), np.uint8)
        if is_names(value):
            made[[self.places[self.allowed(composed(name))] for name in value]] = 1
            return made
        ones = numeric(TARGET, value)
        if ones.shape != made.shape or not np.isin(ones, (0, 1)).all():
            raise PackError(value, f"y must be names of classes, or {len(made)} numbers 0 or 1", AWAY)
        return ones.astype(np.uint8)


def forms_in(options: Mapping[str, Any], classes: Sequence[str] = ()) -> dict[str, Form]:
    """Return the forms that a card's options keep."""
    return {name: Form.of(form, classes) for name, form in options["forms"].items()}


def forms_of(
    seen: Sequence[Mapping[str, Sign]], classes: Any, size: Sequence[int] | None, resize: str
) -> dict[str, Form]:
    """Return the form of each column, from items looked at. Raises PackError with a sentence where they share none.
    classes: the names of classes, where there are some; False: whole numbers are values."""
    keys = [*dict.fromkeys(tuple(signs) for signs in seen)]
    if len({frozenset(each) - {TARGET} for each in keys}) > 1:
        came = " and ".join(f"({', '.join(each)})" for each in keys)
        raise PackError(f"all items must have the same parts, got {came}; make them match, or choose with inputs=[…]")
    columns = {key: [signs[key] for signs in seen if key in signs] for each in keys for key in each}
    pictured = any(name != TARGET and signs[0].kind == "image" for name, signs in columns.items())
    return {name: form_of(name, signs, classes, size if pictured else None, resize) for name, signs in columns.items()}


def form_of(name: str, signs: Sequence[Sign], classes: Any, size: Sequence[int] | None, resize: str) -> Form:
    kinds, names = {sign.kind for sign in signs}, tuple(classes or ())
    if classes is not False and ("text" in kinds or kinds == {"whole"}):
        return Form("class", names=names)
    if kinds == {"names"} or (name == TARGET and names and {sign.shape for sign in signs} == {(len(names),)}):
        return Form("labels", "|u1", (len(names),), names=names)
    kinds = {"array" if kind == "whole" else kind for kind in kinds}
    mode = max(sign.mode for sign in signs)  # RGB above L
    if len(kinds) > 1 or "text" in kinds or (mode == "RGB" and any(sign.mode == "F" for sign in signs)):
        came = kinds if len(kinds) > 1 or "text" in kinds else {sign.mode for sign in signs}
        raise PackError(
            f"{name} must be numbers, or images, in all items, got {', '.join(sorted(came))}; make them match"
        )
    [kind], dtype = kinds, np.result_type(*{sign.dtype for sign in signs})
    dtype = np.dtype(np.float32) if dtype.kind == "f" else dtype
    if name == TARGET and (kind == "image" or (size and len(signs[0].shape) == 2 and dtype.kind in "iu")):
        kind, dtype = "mask", np.dtype(np.int32) if mode == "F" else dtype
    sized = bool(size) and kind != "array"
    shape = tuple(size or ()) if sized else shape_of(name, kind, [sign.shape for sign in signs])
    shape = (*shape, 3) if mode == "RGB" else shape
    layout = layout_of(kind, dtype, shape, name == TARGET)
    if kind == "array" and layout and dtype == np.uint8:  # PIL images fit too
        mode = {1: "L", 3: "RGB"}.get(1 if layout == "hw" else shape[0 if layout == "chw" else 2] or 0, "")
    return Form(kind, dtype.str, shape, layout, mode, resize if sized else "")


def shape_of(name: str, kind: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int | None, ...]:
    """Return the shape that items share; None in front where their first axes differ."""
    shapes = [*dict.fromkeys(shapes)]
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
    rank = 0 if None in shape or dtype not in (np.uint8, np.float32) else len(shape)
    if rank == 2:
        return "hw" if kind == "image" or (dtype == np.uint8 and not target) else ""
    if rank != 3 or kind == "image" or kind == "mask":
        return "hwc" if rank == 3 else ""
    return "chw" if shape[0] in COLOURS else "hwc" if shape[2] in COLOURS else ""


def points_of(forms: dict[str, Form], given: Any) -> tuple[dict[str, Form], dict[str, list[str]]]:
    """Return the forms, and column → [the column of its image, "points" or "boxes"] of those that are named."""
    images, points = [name for name, form in forms.items() if form.layout and name != TARGET], {}
    for name in [given] if isinstance(given, str) else given or ():
        name = TARGET if name == "target" else name
        last = forms[name].shape[-1:] if name in forms else ()
        kind = {(2,): "points", (4,): "boxes"}.get(last)  # type: ignore[arg-type]
        if kind is None or len(images) != 1:
            came = ", ".join(f"{each} {form.column}" for each, form in forms.items())
            rule = "points must name columns (…, 2) of x, y or (…, 4) of x1, y1, x2, y2 beside one image"
            raise PackError(f"{rule}, got {name!r} of {came}")
        forms, points[name] = {**forms, name: dataclasses.replace(forms[name], dtype="<f4")}, [images[0], kind]
    return forms, points


def moments(forms: Mapping[str, Form], arrays: Mapping[str, np.ndarray], train: np.ndarray) -> dict[str, Any]:
    """Return mean and standard deviation, 1 of what never varies, of targets, float32 columns and images in 0…1 over
    the training split: per channel of images; per value of vectors and of each step of ragged columns; else one of all,
    as nothing says which axis holds what."""
    chosen, moments = np.isin(np.arange(len(arrays["split"])), train), {"mean": {}, "std": {}}
    for name, form in forms.items():
        measured = name == TARGET or form.dtype == "<f4" or form.layout
        if name in arrays and measured and form.kind not in ("class", "labels"):
            rows = np.repeat(chosen, np.diff(arrays[f"{name}.offsets"])) if form.ragged else chosen
            vectors = len(form.shape) == 1 + form.ragged and (form.shape[-1] or 0) <= WIDE
            axis = {"chw": 1, "hwc": 3}.get(form.layout, 1 if vectors else None)
            mean, std = moments_of(arrays[name], rows, axis)
            moments["mean"][name] = (mean / form.unit).tolist()
            moments["std"][name] = np.where(std > 0, std / form.unit, 1).tolist()
    return moments


def moments_of(array: np.ndarray, rows: np.ndarray, axis: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return (mean, deviation) of an array's chosen rows, each for every place on an axis; None: one for all."""
    places, count, step = 1 if axis is None else array.shape[axis], 0, max(1, BLOCK * len(array) // max(array.size, 1))
    mean, squares = np.zeros(places), np.zeros(places)  # Chan's update: far from 0 a difference of squares says nothing
    for start in range(0, len(array), step):
        block = array[start : start + step][rows[start : start + step]]
        if len(block):
            flat = np.moveaxis(block, axis or 0, 0).reshape(places, -1).astype(np.float64)
            now, n = flat.mean(1), flat.shape[1]
            squares += flat.var(1) * n + np.square(now - mean) * count * n / (count + n)
            mean, count = mean + (now - mean) * n / (count + n), count + n
    return mean, np.sqrt(squares / max(count, 1))
