"""Prefix beam search over a network's answers, with or without a language model.

CTC sums over all alignments of a text; greedy decoding takes the single best one. A beam holds the `width` best texts
so far, each with the probability of all its alignments that end in a blank and of those that end in its last character
(Hannun et al. 2014, arXiv 1408.2873). A text is ranked by log P(CTC) + alpha · log P(LM) + beta · its length. Only the
*peaks* of an output count, the few likely classes of each time step.

B lines, T time steps, C = 1 + classes, blank 0; F frames in which more than a blank is likely, K candidates, W beams.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nbtools.data import Pack, gather, in_order, lengths_of, on
from nbtools.errors import NbtoolsError, PlanError
from nbtools.tasks.common.ctc import BLANK
from nbtools.tasks.common.metrics import pair, text_metrics
from nbtools.tasks.hwdb import task
from nbtools.tasks.hwdb.data import UNKNOWN
from nbtools.tasks.hwdb.language_model import NGram
from nbtools.train import forward

CANDIDATES, LEAST = 20, 1e-5
EMPTY, FREE, NOWHERE = (np.uint64(n) for n in range(3))  # hashes: of the empty text, of no text, of no parent
PRIME = np.uint64(0x9E3779B97F4A7C55)
NEVER = "\U0010ffff"  # no character either: nothing reads it

Peaks = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""The likely classes of a batch of lines: a few hundred bytes a frame, where the network answers tens of thousands.

places (F, B, K): candidates as places in classes; their log-probabilities (F, B, K), -inf where there are fewer; those
of the blank (F, B); whether only blanks are between this frame and the previous one (F, B). A line that has ended
continues with blanks."""

Batches = list[tuple[np.ndarray, Peaks]]
"""Lines by their places in a list (B,), and their peaks."""


@torch.no_grad()
def find_peaks(logits: Tensor, steps: Tensor, candidates: int = CANDIDATES, least: float = LEAST) -> Peaks:
    """Return the best classes of each frame: at most `candidates`, none less probable than `least`; frames without any
    are left out, as blanks. The search is exact where candidates, least and width leave nothing out.

    logits (T, B, C): of any float type, on any device; steps (B,) of each line. Raises NbtoolsError where they are NaN.
    """
    parts = []
    for frame in logits:  # (B, C): one at a time stays in a CPU's cache
        total = frame.float().logsumexp(1, keepdim=True)
        best, places = frame[:, BLANK + 1 :].float().topk(min(candidates, frame.shape[1] - 1))
        parts.append((places, best - total, frame[:, BLANK].float() - total[:, 0]))
    places, log_probs, blank = (torch.stack(part).cpu().numpy() for part in zip(*parts, strict=True))  # (T, B, …)
    own: np.ndarray = np.less(np.arange(len(logits))[:, None], steps.cpu().numpy())
    if np.isnan(blank).any(where=own):
        raise NbtoolsError("beam: the network's output contains NaN; check its weights")
    usable = np.expand_dims(own, 2) & (log_probs >= (math.log(least) if least else np.finfo(np.float32).min))
    kept = usable.max(2)
    frames = np.argsort(~kept, 0, kind="stable")[: kept.sum(0).max()]  # (F, B) of each line those with candidates
    line, most = np.arange(len(steps)), usable.sum(2).max(initial=1)
    kept = kept[frames, line]
    log_probs = np.where(usable, log_probs, -np.inf)[frames, line, :most]
    gap = kept & (np.diff(frames, axis=0, prepend=frames[:1]) > 1)
    return places[frames, line, :most], log_probs, np.where(kept, blank[frames, line], 0.0), gap


def peaks_of(model: nn.Module, pack: Pack, plan: Any, ids: Sequence[int] | np.ndarray, batch_size: int = 64) -> Batches:
    """Return the peaks of lines of a pack: read by the network once, for any number of searches; as in evaluation never
    augmented, in the plan's precision. About 10 kB per line of 7,375 classes, where the network's answer takes 2 MB."""
    ids, device, batches = np.asarray(ids), next(model.parameters()).device, []
    for lines in in_order(np.arange(len(ids)), lengths_of(pack, ids), batch_size):
        _, (logits, steps) = forward(task, model, on(device, gather(pack, ids[lines])), plan)
        batches.append((lines, find_peaks(logits, steps)))
    return batches


def search(
    batches: Batches,
    classes: Sequence[str],
    lm: NGram | None = None,
    width: int = 10,
    alpha: float = 0.4,
    beta: float = 0.0,
) -> list[str]:
    """Return the best text of each line, of the `width` best so far at each step: by log P(CTC) + alpha · log P(LM) +
    beta · length, alpha ≥ 0. Raises PlanError for a language model of other classes."""
    if lm is not None and lm.classes != tuple(classes):
        raise PlanError("beam: the language model has other classes; train it with the pack's classes")
    texts: dict[int, list[int]] = {}
    for lines, peaks in batches:
        beams = Beams(len(lines), len(peaks[0]), width, lm if alpha else None, alpha, beta)
        for frame in zip(*peaks, strict=True):
            beams.step(*frame)
        texts |= zip(lines.tolist(), beams.best(), strict=True)
    return ["".join(classes[place] for place in texts[line]) for line in range(len(texts))]


class Beams:
    """The best texts of B lines so far; arrays (B, W).

    blank, char: log-probability of the alignments that end in a blank, in the last character; bonus: what the language
    model and the length add; state: the language model's; text (B, W, F): places in classes; length: of it; hash,
    parent: of the text and of it without its last character, of 64 bits, so that no two are equal by chance.
    """

    def __init__(self, lines: int, frames: int, width: int, lm: NGram | None, alpha: float, beta: float):
        self.lm, self.alpha, self.beta = lm, alpha, beta
        self.blank, self.char = np.full((2, lines, width), -np.inf)
        self.bonus, self.state = np.zeros((lines, width)), np.full((lines, width), 0 if lm is None else lm.start)
        self.text, self.length = np.zeros((lines, width, frames + 1), np.int32), np.zeros((lines, width), np.int64)
        self.hash, self.parent = np.full((lines, width), FREE), np.full((lines, width), NOWHERE)
        self.blank[:, 0], self.hash[:, 0] = 0, EMPTY
        self.at = np.ogrid[:lines, :width]  # each beam

    def step(self, places: np.ndarray, scores: np.ndarray, blank: np.ndarray, gap: np.ndarray) -> None:
        """Advance all lines by a frame: places and scores (B, K) of its candidates, blank (B,), gap (B,)."""
        both = np.logaddexp(self.blank, self.char)
        last = np.where(self.length, self.text[*self.at, self.length - 1], -1)
        again = last[..., None] == places[:, None]  # (B, W, K)
        parted = np.where(gap[:, None], both, self.blank)  # the alignments that may repeat their last character
        grown = np.where(again, parted[..., None], both[..., None]) + scores[:, None]
        char = np.where(gap[:, None], -np.inf, self.char) + np.where(again, scores[:, None], -np.inf).max(2)
        line, child, parent = np.nonzero(self.parent[..., None] == self.hash[:, None])
        met, place = np.nonzero(again[line, child])  # a beam that another one grows into takes over its alignments
        line, child, parent = line[met], child[met], parent[met]
        char[line, child] = np.logaddexp(char[line, child], grown[line, parent, place])
        grown[line, parent, place] = -np.inf
        self.keep(places, both + blank[:, None], char, grown)

    def keep(self, places: np.ndarray, blank: np.ndarray, char: np.ndarray, grown: np.ndarray) -> None:
        """Keep the W best of the texts that stay, ended by blank or char (B, W), and those that grow (B, W, K)."""
        lines, width, many = grown.shape
        bonus, states = np.repeat(self.bonus[..., None] + self.beta, many, 2), np.zeros(grown.shape, np.int64)
        stay = np.logaddexp(blank, char) + self.bonus
        possible = grown + bonus > stay.min(1)[:, None, None]  # a language model only lowers it: most need no look-up
        if self.lm is not None:
            line, above, place = np.nonzero(possible)
            weights, states[possible] = self.lm.step(self.state[line, above], places[line, place])
            bonus[possible] += self.alpha * weights
        ranks = np.concatenate([stay, np.where(possible, grown + bonus, -np.inf).reshape(lines, -1)], 1)
        best = np.argpartition(ranks, -width, axis=1)[:, -width:]
        line, new = self.at[0], best >= width
        old, place = np.where(new, (best - width) // many, best), (best - width) % many
        self.blank = np.where(new, -np.inf, blank[line, old])
        self.char = np.where(new, grown[line, old, place], char[line, old])
        self.bonus = np.where(new, bonus[line, old, place], self.bonus[line, old])
        self.state = np.where(new, states[line, old, place], self.state[line, old])
        self.text, self.length, added = self.text[line, old], self.length[line, old], places[line, place]
        self.text[*self.at, self.length] = added
        self.length += new
        kept, alive = self.hash[line, old], ranks[line, best] > -np.inf  # else there are fewer than W texts
        self.parent = np.where(alive, np.where(new, kept, self.parent[line, old]), NOWHERE)
        self.hash = np.where(alive, np.where(new, kept * PRIME + added.astype(np.uint64) + np.uint64(3), kept), FREE)

    def best(self) -> list[list[int]]:
        ranks = np.logaddexp(self.blank, self.char) + self.bonus
        if self.lm is not None:
            ends, _ = self.lm.step(self.state.ravel(), np.full(self.state.size, self.lm.end))
            ranks += self.alpha * ends.reshape(ranks.shape)
        lines, first = np.arange(len(ranks)), ranks.argmax(1)
        return [text[:n].tolist() for text, n in zip(self.text[lines, first], self.length[lines, first], strict=True)]


def scores(truth: Sequence[str], predicted: Sequence[str]) -> dict[str, float]:
    """Return cer, ar, cr and whole_accuracy as `metrics` does: an unknown character of the truth is read wrong,
    whatever was read. Raises PackError unless there is one answer for each line."""
    pairs = pair([text.replace(UNKNOWN, NEVER) for text in truth], predicted, "text", "line")
    sums = text_metrics([read for _, read in pairs], [true for true, _ in pairs])
    return {name: float(wrong) / max(float(count), 1) for name, (wrong, count) in sums.items()}
