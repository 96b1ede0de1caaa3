"""Rows as a table: escaped HTML for notebooks, aligned columns for terminals. Every table of nbtools is drawn here.

Cells are any values: None shows as a dash; columns of numbers are aligned right, text left.
"""

from __future__ import annotations

import html as markup
import math
import re
import shutil
import textwrap
import unicodedata
from collections.abc import Sequence
from typing import Any

EMPTY = "–"
NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?( ?[%×]| [^\d\s]+)?")  # 12, 1e-06, 97 %, 24.3×, 1.5 GB; not 0001.png
WHOLE = 24  # characters: a shorter cell is not broken, as `250 of 400 W`
LEAST = 24  # characters: a narrower wrapped column is harder to read than a line that the terminal breaks

# Inline, since GitHub and Colab drop or share <style>; only inherited colours and half-grey, so any theme's text shows.
TABLE = "border-collapse:collapse;font-size:13px;line-height:1.45;font-variant-numeric:tabular-nums;margin:4px 0 8px"
CAPTION = "caption-side:top;text-align:left;padding:2px 10px 6px 0;font-weight:600;color:inherit"
HEAD = "padding:3px 14px 3px 0;border-bottom:1px solid rgba(128,128,128,.6);font-weight:600"
KEPT = ";white-space:nowrap"
CELL = "padding:3px 14px 3px 0;border-bottom:1px solid rgba(128,128,128,.22);vertical-align:top;overflow-wrap:anywhere"


def html(headers: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    """An HTML table; headers, cells and caption are escaped."""
    cells = [[shown(value) for value in row] for row in rows]
    align = ["right" if right else "left" for right in numeric(headers, rows)]

    def line(tag: str, style: str, row: Sequence[str]) -> str:
        styles = [
            f"{style};text-align:{side}{KEPT if len(cell) <= WHOLE else ''}"
            for cell, side in zip(row, align, strict=True)
        ]
        return "".join(f'<{tag} style="{s}">{markup.escape(cell)}</{tag}>' for s, cell in zip(styles, row, strict=True))

    body = "".join(f'<tr style="background:none">{line("td", CELL, row)}</tr>' for row in cells)
    whole = "" if headers else KEPT  # else, above no columns, a caption breaks at every word
    title = f'<caption style="{CAPTION}{whole}">{markup.escape(caption)}</caption>' if caption else ""
    head = f"<thead><tr>{line('th', HEAD, [str(h) for h in headers])}</tr></thead>"
    return f'<table style="{TABLE}">{title}{head}<tbody>{body}</tbody></table>'


def text(headers: Sequence[str], rows: Sequence[Sequence[Any]], width: int | None = None) -> str:
    """Aligned columns without trailing blanks; a last column of text wraps at `width` (default: the terminal's).

    Control characters are shown as escapes: a file name cannot colour, or overwrite, the terminal.
    """
    width = width or shutil.get_terminal_size((120, 24)).columns
    lines = [[plain(shown(value)) for value in row] for row in [headers, *rows]]
    right = numeric(headers, rows)
    widths = [max(map(columns, column)) for column in zip(*lines, strict=True)]
    if not widths:
        return ""
    room = width - sum(widths[:-1]) - 2 * (len(widths) - 1)
    if not right[-1] and LEAST <= room < widths[-1]:
        lines = [part for row in lines for part in wrapped(row, room)]
        widths[-1] = room
    lines.insert(1, ["─" * w for w in widths])
    return "\n".join("  ".join(map(padded, row, widths, right)).rstrip() for row in lines)


def shown(value: Any) -> str:
    """A value as the user reads it: yes or no, a float in `digits`, a dash for None."""
    if value is None:
        return EMPTY
    if isinstance(value, bool):
        return "yes" if value else "no"
    return digits(value) if isinstance(value, float) else str(value)


def digits(value: float) -> str:
    """A float for display only: in full where five digits are exact, as for most typed values, else in three digits or
    as a whole number. An lr of 0.002828427 shows as 0.00283."""
    short = f"{value:.5g}"
    if float(short) == value or not math.isfinite(value):
        return short
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def sized(height: int, width: int) -> str:
    """`96 × 128 pixels (height × width)`: the order of tensors and of every `size=`, wherever a size is shown; viewers
    and Pillow put the width first, hence the words."""
    return f"{height:,} × {width:,} pixels (height × width)"


def plural(count: int, noun: str) -> str:
    """`1 thread`, `2 threads`, `1,300 batches`."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "tch")) else "s"
    return f"{count:,} {noun}{ending}"


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`, `4 d 17 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def numeric(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[bool]:
    """Which columns hold numbers, or nothing; a number may carry a unit. Raises ValueError on a ragged row."""
    if not rows:
        return [False] * len(headers)
    cells = zip(*[[shown(value) for value in row] for row in rows], strict=True)
    sides = [all(cell == EMPTY or NUMBER.fullmatch(cell) for cell in column) for column in cells]
    if len(sides) != len(headers):
        raise ValueError(f"a table of {len(headers)} headers cannot have rows of {len(sides)} cells")
    return sides


def columns(line: str) -> int:
    """How many terminal columns a line takes: two for East Asian wide characters, none for combining marks."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in line)


def padded(line: str, width: int, right: bool) -> str:
    blank = " " * (width - columns(line))
    return blank + line if right else line + blank


def plain(line: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in line)


def wrapped(row: list[str], room: int) -> list[list[str]]:
    """A row as several, its last cell wrapped at words."""
    first, *rest = textwrap.wrap(row[-1], room) or [""]
    return [[*row[:-1], first], *([*[""] * (len(row) - 1), part] for part in rest)]
