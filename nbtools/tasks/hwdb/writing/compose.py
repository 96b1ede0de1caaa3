"""Lines composed of images of single characters that people wrote, as `.dgrl` pages; whole writers are held back."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count as counting
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from nbtools import disk
from nbtools.data import SPLITS, is_count, position, require_shares, stage
from nbtools.errors import PackError
from nbtools.table import plural
from nbtools.tasks.hwdb.formats.dgrl import Page
from nbtools.tasks.hwdb.writing import hands
from nbtools.tasks.hwdb.writing.demo import LINES, SIGNED, Style, clear, page_of, require_count, write
from nbtools.tasks.hwdb.writing.drawings import Drawing, cells, drawings, named
from nbtools.tasks.hwdb.writing.language import language

NAMES = "names.json"
COMPOSED = 4  # the stream of random numbers of composed pages
KEPT = 256  # drawers whose images stay in memory: 4 kB a character at the default height
FEW = 30  # drawers are listed one by one


@dataclass(frozen=True)
class Sheet:
    """One page of composed lines: whose characters of which alphabet, in which split."""

    number: int
    drawer: int
    alphabet: str
    split: str

    @property
    def name(self) -> str:
        return f"{self.split.title()}/{self.drawer:03}-P{self.number:04}.dgrl"


def compose(
    images: str | Path,
    folder: str | Path,
    count: int = 2000,
    *,
    alphabets: str | Sequence[str] | None = None,
    length: tuple[int, int] = (4, 12),
    height: int = 64,
    variation: float = 0.5,
    val: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    progress: bool = True,
) -> Path:
    """Write `count` lines made of images of characters to pages below Train, Val and Test; returns the folder.

    images: a folder or archive like Omniglot's, ALPHABET/CHARACTER/NAME_DRAWER.png; alphabets: some of its. A line is
    one alphabet and one drawer's. val, test: of the drawers, as shares or whole numbers; the same ones whatever count
    and seed, by their number, which in Omniglot tells people apart within an alphabet. Where names tell no drawers,
    images are held back: the k-th ones of all characters together, and that is printed.
    What stands for which character is in names.json: Latin, Greek and folders called by a character are that, others
    get Chinese ones. The text is `demo_text`'s language of these characters. variation: how much is added to what the
    drawers vary by themselves. Raises PackError, StageError, DiskError.
    """
    style = Style(length, height, variation, 8, seed)
    require_count(count)
    require_shares(val, test)
    source, folder = stage(images, progress=progress), Path(folder)
    found, told = drawings(source, alphabets)
    names = named(found)
    people = held_back({one.drawer for one in found}, val, test)
    plan = list(islice(sheets(found, people), -(-count // LINES)))
    with disk.explained("writing composed pages", folder):
        clear(folder, [split.title() for split in SPLITS])
        rest = count
        for sheet, page in zip(plan, pages(plan, found, names, style), strict=True):
            write(folder / sheet.name, replace(page, lines=page.lines[:rest]))
            rest -= LINES
        disk.write_atomic(folder / NAMES, json.dumps({names[one]: one for one in names}, ensure_ascii=False, indent=1))
    print(said(count, folder, names, people, told))
    return folder


def held_back(numbers: set[int], val: float, test: float) -> dict[int, str]:
    """Drawer → split, by a hash of the number: val and test of so many drawers, at least one each unless 0."""
    order = sorted(numbers, key=lambda number: position(f"drawer {number}"))
    ends = [share if is_count(share) or not share else max(1, round(share * len(order))) for share in (test, val)]
    if sum(ends) >= len(order):
        raise PackError(
            f"val={val} and test={test} leave none of {plural(len(order), 'drawer')} to train on; lower them"
        )
    return {
        number: "test" if rank < ends[0] else "val" if rank < sum(ends) else "train"
        for rank, number in enumerate(order)
    }


def sheets(found: Sequence[Drawing], people: Mapping[int, str]) -> Iterator[Sheet]:
    """Pages without end: every drawer one, then every drawer one of their next alphabet."""
    alphabets: dict[int, set[str]] = defaultdict(set)
    for one in found:
        alphabets[one.drawer].add(one.alphabet)
    for turn in counting():
        for place, drawer in enumerate(sorted(people)):
            choice = sorted(alphabets[drawer])
            yield Sheet(turn + 1, drawer, choice[(turn + place) % len(choice)], people[drawer])


def pages(plan: Sequence[Sheet], found: Sequence[Drawing], names: Mapping[str, str], style: Style) -> Iterator[Page]:
    """A whole page of each sheet. Train lines begin with one character of their alphabet after the other."""
    drawn: dict[tuple[str, int], list[Drawing]] = defaultdict(list)
    for one in found:
        drawn[one.alphabet, one.drawer].append(one)

    @lru_cache(KEPT)
    def atlas(alphabet: str, drawer: int) -> torch.Tensor:
        return torch.from_numpy(cells([one.path for one in drawn[alphabet, drawer]], style.height))

    begun = Counter[str]()
    for number, sheet in enumerate(plan):
        rng = np.random.default_rng([style.seed, COMPOSED, number])
        rows = defaultdict(list)
        for row, one in enumerate(drawn[sheet.alphabet, sheet.drawer]):
            rows[names[one.character]].append(row)
        spoken, texts = language(list(rows), style.seed), []
        for _ in range(LINES):
            first = begun[sheet.alphabet] % len(rows) if sheet.split == "train" else None
            begun[sheet.alphabet] += sheet.split == "train"
            texts.append(spoken.line(rng, style.length, first))
        ink = atlas(sheet.alphabet, sheet.drawer)
        writer = hands.hand(rng, len(ink), style.variation)
        places = [np.array([rng.choice(rows[one]) for one in text]) for text in texts]
        images = hands.lines(ink, places, writer, rng)
        yield page_of(texts, images, f"{SIGNED}, seed {style.seed}, composed of {sheet.alphabet}", style.bits)


def said(count: int, folder: Path, names: Mapping[str, str], people: Mapping[int, str], told: bool) -> str:
    """What was done, in a sentence or two: above all who was held back."""
    held = []
    for split in ("val", "test"):
        who = [str(one) for one in sorted(people) if people[one] == split]
        held.append(f"{', '.join(who) if 0 < len(who) <= FEW else len(who)} for {split}")
    lines = f"{plural(count, 'line')} of {plural(len(names), 'character')} by {plural(len(people), 'drawer')}"
    lines = f"{lines} in {folder}; held back: {' and '.join(held)}."
    return lines if told else f"{lines} The names tell no drawers: the k-th images of all characters count as one's."
