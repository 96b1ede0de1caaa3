"""One clip at a time: how long an answer takes, and answers while somebody is still signing. T frames."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn

from nbtools import table
from nbtools.data import Card, Pack, Sample, collate
from nbtools.errors import PlanError
from nbtools.tasks.sign.plans import network_of, of
from nbtools.tasks.sign.task import batch

WARM = 3  # answers before the clock counts: the first ones load libraries and choose kernels


@dataclass(frozen=True)
class Answer:
    """The likeliest gloss up to a frame, its probability, and the seconds from arrays to this answer."""

    frame: int
    gloss: str
    probability: float
    seconds: float


@dataclass(frozen=True)
class Latency:
    """Seconds of n answers, each to one clip alone. Shows as a table."""

    device: str
    frames: int
    n: int
    median: float
    slowest: float  # the 95th percentile

    def row(self) -> tuple[str, ...]:
        times = (f"{1e3 * seconds:.2f} ms" for seconds in (self.median, self.slowest))
        return (self.device, f"{self.frames}", f"{self.n}", *times)

    def __str__(self) -> str:
        return table.text(HEADERS, [self.row()])

    def _repr_html_(self) -> str:
        return table.html(HEADERS, [self.row()])


HEADERS = ("device", "frames (median)", "answers", "median", "95 %")


@torch.no_grad()
def answer(model: nn.Module, card: Card, plan: Any, clip: Sample) -> Answer:
    """What a model in eval mode says of one clip: arrays as `pack.sample` and `read` give them. Only what it reads is
    brought to the device: features are 13 times as large as keypoints."""
    device, began = next(model.parameters()).device, perf_counter()
    read = ("features",) if read_column(plan, clip) == "features" else ("x", "mask")
    columns = {name: clip[name] for name in read if name in clip}
    raw = {name: tensor.to(device) for name, tensor in collate([columns], card.columns).items()}
    glosses, _ = model(batch(raw, plan, None))
    best = glosses[0].float().softmax(0).max(0)  # a read of the values waits for the device
    probability, place = float(best.values), int(best.indices)
    return Answer(len(clip[read_column(plan, clip)]), card.classes[place], probability, perf_counter() - began)


def stream(
    model: nn.Module, card: Card | Pack, plan: Any, clip: Sample, window: int = 45, every: int = 5
) -> Iterator[Answer]:
    """An answer every so many frames, each to the last `window` frames, as a camera would ask for them. `frame` counts
    from the clip's start. Raises PlanError for a window or a pace of less than one frame."""
    if window < 1 or every < 1:
        raise PlanError(f"stream: window and every must be ≥ 1 frame, got {window} and {every}")
    card = of(card)
    frames = len(clip[read_column(plan, clip)])
    for end in range(min(every, frames), frames + 1, every):
        part = {name: values[max(0, end - window) : end] for name, values in clip.items() if name != "label"}
        found = answer(model, card, plan, part)
        yield Answer(end, found.gloss, found.probability, found.seconds)


def latency(model: nn.Module, card: Card | Pack, plan: Any, clips: Sequence[Sample]) -> Latency:
    """How long a model takes for single clips, each answered once, after a few to warm up. Raises PlanError without
    clips."""
    if not clips:
        raise PlanError("latency: needs at least one clip, got none; take some of pack.ids('val')")
    card = of(card)
    for clip in clips[:WARM]:
        answer(model, card, plan, clip)
    found = [answer(model, card, plan, clip) for clip in clips]
    seconds = [one.seconds for one in found]
    frames = round(statistics.median(one.frame for one in found))
    device = str(next(model.parameters()).device)
    return Latency(device, frames, len(found), statistics.median(seconds), float(np.quantile(seconds, 0.95)))


def read_column(plan: Any, clip: Mapping[str, Any]) -> str:
    """The column that the plan's network reads."""
    return "features" if network_of(plan, clip) == "gru" else "x"
