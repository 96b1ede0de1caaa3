"""The notebooks are what their sources say, keep the house rules, and run from top to bottom on a fresh machine."""

import ast
import itertools
import json
import os
import re
import tarfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from acting import refused
from nbformat import NotebookNode

import nbtools as nb
from nbtools.tasks import captcha
from notebooks import build, execute
from tests import fresh

ADDRESS = build.repository()


def cells(name: str, kind: str) -> list[str]:
    return [cell.source for cell in build.notebook(name, ADDRESS).cells if cell.cell_type == kind]


def test_notebooks_and_readme_are_what_the_sources_say():
    assert build.stale() == [], "run: make notebooks"


@pytest.mark.parametrize("name", build.names())
def test_a_notebook_keeps_the_house_rules(name):
    made = json.loads((build.ROOT / "notebooks" / f"{name}.ipynb").read_text())
    assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])
    kinds = [cell["cell_type"] for cell in made["cells"]]
    assert all(not (a == b == "code") for a, b in itertools.pairwise(kinds)), "prose between cells"
    for source in cells(name, "code"):
        assert len(source.splitlines()) <= 12
        assert "Panel(" not in source or "nb.fit(" not in source, "which would undo what was turned meanwhile"
        for node in ast.walk(ast.parse(re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.M))):
            defines = isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda))
            assert not defines or name == "9_your_own_task", "this belongs in the package"  # but for one's own network
    assert [n for k, n in enumerate(prose_between(name)) if n > (60 if k else 125)] == [], "too much prose"
    first, install, *texts = cells(name, "markdown")
    assert re.match(r"# .+\n\n\[!\[Open in Colab\].+\n\n\S", first)
    assert "**GPU:**" in first
    assert ("accelerator" in made["metadata"]) == (name not in ("captcha/1_data", "segment/1_data", "sign/1_data"))
    assert re.search(r"\*\*Measured:\*\* .*\d+ (s|min)\b.*\bon\s", first, re.S), "a time, with its machine"
    assert install.startswith("## Install")
    assert next(text for text in texts if text.startswith("## ")).startswith("## Settings")
    assert len(cells(name, "code")[0].splitlines()) <= 10
    assert cells(name, "code")[0].startswith(f'SOURCE = "{ADDRESS}/archive/main.zip"  # @param {{type:"string"}}\n')
    assert str(made).count("'source_hidden': True") == 1, "the cell that installs is folded"
    assert not re.search(r"nb\.stage\([^)]*\.csv", str(made)), "a folder or an archive is staged, no table"
    assert name != "9_your_own_task" or "epochs if DATA else EPOCHS" in str(made), "few epochs for generated data alone"
    for part in (r"nb\.Panel\(.*\*\*CHANGES", r"again = nb\.fit\(.*\n +nb\.compare\("):
        assert "2_train" not in name or re.search(part, "\n".join([*cells(name, "code"), *texts])), part


def prose_between(name: str) -> list[int]:
    """Words of prose, without tables and examples, before each cell of code and at the end; first of the opening."""
    words = [0]
    for cell in build.notebook(name, ADDRESS).cells:
        if cell.cell_type == "code":
            words.append(0)
        else:
            lines = [line for line in cell.source.splitlines() if not line.startswith(("|", "    ", "[![", "![", "#"))]
            words[-1] += len(" ".join(lines).split())
    return words


BEFORE = """%reset -f
import os; os.makedirs({folder!r}); os.chdir({folder!r})
os.environ.update(NBTOOLS_CACHE={cache!r}, NBTOOLS_DRIVE={drive!r})"""


def in_turn(top: Path) -> list[NotebookNode]:
    """The notebooks of captchas and that of one's own task, executed one after another in one kernel, which spares the
    imports: each in a folder of its own and without the names of those before it, with a Drive in common."""
    (top / "drive").mkdir()
    cells, ends = [], [0]
    for name in (*(f"captcha/{part}" for part in fresh.PARTS), "9_your_own_task"):
        places = {"folder": str(top / name), "drive": str(top / "drive"), "cache": str(top / name / "cache")}
        cells += [nbformat.v4.new_code_cell(BEFORE.format(**places)), *execute.tiny(name).cells]
        ends.append(len(cells))
    whole = nbformat.v4.new_notebook(cells=[NotebookNode({**cell, "id": f"cell-{i}"}) for i, cell in enumerate(cells)])
    ran = execute.run(whole, top, {**os.environ, "OMP_NUM_THREADS": "1"}).cells
    return [NotebookNode(cells=ran[start:end]) for start, end in itertools.pairwise(ends)]


def words(cells: list[NotebookNode]) -> int:
    count = 0
    for output in (output for cell in cells for output in cell.get("outputs", [])):
        data = output.get("data", {})
        page = re.sub(r"<(style|script|svg|details)\b.*?</\1>", " ", data.get("text/html", ""), flags=re.S)
        said = re.sub("<[^>]+>", " ", page) if "text/html" in data else data.get("text/plain", output.get("text", ""))
        count += len([word for line in said.splitlines() if "%|" not in line for word in line.split()])
    return count


@pytest.mark.timeout(900)
def test_captchas_and_a_task_of_ones_own_run_from_top_to_bottom_and_hand_on_what_lies_on_drive(tmp_path):
    ran = fresh.apart(in_turn, tmp_path)
    *said, own = [fresh.text(notebook) for notebook in ran]
    fresh.check_chain("captcha", said)
    assert re.search(r"^epoch 1 of 1  train .*  val .*", own, re.M)
    assert re.search(r"^epoch 1 of 1  train .*  lr \S+(  |$)", said[1], re.M)
    assert "Not measured: it needs MEASURE = True" in said[1], "in place of the receipt"
    assert words(ran[1].cells) <= 350, "and a receipt has 110"
    [fit, *_] = [cell for cell in ran[1].cells if "nb.fit(" in cell.source]
    shown = [kind for output in fit.outputs for kind in output.get("data", {})]
    assert (shown.count("image/png"), shown.count(execute.WIDGET)) == (1, 0), "nothing that needs a kernel stays"


def with_data(name: str, **settings: object) -> dict[str, Any]:
    made = fresh.with_settings(execute.tiny(name), **settings)
    code, names = [cell for cell in made.cells if cell.cell_type == "code"], dict[str, Any]()
    for cell in itertools.dropwhile(lambda cell: "tags" not in cell.metadata, code):  # from the settings on
        exec(compile(cell.source, name, "exec"), names)
        if ".pack(" in cell.source:
            break
    return names


@pytest.mark.parametrize(
    ("part", "settings", "words"),
    [
        ("2_train", {"RAW": "drive:typo.tar"}, "typo.tar"),
        ("2_train", {"PACK": "drive:damaged.tar"}, "damaged.tar"),
        ("3_evaluate", {"RUN": "drive:runs/typo"}, "runs/typo"),
    ],
)
def test_a_wrong_setting_stops_with_its_reason_and_no_demo_data_is_made(part, settings, words, place, desk):
    (place / "drive" / "damaged.tar").write_bytes(b"not a tar")
    refused(nb.NbtoolsError, words, with_data, f"captcha/{part}", **settings)
    assert not (place / "runs").exists()
    assert (place / "data").exists() == ("RUN" in settings), "whose pack is the default, and none is kept yet"


@pytest.mark.parametrize("task", fresh.SAID)
def test_demo_data_comes_where_nothing_is_kept_and_the_output_says_so(task, place, desk, capsys):
    assert len(with_data(f"{task}/2_train")["pack"]) > 0
    assert f"Nothing is kept at drive:nbtools-data/{task}.tar yet: using demo data instead." in capsys.readouterr().err


def test_raw_data_of_ones_own_are_trained_on_and_measured_and_shares_are_not_for_the_check_before_packing(place, desk):
    with tarfile.open(place / "drive" / "mine.tar", "w") as archive:
        archive.add(captcha.demo(place / "mine", 40), "mine")
    pack = with_data("captcha/2_train", RAW="drive:mine.tar")["pack"]
    assert len(pack.raw or ()) == len(pack)
    assert not (place / "data").exists()
    assert len(with_data("segment/1_data", OPTIONS={"val": 0.2, "test": 0.1})["pack"]) > 0
