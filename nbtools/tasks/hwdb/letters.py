"""Characters on a picture, on every machine: where no font has one, its code point stands in its place.

matplotlib's own font has no Chinese characters, and would warn of each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.ft2font import FT2Font

from nbtools.tasks.hwdb.glyphs import installed

NEVER = 0x10FFFF  # no character: a font that has it draws one box for all
DOT = 100 / 72  # px a point
LIFT = 0.36  # of a letter's size: its middle above the base line


class Letters:
    """The fonts for the characters of a text, of a size in points, on axes of px: matplotlib's monospaced one, and of
    `fonts` the first that has all of the others, or else the most. note: says so where code points are drawn.
    """

    def __init__(self, text: str, size: float, fonts: Iterable[Path] | None = None):
        mono, needed = Path(findfont(FontProperties(family="DejaVu Sans Mono"))), set(text)
        self.narrow = drawable(mono, needed)
        needed -= self.narrow
        wide, best = best_of(installed() if fonts is None else fonts, needed) if needed else (frozenset(), None)
        self.wide, self.size = wide, size
        self.mono = FontProperties(fname=mono, size=size)
        self.code = FontProperties(fname=mono, size=size * 0.56)
        self.other = FontProperties(fname=best, size=size)
        coded = len(needed - wide)
        self.note = (
            f"No font here has {coded} of these characters: their code points are drawn (U+624B as 62 over 4B). "
            "A Chinese font, such as the package fonts-noto-cjk, shows them."
        ) * bool(coded)

    def columns(self, letter: str) -> int:
        """How many cells a letter takes, each 0.6 of its size: one of the monospaced font, two of others."""
        return 1 if letter in self.narrow else 2

    def draw(self, axes: Axes, left: float, base: float, letter: str, colour: str) -> None:
        look: dict[str, Any] = {"color": colour, "parse_math": False}
        size = self.size * DOT
        if letter in self.narrow:
            axes.text(left, base, letter, fontproperties=self.mono, **look)
        elif letter in self.wide:
            axes.text(left + 0.1 * size, base, letter, fontproperties=self.other, **look)
        else:
            code = f"{ord(letter):04X}"
            halves = f"{code[:-2]}\n{code[-2:]}"
            look |= {"ha": "center", "va": "center", "linespacing": 0.9}
            axes.text(left + 0.6 * size, base - LIFT * size, halves, fontproperties=self.code, **look)


def best_of(fonts: Iterable[Path], needed: Collection[str]) -> tuple[frozenset[str], Path | None]:
    """(what it has of the needed characters, the font): the first that has all, else the first that has the most."""
    best: tuple[frozenset[str], Path | None] = frozenset(), None
    for font in fonts:
        found = drawable(font, needed)
        if len(found) > len(best[0]):
            best = found, font
        if len(found) == len(needed):
            break
    return best


def drawable(font: Path, letters: Collection[str]) -> frozenset[str]:
    """Those that a font has; none where matplotlib cannot draw with it."""
    try:
        face = FT2Font(str(font))
    except (RuntimeError, OSError):
        return frozenset()
    if not face.scalable or face.get_char_index(NEVER):
        return frozenset()
    return frozenset(letter for letter in letters if face.get_char_index(ord(letter)))
