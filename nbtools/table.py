"""Rows as a table: escaped HTML for notebooks, aligned columns for terminals. Every table of nbtools is drawn here.

Cells are any values: None shows as a dash; columns of numbers are aligned right, text left.
"""

from __future__ import annotations

import html as markup
import math
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any

EMPTY = "–"
NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?( ?[%×]| [^\d\s]+)?|\d+ (min|h|d) \d+ (s|min|h)|…?")
"""12, 1e-6, 97 %, 24.3×, 1.5 GB, 3 min 20 s, nothing; not 0001.png"""
WHOLE = 24  # characters: a shorter cell is not broken, as `250 of 400 W`
LEAST = 12  # characters: a narrower wrapped column is harder to read than a line that the terminal breaks
COLOURS = {"bold": 1, "green": 32, "yellow": 33}  # ANSI: readable on dark and light
HEADER = "bold"

# Inline, since GitHub and Colab drop or share <style>; only inherited colours and half-grey, so any theme's text shows.
TABLE = "border-collapse:collapse;font-size:13px;line-height:1.45;font-variant-numeric:tabular-nums;margin:4px 0 8px"
CAPTION = "caption-side:top;text-align:left;padding:2px 10px 6px 0;font-weight:600;color:inherit"
HEAD = "padding:3px 14px 3px 0;border-bottom:1px solid rgba(128,128,128,.6);font-weight:600"
KEPT = ";white-space:nowrap"
UNIT = re.compile(r"(?<=\d) (?=([%×]|[kMGT]?B|[mµ]?s|min|h|d|px|W|°C)(/s)?(?!\w))")
"""The blank between a number and its unit, where no line of HTML ends."""
SUMMARY = "display:list-item;cursor:pointer;font-size:13px;line-height:1.45"
OUTSIDE = ";list-style-position:outside"  # the triangle stands left of a cell's text, which is in line with the others
NOTE = "font-size:13px;line-height:1.45;margin:2px 0 6px;max-width:80em;opacity:.85"
CELL = "padding:3px 14px 3px 0;border-bottom:1px solid rgba(128,128,128,.22);vertical-align:top;overflow-wrap:anywhere"


@dataclass(frozen=True)
class Folded:
    """A cell of which a notebook shows more on a click; a terminal shows the text alone."""

    text: str
    more: str

    def __str__(self) -> str:
        return self.text


def escaped(text: str) -> str:
    return UNIT.sub("\N{NO-BREAK SPACE}", markup.escape(text))


def folded(short: str, content: str, style: str = "") -> str:
    """HTML to unfold; short is escaped, content is HTML."""
    return f'<details><summary style="{SUMMARY}{style}">{escaped(short)}</summary>{content}</details>'


def note(text: str) -> str:
    """A paragraph under a table, escaped; nothing for nothing."""
    return f'<div style="{NOTE}">{escaped(text)}</div>' if text else ""


def filled(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> tuple[list[str], list[list[Any]]]:
    """Without the columns that hold nothing."""
    kept = [k for k in range(len(headers)) if any(row[k] not in (None, "") for row in rows)]
    return [headers[k] for k in kept], [[row[k] for k in kept] for row in rows]


def html(
    headers: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "", tips: Mapping[str, str] | None = None
) -> str:
    """An HTML table; headers, cells and caption are escaped. tips: header → what it means, shown under the pointer."""
    align = ["right" if right else "left" for right in numeric(headers, rows)]

    def line(tag: str, style: str, row: Sequence[Any]) -> str:
        parts = []
        for value, cell, side in zip(row, map(shown, row), align, strict=True):
            kept = KEPT if len(cell) <= WHOLE and not (tag == "th" and side == "right") else ""  # words above numbers
            tip = (tips or {}).get(cell, "") if tag == "th" else ""
            about = f' title="{markup.escape(tip)}"' if tip else ""
            parts.append(f'<{tag} style="{style};text-align:{side}{kept}"{about}>{content(value)}</{tag}>')
        return "".join(parts)

    body = "".join(f'<tr style="background:none">{line("td", CELL, row)}</tr>' for row in rows)
    whole = "" if headers else KEPT  # else, above no columns, a caption breaks at every word
    title = f'<caption style="{CAPTION}{whole}">{escaped(caption)}</caption>' if caption else ""
    head = f"<thead><tr>{line('th', HEAD, [str(h) for h in headers])}</tr></thead>"
    return f'<table style="{TABLE}">{title}{head}<tbody>{body}</tbody></table>'


def content(value: Any) -> str:
    """A cell's HTML."""
    if isinstance(value, Folded) and value.more:
        return folded(value.text, note(value.more), OUTSIDE)
    return escaped(shown(value))


def text(
    headers: Sequence[str],
    rows: Sequence[Sequence[Any]],
    width: int | None = None,
    colours: Mapping[tuple[int, int], str] | None = None,
) -> str:
    """Aligned columns without trailing blanks; where they are wider than `width` (default: the terminal's), the widest
    wrap at words: of text, and the headers of numbers.

    colours: (row, column) → one of COLOURS; headers are bold then. None: no colours, as anywhere but on a terminal.
    Control characters are shown as escapes: a file name cannot colour, or overwrite, the terminal.
    """
    cells, right = [[plain(shown(value)) for value in row] for row in [headers, *rows]], numeric(headers, rows)
    widths = fitted([max(map(columns, column)) for column in zip(*cells, strict=True)], narrowest(cells, right), width)
    if not widths:
        return ""
    drawn = []
    for row, whole in enumerate(cells, -1):
        hues = [HEADER if row < 0 else (colours or {}).get((row, column), "") for column in range(len(widths))]
        for parts in zip_longest(*map(wrapped, whole, widths), fillvalue=""):
            line = list(map(padded, parts, widths, right))
            drawn.append("  ".join(line if colours is None else map(painted, line, hues)).rstrip())
        drawn += ["  ".join("─" * w for w in widths)] if row < 0 else []
    return "\n".join(drawn)


def fitting(headers: Sequence[str], rows: Sequence[Sequence[Any]], width: int | None = None) -> int:
    """How many of the columns, from the left, fit side by side; width: as for `text`."""
    cells = [[plain(shown(value)) for value in row] for row in [headers, *rows]]
    ends = accumulate(least + 2 for least in narrowest(cells, numeric(headers, rows)))
    return sum(end - 2 <= (width or terminal_width()) for end in ends)


def narrowest(cells: Sequence[Sequence[str]], right: Sequence[bool]) -> list[int]:
    """The least widths of columns: numbers do not break, nor do the words above them."""
    found = []
    for (header, *column), number in zip(zip(*cells, strict=True), right, strict=True):
        least = max(map(columns, [*(header.split() if number else [header]), *column]))
        found.append(least if number else min(LEAST, least))
    return found


def fitted(widths: Sequence[int], least: Sequence[int], width: int | None) -> list[int]:
    """Widths of columns that fit side by side: the widest that can shrinks first, none below its least."""
    found, room = list(widths), width or terminal_width()
    while sum(found) + 2 * (len(found) - 1) > room:
        wide = [column for column, most in enumerate(found) if most > least[column]]
        if not wide:
            break
        found[max(wide, key=found.__getitem__)] -= 1
    return found


def terminal_width() -> int:
    return shutil.get_terminal_size((120, 24)).columns


def coloured() -> bool:
    """Whether stdout is a terminal that shows colours, and NO_COLOR (https://no-color.org) does not turn them off."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, colour: str) -> str:
    """A text in one of COLOURS; blanks around it, and any text in none, stay as they are."""
    bare = text.strip()
    return text.replace(bare, f"\x1b[{COLOURS[colour]}m{bare}\x1b[0m") if colour and bare else text


def shown(value: Any) -> str:
    """A value as the user reads it: yes or no, a float in `digits`, a dash for None."""
    if value is None:
        return EMPTY
    if isinstance(value, bool):
        return "yes" if value else "no"
    return digits(value) if isinstance(value, float) else str(value)


def digits(value: float) -> str:
    """A setting as one would type it: in full where five digits are exact, as for most typed values, else in three
    digits or as a whole number. An lr of 0.002828427 shows as 0.00283."""
    short = f"{value:.5g}"
    if float(short) != value and math.isfinite(value):
        short = f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"
    return exponent(short)


def number(value: float) -> str:
    """A measured value in three digits, zeros kept, so that it does not jump while it changes: 0.0258, 31.2, 12,345,
    2.00e-7. A share just below 1 has as many more as tell it from 1: 0.9996."""
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
    """2e-7 for the 2e-07 that Python writes."""
    return re.sub(r"e\+?(-?)0*", r"e\1", number)


def spelled(name: str) -> str:
    """The name of a column or metric in a sentence: `whole accuracy`."""
    return name.replace("_", " ")


def percent(share: float, decimals: int = 0) -> str:
    """`94 %`"""
    return f"{100 * share:.{decimals}f} %"


def size(count: float) -> str:
    """A number of bytes in decimal units, as disks, cards and network rates are sold: `1.5 GB`."""
    power = 0
    while abs(count) >= 999.5 and power < 4:
        count, power = count / 1000, power + 1
    return f"{count:.{0 if power == 0 or abs(count) >= 100 else 1}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


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


def timing(seconds: float) -> str:
    """A measured time in three digits, where `duration` would say 0 s: `203 ms`, `1.35 s`."""
    if seconds >= 100:
        return duration(seconds)
    return f"{number(seconds)} s" if seconds >= 1 else f"{number(seconds * 1e3)} ms"


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


def wrapped(cell: str, room: int) -> list[str]:
    """A cell as lines of at most so many terminal columns, broken at words."""
    wide = columns(cell)
    return [cell] if wide <= room else textwrap.wrap(cell, max(1, room * len(cell) // wide)) or [""]
