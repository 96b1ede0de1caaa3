"""Run all on a machine as Colab hands it out: the install cells bring nbtools, or stop in one sentence."""

import functools
import http.server
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from notebooks import build, execute
from tests import fresh
from tests.kernels import STACKS, Client, python, started

ZIP = "nbtools-main.zip"
ADDRESS = build.repository()
full = pytest.mark.full


def apart(work, *arguments):
    """What a function returns in a process of its own: nbclient leaves its event loop open in a thread."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(work, *arguments).result()


def run_all(name: str, folder: Path, drive: Path | None, stack: str, source: str) -> tuple[str, dict[str, str]]:
    """(what a notebook said, packages that it installed) on a new machine. Fails where pip replaced one."""
    machine = fresh.machine(folder, drive, stack)
    before = machine.installed()
    ran = machine.run(fresh.with_settings(execute.tiny(name), SOURCE=source))
    assert all(cell.execution_count for cell in ran.cells if cell.cell_type == "code" and cell.source)
    after = machine.installed()
    assert before.items() <= after.items(), "a package of the machine's own was replaced"
    return fresh.text(ran), {package: after[package] for package in after.keys() - before.keys()}


def chain(names: list[str], top: Path, stack: str) -> list[str]:
    """What notebooks say one after the other, each on a new machine: only Drive is common."""
    fresh.repository_zip(top / "drive" / ZIP)
    said = []
    for number, name in enumerate(names):
        found, brought = run_all(name, top / str(number), top / "drive", stack, f"drive:{ZIP}")
        assert set(brought) == {"nbtools"}
        assert "Mounted at /content/drive" in found
        said.append(found)
    return said


ALL = itertools.product(("start", *fresh.SAID), STACKS)


@full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("task", "stack"), [*ALL])
def test_run_all_on_a_new_machine_installs_from_githubs_zip_and_runs_to_the_end(task, stack, tmp_path):
    python(stack)  # skips where there is none: in another process that would be a failure
    names = ["0_start_here"] if task == "start" else [f"{task}/{part}" for part in fresh.PARTS]
    said = apart(chain, names, tmp_path, stack)
    if task != "start":
        fresh.check_chain(task, said)


def declined(name: str, top: Path) -> tuple[str, list[str]]:
    """(what a notebook said where the dialog is declined, files that it left on no machine)."""
    top.mkdir()
    source = fresh.repository_zip(top / ZIP)
    said, _ = run_all(name, top / "machine", None, "colab", str(source))
    return said, [path.name for path in (top / "machine").rglob("nbtools-data")]


@full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", build.names())
def test_where_drive_is_declined_run_all_goes_on_and_nothing_is_kept(name, tmp_path):
    python("colab")
    said, kept = apart(declined, name, tmp_path / "top")
    assert kept == []
    assert said.count("asking for Drive") == (name != "0_start_here"), "the dialog comes once"
    if not name.startswith("0"):
        assert "Access to Drive was declined in Colab's dialog" in said
    if name.endswith("2_train"):
        assert "using demo data instead" in said
        assert "nothing is kept at drive:nbtools-data/runs" in said


def installing(source: str) -> list[str]:
    """The install cells of a notebook with a SOURCE, and one more."""
    made = fresh.with_settings(execute.tiny("0_start_here"), SOURCE=source)
    code = [cell.source for cell in made.cells if cell.cell_type == "code"]
    last = next(place for place, source in enumerate(code) if "pip" in source and "subprocess.run" in source)
    return [*code[: last + 1], "import nbtools; print('went on with', nbtools.__file__)"]


def test_a_clone_in_the_working_folder_is_not_taken_for_an_installed_nbtools(tmp_path):
    (tmp_path / "nbtools" / "nbtools").mkdir(parents=True)
    (tmp_path / "nbtools" / "nbtools" / "__init__.py").touch()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", installing("nbtools")[0]]  # without site-packages, and so without nbtools
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert said == "nbtools comes from nbtools\n"


@pytest.mark.parametrize(("drive", "problem"), [(True, ""), (False, "Drive cannot be opened")])
def test_off_colab_a_folder_stands_for_the_drive_that_source_names(drive, problem, tmp_path):
    (tmp_path / ZIP).touch()
    environment = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT") if name in os.environ}
    if drive:
        environment["NBTOOLS_DRIVE"] = str(tmp_path)
    code = "\n".join([*installing(f"drive:{ZIP}")[:2], "print(PROBLEM)"])
    command = [sys.executable, "-S", "-c", code]
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1][: len(problem) or None] == problem


def test_the_cell_says_that_it_installs_before_pip_begins(tmp_path):
    (tmp_path / "pip.py").write_text("print('ERROR: pip has begun'); raise SystemExit(1)")
    wheel = tmp_path / "nbtools.whl"
    wheel.touch()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    code = "\n".join(installing(str(wheel))[:3]).replace("capture_output=True", "stderr=subprocess.PIPE")
    command = [sys.executable, "-S", "-c", code]
    said = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True).stdout
    assert said.splitlines()[1:] == ["installing it, which takes a minute or two …", "ERROR: pip has begun"]


STOPS = {  # SOURCE → the reason in the sentence
    "drive:packs": "drive:packs holds packs and runs, not a copy of nbtools",
    "drive:missing.zip": "drive:missing.zip does not exist",
    "drive:other.zip": "does not appear to be a Python project",
    "missing/nbtools": "missing/nbtools does not exist",
    "https://127.0.0.1:9/me/nbtools": "fatal: unable to access",
}
DECLINED = {"drive:declined.zip": "Drive cannot be opened (Error: credential propagation was unsuccessful)"}


@pytest.mark.parametrize("stack", ["colab", pytest.param("newest", marks=full)])
def test_where_installing_fails_one_sentence_says_why_and_run_all_stops(stack, tmp_path):
    (tmp_path / "drive" / "packs" / "runs").mkdir(parents=True)
    (tmp_path / "drive" / "other.zip").write_bytes(b"PK\5\6" + bytes(18))
    machine = fresh.machine(tmp_path / "machine", tmp_path / "drive", stack)
    without = {name: value for name, value in machine.environment.items() if name != "COLAB_DRIVE"}
    for stops, environment in ((STOPS, machine.environment), (DECLINED, without)):
        with started(stack, machine.folder, machine.python, environment) as kernel:
            for source, words in stops.items():
                sentence = stopped(kernel, source)
                assert words in sentence
                assert sentence.startswith("nbtools was not installed: ")
                assert sentence.endswith("Correct SOURCE above, then Run all again.")


def stopped(kernel: Client, source: str) -> str:
    """The one sentence with which Run all stops."""
    while kernel.reply(kernel.client.execute("", silent=True))["content"]["status"] != "ok":
        pass  # ipykernel 6 still aborts what follows the last error
    cells = ["import time; time.sleep(0.5)", *installing(source)]  # the rest is queued meanwhile, as Run all does
    requests = [kernel.client.execute(code) for code in cells]
    replies = [kernel.reply(request)["content"] for request in requests]
    assert replies[-1]["status"] == "aborted", f"{source}: Run all went on"
    [failed] = [reply for reply in replies if reply["status"] == "error"]
    [sentence] = failed["traceback"]
    assert "\n" not in sentence, "one sentence, no traceback"
    return sentence


@pytest.fixture
def web(tmp_path):
    """The address of what lies in a folder called web."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "web")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def copies(top: Path, web: str) -> dict[str, str]:
    """Form → SOURCE, for each form that a copy may have; all made from GitHub's zip."""
    drive = top / "drive"
    archive = fresh.repository_zip(drive / "copies" / ZIP)
    archive.with_name("nbtools-main (1).zip").write_bytes(archive.read_bytes())
    unpack = [sys.executable, "-m", "zipfile", "-e", str(archive), str(drive / "copies")]
    subprocess.run(unpack, check=True)
    wheel = shutil.copy(fresh.wheel(top / "build"), drive)
    work = top / "work"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(archive), str(work)], check=True)
    git = ["git", "-C", str(work / "nbtools-main"), "-c", "user.name=n", "-c", "user.email=n@example.org"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "a fork"]):
        subprocess.run([*git, *arguments], check=True)
    subprocess.run([*git, "clone", "-q", "--bare", ".", str(top / "web" / "nbtools.git")], check=True)
    subprocess.run(["git", "-C", str(top / "web" / "nbtools.git"), "update-server-info"], check=True)
    return {
        "a zip downloaded twice": "drive:copies/nbtools-main (1).zip",
        "a folder": "drive:copies/nbtools-main",
        "a wheel": f"drive:{Path(wheel).name}",
        "a repository": f"{web}/nbtools.git",
        "a path": str(archive),
    }


@full
@pytest.mark.timeout(900)
def test_every_form_of_a_copy_installs_and_a_folder_stays_as_it_was(tmp_path, web):
    sources = copies(tmp_path, web)
    folder = tmp_path / "drive" / "copies" / "nbtools-main"
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    for number, (form, source) in enumerate(sources.items()):
        machine = fresh.machine(tmp_path / str(number), tmp_path / "drive", "colab")
        with started("colab", machine.folder, machine.python, machine.environment) as kernel:
            said = "".join(map(kernel.run, installing(source)))
        assert re.search(rf"went on with {re.escape(str(machine.folder))}/venv/.*site-packages", said), (form, said)
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before


@full
def test_a_fork_gets_its_address_everywhere_and_its_own_check_holds(tmp_path):
    copy = fresh.repository_zip(tmp_path / ZIP)
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(copy), str(tmp_path)], check=True)
    tree, fork = tmp_path / "nbtools-main", "https://github.com/somebody/my-nbtools"
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    for arguments, code in {
        ("--repository", f"{fork}.git/"): 0,
        ("--check",): 0,
        ("--repository", "git@x:y.git"): 2,
    }.items():
        said = subprocess.run([sys.executable, "-m", "notebooks.build", *arguments], cwd=tree, env=environment)
        assert said.returncode == code, arguments
    for path in [tree / "pyproject.toml", tree / "README.md", *tree.glob("notebooks/**/*.ipynb")]:
        written = path.read_text()
        assert ADDRESS not in written, path
        assert fork.removeprefix("https://") in written or path.name == "README.md", path
