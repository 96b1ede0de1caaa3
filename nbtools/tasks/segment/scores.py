"""Boundaries between classes and how good a segmentation is: exact sums that stay on the device and never wait for it.

B images, H × W pixels, K classes. Pixels whose label is 255 are ignored everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from nbtools.errors import MissingExtra, PlanError
from nbtools.tasks.segment.classes import IGNORE
from nbtools.train import Pair

PER_PIXEL = 8  # a stored distance counts eighths of a pixel, so a byte reaches 31.875 px
FAR = 255  # this far or farther, or no boundary at all
FARTHEST = (FAR - 1) / PER_PIXEL  # px
TOLERANCE = 0.0075  # of the diagonal (Csurka et al., BMVC 2013; MATLAB's bfscore)
COPIES = 64  # of a table of counts on a GPU, where additions to one address are serialised


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
    on, valid = np.zeros(label.shape, bool), label != IGNORE
    for one, other in ((np.s_[1:], np.s_[:-1]), (np.s_[:, 1:], np.s_[:, :-1])):  # NumPy: torch's threads spin here
        differ = (label[one] != label[other]) & valid[one] & valid[other]
        on[one] |= differ
        on[other] |= differ
    if not on.any():
        return np.full(label.shape, FAR, np.uint8)
    distance: np.ndarray = distance_transform_edt(~on)  # pyright: ignore[reportAssignmentType]
    return np.minimum(np.rint(distance * PER_PIXEL), FAR).astype(np.uint8)


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


def metrics(outputs: tuple[Tensor, tuple[Tensor, ...]], batch: Mapping[str, Tensor]) -> dict[str, Pair]:
    """miou, pixel_accuracy and boundary_f of logits (B, K, H, W), given label and distance (B, H, W)."""
    logits = outputs[0]
    return metrics_of_maps(argmax(logits), batch["label"], batch["distance"], logits.shape[1])


def metrics_of_maps(predicted: Tensor, labels: Tensor, distance: Tensor, classes: int) -> dict[str, Pair]:
    """The same of class maps (B, H, W)."""
    counts = confusion(predicted, labels, classes)
    return {
        "miou": intersection_union(counts),
        "pixel_accuracy": (counts.diagonal().sum(), counts.sum()),
        "boundary_f": boundary_f(predicted, labels, distance),
    }


def argmax(logits: Tensor) -> Tensor:
    """(B, K, H, W) → (B, H, W) int64. `Tensor.argmax` takes 8 times as long on a CPU: 7 of 11 ms for 180 × 240."""
    return logits.max(1).indices


def confusion(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(K, K) int64: how many pixels of a class (row) were predicted as a class (column); both inputs (B, H, W)."""
    size = classes * classes + 1
    cell = (labels * classes + predicted).where(labels != IGNORE, size - 1).flatten()
    count = torch.bincount if cell.device.type == "cpu" else scatter_count
    return count(cell, minlength=size)[:-1].view(classes, classes)


def scatter_count(values: Tensor, minlength: int) -> Tensor:
    """`torch.bincount` (minlength,) int64 without its synchronisation for the largest value."""
    copies = torch.arange(len(values), device=values.device) % COPIES * minlength
    counts = torch.zeros(COPIES * minlength, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(0, copies + values, torch.ones_like(values)).view(COPIES, minlength).sum(0)


def intersection_union(confusion: Tensor) -> tuple[Tensor, Tensor]:
    """Two (K,): pixels that are a class in both, and in either. Their ratio is a class's IoU; mIoU is the mean over the
    classes that have a union, of all images together: a mean over batches would be another number."""
    both = confusion.diagonal()
    return both, confusion.sum(0) + confusion.sum(1) - both


def boundary_f(
    predicted: Tensor, labels: Tensor, distance: Tensor, tolerance: float | None = None
) -> tuple[Tensor, Tensor]:
    """Sum of the boundary F1 over the images that have a true or predicted boundary, and the number of these images.

    Precision is the share of predicted boundary pixels within `tolerance` pixels of a true one, recall the share of
    true ones within `tolerance` of a predicted one; all classes together. distance (B, H, W): to the true boundary in
    pixels, as packed. Ignored pixels are no boundary and are not judged. Distances both ways are rounded to eighths of
    a pixel. tolerance: by default 0.75 % of the diagonal, as in Csurka, Larlus & Perronnin, "What is a good evaluation
    measure for semantic segmentation?" (BMVC 2013), which takes each class by itself.

    Raises PlanError for a tolerance beyond the stored distances, which end at 31.875 px.
    """
    if tolerance is None:
        tolerance = min(TOLERANCE * math.hypot(*labels.shape[1:]), FARTHEST)
    if not 0 <= tolerance <= FARTHEST:
        raise PlanError(
            f"boundary_f: tolerance must be from 0 to {FARTHEST} px, got {tolerance:g}; packs store no larger distance"
        )
    labels, predicted = labels.to(torch.uint8), predicted.to(torch.uint8)  # an eighth of the bytes to read
    valid = labels != IGNORE
    true, found = boundaries(labels, valid), boundaries(predicted, valid)
    precision = share(found & (distance <= tolerance), found)
    recall = share(true & dilate(found, tolerance), true)
    f = 2 * precision * recall / (precision + recall).clamp_min(1e-9)
    return f.sum(), (true | found).flatten(1).any(1).sum()


def dilate(marked: Tensor, radius: float) -> Tensor:
    """(B, H, W) bool: pixels within a disk around a marked one. The disk is a stack of rows: the marks are widened by a
    pixel at a time, and each row of the disk takes the width that fits: 4 operations a pixel of radius."""
    reach, wide = disk(radius), marked.clone()
    found, width = torch.zeros_like(marked), 0
    for rows in range(len(reach) - 1, -1, -1):  # the disk's outer rows are its narrow ones
        for step in range(width + 1, reach[rows] + 1):
            mark_shifted(wide, marked, 2, step)
            width = step
        mark_shifted(found, wide, 1, rows)
    return found


def mark_shifted(into: Tensor, marked: Tensor, axis: int, step: int) -> None:
    """Mark in `into` what lies `step` pixels to either side of a mark."""
    kept = marked.shape[axis] - step
    if kept > 0:
        into.narrow(axis, step, kept).logical_or_(marked.narrow(axis, 0, kept))
        into.narrow(axis, 0, kept).logical_or_(marked.narrow(axis, step, kept))


def disk(radius: float) -> list[int]:
    """Half the width of each row of a disk, from its middle down; distances in eighths, as stored ones are."""
    side = range(math.ceil(radius) + 1)
    inside = [[x for x in side if round(PER_PIXEL * math.hypot(x, y)) <= PER_PIXEL * radius] for y in side]
    return [row[-1] for row in inside if row]


def share(part: Tensor, whole: Tensor) -> Tensor:
    """(B,) float: the marked share of what is marked in `whole`; 0 where nothing is."""
    marked, of = (mask.flatten(1).sum(1, dtype=torch.int32) for mask in (part, whole))  # int64 takes twice as long
    return marked / of.clamp_min(1)
