"""The wheel that `make wheel` builds holds all that nbtools needs and no more, and trains where no repository is."""

import re
import subprocess
import zipfile
from email.message import Message
from email.parser import Parser

import pytest

from notebooks import build
from tests import fresh
from tests.kernels import MINE

ADDRESS = build.repository()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return fresh.wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_a_wheel_holds_the_package_its_script_its_marker_of_types_and_its_license_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.endswith("/")}
    package = {path.relative_to(build.ROOT).as_posix() for path in (build.ROOT / "nbtools").rglob("*.py")}
    about = {name for name in held if name.startswith("nbtools-")}
    scripts = {f"nbtools/live/{name}" for name in ("kept.js", "charts.js", "live.css")}
    assert held - about == package | {"nbtools/py.typed", *scripts}
    assert {name.partition("/")[2] for name in about} == {
        *("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"),
    }
    assert wheel.name.endswith("-py3-none-any.whl")


def test_its_metadata_has_what_an_index_shows_and_the_links_of_its_readme_lead_to_the_repository(metadata):
    for field in ("Name", "Version", "Summary", "Keywords", "License-Expression", "Requires-Python"):
        assert metadata[field], field
    links = dict(each.split(", ") for each in metadata.get_all("Project-URL", []))
    assert all(link.startswith(ADDRESS) for link in links.values())
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= links.keys()
    page = metadata.get_payload()
    inside = re.findall(rf"{re.escape(ADDRESS)}/(blob|raw)/main/([^)\s\"#]+)", page)
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
    assert "it works on cpu" in done.stdout
    assert not (tmp_path / "nbtools").exists()
