"""A notebook that lost something while it trained: its output, its page, its kernel. In a real browser, in two
generations of Jupyter.

One visit to each does everything, and keeps what it saw; the claims below are about that.
"""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import browser
import nbformat
import pytest
import serving
from browser import Notebook
from playwright.sync_api import Locator
from serving import CLASSIC, LAB, Stack, until

CELLS = (
    """import os, time, torch; torch.set_num_threads(1)
import nbtools as nb, toy
from nbtools.live import view
from pathlib import Path
view.STILL_EVERY, view.STILL_COST = 0.5, 1.0
Path("kernel").write_text(str(os.getpid()))
pack = toy.make_pack(Path("toy"))
class Slow:
    PLAN, BASELINE, BEST, loss, metrics = toy.PLAN, toy.BASELINE, toy.BEST, toy.loss, toy.metrics
    decode, model, preview = toy.decode, toy.model, toy.preview
    def batch(raw, plan, draws):
        if draws is not None:
            with open("steps", "a") as file: file.write("x")
            time.sleep(0.03)
        return toy.batch(raw, plan, draws)
panel = nb.Panel(toy.PLAN.replace(epochs=100_000))
panel""",
    'run = nb.fit(Slow, pack, panel, run="run", keep="kept", receipt=False)',
)
PANEL, FIT = range(len(CELLS))
LIVE = """() => {
    window.live = document.querySelector('svg[role=img]').closest('.widget-vbox, .jupyter-widgets');
    window.drawn = 0;
    new MutationObserver(() => window.drawn++).observe(window.live.parentElement, {childList: true});
}"""
"""Remembers the live view, and counts how often something else took its place."""


@dataclass
class Seen:
    """What one visit saw."""

    work: Path
    refreshed: int = 0  # pictures that came under the live view after the first
    redrawn: int = -1  # how often the live view was made anew meanwhile
    stills: list[bool] = field(default_factory=list)  # whether each PNG showed beside the live view
    again: bool = False  # whether the run went on by the panel's Resume after its cell was run again
    reloaded: bool = False  # and after the page was loaded anew
    saved: dict[str, Any] = field(default_factory=dict)  # the notebook's file during training
    pictures: dict[str, bool] = field(default_factory=dict)  # way of opening it when the kernel is gone → PNG shows
    texts: dict[str, str] = field(default_factory=dict)  # and the text of fit's output
    errors: list[str] = field(default_factory=list)


def visit(stack: Stack, chromium: str, folder: Path) -> Seen:
    seen = Seen(folder / "work")
    with serving.serving(stack, folder) as address, browser.chromium(chromium) as window:
        serving.write(seen.work / "toy.ipynb", CELLS)
        notebook = browser.OPENED[stack.name](window, address)
        notebook.page.on("dialog", lambda dialog: dialog.accept())
        try:
            notebook.open("toy.ipynb")
            notebook.ready()
            notebook.run_all()
            stills(notebook, stack, seen)
            again(notebook, stack, seen)
            reload(notebook, stack, seen)
            os.kill(int((seen.work / "kernel").read_text()), signal.SIGKILL)
            seen.errors = notebook.errors
            notebook.page.close()
            for name in ("without a kernel", "with a new kernel"):
                reopen(browser.OPENED[stack.name](window, address), name, stack, seen)
        except BaseException:
            if not notebook.page.is_closed():
                notebook.shot(f"{stack.name}-lost-failed")
            raise
    return seen


def steps(seen: Seen) -> int:
    log = seen.work / "steps"
    return log.stat().st_size if log.exists() else 0


def stills(notebook: Notebook, stack: Stack, seen: Seen) -> None:
    """Look at the live view while pictures are refreshed, and save."""
    until(lambda: notebook.frames(), "the live view")
    plot = seen.work / "run" / "plot.png"
    until(plot.exists, "plot.png")
    notebook.page.evaluate(LIVE)
    for _ in range(2):
        before = plot.stat().st_mtime_ns
        until(lambda before=before: plot.stat().st_mtime_ns > before, "another picture")
        seen.refreshed += 1
    images = notebook.output(FIT).locator("img[width='960'], .output_png img")
    until(images.count, "the picture in the page")
    seen.stills = [images.nth(i).is_visible() for i in range(images.count())]
    seen.redrawn = notebook.page.evaluate("window.live.isConnected ? window.drawn : 99")
    notebook.shot(f"{stack.name}-stills")
    seen.saved = browser.saved(notebook, seen.work / "toy.ipynb")


def again(notebook: Notebook, stack: Stack, seen: Seen) -> None:
    """Pause, run the cell again, which takes its output away, and resume."""
    own(notebook, "Pause").click()
    until(own(notebook, "Resume").is_visible, "Resume")
    notebook.run(FIT)
    until(lambda: not notebook.frames(), "the output is gone")
    notebook.shot(f"{stack.name}-again")
    seen.again = resumed(notebook, seen)


def reload(notebook: Notebook, stack: Stack, seen: Seen) -> None:
    """Pause, save, load the page anew, and resume."""
    own(notebook, "Pause").click()
    until(own(notebook, "Resume").is_visible, "Resume")
    browser.saved(notebook, seen.work / "toy.ipynb")
    notebook.page.reload()
    until(lambda: own(notebook, "Resume").count() and own(notebook, "Resume").is_visible(), "Resume on the new page")
    notebook.shot(f"{stack.name}-reloaded")
    seen.reloaded = resumed(notebook, seen)


def own(notebook: Notebook, label: str) -> Locator:
    """A button in the panel's own cell."""
    named = re.compile(rf"^\s*{label}\s*$")
    return notebook.output(PANEL).locator("button:visible").filter(has_text=named)


def resumed(notebook: Notebook, seen: Seen) -> bool:
    before = steps(seen)
    own(notebook, "Resume").click()
    until(lambda: steps(seen) > before + 3, "steps after Resume")
    until(own(notebook, "Pause").is_visible, "Pause")
    return True


def reopen(notebook: Notebook, name: str, stack: Stack, seen: Seen) -> None:
    """Look at the file that was saved during training, when its kernel is gone."""
    facts = seen.saved["metadata"]
    if name == "without a kernel":
        facts = {"kernelspec": {"name": "gone", "display_name": "gone"}}
    file = f"{name.replace(' ', '-')}.ipynb"
    (seen.work / file).write_text(json.dumps({**seen.saved, "metadata": facts}))
    notebook.open(file)
    if name == "without a kernel":
        notebook.without_kernel()
    else:
        notebook.ready()
    output = notebook.output(FIT)
    seen.pictures[name] = until(lambda: notebook.shows(output.locator("img")), "the picture")
    until(lambda: "Loading widget" not in output.inner_text(), "an answer to where the widget is")
    seen.texts[name] = output.inner_text()
    notebook.shot(f"{stack.name}-lost-{name.replace(' ', '-')}")
    notebook.page.close()


@pytest.fixture(scope="module", params=[LAB, CLASSIC], ids=lambda stack: stack.name)
def seen(request, chromium, tmp_path_factory) -> Seen:
    return visit(request.param, chromium, tmp_path_factory.mktemp(request.param.name))


@pytest.mark.browser
@pytest.mark.timeout(400)
def test_running_the_cell_again_while_it_is_paused_leaves_resume_in_the_panels_cell(seen):
    assert seen.again


@pytest.mark.browser
def test_after_a_reload_of_the_page_resume_in_the_panels_cell_acts(seen):
    assert seen.reloaded


@pytest.mark.browser
def test_a_notebook_saved_amid_training_shows_its_picture_when_the_kernel_is_gone(seen):
    assert seen.pictures == {"without a kernel": True, "with a new kernel": True}
    for text in seen.texts.values():
        assert not re.search("widget", text, re.IGNORECASE), text


@pytest.mark.browser
def test_what_is_saved_amid_training_is_valid_and_holds_one_png(seen):
    nbformat.validate(nbformat.reads(json.dumps(seen.saved), 4))
    shown = [name for output in seen.saved["cells"][FIT]["outputs"] for name in output.get("data", {})]
    assert shown.count("image/png") == 1


@pytest.mark.browser
def test_refreshing_the_picture_does_not_touch_the_live_view_and_hides_behind_it(seen):
    assert seen.refreshed == 2
    assert seen.redrawn == 0
    assert seen.stills == [False]


@pytest.mark.browser
def test_a_killed_run_has_its_picture_in_both_folders(seen):
    for folder in ("run", "kept"):
        assert (seen.work / folder / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.browser
def test_no_script_of_the_page_fails(seen):
    assert seen.errors == []
