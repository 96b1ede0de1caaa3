"""Jupyter servers of two generations, each with nobody's settings but its own."""

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernels

LIMIT = 60.0  # seconds that anything may take on a busy machine


def until(seen: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
    """Wait for something true and return it; what: named when it never comes."""
    end = time.monotonic() + limit
    while not (found := seen()):
        assert time.monotonic() < end, f"{what}: not within {limit:g} s"
        time.sleep(0.01)
    return found


@dataclass(frozen=True)
class Stack:
    """One generation of Jupyter. kernel: the virtual environment of server and kernel, by its name in `kernels`."""

    name: str
    kernel: str
    command: tuple[str, ...]


LAB = Stack(
    "lab",
    "newest",
    (
        *("-m", "jupyterlab", "--ServerApp.port={port}", "--ServerApp.port_retries=0", "--ServerApp.root_dir={folder}"),
        *("--IdentityProvider.token=", "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None"),
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        *(f"--ServerApp.jpserver_extensions={name}=False" for name in ("jupyter_lsp", "jupyterlab_jupytext")),
    ),
)
CLASSIC = Stack(
    "classic",
    "colab",
    (
        *("-m", "notebook", "--NotebookApp.port={port}", "--NotebookApp.port_retries=0"),
        *("--NotebookApp.notebook_dir={folder}", "--NotebookApp.token="),
    ),
)
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight stay in the page
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
"""Of JupyterLab."""


def environment(folder: Path) -> dict[str, str]:
    """Nobody's own settings, one thread, and this checkout with its tests' modules importable in kernels."""
    places = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
    lab = ("SETTINGS_DIR", "WORKSPACES_DIR")
    return {
        **os.environ,
        **{f"JUPYTER_{place}": str(folder / "jupyter" / place) for place in places},
        **{f"JUPYTERLAB_{place}": str(folder / "jupyter" / place) for place in lab},
        "IPYTHONDIR": str(folder / "ipython"),
        "NBTOOLS_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), str(kernels.ROOT), os.environ.get("PYTHONPATH", "")]
        ),
    }


@contextmanager
def serving(stack: Stack, folder: Path) -> Iterator[str]:
    """A server whose notebooks lie in `folder`/work; yields its address. Its log stays in `folder`."""
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    for name, values in SETTINGS.items():
        path = folder / "jupyter" / "SETTINGS_DIR" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.format(port=port, folder=work) for word in stack.command]
    root = ["--allow-root"] if hasattr(os, "getuid") and os.getuid() == 0 else []
    with (folder / "server.log").open("w") as log:
        command = [str(kernels.python(stack.kernel)), *words, "--no-browser", *root]
        process = subprocess.Popen(command, env=environment(folder), cwd=work, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: process.poll() is not None or answers(f"{address}/api"), f"{stack.name} answers")
        assert process.poll() is None, (folder / "server.log").read_text()
        yield address
    finally:
        process.terminate()  # its kernels go with it
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def write(path: Path, cells: Sequence[str]) -> Path:
    """A notebook of code cells."""
    import nbformat  # three seconds, which other users of this module do without

    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(made, path)
    return path
