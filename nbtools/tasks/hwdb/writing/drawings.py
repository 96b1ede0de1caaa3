"""Folders of images of single characters: which characters they show, who drew them, and how they look in a cell.

The layout is Omniglot's, ALPHABET/CHARACTER/NAME_DRAWER.png; a folder of folders of any images will do. n images of
one drawer and alphabet in cells of S pixels.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from nbtools.errors import PackError
from nbtools.tasks.hwdb.lines.data import grey_of
from nbtools.tasks.hwdb.lines.sources import hidden
from nbtools.tasks.hwdb.writing.glyphs import EM, pool, soft

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
DRAWER = re.compile(r"_(\d+)$")
COMMON = 0.5  # of the characters: who drew so many is a person, and the number in the name no mere count
DARK = 128
LETTERS = {"Latin": "abcdefghijklmnopqrstuvwxyz", "Greek": "αβγδεζηθικλμνξοπρστυφχψω"}
"""Of Omniglot's alphabets, in its order, those that GB18030 has in two bytes a character."""


@dataclass(frozen=True)
class Drawing:
    """One image: the folder of its character, its alphabet (the folder above), and who drew it."""

    path: Path
    character: str
    alphabet: str
    drawer: int


def drawings(folder: Path, alphabets: str | Sequence[str] | None) -> tuple[list[Drawing], bool]:
    """The images of a folder, and whether their names tell who drew them.

    Where they do not, the k-th image of every character counts as drawn by drawer k. Raises PackError where there are
    none, or not in one of `alphabets`.
    """
    alphabets = [alphabets] if isinstance(alphabets, str) else alphabets
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    ways = sorted(way for way in files if len(way.parts) > 1 and not any(map(hidden, way.parts)))
    there = sorted({alphabet_of(way, folder) for way in ways})
    if not there:
        raise PackError(
            f"{folder}: no image in a folder of its character; sort them like ALPHABET/CHARACTER/0108_01.png"
        )
    if missing := sorted(set(alphabets or ()) - set(there)):
        raise PackError(f"alphabets must be some of {', '.join(there)}, got {', '.join(missing)}")
    chosen = [way for way in ways if alphabets is None or alphabet_of(way, folder) in alphabets]
    numbers, told = drawers(chosen)
    found = [
        Drawing(folder / way, way.parent.as_posix(), alphabet_of(way, folder), number)
        for way, number in zip(chosen, numbers, strict=True)
    ]
    return found, told


def alphabet_of(way: Path, folder: Path) -> str:
    return way.parts[-3] if len(way.parts) > 2 else folder.name


def drawers(ways: Sequence[Path]) -> tuple[list[int], bool]:
    """Who drew each image, and whether the names told: a number that comes with most characters is a person's."""
    matches = [DRAWER.search(way.stem) for way in ways]
    numbers = [int(match[1]) for match in matches if match]
    if len(numbers) == len(ways):
        drawn = Counter(number for number, _ in {*zip(numbers, (way.parent for way in ways), strict=True)})
        if np.median(list(drawn.values())) >= COMMON * len({way.parent for way in ways}):
            return numbers, True
    counts: dict[Path, int] = defaultdict(int)
    ranks = []
    for way in ways:
        counts[way.parent] += 1
        ranks.append(counts[way.parent])
    return ranks, False


def named(found: Iterable[Drawing]) -> dict[str, str]:
    """Folder of a character → the character that stands for it: its own name where that is one, the letter of an
    alphabet that is known, else one of the Chinese pool."""
    folders: Mapping[str, list[str]] = defaultdict(list)
    for character, alphabet in sorted({(one.character, one.alphabet) for one in found}):
        folders[alphabet].append(character)
    own: dict[str, str] = {}
    for alphabet, characters in folders.items():
        letters = LETTERS.get(alphabet, "")
        spelled = letters if len(letters) == len(characters) else [Path(one).name for one in characters]
        own |= {one: letter for one, letter in zip(characters, spelled, strict=True) if is_storable(letter)}
    taken = set(own.values())
    if len(taken) < len(own):
        own, taken = {}, set()  # the same letter in two alphabets is two characters
    rest = iter([one for one in pool() if one not in taken])
    every = [one for characters in folders.values() for one in characters]
    if len(every) > len(pool()):
        raise PackError(f"at most {len(pool()):,} characters can be told apart in a page, got {len(every):,}")
    return {one: own.get(one) or next(rest) for one in every}


def is_storable(name: str) -> bool:
    """Whether a name is one character that a page can hold."""
    return len(name) == 1 and name.isprintable() and len(name.encode("gb18030", "replace")) <= 2


def cells(paths: Sequence[Path], size: int) -> np.ndarray:
    """(n, S, S) uint8 soft ink of one drawer's images: cut alike, so that what is small or low stays so."""
    images = [ink(path, 2 * size) for path in paths]
    rows, columns = (np.flatnonzero(np.max(images, axis=(0, axis)) > DARK // 2) for axis in (2, 1))
    if not len(rows):
        raise PackError(f"{paths[0]} and {len(paths) - 1} images like it are blank; delete them")
    side = max(rows[-1] - rows[0], columns[-1] - columns[0]) + 1
    top, left = (rows[0] + rows[-1] + 1 - side) // 2, (columns[0] + columns[-1] + 1 - side) // 2
    em, margin = round(EM * size), (size - round(EM * size)) // 2
    placed = []
    for image in images:
        part = Image.fromarray(image).crop((left, top, left + side, top + side)).resize((em, em), Image.Resampling.BOX)
        cell = Image.new("L", (size, size))
        cell.paste(part, (margin, margin))
        placed.append(cell)
    return soft(placed)


def ink(path: Path, size: int) -> np.ndarray:
    """(size, size) uint8 ink of an image, square with its own margin; white on black is turned over."""
    try:
        grey = grey_of(path)
    except PackError as error:
        value, rule, fix = error.args
        raise PackError(f"{path}: {rule}, got {value}; {fix}") from None
    border = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    inked = Image.fromarray(255 - grey if np.median(border) >= DARK else grey)
    square = Image.new("L", (max(inked.size), max(inked.size)))
    square.paste(inked, ((square.width - inked.width) // 2, (square.height - inked.height) // 2))
    return np.asarray(square.resize((size, size), Image.Resampling.BILINEAR))
