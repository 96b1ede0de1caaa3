"""How the pixels of a pack are shared among its classes, and which class is taken for which, as pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from nbtools.data import SPLITS, Pack
from nbtools.letters import Letters
from nbtools.tasks.common.figures import RIGHT, WRONG, Sheet
from nbtools.tasks.segment.looking.overlay import colours_of
from nbtools.tasks.segment.masks.classes import IGNORE

if TYPE_CHECKING:
    import pandas as pd

INKS = "#4d4d4d", "#999999", "#cccccc"  # of train, val, test: colours are those of classes
GREY = "#6b6b6b"
LONGEST = 260  # px of a name
WRITTEN = 24  # classes up to which a confusion picture writes its shares
LABELLED = 120  # and its names


def balance(pack: Pack) -> Sheet:
    """The share of each class in the labelled pixels of each split, and of the images that hold it; the most frequent
    in training above. Reads every label once: 0.5 s for 1,000 of 360 × 480 pixels."""
    tallies = {split: tallied(pack, pack.ids(split)) for split in SPLITS if pack.splits[split]}
    classes = len(pack.classes)
    first, _ = next(iter(tallies.values()))
    ranked = np.argsort(-first[:classes], kind="stable")
    names, letters = written([pack.classes[place] for place in ranked], 8)
    sheet = Sheet(figsize=(10, 1.2 + classes * (0.34 if classes <= WRITTEN else 0.22)), layout="constrained")
    left, right = sheet.subplots(1, 2, sharey=True)
    pixels = {split: part[ranked] / max(part[:classes].sum(), 1) for split, (part, _) in tallies.items()}
    images = {split: part[ranked] / pack.splits[split] for split, (_, part) in tallies.items()}
    bars(left, pixels, "share of labelled pixels")
    bars(right, images, "share of images that hold it")
    left.set_yticks(range(classes), names, **letters.look(8))
    left.tick_params(axis="y", length=0, pad=16)
    swatches(left, colours_of(pack)[ranked])
    left.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    ignored = sum(part[IGNORE] for part, _ in tallies.values()) / sum(part.sum() for part, _ in tallies.values())
    right.set_title(f"{100 * ignored:.1f} % of all pixels are ignored", fontsize=8, color=GREY, loc="right")
    return sheet


def tallied(pack: Pack, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(pixels (256,), images (256,)): how many pixels have each value of the labels, and how many images any such."""
    pixels, images = np.zeros(256, np.int64), np.zeros(256, np.int64)
    for i in ids:
        counts = np.bincount(pack.arrays["label"][i].ravel(), minlength=256)
        pixels += counts
        images += counts > 0
    return pixels, images


def bars(axes: Axes, parts: Mapping[str, np.ndarray], title: str) -> None:
    """One bar a class and split, splits below each other, with its value behind it where there is room."""
    tall, count = 0.8 / len(parts), len(next(iter(parts.values())))
    for n, (split, shares) in enumerate(parts.items()):
        places = np.arange(count) + (n - (len(parts) - 1) / 2) * tall
        drawn = axes.barh(places, shares, 0.9 * tall, color=INKS[SPLITS.index(split)], label=split)
        if count <= WRITTEN:
            axes.bar_label(drawn, [percent(share) for share in shares], fontsize=7, color=GREY, padding=2)
    axes.set_xlabel(title, fontsize=9)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylim(count - 0.4, -0.6)
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)


def swatches(axes: Axes, colours: np.ndarray) -> None:
    """Each class's colour between its name and its bars."""
    places = np.arange(len(colours))
    look = {
        "marker": "s",
        "s": 60,
        "clip_on": False,
        "zorder": 3,
        "edgecolors": GREY,
        "linewidths": 0.5,
        "transform": axes.get_yaxis_transform(),
    }
    axes.scatter(np.full(len(colours), -0.025), places, c=colours / 255, **look)


def percent(share: float) -> str:
    """Two digits that count."""
    return f"{100 * share:.{0 if share >= 0.1 else 1 if share >= 0.01 else 2}f} %" if share else "none"


def confused(table: pd.DataFrame) -> Sheet:
    """A table of `confusion`: each class's pixels by what they were taken for, blue on the diagonal, where that is
    right; the numbers are per cent of the row."""
    counts = table.to_numpy()
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    names, letters = written(list(table.index), 7)
    side = min(max(4.5, 0.32 * len(table) + 2.5), 16)
    sheet = Sheet(figsize=(side, side), layout="constrained")
    axes = sheet.add_subplot(xlabel="predicted", ylabel="truth")
    axes.set_title("per cent of each true class's pixels", fontsize=8, color=GREY, loc="right")
    axes.imshow(coloured(shares), interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    if len(table) <= LABELLED:
        look = letters.look(7 if len(table) <= 60 else 4)
        axes.set_xticks(range(len(table)), names, rotation=90, **look)
        axes.set_yticks(range(len(table)), names, **look)
    if len(table) <= WRITTEN:
        for row, column in zip(*np.nonzero(shares >= 0.005), strict=True):
            ink = "white" if shares[row, column] > 0.4 else "black"
            text = f"{100 * shares[row, column]:.0f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=ink)
    return sheet


def written(names: list[str], size: float) -> tuple[list[str], Letters]:
    """Names as they are drawn, none too long."""
    letters = Letters.of("…".join(names))
    return [letters.plain(letters.shortened(name, size, LONGEST)) for name in names], letters


def coloured(shares: np.ndarray) -> np.ndarray:
    """(K, K, 3): white for none, the colour of right on the diagonal and of wrong beside it for all; one pixel in a
    hundred must still be seen, so the root of the share."""
    right, wrong = (np.array([int(ink[i : i + 2], 16) / 255 for i in (1, 3, 5)]) for ink in (RIGHT, WRONG))
    ink = np.where(np.eye(len(shares), dtype=bool)[..., None], right, wrong)
    return 1 - np.sqrt(shares)[..., None] * (1 - ink)
