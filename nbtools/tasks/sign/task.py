"""How signs are trained: batches, loss, metrics, decoding.

B clips, T frames, P = 78 points, D numbers a frame, G glosses, C categories.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from nbtools.data import Card, Draws, Pack
from nbtools.tasks.common import metrics as measures
from nbtools.tasks.sign import augment
from nbtools.tasks.sign.landmarks import Keypoints, about_wrists, body
from nbtools.tasks.sign.networks import HEADS, built
from nbtools.tasks.sign.networks.transformer import POSITIONS
from nbtools.tasks.sign.plans import Plan, network_of
from nbtools.train import Pair

Batch = dict[str, Tensor]
Outputs = tuple[Tensor, Tensor]

BEST = "gloss_accuracy"


def model(card: Card | Pack, plan: Plan) -> nn.Module:
    """The network for a data set. Raises PlanError where the data lacks what it reads."""
    return built(card.card if isinstance(card, Pack) else card, plan)


def batch(raw: Batch, plan: Plan, draws: Draws | None) -> Batch:
    """What the network reads: x (B, T, 156), mask (B, T, P) and x_length, or features (B, T, D) and features_length;
    label (B, 2), gloss and category, where there is one. Keypoints are augmented given draws.

    mask says which points are seen; without one those are that are not 0. The others are 0 in x, so that the network
    knows of them only that they are missing.
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


def prepared(clips: Keypoints, plan: Plan, draws: Draws | None) -> Keypoints:
    """Clips as the plan wants them, augmented given draws; 0 where a point is not seen, whatever stood there."""
    if draws is not None and (plan.time_warp or plan.time_crop):
        clips = augment.retimed(clips, draws, plan.time_warp, plan.time_crop, longest=POSITIONS)
    if draws is not None and plan.mirror:
        clips = augment.mirrored(clips, draws.chance(plan.mirror))
    clips = clips._replace(points=placed(clips, plan, draws))
    if draws is not None and (plan.drop_hand or plan.drop_points):
        clips = augment.hidden(clips, draws, plan.drop_hand, plan.drop_points)
    return clips._replace(points=clips.points.where(clips.seen[..., None], 0.0))


def placed(clips: Keypoints, plan: Plan, draws: Draws | None) -> Tensor:
    """Points (B, T, P, 2) in the coordinates of the plan, moved about the body given draws."""
    move = plan.move if draws is not None else 0.0
    if plan.normalise == "none" and not move:
        return clips.points
    centre, width = body(clips.points, clips.seen)
    points = (clips.points - centre) / width
    if draws is not None and move:
        points = augment.moved(points, draws, move)
    if plan.normalise == "none":
        return points * width + centre
    return about_wrists(points) if plan.normalise == "hands" else points


def padded(x: Tensor, bucket: int, most: int | None = None) -> Tensor:
    """(B, T, D) with T brought to a multiple of the bucket, but not beyond `most`."""
    frames = -(-x.shape[1] // bucket) * bucket
    more = (frames if most is None else min(frames, most)) - x.shape[1]
    return F.pad(x, (0, 0, 0, more)) if more > 0 else x


def loss(model: Callable[[Batch], Outputs], batch: Batch, plan: Plan) -> tuple[Tensor, int]:
    """Sum of alpha · CE(gloss) + beta · CE(category) over the clips, and how many they are.

    Classes have weights where the model brings them. Evaluation asks with the logits alone: its loss is unweighted, and
    so comparable.
    """
    labels, outputs = batch["label"], model(batch)

    def entropy(place: int) -> Tensor:
        weights = getattr(model, f"{HEADS[place]}_weights", None)
        smoothing = plan.label_smoothing
        logits = outputs[place].float()
        return F.cross_entropy(logits, labels[:, place], weights, reduction="sum", label_smoothing=smoothing)

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
