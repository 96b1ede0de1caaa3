"""The network for small sets and CPUs. B samples, H × W pixels, T = ⌈W / 4⌉ time steps."""

from __future__ import annotations

import math

from torch import Tensor, nn

from nbtools.tasks.hwdb.networks.masked import Batch, Context, ConvNorm, Fold, Residual, beyond, run, steps_of


class Slim(nn.Module):
    """For small sets and CPUs: strides in place of full-resolution layers, height folded into channels, context along
    time by convolutions.

    A step of time sees about 100 pixels of the line, its glyph and the neighbours. `width` scales the channels.
    """

    stride = 4
    least_height = 16
    dropout = 0.2

    def __init__(self, height: int, classes: int, dropout: float | None = None, width: float = 1.0):
        super().__init__()
        a, b, c, d = (max(8, 8 * round(width * n / 8)) for n in (16, 32, 64, 192))
        self.stem = nn.ModuleList([ConvNorm(1, a, 5, 2)])
        self.middle = nn.ModuleList(
            [ConvNorm(a, b, 3, 2), Residual(b), ConvNorm(b, c, 3, (2, 1)), Residual(c), Residual(c)]
        )
        self.head = nn.ModuleList([Fold(c, d, math.ceil(height / 8)), Context(d, 3), Context(d, 9, groups=d)])
        self.drop = nn.Dropout(self.dropout if dropout is None else dropout)
        self.linear = nn.Linear(d, 1 + classes)
        self.recompute = False

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x, lengths = batch["image"], batch["image_length"]
        half, steps = steps_of(lengths, 2), steps_of(lengths, 4)
        recompute = self.recompute and self.training
        x = run(self.stem, x, beyond(half, math.ceil(x.shape[3] / 2)), recompute)
        x = run([*self.middle, *self.head], x, beyond(steps, math.ceil(x.shape[3] / 2)), recompute)
        return self.linear(self.drop(x.squeeze(2).permute(2, 0, 1))), steps
