"""Results as tables, and numbers, sizes and times as text.

pandas is imported where a notebook draws a table, not by a terminal, which it would keep waiting for half a second.
"""

from __future__ import annotations

import html as markup
import math
import re
import textwrap
import unicodedata
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

EMPTY = "–"  # a cell of what is not known
NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?( \S+|×)?|")  # 12, 1e-6, 24.3×, 97 %, 1.5 GB, nothing; not 0001.png
Rows = Sequence[Sequence[Any]]


class Table:
    """The base of results that show as a sentence, a table and a remark; each of them may be empty."""

    def caption(self) -> str:
        """Return the result in one sentence."""
        return ""

    def table(self) -> tuple[Sequence[str], Rows]:
        """Return (headers, rows)."""
        return (), ()

    def footer(self) -> str:
        """Return what the figures depend on, such as the machine."""
        return ""

    def __str__(self) -> str:
        return "\n".join(filter(None, [self.caption(), text(*self.table()), self.footer()]))

    def _repr_html_(self) -> str:
        return html(*self.table(), self.caption()) + "".join(map(note, self.footer().splitlines()))


def html(headers: Sequence[str], rows: Rows, caption: str = "") -> str:
    """Draw a table for a notebook; what comes from the user is escaped."""
    import pandas as pd

    names, *lines = filled(headers, rows)
    if not lines:
        return note(caption)
    with pd.option_context("display.max_colwidth", None):
        drawn = pd.DataFrame(lines, columns=names).to_html(index=False, border=0, justify="left")
    return note(caption) + drawn.replace("<td>", '<td style="text-align: left">')  # Jupyter aligns to the right


def note(text: str) -> str:
    """Return a paragraph above or below a table, escaped; nothing for nothing."""
    return f"<div>{markup.escape(text)}</div>" if text else ""


def text(headers: Sequence[str], rows: Rows) -> str:
    """Draw a table for a terminal, numbers to the right; a file name cannot colour, or overwrite, the terminal."""
    if not rows:
        return ""
    names, *cells = ([plain(cell) for cell in row] for row in filled(headers, rows))
    wrapped = (
        [textwrap.wrap(cell, 60, break_long_words=False, break_on_hyphens=False) for cell in row] for row in cells
    )
    lines = [names, *(line for row in wrapped for line in zip_longest(*row, fillvalue=""))]
    widths = [max(map(columns, column)) for column in zip(*lines, strict=True)]
    right = [all(NUMBER.fullmatch(cell.strip(EMPTY)) for cell in column) for column in zip(*lines[1:], strict=True)]
    lines.insert(1, ["─" * width for width in widths])
    return "\n".join("  ".join(map(padded, line, widths, right)).rstrip() for line in lines)


def filled(headers: Sequence[str], rows: Rows) -> list[list[str]]:
    """Return the headers and the rows as they are shown, without the columns that hold nothing."""
    kept = [k for k in range(len(headers)) if any(row[k] not in (None, "") for row in rows)]
    return [[shown(row[k]) for k in kept] for row in (headers, *rows)]


def columns(line: str) -> int:
    """Return how many terminal columns a line takes: East Asian wide characters two, combining marks none."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in line)


def padded(line: str, width: int, right: bool) -> str:
    """Return a line with spaces up to a width in terminal columns."""
    blank = " " * (width - columns(line))
    return blank + line if right else line + blank


def plain(line: str) -> str:
    """Return a line with control characters as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in line)


# -- values as text


def shown(value: Any) -> str:
    """Return a value as the user reads it: yes or no, a float in `digits`, a dash for None."""
    if value is None:
        return EMPTY
    if isinstance(value, bool):
        return "yes" if value else "no"
    return digits(value) if isinstance(value, float) else str(value)


def digits(value: float) -> str:
    """Return a setting as one would type it: in full where five digits are exact, as for most typed values, else in
    three digits or as a whole number. An lr of 0.002828427 shows as 0.00283."""
    short = f"{value:.5g}"
    if float(short) != value and math.isfinite(value):
        short = f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"
    return exponent(short)


def number(value: float) -> str:
    """Return a measured value in three digits, zeros kept, so that it does not jump while it changes: 0.0258, 31.2,
    12,345, 2.00e-7. A share just below 1 has as many more as tell it from 1: 0.9996."""
    amount = abs(value)
    if not amount or not math.isfinite(value):
        return f"{value:g}"
    if amount < 1e-4 or amount >= 1e9:
        return exponent(f"{value:.2e}")
    decimals = max(2 - math.floor(math.log10(float(f"{amount:.2e}"))), 0)
    while amount < 1 <= round(amount, decimals) and decimals < 6:
        decimals += 1
    return f"{value:,.{decimals}f}"


def exponent(number: str) -> str:
    """Return 2e-7 for the 2e-07 that Python writes."""
    return re.sub(r"e\+?(-?)0*", r"e\1", number)


def percent(share: float, decimals: int = 0) -> str:
    """Return `94 %`."""
    return f"{100 * share:.{decimals}f} %"


def size(count: float) -> str:
    """Return a number of bytes in decimal units, as disks, cards and network rates are sold: `1.5 GB`."""
    power = 0
    while abs(count) >= 999.5 and power < 4:
        count, power = count / 1000, power + 1
    return f"{count:.{0 if power == 0 or abs(count) >= 100 else 1}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def sized(height: int, width: int) -> str:
    """Return `96 × 128 pixels (height × width)`: the order of tensors; viewers and Pillow put the width first."""
    return f"{height:,} × {width:,} pixels (height × width)"


def plural(count: int, noun: str) -> str:
    """Return `1 thread`, `2 threads`, `1,300 batches`."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "tch")) else "s"
    return f"{count:,} {noun}{ending}"


def duration(seconds: float) -> str:
    """Return `45 s`, `3 min 20 s`, `2 h 05 min`, `4 d 17 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def timing(seconds: float) -> str:
    """Return a measured time in three digits, where `duration` would say 0 s: `203 ms`, `1.35 s`."""
    if seconds >= 100:
        return duration(seconds)
    return f"{number(seconds)} s" if seconds >= 1 else f"{number(seconds * 1e3)} ms"


# -- values of a history, by the name of their column

HEADERS = {"data_wait": "waiting for data", "minutes": "time", "samples_per_s": "samples/s"}
WRITTEN: dict[str, Callable[[Any], str]] = {
    "data_wait": percent,
    "samples_per_s": number,
    "minutes": lambda minutes: duration(60 * minutes),
    "gpu_utilisation": "{:.0f} %".format,
    "gpu_power": "{:.0f} W".format,
    "gpu_energy": lambda hours: f"{number(hours)} Wh",
}
"""Column → how a value is written; memory is in MiB, a loss or metric is a `number`, and all else as one types it."""


def header(name: str) -> str:
    """Return the name of a column or metric as a user reads it: `whole accuracy`."""
    return HEADERS.get(name, name.replace("_", " "))


def written(name: str, value: Any) -> str | None:
    """Return a value of a column with its unit; None for what is not known."""
    value = value.item() if hasattr(value, "item") else value  # of NumPy
    if value is None or value != value:  # a NaN
        return None
    if name in WRITTEN:
        return WRITTEN[name](value)
    if "memory" in name:
        return size(value * 2**20)
    measured = name.startswith(("train_", "val_", "best_"))
    return number(value) if measured and isinstance(value, float) else shown(value)
