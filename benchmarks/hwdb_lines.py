"""What CPU runs of the slim network read: demo lines of 500 characters, and lines of real handwriting.

    python -m benchmarks.hwdb_lines [--only demo | real]

The same calls as a notebook's: pack → advise by its rules → fit → evaluate the best checkpoint on writers that neither
training nor that choice has seen. Demo: 12,000 lines, each writer's own hand, drawn with the font that is found. Real:
8,000 lines composed of Omniglot's characters, whose drawers are held back by whole people; third-party data, not part
of the project: NBTOOLS_REAL_DATA names the folder that holds `omniglot.zip`. Five real Chinese lines (`scut-lines.tar`)
are read by the demo's network: fed through, not scored, since most of their characters are none of its classes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbtools as nb
from benchmarks.compose import compose
from benchmarks.paired import RESULTS, Figure, Receipt
from nbtools.tasks import hwdb

CHARACTERS, LINES, COMPOSED, HEIGHT = 500, 12_000, 8_000, 32
REAL_EPOCHS = 20  # people's own hands differ more than the demo's; the rules say 4


def main() -> None:
    parser = argparse.ArgumentParser(description="what CPU runs of the slim network read")
    parser.add_argument("--only", choices=("demo", "real"), help="one of the two runs")
    only, data = parser.parse_args().only, os.environ.get("NBTOOLS_REAL_DATA")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if only != "real":
            source = hwdb.demo(folder / "demo", LINES, characters=CHARACTERS)
            run, pack = trained(folder, source, "hwdb_demo_lines", f"demo lines of {CHARACTERS} characters")
            beams(run, pack)
            if data:
                print(run.predict(sorted(nb.stage(Path(data) / "scut-lines.tar").rglob("*.jpg"))))
        if only != "demo" and data:
            source = compose(Path(data) / "omniglot.zip", folder / "composed", COMPOSED)
            title = "lines of Omniglot's characters, held-back drawers"
            run, pack = trained(folder, source, "hwdb_real_lines", title, epochs=REAL_EPOCHS)
            beams(run, pack)
    if not data:
        print("real handwriting: skipped; it needs omniglot.zip in the folder that NBTOOLS_REAL_DATA names")


def trained(folder: Path, source: Path, name: str, title: str, **knobs: Any) -> tuple[nb.Run, nb.Pack]:
    """Pack, train by the rules' plan, and write a receipt with the curve beside it."""
    pack = hwdb.pack(source, height=HEIGHT, into=folder / f"{name}.pack", progress=False)
    advice = nb.advise(hwdb, pack, measure=False)
    print(pack, advice, sep="\n\n")
    clock, cpu = time.monotonic(), time.process_time()
    run = nb.fit(hwdb, pack, advice.plan.replace(**knobs), run=folder / name, receipt=False)
    minutes, cpu_minutes = (time.monotonic() - clock) / 60, (time.process_time() - cpu) / 60
    found = nb.evaluate(run, pack, "test")
    shutil.copy(run.folder / "plot.png", RESULTS / f"{name}.png")
    units = {"cr": "of characters", "whole_accuracy": "of lines", "infeasible": "of lines"}
    figures = [Figure.of(f"test_{metric}", unit, [found[metric]]) for metric, unit in units.items()]
    figures += [Figure.of("wall", "min", [minutes]), Figure.of("cpu", "min", [cpu_minutes])]
    conditions: dict[str, Any] = {
        "data": f"{title}: {pack.splits['train']} train, {pack.splits['val']} val, {pack.splits['test']} test",
        "classes": len(pack.classes),
        "checkpoint": f"best on validation, epoch {run.best['epoch']} of {run.plan.epochs}",
        "plan": run.plan.to_dict(),
        "validation by epoch": {name: run.summary()[name].round(4).tolist() for name in ("val_cer", "val_loss")},
    }
    receipt = Receipt(Figure.of(name, "test_cer", [found["cer"]]), tuple(figures), conditions)
    receipt.write()
    print(receipt)
    return run, pack


def beams(run: nb.Run, pack: nb.Pack) -> None:
    """Greedy reading against the beam with a language model, weights chosen on the validation lines."""
    train, val, test = (pack.ids(split) for split in ("train", "val", "test"))
    truth = {split: [hwdb.text_of(pack, i) for i in ids] for split, ids in (("val", val), ("test", test))}
    lm = hwdb.NGram.train([hwdb.text_of(pack, i) for i in train], pack.classes)
    peaks, pairs = hwdb.peaks_of(run.model(), pack, run.plan, val), [(n / 5, k) for n in range(6) for k in range(5)]
    cers = {pair: hwdb.scores(truth["val"], hwdb.search(peaks, pack.classes, lm, 10, *pair))["cer"] for pair in pairs}
    best, peaks = min(cers, key=cers.__getitem__), hwdb.peaks_of(run.model(), pack, run.plan, test)
    for name, answers in {
        "greedy": run.predict_pack(pack, test),
        "beam": hwdb.search(peaks, pack.classes),
        f"beam, (alpha, beta) = {best}": hwdb.search(peaks, pack.classes, lm, 10, *best),
    }.items():
        print(f"{name}: CER {hwdb.scores(truth['test'], answers)['cer']:.4f}")


if __name__ == "__main__":
    sys.exit(main())
