"""Samples of text as pictures, with what a network read."""

from collections.abc import Sequence

import numpy as np

from nbtools.data import Pack
from nbtools.figures import Sheet, gallery, judged
from nbtools.tasks.common.lists import text_of
from nbtools.tasks.common.metrics import paired

COLUMNS = ((10, 1), (6, 2), (0, 4))  # the widest picture, in times its height, above which there are so many in a row


def show(pack: Pack, ids: Sequence[int] | np.ndarray, predicted: Sequence[str] | None = None) -> Sheet:
    """Draw samples, each under its text; of wrong answers both, marked by colour and ≠. A long line has a row for
    itself. Raises PackError unless there is one answer for each id."""
    pairs = paired([int(i) for i in ids], [None] * len(ids) if predicted is None else predicted, "text")
    pictures = [(picture(pack, i), *judged(text_of(pack, i), answer)) for i, answer in pairs]
    widest = max((image.shape[1] / len(image) for image, *_ in pictures), default=0)
    return gallery(pictures, next(columns for above, columns in COLUMNS if widest >= above))


def preview(pack: Pack, i: int, answer: str) -> tuple[np.ndarray, str, str]:
    """Return (image, truth, answer) of one sample for the live picture."""
    return picture(pack, i), text_of(pack, i), answer


def picture(pack: Pack, i: int) -> np.ndarray:
    """Return (H, W) uint8, upright and dark on light: a pack has lines on their side, as ink."""
    image = pack.sample(i)["image"]
    return 255 - image.T if pack.columns["image"].kind == "ragged" else image
