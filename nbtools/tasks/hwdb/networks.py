"""The networks that read lines: hctr (the reference's) and slim (for CPUs and small sets).

Each maps a batch, image (B, 1, H, W) float ink and image_length (B,) columns, to logits (T, B, 1 + classes), blank 0,
and the number of time steps of each line (B,).

Padding does not change the output: after every batch norm the columns beyond a line's own length are set to zero,
which is what lies outside of a picture, so convolutions, pools and means over a line in a padded batch equal those
over the line alone. Zeroing writes into the output of batch norm, which no backward pass keeps: it costs no activation
memory. Only the batch statistics of batch norm count padding in training, a few percent in batches of like widths.

B samples, C channels, H × W pixels, T = ⌈W / stride⌉ time steps.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbtools.train import Batch, again

Size = tuple[int, int]  # (down, along) of a stride or a kernel
HCTR = ((128, 2, 0.3), (256, 4, 0.3), (512, 5, 0.3), (512, 1, 0.9))  # channels, blocks, dropout


class Hctr(nn.Module):
    """The reference's network for handwritten Chinese lines: a stem and four stages of squeeze-and-excitation blocks,
    each halved in both directions, no recurrent layer; 53.1 M parameters for 7,374 classes on lines 128 pixels high.

    T = ⌈W / 32⌉: pools round up. width scales the channels. Source: Intel's handwritten-chinese-ocr-samples.
    """

    least_height = 64  # in lower lines a character, about as wide as high, gets one step, too few for CTC
    recompute = False

    def __init__(self, height: int, classes: int, width: float = 1.0):
        super().__init__()
        inputs = round(64 * width)
        stages = [Stage([ConvNorm(1, inputs), ConvNorm(inputs, inputs)])]
        for channels, blocks, share in HCTR:
            outputs = round(channels * width)
            parts = [Block(outputs, inputs if k == 0 else outputs, excite=True) for k in range(blocks)]
            stages.append(Stage([*parts, ConvNorm(outputs, outputs)], share))
            inputs = outputs
        self.stages = nn.ModuleList(stages)
        self.linear = nn.Linear(inputs * math.ceil(height / 32), 1 + classes)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x, lengths = batch["image"], batch["image_length"]
        for stage in self.stages:
            x, lengths = stage(x, lengths, self.recompute and self.training)
        return self.linear(x.flatten(1, 2).permute(2, 0, 1)), lengths  # (B, C, H, T) → (T, B, C · H)


class Slim(nn.Module):
    """For small sets and CPUs: strides in place of full-resolution layers, the height folded into channels, context
    along time by convolutions; T = ⌈W / 4⌉. A step sees about 100 pixels: its character and the neighbours."""

    least_height = 16
    recompute = False

    def __init__(self, height: int, classes: int, width: float = 1.0):
        super().__init__()
        a, b, c, d = (max(8, 8 * round(width * n / 8)) for n in (16, 32, 64, 192))
        self.stem = nn.ModuleList([ConvNorm(1, a, 5, 2)])
        self.middle = nn.ModuleList([ConvNorm(a, b, 3, 2), Block(b), ConvNorm(b, c, 3, (2, 1)), Block(c), Block(c)])
        fold = ConvNorm(c, d, (math.ceil(height / 8), 1))  # all rows of a column into one vector
        self.head = nn.ModuleList([fold, Context(d, 3), Context(d, 9, groups=d)])
        self.drop = nn.Dropout(0.2)
        self.linear = nn.Linear(d, 1 + classes)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x, lengths = batch["image"], batch["image_length"]
        half, steps = (lengths + 1) // 2, (lengths + 3) // 4
        recompute = self.recompute and self.training
        x = run(self.stem, x, beyond(half, (x.shape[3] + 1) // 2), recompute)
        x = run([*self.middle, *self.head], x, beyond(steps, (x.shape[3] + 1) // 2), recompute)
        return self.linear(self.drop(x.squeeze(2).permute(2, 0, 1))), steps


NETWORKS: dict[str, type[Hctr] | type[Slim]] = {"hctr": Hctr, "slim": Slim}
STRIDES = {"hctr": 32, "slim": 4}  # columns a time step


def beyond(lengths: Tensor, width: int) -> Tensor:
    """Return (B, 1, 1, W) bool: True in the columns beyond each line's own."""
    return (torch.arange(width, device=lengths.device) >= lengths[:, None])[:, None, None]


def run(parts: Iterable[nn.Module], x: Tensor, padding: Tensor, recompute: bool) -> Tensor:
    """Apply parts of one width in turn; recompute: backward computes again what is within them."""
    for part in parts:
        x = again(part, x, padding) if recompute else part(x, padding)
    return x


class MaskedReLU(torch.autograd.Function):
    """Padding (B, 1, 1, W) set to zero and ReLU in one pass over memory, in place, where PyTorch makes two each way:
    values and gradients equal bit for bit, since where the output is 0 ReLU's gradient is 0 already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: Tensor) -> Tensor:
        zero = x.new_zeros(())
        x.clamp_(zero, torch.where(padding, zero, torch.inf))
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        gradient = torch.ops.aten.threshold_backward(gradient, *ctx.saved_tensors, 0)
        return gradient if gradient.is_cuda else gradient.contiguous(), None  # bits of a CPU's norm depend on it


class ConvNorm(nn.Module):
    """Convolution (a stride divides the size, rounding up), batch norm, padding of the result set to zero, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int | Size = 3, stride: int | Size = 1, relu: bool = True):
        super().__init__()
        around = kernel // 2 if isinstance(kernel, int) else 0
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, around, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.relu = relu

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        if self.relu and not torch.compiler.is_compiling():  # a compiler fuses these, and an exporter knows no Function
            return MaskedReLU.apply(x, padding)
        x = torch.where(padding, 0, x) if x.is_cuda else x.masked_fill_(padding, 0)
        return x.relu_() if self.relu else x


class Block(nn.Module):
    """Two convolutions around a shortcut; of hctr with squeeze and excitation and dropout."""

    def __init__(self, width: int, inputs: int | None = None, excite: bool = False):
        super().__init__()
        inputs = width if inputs is None else inputs
        self.first = ConvNorm(inputs, width)
        self.second = ConvNorm(width, width, relu=False)
        self.excite = Excite(width) if excite else None
        self.shortcut = ConvNorm(inputs, width, 1, relu=False) if inputs != width else None
        self.dropout = nn.Dropout(0.1 if excite else 0.0)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        y = self.second(self.first(x, padding), padding)
        y = y if self.excite is None else self.excite(y, padding)
        y = y + (x if self.shortcut is None else self.shortcut(x, padding))
        return self.dropout(y.relu_())


class Excite(nn.Module):
    """Squeeze and excitation (Hu et al. 2017, arXiv 1709.01507): scale channels by their mean over a line's columns."""

    def __init__(self, width: int):
        super().__init__()
        narrow = max(width // 16, 1)
        into, out = nn.Linear(width, narrow, bias=False), nn.Linear(narrow, width, bias=False)
        self.gate = nn.Sequential(into, nn.ReLU(inplace=True), out, nn.Sigmoid())

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        pixels = x.shape[2] * (~padding).sum(3).view(-1, 1)
        mean = x.sum((2, 3), dtype=torch.float32) / pixels  # (B, C); a sum in 16 bits would lose digits
        return x * self.gate(mean.to(x.dtype))[..., None, None]


class Context(nn.Module):
    """A residual along time, over (B, C, 1, T): each channel sees `kernel` steps, then the channels mix."""

    def __init__(self, width: int, kernel: int, groups: int = 1):
        super().__init__()
        self.look = nn.Conv2d(width, width, (1, kernel), padding=(0, kernel // 2), groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.mix = ConvNorm(width, width, 1, relu=False)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return (x + self.mix(self.norm(self.look(x)).relu_(), padding)).relu_()


class Stage(nn.Module):
    """Parts of one size, then a 2 × 2 pool that rounds up, then dropout; also returns the lines' new lengths."""

    def __init__(self, parts: Iterable[nn.Module], dropout: float = 0.0):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, lengths: Tensor, recompute: bool) -> tuple[Tensor, Tensor]:
        x = run(self.parts, x, beyond(lengths, x.shape[3]), recompute)
        return self.dropout(F.max_pool2d(x, 2, ceil_mode=True)), (lengths + 1) // 2
