"""What a batch of images costs until it is a uint8 tensor: packed, against a DataLoader that decodes PNGs with PIL.

    python -m benchmarks.feed [--quick]

CPU time of the whole process, its threads and its workers, an image. Two data sets of `captcha.demo`: 60×160 captchas,
and lines of 4 to 8 characters. Same batches of 64 in the same order for all; for captchas also the same bytes, which is
checked first. A DataLoader does the least that serves: decode, make grey, scale lines to the pack's height, stack or
pad. (The pack's lines are cut to their ink besides.)
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks.paired import Figure, Receipt, in_turns, on_one_core, times
from nbtools.data import Feed, Pack, Resident, batches_left, collate, lengths_of
from nbtools.data.feed import Streamed
from nbtools.tasks import captcha

ROUNDS, COUNT, BATCH = 9, 1600, 64
PASSES = 5  # over the data, a round, of what takes microseconds an image
CPU = torch.device("cpu")


class Pngs(Dataset):
    """The leanest reader: one file → grey (H, W), or for lines (W, height)."""

    def __init__(self, files: Sequence[Path], height: int | None):
        self.files, self.height = files, height

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> dict[str, Any]:
        image = Image.open(self.files[i]).convert("L")
        if self.height is None:
            return {"image": np.asarray(image), "id": np.int64(i)}
        scaled = image.resize((image.width * self.height // image.height, self.height))
        return {"image": np.asarray(scaled).T, "id": np.int64(i)}


@dataclass(frozen=True)
class Case:
    """One data set, ready to be read in every way."""

    name: str
    pack: Pack
    source: Path
    plan: captcha.Plan

    def batches(self) -> list[np.ndarray]:
        """An epoch's batches of ids; every contestant pays for their order."""
        ids = self.pack.ids("train")
        return batches_left(ids, lengths_of(self.pack, ids), self.plan.seed, 0, [[BATCH, 0]])

    def pngs(self) -> Pngs:
        return Pngs([self.source / name for name in self.pack.names], self.pack.options.get("height"))

    def loaded(self, dataset: Dataset, workers: int) -> DataLoader:
        columns = partial(collate, columns=self.pack.columns)
        return DataLoader(
            dataset, batch_sampler=[ids.tolist() for ids in self.batches()], num_workers=workers, collate_fn=columns
        )


def prepare(name: str, folder: Path, count: int, **demo: Any) -> Case:
    source = captcha.demo(folder / name, count, **demo)
    pack = captcha.pack(source, into=folder / f"{name}.pack", progress=False)
    return Case(name, pack, source, captcha.PLAN.replace(batch_size=BATCH))


def cpu_time() -> float:
    """CPU seconds of this process, all its threads, and the workers that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return process_time() + children.ru_utime + children.ru_stime


def cost(read: Callable[[], Iterable[dict[str, Any]]], passes: int = 1) -> float:
    """CPU-µs an image."""
    start, images = cpu_time(), 0
    for _ in range(passes):
        for batch in read():
            images += len(batch["id"])
    return (cpu_time() - start) / images * 1e6


def require_equal(case: Case, feeds: Sequence[Feed]) -> None:
    """Raise SystemExit where feeds and files do not give the same bytes."""
    dataset = case.pack.raw if case.pack.options["layout"] == "lines" else case.pngs()
    assert dataset is not None
    batches = case.batches()
    for expected, *fed in zip(case.loaded(dataset, 0), *(feed(batches) for feed in feeds), strict=True):
        for feed, raw in zip(feeds, fed, strict=True):
            if not (torch.equal(raw["id"], expected["id"]) and torch.equal(raw["image"], expected["image"])):
                raise SystemExit(f"{case.name}: {feed.name} gives other images than the files hold")


def contestants(case: Case) -> dict[str, Callable[[], float]]:
    """Return name → CPU-µs an image of one round."""
    resident, streamed = Resident(case.pack, CPU), Streamed(case.pack, CPU, case.plan)
    require_equal(case, (resident, streamed))
    return {
        **{f"dataloader_{w}": partial(cost, lambda w=w: case.loaded(case.pngs(), w)) for w in (0, 2)},
        "packed": partial(cost, lambda: resident(case.batches()), PASSES),
        "streamed": partial(cost, lambda: streamed(case.batches()), PASSES),
    }


def figures(name: str, costs: dict[str, list[float]]) -> list[Figure]:
    """Return all that one data set showed, the ratio last: the better DataLoader's cost over the pack's."""
    best = [min(pair) for pair in zip(costs["dataloader_0"], costs["dataloader_2"], strict=True)]
    return [
        *(Figure.of(f"{name}_{way}", "CPU-µs/image", values) for way, values in costs.items()),
        Figure.of(f"{name}_streamed_ratio", "×", times({**costs, "best": best}, "best", "streamed")),
        Figure.of(f"{name}_feed_ratio", "×", times({**costs, "best": best}, "best", "packed")),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time an image: packed against DataLoader + PIL")
    parser.add_argument("--quick", action="store_true", help="in seconds, to see that it runs; writes no receipt")
    quick = parser.parse_args().quick
    machine = on_one_core()
    warnings.filterwarnings("ignore", message="This DataLoader will create 2 worker")  # two on the one core: CPU time
    rounds, count = (1, 160) if quick else (ROUNDS, COUNT)
    with tempfile.TemporaryDirectory() as folder:
        cases = [prepare("lines", Path(folder), count, length=(4, 8)), prepare("captcha", Path(folder), count)]
        *others, last = [f for case in cases for f in figures(case.name, in_turns(contestants(case), rounds))]
    headline = Figure("feed_ratio", last.unit, last.value, last.n, last.least, last.most)
    conditions = {"promise": "≥ 100× for captchas", "images": count, "batch": BATCH, "pillow": Image.__version__}
    result = Receipt(headline, tuple(others), conditions, machine)
    if not quick:
        result.write()
    print(result)


if __name__ == "__main__":
    main()
