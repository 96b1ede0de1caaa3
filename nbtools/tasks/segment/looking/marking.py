"""Where on a picture a class's number is written, so that classes are told apart without their colours."""

from __future__ import annotations

import numpy as np

from nbtools.tasks.segment.masks.classes import IGNORE

ROOM = 7, 5  # px to either side of a number's middle, above and below it


def spots(label: np.ndarray) -> list[tuple[int, int, int]]:
    """label (H, W) uint8 → (class, x, y) of each class that has room for a number somewhere: where it has most."""
    found = []
    for place in np.unique(label):
        free = np.zeros((0, 2), int)
        mask, factor = label == place, 1
        while len(more := inside(mask, ROOM[0] * factor, ROOM[1] * factor)):
            free, factor = more, 2 * factor
        if len(free) and place != IGNORE:
            y, x = free[np.abs(free - free.mean(0)).sum(1).argmin()]
            found.append((int(place), int(x), int(y)))
    return found


def inside(mask: np.ndarray, across: int, up: int) -> np.ndarray:
    """mask (H, W) bool → (n, 2) rows and columns of the pixels about which all is marked, so far to each side."""
    tall, wide = 2 * up + 1, 2 * across + 1
    if mask.shape[0] < tall or mask.shape[1] < wide:
        return np.zeros((0, 2), int)
    sums = np.pad(mask.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    marked = sums[tall:, wide:] - sums[:-tall, wide:] - sums[tall:, :-wide] + sums[:-tall, :-wide]
    return np.argwhere(marked == tall * wide) + np.array((up, across))
