"""The fields of a Plan: what declares one, and the rules by which its values are checked and read."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from nbtools.errors import PlanError

RULES = {"least": ("at least", operator.ge), "above": ("greater than", operator.gt), "most": ("at most", operator.le)}
BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


def knob(
    default: Any,
    help: str,
    *,
    choices: Sequence[Any] | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    unit: str = "",
    live: bool = False,
    asks_beyond: float | None = None,
) -> Any:
    """A Plan field: its default, one line of help, and the rule that a value must obey (≥ least, > above, ≤ most).

    live: for a task's own setting: a started run may change it, since neither model nor optimizer depends on it.
    asks_beyond: a value more than this many times the advised one may be a typo, and a run asks before applying it.
    """
    rule = {"choices": choices, "least": least, "above": above, "most": most, "live": live, "asks_beyond": asks_beyond}
    return dataclasses.field(default=default, metadata={"help": help, "unit": unit, **rule})


def require_known(plan: type, names: Iterable[str]) -> None:
    """Raise PlanError for a setting that a plan does not have: it lists similar names, else all."""
    known = [field.name for field in dataclasses.fields(plan)]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(known)}"
            raise PlanError(f"{plan.__qualname__} has no setting {name!r}; {hint}")


@cache
def hints(plan: type) -> dict[str, Any]:
    """Return the types of a plan's fields; finding them takes a hundred times as long as checking a value."""
    return typing.get_type_hints(plan)


def parsed(name: str, text: str, hint: Any) -> Any:
    """Return the value of a text, by a field's type."""
    kind, optional = kind_of(hint)
    if text.lower() in ("none", "") and optional:
        return None
    try:
        if typing.get_origin(kind) is tuple:
            parts = text.strip("()[] ").split(",")
            return tuple(typing.get_args(kind)[0](part) for part in parts if part.strip())
        return BOOLEANS[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise PlanError(f"{name} must be {WORDS.get(kind, 'numbers separated by commas')}, got {text!r}") from None


def kind_of(hint: Any) -> tuple[Any, bool]:
    """A field's type, and whether it may also be None."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    return next(kind for kind in members if kind is not type(None)), type(None) in members


def checked(name: str, value: Any, hint: Any, rule: Mapping[str, Any]) -> Any:
    """The value in its field's type, or a PlanError that names field, rule and value."""
    kind, optional = kind_of(hint)
    if value is None and optional:
        return None
    if typing.get_origin(kind) is tuple:
        first, *rest = typing.get_args(kind)  # members of one type
        count = "several" if rest == [...] else 1 + len(rest)
        if not isinstance(value, (tuple, list)) or count not in ("several", len(value)):
            raise PlanError(f"{name} must be {count} values, got {value!r}")
        return tuple(checked(name, member, first, rule) for member in value)
    value = typed(name, value, kind)
    if rule.get("choices") and value not in rule["choices"]:
        raise PlanError(f"{name} must be one of {', '.join(map(str, rule['choices']))}, got {value!r}")
    for word, (sign, holds) in RULES.items():
        bound = rule.get(word)
        if bound is not None and not holds(value, bound):
            raise PlanError(f"{name} must be {sign} {bound}, got {value!r}")
    return value


def typed(name: str, value: Any, kind: type) -> Any:
    if isinstance(value, int) and abs(value) >= 2**63:
        raise PlanError(f"{name} must be below 2**63, got one of {value.bit_length()} bits")
    whole = isinstance(value, float) and value.is_integer() and kind is int
    if whole or (kind is float and isinstance(value, int) and not isinstance(value, bool)):
        value = kind(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise PlanError(f"{name} must be {WORDS.get(kind, kind.__name__)}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise PlanError(f"{name} must be finite, got {value!r}")
    return value
