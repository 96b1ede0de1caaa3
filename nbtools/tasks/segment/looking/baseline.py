"""What can be known without looking: the class that is most frequent at each place of the picture, as a model would
score that always answers so. A trained one must be well above.

K classes, H × W pixels.
"""

from __future__ import annotations

import numpy as np

from nbtools.data import Pack
from nbtools.errors import PackError
from nbtools.tasks.segment.looking.analysis import pairs
from nbtools.train import Sums

CHUNK = 1 << 24  # labels read at once
COUNTS = 1 << 25  # counts held at once: more classes and pixels are done in strips of rows


def position_prior(pack: Pack, split: str = "val") -> dict[str, float]:
    """miou, pixel_accuracy and boundary_f on a split of the train split's `prior`: what `evaluate` says, by the same
    sums. Raises PackError for an empty split."""
    answer, sums = prior(pack), Sums()
    for i in required(pack, split):
        sums.add(pairs(pack, int(i), answer))
    return sums.read()


def prior(pack: Pack, split: str = "train") -> np.ndarray:
    """(H, W) uint8: the most frequent class at each pixel over the images of a split, of equally frequent ones the
    first; where none has a label, the most frequent of all."""
    ids = required(pack, split)
    height, width = pack.columns["label"].shape
    step = max(1, COUNTS // (len(pack.classes) * width))
    best, total = np.empty((height, width), np.uint8), np.zeros(len(pack.classes), np.int64)
    labelled = np.empty((height, width), bool)
    for top in range(0, height, step):
        rows = slice(top, min(top + step, height))
        counts = positions(pack, ids, rows)
        best[rows], labelled[rows] = counts.argmax(0), counts.any(0)
        total += counts.sum((1, 2), dtype=np.int64)
    return np.where(labelled, best, total.argmax()).astype(np.uint8)


def positions(pack: Pack, ids: np.ndarray, rows: slice) -> np.ndarray:
    """(K, rows, W) uint32: how many of the images have each class at each pixel of these rows."""
    classes, width = len(pack.classes), pack.columns["label"].shape[1]
    tall = rows.stop - rows.start
    counts = np.zeros((classes, tall, width), np.uint32)
    few = max(1, CHUNK // (tall * width))
    for start in range(0, len(ids), few):
        labels = pack.arrays["label"][ids[start : start + few], rows]
        for place in range(classes):
            counts[place] += (labels == place).sum(0, dtype=np.uint32)
    return counts


def required(pack: Pack, split: str) -> np.ndarray:
    ids = pack.ids(split)
    if not len(ids):
        raise PackError(f"the split {split!r} of {pack.folder} is empty; choose another")
    return ids
