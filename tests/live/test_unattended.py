"""The notebook of test_live where nobody clicks: papermill executes it, on two generations of Jupyter. nbclient
executes those of test_notebooks and test_install."""

import json
import subprocess
from pathlib import Path

import kernels
import pytest
from browser import text
from kernels import CLASSIC, LAB, Stack
from test_live import ASKED, cells, check_saved

EXECUTE = "import papermill; papermill.execute_notebook('captcha.ipynb', 'done.ipynb', progress_bar=False)"


@pytest.mark.full
@pytest.mark.parametrize("stack", [LAB, CLASSIC], ids=lambda stack: stack.name)
def test_the_same_notebook_ends_without_anybody_clicking(stack: Stack, tmp_path: Path):
    work = tmp_path / "work"
    work.mkdir()
    kernels.write(work / "captcha.ipynb", cells(count=120, epochs=2))
    command = [kernels.python(stack.kernel), "-c", EXECUTE]
    done = subprocess.run(command, cwd=work, env=kernels.environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    notebook = json.loads((work / "done.ipynb").read_text())
    assert text(notebook, ASKED).split() == ["second", "third", "asked"]
    check_saved(notebook)
