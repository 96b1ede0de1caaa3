"""Samples that are read as text: their truth, and pictures with it and with what a network read."""

from collections.abc import Sequence

import numpy as np

from nbtools.data import Pack
from nbtools.figures import Sheet, gallery, judge
from nbtools.tasks.common.metrics import pair

COLUMNS = ((4, 4), (10, 2))  # pictures at most so many times as wide as high → in a row; else one


def text_of(pack: Pack, i: int) -> str:
    """Return the text of sample i of a pack whose column `label` holds places in its classes."""
    return "".join(pack.classes[place] for place in pack.sample(i)["label"])


def show(pack: Pack, ids: Sequence[int] | np.ndarray, predicted: Sequence[str] | None = None) -> Sheet:
    """Draw samples, each under its text; of wrong answers both, marked by colour and ≠. Long lines have a row each.
    Raises PackError unless there is one answer for each id."""
    pairs = pair([int(i) for i in ids], [None] * len(ids) if predicted is None else predicted, "text")
    pictures = [(picture(pack, i), *judge(text_of(pack, i), answer)) for i, answer in pairs]
    longest = max((image.shape[1] / len(image) for image, *_ in pictures), default=0)
    return gallery(pictures, next((columns for most, columns in COLUMNS if longest <= most), 1))


def preview(pack: Pack, i: int, answer: str) -> tuple[np.ndarray, str, str]:
    return picture(pack, i), text_of(pack, i), answer


def picture(pack: Pack, i: int) -> np.ndarray:
    """Return (H, W) uint8, upright and dark on light: a pack has lines, which are ragged, on their side, as ink."""
    image = pack.sample(i)["image"]
    return 255 - image.T if pack.columns["image"].kind == "ragged" else image
