"""Modified Kneser-Ney smoothing, interpolated (Chen & Goodman 1999), of all n-grams of a text at once, by sorting.

Arcs, states and symbols are those of `ngram`.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

POOR = (0.5, 1.0, 1.5)  # discounts where a text is too small to estimate them: those of KenLM's --discount_fallback


def counted(symbols: np.ndarray, order: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """keys, shorter and the counts of all arcs up to an order, and where each order starts among them.

    An order is one sort of (state before, symbol): a text of N symbols costs `order` sorts of N numbers.
    """
    keys, shorter, starts = [np.arange(size)], [np.full(size, -1)], [0, size]
    counts = [np.bincount(symbols[1:], minlength=size)]
    arcs = symbols  # (N,) the arc of this order that ends at each position, -1 where a boundary is inside of it
    for n in range(2, order + 1):
        whole = (arcs[:-1] >= 0) & ((symbols[:-1] != size - 1) | (n == 2))
        at = np.flatnonzero(whole) + 1
        key, first, inverse, count = np.unique(
            (arcs[at - 1] + 1) * size + symbols[at], return_index=True, return_inverse=True, return_counts=True
        )
        keys.append(key)
        shorter.append(arcs[at[first]])
        counts.append(count)
        arcs = np.full(len(symbols), -1)
        arcs[at] = starts[-1] + inverse
        starts.append(starts[-1] + len(key))
    return np.concatenate(keys), np.concatenate(shorter).astype(np.int32), np.concatenate(counts), starts


def smoothed(
    keys: np.ndarray, shorter: np.ndarray, counts: np.ndarray, starts: list[int], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """log_probs (arcs,) and back_off (states,), float32, of counts (arcs,).

    Below the highest order what counts is in how many contexts an arc was seen; at the start of a line, where nothing
    can come before it, how often.
    """
    probs, back_off = np.full(len(keys), 1 / size), np.zeros(starts[-2] + 1)
    opening = np.zeros(len(keys), bool)
    for n, (start, stop) in enumerate(pairwise(starts), 1):
        contexts, count = keys[start:stop] // size, counts[start:stop]
        if n > 1:
            opening[start:stop] = (contexts == size) | opening[contexts - 1]
        if stop < len(keys):
            longer = shorter[stop : starts[n + 1]] - start
            count = np.where(opening[start:stop], count, np.bincount(longer, minlength=stop - start))
        discount = discounts(count)[np.minimum(count, 3)]
        total, saved = (np.bincount(contexts, weights, len(back_off)) for weights in (count, discount))
        share = np.divide(saved, total, out=np.ones_like(total), where=total > 0)
        lower = probs[shorter[start:stop]] if n > 1 else 1 / size
        probs[start:stop] = (count - discount) / total[contexts] + share[contexts] * lower
        back_off += np.log(share)
    return np.minimum(np.log(probs), 0).astype(np.float32), back_off.astype(np.float32)


def discounts(counts: np.ndarray) -> np.ndarray:
    """(4,) what is taken from a count of 0, 1, 2, and 3 or more: Chen & Goodman's estimates, POOR where they fail."""
    n = np.bincount(np.minimum(counts, 5), minlength=6)[1:5].astype(float)
    if n.min() > 0:
        estimates = np.arange(1, 4) - np.arange(2, 5) * n[0] / (n[0] + 2 * n[1]) * n[1:] / n[:-1]
        if (estimates > 0).all():
            return np.append(0, estimates)
    return np.array([0, *POOR])
