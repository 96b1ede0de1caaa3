"""The result of a measurement: a value that converts to plain JSON and back, and shows as a table."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from itertools import repeat
from typing import Any, Self

from nbtools.show import Table


class Report(Table):
    """The base of the frozen dataclasses that hold measurements."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return dataclasses.asdict(self)  # pyright: ignore[reportArgumentType]  (subclasses are dataclasses)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the report of `to_dict`, also after JSON; fields that another version had are left out."""
        return restored(cls, values)


def restored(kind: Any, value: Any) -> Any:
    """A value read from JSON as the type that a field declares: dataclasses and tuples are built again."""
    parts = typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        hints = typing.get_type_hints(kind)
        made: Any = kind
        return made(**{name: restored(hints[name], each) for name, each in value.items() if name in hints})
    if typing.get_origin(kind) in (types.UnionType, typing.Union) and value is not None:
        return restored(next(part for part in parts if part is not types.NoneType), value)
    if typing.get_origin(kind) is tuple and parts and value is not None:
        kinds = repeat(parts[0]) if parts[-1] is Ellipsis else parts
        return tuple(restored(each, item) for each, item in zip(kinds, value, strict=False))
    return value
