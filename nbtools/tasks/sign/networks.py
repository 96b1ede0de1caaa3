"""The two networks of signs: a Transformer on keypoints, and a GRU on ready features.

B clips, T frames, D = 156 or 2048 numbers a frame, P = 78 points, W = 256 the Transformer's width, H heads, G glosses,
C categories. Both return logits of gloss (B, G) and of category (B, C).
"""

import math

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]
from torch.nn import functional as F

from nbtools.errors import PlanError
from nbtools.train import Batch, again

Outputs = tuple[Tensor, Tensor]

POSITIONS = 3000  # frames in the Transformer's position table, of which the guide's 300 are the first
HEADS = 8
UNITS = (16, 12)  # of the GRU's two layers


class Transformer(nn.Module):
    """The guide's SignTransformer, pre-LN: 3,280,371 parameters for 105 glosses in 10 categories.

    Frames beyond a clip's end, and frames that show no point, are masked in attention and left out of the mean, so
    padding does not change the result. The mean over no frame is 0. A clip beyond the position table raises PlanError.
    """

    dropout, width, depth = 0.1, 256, 4
    positions: Tensor

    def __init__(self, inputs: int, glosses: int, categories: int, dropout: float | None = None):
        super().__init__()
        dropout, width = self.dropout if dropout is None else dropout, self.width
        self.embed = nn.Linear(inputs, width)
        self.register_buffer("positions", sinusoids(POSITIONS, width), persistent=False)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList([Layer(width, dropout) for _ in range(self.depth)])
        self.drop = nn.Dropout(dropout)
        self.gloss, self.category = (
            nn.Sequential(nn.Linear(width, width // 2), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width // 2, classes))
            for classes in (glosses, categories)
        )
        self.recompute = False

    def forward(self, batch: Batch) -> Outputs:
        """Map x (B, T, D) float, x_length (B,) and mask (B, T, P) bool to logits (B, G) and (B, C)."""
        step = torch.arange(batch["x"].shape[1], device=batch["x"].device)
        visible = (step < batch["x_length"][:, None]) & batch["mask"].any(2)  # (B, T): within the clip, showing a point
        if not is_tracing() and visible.shape[1] > POSITIONS:  # an exported network takes no longer clips
            rule = f"a clip has {visible.shape[1]} frames, and the Transformer has positions for {POSITIONS}"
            raise PlanError(f"{rule}; cut or thin out such clips, or train the GRU")
        x = self.norm(self.drop(self.embed(batch["x"]) + self.positions[: visible.shape[1]]))
        keys = (visible | ~visible.any(1, keepdim=True))[:, None, None]  # softmax over no key at all is NaN
        for layer in self.layers:
            x = again(layer, x, keys) if self.recompute and self.training else layer(x, keys)
        pooled = self.drop((x * visible[:, :, None]).sum(1) / visible.sum(1, keepdim=True).clamp(min=1))
        return self.gloss(pooled), self.category(pooled)


class Layer(nn.Module):
    """A pre-LN encoder layer: self-attention and feed-forward, each with a residual connection."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, dropout)
        wide, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.feed = nn.Sequential(nn.LayerNorm(width), wide, nn.ReLU(), nn.Dropout(dropout), narrow)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm(x), keys))
        return x + self.drop(self.feed(x))


class Attention(nn.Module):
    """Self-attention with one projection for queries, keys and values, through the fused kernel."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        """Map x (B, T, W) to (B, T, W); keys (B, 1, 1, T) bool: frames attended to, at least one a clip."""
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()  # each (B, H, T, W / H)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=keys, dropout_p=dropout)
        return self.out(attended.transpose(1, 2).flatten(2))


def sinusoids(count: int, width: int) -> Tensor:
    """Return (count, width): sines and cosines of falling frequency, interleaved (Vaswani et al. 2017)."""
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10000) / width))
    angles = torch.arange(count)[:, None] * frequency
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)


class Gru(nn.Module):
    """The guide's GRU of 16, then 12 units, without its InceptionV3: 101,743 parameters for 105 glosses, 10 categories.

    Clips are padded, not packed: a forward GRU reaches a clip's last frame before any padding.
    """

    dropout = 0.3

    def __init__(self, inputs: int, glosses: int, categories: int, dropout: float | None = None):
        super().__init__()
        self.first = initialise(nn.GRU(inputs, UNITS[0], batch_first=True))
        self.second = initialise(nn.GRU(UNITS[0], UNITS[1], batch_first=True))
        self.drop = nn.Dropout(self.dropout if dropout is None else dropout)
        self.gloss, self.category = nn.Linear(UNITS[1], glosses), nn.Linear(UNITS[1], categories)

    def forward(self, batch: Batch) -> Outputs:
        """Map features (B, T, D) float and features_length (B,) to logits (B, G) and (B, C)."""
        lengths = batch["features_length"]
        x = self.second(self.drop(self.first(batch["features"])[0]))[0]
        last = torch.arange(x.shape[1], device=x.device) == lengths[:, None] - 1  # (B, T); a clip of no frame has none
        hidden = self.drop((x * last[:, :, None]).sum(1))  # a gather's gradient is not deterministic on a GPU
        return self.gloss(hidden), self.category(hidden)


def initialise(gru: nn.GRU) -> nn.GRU:
    """Apply the guide's initialisation: torch's own, ± 1/√16 for 2048 inputs, would start with saturated gates."""
    by_kind = {"weight_ih": nn.init.xavier_uniform_, "weight_hh": nn.init.orthogonal_}
    for name, weight in gru.named_parameters():
        by_kind.get(name.rpartition("_")[0], nn.init.zeros_)(weight)  # of `bias_ih_l0`, `bias_hh_l0`
    return gru
