"""Those claims of the guides that a CPU can answer: what a larger batch, workers, and workers that persist gain.

    python -m benchmarks.claims [--quick]

Each claim is two plans, or two DataLoaders, that train the same network in float32, in turns in one process: the ratio
of their samples/s. Batches come from the pack, so that the batch alone is compared; DataLoaders decode the source
files, and a turn of theirs is a whole epoch, the start of its workers included. What bf16 gains is in `knobs`, what
everything together gains in `tasks`.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from benchmarks.paired import Figure, Receipt, in_turns, times
from nbtools import measure
from nbtools.data import Pack, collate
from nbtools.tasks import captcha, hwdb
from nbtools.train import device

ROUNDS, SECONDS, COUNT = 7, 2.0, 2048
BATCHES: tuple[tuple[Any, tuple[int, int], int], ...] = ((hwdb, (8, 64), 160), (captcha, (512, 1024), COUNT))
"""The guides' batches before and after, "8 times as fast" and "twice as fast", and samples for them."""
WORKERS = (0, 2, 4, 8)
"""What is claimed is 1.2 times from 4 to 8; without any the process that trains decodes too."""


def packed(task: Any, folder: Path, count: int) -> tuple[Pack, Any]:
    """(the task's demo, its plan for a CPU by the rules alone, in float32)."""
    pack = task.pack(task.demo(folder / "raw", count), val=0, test=0, into=folder / "pack", progress=False)
    return pack, measure.advise(task, pack, measure=False).plan.replace(amp="off", compile=False)


def by_batch(task: Any, folder: Path, sizes: tuple[int, int], count: int, seconds: float) -> dict[str, Any]:
    """batch → a turn of training with it, which returns samples/s."""
    pack, plan = packed(task, folder, count)

    def turn(stepper: measure.Stepper) -> float:
        return stepper.advance(seconds).samples_per_s

    steppers = {size: measure.Stepper(task, pack, plan.replace(batch_size=size), device.pick()) for size in sizes}
    return {f"batch {size}": partial(turn, stepper.warm_up(1)) for size, stepper in steppers.items()}


def by_loader(folder: Path, count: int) -> dict[str, Callable[[], float]]:
    """DataLoader → a turn of an epoch of captchas, which returns samples/s."""
    pack, plan = packed(captcha, folder, count)
    stepper = measure.Stepper(captcha, pack, plan, device.pick()).warm_up()

    def epoch(loader: DataLoader) -> Iterator[dict[str, torch.Tensor]]:
        yield from loader  # starts the workers in the turn

    def turn(loader: DataLoader) -> float:
        return stepper.on(epoch(loader)).advance(steps=len(loader)).samples_per_s

    def loader(workers: int, persistent: bool) -> DataLoader:
        columns = partial(collate, columns=pack.columns)
        data = Subset(pack.raw, pack.ids("train").tolist())
        return DataLoader(
            data, plan.batch_size, True, num_workers=workers, collate_fn=columns, persistent_workers=persistent
        )

    turns = {f"{n} workers": partial(turn, loader(n, n > 0)) for n in WORKERS}
    return {**turns, "2 workers, started in each epoch": partial(turn, loader(2, False))}


def main() -> None:
    parser = argparse.ArgumentParser(description="those claims of the guides that a CPU can answer")
    parser.add_argument("--quick", action="store_true", help="in seconds, to see that it runs; writes no receipt")
    quick = parser.parse_args().quick
    rounds, seconds = (1, 0.1) if quick else (ROUNDS, SECONDS)
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        for task, sizes, count in BATCHES:
            data, sizes, count = task.__name__.rpartition(".")[2], (8, 16) if quick else sizes, 32 if quick else count
            found = in_turns(by_batch(task, Path(name) / data, sizes, count, seconds), rounds)
            small, large = found
            figures += [Figure.of(f"{data}, {size}", "samples/s", values) for size, values in found.items()]
            figures.append(Figure.of(f"{data}, {large} over {small}", "×", times(found, large, small)))
        turns = by_loader(Path(name) / "loaders", 64 if quick else COUNT)
        found = in_turns(turns, 1) and in_turns(turns, rounds)  # the first starts the workers that persist
    figures += [Figure.of(f"captcha, {loader}", "samples/s", values) for loader, values in found.items()]
    for more, fewer in (("2", "0"), ("4", "2"), ("8", "4")):
        pair = f"{more} workers", f"{fewer} workers"
        figures.append(Figure.of(f"captcha, {pair[0]} over {fewer}", "×", times(found, *pair)))
    headline = Figure.of("claims", "×", times(found, "2 workers", "2 workers, started in each epoch"))
    result = Receipt(headline, tuple(figures), {"headline": "2 workers that persist over 2 started in each epoch"})
    if not quick:
        result.write()
    print(result)


if __name__ == "__main__":
    main()
