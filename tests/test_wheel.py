"""The wheel that `make wheel` builds holds all that nbtools needs and no more, and trains where no repository is."""

import re
import subprocess
import zipfile

import pytest

from notebooks import build
from tests import fresh
from tests.kernels import MINE


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return fresh.wheel(tmp_path_factory.mktemp("wheel"))


def test_a_wheel_holds_the_package_its_script_its_marker_of_types_and_its_license_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.endswith("/")}
    package = {path.relative_to(build.ROOT).as_posix() for path in (build.ROOT / "nbtools").rglob("*.py")}
    about = {name for name in held if name.startswith("nbtools-")}
    scripts = {f"nbtools/live/{name}" for name in ("kept.js", "charts.js", "live.css")}
    assert held - about == package | {"nbtools/py.typed", *scripts}
    assert {"entry_points.txt", "LICENSE"} <= {name.rpartition("/")[2] for name in about}
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_links_of_its_readme_lead_to_the_repository(wheel):
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        page = archive.read(name).decode()
    inside = re.findall(rf"{re.escape(build.repository())}/(blob|raw)/main/([^)\s\"#]+)", page)
    assert {kind for kind, path in inside if path.endswith(".png")} == {"raw"}, "a picture's page is no picture"
    assert [path for _, path in inside if not (build.ROOT / path).exists()] == []
    assert not re.findall(r"\]\((?!https?://|#)|(?:src|srcset)=\"(?!https?://)", page)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_pip_installs_it_from_drive_and_the_terminal_trains_with_it(wheel, tmp_path):
    machine = fresh.machine(tmp_path / "machine", None, MINE)
    pip = [str(machine.python), "-m", "pip", "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(pip, cwd=tmp_path, env=machine.environment, check=True)
    environment = {name: value for name, value in machine.environment.items() if name != "PYTHONPATH"}
    for words in (["gpus"], ["train", "captcha", "--smoke-test"]):
        command = [str(machine.python), "-m", "nbtools", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "It works: an epoch" in done.stdout
    assert not (tmp_path / "nbtools").exists()
