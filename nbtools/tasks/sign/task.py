"""How signs are trained and predicted: batches, loss, metrics, decoding, and one clip at a time.

B clips, T frames, P = 78 points, D = 2048 numbers a frame, G glosses, C categories.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbtools.data import Card, Draws, Pack, Sample, collate
from nbtools.errors import PlanError
from nbtools.tasks.common import metrics as measures
from nbtools.tasks.common.latency import measure_latency
from nbtools.tasks.sign.keypoints import SPAN, Keypoints, prepared
from nbtools.tasks.sign.networks import LABELS, Outputs, column_of
from nbtools.tasks.sign.plans import Plan, network_of
from nbtools.train import Batch, Pair, Tensors

if TYPE_CHECKING:
    import pandas as pd

BEST = "gloss_accuracy"
MEANINGS = {
    "gloss_accuracy": "share of clips whose likeliest gloss is right",
    "cat_accuracy": "share of clips whose likeliest category is right",
    "top5": "share of clips whose gloss is among the five likeliest",
}
BODY = "points relative to the middle of the shoulders, in shoulder widths, both of their mean places in the clip"
COORDINATES = {
    "none": "x * mask.repeat(2, 2)",
    "body": f"{BODY}; 0 where mask is not set",
    "hands": f"{BODY}; fingers relative to their wrist, times {SPAN:g}; 0 where mask is not set",
}
"""How x follows from the packed one, for files that leave nbtools; exactly: `keypoints.prepared`."""


def batch(raw: Batch, plan: Plan, draws: Draws | None) -> Batch:
    """What the network reads: x (B, T, 156), mask (B, T, P) and x_length, or features (B, T, D) and features_length;
    label (B, 2), gloss and category, where there is one. Keypoints are augmented given draws.

    mask says which points are seen; without one, those that are not 0. The others are 0 in x.
    """
    kept = {name: raw[name] for name in ("label", "id") if name in raw}
    if network_of(plan, raw) == "gru":
        return {**kept, "features": raw["features"], "features_length": raw["features_length"]}
    points = raw["x"].unflatten(2, (-1, 2))
    seen = raw["mask"].bool() if "mask" in raw else (points != 0).any(3)
    points, seen, lengths = prepared(Keypoints(points, seen, raw["x_length"]), plan, draws)
    return {**kept, "x": points.flatten(2), "mask": seen, "x_length": lengths}


def loss(model: Callable[[Batch], Outputs], batch: Batch, plan: Plan) -> tuple[Tensor, int]:
    """Sum of alpha · CE(gloss) + beta · CE(category) over the clips, and how many they are.

    Classes are weighted by the model's buffers. Evaluation passes a function of the batch instead of the model, so
    that its loss is unweighted.
    """
    labels, outputs = batch["label"], model(batch)

    def entropy(column: int) -> Tensor:
        weights, logits = getattr(model, f"{LABELS[column]}_weights", None), outputs[column].float()
        smoothing = plan.label_smoothing
        return F.cross_entropy(logits, labels[:, column], weights, reduction="sum", label_smoothing=smoothing)

    return plan.alpha * entropy(0) + plan.beta * entropy(1), len(labels)


def metrics(outputs: Outputs, batch: Batch) -> dict[str, Pair]:
    """gloss_accuracy, cat_accuracy, and top5: the share of clips whose gloss is among the five likeliest."""
    (gloss, category), labels = outputs, batch["label"]
    top = gloss.topk(min(5, gloss.shape[1]), 1).indices
    return {
        "gloss_accuracy": measures.accuracy(gloss.argmax(1), labels[:, 0]),
        "cat_accuracy": measures.accuracy(category.argmax(1), labels[:, 1]),
        "top5": ((top == labels[:, :1]).any(1).sum(), len(labels)),
    }


def decode(outputs: Outputs, card: Card | Pack) -> list[str]:
    """The gloss of each clip."""
    return [card.classes[i] for i in outputs[0].argmax(1).tolist()]


@dataclass(frozen=True)
class Answer:
    """The likeliest gloss up to a frame, its probability, and the seconds from arrays to this answer."""

    frame: int
    gloss: str
    probability: float
    seconds: float


@torch.no_grad()
def answer(model: nn.Module, card: Card | Pack, plan: Plan, clip: Sample) -> Answer:
    """The prediction of a model in eval mode for one clip, as `pack.sample` and `read` return it. Only the columns
    that the network reads are copied to the device."""
    device, began = next(model.parameters()).device, perf_counter()
    columns = inputs(plan, clip)
    raw = collate([{name: clip[name] for name in columns if name in clip}], card.columns)
    glosses, _ = model(batch({name: tensor.to(device) for name, tensor in raw.items()}, plan, None))
    best = glosses[0].float().softmax(0).max(0)  # reading the values waits for the device
    probability, gloss = float(best.values), card.classes[int(best.indices)]
    return Answer(len(clip[columns[0]]), gloss, probability, perf_counter() - began)


def inputs(plan: Plan, columns: Collection[str]) -> tuple[str, ...]:
    """The columns that the plan's network reads, of a pack or a clip with these."""
    return ("features",) if network_of(plan, columns) == "gru" else ("x", "mask")


def part(pack: Pack, plan: Plan) -> Pack:
    """The pack as the plan's network reads it: without the other network's column, and the clips that have only that.
    Raises PlanError for one without the network's own column."""
    column_of(plan, pack.columns)
    reads = inputs(plan, pack.columns)
    made = pack.reading((*reads, "label"))
    if made.columns.keys() == pack.columns.keys():
        return made
    options = {**made.options, "feature_key" if "x" in reads else "kp_key": None}
    if "x" in reads:
        options.pop("require_x2048", None)
    return replace(made, card=replace(made.card, options=options))


def tensors(card: Card | Pack, plan: Plan) -> tuple[Tensors, Tensors]:
    """What the network reads and returns, for files that leave nbtools."""
    if network_of(plan, card.columns) == "gru":
        (numbers,) = card.columns["features"].shape
        features = {"features": (("batch", "frames", numbers), "features")}
        reads = {**features, "features_length": (("batch",), "features_length")}
    else:
        (numbers,) = card.columns["x"].shape
        seen = "mask" if "mask" in card.columns else "(x.reshape(*x.shape[:2], -1, 2) != 0).any(3)"
        reads = {
            "x": (("batch", "frames", numbers), COORDINATES[plan.normalise]),
            "mask": (("batch", "frames", numbers // 2), seen),
            "x_length": (("batch",), "x_length"),
        }
    names = {"gloss": ("classes", card.classes), "category": ('options["categories"]', card.options["categories"])}
    return reads, {
        name: (("batch", len(classes)), f"argmax: k is {where}[k]") for name, (where, classes) in names.items()
    }


def stream(
    model: nn.Module, card: Card | Pack, plan: Plan, clip: Sample, window: int = 45, every: int = 5
) -> Iterator[Answer]:
    """A prediction every `every` frames, each from the last `window` frames, as for a camera. `frame` counts from the
    clip's start. Raises PlanError for a window or a pace of less than one frame."""
    if window < 1 or every < 1:
        raise PlanError(f"stream: window and every must be at least 1 frame, got {window} and {every}")
    frames = len(clip[inputs(plan, clip)[0]])
    for end in range(min(every, frames), frames + 1, every):
        part = {name: values[max(0, end - window) : end] for name, values in clip.items() if name != "label"}
        yield replace(answer(model, card, plan, part), frame=end)


def latency(model: nn.Module, card: Card | Pack, plan: Plan, clips: Sequence[Sample]) -> pd.DataFrame:
    """How long a model takes for single clips, from arrays to the answer. Raises PlanError without clips."""
    frames = statistics.median([len(clip[inputs(plan, clip)[0]]) for clip in clips] or [0])
    device = next(model.parameters()).device
    return measure_latency(lambda clip: answer(model, card, plan, clip), clips, device, f"{frames:g} frames (median)")
