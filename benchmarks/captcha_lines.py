"""What a 20-minute CPU run reads of real captchas: 4,000 coloured lines of 4–8 characters, 500 of them held back.

The same calls as a notebook's: stage → pack → advise → fit → evaluate on the best checkpoint by validation. The images
are third-party data and not part of the project: NBTOOLS_REAL_DATA names the folder that holds `captcha-lines.tar`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import nbtools as nb
from benchmarks.paired import RESULTS, Figure, Receipt
from nbtools.tasks import captcha

HELD_BACK = 500


def main() -> None:
    data = os.environ.get("NBTOOLS_REAL_DATA")
    if not data:
        print("captcha_lines: skipped; it needs captcha-lines.tar in the folder that NBTOOLS_REAL_DATA names")
        return
    folder = nb.stage(Path(data) / "captcha-lines.tar")
    pack = captcha.pack(folder, label="-", case="lower", test=HELD_BACK)
    advice = nb.advise(captcha, pack, measure=False)
    print(pack, advice, sep="\n\n")
    clock, cpu = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        run = nb.fit(captcha, pack, advice, run=Path(scratch) / "captcha-lines", receipt=False)
        minutes, cpu_minutes = (time.monotonic() - clock) / 60, (time.process_time() - cpu) / 60
        found = nb.evaluate(run, pack, "test")
        shutil.copy(run.folder / "plot.png", RESULTS / "captcha_lines.png")
        names = {"cer": "of characters", "cr": "of characters", "whole_accuracy": "of captchas"}
        figures = [Figure.of(f"test_{name}", unit, [found[name]]) for name, unit in names.items()]
        figures += [Figure.of("wall", "min", [minutes]), Figure.of("cpu", "min", [cpu_minutes])]
        conditions = {
            "data": f"{pack.splits['train']} train, {pack.splits['val']} val, {pack.splits['test']} test",
            "checkpoint": f"best on validation, epoch {run.best['epoch']} of {run.plan.epochs}",
            "plan": run.plan.to_dict(),
            "validation by epoch": {name: run.summary()[name].round(4).tolist() for name in ("val_cer", "val_loss")},
        }
    headline = Figure.of("captcha_lines", "test_cer", [found["cer"]])
    receipt = Receipt(headline, tuple(figures), conditions)
    receipt.write()
    print(receipt)


if __name__ == "__main__":
    sys.exit(main())
