"""Four tiny tasks, one of each kind of model that nbtools trains: a CNN, CTC over ragged widths, a Transformer with
padding, a GRU. What finders and verdicts are tested on.

B samples, T the longest of the batch, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packs import pack_of
from torch import Tensor, nn
from torch.nn import functional as F

from nbtools.data import Pack
from nbtools.train import Plan

CLASSES, FEATURES, SIDE, HEIGHT = 5, 16, 24, 16


PLAN = Plan(epochs=1, batch_size=8, lr=1e-3, clip_norm=1.0)


@dataclass(frozen=True)
class Kind:
    """A task. draw(rng) → the arrays of one sample; network() → a model that takes the whole batch."""

    name: str
    draw: Callable[[np.random.Generator], dict[str, np.ndarray]]
    network: Callable[[], nn.Module]
    ragged: tuple[str, ...] = ()
    PLAN: Plan = PLAN
    BASELINE: Plan = PLAN

    def pack(self, folder: Path, count: int) -> Pack:
        """So many samples, all of them to train on."""
        rng = np.random.default_rng(0)
        grouped = {"ragged": self.ragged, "bucket_by": self.ragged[0] if self.ragged else None}
        return pack_of([self.draw(rng) for _ in range(count)], folder, task=self.name, **grouped)

    def model(self, card, plan) -> nn.Module:
        return self.network()

    def batch(self, raw: dict[str, Tensor], plan, draws) -> dict[str, Tensor]:
        x = raw["x"].to(torch.float32) / 255 if raw["x"].dtype == torch.uint8 else raw["x"]
        return {**raw, "x": x}

    def loss(self, model, batch: dict[str, Tensor], plan) -> tuple[Tensor, int]:
        if self.name != "ctc":
            return F.cross_entropy(model(batch), batch["label"][:, 0], reduction="sum"), len(batch["x"])
        log_probs = model(batch).float().log_softmax(-1)  # (T, B, C)
        steps, labels = batch["x_length"] // 4, batch["label_length"]
        return F.ctc_loss(log_probs, batch["label"], steps, labels, reduction="sum"), len(batch["x"])

    def metrics(self, outputs, batch) -> dict[str, Any]:
        return {}


def label(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(CLASSES, size=1)


def image(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": rng.integers(256, size=(SIDE, SIDE), dtype=np.uint8), "label": label(rng)}


def text_line(rng: np.random.Generator) -> dict[str, np.ndarray]:
    width = int(rng.integers(24, 121))
    return {
        "x": rng.integers(256, size=(width, HEIGHT), dtype=np.uint8),
        "label": rng.integers(1, CLASSES, size=int(rng.integers(1, width // 12 + 1))),
    }


def sequence(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": rng.normal(size=(int(rng.integers(5, 41)), FEATURES)).astype(np.float32), "label": label(rng)}


class Cnn(nn.Module):
    """x (B, SIDE, SIDE) → logits (B, CLASSES); with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, CLASSES)),
        )

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layers(batch["x"][:, None])


class Lines(nn.Module):
    """x (B, W, HEIGHT) → logits (W // 4, B, CLASSES), class 0 the blank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4)),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Linear(16 * HEIGHT // 4, CLASSES)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = self.layers(batch["x"][:, None])  # (B, 16, W // 4, HEIGHT // 4)
        return self.head(features.permute(2, 0, 1, 3).flatten(2))


class Transformer(nn.Module):
    """x (B, T, F), padded → logits (B, CLASSES) by a mean over what is no padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(FEATURES, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        steps = torch.arange(batch["x"].shape[1], device=batch["x"].device)
        padding = steps >= batch["x_length"][:, None]  # (B, T)
        seen = self.encoder(batch["x"], src_key_padding_mask=padding).masked_fill(padding[..., None], 0)
        return self.head(seen.sum(1) / batch["x_length"][:, None])


class Recurrent(nn.Module):
    """x (B, T, F), padded → logits (B, CLASSES) of the last step that is no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, 48, batch_first=True)
        self.head = nn.Linear(48, CLASSES)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        outputs, _ = self.gru(batch["x"])
        return self.head(outputs[torch.arange(len(outputs)), batch["x_length"] - 1])


KINDS = {
    kind.name: kind
    for kind in (
        Kind("cnn", image, Cnn),
        Kind("ctc", text_line, Lines, ragged=("x", "label")),
        Kind("transformer", sequence, Transformer, ragged=("x",)),
        Kind("gru", sequence, Recurrent, ragged=("x",)),
    )
}
