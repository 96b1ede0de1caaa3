"""Pictures of samples with their text, and with what a network read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from nbtools.data import Pack
from nbtools.tasks.common.figures import RIGHT, WRONG, Sheet, blank

COLUMNS = 4


def show(pack: Pack, ids: Sequence[int] | np.ndarray, predicted: Sequence[str] | None = None) -> Figure:
    """A grid of samples, each under its text; predictions beside it, wrong ones marked by colour and ≠."""
    ids = [int(i) for i in ids]
    if not ids:
        return blank()
    rows = -(-len(ids) // COLUMNS)
    figure = Sheet(figsize=(12, 1.4 * rows), layout="constrained")
    for place, i in enumerate(ids):
        axes = figure.add_subplot(rows, COLUMNS, place + 1)
        axes.imshow(picture(pack, i), cmap="gray", vmin=0, vmax=255)
        axes.axis("off")
        truth = text_of(pack, i)
        if predicted is None:
            axes.set_title(truth, family="monospace")
        else:
            right = predicted[place] == truth
            title = truth if right else f"{truth} ≠ {predicted[place]}"
            axes.set_title(title, family="monospace", color=RIGHT if right else WRONG)
    return figure


def preview(pack: Pack, i: int, answer: str) -> tuple[np.ndarray, str, str]:
    """(image, truth, answer) of one sample for the live picture."""
    return picture(pack, i), text_of(pack, i), answer


def picture(pack: Pack, i: int) -> np.ndarray:
    """(H, W) uint8 as it is read: dark on light; lines lie on their side in the pack, as ink."""
    image = pack.sample(i)["image"]
    return 255 - image.T if pack.options["layout"] == "lines" else image


def text_of(pack: Pack, i: int) -> str:
    return "".join(pack.classes[place] for place in pack.sample(i)["label"])
