"""What characters look like before a hand writes them: from a font, or invented where no font has them.

Pillow's FreeType opens .ttf, .otf, .ttc, .woff and .woff2 alike, so that npm's web fonts need no conversion.
N characters in cells of S pixels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from nbtools.errors import PackError

FREQUENT = (  # the head of Jun Da's list of modern Chinese (2004), so that a small demo looks like text
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里"
    "用道行所然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实"
)
WRITTEN = ("kai", "hand", "xing", "script", "brush")  # in the names of fonts that look written: these are tried first
EM = 0.7  # of a cell: the rest is room for slant and wobble
BLUR = 0.022  # of a cell: a slope along the strokes, on which a threshold makes them thick or thin
NEVER = "\U0010ffff"  # no character: fonts draw it as whatever they lack
STROKES = (4, 6)


@dataclass(frozen=True)
class Atlas:
    """A soft picture of every character: ink (N, S, S) uint8, 255 where the pen's middle goes; `drawn` says by what."""

    characters: str
    ink: np.ndarray
    drawn: str
    invented: bool = False


def pool() -> str:
    """The 6,763 characters of GB 2312, all of two bytes in a page: the frequent ones, then by its own order."""
    rows = (bytes((row, column)) for row in range(0xB0, 0xF8) for column in range(0xA1, 0xFF))
    listed = b"".join(rows).decode("gb2312", "ignore")  # five places at the end of level 1 are empty
    return FREQUENT + "".join(character for character in listed if character not in FREQUENT)


def atlas(characters: int | str, font: str | Path | None, size: int, seed: int) -> Atlas:
    """Pictures of so many characters of `pool()` that the font has, or of exactly these; invented where no font has.

    Raises PackError where the font cannot be opened or lacks what was asked for.
    """
    if font is not None:
        letters = opened(Path(font), size)
        chosen = wanted(characters, letters, Path(font), size)
        return Atlas(chosen, soft([written(letters, character, size) for character in chosen]), described(letters))
    chosen = pool()[:characters] if isinstance(characters, int) else characters
    for path in installed():
        letters = loaded(path, size)
        if letters and all(had == one for had, one in zip_longest(legible(letters, chosen, size), chosen)):
            return Atlas(chosen, soft([written(letters, one, size) for one in chosen]), described(letters))
    return Atlas(chosen, soft([invented(one, size, seed) for one in chosen]), "strokes invented from the seed", True)


def wanted(characters: int | str, letters: ImageFont.FreeTypeFont, font: Path, size: int) -> str:
    """The characters to draw with a person's own font: those asked for, or the first so many that it has."""
    count, among = (characters, pool()) if isinstance(characters, int) else (len(characters), characters)
    had = "".join(islice(legible(letters, among, size), count))
    if len(had) == count:
        return had
    if isinstance(characters, int):
        said = f"all but {len(had)} of the Chinese characters of GB 2312, and characters={characters} were asked for"
    else:
        lacks = "".join(one for one in characters if one not in had)
        said = f"{len(lacks)} of the {count} in characters, from {lacks[:10]!r} on"
    raise PackError(f"font={font} lacks {said}. Choose another font, or give characters= a string of those that it has")


def legible(letters: ImageFont.FreeTypeFont, characters: str, size: int) -> Iterator[str]:
    """Those that a font draws, and each in its own way: a fallback font has one box for all that it does not know.

    A look at the pictures, not at the font's table: it needs no package, and sees tables that promise too much.
    """
    seen = {written(letters, NEVER, size).tobytes(), bytes(size * size)}
    for character in characters:
        picture = written(letters, character, size).tobytes()
        if picture not in seen:
            yield character
        seen.add(picture)


def opened(font: Path, size: int) -> ImageFont.FreeTypeFont:
    letters = loaded(font, size)
    if letters is None:
        there = "is no font that FreeType can open" if font.is_file() else "is no file"
        raise PackError(f"font={font} {there}. Give a .ttf, .otf, .ttc, .woff or .woff2 file, or leave font out")
    return letters


def loaded(font: Path, size: int) -> ImageFont.FreeTypeFont | None:
    """None for what is no scalable font: system folders hold bitmap fonts and colour emoji too."""
    try:  # the basic layout is the same on every machine; the other depends on the system's libraries
        return ImageFont.truetype(font, round(EM * size), layout_engine=ImageFont.Layout.BASIC)
    except (OSError, ValueError):
        return None


def described(letters: ImageFont.FreeTypeFont) -> str:
    return "the font " + " ".join(filter(None, letters.getname()))


def installed() -> Iterator[Path]:
    """The fonts of the system, then those of mplfonts, handwriting-like ones first; there may be hundreds."""
    from matplotlib import font_manager

    yield from ordered(Path(name) for name in font_manager.findSystemFonts())
    package = importlib.util.find_spec("mplfonts")
    for folder in (package and package.submodule_search_locations) or ():
        yield from ordered(path for path in Path(folder).rglob("*") if path.suffix.lower() in (".ttf", ".otf", ".ttc"))


def ordered(fonts: Iterator[Path]) -> list[Path]:
    """The same on every machine with the same fonts: by whether the name sounds written and plain, then by name."""

    def rank(path: Path) -> tuple[bool, bool, str, Path]:
        name = path.name.lower()
        return not any(word in name for word in WRITTEN), "regular" not in name, name, path

    return sorted(fonts, key=rank)


def written(letters: ImageFont.FreeTypeFont, character: str, size: int) -> Image.Image:
    """The font's character in the middle of its cell; L, ink 255."""
    cell = Image.new("L", (size, size))
    ImageDraw.Draw(cell).text((size / 2, size / 2), character, 255, letters, anchor="mm")
    return cell


def invented(character: str, size: int, seed: int) -> Image.Image:
    """A character that nobody writes: strokes of the kinds that Chinese has, by the seed and the code point alone."""
    rng = np.random.default_rng([seed, ord(character)])
    scale = 4 * size  # drawn large and reduced, since Pillow's lines have hard edges
    cell = Image.new("L", (scale, scale))
    pen, width = ImageDraw.Draw(cell), round(0.048 * scale)
    places = rng.permutation(9)[: rng.integers(STROKES[0], STROKES[1], endpoint=True)]
    for place in places:
        middle = (np.array([place % 3, place // 3]) - 1) * 0.27 * EM + rng.uniform(-0.06, 0.06, 2)
        points = (np.clip(middle + stroke(rng), -EM / 2, EM / 2) + 0.5) * scale
        pen.line([tuple(point) for point in points], 255, width, "curve")
        for x, y in (points[0], points[-1]):
            pen.ellipse((x - width / 2, y - width / 2, x + width / 2, y + width / 2), 255)
    return cell.resize((size, size), Image.Resampling.BOX)


def stroke(rng: np.random.Generator) -> np.ndarray:
    """Points (n, 2) about the origin in parts of a cell: a line, a falling or a turning stroke, or a dot."""
    long, bend = rng.uniform(0.16, 0.34), rng.uniform(-0.04, 0.04)
    kinds: Sequence[list[tuple[float, float]]] = (
        [(-long, 0.02), (0, bend), (long, -0.02)],  # across
        [(0, -long), (bend, 0), (0, long)],  # down
        [(long * 0.7, -long), (0.04, 0), (-long * 0.7, long)],  # falling to the left
        [(-long * 0.7, -long), (-0.04, 0), (long * 0.7, long)],  # falling to the right
        [(-long, -long * 0.6), (long, -long * 0.6), (long * 0.8, long)],  # across, then down
        [(-long * 0.6, -long), (-long * 0.6, long), (long, long * 0.8)],  # down, then across
        [(-0.04, -0.05), (0.04, 0.05)],  # a dot
    )
    return np.array(kinds[rng.choice(7, p=(0.2, 0.2, 0.15, 0.15, 0.12, 0.12, 0.06))])


def soft(cells: Sequence[Image.Image]) -> np.ndarray:
    """(N, S, S) uint8 with a slope along the strokes; thin fonts are brought to the same peak as thick ones."""
    radius = BLUR * cells[0].width
    ink = np.stack([np.asarray(cell.filter(ImageFilter.GaussianBlur(radius))) for cell in cells])
    peak = max(np.quantile(ink.max(axis=(1, 2)), 0.1), 32)
    return np.minimum(ink * (255 / peak), 255).astype(np.uint8)
