"""Samples with the model's answers in a terminal: truth, prediction, and marks below the wrong characters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, zip_longest

from nbtools.live.plot.cards import aligned, right
from nbtools.live.plot.chart import Preview
from nbtools.live.plot.page import flowed
from nbtools.table import columns, padded, plain

ROWS, GAP = 3, 3  # rows of samples at most; columns between two of them
LABELS = ("TRU ", "PRE ", "    ")


def text(previews: Sequence[Preview], room: int) -> list[str]:
    """Lines of at most so many columns: short samples beside each other, a long one broken. Control characters are
    escaped. Nothing of samples without a text."""
    blocks = [block(preview, room) for preview in previews if preview.truth or preview.predicted]
    places = flowed([max(map(columns, lines)) + GAP for lines in blocks], room + GAP)
    found = []
    for row, group in groupby(zip(places, blocks, strict=True), lambda placed: placed[0][1]):
        if row < ROWS:
            found += beside([lines for _, lines in group])
    return found


def beside(blocks: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(columns, lines)) + GAP for lines in blocks]
    rows = zip_longest(*blocks, fillvalue="")
    return [
        "".join(padded(line, width, False) for line, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def block(preview: Preview, room: int) -> list[str]:
    """The lines of one sample: truth, prediction and marks, again and again where they are longer than the room."""
    if not preview.truth:
        return [LABELS[1] + plain(preview.predicted)]
    found, tick = [], " ✓" if right(preview) else ""
    read = aligned(preview.truth, preview.predicted, preview.whole)
    for pairs in broken([(plain(a), plain(b)) for a, b in read], room - 6):
        lines: list[str] = [*LABELS]
        for pair in pairs:
            wide = max(map(columns, pair))
            for i, part in enumerate((*pair, "^" * wide if pair[0] != pair[1] else "")):
                lines[i] += padded(part, wide, False)
        found += [line.rstrip() for line in lines if line.strip()]
    return [*found[:-1], found[-1] + tick]


def broken(pairs: Sequence[tuple[str, str]], room: int) -> list[list[tuple[str, str]]]:
    """The pairs in rows of at most so many columns."""
    rows: list[list[tuple[str, str]]] = [[]]
    used = 0
    for pair in pairs:
        wide = max(map(columns, pair))
        if rows[-1] and used + wide > room:
            rows.append([])
            used = 0
        rows[-1].append(pair)
        used += wide
    return rows
