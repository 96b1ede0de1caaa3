"""Run all on a machine as Colab hands it out: nbtools is installed, or pip says why not; and what the wheel holds."""

import re
import shutil
import zipfile
from pathlib import Path

import pytest

from notebooks import build, execute
from tests import fresh
from tests.jupyters import STACKS, python, started

ZIP = "nbtools-main.zip"
SMOKE = "import sys\n!{sys.executable} -m nbtools train captcha --smoke-test"
full = pytest.mark.full


def chain(names: list[str], top: Path, stack: str) -> list[str]:
    """What notebooks say one after the other, each on a new machine: only Drive is common. pip brings nbtools alone."""
    fresh.repository_zip(top / "drive" / ZIP)
    said = []
    for number, name in enumerate(names):
        machine = fresh.machine(top / str(number), top / "drive", stack)
        made, before = fresh.with_settings(execute.tiny(name), SOURCE=f"drive:{ZIP}"), machine.installed()
        ran = execute.run(made, machine.folder, machine.environment, machine.python)
        assert all(cell.execution_count for cell in ran.cells if cell.cell_type == "code" and cell.source)
        after = machine.installed()
        assert before.items() <= after.items(), "a package of the machine's own was replaced"
        assert after.keys() - before.keys() == {"nbtools"}
        said.append(fresh.text(ran))
        assert "Mounted at /content/drive" in said[-1]
    return said


@full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("task", ["0_start_here", "9_your_own_task", *fresh.SAID])
def test_run_all_on_a_new_machine_installs_from_githubs_zip_and_runs_to_the_end(task, stack, tmp_path):
    python(stack)  # skips where there is none: in another process that would be a failure
    names = [f"{task}/{part}" for part in fresh.PARTS] if task in fresh.SAID else [task]
    said = fresh.apart(chain, names, tmp_path, stack)
    if task in fresh.SAID:
        fresh.check_chain(task, said)


def install_cell(source: str) -> str:
    made = fresh.with_settings(execute.tiny("0_start_here"), SOURCE=source)
    return next(cell.source for cell in made.cells if cell.cell_type == "code")


@pytest.mark.parametrize("stack", ["colab", pytest.param("newest", marks=full)])
def test_where_installing_fails_pip_says_why_and_run_all_stops(stack, tmp_path):
    fails = {  # SOURCE → pip's reason
        "drive:missing.zip": "No such file or directory",
        "drive:other.zip": "does not appear to be a Python project",
        "https://127.0.0.1:9/me/nbtools/archive/main.zip": "Connection refused",
    }
    (tmp_path / "drive").mkdir()
    (tmp_path / "drive" / "other.zip").write_bytes(b"PK\5\6" + bytes(18))
    machine = fresh.machine(tmp_path / "machine", tmp_path / "drive", stack)
    with started(stack, machine.folder, machine.python, machine.environment) as kernel:
        for source, reason in fails.items():
            kernel.end(request := kernel.client.execute(install_cell(source)))
            assert kernel.errors(request) == ["ModuleNotFoundError"], "which ends Run all"
            assert re.search(f"ERROR: .*{reason}", kernel.text(request))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return fresh.wheel(tmp_path_factory.mktemp("wheel"))


def test_a_wheel_holds_the_package_its_marker_of_types_and_license_only_and_its_readme_leads_to_the_repository(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.endswith("/")}
        [page] = [archive.read(name).decode() for name in held if name.endswith(".dist-info/METADATA")]
    package = {path.relative_to(build.ROOT).as_posix() for path in (build.ROOT / "nbtools").rglob("*.py")}
    about = {name for name in held if name.startswith("nbtools-")}
    scripts = {f"nbtools/live/{name}" for name in ("kept.js", "charts.js", "live.css")}
    assert held - about == package | {"nbtools/py.typed", *scripts}
    assert {"entry_points.txt", "LICENSE"} <= {name.rpartition("/")[2] for name in about}
    assert wheel.name.endswith("-py3-none-any.whl")
    inside = re.findall(rf"{re.escape(build.repository())}/(blob|raw)/main/([^)\s\"#]+)", page)
    assert {kind for kind, path in inside if path.endswith(".png")} == {"raw"}, "a picture's page is no picture"
    assert [path for _, path in inside if not (build.ROOT / path).exists()] == []
    assert not re.findall(r"\]\((?!https?://|#)|(?:src|srcset)=\"(?!https?://)", page)


@full
@pytest.mark.timeout(900)
def test_a_wheel_and_a_zip_install_also_from_a_folder_with_a_blank_in_its_name_and_the_terminal_trains(tmp_path, wheel):
    copies = tmp_path / "drive" / "my copies"
    archive = fresh.repository_zip(copies / ZIP)
    shutil.copy(wheel, copies)
    for number, source in enumerate((f"drive:my copies/{wheel.name}", archive.as_uri())):
        machine = fresh.machine(tmp_path / str(number), tmp_path / "drive", "colab")
        with started("colab", machine.folder, machine.python, machine.environment) as kernel:
            kernel.run(install_cell(source))
            assert f"{machine.folder}/venv/" in kernel.run("print(nbtools.__file__)")
            assert "It works: an epoch" in kernel.run(SMOKE)
