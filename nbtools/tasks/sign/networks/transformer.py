"""The Transformer on keypoints: frames embedded one by one, related by attention, averaged, and named by two heads.

B clips, T frames, D = 156 numbers a frame, P = 78 points, W = 256 the width within, H heads, G glosses, C categories.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbtools.errors import PlanError
from nbtools.train import again

Batch = dict[str, Tensor]
Outputs = tuple[Tensor, Tensor]

POSITIONS = 300  # frames in the table, the guide's
HEADS = 8


class Attention(nn.Module):
    """Self-attention whose queries, keys and values are one product, and whose weights never leave the kernel."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        """x (B, T, W) → (B, T, W); keys (B, 1, 1, T) bool, the frames that may be looked at, one of them at least."""
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, T, W / H)
        dropout = self.dropout if self.training else 0.0
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=keys, dropout_p=dropout)
        return self.out(found.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Pre-LN: attention and feed-forward, each on the normed input and added to it."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, dropout)
        wide, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.feed = nn.Sequential(nn.LayerNorm(width), wide, nn.ReLU(), nn.Dropout(dropout), narrow)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm(x), keys))
        return x + self.drop(self.feed(x))


class Transformer(nn.Module):
    """The guide's SignTransformer: 3,280,371 parameters for 105 glosses in 10 categories.

    | part                                    | parameters |
    | --------------------------------------- | ---------- |
    | Linear 156 → 256                        |     40,192 |
    | sinusoidal positions, LayerNorm         |        512 |
    | 4 layers: 8 heads, feed-forward 1024    |  3,159,040 |
    | head 256 → 128 → ReLU → 105             |     46,441 |
    | head 256 → 128 → ReLU → 10              |     34,186 |

    A frame counts where it lies within the clip and shows any point; the others are neither looked at nor averaged, so
    that padding changes no result. A clip of none is averaged to zeros.

    windows: clips of more frames than the table are cut into windows of its length, each attended by itself; their
    frames are averaged together. Otherwise such a clip raises PlanError.
    """

    dropout = 0.1
    positions: Tensor

    def __init__(
        self,
        inputs: int,
        glosses: int,
        categories: int,
        dropout: float | None = None,
        windows: bool = False,
        width: int = 256,
        layers: int = 4,
    ):
        super().__init__()
        dropout = self.dropout if dropout is None else dropout
        self.embed = nn.Linear(inputs, width)
        self.register_buffer("positions", sinusoids(POSITIONS, width), persistent=False)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList([Layer(width, dropout) for _ in range(layers)])
        self.drop = nn.Dropout(dropout)
        self.gloss, self.category = (head(width, classes, dropout) for classes in (glosses, categories))
        self.windows = windows
        self.recompute = False

    def forward(self, batch: Batch) -> Outputs:
        """x (B, T, D) float, x_length (B,), mask (B, T, P) bool where known → logits (B, G) and (B, C)."""
        frames = visible(batch)
        x, keys = self.cut(batch["x"], frames)
        x = self.norm(self.drop(self.embed(x) + self.positions[: x.shape[1]]))
        keys = (keys | ~keys.any(1, keepdim=True))[:, None, None]  # softmax over no key at all is NaN
        recompute = self.recompute and self.training
        for layer in self.layers:
            x = again(layer, x, keys) if recompute else layer(x, keys)
        pooled = self.drop(mean(x.reshape(len(frames), -1, x.shape[2]), frames))
        return self.gloss(pooled), self.category(pooled)

    def cut(self, x: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, …) → (B × windows, at most the table, …), the last window of a clip padded."""
        count = -(-x.shape[1] // POSITIONS)
        if count <= 1:
            return x, frames
        if not self.windows:
            raise PlanError(
                f"a clip has {x.shape[1]} frames, and the Transformer has positions for {POSITIONS}; set "
                'Plan.long_clips = "windows", or cut or thin out such clips'
            )
        more = count * POSITIONS - x.shape[1]
        x, frames = F.pad(x, (0, 0, 0, more)), F.pad(frames, (0, more))
        return x.reshape(-1, POSITIONS, x.shape[2]), frames.reshape(-1, POSITIONS)


def visible(batch: Batch) -> Tensor:
    """(B, T) bool: the frames within a clip that show any point."""
    step = torch.arange(batch["x"].shape[1], device=batch["x"].device)
    within = step < batch["x_length"][:, None]
    return within & batch["mask"].any(2) if "mask" in batch else within


def mean(x: Tensor, frames: Tensor) -> Tensor:
    """(B, W): the mean over the frames that count; x (B, at least T, W), frames (B, T)."""
    x = x[:, : frames.shape[1]]
    return (x * frames[:, :, None]).sum(1) / frames.sum(1, keepdim=True).clamp(min=1)


def head(width: int, classes: int, dropout: float) -> nn.Sequential:
    half = width // 2
    return nn.Sequential(nn.Linear(width, half), nn.ReLU(), nn.Dropout(dropout), nn.Linear(half, classes))


def sinusoids(count: int, width: int) -> Tensor:
    """(count, width): sines and cosines of falling frequency, by turns (Vaswani et al. 2017)."""
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10000) / width))
    angles = torch.arange(count)[:, None] * frequency
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)
