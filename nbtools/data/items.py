"""What an item of a Dataset holds: named arrays, of a form that all items share.

An item may be an array, a tensor, a number, a PIL image, or a tuple, dict, namedtuple or dataclass of them; its class
may also be a text. A pack holds uint8, whole numbers, booleans and float32: other floats become float32.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np
import torch

from nbtools.errors import PackError

if TYPE_CHECKING:
    from PIL import Image

TARGET = "y"
TARGETS = ("y", "label", "labels", "target")  # keys of an item that are its target without being asked for
TAKEN = ("id", "split")  # names that a pack or a batch needs itself
COLOURS = (1, 3, 4)  # channels of an image
MODES = {1: "L", 3: "RGB"}  # of images with so many
SMALL = 4096  # numbers of a value that are looked at one by one
ENOUGH = 16  # of so many items, one may break the rule of all others: it is damaged; more are a property of the data
WIDER = {"u2": "i4", "u4": "i8", "u8": "i8", "f2": "f4", "f8": "f4", "f16": "f4"}  # torch cannot index wide unsigned
T = TypeVar("T")


def is_image(value: Any) -> bool:
    """Whether it is a PIL image. Nobody has one where Pillow, which is slow to import, is not loaded."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def named(item: Any, target: Any = None, inputs: Sequence[Any] | None = None) -> dict[str, Any]:
    """Column → value of an item, the target under `y`.

    target: a key, or a place in a tuple; by default one of TARGETS, or the last of a tuple. inputs: likewise; by
    default all others. Inputs keep their keys, nested ones joined by _; of a tuple they are `x`, or `x1`, `x2` …
    """
    parts, last = parts_of(item)
    target = last if target is None else target
    chosen = [key for key in parts if key != target] if inputs is None else list(inputs)
    return columns_of(parts, chosen, target)


def inputs_of(item: Any, columns: Sequence[str], target: Any, inputs: Sequence[Any] | None) -> dict[str, Any]:
    """Input column → value of an item to predict: as the Dataset returns it, or without its target, by the roles that
    packing was given; else a dict by the columns, a tuple in their order. Raises PackError(value, rule, fix)."""
    parts, last = parts_of(item)
    target = last if target is None else target
    if inputs is None:
        trials = [key for key in parts if key != target], [*parts]
    else:  # where the target is left out, what follows it comes one place earlier
        after = {key for key in inputs if isinstance(key, int) and isinstance(target, int) and key > target}
        trials = [*inputs], [key - 1 if key in after else key for key in inputs]
    for chosen in trials:
        if parts.keys() >= set(chosen) and (found := columns_of(parts, chosen)).keys() >= set(columns):
            return {name: found[name] for name in columns}
    found = dict(parts if isinstance(item, Mapping) else zip(columns, parts.values(), strict=False))
    if not found.keys() >= set(columns):
        raise PackError(", ".join(map(str, found)), f"an item must have {', '.join(columns)}", "add what is missing")
    return {name: found[name] for name in columns}


def columns_of(parts: Mapping[Any, Any], inputs: Sequence[Any], target: Any = None) -> dict[str, Any]:
    """Column → value of chosen parts; target None: of none."""
    for key in [*inputs, *([] if target is None else [target])]:
        if key not in parts:
            raise PackError(
                ", ".join(map(str, parts)) or "nothing", f"the item must have {key!r}", "name one that it has"
            )
    if target is not None and target in inputs:
        raise PackError(repr(target), "the target must not be an input", "leave it out of inputs=[…]")
    flat = [pair for key in inputs for pair in flattened(parts[key], "" if isinstance(key, int) else str(key))]
    unnamed = sum(not name for name, _ in flat)
    numbers = iter(["x"] if unnamed == 1 else [f"x{i}" for i in range(1, unnamed + 1)])
    pairs = [(name or next(numbers), value) for name, value in flat]
    pairs += flattened(parts[target], TARGET) if target is not None else []
    if len(dict(pairs)) < len(pairs):
        raise PackError(
            ", ".join(name for name, _ in pairs), "the names of columns must differ", "rename one in the Dataset"
        )
    return dict(pairs)


def parts_of(item: Any) -> tuple[dict[Any, Any], Any]:
    """(the parts of an item by key, or by place in a tuple; the one that is its target, None if none is)."""
    last = None
    if item is None:
        raise PackError("None", "an item must hold arrays", "return them from the Dataset, or leave the item out")
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        item = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    elif isinstance(item, tuple) and hasattr(item, "_asdict"):
        item = item._asdict()  # type: ignore[attr-defined]
        last = [*item][-1]
    if isinstance(item, Mapping):
        return dict(item), next((key for key in TARGETS if key in item), last)
    if isinstance(item, tuple) or (isinstance(item, list) and not is_array(item)):
        return dict(enumerate(item)), len(item) - 1 if len(item) > 1 else None
    return {0: item}, None


def flattened(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from flattened(part, f"{name}_{key}" if name else str(key))
    elif isinstance(value, list | tuple) and not is_array(value):
        for i, part in enumerate(value, 1):
            yield from flattened(part, f"{name}{i}" if name else "")
    else:
        yield re.sub(r"[^\w-]+", "_", name), value  # it names a file


def plain(asked: Any) -> Any:
    """A key, place or list of them, as JSON keeps it."""
    return json.loads(json.dumps(asked, default=lambda key: key.item() if hasattr(key, "item") else str(key)))


def is_array(value: Any) -> bool:
    """Whether a value is a number, or nested lists of numbers."""
    if isinstance(value, list | tuple):
        return all(map(is_array, value))
    return isinstance(value, int | float | complex | np.number | np.bool_)


def numeric(name: str, value: Any) -> np.ndarray:
    """An array of a dtype that packs hold. Raises PackError(value, rule, fix) for all else."""
    return narrow(numbers_of(name, value))


def narrow(array: np.ndarray) -> np.ndarray:
    wide = WIDER.get(f"{array.dtype.kind}{array.dtype.itemsize}", array.dtype)
    return array.astype(np.dtype(wide).newbyteorder("="), copy=False)


def numbers_of(name: str, value: Any) -> np.ndarray:
    """An array of numbers as they are."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().resolve_conj().resolve_neg()
        value = value.to_dense() if value.layout != torch.strided else value
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    try:
        array = np.asarray(value)
    except Exception as error:  # lists of unequal lengths, or what an object's own __array__ raises
        raise PackError(error, f"{name} must be an array", "make its rows equally long in the Dataset") from None
    kind = array.dtype.kind
    if kind not in "biuf":
        came = {"U": f"the text {str(value)[:40]!r}", "c": f"{array.dtype} numbers"}.get(kind, type(value).__name__)
        fix = {"U": "leave it out with inputs=[…], or encode it", "c": "take torch.view_as_real(…)"}
        fixed = fix.get(kind, "convert it to numbers in the Dataset")
        raise PackError("None" if value is None else came, f"{name} must hold numbers", fixed)
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise PackError(array.max(), f"whole numbers of {name} must be below 2⁶³", "convert them to floats or strings")
    return array


def require_distinct(name: str, values: np.ndarray, fix: str = "subtract an offset, such as the smallest") -> None:
    """Raise PackError where float32 changes float64 numbers (n, …) by a hundredth of their deviation at a place, as it
    does Unix seconds of one hour."""
    with np.errstate(over="ignore"):
        kept = values.astype(np.float32)
    known = np.isfinite(kept).all(tuple(range(1, values.ndim)))
    values, lost = values[known], np.abs(values[known] - kept[known])
    if not len(values):
        return
    spread = values.std(0)
    if ((lost.max(0) > spread / 100) & (spread > 1e-12 * np.abs(values).max(0))).any():  # less is of rounding
        some = f"{values.flat[lost.argmax()]:.17g}"
        rule = f"numbers of {name} such as {some} are equal in float32, which is what a pack holds"
        raise PackError(f"{rule}; {fix}")


def pixels(image: Image.Image, mode: str, size: Sequence[Any] | None = None) -> np.ndarray:
    """An image as (H, W, 3) or (H, W) uint8 for the modes RGB and L, on white where it is transparent; 16 bits as
    float32 in 0…1; other deep modes as they are. size: (H, W) to resize it to."""
    from PIL import Image

    if mode in ("RGB", "L"):
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        image = image.convert(mode)
    if size is not None:
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    array = np.asarray(image)
    return array.astype(np.float32) / np.float32(65535) if image.mode.startswith("I;16") else array


def mode_of(image: Image.Image) -> str:
    """The mode that an image is packed in: RGB, L, or a deep one."""
    if image.mode.startswith(("I", "F")):
        return image.mode
    return "L" if image.mode in ("1", "L", "LA", "La") else "RGB"


def bare(value: Any) -> Any:
    """A target as a plain number or text, where it is an array of one."""
    single = isinstance(value, torch.Tensor | np.ndarray | np.generic) and np.prod(value.shape) == 1
    return value.item() if single else value


def in_255ths(array: np.ndarray) -> np.ndarray | None:
    """Floats that are exactly n/255 as those n, uint8; None where one is not."""
    with np.errstate(invalid="ignore"):
        numbers = np.rint(array * 255).clip(0, 255).astype(np.uint8)
    return numbers if np.array_equal(numbers.astype(np.float32) / np.float32(255), array) else None


@dataclass(frozen=True)
class Sign:
    """What is remembered of a value that was looked at. kind: text, whole, missing (targets only), image, array, or ""
    with the error of one that cannot be packed. exact: all of it are 255ths; tensor: it was one; doubles: it itself if
    it is float64, and small."""

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    mode: str = ""
    exact: bool = False
    tensor: bool = False
    error: tuple[Any, ...] = ()
    doubles: np.ndarray | None = dataclasses.field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, name: str, value: Any) -> Self:
        if is_image(value):
            mode = mode_of(value)
            dtype = {"RGB": "|u1", "L": "|u1", "I": "<i4"}.get(mode, "<f4")
            return cls("image", dtype, (value.height, value.width), mode)
        plain = bare(value) if name == TARGET else ()
        if isinstance(plain, str):
            return cls("text")
        if plain is None or str(plain) in ("nan", "<NA>", "NaT"):
            return cls("missing")
        kind = "whole" if isinstance(plain, int) else "array"
        try:
            given = numbers_of(name, value)
        except PackError as error:  # a number beyond 64 bits may still name a class
            return cls("", error=error.args) if kind == "array" else cls(kind)
        array, doubles = narrow(given), given.copy() if given.dtype == np.float64 and given.size <= SMALL else None
        exact = array.dtype.kind == "f" and array.ndim > 0 and in_255ths(array) is not None
        return cls(kind, array.dtype.str, array.shape, "", exact, isinstance(value, torch.Tensor), doubles=doubles)


@dataclass(frozen=True)
class Form:
    """What all samples have in common under one name: how their values are packed, and later those to predict. A pack's
    card keeps it.

    kind: class, image (of PIL) or array; shape: its first axis is None where samples differ in it; layout: `hwc`, `chw`
    or `hw` of images, "" of all else; mode: that PIL images are converted to, "" where there can be none; resize: to
    the shape; scaled: floats kept as 255ths; names: the classes allowed, none: any.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int | None, ...] = ()
    layout: str = ""
    mode: str = ""
    resize: bool = False
    scaled: bool = False
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any], names: Sequence[str] = ()) -> Self:
        """The form that a card keeps; names: the card's classes."""
        return cls(**{**values, "shape": tuple(values["shape"]), "names": tuple(names)})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a card, which has the names of its classes itself."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "names"}

    @property
    def unit(self) -> int:
        """What 1 is kept as: 255 in images of bytes, and where floats are kept as 255ths."""
        return 255 if self.dtype == "|u1" and (self.layout or self.scaled) else 1

    @property
    def ragged(self) -> bool:
        return self.shape[:1] == (None,)

    def __str__(self) -> str:
        return f"{np.dtype(self.dtype)} ({', '.join('any' if n is None else str(n) for n in self.shape)})"

    @cached_property
    def known(self) -> frozenset[str]:
        return frozenset(self.names)

    @cached_property
    def numbered(self) -> bool:
        """Whether names of classes are numbers themselves."""
        return any(name.removeprefix("-").isdecimal() for name in self.names)

    def fit(self, name: str, value: Any) -> np.ndarray | str:
        """The value as it is packed; a class as its text. Raises PackError(value, rule, fix) where it does not fit."""
        if self.kind == "class":
            return self.text(bare(value))
        picture = is_image(value)
        if picture and not self.mode:
            raise PackError(
                "an image", f"{name} must be {self}, as in other items", "return it as an array, made like theirs"
            )
        array = self.pixels(value) if picture else numeric(name, value)
        if array.ndim != len(self.shape) or array.shape[self.ragged :] != self.shape[self.ragged :]:
            shape = str(self).partition(" ")[2]
            alike = "resize it" if picture else "make it match"
            raise PackError(
                array.shape, f"{name} must have the shape {shape}, as in other items", f"{alike}, or leave it out"
            )
        if not array.size:
            raise PackError(f"shape {array.shape}", f"{name} must not be empty", "leave the item out of the Dataset")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            came = "nan" if np.isnan(array).any() else "inf"
            raise PackError(came, f"all numbers of {name} must be finite", "replace it, or leave the item out")
        return self.stored(name, array)

    def pixels(self, image: Image.Image) -> np.ndarray:
        found = pixels(image, self.mode, self.shape[:2] if self.resize else None)
        found = found[..., None] if found.ndim < len(self.shape) else found
        return found.transpose(2, 0, 1) if self.layout == "chw" else found

    def stored(self, name: str, array: np.ndarray) -> np.ndarray:
        """Numbers in the column's dtype, which changes none of them: in images kept as bytes 0…1 and 0…255 are the
        same, and no other image has whole numbers."""
        dtype, kind, found = np.dtype(self.dtype), array.dtype.kind, array
        in_bytes = self.unit != 1
        if in_bytes and kind == "f":
            found = in_255ths(array)
        elif kind in "iu" and dtype.kind in "iu" and (self.layout or not self.scaled):
            limits = np.iinfo(dtype)
            found = array if limits.min <= array.min() <= array.max() <= limits.max else None
        elif in_bytes or (kind != dtype.kind if self.layout else not np.can_cast(array.dtype, dtype, "same_kind")):
            found = None
        if found is None:
            came = f"{array.dtype} numbers, {float(array.min()):g} … {float(array.max()):g}"
            whole = "whole numbers 0…255, or " if self.layout else ""
            rule = f"kept in bytes: {whole}numbers n/255" if in_bytes else f"{dtype}, as in other items"
            raise PackError(came, f"{name} must be {rule}", "make them match")
        return found.astype(dtype, copy=False)

    def text(self, value: Any) -> str:
        """The name of a class; a whole number may be its place among the names, if these are words."""
        if value is None or str(value) in ("", "nan", "<NA>", "NaT") or not isinstance(value, str | int):
            came = str(value) or "an empty string"
            raise PackError(
                came, "every sample must have a class: a string or a whole number", "leave it out, or correct it"
            )
        if not self.names or str(value) in self.known:
            return str(value)
        if isinstance(value, int) and 0 <= value < len(self.names) and not self.numbered:
            return self.names[value]
        some = ", ".join(self.names[:5]) + (" …" if len(self.names) > 5 else "")
        raise PackError(value, f"the class must be one of {len(self.names):,}: {some}", "correct it, or leave it out")


def forms_in(options: Mapping[str, Any], classes: Sequence[str] = ()) -> dict[str, Form]:
    """The forms that a card's options keep."""
    return {name: Form.of(form, classes) for name, form in options["forms"].items()}


def forms_of(
    seen: Sequence[Mapping[str, Sign]], names: Sequence[str] | Literal[False], as_bytes: bool, size: Any
) -> dict[str, Form]:
    """The form of each column, from items looked at. Raises PackError with a sentence where they have none.
    names: of classes; False: whole numbers are values."""
    keys = common([tuple(signs) for signs in seen])
    if keys is None:
        came = " and ".join(f"({', '.join(keys)})" for keys in dict.fromkeys(map(tuple, seen)))
        raise PackError(f"all items must have the same parts, got {came}; make them match, or choose with inputs=[…]")
    alike = [signs for signs in seen if tuple(signs) == keys]
    unfit = {
        key: (key, "this name is reserved in a pack", "leave it out with inputs=[…]") for key in keys if key in TAKEN
    }
    unfit |= {key: alike[0][key].error for key in keys if not any(signs[key].kind for signs in alike)}
    if unfit:
        value, rule, fix = next(iter(unfit.values()))
        others = [key for key in keys if key not in unfit and key not in TARGETS]
        more = f" (and so for {', '.join([*unfit][1:])})" if len(unfit) > 1 else ""
        fix = fix.replace("inputs=[…]", f"inputs={others}" if others else "inputs=[…]")
        raise PackError(f"{rule}, got {value}{more}; {fix}")
    columns = {key: [signs[key] for signs in alike if signs[key].kind] for key in keys}
    return {key: form_of(key, signs, names, as_bytes, size) for key, signs in columns.items()}


def form_of(name: str, signs: Sequence[Sign], names: Sequence[str] | Literal[False], as_bytes: bool, size: Any) -> Form:
    kinds = {sign.kind for sign in signs} - {"missing"}
    if names is not False and ("text" in kinds or kinds == {"whole"}):
        return Form("class", names=tuple(names))
    kind = common(
        [{"whole": "array"}.get(sign.kind, sign.kind) for sign in signs if sign.kind != "missing"] or ["none"]
    )
    if kind not in ("image", "array"):
        raise PackError(f"{name} must be numbers, or images, in all items, got {', '.join(sorted(kinds)) or 'nothing'}")
    signs = [sign for sign in signs if sign.kind == kind or (kinds == {"whole"} and sign.dtype)]
    modes = {sign.mode for sign in signs}
    if len(modes) > 1 and modes - {"RGB", "L"}:
        raise PackError(f"{name} must have one mode, got images of {', '.join(sorted(modes))}; convert them")
    mode = "RGB" if "RGB" in modes else signs[0].mode
    shape = tuple(size) if size and kind == "image" else shape_of(name, [sign.shape for sign in signs], kind)
    dtype = np.result_type(*{sign.dtype for sign in signs})
    dtype = np.dtype(np.float32) if dtype.kind == "f" else dtype
    ragged = shape[:1] == (None,)
    alike = [sign.doubles for sign in signs if sign.doubles is not None and sign.shape[ragged:] == shape[ragged:]]
    if alike:
        require_distinct(name, np.concatenate(alike) if ragged else np.stack(alike))
    scaled = as_bytes and all(sign.exact for sign in signs)
    dtype, shape = "|u1" if scaled else dtype.str, (*shape, 3) if mode == "RGB" else shape
    layout = layout_of(kind, dtype, shape, signs[0].tensor)
    if dtype == "|u1" and layout and not mode:  # PIL images fit too
        mode = MODES.get(1 if layout == "hw" else shape[0 if layout == "chw" else 2] or 0, "")
    return Form(kind, dtype, shape, layout, mode, bool(size) and kind == "image", scaled)


def layout_of(kind: str, dtype: str, shape: tuple[int | None, ...], tensor: bool) -> str:
    rank = len(shape)
    if shape[:1] == (None,) or rank not in (2, 3) or dtype not in ("|u1", "<f4"):
        return ""
    if kind == "image" or rank == 2:
        return "hwc" if rank == 3 else "hw" if kind == "image" or dtype == "|u1" else ""
    first, last = shape[0] in COLOURS, shape[2] in COLOURS
    return "chw" if first and (tensor or not last) else "hwc" if last else ""


def shape_of(name: str, shapes: Sequence[tuple[int, ...]], kind: str) -> tuple[int | None, ...]:
    """The shape that items share; None in front where their first axes differ."""
    whole, rest = common(shapes), common([(len(shape), shape[1:]) for shape in shapes])
    if whole is not None:
        return whole
    if rest is not None and rest[0] and kind == "array":
        return (None, *rest[1])
    usual = Counter(shapes).most_common(1)[0][0]
    came = ", ".join(map(str, [*dict.fromkeys(shapes)][:3]))
    if kind == "image":
        raise PackError(f"{name} must be of one size, got images (height, width) {came} …; pass size={usual} to resize")
    raise PackError(
        f"{name} must have one shape, apart from its first axis, got {came} …; make them match in the Dataset"
    )


def common(values: Sequence[T]) -> T | None:
    """What all share, or all but one of ENOUGH; None where they differ."""
    [(value, count)] = Counter(values).most_common(1)
    return value if count >= len(values) - (len(values) >= ENOUGH) else None
