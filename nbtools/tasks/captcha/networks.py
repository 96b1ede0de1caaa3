"""The three networks. Each takes the whole batch: `guide` and `small` image (B, 1, H, W) → logits (B, N, classes);
`ctc` image (B, 1, H, W) → logits (T, B, 1 + classes), blank 0, T = ⌈W / 4⌉, and each line's own steps (B,).

B samples, H × W pixels, N characters, T time steps.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbtools.train import Batch, again

STRIDE = 4  # input columns a time step of `Ctc`


class ConvNorm(nn.Sequential):
    """Convolution, batch norm, ReLU; odd kernels keep the size, strides divide it, rounding up."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 3, stride: int | tuple[int, int] = 1, bias: bool = False
    ):
        conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=bias)
        super().__init__(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, width: int):
        super().__init__()
        self.first = ConvNorm(width, width)
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(self.first(x)))


class Residual1d(nn.Module):
    """The same along time: a convolution for context, then a mix of channels; groups = width is the cheap kind."""

    def __init__(self, width: int, kernel: int, groups: int = 1):
        super().__init__()
        context = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=groups, bias=False)
        mix = nn.Conv1d(width, width, 1, bias=False)
        self.body = nn.Sequential(context, nn.BatchNorm1d(width), nn.ReLU(inplace=True), mix, nn.BatchNorm1d(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class Guide(nn.Module):
    """The guide's network: 19.07 M parameters for 4 characters of 36 on 60 × 160."""

    recompute = False

    def __init__(self, size: tuple[int, int], length: int, classes: int):
        super().__init__()
        height, width = size
        self.length = length
        # four of 128 channels: with three the total is 18.92 M, not the 19.07 M stated
        self.stages = nn.ModuleList([stage(1, 32), stage(32, 64, 64), stage(64, 128, 128, 128, 128)])
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(128 * (height // 8) * (width // 8), 1024),
            nn.Dropout(0.5),
            nn.ReLU(inplace=True),
            nn.Linear(1024, length * classes),
        )

    def forward(self, batch: Batch) -> Tensor:
        x = run(self.stages, batch["image"], self.recompute and self.training)
        return self.head(x).unflatten(1, (self.length, -1))


def stage(*widths: int) -> nn.Sequential:
    convolutions = [ConvNorm(a, b, bias=True) for a, b in pairwise(widths)]
    return nn.Sequential(*convolutions, nn.MaxPool2d(2))


class Small(nn.Module):
    """For CPUs and small sets: strides in place of full-resolution layers, and for every character a softmax over the
    columns, which locates it; 0.47 M parameters for 4 of 10 on 60 × 160.

    A dense layer over all positions in its stead must see every digit in every place: trained on the same 4,800
    captchas for two epochs it read 1.6 % of new ones, this 96 %.
    """

    recompute = False

    def __init__(self, size: tuple[int, int], length: int, classes: int):
        super().__init__()
        height, width = (math.ceil(s / 8) for s in size)
        self.stages = nn.ModuleList(
            [
                nn.Sequential(ConvNorm(1, 16, 5, 2), ConvNorm(16, 32, 3, 2)),
                Residual(32),
                nn.Sequential(ConvNorm(32, 64, 3, 2), Residual(64)),
                Residual(64),
            ]
        )
        fold = nn.Conv2d(64, 128, (height, 3), padding=(0, 1), bias=False)
        self.fold = nn.Sequential(fold, nn.BatchNorm2d(128), nn.ReLU(inplace=True))
        self.places = nn.Parameter(torch.randn(128, width) * 0.1)  # which distinguishes the first column from the last
        mix = nn.Conv1d(128, 128, 5, padding=2, bias=False)
        self.mix = nn.Sequential(mix, nn.BatchNorm1d(128), nn.ReLU(inplace=True))
        self.attention = nn.Conv1d(128, length, 1)
        self.dropout = nn.Dropout(0.1)
        self.classify = nn.Linear(128, classes)

    def forward(self, batch: Batch) -> Tensor:
        x = self.fold(run(self.stages, batch["image"], self.recompute and self.training)).squeeze(2)
        weights = self.attention(self.mix(x + self.places)).softmax(2)  # x (B, 128, columns) → (B, N, columns)
        return self.classify(weights @ self.dropout(x).transpose(1, 2))


class Ctc(nn.Module):
    """Convolutions with early downsampling, height folded into channels, context along time; no recurrent layer.

    A step of time sees about 100 pixels of the line: its glyph and the neighbours, whose size distinguishes o from 0.
    """

    recompute = False

    def __init__(self, height: int, classes: int):
        super().__init__()
        a, b, c, d = 16, 32, 72, 192
        self.stages = nn.ModuleList(
            [
                nn.Sequential(ConvNorm(1, a, 5, 2), ConvNorm(a, b, 3, 2)),
                Residual(b),
                nn.Sequential(ConvNorm(b, c, 3, (2, 1)), Residual(c)),
                nn.Sequential(Residual(c), nn.Dropout2d(0.3)),
            ]
        )
        fold = nn.Conv2d(c, d, (math.ceil(height / 8), 1), bias=False)
        self.fold = nn.Sequential(fold, nn.BatchNorm2d(d), nn.ReLU(inplace=True))
        self.head = nn.Sequential(
            Residual1d(d, 3), Residual1d(d, 9, groups=d), nn.Dropout(0.3), nn.Conv1d(d, 1 + classes, 1)
        )

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x = self.fold(run(self.stages, batch["image"], self.recompute and self.training))  # (B, d, 1, T)
        steps = (batch["image_length"] + STRIDE - 1) // STRIDE
        return self.head(x.squeeze(2)).permute(2, 0, 1), steps


def run(stages: nn.ModuleList, x: Tensor, recompute: bool) -> Tensor:
    """The stages in turn; recompute keeps only what lies between them and computes the rest again in backward."""
    for part in stages:
        x = again(part, x) if recompute else part(x)
    return x
