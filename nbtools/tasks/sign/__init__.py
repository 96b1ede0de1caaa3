"""Sign language: clips of keypoints or features to a gloss and its category, by a Transformer or a GRU."""

from nbtools.figures import confusion_figure as confused
from nbtools.tasks.sign.data import pack, pack_options, read, survey, validate
from nbtools.tasks.sign.demo import demo
from nbtools.tasks.sign.features import features
from nbtools.tasks.sign.networks import model
from nbtools.tasks.sign.plans import BASELINE, PLAN, PRESETS, Plan, suggest, with_gru, with_network
from nbtools.tasks.sign.task import BEST, MEANINGS, batch, decode, latency, loss, metrics, part, stream, tensors
from nbtools.tasks.sign.visualize import (
    animate,
    by_class,
    categories_of,
    classes,
    confusion,
    grouped,
    lengths,
    preview,
    show,
    text_of,
)

SMOKE = {"features": True}
"""Options of `demo` for the smoke test: clips that both networks read."""

__all__ = [
    "BASELINE",
    "BEST",
    "MEANINGS",
    "PLAN",
    "PRESETS",
    "SMOKE",
    "Plan",
    "animate",
    "batch",
    "by_class",
    "categories_of",
    "classes",
    "confused",
    "confusion",
    "decode",
    "demo",
    "features",
    "grouped",
    "latency",
    "lengths",
    "loss",
    "metrics",
    "model",
    "pack",
    "pack_options",
    "part",
    "preview",
    "read",
    "show",
    "stream",
    "suggest",
    "survey",
    "tensors",
    "text_of",
    "validate",
    "with_gru",
    "with_network",
]
