"""Prefix beam search over a network's answers, with or without a language model, and the weights with the lowest error.

CTC sums over all alignments of a text; greedy decoding takes the single best one. A beam holds the `width` best texts
so far, each with the probability of all its alignments that end in a blank and of those that end in its last character
(Hannun et al. 2014, arXiv 1408.2873; Graves & Jaitly 2014). A text is ranked by log P(CTC) + alpha · log P(LM) +
beta · its length. A search uses only the *peaks* of an output, the few likely classes of each time step: a
hundredth of it. Many lines go through their frames together, in numpy.

B lines, T time steps, C = 1 + classes, blank 0; F frames in which more than a blank is likely, K candidates, W beams.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from nbtools.data import Pack, gather, in_order, lengths_of, on
from nbtools.errors import NbtoolsError, PlanError
from nbtools.tasks.common.ctc import BLANK
from nbtools.tasks.hwdb import task
from nbtools.tasks.hwdb.analysis import scores
from nbtools.tasks.hwdb.language_model import NGram
from nbtools.train import forward

if TYPE_CHECKING:
    import pandas as pd

CANDIDATES, LEAST = 20, 1e-5
LOWEST = np.finfo(np.float32).min  # of a log-probability that is not -inf
TOGETHER = 64  # lines searched at once: they share numpy's overhead, and still fit the caches
ALPHAS, BETAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), (0.0, 1.0, 2.0, 3.0, 4.0)
EMPTY, FREE, NOWHERE = (np.uint64(n) for n in range(3))  # hashes: of the empty text, a free place, no parent
PRIME = np.uint64(0x9E3779B97F4A7C55)


@dataclass(frozen=True, eq=False, slots=True)
class Peaks:
    """The likely classes of one line: a few hundred bytes a frame, where the network's answer has tens of thousands.

    places (F, K) int32: candidates as places in classes, the best first; log_probs (F, K) float32, -inf where there are
    fewer; blank (F,) float32; gap (F,) bool: only blanks are between this frame and the previous one.
    """

    places: np.ndarray
    log_probs: np.ndarray
    blank: np.ndarray
    gap: np.ndarray


@torch.no_grad()
def find_peaks(scores: Tensor, steps: Tensor, candidates: int = CANDIDATES, least: float = LEAST) -> list[Peaks]:
    """The best classes of each frame: at most `candidates`, none less probable than `least`; frames without any are
    left out, as blanks.

    What is left out counts as impossible, so no text's probability is off by more than what was left out, summed over
    the frames; the search is exact where candidates, least and width leave nothing out. scores (T, B, C): logits or
    log-probabilities, any float type and device; only the best ones leave the device. steps (B,) of each line. Raises
    NbtoolsError on scores that are no numbers.
    """
    found = []
    for frame in scores:  # (B, C): one at a time stays in a CPU's cache
        total = frame.float().logsumexp(1, keepdim=True)
        best, places = frame[:, BLANK + 1 :].float().topk(min(candidates, frame.shape[1] - 1))
        found.append((best - total, places.int(), frame[:, BLANK].float() - total[:, 0]))
    best, places, blank = (torch.stack(part, 1).cpu().numpy() for part in zip(*found, strict=True))
    peaks = []
    for line, count in enumerate(steps.tolist()):
        if np.isnan(blank[line, :count]).any():
            frame = np.isnan(blank[line, :count]).argmax()
            raise NbtoolsError(
                f"beam: the output for line {line} at step {frame} is not a number; check the weights for NaN"
            )
        usable = best[line, :count] >= (math.log(least) if least else LOWEST)  # (T, K)
        frames = np.flatnonzero(usable.any(1))
        kept = slice(None), slice(usable.sum(1).max(initial=1))
        log_probs = np.where(usable, best[line, :count], -np.inf)[frames][kept]
        gap = np.diff(frames, prepend=frames[:1]) > 1
        peaks.append(Peaks(places[line, frames][kept], log_probs, blank[line, frames], gap))
    return peaks


def search(
    peaks: Sequence[Peaks],
    classes: Sequence[str],
    lm: NGram | None = None,
    width: int = 10,
    alpha: float = 0.4,
    beta: float = 0.0,
) -> list[str]:
    """The best text of each line. Raises PlanError on an impossible setting, or a language model of other classes."""
    if width < 1 or alpha < 0 or not math.isfinite(alpha) or not math.isfinite(beta):
        raise PlanError(
            f"beam: width must be at least 1, alpha at least 0 and beta a number, got {width}, {alpha} and {beta}"
        )
    if lm is not None and lm.classes != tuple(classes):
        raise PlanError(
            f"beam: the language model has {len(lm.classes)} different classes; train it with the pack's classes"
        )
    texts = [""] * len(peaks)
    order = sorted(range(len(peaks)), key=lambda i: len(peaks[i].blank))  # lines of a length share their frames
    for start in range(0, len(order), TOGETHER):
        ids = order[start : start + TOGETHER]
        frames = stacked([peaks[i] for i in ids])
        beams = Beams(len(ids), len(frames[0]), width, lm if alpha else None, alpha, beta)
        for frame in zip(*frames, strict=True):
            beams.step(*frame)
        for i, places in zip(ids, beams.best(), strict=True):
            texts[i] = "".join(classes[place] for place in places)
    return texts


def stacked(peaks: Sequence[Peaks]) -> tuple[np.ndarray, ...]:
    """places (F, B, K), log_probs (F, B, K), blank (F, B), gap (F, B): a line that has ended continues with blanks."""
    shape = max(len(line.blank) for line in peaks), len(peaks), max(line.places.shape[1] for line in peaks)
    places, log_probs = np.zeros(shape, np.int64), np.full(shape, -np.inf)
    blank, gap = np.zeros(shape[:2]), np.zeros(shape[:2], bool)
    for b, line in enumerate(peaks):
        n, k = line.places.shape
        places[:n, b, :k], log_probs[:n, b, :k] = line.places, line.log_probs
        blank[:n, b], gap[:n, b] = line.blank, line.gap
    return places, log_probs, blank, gap


class Beams:
    """The best texts of B lines so far; arrays (B, W).

    blank, char: log-probability of the alignments that end in a blank, in the last character; bonus: what the language
    model and the length add; hash, parent: of the text, and of the text without its last character; last: the place of
    that character; state: the language model's; text (B, W, F): places in classes; length: of the text.
    """

    def __init__(self, lines: int, frames: int, width: int, lm: NGram | None, alpha: float, beta: float):
        self.lm, self.alpha, self.beta = lm, alpha, beta
        shape = (lines, width)
        self.blank, self.char, self.bonus = np.full(shape, -np.inf), np.full(shape, -np.inf), np.zeros(shape)
        self.hash, self.parent, self.last = np.full(shape, FREE), np.full(shape, NOWHERE), np.full(shape, -1)
        self.state = np.full(shape, 0 if lm is None else lm.start)
        self.text, self.length = np.zeros((*shape, frames), np.int32), np.zeros(shape, np.int64)
        self.blank[:, 0], self.hash[:, 0] = 0, EMPTY

    def step(self, places: np.ndarray, scores: np.ndarray, blank: np.ndarray, gap: np.ndarray) -> None:
        """Advance all lines by a frame: places and scores (B, K) of its candidates, blank (B,), gap (B,)."""
        both = np.logaddexp(self.blank, self.char)  # (B, W)
        parted = np.where(gap[:, None], both, self.blank)  # the alignments that may repeat their last character
        again = self.last[..., None] == places[:, None]  # (B, W, K)
        grown = np.where(again, parted[..., None], both[..., None]) + scores[:, None]
        char = np.where(gap[:, None], -np.inf, self.char) + np.where(again, scores[:, None], -np.inf).max(2)
        line, longer, shorter = np.nonzero(self.parent[..., None] == self.hash[:, None])
        place = again[line, longer].argmax(1)  # a beam that another one grows into takes over its alignments
        met = again[line, longer, place]
        line, longer, shorter, place = line[met], longer[met], shorter[met], place[met]
        char[line, longer] = np.logaddexp(char[line, longer], grown[line, shorter, place])
        grown[line, shorter, place] = -np.inf
        self.keep(places, both + blank[:, None], char, grown)

    def keep(self, places: np.ndarray, blank: np.ndarray, char: np.ndarray, grown: np.ndarray) -> None:
        """Keep the W best of the texts that stay, ended by blank or char (B, W), and those that grow (B, W, K)."""
        lines, width, many = grown.shape
        flat = np.arange(lines)[:, None]
        bonus, states = np.repeat(self.bonus[..., None] + self.beta, many, 2), np.zeros(grown.shape, np.int64)
        stay = np.logaddexp(blank, char) + self.bonus
        possible = grown + bonus > stay.min(1)[:, None, None]  # a language model only lowers it: most need no look-up
        if self.lm is not None:
            line, above, place = np.nonzero(possible)
            weights, states[possible] = self.lm.step(self.state[line, above], places[line, place])
            bonus[possible] += self.alpha * weights
        ranks = np.concatenate([stay, np.where(possible, grown + bonus, -np.inf).reshape(lines, -1)], 1)
        best = np.argpartition(ranks, -width, axis=1)[:, -width:]
        new = best >= width
        old, place = np.where(new, (best - width) // many, best), (best - width) % many
        alive = ranks[flat, best] > -np.inf
        self.blank = np.where(new, -np.inf, blank[flat, old])
        self.char = np.where(new, grown[flat, old, place], char[flat, old])
        self.bonus = np.where(new, bonus[flat, old, place], self.bonus[flat, old])
        self.state = np.where(new, states[flat, old, place], self.state[flat, old])
        self.last = np.where(new, places[flat, place], self.last[flat, old])
        kept, parent = self.hash[flat, old], np.where(new, self.hash[flat, old], self.parent[flat, old])
        longer = kept * PRIME + self.last.astype(np.uint64) + np.uint64(3)  # 64 bits: no two texts collide by chance
        self.hash = np.where(alive, np.where(new, longer, kept), FREE)
        self.parent = np.where(alive, parent, NOWHERE)
        self.text, self.length = self.text[flat, old], self.length[flat, old]
        line, row = np.nonzero(new)
        self.text[line, row, self.length[line, row]] = self.last[line, row]
        self.length += new

    def best(self) -> list[list[int]]:
        """The places in classes of each line's best text, now that it ends."""
        ranks = np.logaddexp(self.blank, self.char) + self.bonus
        if self.lm is not None:
            ends, _ = self.lm.step(self.state.ravel(), np.full(self.state.size, self.lm.end))
            ranks += self.alpha * ends.reshape(ranks.shape)
        lines, first = np.arange(len(ranks)), ranks.argmax(1)
        return [text[:n].tolist() for text, n in zip(self.text[lines, first], self.length[lines, first], strict=True)]


def peaks_of(
    model: nn.Module, pack: Pack, plan: Any, ids: Sequence[int] | np.ndarray, batch_size: int = 64
) -> list[Peaks]:
    """The peaks of lines of a pack, in the order of ids: the network reads them once, for any number of searches.

    As in evaluation: never augmented, in the plan's precision, in eval mode, which is restored afterwards. Lines of
    similar widths share a batch. About 10 kB per line of 7,375 classes, where the network's answer takes 2 MB. Raises
    NbtoolsError without lines.
    """
    if not len(ids):
        raise NbtoolsError("peaks_of: needs ids of lines, got none; pack with a larger share for that split")
    ids, device, peaks = np.asarray(ids), next(model.parameters()).device, {}
    for chunk in in_order(ids, lengths_of(pack, ids), batch_size):
        _, (logits, steps) = forward(task, model, on(device, gather(pack, chunk)), plan, device)
        peaks |= zip(chunk.tolist(), find_peaks(logits, steps), strict=True)
    return [peaks[i] for i in ids.tolist()]


@dataclass(frozen=True, repr=False)
class Tuned:
    """The weights with the lowest CER of those tried. table: CER in percent, one row per alpha, one column per beta."""

    alpha: float
    beta: float
    table: pd.DataFrame

    def __repr__(self) -> str:
        cer = self.table.loc[self.alpha, self.beta]
        return f"CER {cer:.2f} % with alpha {self.alpha:g} and beta {self.beta:g}\n{self.table.round(2)}"


def tune(
    peaks: Sequence[Peaks],
    texts: Sequence[str],
    classes: Sequence[str],
    lm: NGram,
    width: int = 10,
    alphas: Sequence[float] = ALPHAS,
    betas: Sequence[float] = BETAS,
) -> Tuned:
    """Try every alpha with every beta on lines of the validation split, whose true texts are `texts`; the smallest on a
    tie. Raises NbtoolsError when there is nothing to try, or not one text per line."""
    import pandas as pd

    if len(texts) != len(peaks) or not len(texts) or not alphas or not betas:
        raise NbtoolsError(
            f"tune: needs a text for each line, and an alpha and a beta to try, got {len(texts)} texts, {len(peaks)} "
            f"lines, {len(alphas)} alphas and {len(betas)} betas"
        )
    tried = itertools.product(alphas, betas)
    cers = {pair: 100 * scores(texts, search(peaks, classes, lm, width, *pair))["cer"] for pair in tried}
    index = pd.MultiIndex.from_tuples(cers, names=["alpha", "beta"])
    return Tuned(*min(cers, key=lambda pair: cers[pair]), pd.Series(list(cers.values()), index).unstack())
