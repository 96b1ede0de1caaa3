"""How good a segmentation is: exact sums that stay on the device and never wait for it; tables of a split by class and
by image; and what the position of a pixel alone predicts.

B images, H × W pixels, K classes. Pixels whose label is 255 are ignored everywhere. In the tables, predicted is one
class map (H, W) uint8 per id, as `run.predict_pack(pack, ids)` and `decode` give them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nbtools.data import Pack
from nbtools.errors import MissingExtra, PackError
from nbtools.tasks.common import metrics as mistakes
from nbtools.tasks.segment.classes import IGNORE
from nbtools.train import Pair, Sums

if TYPE_CHECKING:
    import pandas as pd

PER_PIXEL = 8  # a stored distance counts eighths of a pixel, so a byte reaches 31.875 px
FAR = 255  # this far or farther, or no boundary at all
FARTHEST = (FAR - 1) / PER_PIXEL  # px
TOLERANCE = 0.0075  # of the diagonal (Csurka et al., BMVC 2013; MATLAB's bfscore)
MEANINGS = {
    "miou": "overlap of prediction and truth, as a share of what either covers; averaged over the classes",
    "pixel_accuracy": "share of pixels with the right class",
    "boundary_f": "how well the outlines of the classes fit: 1 where each lies within a few pixels of the true one",
}

Ids = Sequence[int] | np.ndarray


def distance_map(label: np.ndarray) -> np.ndarray:
    """label (H, W) uint8 → (H, W) uint8: eighths of a pixel from each pixel's centre to that of the nearest boundary
    pixel, which has 0 itself; at most 255. Ignored pixels make no boundary.

    Raises MissingExtra without scipy.
    """
    try:
        from scipy.ndimage import distance_transform_edt
    except ImportError:
        raise MissingExtra(
            "distances to the class boundary need the package scipy: pip install scipy, or nbtools[segment]"
        ) from None
    on = boundaries(label, label != IGNORE)  # of arrays: torch's threads spin here
    if not on.any():
        return np.full(label.shape, FAR, np.uint8)
    distance: np.ndarray = distance_transform_edt(~on)  # pyright: ignore[reportAssignmentType]
    return np.minimum(np.rint(distance * PER_PIXEL), FAR).astype(np.uint8)


def boundaries(labels: Any, valid: Any) -> Any:
    """(…, H, W) bool, of arrays or tensors: pixels with a neighbour, above, below, left or right, of another class,
    both valid."""
    edge = valid & ~valid
    for one, other in ((np.s_[..., 1:, :], np.s_[..., :-1, :]), (np.s_[..., 1:], np.s_[..., :-1])):
        differ = (labels[one] != labels[other]) & valid[one] & valid[other]
        edge[one] |= differ
        edge[other] |= differ
    return edge


def metrics(outputs: tuple[Tensor, tuple[Tensor, ...]], batch: Mapping[str, Tensor]) -> dict[str, Pair]:
    """miou, pixel_accuracy and boundary_f of logits (B, K, H, W), given label and distance (B, H, W)."""
    logits = outputs[0]
    return metrics_of_maps(argmax(logits), batch["label"], batch["distance"], logits.shape[1])


def metrics_of_maps(predicted: Tensor, labels: Tensor, distance: Tensor, classes: int) -> dict[str, Pair]:
    """The same of class maps (B, H, W)."""
    counts = pairs_of(predicted, labels, classes)
    both = counts.diagonal()
    return {
        "miou": (both, counts.sum(0) + counts.sum(1) - both),
        "pixel_accuracy": (counts.diagonal().sum(), counts.sum()),
        "boundary_f": boundary_f(predicted, labels, distance),
    }


def argmax(logits: Tensor) -> Tensor:
    """(B, K, H, W) → (B, H, W) int64. `Tensor.argmax` takes 8 times as long on a CPU: 7 of 11 ms for 180 × 240."""
    return logits.max(1).indices


def pairs_of(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(K, K) int64: how many pixels of a class (row) were predicted as a class (column); both inputs (B, H, W)."""
    size = classes * classes + 1
    cell = (labels * classes + predicted).where(labels != IGNORE, size - 1).flatten()
    count = torch.bincount if cell.device.type == "cpu" else scatter_count
    return count(cell, minlength=size)[:-1].view(classes, classes)


def scatter_count(values: Tensor, minlength: int) -> Tensor:
    """`torch.bincount`, which waits for a GPU to know the largest value; on a CPU this takes 4 times as long."""
    counts = torch.zeros(minlength, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(0, values, torch.ones_like(values))


def boundary_f(predicted: Tensor, labels: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the boundary F1 over the images that have a true or predicted boundary, and the number of these images.

    Precision is the share of predicted boundary pixels within a tolerance of a true one, recall the share of true ones
    within it of a predicted one; all classes together. distance (B, H, W): to the true boundary in pixels, as packed.
    Ignored pixels are no boundary and are not judged. The tolerance is 0.75 % of the diagonal, as in Csurka, Larlus &
    Perronnin, "What is a good evaluation measure for semantic segmentation?" (BMVC 2013), which takes each class by
    itself.
    """
    tolerance = min(TOLERANCE * math.hypot(*labels.shape[1:]), FARTHEST)
    labels, predicted = labels.to(torch.uint8), predicted.to(torch.uint8)  # an eighth of the bytes to read
    valid = labels != IGNORE
    true, found = boundaries(labels, valid), boundaries(predicted, valid)
    precision = share(found & (distance <= tolerance), found)
    recall = share(true & dilate(found, tolerance), true)
    f = 2 * precision * recall / (precision + recall).clamp_min(1e-9)
    return f.sum(), (true | found).flatten(1).any(1).sum()


def dilate(marked: Tensor, radius: float) -> Tensor:
    """(B, H, W) bool: pixels within a disk around a marked one; distances in eighths, as stored ones are. One shift for
    each pixel of the disk: 3.5 ms for 8 of 360 × 480 pixels on a CPU, where a convolution takes 270."""
    reach, (height, width) = math.ceil(radius), marked.shape[1:]
    padded, found = F.pad(marked, (reach,) * 4), marked.clone()
    for y, x in itertools.product(range(-reach, reach + 1), repeat=2):
        if round(PER_PIXEL * math.hypot(y, x)) <= PER_PIXEL * radius:
            found |= padded[:, reach + y : reach + y + height, reach + x : reach + x + width]
    return found


def share(part: Tensor, whole: Tensor) -> Tensor:
    """(B,) float: the marked share of what is marked in `whole`; 0 where nothing is."""
    marked, of = (mask.flatten(1).sum(1, dtype=torch.int32) for mask in (part, whole))  # int64 takes twice as long
    return marked / of.clamp_min(1)


# Tables


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


def count(pack: Pack, ids: Ids, predicted: Sequence[np.ndarray]) -> np.ndarray:
    """(K, K) int64: the confusion of all images together."""
    total = np.zeros((len(pack.classes), len(pack.classes)), np.int64)
    for i, guess in maps(pack, ids, predicted):
        labels, found = (torch.from_numpy(x.astype(np.int64)) for x in (pack.arrays["label"][i], guess))
        total += pairs_of(found, labels, len(pack.classes)).numpy()
    return total


def image_scores(pack: Pack, ids: Ids, predicted: Sequence[np.ndarray]) -> pd.DataFrame:
    """A row for each image: id, name, miou (over the classes that it holds or that were predicted), pixel_accuracy and
    boundary_f; NaN where every pixel is ignored."""
    import pandas as pd

    rows = [{"id": i, "name": pack.names[i], **image_metrics(pack, i, map_)} for i, map_ in maps(pack, ids, predicted)]
    return pd.DataFrame(rows, columns=["id", "name", *MEANINGS])


def worst(pack: Pack, ids: Ids, predicted: Sequence[np.ndarray], count: int | None = None) -> list[int]:
    """The ids in the order of their images' mIoU, lowest first; the first `count` of them. Images whose every pixel is
    ignored are left out."""
    table = image_scores(pack, ids, predicted).dropna(subset="miou")
    return table.sort_values("miou", kind="stable").id.tolist()[:count]


def position_prior(pack: Pack, split: str = "val") -> dict[str, float]:
    """miou, pixel_accuracy and boundary_f on a split of the most frequent class at each pixel over the train split, by
    the sums of `evaluate`: what a network must clearly exceed. Raises PackError for an empty split."""
    if not len(pack.ids(split)) or not len(pack.ids("train")):
        raise PackError(f"the split {split!r} or 'train' of {pack.folder} is empty; choose another")
    shape = pack.columns["label"].shape
    counts, (rows, columns) = np.zeros((len(pack.classes), *shape), np.uint32), np.indices(shape)
    for i in pack.ids("train"):
        label = pack.arrays["label"][i]
        valid = label != IGNORE
        counts[label[valid], rows[valid], columns[valid]] += 1
    prior = np.where(counts.any(0), counts.argmax(0), counts.sum((1, 2)).argmax())  # where none has a label, of all
    sums = Sums()
    for i in pack.ids(split):
        sums.add(metrics_of(pack, int(i), prior))
    return sums.read()


def image_metrics(pack: Pack, i: int, predicted: np.ndarray) -> dict[str, float]:
    """miou, pixel_accuracy and boundary_f of one image; NaN if every pixel is ignored."""
    if (pack.arrays["label"][i] == IGNORE).all():
        return dict.fromkeys(MEANINGS, np.nan)
    sums = Sums()
    sums.add(metrics_of(pack, i, predicted))
    return sums.read()


def metrics_of(pack: Pack, i: int, predicted: np.ndarray) -> dict[str, Pair]:
    """The task's metrics of the class map (H, W) predicted for one image."""
    guess, label = (torch.from_numpy(np.array(x[None], np.int64)) for x in (predicted, pack.arrays["label"][i]))
    distance = torch.from_numpy(pack.arrays["distance"][i][None] / np.float32(PER_PIXEL))
    return metrics_of_maps(guess, label, distance, len(pack.classes))


def maps(pack: Pack, ids: Ids, predicted: Sequence[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
    """(id, class map) one by one. Raises PackError unless there is one map per id, of the size of the pack's labels and
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
