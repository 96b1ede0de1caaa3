"""A machine as Colab hands it out: Python with a notebook stack and nbtools' requirements, but without nbtools; a Drive
on which a copy of the repository may lie; and a stand-in of `google.colab`, in tests/colab."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from notebooks import build
from tests.jupyters import python

COLAB = Path(__file__).parent / "colab"
PARTS = ("1_data", "2_train", "3_evaluate")
SAID = {
    "captcha": ("1234_cut-off.png", "screenshot.png", "whole_accuracy"),
    "hwdb": ("999-P16.dgrl", "cer"),
    "sign": ("damaged.npz", "never-filmed", "gloss_accuracy"),
    "segment": ("cut-off.jpg", "odd.png", "miou"),
}
"""Folder → what its notebooks, run one after the other, must have said: the planted bad files, and the score."""
OURS = re.compile(r"nbtools\b|nbtools-|__editable__")


@dataclass(frozen=True)
class Machine:
    """One that nobody has used. `drive`: the folder that drive.mount makes available."""

    folder: Path
    python: Path
    drive: Path

    @property
    def environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "NBTOOLS_DRIVE", "COLAB_DRIVE")}
        return inherited | {
            "COLAB_DRIVE": str(self.drive),
            "NBTOOLS_CACHE": str(self.folder / "cache"),
            "IPYTHONDIR": str(self.folder / "ipython"),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{COLAB / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(COLAB),
            "PIP_NO_INDEX": "1",
            "PIP_RETRIES": "0",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip's own way to say "without isolation" (pypa/pip#5229)
            "PIP_CONFIG_FILE": os.devnull,
        }

    def installed(self) -> dict[str, str]:
        places = (self.folder / "packages", *(self.folder / "venv").glob("lib/python*/site-packages"))
        found = (entry.stem.partition("-") for place in places for entry in place.glob("*.dist-info"))
        return {package: version for package, _, version in found}


def machine(folder: Path, drive: Path, stack: str = "colab") -> Machine:
    packages = folder / "packages"
    packages.mkdir(parents=True)
    mine = Path(sysconfig.get_path("purelib"))
    theirs = next(python(stack).parent.parent.glob("lib/python*/site-packages"))
    taken: set[str] = set()
    for place in dict.fromkeys((theirs, mine)):
        found = [entry for entry in place.iterdir() if not OURS.match(entry.name) and name(entry) not in taken]
        for entry in found:
            (packages / entry.name).symlink_to(entry)
        taken |= {name(entry) for entry in found}
    venv.create(folder / "venv", with_pip=False)
    [purelib] = (folder / "venv").glob("lib/python*/site-packages")
    (purelib / "packages.pth").write_text(f"{packages}\n")
    return Machine(folder, folder / "venv" / "bin" / "python", drive)


def apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a fork of its own: nbclient leaves its event loop open in a thread."""
    with warnings.catch_warnings(), ProcessPoolExecutor(1, get_context("fork")) as process:
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        return process.submit(work, *arguments).result()


def name(entry: Path) -> str:
    """What an entry of site-packages belongs to: a stack's ipykernel-6.17.1.dist-info hides the other's 7.4.0."""
    return entry.name.partition("-")[0].lower() if entry.name.endswith(".dist-info") else entry.name


def repository_zip(path: Path) -> Path:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=build.ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in filter(None, names):
            if (build.ROOT / file).is_file():
                archive.write(build.ROOT / file, f"nbtools-main/{file}")
    return path


def wheel(folder: Path) -> Path:
    """What `make wheel` builds of the repository as GitHub's zip has it, without git, in a new folder."""
    with zipfile.ZipFile(repository_zip(folder / "nbtools-main.zip")) as archive:
        archive.extractall(folder)
    command = ["make", "-s", "-o", ".venv/ready", "wheel", f"BIN={sys.prefix}/bin"]
    subprocess.run(command, cwd=folder / "nbtools-main", check=True, env={**os.environ, "MAKEFLAGS": ""})
    [built] = folder.glob("nbtools-main/dist/*.whl")
    return built


def text(notebook: NotebookNode) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs)


def check_chain(task: str, said: list[str]) -> None:
    """What a task's three notebooks said, each on a machine of its own: one found what the other had kept."""
    *bad, score = SAID[task]
    assert all(name in said[0] for name in bad)
    assert "instead.\n" not in said[1], "the pack that 1_data kept was not found"
    assert "instead.\n" not in said[2], "the run that 2_train kept was not found"
    assert score in said[2]


def with_settings(notebook: NotebookNode, **settings: object) -> NotebookNode:
    for setting, value in settings.items():
        [cell] = [c for c in notebook.cells if c.cell_type == "code" and re.search(rf"(?m)^{setting} = ", c.source)]
        cell.source = re.sub(rf"(?m)^{setting} = .*$", lambda _, s=setting, v=value: f"{s} = {v!r}", cell.source)
    return notebook
