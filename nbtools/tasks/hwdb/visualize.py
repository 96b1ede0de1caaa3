"""Pictures of lines with their text, and with what a network read."""

from collections.abc import Sequence

import numpy as np

from nbtools.data import Pack
from nbtools.figures import Sheet, gallery, judge
from nbtools.tasks.common.files import text_of
from nbtools.tasks.common.metrics import pair

LONG = 10  # times as wide as high


def show(pack: Pack, ids: Sequence[int] | np.ndarray, predicted: Sequence[str] | None = None) -> Sheet:
    """Draw lines, each under its text; of wrong answers both, marked by colour and ≠. A long line has a row for itself.
    Raises PackError unless there is one answer for each id."""
    answers = [None] * len(ids) if predicted is None else predicted
    pairs = pair([int(i) for i in ids], answers, "text")
    pictures = [(picture(pack, i), *judge(text_of(pack, i), answer)) for i, answer in pairs]
    return gallery(pictures, 1 if any(image.shape[1] > LONG * len(image) for image, *_ in pictures) else 2)


def preview(pack: Pack, i: int, answer: str) -> tuple[np.ndarray, str, str]:
    """Return (image, truth, answer) of one line for the live picture."""
    return picture(pack, i), text_of(pack, i), answer


def picture(pack: Pack, i: int) -> np.ndarray:
    """Return (H, W) uint8 upright, dark on light: the pack holds it on its side, as ink."""
    return 255 - pack.sample(i)["image"].T
