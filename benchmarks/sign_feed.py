"""What a batch of clips costs until it is tensors: packed, against a DataLoader that reads the `.npz` at each access.

    python -m benchmarks.sign_feed [--quick]

CPU time of the whole process, its threads and its workers, a clip. Clips of `sign.demo`, with 122 frames on average as
the originals have. Two cases: `keypoints`, what the Transformer reads (X and mask; the DataLoader opens nothing else
of a file), and `features`, what the GRU reads (X2048). Same batches of 32 in the same order for all, padded to their
longest, and the same values, which is checked first. `task_reader` is a DataLoader over the pack's own raw files: it
looks at every rule of the format besides.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.feed import cost
from benchmarks.paired import Figure, Receipt, in_turns, on_one_core, times
from nbtools.data import Pack, Resident, Sample, batches_left, collate, lengths_of
from nbtools.data.feed import Streamed
from nbtools.tasks import sign

ROUNDS, COUNT, BATCH = 9, 320, 32
FRAMES = (100, 145)
CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "features": ({"kp_key": None}, {"features": "X2048"}),
    "keypoints": ({"feature_key": None}, {"x": "X", "mask": "mask"}),
}
CPU = torch.device("cpu")


class Npzs(Dataset):
    """The leanest reader: one file → the arrays that a network reads. keys: column → name in the file."""

    def __init__(self, files: Sequence[Path], keys: Mapping[str, str]):
        self.files, self.keys = files, keys

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> Sample:
        with np.load(self.files[i], allow_pickle=False) as arrays:
            found = {column: arrays[key] for column, key in self.keys.items()}
        return {**found, "id": np.asarray(i, np.int64)}


@dataclass(frozen=True)
class Case:
    """One kind of input, ready to be read in every way."""

    name: str
    pack: Pack
    npzs: Npzs

    def batches(self) -> list[np.ndarray]:
        """An epoch's batches of ids; every contestant pays for their order."""
        ids = self.pack.ids("train")
        return batches_left(ids, lengths_of(self.pack, ids), 0, 0, [[BATCH, 0]])

    def loaded(self, dataset: Dataset, workers: int) -> DataLoader:
        columns = partial(collate, columns=self.pack.columns)
        order = [ids.tolist() for ids in self.batches()]
        return DataLoader(dataset, batch_sampler=order, num_workers=workers, collate_fn=columns)


def prepare(name: str, source: Path, folder: Path) -> Case:
    options, keys = CASES[name]
    made = sign.pack(source, into=folder / f"{name}.pack", progress=False, **options)
    return Case(name, made, Npzs([source / name for name in made.names], keys))


def same(case: Case) -> None:
    """Raise SystemExit where a feed and the files do not give the same values."""
    for feed in (Resident(case.pack, CPU), Streamed(case.pack, CPU, prefetch=2)):
        for raw, expected in zip(feed(case.batches()), case.loaded(case.npzs, 0), strict=True):
            if not all(torch.equal(raw[name], value) for name, value in expected.items()):
                raise SystemExit(f"{case.name}: {feed.name} gives other values than the files hold")


def contestants(case: Case, passes: int) -> dict[str, Callable[[], float]]:
    """name → CPU-µs a clip of one round."""
    same(case)
    resident, streamed = Resident(case.pack, CPU), Streamed(case.pack, CPU, prefetch=2)
    assert case.pack.raw is not None
    return {
        **{f"dataloader_{w}": partial(cost, lambda w=w: case.loaded(case.npzs, w)) for w in (0, 2)},
        "task_reader": partial(cost, partial(case.loaded, case.pack.raw, 0)),
        "packed": partial(cost, lambda: resident(case.batches()), passes),
        "streamed": partial(cost, lambda: streamed(case.batches()), passes),
    }


def figures(name: str, found: dict[str, list[float]]) -> list[Figure]:
    """All that one case showed, the ratio last: the better DataLoader's cost over the pack's."""
    best = [min(pair) for pair in zip(found["dataloader_0"], found["dataloader_2"], strict=True)]
    return [
        *(Figure.of(f"{name}_{way}", "CPU-µs/clip", values) for way, values in found.items()),
        Figure.of(f"{name}_streamed_ratio", "×", times({**found, "best": best}, "best", "streamed")),
        Figure.of(f"{name}_feed_ratio", "×", times({**found, "best": best}, "best", "packed")),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time a clip: packed against DataLoader + np.load")
    parser.add_argument("--quick", action="store_true", help="in seconds, to see that it runs; writes no receipt")
    quick = parser.parse_args().quick
    machine = on_one_core()
    warnings.filterwarnings("ignore", message="This DataLoader will create 2 worker")  # two on the one core: CPU time
    rounds, count, passes = (1, 64, 2) if quick else (ROUNDS, COUNT, 5)
    with tempfile.TemporaryDirectory() as folder:
        source = sign.demo(Path(folder, "clips"), count, frames=FRAMES, features=True)
        cases = [prepare(name, source, Path(folder)) for name in CASES]
        *others, last = [f for c in cases for f in figures(c.name, in_turns(contestants(c, passes), rounds))]
    headline = Figure("sign_feed_ratio", last.unit, last.value, last.n, last.least, last.most)
    conditions = {"promise": "≥ 10× for keypoints", "clips": count, "frames": FRAMES, "batch": BATCH}
    result = Receipt(headline, tuple(others), conditions, machine)
    if not quick:
        result.write()
    print(result)


if __name__ == "__main__":
    main()
