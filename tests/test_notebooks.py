"""The notebooks are what their sources say, keep the house rules, and run from top to bottom on a fresh machine."""

import ast
import importlib
import itertools
import json
import os
import re
import shutil
import tarfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

import nbtools as nb
from notebooks import build, execute
from tests import fresh

ADDRESS = build.repository()
NAMES = build.names()


def cells(name: str, kind: str) -> list[str]:
    return [cell.source for cell in build.notebook(name, ADDRESS).cells if cell.cell_type == kind]


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
def test_a_notebook_keeps_the_house_rules(name):
    made = json.loads((build.ROOT / "notebooks" / f"{name}.ipynb").read_text())
    assert "widgets" not in made["metadata"]
    assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])
    for cell in made["cells"]:
        assert cell["metadata"] in ({}, {"tags": ["parameters"]})
        assert not cell.get("outputs"), "generated without outputs"
        assert cell.get("execution_count") is None
    kinds = [cell["cell_type"] for cell in made["cells"]]
    assert all(not (a == b == "code") for a, b in itertools.pairwise(kinds)), "prose between cells"
    for source in cells(name, "code"):
        assert len(source.splitlines()) <= 12
        for node in ast.walk(ast.parse(re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.M))):
            defines = isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda))
            assert not defines or name == "9_your_own_task", "this belongs in the package"  # but for one's own network


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(("1_data", "2_train"))])
def test_options_and_the_gpus_release_are_settings_wherever_they_apply(name):
    made = build.notebook(name, ADDRESS)
    [settings] = [cell.source for cell in made.cells if "parameters" in cell.metadata.get("tags", [])]
    code = "\n".join(cells(name, "code"))
    assert re.search(r"^OPTIONS = ", settings, re.M)
    assert re.search(r"\.pack\(.*\*\*OPTIONS\)", code)
    if name.endswith("2_train"):
        assert re.search(r"^RELEASE_GPU = False", settings, re.M)
        assert code.count("nb.fit(") == code.count("release_gpu=RELEASE_GPU")
        assert "nb.gpus()" in code


@pytest.mark.parametrize("name", NAMES)
def test_the_first_cells_are_promise_install_and_settings(name):
    first, install, *texts = cells(name, "markdown")
    assert re.match(r"# .+\n\n\[!\[Open in Colab\].+\n\n\S", first)
    assert "**GPU:**" in first
    assert re.search(r"\*\*Measured:\*\* .*\d+ (s|min)\b.*\bon\s", first, re.S), "a time, with its machine"
    assert install.startswith("## Install")
    assert next(text for text in texts if text.startswith("## ")).startswith("## Settings")
    assert f'SOURCE = "{ADDRESS}"' in cells(name, "code")[0]


def apart(work, *arguments):
    """What a function returns in a process of its own: nbclient leaves its event loop open in a thread."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(work, *arguments).result()


BEFORE = """%reset -f
import os; os.makedirs({folder!r}); os.chdir({folder!r})
os.environ.update(NBTOOLS_CACHE={cache!r}, NBTOOLS_DRIVE={drive!r})"""


def in_turn(notebooks: dict[str, NotebookNode], top: Path) -> dict[str, list[NotebookNode]]:
    """The cells of notebooks, executed one after another in one kernel, which spares the imports: each in a folder of
    its own and without the names of those before it. Only captcha's have a Drive in common."""
    cells, ends = [], []
    for name, notebook in notebooks.items():
        folder = top / name.replace("/", "-")
        drive = top / "drive" if name.startswith("captcha/") else top / f"drive of {folder.name}"
        drive.mkdir(exist_ok=True)
        places = {"folder": str(folder), "drive": str(drive), "cache": str(folder / "cache")}
        cells += [nbformat.v4.new_code_cell(BEFORE.format(**places)), *notebook.cells]
        ends.append(len(cells))
    whole = nbformat.v4.new_notebook(cells=[NotebookNode({**cell, "id": f"cell-{i}"}) for i, cell in enumerate(cells)])
    ran = execute.run(whole, top, {**os.environ, "OMP_NUM_THREADS": "1"}).cells
    return {name: ran[start:end] for name, start, end in zip(notebooks, [0, *ends], ends, strict=False)}


QUICK = [*(f"captcha/{part}" for part in fresh.PARTS), "hwdb/2_train", "sign/2_train", "segment/2_train"]


@pytest.mark.timeout(900)
def test_each_runs_from_top_to_bottom_and_captchas_hand_on_what_lies_on_drive(tmp_path):
    chosen = {name: execute.tiny(name) for name in QUICK}
    ran = apart(in_turn, chosen, tmp_path)
    said = {name: fresh.text(NotebookNode(cells=cells)) for name, cells in ran.items()}
    fresh.check_chain("captcha", [said[name] for name in QUICK[:3]])
    for name in (name for name in chosen if "2_train" in name):
        assert re.search(r"cores?; RAM: .* GB free; disk: .* free for ", said[name]), name
        assert re.search(r"^length +[\d,]+ samples · [\d,]+ steps? per epoch · .* of warmup$", said[name], re.M), name
        assert re.search(r"^epoch 1 of 1  train .*  lr \S+( \(warmup\))?(  |$)", said[name], re.M), name
        pages = [
            output.get("data", {}).get("text/html", "") for cell in ran[name] for output in cell.get("outputs", [])
        ]
        assert any("per epoch · " in page and "time not measured yet" in page for page in pages), name
        assert "Not measured: set MEASURE = True" in said[name], "in place of the receipt"
        [fit, *_] = [cell for cell in ran[name] if "nb.fit(" in cell.source]
        shown = [kind for output in fit.outputs for kind in output.get("data", {})]
        assert (shown.count("image/png"), shown.count(execute.WIDGET)) == (1, 0), "nothing that needs a kernel stays"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_signs_without_features_skip_the_gru_and_where_nothing_is_kept_nothing_is(tmp_path):
    raw = demo("sign", tmp_path / "mine")
    made = build.with_parameters(execute.tiny("sign/2_train"), RAW=str(raw), KEEP=None)
    [cells] = apart(in_turn, {"sign/2_train": made}, tmp_path).values()
    assert "The GRU is skipped: it needs features" in fresh.text(NotebookNode(cells=cells))
    [compared] = [cell for cell in cells if "nb.compare" in cell.source]
    assert any("gloss accuracy" in output.get("data", {}).get("text/html", "") for output in compared.outputs)
    assert not [*tmp_path.glob("*/None")]


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(("2_train", "3_evaluate"))])
def test_it_stands_alone(name, tmp_path):
    """0_start_here does on a new machine, in test_install."""
    [cells] = apart(in_turn, {name: execute.tiny(name)}, tmp_path).values()
    assert all(cell.execution_count for cell in cells if cell.cell_type == "code" and cell.source)


def chain(task: str, folder: Path) -> list[str]:
    """The texts of a task's notebooks, each run on a new machine: only Drive is common."""
    (folder / "drive").mkdir()
    outputs = []
    for part in fresh.PARTS:
        (folder / part).mkdir()
        made = execute.tiny(f"{task}/{part}")
        outputs.append(fresh.text(execute.execute(made, folder / part, folder / "drive", threads=1)))
    return outputs


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("task", [task for task in fresh.SAID if task != "captcha"])
def test_what_one_hands_to_the_next_lies_on_drive(task, tmp_path):
    fresh.check_chain(task, apart(chain, task, tmp_path))


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
    tar, train, evaluate = f"{task}-typo.tar", f"{task}/2_train", f"{task}/3_evaluate"
    return [
        (train, {"RAW": f"drive:{tar}"}, tar),
        (train, {"PACK": f"drive:{tar}"}, tar),
        (train, {"RAW": "no/such/folder"}, "no/such"),
        (train, {"PACK": "drive:damaged.tar"}, "damaged.tar"),
        (train, {"RAW": "https://127.0.0.1:9/x.tar"}, "127.0.0.1"),
        (evaluate, {"PACK": f"drive:{tar}"}, tar),
        (evaluate, {"RUN": "drive:runs/typo"}, "runs/typo"),
    ]


@pytest.mark.parametrize("task", fresh.SAID)
def test_a_wrong_setting_stops_with_its_reason_and_no_demo_data_is_made(task, machine_of_mine, capsys):
    (machine_of_mine / "drive").mkdir()
    (machine_of_mine / "drive" / "damaged.tar").write_bytes(b"not a tar")
    for name, settings, words in wrong(task):
        with pytest.raises(nb.NbtoolsError, match=words):
            with_data(name, **settings)
        assert not (machine_of_mine / "runs").exists()
        if "RUN" not in settings:  # the pack is the default then, and nothing is kept yet
            assert not (machine_of_mine / "data").exists()
            assert "instead" not in capsys.readouterr().err


@pytest.mark.parametrize("task", fresh.SAID)
def test_a_kept_pack_that_is_damaged_or_cannot_be_reached_is_an_error(task, machine_of_mine):
    place = machine_of_mine / "drive" / "nbtools-data"
    place.mkdir(parents=True)
    (place / f"{task}.tar").write_bytes(b"not a tar")
    for part in fresh.PARTS[1:]:
        with pytest.raises(nb.NbtoolsError, match=rf"{task}\.tar"):
            with_data(f"{task}/{part}")
    shutil.rmtree(place)
    place.write_text("a file where the folder should be")
    for part in fresh.PARTS[1:]:
        with pytest.raises(nb.NbtoolsError, match="nbtools-data"):
            with_data(f"{task}/{part}")
    assert not (machine_of_mine / "data").exists()


@pytest.mark.parametrize("task", fresh.SAID)
def test_demo_data_comes_where_nothing_is_kept_and_the_output_says_so(task, machine_of_mine, capsys):
    assert len(with_data(f"{task}/2_train")["pack"]) > 0
    said = capsys.readouterr().err
    assert f"Nothing is kept at drive:nbtools-data/{task}.tar yet: using demo data instead." in said


@pytest.mark.parametrize(
    ("task", "form"), [*((task, "drive") for task in fresh.SAID), ("captcha", "archive"), ("captcha", "folder")]
)
def test_raw_data_of_ones_own_is_trained_on_and_the_receipt_can_measure_it(task, form, machine_of_mine):
    folder = demo(task, machine_of_mine / "mine")
    place = {"drive": "drive/mine.tar", "archive": "mine.tar", "folder": "mine"}[form]
    if form != "folder":
        (machine_of_mine / place).parent.mkdir(exist_ok=True)
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
