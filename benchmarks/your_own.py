"""The same Dataset and network in nbtools, Lightning and a plain PyTorch loop: samples/s, and the user's lines.

    python -m benchmarks.your_own [--quick]

Three programs train a network for some epochs, in float32, evaluate it after each and keep the best weights. Two jobs:
JPEGs of 320 × 320 pixels whose decoding dominates, and small images held in memory with a network whose computing does.
Each round runs all programs whole, in turns; a hook on the network sees when a training batch arrives.

samples/s: of whole epochs after the first, evaluation and checkpoints included. What comes before the first batch, for
nbtools the packing, is a figure of its own. The DataLoaders have the number of workers that was fastest here.
"""

# Only `make bench` installs the peers:
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import inspect
import logging
import os
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from benchmarks.paired import Figure, Receipt, in_turns, times
from nbtools import measure
from nbtools.data import cores

ROUNDS, EPOCHS, BATCH, CLASSES, LR = 9, 4, 64, 4, 1e-3


class Photos(Dataset):
    """JPEGs in a folder → (image (3, 64, 64) float32, normalised; class)."""

    def __init__(self, folder: Path):
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        with Image.open(self.paths[i]) as image:
            pixels = np.asarray(image.resize((64, 64), Image.Resampling.BILINEAR), np.float32)
        return torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1, int(self.paths[i].stem[0])


def picture(rng: np.random.Generator, label: int, size: int) -> np.ndarray:
    """(size, size, 3) uint8: stripes of a direction that is the class, under noise."""
    rows, columns = np.mgrid[:size, :size] * (24 / size)
    way = (rows, columns, rows + columns, rows - columns)[label]
    stripes = np.sin(way + rng.uniform(0, 6))[..., None] * 60 + rng.uniform(100, 150, 3)
    return (stripes + rng.normal(0, 30, (size, size, 3))).clip(0, 255).astype(np.uint8)


def photos(folder: Path, count: int) -> Photos:
    rng = np.random.default_rng(0)
    for i in range(count):
        Image.fromarray(picture(rng, i % CLASSES, 320)).save(folder / f"{i % CLASSES}-{i}.jpg", quality=90)
    return Photos(folder)


def in_memory(folder: Path, count: int) -> TensorDataset:
    rng = np.random.default_rng(0)
    x = np.stack([picture(rng, i % CLASSES, 32) for i in range(count)])
    return TensorDataset(torch.from_numpy(x).permute(0, 3, 1, 2) / 127.5 - 1, torch.arange(count) % CLASSES)


def network(width: int) -> nn.Module:
    """images (B, 3, H, W) → logits (B, CLASSES)."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, CLASSES))


# -- the programs, as their users write them: the lines of each body are counted


def of_pytorch(train: Dataset, val: Dataset, net: nn.Module, workers: int, folder: Path) -> None:
    kept = {"num_workers": workers, "persistent_workers": workers > 0}
    train_loader = DataLoader(train, BATCH, shuffle=True, **kept)
    val_loader = DataLoader(val, BATCH, **kept)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train_loader))
    best = -1.0
    for epoch in range(EPOCHS):
        net.train()
        for x, y in train_loader:
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        net.eval()
        right, count = 0, 0
        with torch.no_grad():
            for x, y in val_loader:
                right += int((net(x).argmax(1) == y).sum())
                count += len(y)
        print(f"epoch {epoch}: accuracy {right / count:.3f}")
        if right / count > best:
            best = right / count
            torch.save(net.state_dict(), folder / "best.pt")


def of_lightning(train: Dataset, val: Dataset, net: nn.Module, workers: int, folder: Path) -> None:
    from lightning import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, i: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def validation_step(self, batch: Any, i: int) -> None:
            x, y = batch
            self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), prog_bar=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.0, fused=True)
            steps = int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    kept = {"num_workers": workers, "persistent_workers": workers > 0}
    train_loader = DataLoader(train, BATCH, shuffle=True, **kept)
    best = ModelCheckpoint(folder, monitor="accuracy", mode="max")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=EPOCHS, callbacks=[best], accelerator="cpu", num_sanity_val_steps=0, **quiet)
    trainer.fit(Module(), train_loader, DataLoader(val, BATCH, **kept))


def of_nbtools(train: Dataset, val: Dataset, net: nn.Module, workers: int, folder: Path) -> None:
    import nbtools as nb

    pack = nb.pack(train=train, val=val, test=0, progress=False)
    plan = nb.Plan(epochs=EPOCHS, batch_size=BATCH, lr=LR)
    nb.fit(nb.classify(net), pack, plan, folder / "run", receipt=False, progress=False)


Program = Callable[[Dataset, Dataset, nn.Module, int, Path], None]
PROGRAMS: dict[str, tuple[Program, str]] = {
    "nbtools": (of_nbtools, "torch"),
    "pytorch": (of_pytorch, "torch"),
    "lightning": (of_lightning, "lightning"),
}
"""name → (program, the package that it needs)."""


def lines(program: Program) -> int:
    """Lines of its body that are not empty; the repository's are written as ruff formats them."""
    return sum(bool(line.strip()) for line in inspect.getsource(program).splitlines()[1:])


# -- measuring


@dataclass
class Meter:
    """When each training batch reached the network: a forward pre-hook that copies of the network share."""

    began: float = field(default_factory=perf_counter)
    times: list[float] = field(default_factory=list)

    def __call__(self, module: nn.Module, given: Any) -> None:
        if module.training:
            self.times.append(perf_counter())

    def __deepcopy__(self, memo: Any) -> Meter:
        return self


@dataclass(frozen=True)
class Job:
    """A Dataset of so many samples, 7/8 of which are whole batches, and how wide its network is."""

    make: Callable[[Path, int], Dataset]
    count: int
    width: int


JOBS = {"decoding": Job(photos, 1536, 8), "computing": Job(in_memory, 8192, 32)}
QUICK = {name: Job(job.make, 512, 4) for name, job in JOBS.items()}


def parts(data: Any) -> tuple[Subset, Subset]:
    """(7/8 to train on, the rest), at random."""
    order, end = np.random.default_rng(0).permutation(len(data)).tolist(), len(data) // 8 * 7
    return Subset(data, order[:end]), Subset(data, order[end:])


def fastest_workers(data: Dataset, job: Job, most: int) -> dict[int, float]:
    """Workers of a DataLoader → samples/s of its second epoch in the plain loop's step, the fastest first."""
    found = {}
    for workers in range(most + 1):
        net = network(job.width)
        loader = DataLoader(data, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
        optimizer = torch.optim.AdamW(net.parameters(), lr=LR, fused=True)
        for _ in range(2):
            start, count = perf_counter(), 0
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
                count += len(x)
            found[workers] = count / (perf_counter() - start)
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def run(program: Program, data: tuple[Dataset, Dataset], job: Job, workers: int) -> tuple[float, float]:
    """(seconds before the first batch, samples/s after the first epoch) of one run of a program."""
    with tempfile.TemporaryDirectory() as name:
        os.environ["NBTOOLS_CACHE"] = name  # packed anew each time
        torch.manual_seed(0)
        net, meter = network(job.width), Meter()
        net.register_forward_pre_hook(meter)
        program(*data, net, workers, Path(name))
    steps, rest = divmod(len(meter.times), EPOCHS)
    assert not rest, f"{len(meter.times)} batches in {EPOCHS} epochs"
    # From the first batch of the second epoch to the first of the last: whole epochs, each with its evaluation.
    took = meter.times[-steps] - meter.times[steps]
    return meter.times[0] - meter.began, (EPOCHS - 2) * steps * BATCH / took


def measured(
    job: Job, folder: Path, rounds: int, most: int
) -> tuple[dict[str, dict[str, list[float]]], dict[int, float]]:
    """({"rate" and "start": program → a value for each round}, samples/s by workers)."""
    data = parts(job.make(folder, job.count))
    workers = fastest_workers(data[0], job, most)
    starts: dict[str, list[float]] = {}

    def turn(name: str) -> float:
        start, rate = run(PROGRAMS[name][0], data, job, next(iter(workers)))
        starts.setdefault(name, []).append(start)
        return rate

    there = [name for name, (_, package) in PROGRAMS.items() if find_spec(package)]
    rates = in_turns({name: lambda name=name: turn(name) for name in there}, rounds)
    return {"rate": rates, "start": starts}, workers


def figures(name: str, found: Mapping[str, Mapping[str, list[float]]]) -> list[Figure]:
    rates = found["rate"]
    peers = [peer for peer in rates if peer != "nbtools"]
    fastest = {"peer": [max(values) for values in zip(*(rates[peer] for peer in peers), strict=True)]}
    listed = [Figure.of(f"{name}_{who}", "samples/s", values) for who, values in rates.items()]
    listed += [Figure.of(f"{name}_{who}_start", "s", values) for who, values in found["start"].items()]
    listed += [Figure.of(f"{name}_over_{peer}", "×", times(rates, "nbtools", peer)) for peer in peers]
    return [*listed, Figure.of(f"your_own_{name}_ratio", "×", times({**rates, **fastest}, "nbtools", "peer"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=textwrap.dedent(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="in seconds, to see that it runs; writes no receipt")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    rounds, jobs = (1, QUICK) if given.quick else (given.rounds, JOBS)
    most = 1 if given.quick else cores() + 1
    listed: list[Figure] = []
    conditions: dict[str, Any] = {"batch": BATCH, "epochs": EPOCHS, "precision": "float32"}
    for name, job in jobs.items():
        with tempfile.TemporaryDirectory() as folder:
            found, workers = measured(job, Path(folder), rounds, most)
        listed += figures(name, found)
        conditions[name] = {"samples": job.count, "samples/s by workers": {k: round(v) for k, v in workers.items()}}
    conditions["lines"] = {name: lines(program) for name, (program, _) in PROGRAMS.items()}
    listed.sort(key=lambda figure: figure.name == "your_own_decoding_ratio")
    result = Receipt(listed[-1], tuple(listed[:-1]), conditions, measure.machine())
    if not given.quick:
        result.write()
    print("lines of the user:", ", ".join(f"{name} {count}" for name, count in conditions["lines"].items()))
    print(result)


if __name__ == "__main__":
    main()
