"""How far each pixel is from the nearest boundary between two classes: made once at packing, read by the loss."""

from __future__ import annotations

import numpy as np

from nbtools.errors import MissingExtra
from nbtools.tasks.segment.masks.classes import IGNORE

PER_PIXEL = 8  # steps of a distance: eighths of a pixel, so that a byte reaches 31.875 px
FAR = 255  # so far or farther, or no boundary at all


def distance_map(label: np.ndarray) -> np.ndarray:
    """label (H, W) uint8 → (H, W) uint8: eighths of a pixel from the centre of each pixel to the nearest one that has
    another class above, below or beside it; those have 0 themselves. What is ignored makes no boundary.

    Raises MissingExtra without scipy.
    """
    try:
        from scipy.ndimage import distance_transform_edt
    except ImportError:
        raise MissingExtra(
            "distances to the class boundary need the package scipy: pip install scipy, or nbtools[segment]"
        ) from None
    on = boundary(label)
    if not on.any():
        return np.full(label.shape, FAR, np.uint8)
    distance: np.ndarray = distance_transform_edt(~on)  # pyright: ignore[reportAssignmentType]
    return np.minimum(np.rint(distance * PER_PIXEL), FAR).astype(np.uint8)


def boundary(label: np.ndarray) -> np.ndarray:
    """(H, W) bool: the pixels with a neighbour, of four, of another class."""
    on = np.zeros(label.shape, bool)
    seen = label != IGNORE
    down = (label[1:] != label[:-1]) & seen[1:] & seen[:-1]
    right = (label[:, 1:] != label[:, :-1]) & seen[:, 1:] & seen[:, :-1]
    on[1:] |= down
    on[:-1] |= down
    on[:, 1:] |= right
    on[:, :-1] |= right
    return on
