"""Small problems on which the learning rate decides: pictures, points, wave forms and bags of tokens, each with a
network as a user would write it. On each the best and the worst lr of `WIDE` differ by at least 0.15 in accuracy.
B samples, C channels, L steps, K classes.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import nbtools as nb

GRID = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
"""The lrs that a careful user would try."""
WIDE = (3e-5, *GRID[1:])  # with one that is too low


def shapes(seed: int = 0, count: int = 360) -> Iterator[tuple[np.ndarray, int]]:
    """Noisy pictures (16, 16, 3) uint8 of a disc, a ring, a cross and a square of any size, place and colour."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:16, :16]
    for i in range(count):
        y, x, size = rng.uniform(6, 10), rng.uniform(6, 10), rng.uniform(4, 6)
        distance, across, down = np.hypot(rows - y, columns - x), abs(columns - x), abs(rows - y)
        inside = (
            distance < size,
            abs(distance - size) < 1.2,
            (np.minimum(across, down) < 1.5) & (np.maximum(across, down) < size),
            np.maximum(across, down) < size * 0.9,
        )[i % 4]
        image = np.where(inside[..., None], rng.uniform(90, 255, 3), rng.uniform(0, 120, 3))
        image += rng.normal(0, 15, image.shape)
        yield image.clip(0, 255).astype(np.uint8), i % 4


def spirals(seed: int = 0, count: int = 600) -> list[tuple[np.ndarray, int]]:
    """Points (2,) on three arms that turn one and a quarter times."""
    rng = np.random.default_rng(seed)
    label = np.arange(count) % 3
    radius = np.sqrt(rng.uniform(0.02, 1, count))
    angle = 2 * np.pi * (label / 3 + 1.25 * radius) + rng.normal(0, 0.12, count)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).astype(np.float32)
    return [(point, int(k)) for point, k in zip(points, label, strict=True)]


def waves(seed: int = 0, count: int = 400) -> Iterator[tuple[np.ndarray, int]]:
    """Noisy wave forms (64, 1): sine, square, saw tooth and triangle of any frequency and phase."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        t = (np.arange(64) / 64 * rng.uniform(2, 5) + rng.uniform()) % 1
        wave = (np.sin(2 * np.pi * t), np.sign(t - 0.5), 2 * t - 1, 4 * abs(t - 0.5) - 1)[i % 4]
        yield (wave * rng.uniform(0.7, 1.4) + rng.normal(0, 0.15, 64))[:, None].astype(np.float32), i % 4


def bags(seed: int = 0, count: int = 800) -> Iterator[tuple[np.ndarray, int]]:
    """24 of 400 tokens, of which about eight belong to the topic that is asked for, one of four."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        tokens = rng.integers(0, 400, 24)
        topical = rng.uniform(size=24) < 0.35
        tokens[topical] = 60 * (i % 4) + rng.integers(0, 60, topical.sum())
        yield tokens, i % 4


def pictures(classes: int, inputs: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(inputs, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(128, classes)),
    )


def points(classes: int, inputs: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, classes))


class Series(nn.Sequential):
    def __init__(self, classes: int, inputs: int):
        super().__init__(
            *(nn.Conv1d(inputs, 16, 5, padding=2), nn.ReLU(), nn.Conv1d(16, 32, 5, 2, 2), nn.ReLU()),
            *(nn.Conv1d(32, 32, 5, 2, 2), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, classes)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2))


PROBLEMS: dict[str, tuple[Callable[..., Any], Callable[..., nn.Module]]] = {
    "shapes": (shapes, pictures),
    "spirals": (spirals, points),
    "waves": (waves, Series),
    "bags": (bags, lambda classes: nn.Sequential(nn.EmbeddingBag(400, 16, mode="mean"), nn.Linear(16, classes))),
}
"""Data, and the network for it."""


def packed(name: str, folder: Path, seed: int = 0) -> nb.Pack:
    return nb.pack([*PROBLEMS[name][0](seed)], val=0.25, test=0, into=folder / f"{name}-{seed}", progress=False)


def spread(name: str, pack: nb.Pack, plan: nb.Plan) -> dict[float, float]:
    torch.manual_seed(plan.seed)
    task, found = nb.classify(PROBLEMS[name][1]), {}
    for lr in WIDE:
        state = nb.TrainState(task, pack, plan.replace(lr=lr, eval_every=plan.epochs))
        *_, last = (record for record in nb.train(task, state, pack) if record.kind == "epoch")
        found[lr] = last.values["val_accuracy"]
    return found
