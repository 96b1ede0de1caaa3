"""Samples as pictures with their text, and with a network's answer."""

from collections.abc import Sequence

import numpy as np

from nbtools.data import Pack
from nbtools.figures import Sheet, gallery, judge
from nbtools.tasks.common.files import text_of
from nbtools.tasks.common.metrics import pair


def show(pack: Pack, ids: Sequence[int] | np.ndarray, predicted: Sequence[str] | None = None) -> Sheet:
    """Draw a grid of samples, each under its text; of wrong predictions both, marked by colour and ≠."""
    pairs = pair(list(ids), [None] * len(ids) if predicted is None else predicted, "text")
    return gallery([(picture(pack, int(i)), *judge(text_of(pack, int(i)), answer)) for i, answer in pairs])


def preview(pack: Pack, i: int, answer: str) -> tuple[np.ndarray, str, str]:
    """Return (image, truth, answer) of one sample for the live picture."""
    return picture(pack, i), text_of(pack, i), answer


def picture(pack: Pack, i: int) -> np.ndarray:
    """Return (H, W) uint8, upright and dark on light: a pack has lines on their side, as ink."""
    image = pack.sample(i)["image"]
    return 255 - image.T if pack.options["layout"] == "lines" else image
