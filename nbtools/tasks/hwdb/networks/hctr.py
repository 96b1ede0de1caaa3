"""The reference's network for handwritten Chinese lines: convolutions and CTC, no recurrent layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nbtools.tasks.hwdb.networks.masked import Batch, ConvNorm, Stage

STAGES = ((128, 2, 0.3), (256, 4, 0.3), (512, 5, 0.3), (512, 1, 0.9))  # channels, blocks, dropout


class Hctr(nn.Module):
    """A stem and four stages of squeeze-and-excitation blocks, each halved in both directions; 53,104,143 parameters
    for 7,374 classes on lines 128 pixels high, of which the sizes below are:

    | layer   | channels | size in   | parameters |
    | ------- | -------- | --------- | ---------- |
    | stem    | 64       | 128 × W   |     37,696 |
    | stage 1 | 128      | 64 × W/2  |    677,376 |
    | stage 2 | 256      | 32 × W/4  |  5,084,160 |
    | stage 3 | 512      | 16 × W/8  | 25,079,808 |
    | stage 4 | 512      | 8 × W/16  |  7,113,728 |
    | linear  | 7,375    | 4 × W/32  | 15,111,375 |

    Pools round up, so that the last odd column is read: T = ⌈W / 32⌉. dropout: before the linear layer. width scales
    the channels. Source: Intel's handwritten-chinese-ocr-samples, whose convolutions have biases as well, which the
    batch norm after them takes away again.
    """

    stride = 32
    least_height = 64  # in lower lines a glyph, about as wide as high, has one step, too few for CTC
    dropout = STAGES[-1][2]

    def __init__(self, height: int, classes: int, dropout: float | None = None, width: float = 1.0):
        super().__init__()
        inputs = round(64 * width)
        shares = [share for _, _, share in STAGES[:-1]] + [self.dropout if dropout is None else dropout]
        self.stages = nn.ModuleList([Stage([ConvNorm(1, inputs), ConvNorm(inputs, inputs)], (2, 2))])
        for (channels, blocks, _), share in zip(STAGES, shares, strict=True):
            outputs = round(channels * width)
            parts = [Block(inputs if k == 0 else outputs, outputs) for k in range(blocks)]
            self.stages.append(Stage([*parts, ConvNorm(outputs, outputs)], (2, 2), share))
            inputs = outputs
        self.linear = nn.Linear(inputs * math.ceil(height / 32), 1 + classes)
        self.recompute = False

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x, lengths = batch["image"], batch["image_length"]
        for stage in self.stages:
            x, lengths = stage(x, lengths, self.recompute and self.training)
        return self.linear(x.flatten(1, 2).permute(2, 0, 1)), lengths  # (B, C, H, T) → (T, B, C · H)


class Block(nn.Module):
    """Two convolutions and squeeze-and-excitation around a shortcut; a 1 × 1 convolution where the channels change."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.first = ConvNorm(inputs, outputs)
        self.second = ConvNorm(outputs, outputs, relu=False)
        self.excite = Excite(outputs)
        self.shortcut = ConvNorm(inputs, outputs, 1, relu=False) if inputs != outputs else None
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, blank: Tensor) -> Tensor:
        y = self.excite(self.second(self.first(x, blank), blank), blank)
        y = y + (x if self.shortcut is None else self.shortcut(x, blank))
        return self.dropout(y.relu_())


class Excite(nn.Module):
    """Scale channels by what a line holds on the whole (Hu et al. 2017, arXiv 1709.01507), over its own columns."""

    def __init__(self, width: int, reduction: int = 16):
        super().__init__()
        narrow = max(width // reduction, 1)
        self.gate = nn.Sequential(
            nn.Linear(width, narrow, bias=False),
            nn.ReLU(inplace=True),
            nn.Linear(narrow, width, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor, blank: Tensor) -> Tensor:
        pixels = x.shape[2] * (~blank).sum(3).view(-1, 1)
        mean = x.sum((2, 3), dtype=torch.float32) / pixels  # (B, C); a sum in 16 bits would lose digits
        return x * self.gate(mean.to(x.dtype))[..., None, None]
