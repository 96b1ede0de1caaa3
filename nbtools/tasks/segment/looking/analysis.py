"""What is read wrong: tables over what the pixels of images are, and what a network took them for.

predicted: one class map (H, W) uint8 an id, as `run.predict_pack(pack, ids)` and `decode` give them. Everything is
counted in `scores`' exact sums over all images. K classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nbtools.data import Pack
from nbtools.errors import PackError
from nbtools.table import plural
from nbtools.tasks.segment import scores
from nbtools.tasks.segment.masks.classes import IGNORE
from nbtools.tasks.segment.masks.distance import PER_PIXEL
from nbtools.train import Pair, Sums

if TYPE_CHECKING:
    import pandas as pd

Ids = Sequence[int] | np.ndarray


def by_class(pack: Pack, ids: Ids, predicted: Sequence[np.ndarray]) -> pd.DataFrame:
    """A row for each class, the worst first: class, iou, precision, recall, share (of all pixels), confused (what it is
    taken for most often, "" where never) and lost (which share of its pixels that is).

    What cannot be said is NaN: iou, last in the table, of a class that is neither there nor predicted, as it has no
    part in mIoU either; precision of one never predicted; recall of one that is not there.
    """
    import pandas as pd

    counts = counted(pack, ids, predicted)
    both, either = scores.intersection_union(counts)
    there = counts.sum(1)
    wrong = counts - counts.diagonal().diag()
    most, other = wrong.max(1)
    columns = {
        "class": pack.classes,
        "iou": ratio(both, either),
        "precision": ratio(both, counts.sum(0)),
        "recall": ratio(both, there),
        "share": ratio(there, counts.sum()),
        "confused": [pack.classes[place] if n else "" for place, n in zip(other.tolist(), most.tolist(), strict=True)],
        "lost": ratio(most, there),
    }
    return pd.DataFrame(columns).sort_values("iou", kind="stable", ignore_index=True)


def confusion(pack: Pack, ids: Ids, predicted: Sequence[np.ndarray]) -> pd.DataFrame:
    """How many pixels of each class (rows) were taken for each (columns)."""
    import pandas as pd

    names = pack.classes
    counts = counted(pack, ids, predicted).numpy()
    return pd.DataFrame(counts, pd.Index(names, name="truth"), pd.Index(names, name="predicted"))


def image_scores(pack: Pack, ids: Ids, predicted: Sequence[np.ndarray]) -> pd.DataFrame:
    """A row for each image: id, name, miou (over the classes that it holds or that were predicted), pixel_accuracy and
    boundary_f. NaN in the rows of images whose every pixel is ignored."""
    import pandas as pd

    rows = []
    for i, answer in matched(pack, ids, predicted):
        found = image_metrics(pack, i, answer)
        rows.append({"id": i, "name": pack.names[i], **found})
    return pd.DataFrame(rows, columns=["id", "name", "miou", "pixel_accuracy", "boundary_f"])


def image_metrics(pack: Pack, i: int, answer: np.ndarray) -> dict[str, float]:
    """miou, pixel_accuracy and boundary_f of one image; NaN where every pixel is ignored."""
    if (pack.arrays["label"][i] == IGNORE).all():
        return dict.fromkeys(("miou", "pixel_accuracy", "boundary_f"), np.nan)
    sums = Sums()
    sums.add(pairs(pack, i, answer))
    return sums.read()


def worst(pack: Pack, ids: Ids, predicted: Sequence[np.ndarray], count: int | None = None) -> list[int]:
    """The ids sorted by their images' mIoU, lowest first; the first `count` of them. Those where every pixel is ignored
    are left out."""
    table = image_scores(pack, ids, predicted).dropna(subset="miou")
    return table.sort_values("miou", kind="stable").id.tolist()[:count]


def pairs(pack: Pack, i: int, answer: np.ndarray) -> dict[str, Pair]:
    """What `metrics` returns, of the class map (H, W) of one image."""
    predicted, labels = (torch.from_numpy(np.array(x[None], np.int64)) for x in (answer, pack.arrays["label"][i]))
    distance = torch.from_numpy(pack.arrays["distance"][i][None] / np.float32(PER_PIXEL))
    return scores.pairs(predicted, labels, distance, len(pack.classes))


def counted(pack: Pack, ids: Ids, predicted: Sequence[np.ndarray]) -> Tensor:
    """(K, K) int64: the confusion of all images together."""
    classes = len(pack.classes)
    total = torch.zeros((classes, classes), dtype=torch.int64)
    for i, answer in matched(pack, ids, predicted):
        labels = torch.from_numpy(pack.arrays["label"][i].astype(np.int64))
        total += scores.confusion(torch.from_numpy(answer.astype(np.int64)), labels, classes)
    return total


def matched(pack: Pack, ids: Ids, predicted: Sequence[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
    """(id, class map) one by one. Raises PackError unless there is one map an id, as large as the pack's labels and of
    its classes alone."""
    if len(predicted) != len(ids):
        raise PackError(
            f"predicted must be one class map an id, got {len(predicted)} for {plural(len(ids), 'id')}; take both from "
            "the same"
        )
    shape, classes = pack.columns["label"].shape, len(pack.classes)
    for i, answer in zip(map(int, ids), predicted, strict=True):
        least, most = answer.min(initial=0), answer.max(initial=0)
        if answer.shape != shape or least < 0 or most >= classes:
            raise PackError(
                f"predicted must be class maps {shape} of numbers below {classes}, got {answer.shape} from {least} to "
                f"{most} for id {i}; predict with a run of this pack"
            )
        yield i, np.asarray(answer, np.uint8)


def ratio(part: Tensor, whole: Tensor) -> np.ndarray:
    """NaN where the whole is 0."""
    return np.where(whole > 0, part.double() / whole.clamp_min(1), np.nan)
