"""Options of the terminal, read from definitions: the parameters of a task's functions and the fields of its Plan. A
new one becomes an option by itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from nbtools.errors import NbtoolsError
from nbtools.train import Plan

AUTO = (("batch_size", "auto"), ("workers", "auto"))  # settings that may be `auto`: measured
SWITCH: Any = {"action": argparse.BooleanOptionalAction}  # Python 3.14 takes no metavar with it


def add_signature(one: argparse.ArgumentParser, function: Any, *skip: str) -> None:
    """The keyword parameters of a task's function as options."""
    group = one.add_argument_group("the task's options for " + function.__name__)
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError:  # of a type that is imported for type checkers only
        signature = inspect.signature(function)
    for name, parameter in signature.parameters.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not variadic and name not in ("source", "folder", "progress", *skip):
            text = "default: from the data" if parameter.default is None else f"default {parameter.default}"
            reads: Any = SWITCH if kind_of(parameter) is bool else {"type": partial(read_option, parameter)}
            add_option(group, f"option_{name}", text, **reads)


def add_knobs(one: argparse.ArgumentParser, kind: type[Plan], fields: Iterable[dataclasses.Field[Any]]) -> None:
    """Fields of a Plan as options."""
    group, hints = one.add_argument_group("settings of the Plan"), typing.get_type_hints(kind)
    for field in fields:
        choices, text = field.metadata.get("choices"), field.metadata.get("help", "")
        text += f" ({', '.join(map(str, choices))})" if choices else ""
        text += "; auto: measure it here" if (field.name, "auto") in AUTO else ""
        add_option(group, f"knob_{field.name}", text, **(SWITCH if hints[field.name] is bool else {}))


def add_option(group: Any, dest: str, text: str, **more: Any) -> None:
    """An option that is absent from the namespace unless it is given."""
    flag = "--" + dest.partition("_")[2].replace("_", "-")
    more = {"default": argparse.SUPPRESS, **({} if "action" in more else {"metavar": "VALUE"}), **more}
    group.add_argument(flag, dest=dest, help=text.replace("%", "%%"), **more)


def options_of(options: argparse.Namespace, prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in vars(options).items() if name.startswith(prefix)}


def own(options: argparse.Namespace) -> dict[str, Any]:
    """The task's own options."""
    return options_of(options, "option_")


def given(plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    """The settings on the command line, without those that are to be measured."""
    knobs = {name: value for name, value in options_of(options, "knob_").items() if (name, value) not in AUTO}
    return {name: plan.parse(name, value) if isinstance(value, str) else value for name, value in knobs.items()}


def kind_of(parameter: inspect.Parameter) -> Any:
    """A parameter's annotation; without one, the type of its default."""
    kind, default = parameter.annotation, parameter.default
    if kind is parameter.empty or isinstance(kind, str):
        return str | None if default is None else type(default)
    return kind


def read_option(parameter: inspect.Parameter, text: str) -> Any:
    """An option's text as the parameter's annotation has it; without one, as its default. Raises NbtoolsError for what
    does not fit."""
    kind = kind_of(parameter)
    try:
        return converted(text, kind)
    except (KeyError, ValueError):
        flag = parameter.name.replace("_", "-")
        raise NbtoolsError(f"--{flag} must be {described(kind)}, got {text!r}") from None


def whole(text: str) -> int:
    if str(int(text)) != text.strip():  # "0123" is a text of digits, where a text may stand
        raise ValueError
    return int(text)


def number(text: str) -> float:
    try:
        return whole(text)  # val=100 are 100 samples
    except ValueError:
        return float(text)


PLAIN: dict[Any, tuple[str, Callable[[str], Any]]] = {
    int: ("a whole number", whole),
    float: ("a number", number),
    bool: ("true or false", {"true": True, "false": False}.__getitem__),
    types.NoneType: ("none", {"none": None}.__getitem__),
}
"""Type → the rule for its texts, and how one is read; a text of any other type is taken unchanged."""
UNIONS, SEVERAL = (types.UnionType, typing.Union), (tuple, list, Sequence, Iterable)


def converted(text: str, kind: Any) -> Any:
    """A text as a value of an annotation; commas stand between several. Raises KeyError or ValueError."""
    origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in UNIONS:
        for one in sorted(args, key=lambda one: (typing.get_origin(one) or one) not in (*PLAIN, *SEVERAL)):  # text last
            with suppress(KeyError, ValueError):
                return converted(text, one)
        raise ValueError
    if kind in PLAIN:
        return PLAIN[kind][1](text.lower())
    if origin in SEVERAL and not (args == (str,) and "," not in text):  # a text is a sequence of characters
        parts = text.split(",")
        kinds = args if is_counted(kind) else [args[0] if args else int | float | str] * len(parts)
        return tuple(converted(part, one) for part, one in zip(parts, kinds, strict=True))
    return Path(text) if kind is Path else text


def described(kind: Any) -> str:
    """The rule for the texts of an annotation."""
    origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in UNIONS:
        return " or ".join(dict.fromkeys(map(described, args)))
    if origin in SEVERAL:
        return f"{len(args)} numbers with commas between" if is_counted(kind) else "numbers with commas between"
    return PLAIN[kind][0] if kind in PLAIN else "text"


def is_counted(kind: Any) -> bool:
    """Whether it is a tuple of this length."""
    return typing.get_origin(kind) is tuple and Ellipsis not in typing.get_args(kind)
