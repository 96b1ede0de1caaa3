"""Segmentation: the class of every pixel, by BiSeNetV2 with a loss that emphasises hard pixels and boundaries."""

from nbtools.tasks.segment.data import distance_map, pack, pack_options, read, survey, validate
from nbtools.tasks.segment.demo import demo
from nbtools.tasks.segment.task import (
    BASELINE,
    BEST,
    PLAN,
    PRESETS,
    Plan,
    batch,
    decode,
    groups,
    infer,
    loss,
    metrics,
    model,
    suggest,
    tensors,
    with_network,
)
from nbtools.tasks.segment.visualize import preview, save, show
