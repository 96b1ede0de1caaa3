"""Lines composed of images of single characters that people wrote, as `.dgrl` pages; whole drawers are held back: for
`benchmarks.real`, since no page of CASIA-HWDB may be passed on.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache, partial
from itertools import count as counting
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import nbtools as nb
from nbtools.data.splits import position
from nbtools.tasks.common.files import walk, write_demo
from nbtools.tasks.hwdb.data import SUFFIXES
from nbtools.tasks.hwdb.demo import EM, LINES, Language, Writer, page_bytes, pool, soft

DRAWING = re.compile(r"(?P<alphabet>[^/]+)/(?P<character>[^/]+)/\d+_(?P<drawer>\d+)\.png$")
HELD = {"Test": 0.2, "Val": 0.1}  # shares of the drawers
COMPOSED = 4  # the stream of random numbers
DARK = 128


def compose(
    images: str | Path, folder: Path, count: int, *, height: int = 64, variation: float = 0.5, seed: int = 0
) -> Path:
    """Write `count` lines to pages below Train, Val and Test; returns the folder.

    images: a folder or archive like Omniglot's, ALPHABET/CHARACTER/NAME_DRAWER.png. A page is one alphabet's and one
    drawer's; drawers are held back by a hash of their number, which tells people apart within an alphabet. Characters
    of GB 2312 stand for those of the images; train lines begin with one character of their alphabet after the other.
    variation: how much is added to what the drawers vary by themselves.
    """
    source, paths = nb.stage(images), defaultdict(dict)  # (alphabet, drawer) → character → file
    for name in walk(source):
        if match := DRAWING.search(name):
            paths[match["alphabet"], int(match["drawer"])][match["alphabet"], match["character"]] = source / name
    names = dict(zip(sorted({one for drawn in paths.values() for one in drawn}), pool(), strict=False))
    people = held_back({drawer for _, drawer in paths})
    alphabets = {one: sorted(a for a, drawer in paths if drawer == one) for one in people}

    @cache
    def ink_of(alphabet: str, drawer: int) -> torch.Tensor:
        return torch.from_numpy(cells(list(paths[alphabet, drawer].values()), height))

    def page(number: int, turn: int, place: int, drawer: int, first: int) -> bytes:
        alphabet = alphabets[drawer][(turn + place) % len(alphabets[drawer])]
        rng, ink = np.random.default_rng([seed, COMPOSED, number]), ink_of(alphabet, drawer)
        characters = [names[one] for one in paths[alphabet, drawer]]
        language, hand = Language(len(ink), seed), Writer(seed, number, len(ink), variation)
        texts, lines = [], []
        for n in range(min(LINES, count - number * LINES)):
            begins = (first + n) % len(ink) if people[drawer] == "Train" else None
            places = language.line(rng, (4, 12), begins)
            texts.append("".join(characters[k] for k in places))
            lines.append(hand.line(ink, places, rng))
        return page_bytes(texts, lines, f"composed of {alphabet}")

    pages = []
    for turn in counting():
        for place, drawer in enumerate(sorted(people)):
            if (number := len(pages)) * LINES < count:
                name = f"{people[drawer]}/{drawer:03}-P{turn + 1:04}.dgrl"
                pages.append((name, partial(page, number, turn, place, drawer, turn * LINES)))
        if len(pages) * LINES >= count:
            break
    return write_demo(folder, pages, SUFFIXES)


def held_back(drawers: set[int]) -> dict[int, str]:
    """Drawer → Train, Val or Test, by a hash of the number."""
    order, result = sorted(drawers, key=lambda number: position(f"drawer {number}")), dict.fromkeys(drawers, "Train")
    for split, share in HELD.items():
        for _ in range(max(1, round(share * len(drawers)))):
            result[order.pop(0)] = split
    return result


def cells(paths: list[Path], size: int) -> np.ndarray:
    """(n, S, S) uint8 soft ink of one drawer's images, dark on light, cut alike, so that what is small stays small."""
    images = []
    for path in paths:
        with Image.open(path) as image:
            images.append(255 - np.asarray(image.convert("L")))
    rows, columns = (np.flatnonzero(np.max(images, axis=(0, axis)) > DARK) for axis in (2, 1))
    side = max(rows[-1] - rows[0], columns[-1] - columns[0]) + 1
    top, left = (rows[0] + rows[-1] + 1 - side) // 2, (columns[0] + columns[-1] + 1 - side) // 2
    em, margin = round(EM * size), (size - round(EM * size)) // 2
    placed = []
    for image in images:
        part = Image.fromarray(image).crop((left, top, left + side, top + side)).resize((em, em), Image.Resampling.BOX)
        placed.append(Image.new("L", (size, size)))
        placed[-1].paste(part, (margin, margin))
    return soft(placed)
