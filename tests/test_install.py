"""Run all on a machine as Colab hands it out: the install cells bring nbtools, or stop in one sentence."""

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from notebooks import build, execute
from tests import fresh
from tests.kernels import STACKS, Client, python, started

ZIP = "nbtools-main.zip"
ADDRESS = build.repository()
full = pytest.mark.full


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
    said = fresh.apart(chain, names, tmp_path, stack)
    if task != "start":
        fresh.check_chain(task, said)


def installing(source: str) -> list[str]:
    """The install cells of a notebook with a SOURCE, and one more."""
    made = fresh.with_settings(execute.tiny("0_start_here"), SOURCE=source)
    code = [cell.source for cell in made.cells if cell.cell_type == "code"]
    last = next(place for place, source in enumerate(code) if "pip" in source and "subprocess.run" in source)
    return [*code[: last + 1], "import nbtools; print('went on with', nbtools.__file__)"]


STOPS = {  # SOURCE → the reason in the sentence
    "drive:packs": "drive:packs holds packs and runs, not a copy of nbtools",
    "drive:missing.zip": "drive:missing.zip does not exist",
    "drive:other.zip": "does not appear to be a Python project",
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


@full
@pytest.mark.timeout(900)
def test_a_folder_a_wheel_and_a_zip_install(tmp_path):
    copies = tmp_path / "drive" / "copies"
    archive = fresh.repository_zip(copies / ZIP)
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(archive), str(copies)], check=True)
    wheel = Path(shutil.copy(fresh.wheel(tmp_path / "build"), copies))
    for number, source in enumerate(("drive:copies/nbtools-main", f"drive:copies/{wheel.name}", str(archive))):
        machine = fresh.machine(tmp_path / str(number), tmp_path / "drive", "colab")
        with started("colab", machine.folder, machine.python, machine.environment) as kernel:
            said = "".join(map(kernel.run, installing(source)))
        assert re.search(rf"went on with {re.escape(str(machine.folder))}/venv/.*site-packages", said), (source, said)
