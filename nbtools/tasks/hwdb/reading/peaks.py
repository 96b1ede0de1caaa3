"""The few likely classes of each time step: all that a search looks at, and a hundredth of a network's answer.

B lines, T time steps, C = 1 + classes, blank 0; F frames in which more than a blank is likely, K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nbtools.errors import NbtoolsError, PlanError
from nbtools.tasks.common.ctc import BLANK

CANDIDATES, LEAST = 20, 1e-5
LOWEST = np.finfo(np.float32).min  # of a log-probability that is not -inf


@dataclass(frozen=True, eq=False)
class Peaks:
    """What a search looks at: a few hundred bytes a frame, where the network's answer has tens of thousands.

    places (B, F, K) int32: candidates as places in classes, the best first; log_probs (B, F, K) float32, -inf where
    there are fewer; blank (B, F) float32; gap (B, F) bool: only blanks stand between this frame and the one before;
    frames (B,): how many each line has; classes: of which they are places.
    """

    places: np.ndarray
    log_probs: np.ndarray
    blank: np.ndarray
    gap: np.ndarray
    frames: np.ndarray
    classes: int

    def __len__(self) -> int:
        return len(self.frames)


@torch.no_grad()
def peaks(
    log_probs: Tensor | np.ndarray,
    steps: Tensor | np.ndarray | Sequence[int],
    candidates: int = CANDIDATES,
    least: float = LEAST,
) -> Peaks:
    """The best classes of each frame: at most so many, none less probable than `least`; a frame without any is a blank.

    What is left out counts as impossible, so that no text's probability is wrong by more than what was left out, summed
    over the frames. log_probs (T, B, C) or logits, any float type and device; only the best ones leave the device.
    """
    scores, steps = torch.as_tensor(log_probs), torch.as_tensor(steps).cpu()
    refuse(scores, steps, candidates, least)
    found = []
    for frame in scores:  # (B, C): one at a time stays in a CPU's cache
        total = frame.float().logsumexp(1, keepdim=True)
        best, places = frame[:, BLANK + 1 :].float().topk(min(candidates, frame.shape[1] - 1))
        found.append((best - total, places.int(), frame[:, BLANK].float() - total[:, 0]))
    best, places, blank = (torch.stack(part, 1).cpu().numpy() for part in zip(*found, strict=True))
    there = np.arange(len(scores)) < steps.numpy()[:, None]  # (B, T)
    if np.isnan(blank[there]).any():
        line, frame = np.argwhere(np.isnan(blank) & there)[0]
        raise NbtoolsError(
            f"beam: log_probs of line {line} at step {frame} are no numbers; look for NaN in the weights"
        )
    usable = there[..., None] & (best >= (math.log(least) if least else LOWEST))
    return kept(best, places, blank, usable, scores.shape[2] - 1)


def refuse(scores: Tensor, steps: Tensor, candidates: int, least: float) -> None:
    """Raises PlanError, or NbtoolsError on shapes."""
    if scores.ndim != 3 or scores.shape[2] < 2 or not len(scores) or steps.shape != scores.shape[1:2]:
        raise NbtoolsError(
            f"beam: log_probs must be (T, B, 1 + classes) and steps (B,), got {tuple(scores.shape)} and "
            f"{tuple(steps.shape)}"
        )
    if len(steps) and not 0 <= steps.min() <= steps.max() <= len(scores):
        raise NbtoolsError(f"beam: steps must be from 0 to T = {len(scores)}, got {steps.min()} to {steps.max()}")
    if candidates < 1 or not 0 <= least < 1:
        raise PlanError(f"beam: candidates must be ≥ 1 and least in [0, 1), got {candidates} and {least}")


def kept(best: np.ndarray, places: np.ndarray, blank: np.ndarray, usable: np.ndarray, classes: int) -> Peaks:
    """Drop the frames (B, T) without a usable candidate (B, T, K)."""
    counts = usable.sum(2)
    frames = (counts > 0).sum(1)
    most, widest = int(frames.max(initial=0)), int(counts.max(initial=1))
    order = np.argsort(counts == 0, axis=1, kind="stable")[:, :most]
    lines = np.arange(len(frames))[:, None]
    best = np.where(usable, best, -np.inf)
    gap = np.diff(order, axis=1, prepend=order[:, :1]) > 1
    return Peaks(places[lines, order, :widest], best[lines, order, :widest], blank[lines, order], gap, frames, classes)


def joined(parts: Sequence[Peaks], wheres: Sequence[np.ndarray]) -> Peaks:
    """The peaks of several batches as one, each batch's lines at its places there."""
    lines = sum(map(len, parts))
    frames, many = (max(part.places.shape[axis] for part in parts) for axis in (1, 2))
    room, flat = (lines, frames, many), (lines, frames)
    places, log_probs = np.zeros(room, np.int32), np.full(room, -np.inf, np.float32)
    blank, gap, counts = np.zeros(flat, np.float32), np.zeros(flat, bool), np.zeros(lines, np.int64)
    for part, where in zip(parts, wheres, strict=True):
        _, f, k = part.places.shape
        places[where, :f, :k], log_probs[where, :f, :k] = part.places, part.log_probs
        blank[where, :f], gap[where, :f], counts[where] = part.blank, part.gap, part.frames
    return Peaks(places, log_probs, blank, gap, counts, parts[0].classes)
