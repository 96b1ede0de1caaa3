"""The three networks, of B samples, H × W pixels, N characters, T time steps. `guide` and `small`: image (B, 1, H, W) →
logits (B, N, classes); `ctc`: → logits (T, B, 1 + classes), blank 0, T = ⌈W / 4⌉, and each line's own steps (B,)."""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbtools.data import Card, Pack
from nbtools.train import Batch, again

STRIDE = 4  # input columns a time step of `Ctc`


class Stages(nn.ModuleList):
    """Parts in turn; recompute keeps only what lies between them, and computes the rest again in backward."""

    recompute = False

    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x = again(part, x) if self.recompute and self.training else part(x)
        return x


class Residual(nn.Module):
    """Layers around a shortcut."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def conv(a: int, b: int, kernel: Any = 3, stride: Any = 1, padding: Any = None, bias: bool = False) -> nn.Sequential:
    """Return convolution, batch norm, ReLU; odd kernels keep the size, strides divide it, rounding up."""
    layer = nn.Conv2d(a, b, kernel, stride, kernel // 2 if padding is None else padding, bias=bias)
    return nn.Sequential(layer, nn.BatchNorm2d(b), nn.ReLU(inplace=True))


def residual(width: int) -> Residual:
    return Residual(conv(width, width), nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width))


def residual1d(width: int, kernel: int, groups: int = 1) -> Residual:
    """Return a convolution along time for context, then a mix of channels; groups = width is the cheap kind."""
    context = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=groups, bias=False)
    mix = nn.Conv1d(width, width, 1, bias=False)
    return Residual(context, nn.BatchNorm1d(width), nn.ReLU(inplace=True), mix, nn.BatchNorm1d(width))


def columns(height: int, c: int, d: int, stride: Any, kernel: int, dropout: float) -> Stages:
    """Return early downsampling, which ends with the height folded into channels: (B, 1, H, W) → (B, d, 1, columns)."""
    return Stages(
        [
            nn.Sequential(conv(1, 16, 5, 2), conv(16, 32, 3, 2)),
            residual(32),
            nn.Sequential(conv(32, c, 3, stride), residual(c)),
            nn.Sequential(residual(c), nn.Dropout2d(dropout)),
            conv(c, d, (math.ceil(height / 8), kernel), padding=(0, kernel // 2)),
        ]
    )


class Guide(nn.Module):
    """The guide's network: 19.07 M parameters for 4 characters of 36 on 60 × 160."""

    def __init__(self, card: Card | Pack):
        super().__init__()
        (height, width), self.length = card.options["size"], card.options["length"]
        widths = (1, 32), (32, 64, 64), (64, 128, 128, 128, 128)  # with three of 128 18.92 M, not the stated 19.07
        convs = [[conv(a, b, bias=True) for a, b in pairwise(some)] for some in widths]
        self.stages = Stages([nn.Sequential(*some, nn.MaxPool2d(2)) for some in convs])
        flat = nn.Flatten(), nn.Linear(128 * (height // 8) * (width // 8), 1024)
        last = nn.Linear(1024, self.length * len(card.classes))
        self.head = nn.Sequential(*flat, nn.Dropout(0.5), nn.ReLU(inplace=True), last)

    def forward(self, batch: Batch) -> Tensor:
        return self.head(self.stages(batch["image"])).unflatten(1, (self.length, -1))


class Small(nn.Module):
    """For CPUs and small sets: strides, and for every character a softmax over the columns, which locates it; 0.47 M
    parameters for 4 of 10 on 60 × 160. After two epochs of 4,800 captchas it read 96 % of new ones; with a dense layer,
    which must see every digit in every place, 1.6 %."""

    def __init__(self, card: Card | Pack):
        super().__init__()
        height, width = card.options["size"]
        self.stages = columns(height, 64, 128, 2, 3, 0.0)
        self.places = nn.Parameter(torch.randn(128, math.ceil(width / 8)) * 0.1)  # the first column is not the last
        mix = nn.Conv1d(128, 128, 5, padding=2, bias=False)
        self.mix = nn.Sequential(mix, nn.BatchNorm1d(128), nn.ReLU(inplace=True))
        self.attention = nn.Conv1d(128, card.options["length"], 1)
        self.dropout = nn.Dropout(0.1)
        self.classify = nn.Linear(128, len(card.classes))

    def forward(self, batch: Batch) -> Tensor:
        x = self.stages(batch["image"]).squeeze(2)  # (B, 128, columns)
        weights = self.attention(self.mix(x + self.places)).softmax(2)  # (B, N, columns)
        return self.classify(weights @ self.dropout(x).transpose(1, 2))


class Ctc(nn.Module):
    """Convolutions with early downsampling, and context along time; no recurrent layer. A step of time sees about 100
    pixels of the line: its glyph and the neighbours, whose size distinguishes o from 0."""

    def __init__(self, card: Card | Pack):
        super().__init__()
        self.stages, d = columns(card.options["height"], 72, 192, (2, 1), 1, 0.3), 192
        context = residual1d(d, 3), residual1d(d, 9, groups=d)
        self.head = nn.Sequential(*context, nn.Dropout(0.3), nn.Conv1d(d, 1 + len(card.classes), 1))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x = self.stages(batch["image"]).squeeze(2)  # (B, 192, T)
        return self.head(x).permute(2, 0, 1), (batch["image_length"] + STRIDE - 1) // STRIDE
