"""What stands between a fresh process and its first step: the import of nbtools, and a notebook opened for the second
time.

    python -m benchmarks.coldstart [--quick]

The import: CPU time of a process that imports nbtools over one that imports torch, in turns. The second start: the
captcha notebook's calls in a new process, with data staged, packed and measured before; wall-clock seconds until the
first row of a fresh run's history is on the disk.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, sleep

from benchmarks.paired import Figure, Receipt, in_turns, times

ROUNDS, STARTS, COUNT = 9, 9, 2000
MOMENT = 0.02  # seconds between two looks at the history
NOTEBOOK = """
import sys, nbtools as nb
from nbtools.tasks import captcha
source, run = sys.argv[1:]
pack = captcha.pack(nb.stage(source), progress=False)
advice = nb.advise(captcha, pack, measure=False)
panel = nb.Panel(advice)
nb.fit(captcha, pack, panel, run=run, receipt=False)
"""


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def importing(name: str) -> float:
    """CPU seconds of a process that imports a module, once compiled: some containers have each compile it anew."""
    start = children_s()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", f"import {name}"], check=True, env=env)
    return children_s() - start


def first_row(source: Path, run: Path) -> float:
    """Seconds from the start of a process until the history of its run has a row."""
    history, start = run / "history.csv", perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK, str(source), str(run)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while not history.exists() or history.read_bytes().count(b"\n") < 2:  # the header, and a row
            if process.poll() is not None:
                raise SystemExit(f"the process ended with {process.returncode} before its first step")
            sleep(MOMENT)
        took = perf_counter() - start
        process.kill()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description="the import, and the second start of a notebook to its first step")
    parser.add_argument("--quick", action="store_true", help="in seconds, to see that it runs; writes no receipt")
    quick = parser.parse_args().quick
    rounds, starts, count = (1, 1, 64) if quick else (ROUNDS, STARTS, COUNT)
    importing("nbtools")  # compiles it
    found = in_turns({name: lambda name=name: importing(name) for name in ("torch", "nbtools")}, rounds)
    figures = [Figure.of(f"import {name}", "CPU s", seconds) for name, seconds in found.items()]
    figures.append(Figure.of("import ratio", "×", times(found, "nbtools", "torch")))
    with tempfile.TemporaryDirectory() as place:
        os.environ["NBTOOLS_CACHE"] = f"{place}/cache"
        from nbtools.tasks import captcha

        source = captcha.demo(Path(place, "captcha"), count=count)
        first_row(source, Path(place, "first"))  # stages and packs
        seconds = [first_row(source, Path(place, f"run{k}")) for k in range(starts)]
    result = Receipt(
        Figure.of("coldstart", "s", seconds), tuple(figures), {"samples": count, "promise": "≤ 10 s, ≤ 1.1×"}
    )
    if not quick:
        result.write()
    print(result)


if __name__ == "__main__":
    main()
