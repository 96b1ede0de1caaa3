"""A table in a real browser, in two generations of Jupyter, whose own styles must not tear it apart."""

from __future__ import annotations

import browser
import pytest
import serving
from serving import CLASSIC, LAB

pytestmark = pytest.mark.browser
CELL = """import nbtools as nb, toy
from pathlib import Path
nb.advise(toy, toy.make_pack(Path("data")), measure=False)"""
PLACES = "each => each.map(cell => [getComputedStyle(cell).textAlign, cell.getBoundingClientRect().x])"


@pytest.mark.parametrize("stack", [LAB, pytest.param(CLASSIC, marks=pytest.mark.full)], ids=lambda stack: stack.name)
def test_a_column_of_a_table_is_aligned_as_its_header_and_an_advised_setting_has_its_reason(stack, chromium, tmp_path):
    with serving.serving(stack, tmp_path) as address, browser.chromium(chromium) as window:
        serving.write(tmp_path / "work" / "tables.ipynb", [CELL])
        page = browser.OPENED[stack.name](window, address)
        page.open("tables.ipynb")
        page.ready()
        page.run(0)
        table = page.output(0).locator("table").first
        table.wait_for()
        rows = table.locator("tbody tr").all_inner_texts()
        headers = table.locator("thead th").evaluate_all(PLACES)
        assert len(headers) == 3
        assert headers == table.locator("tbody tr").first.locator("td").evaluate_all(PLACES)
    assert any("lr" in row and "by the" in row for row in rows)
