"""Sign language: clips of keypoints or features to a gloss and its category, by a Transformer or a GRU."""

from nbtools.tasks.sign.acting.demo import demo
from nbtools.tasks.sign.clips.data import pack, read
from nbtools.tasks.sign.clips.validate import validate
from nbtools.tasks.sign.inception.extraction import features
from nbtools.tasks.sign.looking.analysis import by_class, categories_of, confusion, grouped
from nbtools.tasks.sign.looking.charts import classes, confused, lengths
from nbtools.tasks.sign.looking.show import animate, preview, show, text_of
from nbtools.tasks.sign.plans import BASELINE, PLAN, Plan, suggest, with_gru, with_network
from nbtools.tasks.sign.streaming import latency, stream
from nbtools.tasks.sign.task import BEST, batch, decode, loss, metrics, model

SMOKE = {"features": True}
"""Options of `demo` for the smoke test: clips that both networks read."""

__all__ = [
    "BASELINE",
    "BEST",
    "PLAN",
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
    "preview",
    "read",
    "show",
    "stream",
    "suggest",
    "text_of",
    "validate",
    "with_gru",
    "with_network",
]
