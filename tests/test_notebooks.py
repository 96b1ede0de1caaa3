"""The notebooks are what their sources say, keep the house rules, and run from top to bottom on a fresh machine."""

import ast
import importlib
import itertools
import json
import os
import re
import tarfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

import nbtools as nb
from notebooks import build, execute
from tests import fresh

ADDRESS = build.repository()
NAMES = build.names()
CHAINS = [task for task in fresh.SAID if task != "captcha"]  # which tests/test_install.py runs, on new machines


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
        assert cell["metadata"] in ({}, {"tags": ["parameters"]})
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("name", NAMES)
def test_the_first_cells_are_promise_install_and_settings(name):
    first, install, *texts = cells(name, "markdown")
    assert re.match(r"# .+\n\n\[!\[Open in Colab\].+\n\n\S", first)
    assert "**GPU:**" in first
    assert re.search(r"\*\*Measured:\*\* .*\d+ (s|min)\b.*\bon\s", first, re.S), "a time, with its machine"
    assert install.startswith("## Install")
    assert next(text for text in texts if text.startswith("## ")).startswith("## Settings")
    assert f'SOURCE = "{ADDRESS}"' in cells(name, "code")[0]


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
def alone(tmp_path_factory, pool, request):
    """Every notebook but the first of each chain, executed on a machine and a Drive of its own."""
    chosen = [item for item in request.session.items if getattr(item, "originalname", "") == "test_it_stands_alone"]
    names = [item.callspec.params["name"] for item in chosen]
    return {name: pool.submit(machine, name, tmp_path_factory.mktemp(name.replace("/", "-"))) for name in names}


def machine(name: str, folder: Path):
    (folder / "drive").mkdir()
    return execute.execute(execute.tiny(name), folder, folder / "drive", threads=1)


SLOW = ("captcha/3_evaluate", "hwdb/3_evaluate", "segment/3_evaluate")  # each trains a short run first


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in SLOW else ())
        for name in NAMES
        if not name.endswith(fresh.PARTS[0])
    ],
)
def test_it_stands_alone(name, alone):
    ran = alone[name].result()
    assert all(cell.execution_count for cell in ran.cells if cell.cell_type == "code" and cell.source)


@pytest.fixture(scope="module")
def chains(tmp_path_factory, pool):
    """Task → the texts of its notebooks, each run on a new machine: only Drive is common."""
    return {task: pool.submit(chain, task, tmp_path_factory.mktemp(task)) for task in CHAINS}


def chain(task: str, folder: Path) -> list[str]:
    (folder / "drive").mkdir()
    outputs = []
    for part in fresh.PARTS:
        (folder / part).mkdir()
        outputs.append(
            fresh.text(execute.execute(execute.tiny(f"{task}/{part}"), folder / part, folder / "drive", threads=1))
        )
    return outputs


@pytest.mark.full
@pytest.mark.parametrize("task", CHAINS)
def test_what_one_hands_to_the_next_lies_on_drive(task, chains):
    fresh.check_chain(task, chains[task].result())


@pytest.fixture
def machine_of_mine(tmp_path, monkeypatch):
    """A machine with a Drive, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    for name, value in {"NBTOOLS_CACHE": "cache", "NBTOOLS_DRIVE": "drive"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    return tmp_path


def with_data(name: str, **settings: object) -> dict:
    """The names in a notebook after its cell that opens the pack, with other settings."""
    made = fresh.with_settings(execute.tiny(name), **settings)
    cells = [cell for cell in made.cells if cell.cell_type == "code"]
    code = [cell.source for cell in cells]
    first = next(place for place, cell in enumerate(cells) if "tags" in cell.metadata)
    last = next(place for place, source in enumerate(code) if ".pack(" in source)
    names: dict = {}
    for source in code[first : last + 1]:
        exec(compile(source, name, "exec"), names)
    return names


def demo(task: str, folder: Path) -> Path:
    module = importlib.import_module(f"nbtools.tasks.{task}")
    sizes = {"captcha": {"count": 40}, "hwdb": {"count": 60}, "segment": {"count": 12, "size": (48, 48)}}
    return module.demo(folder, **sizes.get(task, {"count": 24, "glosses": 3, "categories": 2}))


def wrong(task: str) -> list[tuple[str, dict[str, str], str]]:
    """(notebook, settings, words of the error)."""
    tar = f"{task}-typo.tar"
    train = [({"RAW": f"drive:{tar}"}, tar), ({"PACK": f"drive:{tar}"}, tar), ({"RAW": "no/such/folder"}, "no/such")]
    train += [({"PACK": "drive:damaged.tar"}, "damaged.tar"), ({"RAW": "https://127.0.0.1:9/x.tar"}, "127.0.0.1")]
    evaluate = [({"PACK": f"drive:{tar}"}, tar), ({"RUN": "drive:runs/typo"}, "runs/typo")]
    return [(f"{task}/2_train", *one) for one in train] + [(f"{task}/3_evaluate", *one) for one in evaluate]


@pytest.mark.parametrize(("name", "settings", "words"), [one for task in fresh.SAID for one in wrong(task)], ids=str)
def test_a_wrong_setting_stops_with_its_reason_and_no_demo_data_is_made(name, settings, words, machine_of_mine, capsys):
    (machine_of_mine / "drive").mkdir()
    (machine_of_mine / "drive" / "damaged.tar").write_bytes(b"not a tar")
    with pytest.raises(nb.NbtoolsError, match=words):
        with_data(name, **settings)
    assert not (machine_of_mine / "runs").exists()
    if "RUN" not in settings:  # the pack is the default then, and nothing is kept yet
        assert not (machine_of_mine / "data").exists()
        assert "instead" not in capsys.readouterr().out


@pytest.mark.parametrize("part", ["2_train", "3_evaluate"])
@pytest.mark.parametrize("task", fresh.SAID)
def test_a_kept_pack_that_is_damaged_or_cannot_be_reached_is_an_error(task, part, machine_of_mine):
    place = machine_of_mine / "drive" / "nbtools-data"
    place.mkdir(parents=True)
    (place / f"{task}.tar").write_bytes(b"not a tar")
    with pytest.raises(nb.NbtoolsError, match=rf"{task}\.tar"):
        with_data(f"{task}/{part}")
    (place / f"{task}.tar").unlink()
    place.rmdir()
    place.write_text("a file where the folder should be")
    with pytest.raises(nb.NbtoolsError, match="nbtools-data"):
        with_data(f"{task}/{part}")
    assert not (machine_of_mine / "data").exists()


@pytest.mark.parametrize("task", fresh.SAID)
def test_demo_data_comes_where_nothing_is_kept_and_the_output_says_so(task, machine_of_mine, capsys):
    names = with_data(f"{task}/2_train")
    assert len(names["pack"]) > 0
    said = capsys.readouterr().out
    assert f"Nothing is kept at drive:nbtools-data/{task}.tar yet: using demo data instead." in said


@pytest.mark.parametrize("form", ["drive", "archive", "folder"])
@pytest.mark.parametrize("task", fresh.SAID)
def test_raw_data_of_ones_own_is_trained_on_and_the_receipt_can_measure_it(task, form, machine_of_mine):
    folder = demo(task, machine_of_mine / "mine")
    place = {"drive": "drive/mine.tar", "archive": "mine.tar", "folder": "mine"}[form]
    if form != "folder":
        (machine_of_mine / "drive").mkdir()
        with tarfile.open(machine_of_mine / place, "w") as archive:
            archive.add(folder, "mine")
    pack = with_data(f"{task}/2_train", RAW=place.replace("drive/", "drive:"))["pack"]
    assert pack.raw is not None
    assert len(pack.raw) == len(pack)
    assert not (machine_of_mine / "data").exists()


@pytest.mark.parametrize("task", fresh.SAID)
def test_a_kept_pack_on_the_machine_that_made_it_still_has_its_raw_data(task, machine_of_mine):
    made = importlib.import_module(f"nbtools.tasks.{task}").pack(demo(task, machine_of_mine / "mine"), progress=False)
    assert made.keep(f"drive:nbtools-data/{task}.tar")
    pack = with_data(f"{task}/2_train")["pack"]
    assert pack.card == made.card
    assert pack.raw is not None


def test_signs_without_features_skip_the_gru_and_are_still_compared(tmp_path):
    demo("sign", tmp_path / "mine")
    notebook = fresh.with_settings(execute.tiny("sign/2_train"), RAW=str(tmp_path / "mine"), KEEP=None)
    tiny = {**os.environ, "NBTOOLS_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        ran = process.submit(execute.run, notebook, tmp_path, tiny).result()
    assert "The GRU is skipped" in fresh.text(ran)
    assert "these have only keypoints" in fresh.text(ran)
    [compared] = [cell for cell in ran.cells if "nb.compare" in cell.source]
    assert any("gloss accuracy" in output.get("data", {}).get("text/html", "") for output in compared.outputs)
    assert not (tmp_path / "None").exists()
