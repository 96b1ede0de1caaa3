"""The notebooks are what their sources say, keep the house rules, and run from top to bottom on a fresh machine."""

import ast
import itertools
import json
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from notebooks import build, execute

ADDRESS = build.repository()
NAMES = build.names()
CHAINS = {
    "captcha": ("1234_cut-off.png", "screenshot.png", "whole_accuracy"),
    "hwdb": ("999-P16.dgrl", "cer"),
    "sign": ("damaged.npz", "never-filmed", "gloss_accuracy"),
    "segment": ("cut-off.jpg", "odd.png", "miou"),
}
"""Folder → what its notebooks, run one after the other, must have said: the planted bad files, and the score."""
PARTS = ("1_data", "2_train", "3_evaluate")


def cells(name: str, kind: str) -> list[str]:
    return [cell.source for cell in build.notebook(name, ADDRESS).cells if cell.cell_type == kind]


def python(source: str) -> ast.Module:
    return ast.parse(re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.M))


def test_notebooks_and_readme_are_what_the_sources_say():
    assert build.stale() == [], "run: make notebooks"


def test_a_source_that_changed_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "SOURCES", tmp_path / "notebooks" / "src")
    source = tmp_path / "notebooks" / "src" / "a.py"
    source.parent.mkdir(parents=True)
    source.write_text("# %% [markdown]\n# # A\n#\n# {badge}\n#\n# Does it. And more.\n\n# %%\n1 + 1\n")
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nRepository = "https://github.com/me/mine"\n')
    (tmp_path / "README.md").write_text("before\n<!-- notebooks -->\n<!-- /notebooks -->\nafter\n")
    for path, text in build.outputs().items():
        path.write_text(text)
    assert build.stale() == []
    assert "| Does it. | [![Open in Colab]" in (tmp_path / "README.md").read_text()
    assert "github/me/mine/blob/main/notebooks/a.ipynb" in (tmp_path / "notebooks" / "a.ipynb").read_text()
    source.write_text(source.read_text() + "2 + 2\n")
    assert build.stale() == [tmp_path / "notebooks" / "a.ipynb"]
    source.unlink()
    assert build.stale() == [tmp_path / "README.md", tmp_path / "notebooks" / "a.ipynb"]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_carries_no_outputs_and_no_widget_state(name):
    made = json.loads((build.ROOT / "notebooks" / f"{name}.ipynb").read_text())
    assert "widgets" not in made["metadata"]
    assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])
    for cell in made["cells"]:
        assert cell["metadata"] == {}
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("name", NAMES)
def test_the_first_cells_are_promise_install_and_settings(name):
    first, install, settings, *_ = cells(name, "markdown")
    assert re.match(r"# .+\n\n\[!\[Open in Colab\].+\n\n\S", first)
    assert "**GPU:**" in first
    assert re.search(r"\*\*Measured:\*\* .*\d+ (s|min)\b.*\bon\s", first, re.S), "a time, with its machine"
    assert install.startswith("## Install")
    assert settings.startswith("## Settings")
    assert f"git+{ADDRESS}" in cells(name, "code")[0]
    assert re.search(r"^    %pip install -q ", cells(name, "code")[0], re.M)


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_short_with_prose_between_and_define_nothing(name):
    kinds = [cell.cell_type for cell in build.notebook(name, ADDRESS).cells]
    assert all(not (a == b == "code") for a, b in itertools.pairwise(kinds))
    for source in cells(name, "code"):
        assert len(source.splitlines()) <= 12
        for node in ast.walk(python(source)):
            assert not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)), "this belongs in the package"


@pytest.fixture(scope="module")
def pool():
    """Two notebooks at a time, each in a process of its own: nbclient leaves its event loop open in a thread."""
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        yield processes


@pytest.fixture(scope="module")
def alone(tmp_path_factory, pool):
    """Every notebook but the first of each chain, executed on a machine and a Drive of its own."""
    names = [name for name in NAMES if not name.endswith(PARTS[0])]
    return {name: pool.submit(machine, name, tmp_path_factory.mktemp(name.replace("/", "-"))) for name in names}


def machine(name: str, folder: Path):
    (folder / "drive").mkdir()
    return execute.execute(name, folder, folder / "drive", tiny=True)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith(PARTS[0])])
def test_it_stands_alone_on_a_fresh_machine(name, alone):
    ran = alone[name].result()
    assert all(cell.execution_count for cell in ran.cells if cell.cell_type == "code" and cell.source)


@pytest.fixture(scope="module")
def chains(tmp_path_factory, pool):
    """Task → the texts of its notebooks, each run on a new machine: only Drive is common."""
    return {task: pool.submit(chain, task, tmp_path_factory.mktemp(task)) for task in CHAINS}


def chain(task: str, folder: Path) -> list[str]:
    (folder / "drive").mkdir()
    outputs = []
    for part in PARTS:
        (folder / part).mkdir()
        outputs.append(text(execute.execute(f"{task}/{part}", folder / part, folder / "drive", tiny=True)))
    return outputs


@pytest.mark.parametrize("task", CHAINS)
def test_what_one_hands_to_the_next_lies_on_drive(task, chains):
    outputs, (*bad, score) = chains[task].result(), CHAINS[task]
    assert all(name in outputs[0] for name in bad)
    assert "instead.\n" not in outputs[1], "the pack that 1_data kept was not found"
    assert "instead.\n" not in outputs[2], "the run that 2_train kept was not found"
    assert score in outputs[2]


def text(notebook) -> str:
    """All that a notebook printed or showed as text."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            found += [output.get("text", ""), output.get("data", {}).get("text/plain", "")]
    return "\n".join(found)
