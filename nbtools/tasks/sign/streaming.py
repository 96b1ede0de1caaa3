"""One clip at a time: the latency of an answer, and answers while somebody is still signing. T frames."""

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
from nbtools.tasks.sign.plans import network_of
from nbtools.tasks.sign.task import batch

WARM = 3  # answers before the clock counts: the first ones load libraries and choose kernels
HEADERS = ("device", "frames (median)", "answers", "median", "95 %")


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


@torch.no_grad()
def answer(model: nn.Module, pack: Card | Pack, plan: Any, clip: Sample) -> Answer:
    """A model's answer, in eval mode, to one clip: arrays as `pack.sample` and `read` give them. Only what it reads is
    copied to the device: features are 13 times as large as keypoints."""
    device, began = next(model.parameters()).device, perf_counter()
    columns = ("features",) if column_of(plan, clip) == "features" else ("x", "mask")
    raw = collate([{name: clip[name] for name in columns if name in clip}], pack.columns)
    glosses, _ = model(batch({name: tensor.to(device) for name, tensor in raw.items()}, plan, None))
    best = glosses[0].float().softmax(0).max(0)  # reading the values waits for the device
    probability, gloss = float(best.values), pack.classes[int(best.indices)]
    return Answer(len(clip[columns[0]]), gloss, probability, perf_counter() - began)


def column_of(plan: Any, clip: Mapping[str, Any]) -> str:
    """The column that the plan's network reads."""
    return "features" if network_of(plan, clip) == "gru" else "x"


def stream(
    model: nn.Module, card: Card | Pack, plan: Any, clip: Sample, window: int = 45, every: int = 5
) -> Iterator[Answer]:
    """An answer every so many frames, each to the last `window` frames, as for a camera. `frame` counts from the clip's
    start. Raises PlanError for a window or a pace of less than one frame."""
    if window < 1 or every < 1:
        raise PlanError(f"stream: window and every must be ≥ 1 frame, got {window} and {every}")
    frames = len(clip[column_of(plan, clip)])
    for end in range(min(every, frames), frames + 1, every):
        part = {name: values[max(0, end - window) : end] for name, values in clip.items() if name != "label"}
        one = answer(model, card, plan, part)
        yield Answer(end, one.gloss, one.probability, one.seconds)


def latency(model: nn.Module, card: Card | Pack, plan: Any, clips: Sequence[Sample]) -> Latency:
    """How long a model takes for single clips, each answered once, after a few to warm up. Raises PlanError without
    clips."""
    if not clips:
        raise PlanError("latency: needs at least one clip, got none; take some of pack.ids('val')")
    for clip in clips[:WARM]:
        answer(model, card, plan, clip)
    answers = [answer(model, card, plan, clip) for clip in clips]
    seconds = [one.seconds for one in answers]
    frames = round(statistics.median(one.frame for one in answers))
    device = str(next(model.parameters()).device)
    return Latency(device, frames, len(answers), statistics.median(seconds), float(np.quantile(seconds, 0.95)))
