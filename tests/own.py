"""Data sets as a user has them, which no demo writes, and networks: for `nb.classify`, `nb.regress`, own tasks."""

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

import nbtools as nb

STRIPES = ["across", "down", "slanted"]


def images(count: int, seed: int = 0) -> list[tuple[np.ndarray, str]]:
    """Stripes (12, 12, 3) uint8 of three directions, with noise."""
    rng, found = np.random.default_rng(seed), []
    rows, columns = np.mgrid[:12, :12]
    for i in range(count):
        phase, way = rng.uniform(0, 6), (rows, columns, rows + columns)[i % 3]
        stripes = np.sin(way * 1.4 + phase)[..., None] * 60 + 128 + rng.normal(0, 20, (12, 12, 3))
        found.append((stripes.clip(0, 255).astype(np.uint8), STRIPES[i % 3]))
    return found


def rows(count: int, seed: int = 0) -> list[tuple[np.ndarray, float]]:
    """x (4,) float32 of unlike sizes → a price about 5,000 with a standard deviation about 1,000."""
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32) * [1, 10, 0.1, 1] + [0, 50, 3, 0]
    prices = 5000 + 800 * x[:, 0] - 60 * (x[:, 1] - 50) + 100 * np.sin(3 * x[:, 3])
    return [(row, float(price)) for row, price in zip(x.astype(np.float32), prices, strict=True)]


def sequences(count: int, seed: int = 0) -> list[tuple[np.ndarray, int]]:
    """(5–20, 3) float32 → whether the first feature's mean is above the second's."""
    rng, found = np.random.default_rng(seed), []
    for i in range(count):
        x = rng.normal(size=(int(rng.integers(5, 21)), 3)) + 4
        x[:, i % 2] += 1
        found.append((x.astype(np.float32), i % 2))
    return found


DATA: dict[str, Any] = {"images": images, "rows": rows, "sequences": sequences}
DATA["points"] = lambda count: [(row, int(row[0] > 0)) for row, _ in rows(count)]
DATA["labels"] = lambda count: [
    (row, ["up"] * int(row[0] > 0) + ["odd"] * (i % 2)) for i, (row, _) in enumerate(rows(count))
]
DATA["bare"] = lambda count: [*np.ones((count, 4), np.float32)]
DATA["lists"] = lambda count: [(np.ones(4, np.float32), [0, 2][i % 2 :]) for i in range(count)]
DATA["whole"] = lambda count: (np.ones((count, 4), int), [0, 1] * (count // 2))


def packed(name: str, folder: Path, **more: Any) -> nb.Pack:
    more = {"val": 0.2, "test": 0.1, **more}
    return nb.pack(DATA[name](240 if name == "rows" else 90), into=folder / name, progress=False, **more)


class Small(nn.Sequential):
    def __init__(self, classes: int, inputs: int = 3):
        layers = nn.Conv2d(inputs, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1)
        super().__init__(*layers, nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Linear(256, classes))


class Mean(nn.Linear):
    def forward(self, x: Tensor, x_length: Tensor) -> Tensor:
        return super().forward(x.sum(1) / x_length[:, None])


def line(inputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 1))


class Mine(nb.Task):
    metrics = ("accuracy", "f1")  # pyright: ignore[reportAssignmentType]
    augment = ("flip",)

    def model(self, card, plan):
        return Small(len(card.classes))

    def loss(self, model, batch, plan):
        return F.cross_entropy(model(batch), batch["y"])


PLAN = nb.Plan(epochs=2, batch_size=16, lr=1e-2)
task = nb.classify(Small, augment=["crop", "flip"], plan=PLAN)
