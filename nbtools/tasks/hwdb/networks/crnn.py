"""The convolutional recurrent network (Shi et al. 2015, arXiv 1507.05717), with batch norm throughout."""

from __future__ import annotations

import math
from itertools import islice, pairwise

import torch
from torch import Tensor, nn

from nbtools.tasks.hwdb.networks.masked import Batch, ConvNorm, Fold, Pair, Stage, beyond

STAGES: tuple[tuple[tuple[int, ...], Pair], ...] = (
    ((64,), (2, 2)),
    ((128,), (2, 2)),
    ((256, 256), (2, 1)),
    ((512, 512), (2, 1)),
)
"""Channels of the convolutions, and the pool after them (down, along)."""


class Crnn(nn.Module):
    """Seven convolutions, then two bidirectional LSTMs of 256 units; T = ⌈W / 4⌉."""

    stride = 4
    least_height = 16
    dropout = 0.3

    def __init__(self, height: int, classes: int, dropout: float | None = None, width: float = 1.0):
        super().__init__()
        sizes = [1, *(round(c * width) for channels, _ in STAGES for c in channels)]
        convolutions = iter([ConvNorm(a, b) for a, b in pairwise(sizes)])
        self.stages = nn.ModuleList([Stage(islice(convolutions, len(channels)), pool) for channels, pool in STAGES])
        inputs = sizes[-1]
        self.fold = Fold(inputs, inputs, math.ceil(height / 16))
        units = round(256 * width)
        self.recurrent = nn.ModuleList([BothWays(inputs, units), BothWays(2 * units, units)])
        self.drop = nn.Dropout(self.dropout if dropout is None else dropout)
        self.linear = nn.Linear(2 * units, 1 + classes)
        self.recompute = False

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x, lengths = batch["image"], batch["image_length"]
        for stage in self.stages:
            x, lengths = stage(x, lengths, self.recompute and self.training)
        x = self.fold(x, beyond(lengths, x.shape[3])).squeeze(2).permute(2, 0, 1)  # (T, B, C)
        for layer in self.recurrent:
            x = layer(self.drop(x), lengths)
        return self.linear(self.drop(x)), lengths


class BothWays(nn.Module):
    """A bidirectional LSTM over padded lines (T, B, C) → (T, B, 2 · units), exact within each line's own steps.

    The way back starts at a line's own end: each line is turned round within its length, read forwards, and turned
    back, so that in both directions the padding comes last and is seen by nobody. Two plain LSTMs do that on cuDNN's
    fast path, which packed sequences leave.
    """

    def __init__(self, inputs: int, units: int):
        super().__init__()
        self.forth = nn.LSTM(inputs, units)
        self.back = nn.LSTM(inputs, units)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        back = turned(self.back(turned(x, lengths))[0], lengths)
        return torch.cat([self.forth(x)[0], back], 2)


def turned(x: Tensor, lengths: Tensor) -> Tensor:
    """(T, B, C), each sample's own steps in reverse; padding stays where it is."""
    steps = torch.arange(len(x), device=x.device)[:, None]
    places = torch.where(steps < lengths, lengths - 1 - steps, steps)  # (T, B)
    return x.gather(0, places[..., None].expand_as(x))
