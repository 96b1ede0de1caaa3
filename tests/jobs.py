"""Jobs built to be bound by a known thing: what a verdict has to find out by measuring."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import toy
from torch import nn

from nbtools.data import Pack
from nbtools.data.pack import RawFiles
from nbtools.train import plan

SLEEP = 5e-4  # seconds that a slow source takes for a sample


@dataclass(frozen=True)
class Plan(plan.Plan):
    noise: float = plan.knob(0.0, "augmentation: standard deviation of added noise", least=0)


def sleeping(path: Path, options: Any) -> dict[str, np.ndarray]:
    """A source that keeps one waiting, as a network drive does."""
    time.sleep(SLEEP)
    return toy.read(path, options)


def dozing(path: Path, options: Any) -> dict[str, np.ndarray]:
    """One that keeps one waiting for long."""
    time.sleep(4 * SLEEP)
    return toy.read(path, options)


def busy(path: Path, options: Any) -> dict[str, np.ndarray]:
    """A source that takes a core's time, as JPEG does."""
    until = time.thread_time() + SLEEP
    while time.thread_time() < until:
        pass
    return toy.read(path, options)


def slow(pack: Pack, read: Callable) -> Pack:
    """The same pack, its source files read by `read`."""
    assert pack.raw is not None
    return dataclasses.replace(pack, raw=RawFiles(pack.folder, pack.raw.source, read))


class Deep(nn.Module):
    """Many tiny layers."""

    def __init__(self, layers: int = 40):
        super().__init__()
        self.layers = nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(8, 8), nn.ReLU())], nn.Linear(8, 4))

    def forward(self, batch):
        return self.layers(batch["x"])


class Recurrent(nn.Module):
    """A cell stepped through time in Python."""

    def __init__(self, steps: int = 16):
        super().__init__()
        self.steps, self.cell, self.head = steps, nn.GRUCell(8, 8), nn.Linear(8, 4)

    def forward(self, batch):
        state = batch["x"]
        for _ in range(self.steps):
            state = self.cell(batch["x"], state)
        return self.head(state)


class Normalised(nn.Module):
    """Many tiny layers with BatchNorm."""

    def __init__(self, layers: int = 16):
        super().__init__()
        blocks = [m for _ in range(layers) for m in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())]
        self.layers = nn.Sequential(*blocks, nn.Linear(8, 4))

    def forward(self, batch):
        return self.layers(batch["x"])


class Wide(nn.Module):
    """Few wide linears over many positions: matrix products and little else."""

    def __init__(self, width: int = 384, positions: int = 16):
        super().__init__()
        self.positions = positions
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, width))
        self.head = nn.Linear(width, 4)

    def forward(self, batch):
        x = batch["x"][:, None].expand(-1, self.positions, -1)
        return self.head(self.layers(x).mean(1))


class Convolutions(nn.Module):
    """Wide convolutions, all of whose work is arithmetic."""

    def __init__(self, width: int = 64, side: int = 8):
        super().__init__()
        self.side = side
        sizes = [8, width, width, width]
        self.layers = nn.Sequential(*[nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(sizes)])
        self.head = nn.Linear(width, 4)

    def forward(self, batch):
        x = batch["x"][:, :, None, None].expand(-1, -1, self.side, self.side)
        return self.head(self.layers(x).mean((2, 3)))


class Elementwise(nn.Module):
    """A few elementwise operations over much memory."""

    def __init__(self, elements: int = 2**16):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(elements // 8))
        self.head = nn.Linear(8, 4)

    def forward(self, batch):
        x = batch["x"][:, None] * self.scale[:, None]  # (B, E / 8, 8)
        return self.head(((x + 1.0) * x * 0.5).mean(1))


class Table(nn.Module):
    """An embedding whose dense gradient and optimizer state are visited whole at every step."""

    def __init__(self, rows: int = 2**16, width: int = 16):
        super().__init__()
        self.rows, self.table, self.head = rows, nn.Embedding(rows, width), nn.Linear(width, 4)

    def forward(self, batch):
        index = (batch["x"] * 1e4).long() % self.rows
        return self.head(self.table(index).mean(1))


def plan_of(**knobs: Any) -> Plan:
    """Few epochs, so that evaluations are not what to change."""
    return Plan(**{"epochs": 4, **knobs})


@dataclass(frozen=True)
class Job:
    """A task: a network, the work of augmentation and of scoring, and the answer that is expected.

    change: the knobs that the verdict is to turn; None: nothing worth changing. of: what gets faster.
    """

    name: str
    network: Callable[[], nn.Module]
    plan: Plan
    bound: str | tuple[str, ...]
    change: tuple[str, ...] | None
    read: Callable | None = None
    ragged: bool = False
    draws: int = 0  # normal numbers a sample that augmentation draws
    scoring: int = 0  # side of the square matrices that metrics multiply, a batch
    fixed: tuple[str, ...] = ()
    PLAN: Plan = field(init=False, default=Plan())
    BASELINE: Plan = field(init=False, default=Plan())
    BEST: str = field(init=False, default="-loss")

    def model(self, card: Any, plan: Any) -> nn.Module:
        return self.network()

    def batch(self, raw, plan, draws):
        x = raw["x"]
        if "x_length" in raw:
            x = x.sum(1) / raw["x_length"][:, None]
        if draws is not None and plan.noise and self.draws:
            x = x + plan.noise * draws.normal((self.draws // 8, 8)).mean(1)
        return {"x": x, "label": raw["label"][:, 0]}

    def loss(self, model, batch, plan):
        logits = model(batch)
        return nn.functional.cross_entropy(logits, batch["label"], reduction="sum"), len(logits)

    def metrics(self, outputs, batch):
        if self.scoring:
            a = torch.ones(self.scoring, self.scoring)
            torch.mm(a, a)
        return {"accuracy": ((outputs.argmax(1) == batch["label"]).sum(), len(outputs))}

    def pack(self, packs: dict[bool, Pack]) -> Pack:
        pack = packs[self.ragged]
        return slow(pack, self.read) if self.read else pack


FILES = {"feed": "workers", "workers": 0}
DEVICE = ("compute", "memory")

JOBS = [
    Job("a source that sleeps", Deep, plan_of(batch_size=16, **FILES), "data", ("feed",), read=sleeping),
    Job("a source that computes", Deep, plan_of(batch_size=16, **FILES), "data", ("feed",), read=busy),
    Job(
        "ragged files that sleep", Deep, plan_of(batch_size=16, **FILES), "data", ("feed",), read=sleeping, ragged=True
    ),
    Job(
        "files as slow as the step",
        lambda: Wide(positions=12),
        plan_of(batch_size=16, **FILES),
        "data",
        ("feed",),
        read=sleeping,
    ),
    Job(
        "files only",
        Deep,
        plan_of(batch_size=8, prefetch=1, **FILES),
        "data",
        ("workers",),
        read=dozing,
        fixed=("feed",),
    ),
    Job("many tiny layers", Deep, plan_of(batch_size=8), "launch", ("batch_size",)),
    Job("a loop in Python", Recurrent, plan_of(batch_size=8), "launch", ("batch_size",)),
    Job("many tiny layers with BatchNorm", Normalised, plan_of(batch_size=8), "launch", ("batch_size",)),
    Job("micro-batches", Deep, plan_of(batch_size=16, micro_batch_size=2), "launch", ("micro_batch_size",)),
    Job("wide linears", Wide, plan_of(batch_size=32), "compute", None),
    Job("wide convolutions", Convolutions, plan_of(batch_size=32, channels_last=True), "compute", None),
    Job("elementwise over much memory", Elementwise, plan_of(batch_size=16), "memory", None),
    Job("a large table", Table, plan_of(batch_size=8), "memory", ("batch_size",)),
    Job("much augmentation", lambda: Deep(8), plan_of(batch_size=32, noise=0.1), DEVICE, ("noise",), draws=2**11),
    Job("much scoring", Deep, plan_of(batch_size=32, epochs=50), "launch", ("eval_every",), scoring=768),
    Job("tiny layers, batch kept", Deep, plan_of(batch_size=8), "launch", None, fixed=("batch_size",)),
]
