"""How good predictions are, by class and by image; and what the position of a pixel alone predicts.

predicted: one class map (H, W) uint8 an id, as `run.predict_pack(pack, ids)` and `decode` give them. Everything is
counted in exact sums over all images, as in `scores`. K classes, H × W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from nbtools.data import Pack
from nbtools.errors import PackError
from nbtools.tasks.common import mistakes
from nbtools.tasks.segment import scores
from nbtools.tasks.segment.classes import IGNORE
from nbtools.train import Pair, Sums

if TYPE_CHECKING:
    import pandas as pd

METRICS = ("miou", "pixel_accuracy", "boundary_f")
CHUNK = 1 << 24  # labels read at once
COUNTS = 1 << 25  # counts held at once: more classes and pixels are counted in strips of rows

Ids = Sequence[int] | np.ndarray


def by_class(pack: Pack, ids: Ids, predicted: Sequence[np.ndarray]) -> pd.DataFrame:
    """A row for each class, the worst first: class, iou, precision, recall, share (of all pixels), confused (what it is
    mistaken for most often, "" if never) and lost (the share of its pixels that this costs).

    NaN is what cannot be computed: the iou, last in the table, of a class that neither exists nor is predicted, which
    is no part of mIoU either; the precision of one never predicted; the recall of one that does not exist.
    """
    import pandas as pd

    counts = count(pack, ids, predicted)
    both, true, found = counts.diagonal(), counts.sum(1), counts.sum(0)
    confused, times = mistakes.most_confused(counts, pack.classes)
    columns = {
        "class": pack.classes,
        "iou": ratio(both, true + found - both),
        "precision": ratio(both, found),
        "recall": ratio(both, true),
        "share": ratio(true, counts.sum()),
        "confused": confused,
        "lost": ratio(times, true),
    }
    return pd.DataFrame(columns).sort_values("iou", kind="stable", ignore_index=True)


def confusion(pack: Pack, ids: Ids, predicted: Sequence[np.ndarray]) -> pd.DataFrame:
    """How many pixels of each class (rows) were predicted as each (columns)."""
    return mistakes.confusion(count(pack, ids, predicted), pack.classes)


def image_scores(pack: Pack, ids: Ids, predicted: Sequence[np.ndarray]) -> pd.DataFrame:
    """A row for each image: id, name, miou (over the classes that it holds or that were predicted), pixel_accuracy and
    boundary_f; NaN where every pixel is ignored."""
    import pandas as pd

    rows = [{"id": i, "name": pack.names[i], **image_metrics(pack, i, map_)} for i, map_ in maps(pack, ids, predicted)]
    return pd.DataFrame(rows, columns=["id", "name", *METRICS])


def worst(pack: Pack, ids: Ids, predicted: Sequence[np.ndarray], count: int | None = None) -> list[int]:
    """The ids in the order of their images' mIoU, lowest first; the first `count` of them. Images whose every pixel is
    ignored are left out."""
    table = image_scores(pack, ids, predicted).dropna(subset="miou")
    return table.sort_values("miou", kind="stable").id.tolist()[:count]


def position_prior(pack: Pack, split: str = "val") -> dict[str, float]:
    """miou, pixel_accuracy and boundary_f on a split of the train split's `prior`, by the sums of `evaluate`: what a
    network must clearly exceed. Raises PackError for an empty split."""
    guess, sums = prior(pack), Sums()
    for i in require_ids(pack, split):
        sums.add(pairs(pack, int(i), guess))
    return sums.read()


def prior(pack: Pack, split: str = "train") -> np.ndarray:
    """(H, W) uint8: the most frequent class at each pixel over the images of a split, the first of equally frequent
    ones; where no image has a label, the most frequent of all."""
    ids = require_ids(pack, split)
    height, width = pack.columns["label"].shape
    step = max(1, COUNTS // (len(pack.classes) * width))
    best, total = np.empty((height, width), np.uint8), np.zeros(len(pack.classes), np.int64)
    labelled = np.empty((height, width), bool)
    for top in range(0, height, step):
        rows = slice(top, min(top + step, height))
        counts = position_counts(pack, ids, rows)
        best[rows], labelled[rows] = counts.argmax(0), counts.any(0)
        total += counts.sum((1, 2), dtype=np.int64)
    return np.where(labelled, best, total.argmax()).astype(np.uint8)


def position_counts(pack: Pack, ids: np.ndarray, rows: slice) -> np.ndarray:
    """(K, rows, W) uint32: how many of the images have each class at each pixel of these rows."""
    classes, width = len(pack.classes), pack.columns["label"].shape[1]
    height = rows.stop - rows.start
    counts = np.zeros((classes, height, width), np.uint32)
    few = max(1, CHUNK // (height * width))
    for start in range(0, len(ids), few):
        labels = pack.arrays["label"][ids[start : start + few], rows]
        for k in range(classes):
            counts[k] += (labels == k).sum(0, dtype=np.uint32)
    return counts


def require_ids(pack: Pack, split: str) -> np.ndarray:
    ids = pack.ids(split)
    if not len(ids):
        raise PackError(f"the split {split!r} of {pack.folder} is empty; choose another")
    return ids


def image_metrics(pack: Pack, i: int, predicted: np.ndarray) -> dict[str, float]:
    """miou, pixel_accuracy and boundary_f of one image; NaN if every pixel is ignored."""
    if (pack.arrays["label"][i] == IGNORE).all():
        return dict.fromkeys(METRICS, np.nan)
    sums = Sums()
    sums.add(pairs(pack, i, predicted))
    return sums.read()


def pairs(pack: Pack, i: int, predicted: np.ndarray) -> dict[str, Pair]:
    """The task's metrics of the class map (H, W) predicted for one image."""
    guess, label = (torch.from_numpy(np.array(x[None], np.int64)) for x in (predicted, pack.arrays["label"][i]))
    distance = torch.from_numpy(pack.arrays["distance"][i][None] / np.float32(scores.PER_PIXEL))
    return scores.metrics_of_maps(guess, label, distance, len(pack.classes))


def count(pack: Pack, ids: Ids, predicted: Sequence[np.ndarray]) -> np.ndarray:
    """(K, K) int64: the confusion of all images together."""
    classes = len(pack.classes)
    total = np.zeros((classes, classes), np.int64)
    for i, guess in maps(pack, ids, predicted):
        labels = torch.from_numpy(pack.arrays["label"][i].astype(np.int64))
        total += scores.confusion(torch.from_numpy(guess.astype(np.int64)), labels, classes).numpy()
    return total


def maps(pack: Pack, ids: Ids, predicted: Sequence[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
    """(id, class map) one by one. Raises PackError unless there is one map an id, of the size of the pack's labels and
    of its classes only."""
    shape, classes = pack.columns["label"].shape, len(pack.classes)
    for i, guess in mistakes.paired(list(map(int, ids)), predicted, "class map"):
        least, most = guess.min(initial=0), guess.max(initial=0)
        if guess.shape != shape or least < 0 or most >= classes:
            raise PackError(
                f"predicted must be class maps {shape} of numbers below {classes}, got {guess.shape} from {least} to "
                f"{most} for id {i}; predict with a run of this pack"
            )
        yield i, np.asarray(guess, np.uint8)


def ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """NaN where the whole is 0."""
    return np.where(whole > 0, part / np.maximum(whole, 1), np.nan)
