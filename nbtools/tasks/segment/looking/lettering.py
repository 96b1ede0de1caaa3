"""Names of classes and files written with a font that has their letters, and as wide as there is room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.font_manager import FontProperties, findfont
from matplotlib.textpath import text_to_path

from nbtools.letters import Letters, drawable

SANS = Path(findfont(FontProperties(family="DejaVu Sans")))  # comes with matplotlib
INCH, POINTS = 100, 72  # px and points of an inch


@dataclass(frozen=True)
class Lettering:
    """One font for all of some texts; letters that it lacks, control characters among them, become code points."""

    font: Path
    coded: frozenset[str]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Lettering:
        """matplotlib's own font where it has every letter, else the one of this machine that has most of the others."""
        text = "".join(["…", *texts])
        lacking = frozenset(text) - drawable(SANS, text)
        font = (Letters.of("".join(sorted(lacking))).font if lacking else None) or SANS
        return cls(font, frozenset(text) - drawable(font, text))

    def plain(self, text: str) -> str:
        return "".join(f"U+{ord(letter):04X}" if letter in self.coded else letter for letter in text)

    def width(self, text: str, size: float) -> float:
        """px that a text takes at a size in points."""
        wide, _, _ = text_to_path.get_text_width_height_descent(self.plain(text), self.style(size), False)
        return wide * INCH / POINTS

    def style(self, size: float) -> FontProperties:
        return FontProperties(fname=str(self.font), size=size)

    def look(self, size: float) -> dict[str, Any]:
        """How matplotlib's texts are drawn so: a $ is no formula."""
        return {"fontproperties": self.style(size), "parse_math": False}

    def shortened(self, text: str, size: float, room: float) -> str:
        """A text that takes at most so many px: a longer one loses its middle, as its ends tell it from others."""
        if self.width(text, size) <= room:
            return text
        least, most = 0, len(text)  # letters that fit; that do not
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if self.width(cut(text, middle), size) <= room else (least, middle)
        return cut(text, least)


def cut(text: str, kept: int) -> str:
    """The first and the last letters of a text, so many together."""
    return f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"
