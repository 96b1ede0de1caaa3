"""Pictures of lines with their text and what a network read in them, and of the tables of `analysis`.

Positions are px from the top left of a figure of 100 dots an inch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from nbtools.data import Pack
from nbtools.errors import PackError
from nbtools.letters import Letters
from nbtools.table import plural
from nbtools.tasks.common.figures import GREY, RIGHT, WIDE, WRONG, Sheet, blank, canvas, finish
from nbtools.tasks.common.labels import text_of
from nbtools.tasks.hwdb.analysis import aligned, right

if TYPE_CHECKING:
    import pandas as pd

TALL, MARGIN = 72, 16  # px: of a line's image, at most; at the sides and between lines
CELL, ROW, LABEL, END = 10, 24, 40, 120  # px: half a Chinese character; a row of text; what stands before and behind it
SIZE = 12  # points of a letter, 16.7 px: a monospaced one is a cell wide
INK, PALE = "#000000", "#fbe3d3"

Cell = tuple[int, str, str]
"""(columns before it, true character, what was read)."""


def show(pack: Pack, ids: Sequence[int] | np.ndarray, predicted: Sequence[str] | None = None) -> Sheet:
    """Lines one below the other with their text; below each character what was read for it, wrong ones coloured, and an
    empty box where one is missing (below) or was inserted (above). Raises PackError unless there is one text an id.
    """
    ids = [int(i) for i in ids]
    if predicted is not None and len(predicted) != len(ids):
        raise PackError(f"predicted must be one text an id, got {len(predicted)} for {plural(len(ids), 'id')}")
    if not ids:
        return blank()
    truths = [text_of(pack, i) for i in ids]
    read = truths if predicted is None else predicted
    letters = Letters.of("".join([*truths, *read]), mono=True)
    images = [picture(pack, i) for i in ids]
    scales = [min((WIDE - 2 * MARGIN) / image.shape[1], TALL / image.shape[0]) for image in images]
    texts = [broken(*pair, letters) for pair in zip(truths, read, strict=True)]
    below = ROW if predicted is None else 2 * ROW
    heights = [max(1, round(scale * len(image))) for scale, image in zip(scales, images, strict=True)]
    top = MARGIN + ROW * bool(letters.note)
    height = top + sum(heights) + sum(below * len(text) + MARGIN for text in texts)
    sheet, axes = canvas(WIDE, height)
    note(axes, MARGIN, MARGIN, letters.note)
    for image, scale, tall, text in zip(images, scales, heights, texts, strict=True):
        box = (MARGIN, MARGIN + max(1, round(scale * image.shape[1])), top + tall, top)
        axes.imshow(image, cmap="gray", vmin=0, vmax=255, extent=box, aspect="auto")
        spell(axes, letters, text, top + tall, predicted is not None)
        top += tall + below * len(text) + MARGIN
    return sheet


def preview(pack: Pack, i: int, answer: str) -> tuple[np.ndarray, str, str]:
    """(image, truth, answer) of one line for the live picture."""
    return picture(pack, i), text_of(pack, i), answer


def picture(pack: Pack, i: int) -> np.ndarray:
    """(H, W) uint8 upright, dark on light: the pack holds it on its side, as ink."""
    return 255 - pack.sample(i)["image"].T


def broken(truth: str, read: str, letters: Letters) -> list[list[Cell]]:
    """The characters of a line in rows that fit the figure."""
    room, at = (WIDE - 2 * MARGIN - LABEL - END) // CELL, 0
    rows: list[list[Cell]] = [[]]
    for pair in aligned(truth, read):
        wide = max(map(letters.columns, "".join(pair)))
        if at + wide > room:
            at = 0
            rows.append([])
        rows[-1].append((at, *pair))
        at += wide
    return rows


def spell(axes: Axes, letters: Letters, text: list[list[Cell]], top: int, compared: bool) -> None:
    """Rows of text below `top`: the truth, and where they are compared below it what was read."""
    left, base = MARGIN + LABEL * compared, top + ROW - 6
    for row in text:
        for at, true, read in row:
            wide = CELL * max(map(letters.columns, true + read))
            place, wrong = left + CELL * at, not right(true, read)
            cell(axes, letters, place, base, wide, true, RIGHT if wrong else INK)
            if compared:
                cell(axes, letters, place, base + ROW, wide, read, WRONG if wrong else INK)
        if compared:
            note(axes, MARGIN, base, "TRU")
            note(axes, MARGIN, base + ROW, "PRE")
        base += ROW * (1 + compared)
    if compared:
        count = sum(not right(true, read) for row in text for _, true, read in row)
        end = max((at + 2 for at, _, _ in text[-1]), default=0)
        message, colour = (f"{count} wrong", WRONG) if count else ("✓", RIGHT)
        note(axes, left + CELL * (end + 1), base - ROW, message, colour)


def cell(axes: Axes, letters: Letters, left: int, base: int, wide: int, letter: str, colour: str) -> None:
    """A character on its base line, on a ground of its own where it was read wrong; an empty box for none."""
    if not letter or colour == WRONG:
        edge, face = ("none", PALE) if letter else (colour, "none")
        box = Rectangle((left + 1, base - ROW + 8), wide - 2, ROW - 4, linewidth=0.8, edgecolor=edge, facecolor=face)
        axes.add_patch(box)
    text, scale = letters.cell(letter) if letter else ("", 1.0)
    axes.text(left, base, text, color=colour, linespacing=1, **letters.look(SIZE * scale))


def confused(table: pd.DataFrame, count: int = 12) -> Sheet:
    """The first rows of `confusions`: the true character, what was read for it, and how often."""
    table = table.head(count)
    if table.empty:
        return blank("Nothing was read wrong: the table of confusions is empty.")
    letters = Letters.of("".join([*table.truth, *table.read]), mono=True)
    top, wide, bar = MARGIN + ROW * bool(letters.note), WIDE // 2, MARGIN + 8 * CELL
    sheet, axes = canvas(wide, top + ROW * len(table) + MARGIN)
    note(axes, MARGIN, MARGIN, letters.note)
    longs = (wide - bar - END) * table.wrong / table.wrong.max()
    rows = zip(table.truth, table.read, table.kind, table.wrong, longs, strict=True)
    for base, (true, read, kind, wrong, long) in zip(itertools.count(top + ROW - 6, ROW), rows, strict=False):
        cell(axes, letters, MARGIN, base, 2 * CELL, true, RIGHT)
        note(axes, MARGIN + 2 * CELL + 6, base, "→")
        cell(axes, letters, MARGIN + 4 * CELL, base, 2 * CELL, read, WRONG)
        axes.add_patch(Rectangle((bar, base - 12), long, 14, color=WRONG, linewidth=0))
        note(axes, bar + long + 6, base, f"{wrong:,}" if kind == "substituted" else f"{wrong:,} {kind}")
    return sheet


def bars(table: pd.DataFrame) -> Sheet:
    """CER of each row of `by_width` or `by_frequency` that has characters, with how many there are."""
    title, rows = table.columns[0], table[table.characters > 0]
    if rows.empty:
        return blank("No characters to count: the table has none.")
    sheet = Sheet(figsize=(8, 3), layout="constrained")
    axes = sheet.add_subplot(xlabel={"width": "px wide", "seen": "times seen in training"}[title], ylabel="CER, %")
    drawn = axes.bar(rows[title], 100 * rows.cer, color=RIGHT)
    axes.bar_label(drawn, [f"{count:,}" for count in rows.characters], fontsize=8, color=GREY)
    axes.set_title("above each bar: characters", fontsize=8, color=GREY, loc="right")
    axes.margins(y=0.12)
    finish(axes)
    return sheet


def note(axes: Axes, left: float, base: float, text: str, colour: str = GREY) -> None:
    axes.text(left, base, text, color=colour, size=8, parse_math=False)
