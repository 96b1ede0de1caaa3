"""What a pack of lines holds, before a network sees it: counts a split, what cannot be learned from, how wide it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nbtools import table
from nbtools.data import SPLITS, Pack
from nbtools.table import plural

STRIDES = (4, 8, 16, 32)  # columns a time step of the networks
BINS, BAR = 12, 24  # rows of the histogram of widths; characters of its longest bar
NARROW = [f"narrow /{stride}" for stride in STRIDES]
HEAD = ("split", "lines", "characters", "classes", "unknown", *NARROW, "width", "median", "95 %")


@dataclass(frozen=True)
class Tally:
    """One split. classes: different characters; unknown: characters of the class UNKNOWN; narrow: stride → lines whose
    time steps are fewer than CTC needs for the text; widths: columns, least, median, 95 % and most."""

    split: str
    lines: int
    characters: int
    classes: int
    unknown: int
    narrow: dict[int, int]
    widths: tuple[int, int, int, int]

    def row(self) -> tuple:
        least, median, high, most = self.widths
        counts = (self.lines, self.characters, self.classes, self.unknown, *self.narrow.values())
        return (self.split, *(f"{n:,}" for n in counts), f"{least:,} to {most:,}", f"{median:,}", f"{high:,}")


@dataclass(frozen=True)
class Report:
    """Shows as tables. narrow: stride → names of the lines that CTC cannot spell at it; untrained: classes that occur
    in lines to validate or test on, and never in training; outside: characters of the texts that are no class, with
    how often they occur; histogram: lines between two of the edges, in columns."""

    splits: tuple[Tally, ...]
    classes: int
    narrow: dict[int, list[str]]
    untrained: str
    outside: dict[str, int]
    edges: tuple[int, ...]
    histogram: tuple[int, ...]

    def notes(self) -> list[tuple[str, str]]:
        trained = next((tally.classes for tally in self.splits if tally.split == "train"), 0)
        notes = [("classes", f"{self.classes:,} and unknown; {trained:,} of them are in training lines")]
        if self.untrained:
            text = f"{len(self.untrained):,}, only in val or test: {shortened(self.untrained)}"
            notes.append(("never trained", text))
        if self.outside:
            count = sum(self.outside.values())
            notes.append(("in no class", f"{plural(count, 'character')}, now unknown: {shortened(self.outside)}"))
        for stride, names in self.narrow.items():
            if names:
                notes.append((f"too narrow at stride {stride}", f"{len(names):,}: {shortened(names, 3, ', ')}"))
        return notes

    def bars(self) -> list[tuple[str, str, str]]:
        most = max(self.histogram, default=0) or 1
        ranges = zip(self.edges, self.edges[1:], self.histogram, strict=False)
        return [(f"{a:,} to {b - 1:,}", f"{n:,}", "█" * round(BAR * n / most)) for a, b, n in ranges]

    def parts(self) -> list[tuple[Sequence[str], list]]:
        tallies = [tally.row() for tally in self.splits]
        return [(HEAD, tallies), (("report", ""), self.notes()), (("columns", "lines", ""), self.bars())]

    def __str__(self) -> str:
        return "\n\n".join(table.text(head, rows) for head, rows in self.parts())

    def _repr_html_(self) -> str:
        return "".join(table.html(head, rows) for head, rows in self.parts())


def report(pack: Pack) -> Report:
    """Count a pack. Lines too narrow for a network stay in it, since another network may have a smaller stride."""
    columns, narrow = np.diff(pack.offsets["image"]), narrow_lines(pack)
    tallies = [tally(pack, name, pack.ids(name), narrow) for name in SPLITS if pack.splits[name]]
    if len(tallies) > 1:
        tallies.append(tally(pack, "all", np.arange(len(pack)), narrow))
    trained, held = (counts_of(pack, names) for names in (SPLITS[:1], SPLITS[1:]))
    untrained = np.flatnonzero((held > 0) & (trained == 0)) if pack.splits["train"] else []
    edges = np.unique(np.linspace(columns.min(), columns.max() + 1, BINS + 1).astype(int))
    return Report(
        splits=tuple(tallies),
        classes=len(pack.classes) - 1,
        narrow={stride: [pack.names[i] for i in np.flatnonzero(which)] for stride, which in narrow.items()},
        untrained="".join(pack.classes[place] for place in untrained if place < len(pack.classes) - 1),
        outside=pack.manifest.get("outside", {}),
        edges=tuple(edges.tolist()),
        histogram=tuple(np.histogram(columns, edges)[0].tolist()),
    )


def tally(pack: Pack, name: str, ids: np.ndarray, narrow: dict[int, np.ndarray]) -> Tally:
    counts, widths = counts_of(pack, SPLITS if name == "all" else (name,)), pack.lengths("image", ids)
    median, high = np.quantile(widths, [0.5, 0.95]).round()
    return Tally(
        split=name,
        lines=len(ids),
        characters=int(counts.sum()),
        classes=int((counts[:-1] > 0).sum()),
        unknown=int(counts[-1]),
        narrow={stride: int(which[ids].sum()) for stride, which in narrow.items()},
        widths=(int(widths.min()), int(median), int(high), int(widths.max())),
    )


def counts_of(pack: Pack, splits: Sequence[str]) -> np.ndarray:
    """(classes,) how often each occurs in the lines of some splits."""
    here = np.isin(pack.split, [SPLITS.index(name) for name in splits])
    labels = pack.arrays["label"][np.repeat(here, np.diff(pack.offsets["label"]))]
    return np.bincount(labels, minlength=len(pack.classes))


def narrow_lines(pack: Pack) -> dict[int, np.ndarray]:
    """Stride → (n,) bool: lines with fewer time steps than CTC needs, one a character and a blank between equal
    neighbours."""
    labels, offsets = pack.arrays["label"], pack.offsets["label"]
    line = np.repeat(np.arange(len(pack)), np.diff(offsets))
    repeats = np.bincount(line[1:][(labels[1:] == labels[:-1]) & (line[1:] == line[:-1])], minlength=len(pack))
    needed, columns = np.diff(offsets) + repeats, np.diff(pack.offsets["image"])
    return {stride: -(-columns // stride) < needed for stride in STRIDES}


def shortened(values: Iterable[str], most: int = 30, between: str = "") -> str:
    listed = list(values)
    return between.join(listed[:most]) + (" …" if len(listed) > most else "")
