"""What a pack of signs holds, and what was taken for what, as pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes

from nbtools.data import SPLITS, Pack
from nbtools.tasks.common.figures import RIGHT, WRONG, Sheet

if TYPE_CHECKING:
    import pandas as pd

INKS = (RIGHT, "#e69f00", "#009e73")  # of train, val, test
GREY = "#6b6b6b"
BINS = 30
WRITTEN = 24  # classes up to which a confusion picture writes its counts
LABELLED = 120  # and its names


def lengths(pack: Pack) -> Sheet:
    """How many frames the clips of each split have."""
    column = pack.card.bucket_by or "x"
    parts = {name: pack.lengths(column, pack.ids(name)) for name in SPLITS if pack.splits[name]}
    sheet = Sheet(figsize=(8, 3), layout="constrained")
    axes = sheet.add_subplot(xlabel="frames of a clip", ylabel="clips")
    least, most = min(part.min() for part in parts.values()), max(part.max() for part in parts.values())
    edges = np.unique(np.linspace(least, most + 1, BINS + 1).astype(int))
    inks = [INKS[SPLITS.index(name)] for name in parts]
    axes.hist(list(parts.values()), list(edges - 0.5), stacked=True, color=inks, label=list(parts))
    every = np.concatenate(list(parts.values()))
    axes.set_title(f"median {np.median(every):g}, {least} to {most}", fontsize=9, color=GREY, loc="right")
    finish(axes)
    return sheet


def classes(pack: Pack) -> Sheet:
    """How many clips each gloss has in each split, glosses beside those of their category."""
    counts = {
        name: np.bincount(pack.arrays["label"][pack.ids(name), 0], minlength=len(pack.classes))
        for name in SPLITS
        if pack.splits[name]
    }
    of = np.array(pack.options["category_of"])
    ranked = np.argsort(of, kind="stable")
    sheet = Sheet(figsize=(min(max(6, 0.24 * len(of)), 24), 3.6), layout="constrained")
    axes = sheet.add_subplot(ylabel="clips")
    base, places = np.zeros(len(of), int), np.arange(len(of))
    for name, count in counts.items():
        axes.bar(places, count[ranked], bottom=base, color=INKS[SPLITS.index(name)], label=name)
        base += count[ranked]
    axes.set_xticks(places, [pack.classes[gloss] for gloss in ranked], rotation=90, fontsize=7, parse_math=False)
    axes.margins(x=0.01)
    for edge in np.flatnonzero(np.diff(of[ranked])):
        axes.axvline(edge + 0.5, color=GREY, linewidth=0.6, linestyle=":")
    finish(axes)
    return sheet


def finish(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def confused(table: pd.DataFrame) -> Sheet:
    """A table of `analysis.confusion`: each row's clips by what was read, blue on the diagonal, where that is right."""
    counts = table.to_numpy()
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    side = min(max(3.5, 0.28 * len(table) + 1.5), 16)
    sheet = Sheet(figsize=(side, side), layout="constrained")
    axes = sheet.add_subplot(xlabel="read", ylabel="truth")
    axes.imshow(coloured(shares), interpolation="nearest")
    if len(table) <= LABELLED:
        size = 7 if len(table) <= 60 else 4
        axes.set_xticks(range(len(table)), list(table.columns), rotation=90, fontsize=size, parse_math=False)
        axes.set_yticks(range(len(table)), list(table.index), fontsize=size, parse_math=False)
    if len(table) <= WRITTEN:
        for row, column in zip(*np.nonzero(counts), strict=True):
            ink = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{counts[row, column]:,}", ha="center", va="center", fontsize=6, color=ink)
    return sheet


def coloured(shares: np.ndarray) -> np.ndarray:
    """(C, C, 3): white for none, the colour of right on the diagonal and of wrong beside it for all; a single clip in a
    hundred must still be seen, so the root of the share."""
    right, wrong = (np.array([int(ink[i : i + 2], 16) / 255 for i in (1, 3, 5)]) for ink in (RIGHT, WRONG))
    ink = np.where(np.eye(len(shares), dtype=bool)[..., None], right, wrong)
    return 1 - np.sqrt(shares)[..., None] * (1 - ink)
