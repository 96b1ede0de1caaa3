"""BiSeNetV2: a wide shallow branch for detail, a narrow deep one for semantics (Yu et al., arXiv 2004.02147).

Where the paper is silent, activations and batch norms follow CoinCheung's BiSeNet, which reaches the paper's figures.
Strides round up; feature maps are enlarged by the whole stride and cropped, so an image of any size keeps its geometry.

B images, C channels, K classes, H × W pixels, h × w positions of a stage: ⌈H / stride⌉ × ⌈W / stride⌉.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]
from torch.nn import functional as F

from nbtools.train import again

Outputs = tuple[Tensor, tuple[Tensor, ...]]
HEADS = ("head.", "auxiliary.")  # prefixes of the heads' parameter names


@dataclass(frozen=True)
class Sizes:
    """The published ones. detail: channels of each convolution, one tuple a stage, at strides 2, 4, 8. stem: channels
    at stride 4. semantic: (channels, layers) at strides 8, 16 and 32; the last channels equal those of the detail
    branch. head, auxiliary: hidden channels. enlarged: whether auxiliary logits are upsampled to the input's size."""

    detail: tuple[tuple[int, ...], ...] = ((64, 64), (64, 64, 64), (128, 128, 128))
    stem: int = 16
    semantic: tuple[tuple[int, int], ...] = ((32, 2), (64, 2), (128, 4))
    expansion: int = 6
    head: int = 1024
    auxiliary: int = 128
    enlarged: bool = True
    dropout: float = 0.1


PUBLISHED = Sizes()
SLIM = Sizes(((16,), (16, 32), (64, 64)), 8, ((16, 1), (32, 1), (64, 2)), 4, 64, 32, enlarged=False, dropout=0.0)
"""For CPUs: forward, loss and backward of a 180 × 240 image with 11 classes take 22 ms on one core of a Xeon with
AVX-512, against 160 ms for PUBLISHED; with channels_last (27 and 185 without), medians of 5 and 2 steps on a busy
machine."""
SIZES = {"bisenetv2": PUBLISHED, "slim": SLIM}


class BiSeNetV2(nn.Module):
    """batch["image"] (B, C, H, W) → logits (B, K, H, W), and the auxiliary heads' logits, in training only: at the
    input's size as published, at their stage's where Sizes.enlarged is False. H and W are arbitrary.

    As published 3,358,627 parameters for 3 channels and 19 classes, and 287,308 in the auxiliary heads for training:
    those of CoinCheung's BiSeNet, for the auxiliary heads its first version.
    """

    def __init__(self, classes: int, channels: int = 3, sizes: Sizes = PUBLISHED):
        super().__init__()
        self.detail, inputs = nn.ModuleList(), channels
        for widths in sizes.detail:
            pairs = enumerate(pairwise((inputs, *widths)))
            self.detail.append(nn.Sequential(*(ConvNorm(a, b, stride=1 if i else 2) for i, (a, b) in pairs)))
            inputs = widths[-1]
        self.stem = Stem(channels, sizes.stem)
        self.semantic, widths = nn.ModuleList(), [sizes.stem]
        for width, layers in sizes.semantic:
            rest = (Gather(width, width, 1, sizes.expansion) for _ in range(layers - 1))
            self.semantic.append(nn.Sequential(Gather(widths[-1], width, 2, sizes.expansion), *rest))
            widths.append(width)
        self.context = Context(widths[-1])
        self.aggregation = Aggregation(widths[-1])
        self.head = Head(widths[-1], sizes.head, classes, 8, sizes.dropout)
        self.auxiliary = nn.ModuleList(
            Head(inputs, sizes.auxiliary, classes, 4 * 2**i, sizes.dropout) for i, inputs in enumerate(widths)
        )
        self.enlarged = sizes.enlarged
        self.recompute = False
        initialise(self)

    def forward(self, batch: dict[str, Tensor]) -> Outputs:
        image = detail = batch["image"]
        for stage in self.detail:
            detail = self.run(stage, detail)
        stages = [self.run(self.stem, image)]
        for stage in self.semantic:
            stages.append(self.run(stage, stages[-1]))
        fused = self.run(self.aggregation, detail, self.run(self.context, stages[-1]))
        size = image.shape[2], image.shape[3]
        logits = self.run(self.head, fused, size)
        if not self.training:
            return logits, ()
        wanted = size if self.enlarged else None
        return logits, tuple(self.run(head, x, wanted) for head, x in zip(self.auxiliary, stages, strict=True))

    def run(self, part: nn.Module, *inputs: Any) -> Tensor:
        return again(part, *inputs) if self.recompute and self.training else part(*inputs)


class Norm(nn.BatchNorm2d):
    """Batch norm that uses its running averages where a training batch has one value a channel, such as the pooled
    vector of a micro-batch of one image: a single value has no variance, and torch raises there."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and input.numel() == input.shape[1]:
            return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(input)


class ConvNorm(nn.Module):
    """Convolution without bias, batch norm, and perhaps ReLU, padded: sizes are divided by the stride, rounded up."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, relu: bool = True):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.norm = Norm(outputs)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return x.relu_() if self.relu else x


class Stem(nn.Module):
    """Stride 4 by a convolution and a max pool in parallel: (B, C, H, W) → (B, outputs, h, w)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.conv = ConvNorm(inputs, outputs, stride=2)
        self.left = nn.Sequential(ConvNorm(outputs, outputs // 2, 1), ConvNorm(outputs // 2, outputs, stride=2))
        self.right = nn.MaxPool2d(3, stride=2, padding=1)
        self.fuse = ConvNorm(2 * outputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.fuse(torch.cat([self.left(x), self.right(x)], 1))


class Gather(nn.Module):
    """Gather and expansion: a convolution, depthwise ones to `expansion` times the channels (one, or two with stride
    2), and a projection, whose batch norm starts at zero: each layer begins as its shortcut, separable at stride 2."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int):
        super().__init__()
        wide = expansion * inputs
        deep = ConvNorm(inputs, wide, stride=stride, groups=inputs, relu=stride == 1)
        self.body = nn.Sequential(ConvNorm(inputs, inputs), deep)
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.body.append(ConvNorm(wide, wide, groups=wide))
            self.shortcut.append(ConvNorm(inputs, inputs, stride=stride, groups=inputs, relu=False))
            self.shortcut.append(ConvNorm(inputs, outputs, 1, relu=False))
        self.last = ConvNorm(wide, outputs, 1, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.body(x)) + self.shortcut(x)).relu_()


class Context(nn.Module):
    """Context embedding: the global average is added to every position."""

    def __init__(self, channels: int):
        super().__init__()
        self.pooled = nn.Sequential(Norm(channels), ConvNorm(channels, channels, 1))
        self.fuse = ConvNorm(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.fuse(x + self.pooled(x.mean((2, 3), keepdim=True)))


class Aggregation(nn.Module):
    """Bilateral guided aggregation: detail (B, C, h, w) at stride 8 and semantics (B, C, ⌈h / 4⌉, ⌈w / 4⌉) at stride
    32, each gated by the other at its own scale, summed at the detail's."""

    def __init__(self, channels: int):
        super().__init__()
        self.detail_keep = separable(channels)
        down = ConvNorm(channels, channels, stride=2, relu=False)
        self.detail_down = nn.Sequential(down, nn.AvgPool2d(3, stride=2, padding=1))
        self.semantic_up = ConvNorm(channels, channels, relu=False)
        self.semantic_keep = separable(channels)
        self.fuse = ConvNorm(channels, channels)

    def forward(self, detail: Tensor, semantic: Tensor) -> Tensor:
        size = detail.shape[2], detail.shape[3]
        fine = self.detail_keep(detail) * enlarge(self.semantic_up(semantic), 4, size).sigmoid()
        coarse = self.detail_down(detail) * self.semantic_keep(semantic).sigmoid()
        return self.fuse(fine + enlarge(coarse, 4, size))


class Head(nn.Module):
    """Logits (B, K, h, w) of a stage; given a `size`, enlarged `stride` times and cropped to it."""

    def __init__(self, inputs: int, middle: int, classes: int, stride: int, dropout: float):
        super().__init__()
        self.conv = ConvNorm(inputs, middle)
        self.drop = nn.Dropout(dropout)
        self.classify = nn.Conv2d(middle, classes, 1)
        self.stride = stride

    def forward(self, x: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        logits = self.classify(self.drop(self.conv(x))).contiguous()  # small here; softmax would copy them enlarged
        return logits if size is None else enlarge(logits, self.stride, size)


def separable(channels: int) -> nn.Sequential:
    near = ConvNorm(channels, channels, groups=channels, relu=False)
    return nn.Sequential(near, nn.Conv2d(channels, channels, 1, bias=False))


def enlarge(x: Tensor, factor: int, size: tuple[int, int]) -> Tensor:
    """Bilinear upsampling by a whole factor (`align_corners=False`), cropped to the upper left (H, W).

    Two small matrix products: 8 times as fast as `F.interpolate` on a CPU, with one order of summation on any device.
    """
    made = weights.__wrapped__ if torch.compiler.is_compiling() or is_tracing() else weights
    rows, columns = (made(n, m, factor, x.device, x.dtype) for n, m in zip(x.shape[2:], size, strict=True))
    return rows @ F.linear(x, columns)


@lru_cache(512)  # 36 sizes of pictures, among which those that CUDA graphs read have to stay
@torch.inference_mode(False)  # training would refuse what was made there
def weights(positions: int, pixels: int, factor: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return (pixels, positions): of each position in each of the first pixels. Kept, as a forward pass
    needs 14 of them, of 11 kernels each."""
    at = (torch.arange(pixels, device=device, dtype=torch.float32) + 0.5) / factor - 0.5
    distance = at.clamp(0, positions - 1)[:, None] - torch.arange(positions, device=device)
    return (1 - distance.abs()).clamp(min=0).to(dtype)


def initialise(network: nn.Module) -> None:
    """As the reference: Kaiming's normal weights by fan-out, biases 0, the last norm of gather-and-expansion 0."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Gather):
            nn.init.zeros_(module.last.norm.weight)
