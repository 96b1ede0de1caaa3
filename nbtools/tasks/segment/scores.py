"""How good a segmentation is, in exact sums that stay on the device and never wait for it.

B images, H × W pixels, K classes. Pixels whose label is 255 are ignored everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from nbtools.errors import PlanError
from nbtools.tasks.segment.masks.classes import IGNORE
from nbtools.tasks.segment.masks.distance import FAR, PER_PIXEL
from nbtools.train import Pair

FARTHEST = (FAR - 1) / PER_PIXEL  # px; a stored distance of FAR means "there, or anywhere beyond"
TOLERANCE = 0.0075  # of the diagonal (Csurka et al., BMVC 2013; MATLAB's bfscore)
COPIES = 64  # of a table of counts on a GPU, whose additions to one address take turns


def confusion(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(K, K) int64: how many pixels of a class (row) were taken for a class (column); both inputs (B, H, W)."""
    size = classes * classes + 1
    place = (labels * classes + predicted).where(labels != IGNORE, size - 1).flatten()
    count = torch.bincount if place.device.type == "cpu" else scattered
    return count(place, minlength=size)[:-1].view(classes, classes)


def scattered(places: Tensor, minlength: int) -> Tensor:
    """What bincount gives, (minlength,) int64, without its wait for the largest value."""
    copies = torch.arange(len(places), device=places.device) % COPIES * minlength
    counts = torch.zeros(COPIES * minlength, dtype=torch.int64, device=places.device)
    return counts.scatter_add_(0, copies + places, torch.ones_like(places)).view(COPIES, minlength).sum(0)


def intersection_union(confusion: Tensor) -> tuple[Tensor, Tensor]:
    """Two (K,): pixels that are a class in both, and in either. Their ratio is a class's IoU; the mean of those with a
    union is mIoU, of all images together: means of batches would be another number."""
    both = confusion.diagonal()
    return both, confusion.sum(0) + confusion.sum(1) - both


def pixel_accuracy(confusion: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels taken for what they are, and all that are not ignored."""
    return confusion.diagonal().sum(), confusion.sum()


def boundary_f(
    predicted: Tensor, labels: Tensor, distance: Tensor, tolerance: float | None = None
) -> tuple[Tensor, Tensor]:
    """Sum of the boundary F1 over the images that have a boundary, drawn or predicted, and how many these are.

    Precision is the share of predicted boundary pixels within `tolerance` pixels of a true one, recall the share of
    true ones within it of a predicted one; of all classes together. distance (B, H, W): to the true boundary, in
    pixels, as packed. Where labels are ignored nothing is a boundary, and none is judged. Both ways distances are
    rounded to eighths of a pixel. tolerance: by default 0.75 % of the diagonal, as Csurka, Larlus & Perronnin, "What is
    a good evaluation measure for semantic segmentation?" (BMVC 2013), who take each class by itself.
    Raises PlanError for a tolerance that the distances, which end at 31.875 px, cannot tell.
    """
    if tolerance is None:
        tolerance = min(TOLERANCE * math.hypot(*labels.shape[1:]), FARTHEST)
    if not 0 <= tolerance <= FARTHEST:
        raise PlanError(f"boundary_f: tolerance must be from 0 to {FARTHEST} px, got {tolerance:g}; packs know no more")
    labels, predicted = labels.to(torch.uint8), predicted.to(torch.uint8)  # an eighth of the bytes to go through
    valid = labels != IGNORE
    true, found = boundaries(labels, valid), boundaries(predicted, valid)
    precision = share(found & (distance <= tolerance), found)
    recall = share(true & near(found, tolerance), true)
    f = 2 * precision * recall / (precision + recall).clamp_min(1e-9)
    return f.sum(), (true | found).flatten(1).any(1).sum()


def boundaries(labels: Tensor, valid: Tensor) -> Tensor:
    """(B, H, W) bool: pixels with a neighbour, above, below, left or right, of another class, both valid."""
    edge = torch.zeros_like(valid)
    for axis in (1, 2):
        last = labels.shape[axis] - 1
        one, other = labels.narrow(axis, 0, last), labels.narrow(axis, 1, last)
        differ = (one != other) & valid.narrow(axis, 0, last) & valid.narrow(axis, 1, last)
        edge.narrow(axis, 0, last).logical_or_(differ)
        edge.narrow(axis, 1, last).logical_or_(differ)
    return edge


def near(marked: Tensor, radius: float) -> Tensor:
    """(B, H, W) bool: pixels within a disk about a marked one. The disk is a stack of rows: what is marked is widened a
    pixel at a time, and each row of the disk takes the width that fits: 4 operations a pixel of radius."""
    reach, wide = disk(radius), marked.clone()
    found, width = torch.zeros_like(marked), 0
    for rows in range(len(reach) - 1, -1, -1):  # the disk's far rows are its narrow ones
        for step in range(width + 1, reach[rows] + 1):
            shifted(wide, marked, 2, step)
            width = step
        shifted(found, wide, 1, rows)
    return found


def shifted(into: Tensor, marked: Tensor, axis: int, step: int) -> None:
    """Mark in `into` what lies `step` pixels to either side of what is marked."""
    kept = marked.shape[axis] - step
    if kept > 0:
        into.narrow(axis, step, kept).logical_or_(marked.narrow(axis, 0, kept))
        into.narrow(axis, 0, kept).logical_or_(marked.narrow(axis, step, kept))


def disk(radius: float) -> list[int]:
    """Half the width of each row of a disk, from its middle down; distances in eighths, as those to the truth are."""
    side = range(math.ceil(radius) + 1)
    inside = [[x for x in side if round(PER_PIXEL * math.hypot(x, y)) <= PER_PIXEL * radius] for y in side]
    return [row[-1] for row in inside if row]


def share(part: Tensor, whole: Tensor) -> Tensor:
    """(B,) float: of what is marked in an image, the part; 0 where nothing is."""
    marked, of = (mask.flatten(1).sum(1, dtype=torch.int32) for mask in (part, whole))  # int64 takes twice as long
    return marked / of.clamp_min(1)


def likeliest(logits: Tensor) -> Tensor:
    """(B, K, H, W) → (B, H, W) int64. argmax says the same in 8 times the time on a CPU: 7 ms for 180 × 240 of 11."""
    return logits.max(1).indices


def metrics_of(outputs: tuple[Tensor, tuple[Tensor, ...]], batch: Mapping[str, Tensor]) -> dict[str, Pair]:
    """miou, pixel_accuracy and boundary_f of logits (B, K, H, W) and label, distance (B, H, W)."""
    logits = outputs[0]
    return pairs(likeliest(logits), batch["label"], batch["distance"], logits.shape[1])


def pairs(predicted: Tensor, labels: Tensor, distance: Tensor, classes: int) -> dict[str, Pair]:
    """The same of class maps (B, H, W)."""
    counts = confusion(predicted, labels, classes)
    return {
        "miou": intersection_union(counts),
        "pixel_accuracy": pixel_accuracy(counts),
        "boundary_f": boundary_f(predicted, labels, distance),
    }
