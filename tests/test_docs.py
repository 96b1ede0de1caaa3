"""README and docs: links lead somewhere, every figure has its receipt, every name of nbtools exists."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import nbtools as nb

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
NUMBER = r"[−-]?[\d,]+(?:\.\d+)?"


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_its_heading(page):
    text = page.read_text()
    for target in re.findall(r'\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"', text):
        path, _, anchor = "".join(target).partition("#")
        if not re.match(r"https?:", path):
            other = (page.parent / path) if path else page
            assert other.exists(), path
            assert not anchor or anchor in anchors(other), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_public_name_that_a_page_calls_exists(page):
    if page.name != "CHANGELOG.md":  # which also names what is gone
        assert [name for name in re.findall(r"\bnb\.(\w+)", page.read_text()) if not hasattr(nb, name)] == []


def figures() -> list[tuple[str, str, str, str]]:
    """(page, figure, spread and n, receipt) of each row of a table that names one."""
    found = []
    for page in (ROOT / "README.md", ROOT / "docs" / "measured.md"):
        for row in re.findall(r"^\| (.*results/\w+\.json\).*) \|$", page.read_text(), re.M):
            _, figure, *rest = row.split(" | ")
            found.append((page.name, figure, " ".join(rest), re.findall(r"results/(\w+\.json)", row)[0]))
    return found


def near(written: str, value: float) -> bool:
    """Whether a number is the value, rounded to the digits that are written."""
    text = written.replace(",", "").replace("−", "-")
    return abs(float(text) - value) <= 0.5001 * 10.0 ** -len(text.partition(".")[2])


def test_every_figure_is_that_of_its_receipt():
    assert {page for page, *_ in figures()} == {"README.md", "measured.md"}
    for page, figure, rest, name in figures():
        receipt = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
        known: list[dict[str, Any]] = [receipt["headline"], *receipt["figures"]]
        value, *spread = re.findall(NUMBER, figure.partition("n = ")[0])
        if page == "README.md":
            count = int(figure.partition("n = ")[2].partition(")")[0])
        else:
            least, n, machine = rest.split(" ")[0], *re.findall(r" (\d+) (EPYC|Xeon) ", rest)[0]
            assert machine in receipt["machine"]["device"]
            spread, count = [] if least == "–" else re.findall(NUMBER, rest.partition(f" {n} {machine}")[0]), int(n)
        same = [one for one in known if near(value, one["value"]) and one["n"] == count]
        if spread:
            same = [one for one in same if near(spread[0], one["least"]) and near(spread[1], one["most"])]
        assert same, (page, figure, rest, name)
        assert spread or count == 1, "a figure of several runs has its spread"


def test_the_pages_are_short():
    budgets = {"README": 1300, "CONTRIBUTING": 500, "CHANGELOG": 3000, "your-own": 2200, "options": 1800, "live": 900}
    budgets |= {"several": 500, "troubleshooting": 1500, "architecture": 900, "measured": 1500, "guides": 2500}
    words = {page.stem: len(page.read_text().split()) for page in PAGES}
    assert {name: count for name, count in words.items() if count > budgets[name]} == {}
