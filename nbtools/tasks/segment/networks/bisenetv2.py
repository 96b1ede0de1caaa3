"""BiSeNetV2: details in a wide shallow branch, meaning in a narrow deep one (Yu et al., arXiv 2004.02147)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from nbtools.tasks.segment.networks.blocks import Aggregation, Context, ConvNorm, Gather, Head, Stem, initialise
from nbtools.train import again

Outputs = tuple[Tensor, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Sizes:
    """detail: channels of each convolution, a tuple a stage, strides 2, 4, 8. stem: channels at stride 4. semantic:
    (channels, layers) of strides 8, 16 and 32, the last channels those of the details. head, auxiliary: middle channels
    of the heads; enlarged: whether auxiliary logits are brought to the input's size."""

    detail: tuple[tuple[int, ...], ...]
    stem: int
    semantic: tuple[tuple[int, int], ...]
    expansion: int
    head: int
    auxiliary: int
    enlarged: bool
    dropout: float


PUBLISHED = Sizes(
    detail=((64, 64), (64, 64, 64), (128, 128, 128)),
    stem=16,
    semantic=((32, 2), (64, 2), (128, 4)),
    expansion=6,
    head=1024,
    auxiliary=128,
    enlarged=True,
    dropout=0.1,
)
SLIM = Sizes(
    detail=((16,), (16, 32), (64, 64)),
    stem=8,
    semantic=((16, 1), (32, 1), (64, 2)),
    expansion=4,
    head=64,
    auxiliary=32,
    enlarged=False,
    dropout=0.0,
)
"""For CPUs: forward, loss and backward of an image of 180 × 240 and 11 classes take 22 ms on one core of a Xeon with
AVX-512, where PUBLISHED takes 160; channels_last (27 and 185 without), medians of 5 and 2 steps on a busy machine."""


class BiSeNetV2(nn.Module):
    """batch["image"] (B, C, H, W) → logits (B, K, H, W), and in training those of the auxiliary heads, else none: of
    the input's size as published, of their stage's where Sizes.enlarged is False. Any H and W will do.

    As published 3,358,627 parameters for 3 channels and 19 classes, and 287,308 of auxiliary heads in training:

    | part         | channels            | stride  | parameters |
    | ------------ | ------------------- | ------- | ---------- |
    | detail       | 64×2, 64×3, 128×3   | 2, 4, 8 |    519,232 |
    | stem         | 16                  | 4       |      6,432 |
    | semantic     | 32×2, 64×2, 128×4   | 8–32    |    988,464 |
    | context      | 128                 | 32      |    164,608 |
    | aggregation  | 128                 | 8       |    478,720 |
    | head         | 1,024               | 8       |  1,201,171 |
    | auxiliary    | 128 each            | 4–32    |    287,308 |

    These are the counts of CoinCheung's BiSeNet, in its first version as for the auxiliary heads; later ones have a
    second convolution there, to stride² channels: 1,872,860. For 512 × 1024 these convolutions do 24.6 · 10⁹
    multiplications; the paper's figure is 21.15 GFLOPs (as MaybeShewill-CV/bisenetv2-tensorflow#24 quotes it).

    SLIM has 352,355 and 36,268 for 11 classes.
    """

    def __init__(self, classes: int, channels: int = 3, sizes: Sizes = PUBLISHED, dropout: float | None = None):
        super().__init__()
        share = sizes.dropout if dropout is None else dropout
        widths = [channels, *(stage[-1] for stage in sizes.detail)]
        self.detail = nn.ModuleList(map(detail_stage, widths, sizes.detail))
        self.stem = Stem(channels, sizes.stem)
        widths = [sizes.stem, *(width for width, _ in sizes.semantic)]
        depths = [layers for _, layers in sizes.semantic]
        self.semantic = nn.ModuleList(
            semantic_stage(inputs, outputs, layers, sizes.expansion)
            for (inputs, outputs), layers in zip(pairwise(widths), depths, strict=True)
        )
        self.context = Context(widths[-1])
        self.aggregation = Aggregation(widths[-1])
        self.head = Head(widths[-1], sizes.head, classes, 8, share)
        self.auxiliary = nn.ModuleList(
            Head(inputs, sizes.auxiliary, classes, 4 * 2**i, share) for i, inputs in enumerate(widths)
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


def detail_stage(inputs: int, widths: tuple[int, ...]) -> nn.Sequential:
    """Plain convolutions, the first with stride 2."""
    pairs = enumerate(pairwise((inputs, *widths)))
    return nn.Sequential(*(ConvNorm(a, b, stride=2 if i == 0 else 1) for i, (a, b) in pairs))


def semantic_stage(inputs: int, outputs: int, layers: int, expansion: int) -> nn.Sequential:
    """Gather-and-expansion layers, the first with stride 2."""
    rest = [Gather(outputs, outputs, 1, expansion) for _ in range(layers - 1)]
    return nn.Sequential(Gather(inputs, outputs, 2, expansion), *rest)
