"""The notebook of test_live where nobody clicks: papermill and nbclient execute it, on two generations of Jupyter. Its
quick sibling is test_notebooks, whose notebooks nbclient executes."""

import json
import subprocess
from pathlib import Path

import kernels
import pytest
import serving
from browser import text
from serving import CLASSIC, LAB, Stack
from test_live import ASKED, cells, check_saved

EXECUTORS = {
    "papermill": "import papermill, sys; papermill.execute_notebook(*sys.argv[1:], progress_bar=False)",
    "nbclient": "import nbclient, nbformat, sys; notebook = nbformat.read(sys.argv[1], 4); "
    "nbclient.NotebookClient(notebook).execute(); nbformat.write(notebook, sys.argv[2])",
}


@pytest.mark.full
@pytest.mark.parametrize("stack", [LAB, CLASSIC], ids=lambda stack: stack.name)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_same_notebook_ends_without_anybody_clicking(executor: str, stack: Stack, tmp_path: Path):
    work = tmp_path / "work"
    work.mkdir()
    serving.write(work / "captcha.ipynb", cells(count=120, epochs=2))
    done = subprocess.run(
        [kernels.python(stack.kernel), "-c", EXECUTORS[executor], "captcha.ipynb", "done.ipynb"],
        cwd=work,
        env=serving.environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    notebook = json.loads((work / "done.ipynb").read_text())
    assert text(notebook, ASKED).split() == ["second", "third", "asked"]
    check_saved(notebook)
