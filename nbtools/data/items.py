"""What an item of a Dataset holds: parts by name or place, of which one is the target and some are inputs.

An item is an array, tensor, number or PIL image, or a tuple or dict of them; its class may be a text.
"""

from __future__ import annotations

import importlib
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from nbtools.errors import PackError

TARGET = "y"
TARGETS = ("y", "label", "labels", "target")  # keys of an item that are its target without being named
WIDER = {"u2": "i4", "u4": "i8", "u8": "i8"}  # torch cannot index wide unsigned numbers


def parts_of(item: Any) -> dict[Any, Any]:
    """Return the parts of an item by key, or by place in a tuple."""
    if item is None:
        raise PackError("None", "an item must hold arrays", "return them from the Dataset, or leave the item out")
    if isinstance(item, Mapping):
        return dict(item)
    several = isinstance(item, tuple) or (isinstance(item, list) and not is_array(item))
    return dict(enumerate(item)) if several else {0: item}


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
    """Return column → value of chosen parts, the target under `y`; inputs None: all others. Inputs keep their keys,
    nested ones joined by _; of a tuple they are `x`, or `x1`, `x2` … Raises PackError(value, rule, fix)."""
    inputs = [key for key in parts if key != target] if inputs is None else inputs
    goals = [] if target is None else [target]
    for key in [*inputs, *goals]:
        if key not in parts:
            raise PackError(", ".join(map(str, parts)), f"an item must have {key!r}", "name a part that it has")
    flat = [pair for key in inputs for pair in flattened(parts[key], "" if isinstance(key, int) else str(key))]
    unnamed = sum(not name for name, _ in flat)
    numbers = iter(["x"] if unnamed == 1 else [f"x{i}" for i in range(1, unnamed + 1)])
    pairs = [(name or next(numbers), value) for name, value in flat]
    pairs += [pair for key in goals for pair in flattened(parts[key], TARGET)]
    if len(dict(pairs)) < len(pairs) or target in inputs:
        names = ", ".join(name for name, _ in pairs)
        raise PackError(
            names, "inputs and target must have names of their own", "rename one, or choose with inputs=[…]"
        )
    return dict(pairs)


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


def flattened(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from flattened(part, f"{name}_{key}" if name else str(key))
    elif isinstance(value, list | tuple) and not is_array(value) and not is_names(value):
        for i, part in enumerate(value, 1):
            yield from flattened(part, f"{name}{i}" if name else "")
    else:
        yield re.sub(r"[^\w-]+", "_", name), value  # it names a file


def is_array(value: Any) -> bool:
    """Return whether a value is a number, or nested lists of numbers."""
    if isinstance(value, list | tuple):
        return all(map(is_array, value)) and bool(value)
    return isinstance(value, int | float | np.number | np.bool_)


def is_names(value: Any) -> bool:
    """Return whether a value is several classes by name."""
    return isinstance(value, list | tuple | set) and all(isinstance(each, str) for each in value)


# -- values


def numeric(name: str, value: Any) -> np.ndarray:
    """Return an array of a dtype that packs hold. Raises PackError(value, rule, fix) for all else."""
    try:
        array = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    except Exception as error:  # lists of unequal lengths, or what an object's own __array__ raises
        raise PackError(error, f"{name} must be an array", "make it one of numbers in the Dataset") from None
    if array.dtype.kind not in "biuf":
        came = f"the text {value[:40]!r}" if isinstance(value, str) else type(value).__name__
        fix = "leave it out with inputs=[…], or pass text=function" if isinstance(value, str) else "convert it"
        raise PackError(came, f"{name} must hold numbers", fix)
    wide = "f4" if array.dtype.kind == "f" else WIDER.get(f"{array.dtype.kind}{array.dtype.itemsize}", array.dtype)
    return array.astype(np.dtype(wide).newbyteorder("="), copy=False)


def bare(value: Any) -> Any:
    """Return a target as a plain number or text, where it is an array of one."""
    single = isinstance(value, torch.Tensor | np.ndarray | np.generic) and np.prod(value.shape) == 1
    return value.item() if single else value


def is_missing(value: Any) -> bool:
    return value is None or (np.ndim(value) == 0 and str(value) in ("", "nan", "<NA>", "NaT"))


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
        came = "nothing" if is_missing(value) else str(value)
        raise PackError(
            came, "every sample must have a class: a string or a whole number", "leave it out, or correct it"
        )
    if isinstance(value, str) or not names or value < 0 or any(name.lstrip("-").isdecimal() for name in names):
        return composed(value)
    if value >= len(names):
        rule = f"the {len(names)} classes {', '.join(names[:5])}{' …' * (len(names) > 5)} are numbered from 0"
        raise PackError(f"{rule}, and a label is {value}; subtract 1 where labels count from 1, or return names")
    return names[value]


# -- functions of texts


def function_name(function: Any) -> str:
    """Return `module:name` of a function, by which a pack keeps it. Raises PackError for one that has none."""
    name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '<none>')}"
    if "<" in name:
        raise PackError(f"text must be a function with a name, by which predictions find it again, got {function!r}")
    return name


@cache
def resolve(name: str) -> Any:
    """Return the function of that name. Raises PackError where it is gone."""
    module, _, attribute = name.partition(":")
    try:
        return attrgetter(attribute)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise PackError(f"the function of texts that the pack was made with, {name}, is gone: {error}") from None
