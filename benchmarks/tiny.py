"""A task whose step costs next to nothing, so that what surrounds it shows: a two-layer MLP over vectors.

`task` is any importable object with the right names; this module is one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbtools.data import Entry, Pack, Sample, Survey, build_pack
from nbtools.train import Pair, Plan

FEATURES, CLASSES, HIDDEN = 32, 10, 32
PLAN = BASELINE = Plan(epochs=8, batch_size=32, lr=1e-2, clip_norm=1.0, feed="resident")


class Mlp(nn.Sequential):
    """x (B, FEATURES) → logits (B, CLASSES)."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


class OfBatch(Mlp):
    """The same, called as nbtools calls a model: with the whole batch."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch["x"])


def pack(folder: Path, count: int) -> Pack:
    """Vectors x (FEATURES,) float32 around one of CLASSES centres, label (1,) int64; all of them to train on."""
    rng = np.random.default_rng(0)
    labels = rng.integers(CLASSES, size=count)
    x = (rng.normal(size=(CLASSES, FEATURES))[labels] + rng.normal(size=(count, FEATURES))).astype(np.float32)
    (folder / "raw").mkdir()
    np.save(folder / "raw" / "x.npy", x)
    entries = [Entry(f"{i}", split="train", label=labels[i : i + 1]) for i in range(count)]

    def row(path: Path, options: object) -> Sample:
        return {"x": x[int(path.name)]}

    more = {"val": 0, "into": folder / "pack", "progress": False}
    return build_pack(folder / "raw", "tiny", {}, lambda folder, options: Survey(entries), row, **more)


def read(path: Path, options: object) -> Sample:
    return {"x": np.load(path)}


def model(card: object, plan: Plan) -> OfBatch:
    return OfBatch()


def batch(raw: dict[str, Tensor], plan: Plan, draws: object) -> dict[str, Tensor]:
    return {"x": raw["x"], "label": raw["label"].view(-1)}


def loss(model: nn.Module, batch: dict[str, Tensor], plan: Plan) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch), batch["label"], reduction="sum"), len(batch["label"])


def metrics(outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Pair]:
    return {"accuracy": ((outputs.argmax(1) == batch["label"]).sum(), len(outputs))}


def seeded(plan: Plan) -> Mlp:
    """The weights that a TrainState of this plan begins with."""
    with torch.random.fork_rng():
        torch.manual_seed(plan.seed)
        return Mlp()
