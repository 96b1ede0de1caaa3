"""Run a task's notebooks from top to bottom on generated data: `make demo`, or `make demo TASK=hwdb` (sign, segment).

Writes the executed notebooks and an HTML page of each under demo/, then prints the run's summary and its receipt, and
fails where the score on unseen samples is less than promised."""

import argparse
import copy
import importlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient
from nbformat import NotebookNode

from notebooks import build

DEMO = build.ROOT / "demo"
LIMIT = 1800  # seconds a cell: training shares its cores on a busy machine
PROMISED = {  # task → (split, metric, +1 or -1 where lower is better, value, in words)
    "captcha": ("test", "whole_accuracy", 1, 0.80, "whole captchas read right, of those never seen"),
    "hwdb": ("test", "cer", -1, 0.15, "characters read wrong, of writers never seen"),
    "sign": ("val", "gloss_accuracy", 1, 0.90, "signs recognised, of signers never trained on"),
    "segment": ("test", "miou", 1, 0.75, "mIoU of garment and background, in pictures never seen"),
}
WIDGET = "application/vnd.jupyter.widget-view+json"


TINY = {
    "0_start_here": {"COUNT": 150, "EPOCHS": 1},
    "9_your_own_task": {"COUNT": 120, "EPOCHS": 1, "MEASURE": False},
    "captcha": {"COUNT": 200},
    "hwdb": {"COUNT": 240},
    "sign": {"COUNT": 40, "GLOSSES": 4},
    "segment": {"COUNT": 28, "SIDES": (48, 48)},
    "2_train": {"CHANGES": {"epochs": 1, "warmup_epochs": 0.0}, "MEASURE": False},
    "sign/2_train": {"MORE": 1},
    "3_evaluate": {"EPOCHS": 1},
}
"""Settings with which a notebook runs in seconds, and its accuracy means nothing: for tests. By task and by part."""


def tiny(name: str) -> NotebookNode:
    """The notebook with these settings."""
    found: dict[str, object] = {}
    for part in (*name.split("/"), name):
        found |= TINY.get(part, {})
    return build.with_parameters(build.notebook(name, build.repository()), **found)


def execute(
    made: NotebookNode,
    folder: Path,
    drive: Path,
    *,
    threads: int | None = None,
    say: Callable[[str], None] | None = None,
) -> NotebookNode:
    """Run a notebook in a kernel of its own, with `folder` as its working folder and `drive` in the place of Drive.

    threads: of torch, by default its own choice. say: called with every section's heading when it is reached. Raises
    nbclient's CellExecutionError.
    """
    environment = {
        **os.environ,
        "NBTOOLS_CACHE": str(folder / "cache"),
        "NBTOOLS_DRIVE": str(drive),
        **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
    }
    return run(made, folder, environment, say=say)


def run(
    notebook: NotebookNode,
    folder: Path,
    environment: dict[str, str],
    python: str | Path = sys.executable,
    say: Callable[[str], None] | None = None,
) -> NotebookNode:
    """Run a notebook's cells in a kernel of a Python; the notebook gets the outputs, also where a cell fails."""
    client = NotebookClient(
        notebook,
        timeout=LIMIT,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],  # it warns of unencrypted TCP, which stays on this machine
        resources={"metadata": {"path": str(folder)}},
        on_cell_start=lambda cell, cell_index: announce(cell, say) if say else None,
    )
    launch = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    client.create_kernel_manager()._kernel_spec = KernelSpec(argv=launch, display_name="Python 3", language="python")
    return client.execute(env=environment)


def announce(cell: NotebookNode, say: Callable[[str], None]) -> None:
    for line in cell.source.splitlines():
        if cell.cell_type == "markdown" and line.startswith("## "):
            say(line.removeprefix("## "))


def page(notebook: NotebookNode) -> str:
    """The executed notebook as one HTML page, without what only lives in a kernel: widgets and progress bars."""
    from nbconvert import HTMLExporter
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor

    shown = copy.deepcopy(notebook)
    for cell in shown.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not fleeting(output)]
            for output in cell.outputs:
                output.get("data", {}).pop(WIDGET, None)
    shown.metadata.pop("widgets", None)
    # of a bar's states, each after a carriage return, the last one stays: nothing, once it is closed
    return HTMLExporter(preprocessors=[CoalesceStreamsPreprocessor]).from_notebook_node(shown)[0]


def fleeting(output: NotebookNode) -> bool:
    """Whether an output is a progress bar, or a widget that nothing stands for."""
    text, data = output.get("text", ""), output.get("data", {})
    bar = output.get("name") == "stderr" and ("\r" in text or not text.strip())
    return bar or (WIDGET in data and not {"text/html", "image/png"} & set(data))


def main() -> int:
    parser = argparse.ArgumentParser(description="run a task's notebooks on generated data")
    parser.add_argument("task", nargs="?", default="captcha", choices=PROMISED)
    task = parser.parse_args().task
    drive = DEMO / "drive"
    shutil.rmtree(DEMO, ignore_errors=True)
    drive.mkdir(parents=True)
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {text}", flush=True)

    for name in (name for name in build.names() if name.startswith(f"{task}/")):
        say(name)
        notebook = build.notebook(name, build.repository())
        execute(notebook, DEMO, drive, say=lambda heading: say(f"  {heading}"))
        stem = DEMO / name.replace("/", "_")
        nbformat.write(notebook, stem.with_suffix(".ipynb"))
        stem.with_suffix(".html").write_text(page(notebook))
    say(f"done; pages: {DEMO.relative_to(build.ROOT)}/*.html")
    return report(task)


def report(task: str) -> int:
    """Print the run's summary, its receipt and its score on unseen samples; 1 when that is worse than promised."""
    os.environ["NBTOOLS_CACHE"], os.environ["NBTOOLS_DRIVE"] = str(DEMO / "cache"), str(DEMO / "drive")
    import nbtools as nb

    run = nb.Run.open(DEMO / "runs" / task)
    pack = importlib.import_module(f"nbtools.tasks.{task}").pack(f"drive:nbtools-data/{task}.tar", progress=False)
    print(f"\n{run.summary().to_string()}\n\n{run.receipt}\n")
    split, metric, sign, promised, words = PROMISED[task]
    score = nb.evaluate(run, pack, split)[metric]
    print(f"{words}: {score:.1%} (promised: {promised:.0%})")
    return int(sign * score < sign * promised)


if __name__ == "__main__":
    sys.exit(main())
