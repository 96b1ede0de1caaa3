"""The network of a plan for a data set, and what its classes weigh in training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nbtools.data import Card
from nbtools.errors import PlanError
from nbtools.tasks.sign.networks.gru import Gru
from nbtools.tasks.sign.networks.transformer import Transformer
from nbtools.tasks.sign.plans import Plan, network_of

COLUMN = {"transformer": "x", "gru": "features"}
HEADS = ("gloss", "category")  # the columns of a label
POWER = {"balanced": 1.0, "sqrt": 0.5}


def built(card: Card, plan: Plan) -> Transformer | Gru:
    """The network that the plan asks for. Raises PlanError where the data lacks what it reads."""
    name = network_of(plan, card.columns)
    column = card.columns.get(COLUMN[name])
    if column is None:
        raise PlanError(
            f'Plan.network = "{name}" reads {COLUMN[name]!r}, and this data has {", ".join(sorted(card.columns))}; '
            "choose another network, or pack clips that hold it (kp_key, feature_key)"
        )
    sizes = column.shape[-1], len(card.classes), len(card.options["categories"])
    if name == "gru":
        network: Transformer | Gru = Gru(*sizes, dropout=plan.dropout)
    else:
        network = Transformer(*sizes, dropout=plan.dropout, windows=plan.long_clips == "windows")
        network.recompute = plan.checkpoint_activations
    for head in HEADS:
        network.register_buffer(f"{head}_weights", class_weights(card, plan.class_weights, head), persistent=False)
    return network


def class_weights(card: Card, kind: str, head: str) -> Tensor | None:
    """(classes,) float32, 1 in the mean over the training clips, so that the loss keeps its size; None: all alike.

    A class without a training clip weighs nothing. Raises PlanError where the data does not say how often each class
    comes.
    """
    if kind == "none":
        return None
    counts: Sequence[int] | None = card.counts.get(head)
    if counts is None:
        raise PlanError(
            f'Plan.class_weights = "{kind}" needs the number of training clips of each {head}, and this pack does not '
            'say it; pack again, or choose "none"'
        )
    count = torch.tensor(counts, dtype=torch.float32)
    weights = torch.where(count > 0, count.clamp(min=1) ** -POWER[kind], 0)
    return weights * count.sum() / (weights * count).sum()
