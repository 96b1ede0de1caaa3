"""Tables in a real browser, in two generations of Jupyter: runs that are ticked and compared, an advice that unfolds,
samples that are chosen while it trains."""

from __future__ import annotations

import browser
import pytest
import serving
from browser import Notebook
from playwright.sync_api import ViewportSize
from serving import CLASSIC, LAB, Stack, until

from nbtools.train import checkpoint

CELLS = (
    """import torch; torch.set_num_threads(1)
import nbtools as nb, toy
from pathlib import Path
pack = toy.make_pack(Path("data"))
for name, size in ("wide", 32), ("narrow", 16):
    nb.fit(toy, pack, toy.PLAN.replace(batch_size=size), f"runs/{name}", receipt=False, progress=False).tags = ["toy"]
nb.evaluate(nb.Run.open("runs/wide"), pack)""",
    'nb.runs("runs")',
    "nb.advise(toy, pack, measure=False)",
    'run = nb.fit(toy, pack, toy.PLAN.replace(epochs=100_000), "runs/long", receipt=False)',
)
SCORES, RUNS, ADVICE, FIT = range(len(CELLS))
WIDTHS = 1280, 900


@pytest.fixture(scope="module", params=[LAB, pytest.param(CLASSIC, marks=pytest.mark.full)], ids=["lab", "classic"])
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
        for cell in (SCORES, RUNS, ADVICE):
            made.run(cell)
        made.wait_for_prompt(ADVICE, r"\d+")
        yield made, folder / "work"


def shots(notebook: Notebook, name: str, cell: int) -> None:
    """For people to look at, 1280 and 900 px wide."""
    before = notebook.page.viewport_size
    for width in WIDTHS:
        notebook.page.set_viewport_size(ViewportSize(width=width, height=800))
        notebook.output(cell).scroll_into_view_if_needed()
        notebook.page.screenshot(path=browser.SHOTS / f"{name}-{width}.png")
    notebook.page.set_viewport_size(before or browser.WINDOW)


@pytest.mark.browser
def test_runs_are_ticked_and_compared_in_the_cell(notebook, stack):
    page, _ = notebook
    output = page.output(RUNS)
    shown = output.inner_text()
    assert "2 runs" in shown
    assert all(word in shown for word in ("narrow", "wide", "done", "toy", "epoch"))
    page.button("Compare", RUNS).click()
    until(lambda: "Settings that differ" in output.inner_text(), "the comparison")
    until(lambda: page.shows(output.locator("img")), "its picture")
    assert output.locator("td:text-is('batch size')").count() == 1
    shots(page, f"{stack.name}-runs", RUNS)


@pytest.mark.browser
def test_an_advised_setting_is_a_line_and_unfolds(notebook, stack):
    page, _ = notebook
    rows = page.output(ADVICE).locator("table").first.locator("tbody tr")
    heights = rows.evaluate_all("rows => rows.map(row => row.getBoundingClientRect().height)")
    assert len(heights) > 5
    assert max(heights) < 1.5 * min(heights), "one line each"
    batches = page.output(ADVICE).get_by_text("Other batch sizes")
    batches.click()
    until(lambda: "by the" in page.output(ADVICE).inner_text(), "the reason of another batch size")
    shots(page, f"{stack.name}-advice", ADVICE)
    shots(page, f"{stack.name}-scores", SCORES)


@pytest.mark.browser
def test_the_worst_samples_are_shown_while_it_trains_once_they_are_asked_for(notebook, stack):
    page, work = notebook
    output = page.output(FIT)
    page.run(FIT)
    first = until(lambda: output.locator(".nbt-cards img").first.get_attribute("src"), "samples")
    field = output.locator("select", has=page.page.locator("option:text-is('the worst')"))
    field.select_option(label="the worst")
    until(lambda: checkpoint.read_index(work / "runs" / "long").get("samples") == "worst", "the choice")
    until(lambda: output.locator(".nbt-cards img").first.get_attribute("src") != first, "other samples")
    assert "truth: " in str(output.locator(".nbt-cards img").first.get_attribute("alt"))
    shots(page, f"{stack.name}-worst", FIT)
    page.click("Stop")
    page.wait_for_prompt(FIT, r"\d+")
