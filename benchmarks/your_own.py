"""Two problems of one's own for `benchmarks.tasks`: a Dataset and a network, and what a user writes around them.

photos: JPEGs of 320 × 320 pixels, whose decoding takes longer than the small network does. arrays: small images held in
memory, with a network that takes longer. The peers read them through the DataLoader that was fastest for each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import nbtools as nb
from benchmarks.peers import Job

CLASSES = 32


class Photos(Dataset):
    """JPEGs in a folder → (image (3, 64, 64) float32, normalised; class)."""

    def __init__(self, folder: Path):
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        with Image.open(self.paths[i]) as image:
            pixels = np.asarray(image.resize((64, 64), Image.Resampling.BILINEAR), np.float32)
        return torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1, int(self.paths[i].stem.partition("-")[0])


def picture(rng: np.random.Generator, label: int, size: int) -> np.ndarray:
    """(size, size, 3) uint8: stripes of a direction that is the class, under noise."""
    rows, columns = np.mgrid[:size, :size] * (24 / size)
    across = np.cos(np.pi * label / CLASSES) * rows + np.sin(np.pi * label / CLASSES) * columns
    stripes = np.sin(across + rng.uniform(0, 6))[..., None] * 60 + rng.uniform(100, 150, 3)
    return (stripes + rng.normal(0, 100, (size, size, 3))).clip(0, 255).astype(np.uint8)


def write_photos(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    for i in range(count):
        Image.fromarray(picture(rng, i % CLASSES, 320)).save(folder / f"{i % CLASSES}-{i}.jpg", quality=90)


def write_arrays(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    np.save(folder / "x.npy", np.stack([picture(rng, i % CLASSES, 32) for i in range(count)]))


def read_arrays(folder: Path) -> TensorDataset:
    x = torch.from_numpy(np.load(folder / "x.npy"))
    return TensorDataset(x.permute(0, 3, 1, 2) / 127.5 - 1, torch.arange(len(x)) % CLASSES)


def network(width: int) -> nn.Module:
    """images (B, 3, H, W) → logits (B, CLASSES)."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, CLASSES))


class Problem(NamedTuple):
    """How its files are written and read, and how wide its network is."""

    write: Callable[[Path, int], None]
    read: Callable[[Path], Any]
    width: int


PROBLEMS = {"photos": Problem(write_photos, Photos, 8), "arrays": Problem(write_arrays, read_arrays, 32)}


@lru_cache  # read once in a process, as a user's script does
def parts(source: Path) -> tuple[Subset, Subset]:
    """7/8 of the problem in a folder of its name to train on, and the rest, at random."""
    data = PROBLEMS[source.name].read(source)
    order, end = np.random.default_rng(0).permutation(len(data)).tolist(), len(data) // 8 * 7
    return Subset(data, order[:end]), Subset(data, order[end:])


def prepare(name: str, folder: Path, count: int) -> tuple[Any, Path, nb.Pack]:
    """Return the task, the files and the pack of a problem."""
    (source := folder / name).mkdir()
    PROBLEMS[name].write(source, count)
    train, val = parts(source)
    pack = nb.pack(train=train, val=val, test=0, into=folder / "pack", progress=False)
    return nb.classify(network(PROBLEMS[name].width)), source, pack


class Own(Job):
    """What a program is given where the Dataset, in a folder of the problem's name, and the network are a user's."""

    def build(self) -> nn.Module:
        return network(PROBLEMS[self.source.name].width)

    def loss(self, net: Any, raw: Any) -> Tensor:
        self.meter.arrived()
        return self.entropy(net, raw)

    # What users write around their Dataset and network: these lines are counted with those of a peer's program.

    def loader(self, split: str = "train") -> DataLoader:
        data, workers = parts(self.source)[split == "val"], self.levers.workers
        kept = {"num_workers": workers, "persistent_workers": workers > 0, "pin_memory": self.device.type == "cuda"}
        return DataLoader(data, self.plan.batch_size, shuffle=split == "train", **kept)

    def inputs(self, x: Tensor) -> Tensor:
        form = torch.channels_last if self.levers.channels_last else torch.contiguous_format
        return x.to(self.device, non_blocking=True, memory_format=form)

    def entropy(self, net: Any, raw: Any) -> Tensor:
        x, y = raw
        return F.cross_entropy(net(self.inputs(x)), y.to(self.device))

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), self.plan.lr, weight_decay=self.plan.weight_decay, fused=True)

    def schedule(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: self.plan.lr_at((step + 0.5) / self.steps) / self.plan.lr)

    def score(self, net: nn.Module) -> float:
        net.eval()
        right = torch.zeros((), device=self.device)
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            for x, y in self.val:
                right += (net(self.inputs(x)).argmax(1) == y.to(self.device)).sum()
        net.train()
        return right.item() / self.pack.splits["val"]

    WRITTEN = (loader, inputs, entropy, optimizer, schedule, score)

    def nbtools(self, folder: Path) -> None:
        (train, val), net = parts(self.source), self.watched()
        pack = nb.pack(train=train, val=val, test=0, into=folder / "pack", progress=False)
        nb.fit(nb.classify(net), pack, self.plan, folder / "run", receipt=False, progress=False)

    def watched(self) -> nn.Module:
        """The network, whose forward in training tells the meter that a batch arrived."""
        torch.manual_seed(self.plan.seed)
        (net := self.build()).register_forward_pre_hook(lambda net, _: self.meter.arrived() if net.training else None)
        return net
