"""What a CPU run of the slim network finds in street scenes: 80 to train on, 30 to validate, 11 classes.

    python -m benchmarks.segment_camvid [--full]

The same calls as a notebook's: pack → advise by its rules → fit → evaluate, beside what the place of a pixel alone says
(the most frequent class there in training). The set has no third split: the checkpoint is chosen on the images that the
score is of, so the last epoch's score stands beside it. --full: full size, for a GPU, where BiSeNetV2 is advised.
Third-party data, not part of the project: NBTOOLS_REAL_DATA names the folder that holds `camvid.tar`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import nbtools as nb
from benchmarks.paired import RESULTS, Figure, Receipt, on_one_core
from nbtools import measure, show, train
from nbtools.tasks import segment

CLASSES = ["sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist"]
VOID = 11
SMALL = (180, 240)  # half of what the files have
LOOKS: dict[str, dict[str, Any]] = {
    "single scale": {},
    "flip": {"eval_flip": True},
    "scales 0.75, 1, 1.25, flip": {"eval_scales": (0.75, 1.0, 1.25), "eval_flip": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="what a run finds in street scenes")
    parser.add_argument("--full", action="store_true", help="BiSeNetV2 at full size, for a GPU")
    full, data = parser.parse_args().full, os.environ.get("NBTOOLS_REAL_DATA")
    if not data:
        print("segment_camvid: skipped; it needs camvid.tar in the folder that NBTOOLS_REAL_DATA names")
        return
    machine = measure.machine() if full else on_one_core()
    size = None if full else SMALL
    pack = segment.pack(Path(data) / "camvid.tar", classes=CLASSES, ignore=[VOID], size=size, progress=False)
    advice = nb.advise(segment, pack, measure=False)
    plan = advice.plan
    print(pack, advice, sep="\n\n")
    name = "segment_camvid_full" if full else "segment_camvid"
    with tempfile.TemporaryDirectory() as scratch:
        start, cpu = time.monotonic(), time.process_time()
        run = nb.fit(segment, pack, plan, run=Path(scratch) / name, receipt=False)
        minutes = (time.monotonic() - start) / 60, (time.process_time() - cpu) / 60
        shutil.copy(run.folder / "plot.png", RESULTS / f"{name}.png")
        receipt(name, run, pack, minutes, machine)


def place_alone(pack: nb.Pack) -> dict[str, float]:
    """Return the metrics, on the validation split, of the most frequent class at each pixel in training."""
    labels = {
        split: torch.tensor(pack.arrays["label"][pack.ids(split)], dtype=torch.int64) for split in ("train", "val")
    }
    counts = torch.stack([(labels["train"] == k).sum(0) for k in range(len(pack.classes))])  # (K, H, W)
    logits, sums = counts[None].expand(len(labels["val"]), -1, -1, -1), train.Sums()
    sums.add(segment.metrics((logits, ()), {"label": labels["val"]}))
    return sums.read()


def receipt(name: str, run: nb.Run, pack: nb.Pack, minutes: tuple[float, float], machine: Mapping[str, str]) -> None:
    """Print and write what was found, beside the prior and by class."""
    prior = place_alone(pack)
    looks = {look: nb.evaluate(run, pack, "val", **knobs) for look, knobs in LOOKS.items()}
    curve = run.summary()["val_miou"].dropna()
    rows = [
        ("place alone", prior),
        *((f"{run.plan.to_dict()['network']}, {look}", found) for look, found in looks.items()),
    ]
    shown = ("miou", "pixel_accuracy")
    print(show.text(("method", *shown), [(what, *(f"{found[m]:.3f}" for m in shown)) for what, found in rows]))
    print(run.report(pack, "val").table)
    best = looks["single scale"]
    figures = [Figure.of(f"{what}: {m}", m, [found[m]]) for what, found in rows for m in shown if m in found]
    figures += [Figure.of("last epoch", "val_miou", [float(curve.iloc[-1])])]
    figures += [Figure.of("wall", "min", [minutes[0]]), Figure.of("cpu", "min", [minutes[1]])]
    conditions: dict[str, Any] = {
        "data": f"{pack.splits['train']} train, {pack.splits['val']} val, {pack.options['size']} pixels",
        "classes": pack.classes,
        "checkpoint": f"best on validation, epoch {run.best['epoch']} of {run.plan.epochs}",
        "parameters": sum(p.numel() for p in run.model().parameters()),
        "plan": run.plan.to_dict(),
        "val_miou by epoch": {str(epoch): round(value, 4) for epoch, value in curve.items()},
    }
    made = Receipt(Figure.of(name, "val_miou", [best["miou"]]), tuple(figures), conditions, machine)
    made.write()
    print(made)


if __name__ == "__main__":
    sys.exit(main())
