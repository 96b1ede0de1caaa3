"""Demo data: `.dgrl` pages in folders of train and test writers, as CASIA-HWDB 2.x has them.

Each writer has a slant, size, pen and spacing of their own and bends each character in their own way, and none writes a
character twice the same. The text is an invented language with frequent and rare characters and with habits, so that a
language model helps to read it. N characters in cells of S pixels, n of a line, K cosines a side.
"""

import math
import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor
from torch.nn import functional as F

from nbtools.data import say
from nbtools.figures import chinese
from nbtools.show import plural
from nbtools.tasks.common.files import require, whole, write_demo
from nbtools.tasks.hwdb.data import CODE, HEADER, LINE_BOX, SUFFIXES, text_of_codes

FREQUENT = (  # the start of Jun Da's list of modern Chinese (2004), so that a small demo looks like text
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里"
    "用道行所然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实"
)
FOLDERS = ("HWDB2.0Train", "HWDB2.0Test")
LINES, PAGES = 6, 2  # of a page, and of a writer: many writers, since new ones are what has to be read
HELD = 5  # every fifth writer, from the second on, is a test writer, as 1,015 of 5,091 pages of HWDB are test pages
HEAD = 8  # added to a rank of Zipf's law: the rarest of 60 characters still occurs once in 500
FOLLOWERS, FAITHFUL = 5, 0.7  # characters that mostly come after a given one, and how often it is one of them
GRAMMAR, HAND, TEXT = 1, 2, 3  # streams of random numbers
COSINES, BEND, HABIT = 4, 0.065, 0.7  # BEND: of a cell, falls with the frequency; HABIT: the writer's own share
STROKES = ((1, 0), (0, 1), (-0.7, 1), (0.7, 1))  # across, down, falling to the left, to the right
FAINTEST = 40  # ink below it is no edge of a character
EM = 0.7  # of a cell: the rest is room for slant and wobble
BLUR = 0.022  # of a cell: a slope along the strokes, on which a threshold makes them thick or thin


def demo(
    folder: str | Path,
    count: int = 2000,
    *,
    characters: int | str = 60,
    length: int | tuple[int, int] = (4, 12),
    height: int = 64,
    seed: int = 0,
) -> Path:
    """Write pages with `count` handwriting-like lines; returns the folder.

    characters: how many (the frequent ones of Chinese first), or which, of any script that GB18030 has in two bytes;
    drawn with an installed Chinese font, else as shapes from the seed. length: characters of a line, or (fewest, most);
    HWDB's have about (20, 30). height: of a character's cell in pixels; HWDB's are about 100. The same seed, characters
    and font give the same bytes. A fifth of the writers are test writers. Raises PackError, DiskError.
    """
    shortest, longest = (length, length) if isinstance(length, int) else length
    most = len(pool())
    chosen = characters if isinstance(characters, str) else pool()[: characters if whole(characters, 2, most) else 0]
    coded = len(set(chosen)) == len(chosen) >= 2 and text_of_codes(codes_of(chosen))[0] == chosen
    require(whole(count, 1), "count must be a whole number of lines, 1 or more", count)
    require(coded, f"characters must be 2 to {most:,}, or different ones of two bytes in GB18030", characters)
    require(1 <= shortest <= longest, "length must be 1 or more characters of a line, or (fewest, most)", length)
    require(whole(height, 16, 512), "height must be a whole number of pixels from 16 to 512", height)
    chosen, font = "".join(sorted(chosen)), chinese()
    ink = torch.from_numpy(soft([glyph(character, height, seed, font) for character in chosen]))
    language = Language(len(chosen), seed)

    def page(number: int) -> bytes:
        """Return a page by its number and the seed alone; the last one has fewer lines."""
        writer = number // PAGES
        rng, hand = np.random.default_rng([seed, TEXT, number]), Writer(seed, writer, len(chosen))
        texts, images = [], []
        testers = (writer + HELD - 2) // HELD  # before this writer
        for line in range(number * LINES, min(count, (number + 1) * LINES)):
            first = None if writer % HELD == 1 else (line - PAGES * LINES * testers) % len(chosen)  # each in turn
            places = language.line(rng, (shortest, longest), first)
            texts.append("".join(chosen[place] for place in places))
            images.append(hand.line(ink, places, rng))
        return page_bytes(texts, images, "nbtools demo")

    pages = (divmod(n, PAGES) for n in range(-(-count // LINES)))  # HWDB 2.0 calls a writer's pages P16 to P20
    names = [f"{FOLDERS[writer % HELD == 1]}/{writer + 1:03}-P{16 + number}.dgrl" for writer, number in pages]
    folder = write_demo(folder, [(name, partial(page, n)) for n, name in enumerate(names)], SUFFIXES)
    say(f"{plural(count, 'line')} in {folder}, drawn with {font.stem if font else 'shapes, since no font has Chinese'}")
    return folder


def page_bytes(texts: Sequence[str], images: Sequence[np.ndarray], illustration: str) -> bytes:
    """Return a `.dgrl` of lines (H, W) uint8 one below the other with a margin; illustration: a note in latin-1."""
    margin, note = max(len(image) for image in images) // 2, illustration.encode("latin-1", "replace")
    height = margin + sum(len(image) + margin for image in images)
    width = max(image.shape[1] for image in images) + 2 * margin
    parts = [struct.pack("<i8s", HEADER + len(note), b"DGRL"), note, struct.pack("<20s2h", b"GB", CODE, 8)]
    parts.append(struct.pack("<3i", height, width, len(images)))
    top = margin
    for text, image in zip(texts, images, strict=True):
        parts += [struct.pack("<i", len(text)), codes_of(text), struct.pack(LINE_BOX, top, margin, *image.shape)]
        parts.append(image.tobytes())
        top += len(image) + margin
    return b"".join(parts)


def codes_of(text: str) -> bytes:
    return b"".join(one.encode("gb18030", "replace").ljust(CODE, b"\0") for one in text)


def pool() -> str:
    """Return the 6,763 characters of GB 2312, all of two bytes in a page: the frequent ones, then by its own order."""
    rows = (bytes((row, column)) for row in range(0xB0, 0xF8) for column in range(0xA1, 0xFF))
    listed = b"".join(rows).decode("gb2312", "ignore")  # five places at the end of level 1 are empty
    return FREQUENT + "".join(character for character in listed if character not in FREQUENT)


def glyph(character: str, size: int, seed: int, font: Path | None) -> Image.Image:
    """Return (S, S) L, ink 255: a character by a font; without one strokes in a 3 × 3 grid, by seed and code point."""
    scale = 1 if font else 4  # strokes are drawn large and reduced, since Pillow's lines have hard edges
    cell = Image.new("L", (scale * size, scale * size))
    pen, rng = ImageDraw.Draw(cell), np.random.default_rng([seed, ord(character)])
    if font:
        face = ImageFont.truetype(font, round(EM * size), layout_engine=ImageFont.Layout.BASIC)
        pen.text((size / 2, size / 2), character, 255, face, anchor="mm")
        return cell
    for place in rng.permutation(9)[: rng.integers(4, 6, endpoint=True)]:
        middle = (np.array([place % 3, place // 3]) - 1) * 0.27 * EM + rng.uniform(-0.06, 0.06, 2)
        half = rng.uniform(0.16, 0.34) * np.array(STROKES[rng.integers(len(STROKES))])
        ends = (np.clip([middle - half, middle + half], -EM / 2, EM / 2) + 0.5) * scale * size
        pen.line([tuple(end) for end in ends], 255, round(0.048 * scale * size))
    return cell.resize((size, size), Image.Resampling.BOX)


def soft(cells: Sequence[Image.Image]) -> np.ndarray:
    """Return (N, S, S) uint8 with a slope along the strokes; thin ones are brought to the same peak as thick ones."""
    ink = np.stack([np.asarray(cell.filter(ImageFilter.GaussianBlur(BLUR * cell.width))) for cell in cells])
    peak = max(np.quantile(ink.max(axis=(1, 2)), 0.1), 32)
    return np.minimum(ink * (255 / peak), 255).astype(np.uint8)


class Language:
    """N characters by their places; shares (N,) cumulative frequencies by Zipf's law; followers (N, FOLLOWERS)."""

    def __init__(self, count: int, seed: int):
        rng = np.random.default_rng([seed, GRAMMAR])
        weights = rng.permutation(1 / (np.arange(count) + HEAD))
        self.shares = (weights / weights.sum()).cumsum()
        self.followers = rng.choice(count, (count, FOLLOWERS), p=weights / weights.sum())

    def line(self, rng: np.random.Generator, length: tuple[int, int], first: int | None = None) -> np.ndarray:
        """Return the places (n,) of a line of `length` (fewest, most) characters; first: the place it begins with."""
        count = rng.integers(*length, endpoint=True)
        anything = np.minimum(np.searchsorted(self.shares, rng.random(count)), len(self.shares) - 1)
        kept, which = rng.random(count) < FAITHFUL, rng.integers(0, FOLLOWERS, count)
        places = [int(anything[0]) if first is None else first]
        for n in range(1, count):
            places.append(int(self.followers[places[-1], which[n]] if kept[n] else anything[n]))
        return np.array(places)


class Writer:
    """One hand; variation: 0 as printed, 1 as people write. matrix (2, 2): from where a pixel's ink comes; habits
    (N, 3, K, K): bend across, down, pressure, each of a few cosines; level: of the soft stroke from which on there is
    ink, low for a thick pen; gap: between characters, in cells."""

    def __init__(self, seed: int, number: int, count: int, variation: float = 1.0):
        rng = np.random.default_rng([seed, HAND, number])
        wide, tall = np.exp(variation * rng.uniform(-0.2, 0.12, 2))
        slant, turn = variation * rng.normal(0, (0.17, 0.04))
        self.matrix = np.array([[1 / wide, slant], [turn, 1 / tall]])
        self.habits = cosines(rng, count, HABIT * variation)
        self.level = 0.42 + variation * rng.uniform(-0.12, 0.12)
        self.dark = 1 - variation * rng.uniform(0, 0.45)
        self.gap = 0.08 + variation * rng.uniform(-0.07, 0.12)
        self.slope = variation * rng.normal(0, 0.02)
        self.variation = variation

    def line(self, ink: Tensor, places: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return (H, W) uint8 grey, 255 paper: characters, as places in the ink (N, S, S), along a line that climbs."""
        cells = self.characters(ink, places, rng)
        count, size, _ = cells.shape
        inked = cells.max(1) > FAINTEST  # (n, S)
        left, right = inked.argmax(1), size - inked[:, ::-1].argmax(1)
        gaps = size * (self.gap + self.variation * rng.normal(0, 0.04, count))
        steps = np.maximum(np.maximum(right - left, 0.45 * size) + gaps, 1)
        starts = np.round(np.cumsum(steps) - steps).astype(int)
        drift = self.slope * starts + size * self.variation * rng.normal(0, 0.04, count)
        tops = np.round(drift - drift.min()).astype(int)
        canvas = np.zeros((tops.max() + size, starts[-1] + size), np.uint8)
        for cell, top, start, first, last in zip(cells, tops, starts, left, right, strict=True):
            part = canvas[top : top + size, start : start + last - first]
            np.maximum(part, cell[:, first:last], out=part)
        rows, columns = (np.flatnonzero(canvas.max(axis) > FAINTEST) for axis in (1, 0))
        if len(rows):
            canvas = canvas[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        grain = rng.uniform(1 - 0.25 * self.variation, 1, canvas.shape).astype(np.float32)
        return 255 - (canvas * grain * np.float32(self.dark)).astype(np.uint8)

    def characters(self, ink: Tensor, places: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return (n, S, S) uint8 ink: the characters as the writer makes them this time."""
        count, size = len(places), ink.shape[-1]
        weights = self.habits[places] + cosines(rng, count, (1 - HABIT) * self.variation)
        basis = torch.cos(math.pi * (torch.arange(size)[:, None] + 0.5) / size * torch.arange(COSINES))  # (S, K)
        field = basis @ torch.from_numpy(weights) @ basis.T  # (n, 3, S, S)
        theta = torch.zeros(count, 2, 3)
        wobble = rng.normal(0, 0.04 * self.variation, (count, 2, 2))
        theta[:, :, :2] = torch.from_numpy(self.matrix @ (np.eye(2) + wobble))
        grid = F.affine_grid(theta, [count, 1, size, size], align_corners=False)
        grid += 2 * field[:, :2].permute(0, 2, 3, 1)  # the grid's cell goes from -1 to 1
        stroke = F.grid_sample(ink[torch.from_numpy(places)][:, None].float() / 255, grid, align_corners=False)[:, 0]
        level = (self.level + field[:, 2]).clamp_(0.25, 0.65)
        return ((stroke - level) * (0.12 * size) + 0.5).clamp_(0, 1).mul_(255).byte().numpy()


def cosines(rng: np.random.Generator, count: int, scale: float) -> np.ndarray:
    """Return (count, 3, K, K) float32 weights that fall with the frequency: slow bends are large, quick ones small."""
    order = np.add.outer(np.arange(COSINES), np.arange(COSINES))
    fall = scale * BEND / np.maximum(order, 1) * ((order > 0) & (order < COSINES))
    return (rng.standard_normal((count, 3, COSINES, COSINES), np.float32) * fall).astype(np.float32)
