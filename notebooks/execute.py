"""Run the captcha notebooks from top to bottom on generated data: `make demo`.

Writes the executed notebooks and an HTML page of each under demo/, then prints the run's summary and its receipt.
NBTOOLS_TINY=1 makes everything tiny, as in the tests: seconds, and an accuracy that means nothing.
"""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter

from notebooks import build

DEMO = build.ROOT / "demo"
CAPTCHA = ("captcha/1_data", "captcha/2_train", "captcha/3_evaluate")
PROMISED = 0.80  # whole-captcha accuracy on unseen generated 4-digit captchas
WIDGET = "application/vnd.jupyter.widget-view+json"


def execute(name: str, folder: Path, drive: Path, *, tiny: bool = False, say: Any = None, timeout: int = 600) -> Any:
    """Run a notebook in a kernel of its own, with `folder` as its working folder and `drive` in the place of Drive.

    say: called with every section's heading when its first cell starts. Raises nbclient's CellExecutionError.
    """
    notebook = build.notebook(name, build.repository())
    environment = {**os.environ, "NBTOOLS_DRIVE": str(drive), "MPLBACKEND": "agg"}
    environment.pop("NBTOOLS_TINY", None)
    if tiny:
        environment["NBTOOLS_TINY"] = "1"
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        on_cell_start=(lambda cell, cell_index: announce(cell, say)) if say else None,
    )
    return client.execute(env=environment)


def announce(cell: Any, say: Any) -> None:
    for line in cell.source.splitlines():
        if cell.cell_type == "markdown" and line.startswith("## "):
            say(line.removeprefix("## "))


def page(notebook: Any) -> str:
    """The executed notebook as one HTML page. Widgets need a kernel: their place takes what was printed and drawn."""
    shown = nbformat.from_dict(notebook)
    for cell in shown.cells:
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if WIDGET not in o.get("data", {})]
    shown.metadata.pop("widgets", None)
    return HTMLExporter().from_notebook_node(shown)[0]


def main() -> int:
    tiny = "NBTOOLS_TINY" in os.environ
    shutil.rmtree(DEMO, ignore_errors=True)
    drive = DEMO / "drive"
    drive.mkdir(parents=True)
    start = time.monotonic()
    for name in CAPTCHA:
        print(f"{name}", flush=True)
        notebook = execute(
            name,
            DEMO,
            drive,
            tiny=tiny,
            say=lambda text: print(f"  {time.monotonic() - start:4.0f} s  {text}", flush=True),
        )
        stem = name.replace("/", "_")
        nbformat.write(notebook, DEMO / f"{stem}.ipynb")
        (DEMO / f"{stem}.html").write_text(page(notebook))
    return report(tiny, time.monotonic() - start)


def report(tiny: bool, seconds: float) -> int:
    """Print what came out of the demo's run; fail when it misses the accuracy that the README promises."""
    os.environ["NBTOOLS_DRIVE"] = str(DEMO / "drive")
    import nbtools as nb

    run = nb.Run.open(DEMO / "runs" / "captcha")
    print(f"\n{run.summary()}\n\n{run.receipt}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
