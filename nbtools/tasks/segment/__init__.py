"""Segmentation: the class of every pixel, by BiSeNetV2 with a loss that weights hard pixels and boundaries."""

from nbtools.tasks.segment.analysis import by_class, confusion, image_scores, position_prior, prior, worst
from nbtools.tasks.segment.data import pack, read, save, survey, validate
from nbtools.tasks.segment.demo import demo
from nbtools.tasks.segment.inference import eval_cost
from nbtools.tasks.segment.plans import BASELINE, PLAN, Plan, network_of, suggest, with_network
from nbtools.tasks.segment.scores import distance_map
from nbtools.tasks.segment.task import BEST, batch, decode, groups, infer, loss, metrics, model
from nbtools.tasks.segment.timing import costs, latency
from nbtools.tasks.segment.visualize import (
    balance,
    classes_legend,
    confused,
    overlay,
    preview,
    show,
    text_of,
    training_views,
)

__all__ = [
    "BASELINE",
    "BEST",
    "PLAN",
    "Plan",
    "balance",
    "batch",
    "by_class",
    "classes_legend",
    "confused",
    "confusion",
    "costs",
    "decode",
    "demo",
    "distance_map",
    "eval_cost",
    "groups",
    "image_scores",
    "infer",
    "latency",
    "loss",
    "metrics",
    "model",
    "network_of",
    "overlay",
    "pack",
    "position_prior",
    "preview",
    "prior",
    "read",
    "save",
    "show",
    "suggest",
    "survey",
    "text_of",
    "training_views",
    "validate",
    "with_network",
    "worst",
]
