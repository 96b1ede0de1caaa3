"""How long `nb.advise` takes where training takes minutes: what the training notebooks do with their demo data.

    python -m benchmarks.advising [--rounds 3] [--quick]

Seconds of the call, each in a process of its own with a new copy of the pack, next to which it would else find what was
measured before; tasks take turns.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.paired import Figure, Receipt, in_turns

ROUNDS = 3
DEMOS: dict[str, dict[str, Any]] = {
    "captcha": {"count": 6000},
    "hwdb": {"count": 6000},
    "sign": {"count": 600, "glosses": 12, "categories": 2, "features": True},
    "segment": {"count": 1400, "size": (128, 96)},
}
"""task → what its training notebook generates."""
TIMED = """
import sys, time
from importlib import import_module
import nbtools as nb
name, source, folder, seconds = sys.argv[1:]
task = import_module(f"nbtools.tasks.{name}")
pack = task.pack(source, into=folder, progress=False)  # made before: opens at once
start = time.perf_counter()
nb.advise(task, pack, seconds=float(seconds) or None)
print(time.perf_counter() - start)
"""


def advised(name: str, source: Path, pack: Path, seconds: float) -> float:
    """Seconds of the call. seconds: what it is asked to take; 0: it chooses."""
    with tempfile.TemporaryDirectory() as place:
        copy = shutil.copytree(pack, Path(place, "pack"))
        command = [sys.executable, "-c", TIMED, name, str(source), str(copy), str(seconds)]
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(ran.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="how long the advice takes where training takes minutes")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="in seconds, to see that it runs; writes no receipt")
    options = parser.parse_args()
    demos, seconds = DEMOS, 0.0
    if options.quick:
        demos, seconds, options.rounds = {"captcha": {"count": 64}}, 0.5, 1
    turns = {}
    with tempfile.TemporaryDirectory() as place:
        for name, given in demos.items():
            task: Any = import_module(f"nbtools.tasks.{name}")
            source = task.demo(Path(place, name), **given)
            pack = task.pack(source, into=Path(place, f"{name}-pack"), progress=False)
            turns[name] = partial(advised, name, source, pack.folder, seconds)
        found = in_turns(turns, options.rounds)
    figures = tuple(Figure.of(name, "s", took) for name, took in found.items())
    slowest = max(figures, key=lambda figure: figure.value)
    headline = Figure.of("advising", "s", found[slowest.name])
    result = Receipt(headline, figures, {"demos": demos, "slowest": slowest.name, "promise": "≤ 20 s"})
    if not options.quick:
        result.write()
    print(result)


if __name__ == "__main__":
    main()
