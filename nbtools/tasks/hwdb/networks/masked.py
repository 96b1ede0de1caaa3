"""Units of networks that see a line and not its padding: each blanks the columns beyond a line's own length, so that
they hold what lies outside of a picture, zeros. Convolutions, pools and means over a line in a padded batch are then
those over the line alone.

Blanking writes into a batch norm's output, which no backward pass keeps: it costs no activation memory.

B samples, C channels, H × W pixels.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbtools.train import again

Batch = dict[str, Tensor]
Pair = tuple[int, int]


def steps_of(columns: Tensor, stride: int) -> Tensor:
    """What is left of so many columns, or rows, after strides and pools that round up."""
    return (columns + stride - 1) // stride


def beyond(lengths: Tensor, width: int) -> Tensor:
    """(B, 1, 1, W) bool: True in the columns beyond each line's own."""
    return (torch.arange(width, device=lengths.device) >= lengths[:, None])[:, None, None]


class ConvNorm(nn.Module):
    """Convolution, batch norm, blanking, ReLU. Odd kernels keep the size, strides divide it, rounding up; `blank` has
    the width of the result. The convolution has no bias: batch norm has one."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int | Pair = 1, relu: bool = True):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.relu = relu

    def forward(self, x: Tensor, blank: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).masked_fill_(blank, 0)
        return x.relu_() if self.relu else x


class Residual(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, width: int):
        super().__init__()
        self.first = ConvNorm(width, width)
        self.second = ConvNorm(width, width, relu=False)

    def forward(self, x: Tensor, blank: Tensor) -> Tensor:
        return (x + self.second(self.first(x, blank), blank)).relu_()


class Context(nn.Module):
    """A residual along time, over (B, C, 1, T): each channel looks `kernel` steps around, then the channels mix."""

    def __init__(self, width: int, kernel: int, groups: int = 1):
        super().__init__()
        self.look = nn.Conv2d(width, width, (1, kernel), padding=(0, kernel // 2), groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.mix = ConvNorm(width, width, 1, relu=False)

    def forward(self, x: Tensor, blank: Tensor) -> Tensor:
        return (x + self.mix(self.norm(self.look(x)).relu_(), blank)).relu_()


class Fold(nn.Module):
    """All rows of a column into one vector: (B, C, H, W) → (B, C', 1, W)."""

    def __init__(self, inputs: int, outputs: int, height: int):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, (height, 1), bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor, blank: Tensor) -> Tensor:
        return self.norm(self.conv(x)).masked_fill_(blank, 0).relu_()


class Stage(nn.Module):
    """Parts of one size, then a pool (down, along) that rounds up, then dropout; returns the lines' new lengths too."""

    def __init__(self, parts: Iterable[nn.Module], pool: Pair, dropout: float = 0.0):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.pool = pool
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, lengths: Tensor, recompute: bool) -> tuple[Tensor, Tensor]:
        x = run(self.parts, x, beyond(lengths, x.shape[3]), recompute)
        return self.dropout(F.max_pool2d(x, self.pool, ceil_mode=True)), steps_of(lengths, self.pool[1])


def run(parts: Iterable[nn.Module], x: Tensor, blank: Tensor, recompute: bool) -> Tensor:
    """Parts of one width in turn; recompute keeps only what lies between them and computes the rest again in
    backward."""
    for part in parts:
        x = again(part, x, blank) if recompute else part(x, blank)
    return x
