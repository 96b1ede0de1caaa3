"""How signs are trained: batches, loss, metrics, decoding.

B clips, T frames, P = 78 points, D = 2048 numbers a frame, G glosses, C categories.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from nbtools.data import Card, Draws, Pack
from nbtools.tasks.common import metrics as measures
from nbtools.tasks.sign.keypoints import Keypoints, prepared
from nbtools.tasks.sign.networks import LABELS, POSITIONS, build
from nbtools.tasks.sign.plans import Plan, network_of
from nbtools.train import Batch, Pair

Outputs = tuple[Tensor, Tensor]  # logits of gloss (B, G) and of category (B, C)

BEST = "gloss_accuracy"


def model(card: Card | Pack, plan: Plan) -> nn.Module:
    """The network for a data set. Raises PlanError where the data lacks what it reads."""
    return build(card.card if isinstance(card, Pack) else card, plan)


def batch(raw: Batch, plan: Plan, draws: Draws | None) -> Batch:
    """What the network reads: x (B, T, 156), mask (B, T, P) and x_length, or features (B, T, D) and features_length;
    label (B, 2), gloss and category, where there is one. Keypoints are augmented given draws.

    mask says which points are seen; without one, those that are not 0. The others are 0 in x, whatever the clip holds
    there.
    """
    kept = {name: raw[name] for name in ("label", "id") if name in raw}
    if network_of(plan, raw) == "gru":
        return {**kept, "features": padded(raw["features"], plan.bucket), "features_length": raw["features_length"]}
    points = raw["x"].unflatten(2, (-1, 2))
    seen = raw["mask"].bool() if "mask" in raw else (points != 0).any(3)
    points, seen, lengths = prepared(Keypoints(points, seen, raw["x_length"]), plan, draws)
    most = max(points.shape[1], POSITIONS)
    x, mask = (padded(t, plan.bucket, most) for t in (points.flatten(2), seen))
    return {**kept, "x": x, "mask": mask, "x_length": lengths}


def padded(x: Tensor, bucket: int, most: int | None = None) -> Tensor:
    """(B, T, D) with T padded to a multiple of the bucket, but not beyond `most`."""
    frames = -(-x.shape[1] // bucket) * bucket
    more = (frames if most is None else min(frames, most)) - x.shape[1]
    return F.pad(x, (0, 0, 0, more)) if more > 0 else x


def loss(model: Callable[[Batch], Outputs], batch: Batch, plan: Plan) -> tuple[Tensor, int]:
    """Sum of alpha · CE(gloss) + beta · CE(category) over the clips, and how many they are.

    Classes have weights where the model brings them. Evaluation passes the logits alone: its loss is unweighted, and so
    comparable.
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
