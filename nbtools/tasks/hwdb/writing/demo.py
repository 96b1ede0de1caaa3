"""Demo data in the raw format: real `.dgrl` pages in folders of train and test writers, as CASIA-HWDB 2.x has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from nbtools import disk
from nbtools.errors import PackError
from nbtools.table import plural
from nbtools.tasks.hwdb.formats.dgrl import Line, Page, write_page
from nbtools.tasks.hwdb.formats.scan import codes_of
from nbtools.tasks.hwdb.writing import glyphs, hands
from nbtools.tasks.hwdb.writing.language import language, require_length, some, whole

TRAIN, TEST = "HWDB2.0Train", "HWDB2.0Test"
LINES, PAGES = 6, 2  # of a page, and of a writer: many writers, since new ones are what has to be read
FIRST_PAGE = 16  # HWDB 2.0 calls its pages P16 to P20
HELD = 5  # every fifth writer is a test writer, as 1,015 of 5,091 pages of HWDB are test pages
WRITER = 3  # the stream of random numbers of writers; the language has the others
PAPER = 200  # grey from which on there is no ink
SIGNED = "nbtools demo"  # how the pages' illustration field begins: by it another demo may replace them
INVENTED = (
    "No font here has these characters, so strokes invented from the seed stand for them, each code point its own. "
    "For real ones install a CJK font (apt-get install fonts-lxgw-wenkai, or pip install mplfonts), or give font="
)


@dataclass(frozen=True)
class Leaf:
    """One page of the demo: who writes it, where it goes, and how many lines it gets."""

    writer: int
    number: int
    lines: int

    @property
    def name(self) -> str:
        folder = TEST if is_held(self.writer) else TRAIN
        return f"{folder}/{self.writer:03}-P{FIRST_PAGE + self.number}.dgrl"


@dataclass(frozen=True)
class Style:
    """How lines look, whoever writes them: see `demo`. Raises PackError naming the first that breaks its rule."""

    length: tuple[int, int]
    height: int
    variation: float
    bits: int
    seed: int

    def __post_init__(self) -> None:
        require_length(self.length)
        rules = {
            "height must be a whole number of pixels from 16 to 512": (whole(self.height, 16, 512), self.height),
            "variation must be a number from 0 to 2": (
                isinstance(self.variation, (int, float)) and 0 <= self.variation <= 2,
                self.variation,
            ),
            "bits must be 1 or 8": (self.bits in (1, 8), self.bits),
            "seed must be a whole number, 0 or more": (whole(self.seed, 0), self.seed),
        }
        for rule, (kept, value) in rules.items():
            if not kept:
                raise PackError(f"{rule}, got {value!r}")


def demo(
    folder: str | Path,
    count: int = 2000,
    *,
    characters: int | str = 60,
    font: str | Path | None = None,
    length: tuple[int, int] = (4, 12),
    height: int = 64,
    variation: float = 1.0,
    bits: int = 8,
    seed: int = 0,
) -> Path:
    """Write pages with `count` handwriting-like lines; returns the folder, and prints what they were drawn with.

    characters: how many (the frequent ones of Chinese first), or which, of any script that GB18030 has in two bytes.
    font: a font file. None: an installed font that has them, that of the package mplfonts, or else *invented*
    characters, strokes from the seed; the pages' illustration field says which too.
    length: (fewest, most) characters of a line; HWDB's have about (20, 30). height: of a character's cell in pixels,
    of which it fills 70 %; HWDB's are about 100. variation: 0 as printed, 1 as people write. bits: 8 or 1 a pixel.
    The same seed, characters and font give the same bytes, and 100 lines are the first of 6,000. As soon as there are
    as many train lines as characters, each occurs there. Train and test writers differ; a fifth are test writers.
    Cost: 1 ms of CPU time a line of default size, 6 ms of 25 characters 100 high; before that 1 ms a character.
    Raises PackError on an impossible request, DiskError.
    """
    style = Style(length, height, variation, bits, seed)
    require_count(count)
    chosen = some(characters)
    codes_of(chosen)
    atlas = glyphs.atlas(characters if isinstance(characters, int) else chosen, font, height, seed)
    folder, plan = Path(folder), leaves(count)
    with disk.explained("writing demo pages", folder):
        clear(folder, (TRAIN, TEST))
        for leaf, page in zip(plan, pages(plan, atlas, style), strict=True):
            write(folder / leaf.name, replace(page, lines=page.lines[: leaf.lines]))
    print(
        f"{plural(count, 'line')} of {plural(len(atlas.characters), 'character')} in {folder}, drawn with "
        f"{atlas.drawn}."
    )
    if atlas.invented:
        print(INVENTED)
    return folder


def require_count(count: int) -> None:
    if not whole(count, 1):
        raise PackError(f"count must be a whole number of lines, 1 or more, got {count!r}")


def is_held(writer: int) -> bool:
    """Whether a writer, counted from 1, is a test writer."""
    return writer % HELD == 2


def leaves(count: int) -> list[Leaf]:
    """The pages of so many lines; the last one may be shorter."""
    starts = range(0, count, LINES)
    return [Leaf(n // PAGES + 1, n % PAGES, min(LINES, count - start)) for n, start in enumerate(starts)]


def pages(plan: Sequence[Leaf], atlas: glyphs.Atlas, style: Style) -> Iterator[Page]:
    """A whole page of each leaf, a pure function of seed and writer; the last leaf takes a part of its own."""
    ink, spoken = torch.from_numpy(atlas.ink), language(atlas.characters, style.seed)
    places = {character: place for place, character in enumerate(atlas.characters)}
    for leaf in plan:
        if leaf.number == 0:
            rng = np.random.default_rng([style.seed, WRITER, leaf.writer])
            writer = hands.hand(rng, len(places), style.variation)
        texts = [spoken.line(rng, style.length, opening(leaf, n, len(places))) for n in range(LINES)]
        drawn = hands.lines(ink, [np.array([places[one] for one in text]) for text in texts], writer, rng)
        yield page_of(texts, drawn, f"{SIGNED}, seed {style.seed}, drawn with {atlas.drawn}", style.bits)


def opening(leaf: Leaf, line: int, count: int) -> int | None:
    """With what character a train line begins: one after the other, so that none is missing; test lines freely."""
    if is_held(leaf.writer):
        return None
    held = (leaf.writer - 2 + HELD - 1) // HELD  # test writers before this one
    return ((leaf.writer - 1 - held) * PAGES * LINES + leaf.number * LINES + line) % count


def page_of(texts: Sequence[str], images: Sequence[np.ndarray], signature: str, bits: int) -> Page:
    """Lines one below the other with a margin, on a page as large as they need."""
    margin = max(image.shape[0] for image in images) // 2
    lines, top = [], margin
    for text, image in zip(texts, images if bits == 8 else map(black, images), strict=True):
        height, width = image.shape
        lines.append(Line(text, top, margin, height, width, image))
        top += len(image) + margin
    width = max(line.width for line in lines) + 2 * margin
    return Page(top, width, tuple(lines), signature.encode("latin-1", "replace").decode("latin-1"), "GB", bits)


def black(image: np.ndarray) -> np.ndarray:
    """Pale ink too is ink where a pixel has one bit: the page's own rule would lose what is lighter than 128."""
    return np.where(image < PAPER, 0, 255).astype(np.uint8)


def clear(folder: Path, names: Iterable[str]) -> None:
    """Make these folders, without pages of an earlier demo. Raises PackError at the first page that is not a demo's,
    for HWDB's own have the same names."""
    for name in names:
        disk.make_folder(folder / name)
        for path in sorted((folder / name).glob("*.dgrl")):
            with open(path, "rb") as file:
                head = disk.read(file, 12 + len(SIGNED))
            if not head.endswith(SIGNED.encode()):
                raise PackError(f"{path} was not written by this demo, and would be lost: choose another folder")
            disk.remove(path)


def write(path: Path, page: Page) -> None:
    """Not fsynced: demo data is made anew in seconds."""
    with disk.create(path) as file:
        disk.write(file, write_page(page))
