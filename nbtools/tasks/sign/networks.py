"""The two networks of signs, a Transformer on keypoints and a GRU on ready features, and their class weights.

B clips, T frames, D = 156 or 2048 numbers a frame, P = 78 points, W = 256 the Transformer's width, H heads, G glosses,
C categories. Both return logits of gloss (B, G) and of category (B, C).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]
from torch.nn import functional as F

from nbtools.data import Card, Column, Pack
from nbtools.errors import PlanError
from nbtools.tasks.sign.plans import Plan, network_of
from nbtools.train import Batch, again

Outputs = tuple[Tensor, Tensor]

POSITIONS = 300  # frames in the Transformer's position table, the guide's
HEADS = 8
UNITS = (16, 12)  # of the GRU's two layers
COLUMN = {"transformer": "x", "gru": "features"}
LABELS = ("gloss", "category")  # the columns of a label, and the networks' heads
POWER = {"balanced": 1.0, "sqrt": 0.5}


def model(card: Card | Pack, plan: Plan) -> Transformer | Gru:
    """The network of a plan for a data set. Raises PlanError if that lacks what it reads."""
    card = card.card if isinstance(card, Pack) else card
    name, column = network_of(plan, card.columns), column_of(plan, card.columns)
    sizes = column.shape[-1], len(card.classes), len(card.options["categories"])
    if name == "gru":
        network: Transformer | Gru = Gru(*sizes, dropout=plan.dropout)
    else:
        network = Transformer(*sizes, dropout=plan.dropout, windows=plan.long_clips == "windows")
        network.recompute = plan.checkpoint_activations
    for label in LABELS:
        network.register_buffer(f"{label}_weights", class_weights(card, plan.class_weights, label), persistent=False)
    return network


def column_of(plan: Plan, columns: Mapping[str, Column]) -> Column:
    """The column that a plan's network reads. Raises PlanError where it is missing."""
    name = network_of(plan, columns)
    if COLUMN[name] not in columns:
        raise PlanError(
            f'Plan.network = "{name}" reads {COLUMN[name]!r}, and this data has {", ".join(sorted(columns))}; '
            "choose another network, or pack clips that hold it (kp_key, feature_key)"
        )
    return columns[COLUMN[name]]


def class_weights(card: Card, kind: str, label: str) -> Tensor | None:
    """(classes,) float32 with mean 1 over the training clips, which keeps the scale of the loss; None for "none".

    A class without a training clip gets weight 0. Raises PlanError if the pack does not count the clips of a class.
    """
    if kind == "none":
        return None
    counts = card.counts.get(label)
    if counts is None:
        raise PlanError(
            f'Plan.class_weights = "{kind}" needs the number of training clips of each {label}, and this pack does not '
            'have it; pack again, or choose "none"'
        )
    count = torch.tensor(counts, dtype=torch.float32)
    weights = torch.where(count > 0, count.clamp(min=1) ** -POWER[kind], 0)
    return weights * count.sum() / (weights * count).sum()


class Transformer(nn.Module):
    """The guide's SignTransformer, pre-LN: 3,280,371 parameters for 105 glosses in 10 categories.

    Frames beyond a clip's end, and frames that show no point, are masked in attention and left out of the mean, so
    padding does not change the result. The mean over no frame is 0.

    windows: clips longer than the position table are cut into windows of its length that attend within themselves, and
    the mean is over the frames of all of them. Otherwise such a clip raises PlanError.
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
        """x (B, T, D) float, x_length (B,), mask (B, T, P) bool → logits (B, G) and (B, C)."""
        step = torch.arange(batch["x"].shape[1], device=batch["x"].device)
        visible = (step < batch["x_length"][:, None]) & batch["mask"].any(2)  # (B, T): within the clip, showing a point
        x, keys = self.cut(batch["x"], visible)
        x = self.norm(self.drop(self.embed(x) + self.positions[: x.shape[1]]))
        keys = (keys | ~keys.any(1, keepdim=True))[:, None, None]  # softmax over no key at all is NaN
        recompute = self.recompute and self.training
        for layer in self.layers:
            x = again(layer, x, keys) if recompute else layer(x, keys)
        x = x.reshape(visible.shape[0], -1, x.shape[2])[:, : visible.shape[1]]  # windows of a clip one after the other
        total = (x * visible[:, :, None]).sum(1)
        pooled = self.drop(total / visible.sum(1, keepdim=True).clamp(min=1))
        return self.gloss(pooled), self.category(pooled)

    def cut(self, x: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, …) → (B × windows, at most POSITIONS, …), the last window of a clip padded."""
        if is_tracing() or x.shape[1] <= POSITIONS:  # an exported network takes no longer clips
            return x, visible
        count = -(-x.shape[1] // POSITIONS)
        if not self.windows:
            raise PlanError(
                f"a clip has {x.shape[1]} frames, and the Transformer has positions for {POSITIONS}; set "
                'Plan.long_clips = "windows", or cut or thin out such clips'
            )
        more = count * POSITIONS - x.shape[1]
        x, visible = F.pad(x, (0, 0, 0, more)), F.pad(visible, (0, more))
        return x.reshape(-1, POSITIONS, x.shape[2]), visible.reshape(-1, POSITIONS)


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
        """x (B, T, W) → (B, T, W); keys (B, 1, 1, T) bool: the frames that are attended to, at least one per clip."""
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()  # each (B, H, T, W / H)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=keys, dropout_p=dropout)
        return self.out(attended.transpose(1, 2).flatten(2))


def head(width: int, classes: int, dropout: float) -> nn.Sequential:
    half = width // 2
    return nn.Sequential(nn.Linear(width, half), nn.ReLU(), nn.Dropout(dropout), nn.Linear(half, classes))


def sinusoids(count: int, width: int) -> Tensor:
    """(count, width): sines and cosines of falling frequency, interleaved (Vaswani et al. 2017)."""
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10000) / width))
    angles = torch.arange(count)[:, None] * frequency
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)


class Gru(nn.Module):
    """The guide's GRU of 16 and then 12 units, without the InceptionV3 before it: 101,743 parameters for 105 glosses in
    10 categories.

    Clips are padded, not packed: a forward GRU reaches a clip's last frame before it sees any padding, and
    PackedSequence loses cuDNN's fast path and waits for the lengths. torch.compile gains nothing here, and nothing is
    recomputed: most of a step's memory is the features themselves (64 clips of 60 frames: 4 % less for twice the time).
    """

    dropout = 0.3

    def __init__(self, inputs: int, glosses: int, categories: int, dropout: float | None = None):
        super().__init__()
        self.first = initialised(nn.GRU(inputs, UNITS[0], batch_first=True))
        self.second = initialised(nn.GRU(UNITS[0], UNITS[1], batch_first=True))
        self.drop = nn.Dropout(self.dropout if dropout is None else dropout)
        self.gloss, self.category = nn.Linear(UNITS[1], glosses), nn.Linear(UNITS[1], categories)

    def forward(self, batch: Batch) -> Outputs:
        """features (B, T, D) float, features_length (B,) → logits (B, G) and (B, C)."""
        lengths = batch["features_length"]
        x = self.second(self.drop(self.first(batch["features"])[0]))[0]
        last = (lengths - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, UNITS[1])
        hidden = self.drop(x.gather(1, last).squeeze(1) * (lengths > 0)[:, None])  # a clip of no frame: zeros
        return self.gloss(hidden), self.category(hidden)


def initialised(gru: nn.GRU) -> nn.GRU:
    """The guide's initialisation: torch's own, ± 1/√16 for 2048 inputs, would start with saturated gates."""
    for name, weight in gru.named_parameters():
        if name.startswith("weight_ih"):
            nn.init.xavier_uniform_(weight)
        elif name.startswith("weight_hh"):
            nn.init.orthogonal_(weight)
        else:
            nn.init.zeros_(weight)
    return gru
