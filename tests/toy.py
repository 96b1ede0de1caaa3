"""A tiny task over vectors, fixed or ragged, that trains in milliseconds: what the loop's tests drive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from nbtools import plan
from nbtools.pack import Pack, Sample
from nbtools.packing import Writer

CLASSES = 4


@dataclass(frozen=True)
class Plan(plan.Plan):
    hidden: int = plan.knob(16, "width of the hidden layer", least=1)
    dropout: float = plan.knob(0.1, "share of hidden units dropped", least=0, most=0.9)
    noise: float = plan.knob(0.1, "augmentation: standard deviation of added noise", least=0)


PLAN = Plan(epochs=3, batch_size=16, lr=1e-2, clip_norm=1.0)
BASELINE = Plan(epochs=3, batch_size=16, lr=1e-2, feed="workers")
BEST = "accuracy"


def read(path: Path, options) -> Sample:
    return {"x": np.load(path)}


def make_pack(folder: Path, count: int = 200, ragged: bool = False, seed: int = 0, raw: bool = False) -> Pack:
    """Vectors (8,) float32 around one of four centres, or sequences (3–20, 8) of such; label (1,) int64."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(CLASSES, 8))
    part, source = folder / "pack", folder / "raw"
    part.mkdir(parents=True)
    source.mkdir()
    writer = Writer(part, {"x"} if ragged else set(), val=0.2, test=0.1, progress=False)
    for i in range(count):
        label = rng.integers(CLASSES)
        shape = (rng.integers(3, 20), 8) if ragged else (8,)
        x = (centres[label] + rng.normal(size=shape)).astype(np.float32)
        if raw:
            np.save(source / f"{i}.npy", x)
        writer.add(f"{i}.npy", None, x=x, label=np.array([label], np.int64))
    writer.classes = list("abcd")
    writer.finish("toy", {}, "x" if ragged else None, {})
    writer.close()
    return Pack.open(part, source=source, read=read) if raw else Pack.open(part)


class Net(nn.Module):
    """Mean over time where there is time → logits (B, 4)."""

    def __init__(self, hidden: int, dropout: float):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, CLASSES)
        )

    def forward(self, batch):
        return self.layers(batch["x"])


def model(card, plan: Plan) -> nn.Module:
    return Net(plan.hidden, plan.dropout)


def batch(raw, plan: Plan, draws):
    x = raw["x"]
    if "x_length" in raw:
        x = x.sum(1) / raw["x_length"][:, None]
    if draws is not None and plan.noise:
        x = x + plan.noise * draws.normal((8,))
    return {"x": x, "label": raw["label"][:, 0]}


def loss(model, batch, plan: Plan):
    logits = model(batch)
    return nn.functional.cross_entropy(logits, batch["label"], reduction="sum"), len(logits)


def metrics(outputs, batch):
    return {"accuracy": ((outputs.argmax(1) == batch["label"]).sum(), len(outputs))}


def decode(outputs, card) -> list[str]:
    return [card.classes[i] for i in torch.as_tensor(outputs).argmax(1).tolist()]
