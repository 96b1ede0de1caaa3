"""In a real browser, in two generations of Jupyter: an advice, samples that are chosen while it trains."""

from __future__ import annotations

import browser
import pytest
import serving
from serving import CLASSIC, LAB, Stack, until

from nbtools.train import checkpoint

pytestmark = [pytest.mark.browser, pytest.mark.full]
CELLS = (
    """import torch; torch.set_num_threads(1)
import nbtools as nb, toy
from pathlib import Path
pack = toy.make_pack(Path("data"))
nb.evaluate(nb.fit(toy, pack, toy.PLAN, "runs/short", receipt=False, progress=False), pack)""",
    "nb.advise(toy, pack, measure=False)",
    'run = nb.fit(toy, pack, toy.PLAN.replace(epochs=100_000), "runs/long", receipt=False)',
)
SCORES, ADVICE, FIT = range(len(CELLS))


@pytest.fixture(scope="module", params=[LAB, CLASSIC], ids=["lab", "classic"])
def stack(request) -> Stack:
    return request.param


@pytest.fixture(scope="module")
def notebook(stack, chromium, tmp_path_factory):
    folder = tmp_path_factory.mktemp(stack.name)
    with serving.serving(stack, folder) as address, browser.chromium(chromium) as window:
        serving.write(folder / "work" / "tables.ipynb", CELLS)
        made = browser.OPENED[stack.name](window, address, at=FIT)
        made.open("tables.ipynb")
        made.ready()
        for cell in (SCORES, ADVICE):
            made.run(cell)
        made.wait_for_prompt(ADVICE, r"\d+")
        yield made, folder / "work"


def test_an_advised_setting_has_a_row_with_its_reason(notebook):
    page, _ = notebook
    rows = page.output(ADVICE).locator("table").first.locator("tbody tr").all_inner_texts()
    assert any("lr" in row and "by the" in row for row in rows)
    assert any("or batch" in row for row in rows)


def test_the_worst_samples_are_shown_while_it_trains_once_they_are_asked_for(notebook):
    page, work = notebook
    output = page.output(FIT)
    page.run(FIT)
    first = until(lambda: output.locator(".nbt-cards img").first.get_attribute("src"), "samples")
    field = output.locator("select", has=page.page.locator("option:text-is('the worst')"))
    field.select_option(label="the worst")
    until(lambda: checkpoint.read_index(work / "runs" / "long").get("samples") == "worst", "the choice")
    until(lambda: output.locator(".nbt-cards img").first.get_attribute("src") != first, "other samples")
    assert "truth: " in str(output.locator(".nbt-cards img").first.get_attribute("alt"))
    page.click("Stop")
    page.wait_for_prompt(FIT, r"\d+")
