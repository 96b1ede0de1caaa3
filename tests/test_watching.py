"""A run that another process trains, watched in a real browser in two generations of Jupyter: its answers arrive, its
charts show all of its history, and what the cells behind it leave in the saved notebook is whole.

The run's lr was once set to 1000 and taken back. One visit to each Jupyter does everything; the claims are about what
it saw. Screenshots stay in `browser.SHOTS`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import browser
import pytest
import serving
import toy
from browser import Notebook, saved, text
from serving import CLASSIC, LAB, Stack, until

import nbtools as nb
from nbtools.live import number
from nbtools.train import History

RUN = "runs/typo"
TYPO = 1000.0
CELLS = (
    f'import torch; torch.set_num_threads(1)\nimport nbtools as nb\nrun = nb.watch("{RUN}")',
    "run.history",
    "print(run.summary().train_loss.iloc[-1], nb.compare(run).frame.train_loss.iloc[0])",
    "from nbtools.tasks import captcha\n"
    'pack = captcha.pack(captcha.demo("raw", 20), progress=False)\ncaptcha.show(pack, [], [])',
)
WATCH, HISTORY, LOSSES, NOTHING = range(4)
TRAIN = """
import sys, time; sys.path.insert(0, sys.argv[1])
import toy, torch, nbtools as nb
torch.set_num_threads(1)
batch = toy.batch
def slow(raw, plan, draws):
    time.sleep(0.02)
    return batch(raw, plan, draws)
toy.batch = slow
pack = nb.Pack.open(sys.argv[2])
nb.fit(toy, pack, toy.PLAN.replace(epochs=100000, eval_every=10), sys.argv[3], receipt=False, progress=False)
"""
CURVE = """svg => [...svg.querySelectorAll('polyline')].map(line => [...line.points].map(at => [at.x, at.y]))"""
"""Of a chart, the points of each line, in 2000 by 1000 from the top left."""


@dataclass
class Seen:
    """What one visit saw. lr: the points of the chart of lr; legend: of the chart of losses, while it ran; told: the
    output after each of the clicks; waiting: what stood beside the buttons until the answer came."""

    folder: Path
    lr: list[list[float]] = field(default_factory=list)
    legend: str = ""
    told: dict[str, str] = field(default_factory=dict)
    waiting: str = ""
    notebook: dict[str, Any] = field(default_factory=dict)
    shown: dict[int, str] = field(default_factory=dict)
    images: dict[int, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def mistyped(folder: Path) -> None:
    """A run of 60 epochs, in the middle of which lr was 1000 for one log step."""
    pack = toy.make_pack(folder)
    plan = toy.PLAN.replace(epochs=60, eval_every=10, schedule="constant")
    run = nb.fit(toy, pack, plan, folder / RUN, receipt=False, progress=False)
    history = History(run.folder / "history.csv")
    middle = len(history) // 2
    here = next(i for i in range(middle, middle + 20) if {row["kind"] for row in history.rows[i : i + 3]} == {"step"})
    before, during, after = history.rows[here : here + 3]
    lr = before["lr"]
    during["lr"] = TYPO
    for row, what in ((before, f"lr {lr:g} → {TYPO:g}"), (after, f"lr {TYPO:g} → {lr:g}")):
        kept = {name: row[name] for name in ("epoch", "step", "samples")}
        row.clear()
        row |= {"kind": "change", **kept, "what": what}
    history.columns.append("what")
    history.rewrite()


@contextmanager
def training(folder: Path) -> Iterator[None]:
    """Another process trains the run on, a step in 20 ms."""
    command = [sys.executable, "-c", TRAIN, str(Path(__file__).parent), str(folder / "pack"), str(folder / RUN)]
    rows = len(History(folder / RUN / "history.csv"))
    process = subprocess.Popen(command, env=serving.environment(folder.parent))  # the kernel's locks
    try:
        until(lambda: len(History(folder / RUN / "history.csv")) > rows + 4, "steps of the run that goes on")
        yield
        assert process.wait(serving.LIMIT) == 0
    finally:
        process.kill()
        process.wait()


def visit(stack: Stack, chromium: str, folder: Path) -> Seen:
    work = folder / "work"
    work.mkdir()
    mistyped(work)
    seen = Seen(work / RUN)
    with serving.serving(stack, folder) as address, browser.chromium(chromium) as window:
        serving.write(work / "watch.ipynb", CELLS)
        notebook = browser.OPENED[stack.name](window, address)
        try:
            with training(work):
                watch(notebook, stack.name, seen)
            notebook.wait_for_prompt(NOTHING, r"\d+")
            for cell in range(len(CELLS)):
                seen.shown[cell] = notebook.output(cell).inner_text()
                seen.images[cell] = notebook.output(cell).locator("img").count()
            looks(notebook, NOTHING, f"{stack.name}-watched-nothing-wrong")
            seen.notebook = saved(notebook, work / "watch.ipynb")
            seen.errors = notebook.errors
        except BaseException as error:
            notebook.shot(f"{stack.name}-watch-failed")
            error.add_note(notebook.output(WATCH).inner_text())
            raise
    return seen


def watch(notebook: Notebook, name: str, seen: Seen) -> None:
    """Run all, look at the charts, and press what is to be answered."""
    notebook.open("watch.ipynb")
    notebook.ready()
    notebook.run_all()
    output = notebook.output(WATCH)
    chart = output.locator('svg[aria-label="learning rate"]')
    until(lambda: chart.count() and any(chart.evaluate(CURVE)), "the chart of lr")
    seen.lr = [point for line in chart.evaluate(CURVE) for point in line]
    seen.legend = output.locator(".nbt-head").first.inner_text()
    looks(notebook, WATCH, f"{name}-watched")
    for label, answer in (("Save now", "saved at step"), (r"What limits it\?", "")):
        notebook.click(label)
        if not answer:
            until(lambda: "for some seconds" in output.inner_text(), "that it was heard")
            seen.waiting = output.inner_text()
            answer = until(lambda: getattr(nb.Run.open(seen.folder, toy).verdict, "sentence", ""), "a verdict")
        until(lambda said=answer: said in output.inner_text(), answer)
        seen.told[label] = output.inner_text()
    looks(notebook, WATCH, f"{name}-watched-answers")
    notebook.click("Stop")
    notebook.wait_for_prompt(WATCH, r"\d+")


def looks(notebook: Notebook, cell: int, name: str) -> None:
    """Screenshots, dark too where there is a dark theme."""
    notebook.output(cell).scroll_into_view_if_needed()
    notebook.shot(name)
    if isinstance(notebook, browser.Lab):
        notebook.theme(dark=True)
        notebook.shot(f"{name}-dark")
        notebook.theme(dark=False)


@pytest.fixture(scope="module", params=[LAB, CLASSIC], ids=lambda stack: stack.name)
def seen(request, chromium, tmp_path_factory) -> Seen:
    return visit(request.param, chromium, tmp_path_factory.mktemp(f"watch-{request.param.name}"))


@pytest.mark.browser
@pytest.mark.timeout(300)
def test_the_chart_of_lr_shows_what_was_before_and_after_a_typo(seen):
    assert len(seen.lr) > 4, "a dot"
    left, right = seen.lr[0], seen.lr[-1]
    assert left[0] < 100
    assert right[0] > 1900
    assert left[1] == right[1] > 800, "the lr before and after stands at the bottom"
    assert min(y for _, y in seen.lr) < 200, "and the typo at the top"


@pytest.mark.browser
def test_the_train_loss_is_the_last_epochs_in_picture_summary_and_comparison(seen):
    one, other = text(seen.notebook, LOSSES).split()
    assert one == other
    shown = re.search(r"train, last epoch\s*([\d.e-]+)", seen.legend)
    assert shown is not None, seen.legend
    ended = [number(row["train_loss"]) for row in nb.Run.open(seen.folder, toy).history.of("epoch")]
    assert shown[1] in ended


@pytest.mark.browser
def test_save_now_is_answered_where_it_is_watched(seen):
    step = int(re.findall(r"saved at step (\d+)", seen.told["Save now"])[-1])
    assert f"saved at step {step}" in text(seen.notebook, WATCH), "gone from the saved notebook"


@pytest.mark.browser
def test_what_limits_it_is_answered_where_it_is_watched(seen):
    verdict = nb.Run.open(seen.folder, toy).verdict
    assert verdict is not None
    said = seen.told[r"What limits it\?"]
    assert said.count(verdict.sentence) == 2, "as the newest message, and beside the change that it proposes"
    assert verdict.change is None or "Make it so" in said
    assert "measuring what a step consists of, for some seconds" in seen.waiting
    assert "measuring what a step consists of, for some seconds" not in said
    assert verdict.sentence in text(seen.notebook, WATCH)


@pytest.mark.browser
def test_a_history_shows_as_a_table(seen):
    assert " at 0x" not in json.dumps(seen.notebook)
    assert re.search(r"History runs/typo/history\.csv: [\d,]+ rows", seen.shown[HISTORY])
    assert "asked" in seen.shown[HISTORY]


@pytest.mark.browser
def test_where_nothing_is_wrong_there_is_a_sentence_and_no_empty_picture(seen):
    assert seen.images == {WATCH: 1, HISTORY: 0, LOSSES: 0, NOTHING: 0}
    assert "No samples to show: the list of ids is empty." in seen.shown[NOTHING]


@pytest.mark.browser
def test_no_script_of_the_page_fails(seen):
    assert seen.errors == []
