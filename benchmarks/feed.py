"""What a batch of images costs until it is a uint8 tensor: packed, against a DataLoader that decodes PNGs with PIL.

    python -m benchmarks.feed [--quick]

CPU time of the whole process, its threads and its workers, an image. Two data sets of `captcha.demo`: 60×160 captchas,
and lines of 4 to 8 characters. Same batches of 64 in the same order for all; for captchas also the same bytes, which is
checked first. A DataLoader does the least that serves: decode, make grey, scale lines to the pack's height, stack or
pad. (The pack's lines are cut to their ink besides; `task_reader` is a DataLoader that does that at each access.)

Beside it: what converting a batch to floats takes (task.batch), what augmenting adds, and what a training step does.
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
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks.paired import Figure, Receipt, above, in_turns, on_one_core, times
from nbtools import TrainState, train
from nbtools.data import Draws, Feed, Pack, Resident, batches_left, collate, lengths_of
from nbtools.data.feed import Streamed
from nbtools.tasks import captcha
from nbtools.train import Task

ROUNDS, COUNT, BATCH = 9, 1600, 64
PASSES = 5  # over the data, a round, of what takes microseconds an image
CPU = torch.device("cpu")
TASK = cast(Task, captcha)


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
    plan = captcha.PLAN.replace(batch_size=BATCH, amp="off", channels_last=False, epochs=10**6, warmup_epochs=0)
    advised = {field: value for field, (value, _) in captcha.suggest(pack.card, "cpu").items()}
    return Case(name, pack, source, plan.replace(**{f: advised[f] for f in ("network", "augment")}))


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


def same(case: Case, feeds: Sequence[Feed]) -> None:
    """Raise SystemExit where feeds and files do not give the same bytes."""
    dataset = case.pack.raw if case.pack.options["layout"] == "lines" else case.pngs()
    assert dataset is not None
    batches = case.batches()
    for expected, *fed in zip(case.loaded(dataset, 0), *(feed(batches) for feed in feeds), strict=True):
        for feed, raw in zip(feeds, fed, strict=True):
            if not (torch.equal(raw["id"], expected["id"]) and torch.equal(raw["image"], expected["image"])):
                raise SystemExit(f"{case.name}: {feed.name} gives other images than the files hold")


def contestants(case: Case) -> dict[str, Callable[[], float]]:
    """name → CPU-µs an image of one round."""
    resident, streamed = Resident(case.pack, CPU), Streamed(case.pack, CPU, case.plan)
    same(case, (resident, streamed))
    steps = train(TASK, TrainState(TASK, case.pack, case.plan, CPU), case.pack)

    def converted(draws: bool) -> Iterable[dict[str, Any]]:
        for raw in resident(case.batches()):
            yield captcha.batch(raw, case.plan, Draws(0, 0, raw["id"]) if draws else None)

    def trained() -> float:
        start = cpu_time()
        next(steps)
        return (cpu_time() - start) / BATCH * 1e6

    found = {
        **{f"dataloader_{w}": partial(cost, lambda w=w: case.loaded(case.pngs(), w)) for w in (0, 2)},
        "packed": partial(cost, lambda: resident(case.batches()), PASSES),
        "streamed": partial(cost, lambda: streamed(case.batches()), PASSES),
        "converted": partial(cost, partial(converted, False)),
        "augmented": partial(cost, partial(converted, True)),
        "train_step": trained,
    }
    if case.pack.options["layout"] == "lines" and case.pack.raw is not None:
        found["task_reader"] = partial(cost, partial(case.loaded, case.pack.raw, 0))
    return found


def figures(name: str, found: dict[str, list[float]]) -> list[Figure]:
    """All that one data set showed, the ratio last: the better DataLoader's cost over the pack's."""
    unit, best = "CPU-µs/image", [min(pair) for pair in zip(found["dataloader_0"], found["dataloader_2"], strict=True)]
    parts = {
        "conversion": above(found, "converted", "packed"),
        "augmentation": above(found, "augmented", "converted"),
    }
    share = [100 * (c + a) / t for c, a, t in zip(*parts.values(), found["train_step"], strict=True)]
    return [
        *(Figure.of(f"{name}_{way}", unit, values) for way, values in {**found, **parts}.items()),
        Figure.of(f"{name}_conversion_and_augmentation", "% of a training step", share),
        Figure.of(f"{name}_streamed_ratio", "×", times({**found, "best": best}, "best", "streamed")),
        Figure.of(f"{name}_feed_ratio", "×", times({**found, "best": best}, "best", "packed")),
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
