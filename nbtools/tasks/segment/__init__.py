"""Segmentation: the class of every pixel, by BiSeNetV2 with a loss that weights hard pixels and boundaries."""

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
