"""The wheel that `make wheel` builds: all that nbtools needs and no more, its page on PyPI, and a folder without the
repository in which it trains."""

import re
import subprocess
import zipfile
from email.message import Message
from email.parser import Parser
from html.parser import HTMLParser

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


class Page(HTMLParser):
    """Where a page leads and what it shows."""

    def __init__(self, html: str):
        super().__init__()
        self.addresses: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value for name, value in attrs if name in ("href", "src", "srcset") and value]


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


def test_its_metadata_has_what_an_index_shows(metadata):
    for field in ("Name", "Version", "Summary", "Keywords", "License-Expression", "Requires-Python"):
        assert metadata[field], field
    links = dict(each.split(", ") for each in metadata.get_all("Project-URL", []))
    assert links["Repository"] == ADDRESS
    assert all(link.startswith(ADDRESS) for link in links.values())
    assert {"Documentation", "Changelog", "Issues"} <= links.keys()
    assert metadata["Description-Content-Type"] == "text/markdown"
    required = (build.ROOT / "requirements.txt").read_text().splitlines()
    needed = {re.split(r"[<>=]", line)[0] for line in required if line and not line.startswith("#")}
    assert needed <= {re.split(r"[<>=;]", line)[0] for line in metadata.get_all("Requires-Dist", [])}


def test_on_pypi_the_readme_shows_its_pictures_and_every_link_leads_somewhere(metadata):
    markdown = pytest.importorskip("readme_renderer.markdown", reason="a part of nbtools[test]")
    html = markdown.render(metadata.get_payload())
    assert html, "PyPI would refuse it"
    addresses = Page(html).addresses
    assert [one for one in addresses if not re.match(r"https?://|#", one)] == []
    inside = [one.removeprefix(ADDRESS).partition("/main/") for one in addresses if one.startswith(f"{ADDRESS}/")]
    assert {kind for kind, _, path in inside if path.endswith((".md", ".ipynb"))} == {"/blob"}
    assert {kind for kind, _, path in inside if path.endswith(".png")} == {"/raw"}, "a picture's page is no picture"
    assert [path for _, _, path in inside if not (build.ROOT / path).exists()] == []
    rows = re.findall(r"^\| (?!---)", (build.ROOT / "README.md").read_text(), re.M)
    assert html.count("<tr>") == len(rows), "tables are tables"


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
