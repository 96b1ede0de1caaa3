"""Which characters a recogniser knows: the class list of a pack, and text → places in it.

The last class is always UNKNOWN: what nobody could read on the page, and what a given list leaves out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from nbtools.errors import PackError
from nbtools.tasks.common import files, labels
from nbtools.tasks.hwdb.formats import UNKNOWN

CHARS_LIST = "chars_list.txt"
HALF_WIDTH = {0xFF01 + n: 0x21 + n for n in range(94)} | {0x3000: 0x20}
"""Full-width ASCII and the ideographic space → ASCII; NFKC does the same to them, and much else to other characters."""


def normalised(text: str) -> str:
    """Full-width letters, digits, marks and space (U+FF01–FF5E, U+3000) as ASCII; all else stays, 。 and 、 too."""
    return text.translate(HALF_WIDTH)


@dataclass(frozen=True)
class Charset:
    """The classes of a pack: characters, each once, then UNKNOWN."""

    classes: tuple[str, ...]

    @cached_property
    def places(self) -> dict[str, int]:
        """Character → place: one look-up a character, where `in` and `index` of a list read half of it."""
        return {character: place for place, character in enumerate(self.classes)}

    def encode(self, text: str) -> np.ndarray:
        """(N,) int64 places in classes; a character of no class is UNKNOWN."""
        unknown = len(self.classes) - 1
        return np.fromiter((self.places.get(character, unknown) for character in text), np.int64, len(text))

    def outside(self, texts: Iterable[str]) -> Counter[str]:
        """Characters of no class, with how often they occur; what the page itself calls unknown is not among them."""
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text)
        return Counter({c: n for c, n in counts.items() if c not in self.places})


def charset_of(texts: Iterable[str]) -> Charset:
    """Every character of the texts, by code point."""
    return Charset((*sorted(set().union(*texts) - {UNKNOWN}), UNKNOWN))


def given_charset(classes: str | Path | Sequence[str], normalise: bool = False) -> Charset:
    """The classes that a caller names: a file with one character a line, a string or a list of characters.

    normalise: the list as normalised texts need it, without the doubles that this makes.
    Raises PackError for what is not a character, or comes twice.
    """
    if not isinstance(classes, (str, Path, Sequence)):
        raise PackError(f"classes must be a string, a list, or a file of characters, got {classes!r}")
    if isinstance(classes, Path) or (isinstance(classes, str) and classes.endswith(".txt")):
        classes = characters_of(files.read_text(Path(classes), "name a file with one character a line"), Path(classes))
    listed = labels.characters([character for character in classes if character != UNKNOWN])
    return Charset((*dict.fromkeys(map(normalised, listed) if normalise else listed), UNKNOWN))


def characters_of(text: str, path: Path) -> list[str]:
    """The characters of a `chars_list.txt`, one a line. A line may be a blank: it is the space.

    Raises PackError naming the line that is not one character, or one that stands there already.
    """
    numbers: dict[str, int] = {}
    for number, line in enumerate((line.removesuffix("\r") for line in text.split("\n")), 1):
        if len(line) > 1:
            raise PackError(f"{path}:{number}: a line holds one character, got {line!r}; correct it")
        if line in numbers:
            raise PackError(
                f"{path}:{number}: a character stands there once, and {line!r} is in line {numbers[line]}; delete one"
            )
        if line:
            numbers[line] = number
    if not numbers:
        raise PackError(f"{path}: it must have a character on each line, got none; fill it, or delete it")
    return list(numbers)
