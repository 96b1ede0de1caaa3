"""Prefix beam search over a network's answers, with a language model of characters if there is one.

CTC sums over all ways to spell a text; greedy reading takes the best single way. A beam holds the `width` best texts so
far, each with the probability of all its ways that end in a blank and of those that end in its last character (Hannun
et al. 2014, arXiv 1408.2873; Graves & Jaitly 2014). A text is ranked by log P(CTC) + alpha · log P(LM) + beta · its
characters; one that was dropped may come back, with the ways from there on. All lines go through their frames together,
in numpy.

B lines, T time steps, C = 1 + classes, blank 0; F frames in which more than a blank is likely, K candidates, W beams.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from nbtools.errors import NbtoolsError, PlanError
from nbtools.tasks.hwdb.reading.ngram import NGram
from nbtools.tasks.hwdb.reading.peaks import CANDIDATES, LEAST, Peaks, peaks

TOGETHER = 64  # lines searched at once: the overhead of numpy is shared, and all still fits the caches
NONE, NOWHERE = -1, -2  # a free place of a beam; the parent of an empty text


def beam(
    log_probs: Tensor | np.ndarray,
    steps: Tensor | np.ndarray | Sequence[int],
    classes: Sequence[str],
    lm: NGram | None = None,
    width: int = 10,
    alpha: float = 0.4,
    beta: float = 0.0,
    candidates: int = CANDIDATES,
    least: float = LEAST,
) -> list[str]:
    """The text of each line: log_probs (T, B, C), or logits, on any device; steps (B,) of each line.

    Without lm alpha is not used. candidates, least: as in `peaks`; the search is exact where they and width are large
    enough. Raises PlanError on an impossible setting, NbtoolsError on answers that are no numbers.
    """
    return search(peaks(log_probs, steps, candidates, least), classes, lm, width, alpha, beta)


def search(
    peaks: Peaks,
    classes: Sequence[str],
    lm: NGram | None = None,
    width: int = 10,
    alpha: float = 0.4,
    beta: float = 0.0,
) -> list[str]:
    """The best text of each line. Raises PlanError on an impossible setting, or a language model of other classes."""
    if width < 1 or alpha < 0 or not math.isfinite(alpha) or not math.isfinite(beta):
        raise PlanError(f"beam: width must be ≥ 1, alpha ≥ 0 and beta a number, got {width}, {alpha} and {beta}")
    if lm is not None and lm.classes != tuple(classes):
        raise PlanError(
            f"beam: the language model has {len(lm.classes)} other classes; train it with the pack's classes"
        )
    if peaks.classes != len(classes):
        raise NbtoolsError(
            f"beam: there are {len(classes)} classes, the answers have {peaks.classes}; give those of the pack"
        )
    lm = lm if alpha else None
    texts = [""] * len(peaks)
    order = np.argsort(-peaks.frames, kind="stable")  # lines that end together leave together
    for start in range(0, len(order), TOGETHER):
        lines = order[start : start + TOGETHER]
        beams = Beams(len(lines), len(classes), width, lm, alpha, beta)
        for frame in frames_of(peaks, lines):
            beams.step(*frame)
        for line, places in zip(lines, beams.best(), strict=True):
            texts[line] = "".join(classes[place] for place in places)
    return texts


def frames_of(peaks: Peaks, lines: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """places (b, k), log_probs (b, k), blank (b,), gap (b,) of each frame, of the b lines that still have one."""
    ends = peaks.frames[lines]
    for frame in range(ends.max(initial=0)):
        still = lines[ends > frame]
        log_probs = peaks.log_probs[still, frame].astype(float)
        many = (log_probs > -np.inf).sum(1).max()
        yield peaks.places[still, frame, :many], log_probs[:, :many], peaks.blank[still, frame], peaks.gap[still, frame]


class Tree:
    """The texts met, one node each: nodes below `lines` are empty texts, each other one is its parent's and a class."""

    def __init__(self, lines: int, classes: int):
        self.lines, self.classes, self.count = lines, classes, lines
        self.keys, self.nodes = np.array([np.iinfo(np.int64).max]), np.array([NONE])  # sorted by key, and an end
        self.made: list[np.ndarray] = []  # keys in the order of their nodes

    def children(self, parents: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The nodes (n,) of n different texts; a text that was dropped once comes back as the node it was."""
        keys = parents * self.classes + places
        order = np.argsort(keys)
        keys = keys[order]
        at = np.searchsorted(self.keys, keys)
        new = self.keys[at] != keys
        nodes = np.where(new, self.count - 1 + np.cumsum(new), self.nodes[at])
        self.keys, self.nodes = np.insert(self.keys, at[new], keys[new]), np.insert(self.nodes, at[new], nodes[new])
        self.made.append(keys[new])
        self.count += len(self.made[-1])
        found = np.empty_like(nodes)
        found[order] = nodes
        return found

    def texts(self, nodes: np.ndarray) -> list[list[int]]:
        """The places in classes that spell each node."""
        keys, found = np.concatenate([np.empty(0, np.int64), *self.made]).tolist(), []
        for node in nodes.tolist():
            text = []
            while node >= self.lines:
                node, place = divmod(keys[node - self.lines], self.classes)
                text.append(place)
            found.append(text[::-1])
        return found


class Beams:
    """The best texts of B lines so far; arrays (B, W).

    blank, char: log-probability of the ways that end in a blank, in the last character; bonus: what the language model
    and the length add; node, parent: in the tree; last: the place of the last character; state: the language model's.
    """

    def __init__(self, lines: int, classes: int, width: int, lm: NGram | None, alpha: float, beta: float):
        self.lm, self.alpha, self.beta, self.tree = lm, alpha, beta, Tree(lines, classes)
        shape = (lines, width)
        self.blank, self.char, self.bonus = np.full(shape, -np.inf), np.full(shape, -np.inf), np.zeros(shape)
        self.node, self.parent, self.last = np.full(shape, NONE), np.full(shape, NOWHERE), np.full(shape, NONE)
        self.state = np.full(shape, 0 if lm is None else lm.start)
        self.blank[:, 0], self.node[:, 0] = 0, np.arange(lines)

    def step(self, places: np.ndarray, scores: np.ndarray, blank: np.ndarray, gap: np.ndarray) -> None:
        """Take the first b lines a frame further: places and scores (b, k) of its candidates, blank (b,), gap (b,)."""
        now = slice(len(places))
        before = np.logaddexp(self.blank[now], self.char[now])  # (b, W)
        parted = np.where(gap[:, None], before, self.blank[now])
        again = self.last[now, :, None] == places[:, None]  # (b, W, k)
        grown = np.where(again, parted[..., None], before[..., None]) + scores[:, None]
        char = np.where(gap[:, None], -np.inf, self.char[now]) + np.where(again, scores[:, None], -np.inf).max(2)
        line, longer, shorter = np.nonzero(self.parent[now, :, None] == self.node[now, None])
        place = again[line, longer].argmax(1)  # a beam that another one grows into takes its ways
        met = again[line, longer, place]
        line, longer, shorter, place = line[met], longer[met], shorter[met], place[met]
        char[line, longer] = np.logaddexp(char[line, longer], grown[line, shorter, place])
        grown[line, shorter, place] = -np.inf
        self.keep(places, before + blank[:, None], char, grown)

    def keep(self, places: np.ndarray, blank: np.ndarray, char: np.ndarray, grown: np.ndarray) -> None:
        """Of the texts that stay, ended by blank or char (b, W), and those that grow (b, W, k), keep the W best."""
        lines, width, many = grown.shape
        now, flat = slice(lines), np.arange(lines)[:, None]
        stays = np.logaddexp(blank, char) + self.bonus[now]
        bonus, states = self.weighed(places, grown, stays.min(1))
        ranks = np.concatenate([stays, (grown + bonus).reshape(lines, -1)], 1)
        best = np.argpartition(ranks, -width, axis=1)[:, -width:]
        new = best >= width
        old = np.where(new, (best - width) // many, best)
        place = (best - width) % many
        alive = ranks[flat, best] > -np.inf
        self.blank[now] = np.where(new, -np.inf, blank[flat, old])
        self.char[now] = np.where(new, grown[flat, old, place], char[flat, old])
        self.bonus[now] = np.where(new, bonus[flat, old, place], self.bonus[flat, old])
        self.state[now] = np.where(new, states[flat, old, place], self.state[flat, old])
        self.last[now] = np.where(new, places[flat, place], self.last[flat, old])
        self.parent[now] = np.where(alive, np.where(new, self.node[flat, old], self.parent[flat, old]), NOWHERE)
        self.node[now] = np.where(alive, self.node[flat, old], NONE)
        new &= alive
        self.node[now][new] = self.tree.children(self.parent[now][new], self.last[now][new])

    def weighed(self, places: np.ndarray, grown: np.ndarray, floor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """bonus and state (b, W, k) of texts that grow; -inf where a text cannot come above floor (b,) anyway.

        A language model only ever takes away, so that those need not be looked up: 3 to 55 of 100, the fewest on the
        flattest answers, and up to a third of the search's time (simulated lines, 7,373 classes).
        """
        bonus = np.repeat(self.bonus[: len(grown), :, None] + self.beta, grown.shape[2], 2)
        states = np.zeros(grown.shape, np.int64)
        if self.lm is not None:
            asked = np.nonzero(grown + bonus > floor[:, None, None])
            line, above, place = asked
            scores, states[asked] = self.lm.step(self.state[line, above], places[line, place])
            weighed = np.full(grown.shape, -np.inf)
            weighed[asked] = bonus[asked] + self.alpha * scores
            bonus = weighed
        return bonus, states

    def best(self) -> list[list[int]]:
        """The places in classes of each line's best text, after its end."""
        ranks = np.logaddexp(self.blank, self.char) + self.bonus
        if self.lm is not None:
            ends, _ = self.lm.step(self.state.ravel(), np.full(self.state.size, self.lm.end))
            ranks += self.alpha * ends.reshape(ranks.shape)
        return self.tree.texts(self.node[np.arange(len(ranks)), ranks.argmax(1)])
