"""What a network says of a pack's lines, kept small, and the weight of the language model that reads them best."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from nbtools import table
from nbtools.data import Pack, collate
from nbtools.errors import NbtoolsError
from nbtools.tasks.common.metrics import text_metrics
from nbtools.tasks.hwdb.formats.dgrl import UNKNOWN
from nbtools.tasks.hwdb.reading.beam import search
from nbtools.tasks.hwdb.reading.ngram import NGram
from nbtools.tasks.hwdb.reading.peaks import CANDIDATES, LEAST, Peaks, joined, peaks
from nbtools.tasks.hwdb.task import batch
from nbtools.train import autocast

ALPHAS, BETAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), (0.0, 1.0, 2.0, 3.0, 4.0)


@torch.no_grad()
def peaks_of(
    model: nn.Module,
    pack: Pack,
    plan: Any,
    ids: Sequence[int] | np.ndarray,
    batch_size: int = 64,
    candidates: int = CANDIDATES,
    least: float = LEAST,
) -> Peaks:
    """The peaks of lines of a pack, in the order of ids: the network reads them once, for any number of searches.

    As in evaluation: never augmented, in the plan's precision, in eval mode, which is left as it was. Lines of like
    widths share a batch. About 10 kB a line of 7,375 classes, where the network's answer takes 2 MB. Raises
    NbtoolsError without lines.
    """
    if not len(ids):
        raise NbtoolsError("peaks_of: needs ids of lines, got none; pack with a larger share for that split")
    device, training = next(model.parameters()).device, model.training
    order = np.argsort(pack.lengths("image", np.asarray(ids)), kind="stable")
    chunks, parts = np.split(order, range(batch_size, len(order), batch_size)), []
    model.eval()
    try:
        for chunk in chunks:
            raw = collate([pack.sample(int(ids[i])) for i in chunk], pack.columns)
            raw = {name: tensor.to(device) for name, tensor in raw.items()}
            with autocast(plan, device, model):
                logits, steps = model(batch(raw, plan, None))
            parts.append(peaks(logits, steps, candidates, least))
    finally:
        model.train(training)
    return joined(parts, chunks)


@dataclass(frozen=True)
class Tuned:
    """The weights with the least CER of those tried, (alpha, beta) → CER. Shows as a table."""

    alpha: float
    beta: float
    cers: dict[tuple[float, float], float]

    @property
    def cer(self) -> float:
        return self.cers[self.alpha, self.beta]

    @property
    def headers(self) -> list[str]:
        return ["alpha", *(f"beta {beta:g}" for beta in dict.fromkeys(beta for _, beta in self.cers))]

    def rows(self) -> list[list[str]]:
        rows: dict[float, list[str]] = {}
        for (alpha, _), cer in self.cers.items():
            rows.setdefault(alpha, [f"{alpha:g}"]).append(f"{100 * cer:.2f} %")
        return list(rows.values())

    @property
    def caption(self) -> str:
        return f"CER {100 * self.cer:.2f} % with alpha {self.alpha:g} and beta {self.beta:g}"

    def __str__(self) -> str:
        return f"{self.caption}\n{table.text(self.headers, self.rows())}"

    def _repr_html_(self) -> str:
        return table.html(self.headers, self.rows(), self.caption)


def tune(
    peaks: Peaks,
    texts: Sequence[str],
    classes: Sequence[str],
    lm: NGram,
    width: int = 10,
    alphas: Sequence[float] = ALPHAS,
    betas: Sequence[float] = BETAS,
) -> Tuned:
    """Try every alpha with every beta on lines of the validation split, whose truth is `texts`; the smallest on a tie.

    As in `metrics`, an unknown character of the truth is an error whatever is read. Raises NbtoolsError on nothing to
    try, or texts that are not as many as the lines.
    """
    if len(texts) != len(peaks) or not len(texts) or not alphas or not betas:
        raise NbtoolsError(
            f"tune: needs a text for each line, and an alpha and a beta to try, got {len(texts)} texts, {len(peaks)} "
            f"lines, {len(alphas)} alphas and {len(betas)} betas"
        )
    truth = [text.replace(UNKNOWN, "\n") for text in texts]  # which no answer has
    cers = {}
    for alpha, beta in itertools.product(alphas, betas):
        wrong, count = text_metrics(search(peaks, classes, lm, width, alpha, beta), truth)["cer"]
        cers[alpha, beta] = float(wrong) / max(float(count), 1)
    alpha, beta = min(cers, key=lambda tried: cers[tried])
    return Tuned(alpha, beta, cers)
