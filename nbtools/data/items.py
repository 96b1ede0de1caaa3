"""What an item holds: parts by name or place, of which one is the target and some are inputs.

An item is an array, tensor, number or PIL image, or a tuple or dict of them; its class may be a text.
"""

from __future__ import annotations

import importlib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from nbtools.data.images import is_image, upright
from nbtools.errors import PackError

TARGET = "y"
TARGETS = ("y", "label", "labels", "target")  # keys of an item that are its target without being named
WIDER = {"u2": "i4", "u4": "i8", "u8": "i8"}  # torch cannot index wide unsigned numbers


def parts_of(item: Any) -> dict[Any, Any]:
    """Return the parts of an item by key, or by place in a tuple; a list is an array."""
    if item is None:
        raise PackError("None", "an item must hold arrays", "return them from the Dataset, or leave the item out")
    if isinstance(item, Mapping):
        return dict(item)
    return dict(enumerate(item)) if isinstance(item, tuple) else {0: item}


def target_of(parts: Mapping[Any, Any], target: Any, inputs: Sequence[Any] | None) -> Any:
    """Return the key of the target, None without one. Raises PackError where there are several readings."""
    if target is not None:
        return target
    names = [key for key in TARGETS if key in parts]
    rest = [key for key in parts if key not in (inputs or ())]
    if len(names) == 1 or [*parts] == [0, 1]:
        return next((key for key in names or [1] if key in rest), None)
    if names or (rest and len(parts) > 2 and 0 in parts):
        came = ", ".join(f"{key!r}: {type(value).__name__}" for key, value in parts.items())
        raise PackError(f"which part of an item is its target? It holds {came}; name one: target={(names or [1])[0]!r}")
    return None


def named(parts: Mapping[Any, Any], target: Any, inputs: Sequence[Any] | None) -> dict[str, Any]:
    """Return column → value: the target as `y`; inputs, None: all others, by their keys, those of a tuple as `x`, or
    `x1`, `x2` … Raises PackError(value, rule, fix)."""
    chosen = [key for key in parts if key != target] if inputs is None else [*inputs]
    places = [key for key in chosen if isinstance(key, int)]
    names = {key: f"x{i}" for i, key in enumerate(places, 1)} if len(places) > 1 else dict.fromkeys(places, "x")
    columns = [names.get(key) or re.sub(r"[^\w-]+", "_", str(key)) for key in chosen]  # they name files
    if target is not None:
        chosen, columns = [*chosen, target], [*columns, TARGET]
    if lacking := [key for key in chosen if key not in parts]:
        raise PackError(", ".join(map(str, parts)), f"an item must have {lacking[0]!r}", "name a part that it has")
    if len({*columns}) < len(chosen) or len({*chosen}) < len(chosen):
        rule, fix = "inputs and target must have names of their own", "rename one, or choose with inputs=[…]"
        raise PackError(", ".join(columns), rule, fix)
    return {column: parts[key] for column, key in zip(columns, chosen, strict=True)}


def inputs_of(item: Any, columns: Sequence[str], target: Any, inputs: Sequence[Any] | None) -> dict[str, Any]:
    """Return input column → value of an item to predict: as the Dataset returns it, or without its target; else a dict
    by the columns, or values in their order. Raises PackError(value, rule, fix)."""
    parts = {key: value for key, value in parts_of(item).items() if key != target}
    values = named(parts, None, inputs if parts.keys() >= {*(inputs or ())} else None)
    if not values.keys() >= {*columns} and not isinstance(item, Mapping):
        values = dict(zip(columns, parts_of(item).values(), strict=False))
    if not values.keys() >= {*columns}:
        raise PackError(", ".join(values), f"an item must have {', '.join(columns)}", "add what is missing")
    return {name: values[name] for name in columns}


# -- values


def numeric(name: str, value: Any) -> np.ndarray:
    """Return an array of a dtype that packs hold. Raises PackError(value, rule, fix) for all else."""
    if isinstance(value, list | tuple) and any(getattr(each, "shape", ()) for each in value):
        fix = "give each a place of its own, as in (a, b, label) with target=2"  # or are they to be stacked?
        raise PackError("several", f"{name} must be one array", fix)
    try:
        array = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    except Exception as error:  # lists of unequal lengths, or what an object's own __array__ raises
        raise PackError(
            error, f"{name} must be an array", "make it one of numbers; parts of an item are a tuple or a dict"
        ) from None
    if array.dtype.kind not in "biuf":
        came = f"the text {value[:40]!r}" if isinstance(value, str) else type(value).__name__
        fix = "convert it, leave it out with inputs=[…], or pass text=function for texts"
        raise PackError(came, f"{name} must hold numbers", fix)
    wide = "f4" if array.dtype.kind == "f" else WIDER.get(f"{array.dtype.kind}{array.dtype.itemsize}", array.dtype)
    return array.astype(np.dtype(wide).newbyteorder("="), copy=False)


def decoded(value: Any, function: str) -> Any:
    """Return an image upright, and of a text what a function makes of it."""
    if is_image(value):
        value.load()  # Pillow decodes no earlier
        return upright(value)
    return resolve(function)(value) if function and isinstance(value, str) else value


def bare(value: Any) -> Any:
    """Return a target as a plain number or text, where it is an array of one."""
    single = isinstance(value, torch.Tensor | np.ndarray | np.generic) and np.prod(value.shape) == 1
    return value.item() if single else value


def is_missing(value: Any) -> bool:
    return value is None or (np.ndim(value) == 0 and str(value) in ("", "nan", "<NA>", "NaT"))


def is_names(value: Any) -> bool:
    """Return whether a value is several classes by name."""
    return isinstance(value, list | tuple | set) and all(isinstance(each, str) for each in value)


def composed(name: Any) -> str:
    """Return the name of a class with é as one character, where macOS writes e and an accent."""
    return unicodedata.normalize("NFC", str(name))


def class_text(value: Any, names: Sequence[str]) -> str:
    """Return the name of a sample's class; a whole number is its place among names that are words.

    Raises PackError(value, rule, fix) where there is none, PackError(sentence) for a place behind the names: then
    labels count from 1, or the names are those of something else, and all are wrong.
    """
    value = bare(value)
    if is_missing(value) or not isinstance(value, str | int):
        came, rule = "nothing" if is_missing(value) else str(value), "a string or a whole number"
        raise PackError(came, f"every sample must have a class: {rule}", "leave it out, or correct it")
    if isinstance(value, str) or not names or value < 0 or any(name.lstrip("-").isdecimal() for name in names):
        return composed(value)
    if value >= len(names):
        rule = f"the {len(names)} classes {', '.join(names[:5])}{' …' * (len(names) > 5)} are numbered from 0"
        raise PackError(f"{rule}, and a label is {value}; subtract 1 where labels count from 1, or return names")
    return names[value]


# -- functions of texts, which a pack keeps by name


def function_name(function: Any) -> str:
    """Return `module:name` of a function. Raises PackError for one that has none."""
    name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '<none>')}"
    if "<" in name or "." in name.partition(":")[2]:
        raise PackError(f"text must be a function of a module, by whose name predictions find it, got {function!r}")
    return name


@cache
def resolve(name: str) -> Any:
    """Return the function of that name."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)
