"""A tiny task over vectors, fixed or ragged, that trains in milliseconds: what the loop's tests drive."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from nbtools.data import Entry, Pack, Sample, Survey, build_pack
from nbtools.train import plan

CLASSES = 4


@dataclass(frozen=True)
class Plan(plan.Plan):
    hidden: int = plan.knob(16, "width of the hidden layer", least=1)
    dropout: float = plan.knob(0.1, "share of hidden units dropped", least=0, most=0.9)
    noise: float = plan.knob(0.1, "augmentation: standard deviation of added noise", least=0)


PLAN = Plan(epochs=3, batch_size=16, lr=1e-2, clip_norm=1.0)
BASELINE = Plan(epochs=3, batch_size=16, lr=1e-2, feed="workers")
BEST = "accuracy"


def demo(folder: Path, count: int = 200, ragged: bool = False, seed: int = 0) -> Path:
    """Files `LABEL_n.npy` of vectors (8,) float32 around one of four centres, or of sequences (3–19, 8) of such."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(CLASSES, 8))
    folder = Path(folder)
    folder.mkdir(parents=True)
    for i in range(count):
        label = int(rng.integers(CLASSES))
        shape = (rng.integers(3, 20), 8) if ragged else (8,)
        np.save(folder / f"{label}_{i}.npy", (centres[label] + rng.normal(size=shape)).astype(np.float32))
    return folder


def read(path: Path, options) -> Sample:
    return {"x": np.load(path)}


def survey(folder: Path, options) -> Survey:
    """label (1,) int64 from the files' names."""
    names = sorted(path.name for path in folder.glob("*.npy"))
    entries = [Entry(name, label=np.array([int(name[0])], np.int64)) for name in names]
    ragged = {"ragged": ["x"], "bucket_by": "x"} if options["ragged"] else {}
    return Survey(entries, list("abcd"), {"ragged": options["ragged"]}, **ragged)


def pack(source, *, ragged: bool = False, into: Path | None = None, progress: bool = False, val: float = 0.2) -> Pack:
    more = {"val": val, "test": 0.1, "into": into, "progress": progress}
    return build_pack(source, "toy", {"ragged": ragged}, survey, read, **more)


def make_pack(folder: Path, count: int = 200, ragged: bool = False, seed: int = 0) -> Pack:
    return pack(demo(folder / "raw", count, ragged, seed), ragged=ragged, into=folder / "pack")


def with_(**changes) -> Any:
    return SimpleNamespace(**{**globals(), **changes})


class Net(nn.Module):
    def __init__(self, hidden: int, dropout: float):
        super().__init__()
        inner = nn.Linear(8, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(dropout)
        self.layers = nn.Sequential(*inner, nn.Linear(hidden, CLASSES))

    def forward(self, batch):
        return self.layers(batch["x"])


def model(card, plan: Plan) -> nn.Module:
    return Net(plan.hidden, plan.dropout)


class Linear(nn.Linear):
    def forward(self, batch):
        return super().forward(batch["x"])


def linear(card, plan: Plan) -> nn.Module:
    return Linear(8, CLASSES)


def batch(raw, plan: Plan, draws):
    x = raw["x"]
    if "x_length" in raw:
        x = x.sum(1) / raw["x_length"][:, None]
    if draws is not None and plan.noise:
        x = x + plan.noise * draws.normal((8,))
    return {"x": x} | ({"label": raw["label"][:, 0]} if "label" in raw else {})  # files to predict have none


def loss(model, batch, plan: Plan):
    logits = model(batch)
    return nn.functional.cross_entropy(logits, batch["label"], reduction="sum"), len(logits)


def metrics(outputs, batch):
    return {"accuracy": ((outputs.argmax(1) == batch["label"]).sum(), len(outputs))}


def decode(outputs, card) -> list[str]:
    return [card.classes[i] for i in torch.as_tensor(outputs).argmax(1).tolist()]


def tensors(card, plan: Plan):
    return {"x": (("batch", 8), "x")}, {"logits": (("batch", CLASSES), "argmax: k is classes[k]")}


def preview(pack: Pack, i: int, answer: str) -> tuple[np.ndarray, str, str]:
    x = pack.sample(i)["x"].reshape(-1, 8)
    return (np.clip(x, -2, 2) * 60 + 128).astype(np.uint8), pack.classes[int(pack.sample(i)["label"][0])], answer
