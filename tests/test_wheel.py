"""The wheel that `make wheel` builds holds all that nbtools needs and no more; test_install installs it."""

import re
import zipfile

import pytest

from notebooks import build
from tests import fresh


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
