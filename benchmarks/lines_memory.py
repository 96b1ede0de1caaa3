"""How much memory training on lines takes on a CPU, and how much it grows after the first epoch, by `Plan.bucket`.

    python -m benchmarks.lines_memory [--quick]

1,828 lines of random ink, one thread, a process for each task and bucket. What grows are holes in malloc's heap between
what oneDNN keeps of the convolutions that it planned, up to 1,024 of them, each for one width.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

import nbtools as nb
from benchmarks.paired import Figure, Receipt
from nbtools.data import Card, Entry, Sample, Survey, build_pack
from nbtools.train import import_task

HEIGHT, LINES = 32, 1828
TASKS = {"hwdb": (400, 60, 16), "captcha": (140, 35, 32)}  # columns of a line: mean and deviation; batch
SECONDS = 30.0  # of CPU time


def inked(name: str, count: int, folder: Path) -> nb.Pack:
    """A pack of lines of random ink."""
    rng, (mean, deviation, _) = np.random.default_rng(0), TASKS[name]
    widths = rng.normal(mean, deviation, count).clip(mean / 2, mean * 1.5).astype(int)
    lines: dict[str, Sample] = {
        str(k): {"image": rng.integers(0, 256, (width, HEIGHT), np.uint8), "label": rng.integers(0, 36, 4)}
        for k, width in enumerate(widths)
    }
    folder.mkdir()
    (folder / "made").write_text("from arrays")
    shape: dict[str, Any] = {"ragged": ["image", "label"], "bucket_by": "image", "classes": [*map(str, range(36))]}
    found = Survey([Entry(line, split="train") for line in lines], **shape)
    options = {"layout": "lines", "height": HEIGHT}
    return build_pack(folder, name, options, lambda *_: found, lambda path, _: lines[path.name], progress=False)


def grown(name: str, bucket: int, seconds: float) -> list[float]:
    """Resident MiB after each epoch of a process that trains for so many CPU seconds, and one epoch at least."""
    torch.set_num_threads(1)
    task, (*_, batch), found = import_task(f"nbtools.tasks.{name}", "here"), TASKS[name], []
    with tempfile.TemporaryDirectory() as folder:
        pack = inked(name, LINES if seconds else 4 * batch, Path(folder) / "raw")
        plan = nb.advise(task, pack, measure=False).plan.replace(batch_size=batch, epochs=10_000, bucket=bucket)
        state, start = nb.TrainState(task, pack, plan), process_time()
        for record in nb.train(task, state, pack):
            if record.kind == "epoch":
                found.append(record.values["memory"])
                if process_time() - start >= seconds:
                    break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="memory of training on lines on a CPU, by how few widths there are")
    parser.add_argument("--quick", action="store_true", help="one small epoch each, to see that it runs")
    quick = parser.parse_args().quick
    figures: list[Figure] = []
    growth: list[float] = []
    for name in TASKS:
        task = import_task(f"nbtools.tasks.{name}", "here")
        card = Card(name, [*map(str, range(36))], {"layout": "lines", "height": HEIGHT}, {}, {"train": LINES})
        advised = task.suggest(card, "cpu")["bucket"][0]
        for bucket in (1, advised):
            command = [sys.executable, "-m", "benchmarks.lines_memory", "--inside", name, str(bucket)]
            ran = subprocess.run([*command, str(0 if quick else SECONDS)], capture_output=True, text=True, check=True)
            sizes = json.loads(ran.stdout.splitlines()[-1])
            figures.append(Figure.of(f"{name}_bucket_{bucket}", "MiB", [sizes[-1]]))
            more = 100 * (sizes[-1] / sizes[0] - 1)
            figures.append(Figure.of(f"{name}_bucket_{bucket}_growth", "%", [more]))
            growth += [more] if bucket == advised else []
    conditions = {"seconds": SECONDS, "lines": LINES, "height": HEIGHT, "columns, deviation, batch": TASKS}
    receipt = Receipt(Figure.of("lines_memory_growth", "%", growth), tuple(figures), conditions)
    if not quick:
        receipt.write()
    print(receipt)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        print(json.dumps(grown(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))))
    else:
        main()
