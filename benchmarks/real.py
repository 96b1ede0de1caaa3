"""What CPU runs reach on real data, with the plan that the rules propose, beside what learns nothing.

    python -m benchmarks.real [--only sign]

The same calls as a notebook's: pack → advise by its rules → fit → evaluate. `captcha`: 4,000 coloured captchas of 4–8
characters, and `hwdb`: 8,000 lines of Omniglot's characters (`benchmarks.compose`), both scored by the best checkpoint
on what neither training nor that choice has seen, 500 images or whole drawers. `sign`: ten signs, five seeds, and
`segment`: CamVid at half its size, both scored by the last epoch on the validation split, as they have no third.

Third-party data, not part of the project: NBTOOLS_REAL_DATA names the folder of these archives; a missing one is
skipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import Tensor

import nbtools as nb
from benchmarks.compose import compose
from benchmarks.paired import RESULTS, Figure, Receipt, on_one_core
from nbtools.data import Pack, collate
from nbtools.tasks import segment, sign
from nbtools.train import Sums

STREET = ["sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist"]


def nearest(pack: Pack) -> float:
    """Return the accuracy of the nearest training clip in mean and deviation of every coordinate."""

    def summarised(split: str) -> tuple[Tensor, Tensor]:
        samples = collate([pack.sample(int(i)) for i in pack.ids(split)], pack.columns)
        batch = sign.batch(samples, sign.Plan(normalise="none"), None)
        clips = [x[:length] for x, length in zip(batch["x"], batch["x_length"].tolist(), strict=True)]
        return torch.stack([torch.cat([x.mean(0), x.std(0, correction=0)]) for x in clips]), batch["label"][:, 0]

    (train, truth), (val, expected) = summarised("train"), summarised("val")
    return (truth[torch.cdist(val, train).argmin(1)] == expected).double().mean().item()


def place_alone(pack: Pack) -> float:
    """Return the mIoU of the most frequent class at each pixel in training."""
    train, val = (torch.tensor(pack.arrays["label"][pack.ids(split)], dtype=torch.int64) for split in ("train", "val"))
    counts, sums = torch.stack([(train == k).sum(0) for k in range(len(pack.classes))]), Sums()  # counts (K, H, W)
    sums.add(segment.metrics((counts[None].expand(len(val), -1, -1, -1), ()), {"label": val}))
    return sums.read()["miou"]


NEAREST, PLACE = ("nearest neighbour", nearest), ("place alone: miou", place_alone)
HALF_SIZE = {"classes": STREET, "ignore": [11], "size": (180, 240)}


@dataclass(frozen=True)
class Case:
    """receipt: its name; options: of the task's `pack`; knobs: of the plan; beside: name → score without learning."""

    archive: str
    receipt: str
    metric: str
    options: dict[str, Any] = field(default_factory=dict)
    knobs: dict[str, Any] = field(default_factory=dict)
    seeds: int = 1
    split: str = "test"
    beside: tuple[str, Callable[[Pack], float]] | None = None


CASES = {
    "captcha": Case("captcha-lines.tar", "captcha_lines", "cer", {"label": "-", "case": "lower", "test": 500}),
    # people's own hands differ more than the demo's, for which the rules say 4 epochs
    "hwdb": Case("omniglot.zip", "hwdb_real_lines", "cer", {"height": 32}, {"epochs": 20}),
    "sign": Case("isl-keypoints.tar", "sign_isl", "gloss_accuracy", seeds=5, split="val", beside=NEAREST),
    "segment": Case("camvid.tar", "segment_camvid", "miou", HALF_SIZE, split="val", beside=PLACE),
}


def measured(name: str, case: Case, archive: Path, folder: Path, machine: dict[str, str]) -> Receipt:
    """Train each seed; return the mean score, with its spread."""
    task: Any = import_module(f"nbtools.tasks.{name}")
    source = compose(archive, folder / "composed", 8000) if name == "hwdb" else archive
    pack = task.pack(source, into=folder / "pack", progress=False, **case.options)
    plan = nb.advise(task, pack, measure=False).plan.replace(**case.knobs)
    best, last, minutes, curve, run = list[float](), list[float](), list[float](), dict[str, Any](), None
    for seed in range(case.seeds):
        start = process_time()
        run = nb.fit(task, pack, plan.replace(seed=seed), run=folder / f"run-{seed}", receipt=False)
        minutes.append((process_time() - start) / 60)
        best.append(nb.evaluate(run, pack, case.split)[case.metric])
        curve = run.summary()[f"val_{case.metric}"].dropna().round(4).to_dict()
        last.append([*curve.values()][-1])
    assert run is not None
    shutil.copy(run.folder / "plot.png", RESULTS / f"{case.receipt}.png")
    scores, unit = last if case.split == "val" else best, f"{case.split}_{case.metric}"
    headline = dataclasses.replace(Figure.of(case.receipt, unit, scores), value=statistics.mean(scores))
    figures = [Figure.of("best checkpoint", unit, best), Figure.of("last epoch", f"val_{case.metric}", last)]
    figures += [Figure.of(case.beside[0], unit, [case.beside[1](pack)])] if case.beside else []
    conditions = {"samples": pack.splits, "classes": len(pack.classes), "plan": plan.to_dict(), "by epoch": curve}
    return Receipt(headline, (*figures, Figure.of("cpu", "min", minutes)), conditions, machine)


def main() -> None:
    parser = argparse.ArgumentParser(description="what CPU runs reach on real data")
    parser.add_argument("--only", choices=list(CASES), help="this one only")
    only, data, machine = parser.parse_args().only, os.environ.get("NBTOOLS_REAL_DATA"), on_one_core()
    for name, case in CASES.items():
        archive = Path(data or "") / case.archive
        if data is None or not archive.exists():
            print(f"{name}: skipped; it needs {case.archive} in the folder that NBTOOLS_REAL_DATA names")
        elif only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                receipt = measured(name, case, archive, Path(folder), machine)
            receipt.write()
            print(receipt)


if __name__ == "__main__":
    main()
