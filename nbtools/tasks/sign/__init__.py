"""Sign language: from clips of keypoints or features to a gloss and its category, by a Transformer or a GRU."""

from nbtools.tasks.sign.data import pack, pack_options, read, survey, validate
from nbtools.tasks.sign.demo import demo
from nbtools.tasks.sign.features import features
from nbtools.tasks.sign.task import (
    BASELINE,
    BEST,
    PLAN,
    PRESETS,
    Plan,
    batch,
    decode,
    loss,
    metrics,
    model,
    part,
    suggest,
    tensors,
    with_network,
)
from nbtools.tasks.sign.visualize import preview, show, text_of

SMOKE = {"features": True}  # options of `demo` for the smoke test: clips that both networks read
