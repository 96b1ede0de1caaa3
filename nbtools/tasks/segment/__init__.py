"""Segmentation: the class of every pixel, by BiSeNetV2 with a loss that weights hard pixels and boundaries."""

from nbtools.errors import successors
from nbtools.tasks.segment.augment import batch
from nbtools.tasks.segment.data import pack, pack_options, read, save, survey, validate
from nbtools.tasks.segment.demo import demo
from nbtools.tasks.segment.inference import costs, decode, infer, latency, tensors
from nbtools.tasks.segment.losses import loss
from nbtools.tasks.segment.networks import groups, model
from nbtools.tasks.segment.plans import BASELINE, BEST, PLAN, PRESETS, Plan, suggest, with_network
from nbtools.tasks.segment.scores import (
    MEANINGS,
    by_class,
    confusion,
    distance_map,
    image_scores,
    metrics,
    position_prior,
    worst,
)
from nbtools.tasks.segment.visualize import balance, confused, preview, show, training_views

__all__ = [
    "BASELINE",
    "BEST",
    "MEANINGS",
    "PLAN",
    "PRESETS",
    "Plan",
    "balance",
    "batch",
    "by_class",
    "confused",
    "confusion",
    "costs",
    "decode",
    "demo",
    "distance_map",
    "groups",
    "image_scores",
    "infer",
    "latency",
    "loss",
    "metrics",
    "model",
    "pack",
    "pack_options",
    "position_prior",
    "preview",
    "read",
    "save",
    "show",
    "suggest",
    "survey",
    "tensors",
    "training_views",
    "validate",
    "with_network",
    "worst",
]

__getattr__ = successors(
    __name__,
    {
        "classes_legend": "segment.show has the legend of its classes",
        "eval_cost": "segment.costs has it in the column pixels",
        "network_of": "plan.net",
        "overlay": "segment.show(pack, ids)",
        "prior": "segment.position_prior scores it",
        "text_of": "the classes are pack.classes",
    },
)
