"""Segmentation: the class of every pixel, by BiSeNetV2 with a loss that knows hard pixels and boundaries."""

from nbtools.tasks.segment.costs import costs, latency
from nbtools.tasks.segment.garments.demo import demo
from nbtools.tasks.segment.inference import eval_cost
from nbtools.tasks.segment.looking.analysis import by_class, confusion, image_scores, worst
from nbtools.tasks.segment.looking.baseline import position_prior, prior
from nbtools.tasks.segment.looking.charts import balance, confused
from nbtools.tasks.segment.looking.legend import classes_legend
from nbtools.tasks.segment.looking.overlay import overlay
from nbtools.tasks.segment.looking.show import preview, show, text_of, training_views
from nbtools.tasks.segment.masks.answers import save
from nbtools.tasks.segment.masks.data import pack
from nbtools.tasks.segment.masks.distance import distance_map
from nbtools.tasks.segment.masks.pairs import read
from nbtools.tasks.segment.masks.validate import validate
from nbtools.tasks.segment.plans import BASELINE, PLAN, Plan, network_of, suggest, with_network
from nbtools.tasks.segment.task import BEST, batch, decode, groups, infer, loss, metrics, model

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
    "text_of",
    "training_views",
    "validate",
    "with_network",
    "worst",
]
