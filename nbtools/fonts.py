"""Fonts for any text, on every machine: matplotlib's own has no Chinese characters, and would warn about each.

A character that no font here has is drawn as its code point.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.font_manager import FontProperties, findfont, findSystemFonts, fontManager
from matplotlib.ft2font import FT2Font
from matplotlib.textpath import text_to_path

SANS, MONO = "DejaVu Sans", "DejaVu Sans Mono"  # come with matplotlib; a letter of MONO is 0.602 of its size wide
NEVER = "\U0010ffff"  # no character: a font that has it draws one box for all
CODE = 0.5  # size of a code point in two rows, of that of a character
INCH, POINTS = 100, 72  # px and points of an inch


@dataclass(frozen=True)
class Fonts:
    """How to draw the characters of a text. families: for matplotlib, which falls back from the first to the second;
    wide: what the first does not have; missing: what neither has."""

    families: tuple[str, ...]
    wide: frozenset[str]
    missing: frozenset[str]

    @classmethod
    def of(cls, text: str, fonts: Iterable[Path] | None = None, *, mono: bool = False) -> Fonts:
        """fonts: where to look for what matplotlib's own font lacks, by default the system's, regular ones first."""
        first = MONO if mono else SANS
        wide = frozenset(text) - drawable(Path(findfont(FontProperties(family=first))), text)
        had, font = best_of(system() if fonts is None else fonts, wide) if wide else (wide, None)
        return cls((first, *([family_of(font)] if font else [])), wide, wide - had)

    def columns(self, letter: str) -> int:
        """How wide a character is, in letters of MONO."""
        return 2 if letter in self.wide else 1

    def cell(self, letter: str) -> tuple[str, float]:
        """(text, relative size) of one character in a separate cell: a code point takes two rows of digits."""
        code = f"{ord(letter):04X}"
        return (f"{code[:-2]}\n{code[-2:]}", CODE) if letter in self.missing else (letter, 1.0)

    def plain(self, text: str) -> str:
        """A text in which what no font has, control characters too, is written U+624B."""
        return "".join(f"U+{ord(letter):04X}" if letter in self.missing else letter for letter in text)

    def look(self, size: float) -> dict[str, Any]:
        """The arguments of matplotlib's texts, size in points: a $ is no formula."""
        return {"fontproperties": FontProperties(family=self.families, size=size), "parse_math": False}

    def width(self, text: str, size: float) -> float:
        """px that a text takes at a size in points."""
        style = FontProperties(family=self.families, size=size)
        return text_to_path.get_text_width_height_descent(self.plain(text), style, False)[0] * INCH / POINTS

    def shortened(self, text: str, size: float, room: float) -> str:
        """A text as drawn in at most `room` px: a longer one loses its middle, since its ends identify it."""
        lengths = range(min(len(text) - 1, int(room)), 0, -1)  # no letter is narrower than a px
        cuts = (f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}" for kept in lengths)
        fitting = (self.plain(cut) for cut in (text, *cuts) if self.width(cut, size) <= room)
        return next(fitting, "…")

    @property
    def note(self) -> str:
        """A sentence that explains the code points, "" if there are none."""
        if not self.missing:
            return ""
        return (
            f"No font here has {len(self.missing)} of these characters: their code points are drawn (U+624B as 62 over "
            "4B). A Chinese font, such as the one in the package fonts-noto-cjk, shows them."
        )


def system() -> list[Path]:
    return sorted(map(Path, findSystemFonts()), key=lambda font: ("regular" not in font.name.lower(), font))


def best_of(fonts: Iterable[Path], needed: Collection[str]) -> tuple[frozenset[str], Path | None]:
    """(what it has of the needed letters, the font): the first that has all, else the first of those with the most.

    Cost: 0.4 ms per font examined.
    """
    best: tuple[frozenset[str], Path | None] = frozenset(), None
    for font in fonts:
        found = drawable(font, needed)
        if len(found) > len(best[0]):
            best = found, font
        if len(found) == len(needed):
            break
    return best


def drawable(font: Path, letters: Iterable[str]) -> frozenset[str]:
    """The characters that a font has; none if matplotlib cannot draw with it."""
    try:
        face = FT2Font(str(font))
    except (RuntimeError, OSError):
        return frozenset()
    if not face.scalable or face.get_char_index(ord(NEVER)):
        return frozenset()
    return frozenset(letter for letter in letters if face.get_char_index(ord(letter)))


def family_of(font: Path) -> str:
    """The name by which matplotlib finds a font file, which it may not have listed yet."""
    if all(Path(entry.fname) != font for entry in fontManager.ttflist):
        fontManager.addfont(font)
    return next(entry.name for entry in reversed(fontManager.ttflist) if Path(entry.fname) == font)
