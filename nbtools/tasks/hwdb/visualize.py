"""Pictures of lines with their text and what a network read in them, and of what it confuses.

Positions are px from the top left of a figure of 100 dots an inch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from nbtools.data import Pack
from nbtools.figures import GREY, RIGHT, WIDE, WRONG, Sheet, blank, canvas, chinese, finish, look, scaled
from nbtools.show import columns
from nbtools.tasks.common.lists import text_of
from nbtools.tasks.common.metrics import paired
from nbtools.tasks.hwdb.analysis import aligned, is_wrong

if TYPE_CHECKING:
    import pandas as pd

TALL, MARGIN = 72, 16  # px: of a line's image, at most; at the sides and between lines
CELL, ROW, LABEL = 10, 24, 62  # px: half a Chinese character; a row of text; what stands before it
SIZE = 12  # points of a letter, 16.7 px: a monospaced one is a cell wide
NO_FONT = "No font here has Chinese characters; install fonts-noto-cjk"


def show(pack: Pack, ids: Sequence[int] | np.ndarray, predicted: Sequence[str] | None = None) -> Sheet:
    """Lines one below the other with their text; below each character what was read for it, wrong ones coloured, and an
    empty box where one is missing (below) or was inserted (above). Raises PackError unless there is one text per id.
    """
    lines = [(picture(pack, int(i)), text_of(pack, int(i))) for i in ids]
    answers = [truth for _, truth in lines] if predicted is None else predicted
    texts = [aligned(truth, read) for (_, truth), read in paired(lines, answers, "text")]
    if not lines:
        return blank()
    lacks = chinese() is None and any(columns(text) > len(text) for text in [*(truth for _, truth in lines), *answers])
    sizes = [scaled(image, WIDE - 2 * MARGIN, TALL) for image, _ in lines]
    rows = 1 if predicted is None else 2
    top = MARGIN + ROW * lacks
    sheet, axes = canvas(WIDE, top + sum(height + rows * ROW + MARGIN for _, height in sizes))
    note(axes, MARGIN, MARGIN, NO_FONT if lacks else "")
    for (image, _), (width, height), pairs in zip(lines, sizes, texts, strict=True):
        place = (MARGIN, MARGIN + width, top + height, top)
        axes.imshow(image, cmap="gray", vmin=0, vmax=255, extent=place, aspect="auto")
        top += height + ROW
        spell(axes, pairs, top - 6, predicted is not None)
        top += (rows - 1) * ROW + MARGIN
    return sheet


def preview(pack: Pack, i: int, answer: str) -> tuple[np.ndarray, str, str]:
    """(image, truth, answer) of one line for the live picture."""
    return picture(pack, i), text_of(pack, i), answer


def picture(pack: Pack, i: int) -> np.ndarray:
    """(H, W) uint8 upright, dark on light: the pack holds it on its side, as ink."""
    return 255 - pack.sample(i)["image"].T


def spell(axes: Axes, pairs: list[tuple[str, str]], base: int, compared: bool) -> None:
    """The truth on a base line, and below it what was read; a text that is too long for the figure is drawn smaller."""
    widths = [max(columns(true), columns(read)) for true, read in pairs]
    left = MARGIN + LABEL * compared
    unit = min(CELL, (WIDE - MARGIN - left) / max(sum(widths), 1))
    font = look(SIZE * unit / CELL, mono=True)
    if compared:
        note(axes, MARGIN, base, "truth")
        note(axes, MARGIN, base + ROW, "predicted")
    for (true, read), wide in zip(pairs, widths, strict=True):
        wrong = is_wrong(true, read)
        sides = [(true, RIGHT if wrong else GREY), (read, WRONG if wrong else GREY)]
        for row, (letter, colour) in enumerate(sides[: 1 + compared]):
            if letter:
                axes.text(left, base + row * ROW, letter, color=colour, **font)
            else:
                place = (left + 1, base + row * ROW - ROW + 8)
                box = Rectangle(place, wide * unit - 2, ROW - 4, linewidth=0.8, edgecolor=colour, facecolor="none")
                axes.add_patch(box)
        left += wide * unit


def confused(table: pd.DataFrame, count: int = 12) -> Sheet:
    """The first rows of `confusions`: the true character, what was read for it, and how often."""
    table = table.head(count)
    if table.empty:
        return blank("Nothing was read wrong: the table of confusions is empty.")
    names = [f"{true or 'inserted'} → {read or 'missing'}" for true, read in zip(table.truth, table.read, strict=True)]
    sheet = Sheet(figsize=(6, 0.6 + 0.28 * len(table)), layout="constrained")
    axes = sheet.add_subplot(xticks=[])
    axes.bar_label(axes.barh(range(len(table)), table.wrong, color=WRONG), padding=4, color=GREY)
    axes.set_yticks(range(len(table)), names, **look(SIZE, mono=True))
    axes.invert_yaxis()
    finish(axes)
    return sheet


def note(axes: Axes, left: float, base: float, text: str) -> None:
    axes.text(left, base, text, color=GREY, size=8, parse_math=False)
