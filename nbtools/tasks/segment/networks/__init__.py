"""The network of a plan for a data set, and its parameters as the optimizer is to treat them."""

from __future__ import annotations

from typing import Any

from torch import nn

from nbtools.data import Card
from nbtools.tasks.segment.networks.bisenetv2 import PUBLISHED, SLIM, BiSeNetV2
from nbtools.tasks.segment.plans import Plan, network_of

SIZES = {"bisenetv2": PUBLISHED, "slim": SLIM}
HEADS = ("head.", "auxiliary.")  # begin the names of the heads' parameters


def built(card: Card, plan: Plan) -> BiSeNetV2:
    """The network that the plan asks for, with as many channels as the images and as many classes as the card has."""
    channels = card.columns["image"].shape[-1]
    network = BiSeNetV2(len(card.classes), channels, SIZES[network_of(plan)], plan.dropout)
    network.recompute = plan.checkpoint_activations
    return network


def groups(model: nn.Module, plan: Plan) -> list[dict[str, Any]]:
    """At most four parameter groups: the heads learn `head_lr` times as fast; norms and biases do not decay."""
    found: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        found.setdefault((name.startswith(HEADS), parameter.dim() > 1), []).append(parameter)
    return [
        {"params": parameters, "lr_scale": plan.head_lr if head else 1.0, "decays": decays}
        for (head, decays), parameters in found.items()
    ]
