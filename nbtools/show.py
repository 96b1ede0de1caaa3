"""Results as tables and as plain JSON, and numbers, sizes and times as text."""

import dataclasses
import html as markup
import re
import types
import typing
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, Self

from tqdm.utils import disp_len

EMPTY = "–"  # a cell of what is not known
UNIT = re.compile(r"(?<=\d) (?=(?:%|[kMGT]?B|ms|s|min|h|d)(?!\w))")  # the space before one, where no line ends
Rows = Sequence[Sequence[Any]]


class Table:
    """The base of results that show as a sentence, a table (headers, rows) and a remark; each of them may be empty."""

    def caption(self) -> str:
        return ""

    def table(self) -> tuple[Sequence[str], Rows]:
        return (), ()

    def footer(self) -> str:
        return ""

    def __repr__(self) -> str:
        return "\n".join(filter(None, [self.caption(), text(*self.table()), self.footer()]))

    def _repr_html_(self) -> str:
        return html(*self.table(), self.caption()) + "".join(map(note, self.footer().splitlines()))


class Report(Table):
    """The base of frozen dataclasses, of measurements and of data: they convert to plain JSON and back."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return dataclasses.asdict(self)  # pyright: ignore[reportArgumentType]  (subclasses are dataclasses)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the report of `to_dict`, also after JSON; fields that another version had are left out."""
        return restore(cls, values)


def restore(kind: Any, value: Any) -> Any:
    """Return a value read from JSON as the type that a field declares: dataclasses, tuples and dicts are made again."""
    parts = typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        hints = typing.get_type_hints(kind)
        made: Any = kind
        return made(**{name: restore(hints[name], each) for name, each in value.items() if name in hints})
    if typing.get_origin(kind) in (types.UnionType, typing.Union) and value is not None:
        return restore(next(part for part in parts if part is not types.NoneType), value)
    if typing.get_origin(kind) is dict and value is not None:
        return {name: restore(parts[1], each) for name, each in value.items()}
    if typing.get_origin(kind) is tuple and parts and value is not None:
        kinds = repeat(parts[0]) if parts[-1] is Ellipsis else parts
        return tuple(restore(each, item) for each, item in zip(kinds, value, strict=False))
    return value


def html(headers: Sequence[str], rows: Rows, caption: str = "") -> str:
    """Return a table for a notebook; what comes from the user is escaped."""
    if not rows:
        return note(caption)
    import pandas as pd  # half a second, for which no terminal should wait

    names, *lines = fill_cells(headers, rows)
    with pd.option_context("display.max_colwidth", None):
        drawn = UNIT.sub("\xa0", pd.DataFrame(lines, columns=names).to_html(index=False, border=0))
    return note(caption) + re.sub("<(t[hd])>", r'<\1 style="text-align: left">', drawn)  # Jupyter: to the right


def note(text: str) -> str:
    return UNIT.sub("\xa0", f"<div>{markup.escape(text)}</div>") if text else ""


def text(headers: Sequence[str], rows: Rows) -> str:
    """Return a table for a terminal, which a file name can neither colour nor overwrite."""
    lines = [[plain(cell) for cell in row] for row in fill_cells(headers, rows)] if rows else []
    widths = [max(map(disp_len, column)) for column in zip(*lines, strict=True)]  # two of a Chinese character
    padded = ([cell + " " * (most - disp_len(cell)) for cell, most in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def fill_cells(headers: Sequence[str], rows: Rows) -> list[list[str]]:
    """Return the headers and the rows as they are shown, without the columns that hold nothing."""
    kept = [k for k in range(len(headers)) if any(row[k] not in (None, "") for row in rows)]
    return [[shown(row[k], EMPTY) for k in kept] for row in (headers, *rows)]


def plain(line: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in line)


def shown(value: Any, none: str = "none") -> str:
    """Return a value as the user reads it: yes or no, a float in `digits`, None as `none`."""
    if value is None:
        return none
    if isinstance(value, bool):
        return "yes" if value else "no"
    return digits(value) if isinstance(value, float) else str(value)


def digits(value: float) -> str:
    """Return a setting as one would type it, 0.0003 or 1e-6: in full where five digits are exact, else in three."""
    short = f"{value:.5g}"
    if float(short) != value:
        short = f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"
    return exponent(short)


def number(value: float) -> str:
    """Return a measured value in three digits, zeros kept, so that it does not jump while it changes: 0.0258, 31.2,
    12,345, 2.00e-7. A share just below 1 has as many more as tell it from 1: 0.9996."""
    if not value or 999.5 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    count = 3
    while abs(value) < 1 == abs(float(f"{value:.{count}g}")) and count < 6:
        count += 1
    return exponent(f"{value:#.{count}g}".rstrip("."))


def exponent(number: str) -> str:
    return re.sub(r"e\+?(-?)0*", r"e\1", number)


def percent(share: float, decimals: int = 0) -> str:
    return f"{100 * share:.{decimals}f} %"


def size(count: float) -> str:
    """Return a number of bytes in decimal units, as disks, cards and network rates are sold: `1.5 GB`."""
    units = ["TB", "GB", "MB", "kB", "B"]
    while abs(count) >= 999.5 and len(units) > 1:
        count, _ = count / 1000, units.pop()
    return f"{count:.{0 if units[-1] == 'B' or abs(count) >= 100 else 1}f} {units[-1]}"


def size_text(height: int, width: int) -> str:
    """Return `96 × 128 pixels (height × width)`: the order of tensors; viewers and Pillow put the width first."""
    return f"{height:,} × {width:,} pixels (height × width)"


def plural(count: int, noun: str) -> str:
    """Return `1 thread`, `2 threads`, `1,300 batches`."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "tch")) else "s"
    return f"{count:,} {noun}{ending}"


def timing(seconds: float) -> str:
    """Return a measured time in three digits, where `duration` would say 0 s: `203 ms`, `1.35 s`."""
    if seconds >= 60:
        return duration(seconds)
    return f"{number(seconds)} s" if seconds >= 1 else f"{number(seconds * 1e3)} ms"


def duration(seconds: float) -> str:
    """Return `45 s`, `3 min 20 s`, `2 h 05 min`, `4 d 17 h`."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
