"""Segmentation: the class of every pixel, by BiSeNetV2 with a loss that emphasises hard pixels and boundaries."""

from nbtools.tasks.segment.data import distance_map, pack, pack_options, read, validate
from nbtools.tasks.segment.demo import demo
from nbtools.tasks.segment.inference import decode, infer, metrics, tensors
from nbtools.tasks.segment.losses import loss
from nbtools.tasks.segment.networks import groups, model
from nbtools.tasks.segment.task import BASELINE, BEST, PLAN, PRESETS, Plan, batch, suggest, with_network
from nbtools.tasks.segment.visualize import preview, save, show
