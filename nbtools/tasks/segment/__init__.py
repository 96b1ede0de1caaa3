"""Segmentation: the class of every pixel, by BiSeNetV2 with a loss that weights hard pixels and boundaries."""

from nbtools.tasks.segment.data import distance_map, pack, pack_options, read, validate
from nbtools.tasks.segment.demo import demo
from nbtools.tasks.segment.inference import decode, infer, metrics, tensors
from nbtools.tasks.segment.losses import loss
from nbtools.tasks.segment.networks import groups, model
from nbtools.tasks.segment.task import BASELINE, BEST, PLAN, PRESETS, Plan, batch, suggest, with_network
from nbtools.tasks.segment.visualize import preview, save, show, training_views

__all__ = [
    "BASELINE",
    "BEST",
    "PLAN",
    "PRESETS",
    "Plan",
    "batch",
    "decode",
    "demo",
    "distance_map",
    "groups",
    "infer",
    "loss",
    "metrics",
    "model",
    "pack",
    "pack_options",
    "preview",
    "read",
    "save",
    "show",
    "suggest",
    "tensors",
    "training_views",
    "validate",
    "with_network",
]
