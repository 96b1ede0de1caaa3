"""A language model of characters: how likely each one is after the few before it, counted in a text.

Modified Kneser-Ney smoothing, interpolated (Chen & Goodman 1999, "An empirical study of smoothing techniques for
language modeling"), as an automaton with back-off links. An *arc* is an n-gram that was seen: arc i is the i-th of the
sorted `keys` = state · V + symbol, and the state it leads to is i + 1. State 0 knows no context. So one binary search
advances many contexts by a character.

A symbol is a place in `classes`, or V - 1: the boundary of a line, its start in a context, its end as what comes next.
Q queries at once, V = classes + 1.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from nbtools.data import drive_path
from nbtools.errors import PackError
from nbtools.tasks.common.files import characters, read_text, require
from nbtools.tasks.hwdb.data import UNKNOWN

Texts = Iterable[str] | Path | str


@dataclass(frozen=True, eq=False, repr=False)
class NGram:
    """Natural log-probabilities of the next character. Arcs of order 1 come first, one a symbol; then those of order 2.

    keys (arcs,) int64, ascending; shorter (arcs,) int32: the arc without its first character, -1 for order 1;
    log_probs (arcs,) float32; back_off (states,) float32: what a state adds for a symbol that never followed it.
    """

    order: int
    classes: tuple[str, ...]
    keys: np.ndarray
    shorter: np.ndarray
    log_probs: np.ndarray
    back_off: np.ndarray

    @staticmethod
    def train(texts: Texts, classes: Sequence[str], order: int = 3) -> "NGram":
        """Count a text: lines, or the path (or drive:…) of a UTF-8 file.

        Lines are independent, and should be as long as those to be read: where they end counts too. White space that is
        no class is left out; other characters that are no class count as UNKNOWN, or are left out where that is no
        class. Raises PackError.
        """
        require(order in range(2, 9), "NGram.train: order must be a whole number from 2 to 8", order)
        size = len(classes) + 1
        keys, shorter, counts, starts = count_arcs(symbols_of(texts, classes), order, size)
        return NGram(order, tuple(classes), keys, shorter, *smooth(keys, shorter, counts, starts, size))

    @property
    def end(self) -> int:
        return len(self.classes)

    @property
    def start(self) -> int:
        return self.end + 1

    def step(self, states: np.ndarray, symbols: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probability of each symbol in its state (Q,) float64, and the states after them (Q,)."""
        arcs, scores = symbols.astype(np.int64), np.zeros(len(states))  # the arcs without any context
        open_, states = np.arange(len(states)), states.astype(np.int64)
        while len(open_):
            keys = states * (self.end + 1) + symbols[open_]
            order = np.argsort(keys)  # a search in order stays in the cache: 2 to 4 times as fast
            at = np.empty_like(keys)
            at[order] = np.minimum(np.searchsorted(self.keys, keys[order]), len(self.keys) - 1)
            hit = self.keys[at] == keys
            arcs[open_[hit]] = at[hit]
            open_, states = open_[~hit], states[~hit]
            scores[open_] += self.back_off[states]
            states = self.shorter[states - 1].astype(np.int64) + 1  # a key does not fit into int32
            open_, states = open_[states > 0], states[states > 0]
        scores += self.log_probs[arcs]
        return scores, np.where(arcs < len(self.back_off) - 1, arcs, self.shorter[arcs]) + 1


def count_arcs(symbols: np.ndarray, order: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """Return keys, shorter and counts of all arcs up to an order, and where each order starts: a sort an order."""
    keys, shorter, starts = [np.arange(size)], [np.full(size, -1)], [0, size]
    counts = [np.bincount(symbols[1:], minlength=size)]
    arcs = symbols  # (N,) the arc of this order that ends at each position, -1 where a boundary is inside of it
    for n in range(2, order + 1):
        whole = (arcs[:-1] >= 0) & ((symbols[:-1] != size - 1) | (n == 2))
        at = np.flatnonzero(whole) + 1
        key = (arcs[at - 1] + 1) * size + symbols[at]
        key, first, inverse, count = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
        keys.append(key)
        shorter.append(arcs[at[first]])
        counts.append(count)
        arcs = np.full(len(symbols), -1)
        arcs[at] = starts[-1] + inverse
        starts.append(starts[-1] + len(key))
    return np.concatenate(keys), np.concatenate(shorter).astype(np.int32), np.concatenate(counts), starts


def smooth(
    keys: np.ndarray, shorter: np.ndarray, counts: np.ndarray, starts: list[int], size: int
) -> tuple[np.ndarray, np.ndarray]:
    probs, back_off = np.full(len(keys), 1 / size), np.zeros(starts[-2] + 1)
    opening = np.zeros(len(keys), bool)
    for n, (start, stop) in enumerate(pairwise(starts), 1):
        contexts, count = keys[start:stop] // size, counts[start:stop]
        if n > 1:
            opening[start:stop] = (contexts == size) | opening[contexts - 1]
        if stop < len(keys):  # counts the contexts it was seen in, or where nothing comes before it, how often
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
    """Return (4,): what is taken from a count of 0, 1, 2, and 3 or more, by Chen & Goodman."""
    n = np.bincount(np.minimum(counts, 5), minlength=6)[1:5].astype(float)
    if n.min() > 0:
        estimates = np.arange(1, 4) - np.arange(2, 5) * n[0] / (n[0] + 2 * n[1]) * n[1:] / n[:-1]
        if (estimates > 0).all():
            return np.append(0, estimates)
    return np.array([0, 0.5, 1.0, 1.5])  # too small a text to estimate them: KenLM's --discount_fallback


def symbols_of(texts: Texts, classes: Sequence[str]) -> np.ndarray:
    """Return (N,) int64: the lines of a text between boundaries, no blank ones. Raises PackError if none is left."""
    classes = characters(classes)
    end = len(classes)
    places = np.full(0x110000, classes.index(UNKNOWN) if UNKNOWN in classes else -1)
    places[[code for code in range(0x3001) if chr(code).isspace()]] = -1
    places[[ord(c) for c in classes]] = np.arange(end)
    places[ord("\n")] = end
    if isinstance(texts, (str, Path)):
        path = drive_path(texts) if str(texts).startswith("drive:") else Path(texts)
        texts = [read_text(path, "name a readable text file, or give lines of text")]
    text = "\n".join(["", *texts, ""])
    symbols = places[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")]
    symbols = symbols[symbols >= 0]
    symbols = symbols[np.append(True, (symbols[1:] != end) | (symbols[:-1] != end))]
    if len(symbols) < 2:
        raise PackError("NGram: a text must have at least one character of the classes, got none; give another text")
    return symbols
