"""A user mistypes a setting of a running run, in a real browser and two generations of Jupyter: it is asked about
once more, undone where it ruins the run, and taken back by a click. One visit a stack; the claims are about what it
saw.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import browser
import pytest
import serving
import watched
from browser import Notebook
from person import Log
from serving import CLASSIC, LAB, Stack, until

from nbtools.run import Run

RUN = "runs/typo"
CELLS = (
    """import torch; torch.set_num_threads(1)
import nbtools as nb, watched
raw = watched.demo("raw", 400, alphabet="0123", size=(32, 84))
pack = watched.pack(raw, into="pack", progress=False)
plan = watched.PLAN.replace(
    network="small", loss="cross_entropy", amp="off", channels_last=False, epochs=100_000, batch_size=32, lr=0.002,
    warmup_epochs=0, schedule="constant", clip_norm=1.0, weight_decay=0.01)
pack""",
    f'run = nb.fit(watched, pack, plan, run="{RUN}", receipt=False)',
    "run",
)
FIT, RESULT = 1, 2


@dataclass
class Seen:
    """What one visit saw. asked, kept: the row of lr after 1000 was typed, and the lr that training went on with."""

    asked: str = ""
    kept: float = 0.0
    ruined: list[float] = field(default_factory=list)
    diverged: str = ""
    shown: str = ""
    undone: list[float] = field(default_factory=list)
    best: str = ""
    question: str = ""
    preset: list[float] = field(default_factory=list)
    ending: str = ""
    result: str = ""
    errors: list[str] = field(default_factory=list)
    run: Any = None


def visit(stack: Stack, chromium: str, folder: Path) -> Seen:
    seen, work = Seen(), folder / "work"
    with serving.serving(stack, folder) as address, browser.chromium(chromium) as window:
        serving.write(work / "typo.ipynb", CELLS)
        notebook = browser.OPENED[stack.name](window, address)
        try:
            log = Log(work / watched.LOG)
            notebook.open("typo.ipynb")
            notebook.ready()
            notebook.run_all()
            until(lambda: len(log.steps()) > 40, "an epoch")
            typo(notebook, log, seen, stack.name)
            back(notebook, log, seen, stack.name)
            end(notebook, seen, stack.name)
            seen.errors, seen.run = notebook.errors, Run.open(work / RUN, watched)
        except BaseException as error:
            notebook.shot(f"{stack.name}-typo-failed")
            error.add_note(notebook.output(FIT).inner_text())
            raise
    return seen


def steps_of(log: Log, lr: float) -> bool:
    return bool(log.steps()) and log.steps()[-1]["lr"] == lr


def typo(notebook: Notebook, log: Log, seen: Seen, name: str) -> None:
    """1000 in the field of lr: asked about, insisted on, undone by the run."""
    notebook.output(FIT).scroll_into_view_if_needed()
    row = notebook.row("lr")
    notebook.type("lr", "1000")
    until(notebook.button("Apply lr = 1000").is_visible, "the question")
    steps = len(log.steps())
    until(lambda: len(log.steps()) > steps + 10, "steps")
    seen.asked, seen.kept = row.inner_text(), log.steps()[-1]["lr"]
    notebook.shot(f"{name}-typo-asked")
    notebook.click("Apply lr = 1000")
    told = notebook.output(FIT).get_by_text("Training diverged")
    until(told.count, "the sentence")
    seen.diverged = told.first.inner_text()
    until(lambda: steps_of(log, 0.002), "steps with the former lr")
    until(lambda: row.locator("input[type=text]").first.input_value() == "0.002", "the former lr in its field")
    seen.ruined = [step["lr"] for step in log.steps()]
    seen.shown = row.inner_text()
    notebook.shot(f"{name}-typo-undone")


def back(notebook: Notebook, log: Log, seen: Seen, name: str) -> None:
    """Undo, Back to best, and a preset of four changes."""
    for value in (0.001, 0.003):
        notebook.type("lr", str(value))
        until(lambda value=value: steps_of(log, value), f"steps with lr {value}")
    for value in (0.001, 0.002):
        until(notebook.button("Undo").is_enabled, "a change to undo")
        notebook.click("Undo")
        until(lambda value=value: steps_of(log, value), f"steps with lr {value}")
        seen.undone.append(log.steps()[-1]["lr"])
    until(notebook.button("Back to best").is_enabled, "a best checkpoint")
    notebook.click("Back to best")
    told = notebook.output(FIT).get_by_text("the best checkpoint:")
    until(told.count, "the best checkpoint")
    seen.best = told.first.inner_text()
    for knob, words in (("lr", "0.001"), ("clip_norm", "0.5"), ("early_stop", "77"), ("eval_every", "2")):
        notebook.type(knob, words)
    until(lambda: log.steps()[-1]["eval_every"] == 2, "four changes")
    notebook.click("As advised")
    question = notebook.button(r"Apply 4 changes: .*")
    until(question.is_visible, "the question")
    seen.question = question.inner_text()
    seen.preset.append(log.steps()[-1]["lr"])
    notebook.shot(f"{name}-typo-preset")
    notebook.click(r"Apply 4 changes: .*")
    until(lambda: steps_of(log, 0.002), "the advised lr")
    seen.preset.append(log.steps()[-1]["lr"])


def end(notebook: Notebook, seen: Seen, name: str) -> None:
    """Fewer epochs than have begun."""
    notebook.type("epochs", "1")
    notebook.wait_for_prompt(RESULT, r"\d+")
    until(lambda: "epochs 1 is below" in notebook.output(FIT).inner_text(), "why it ended")
    seen.ending = notebook.output(FIT).inner_text()
    seen.result = until(notebook.output(RESULT).inner_text, "the run")
    notebook.shot(f"{name}-typo-ended")


@pytest.fixture(scope="module", params=[LAB, CLASSIC], ids=lambda stack: stack.name)
def seen(request, chromium, tmp_path_factory) -> Seen:
    return visit(request.param, chromium, tmp_path_factory.mktemp(request.param.name))


@pytest.mark.browser
@pytest.mark.timeout(400)
def test_a_value_far_beyond_the_advised_is_asked_about_beside_its_field_and_not_applied(seen):
    assert "lr 1000 is 500,000× the advised 0.002" in seen.asked
    assert seen.kept == 0.002


@pytest.mark.browser
def test_insisted_on_it_ruins_training_which_goes_back_to_before_it(seen):
    assert 1000 in seen.ruined
    assert re.search(
        r"Training diverged at lr 1000, 500,000× the advised 0\.002; back at step [\d,]+ with 0\.002", seen.diverged
    )
    assert seen.ruined[-1] == 0.002
    assert "Apply" not in seen.shown
    assert max(loss for loss in seen.run.history.series("loss", "step")[1]) < 100, "the ruined steps are no rows"


@pytest.mark.browser
def test_undo_takes_changes_back_one_by_one(seen):
    assert seen.undone == [0.001, 0.002]


@pytest.mark.browser
def test_back_to_best_says_where_training_goes_on(seen):
    assert re.search(r"back at step [\d,]+, the best checkpoint: whole_accuracy \S+ after epoch \d+", seen.best)


@pytest.mark.browser
def test_a_preset_of_four_changes_waits_for_a_second_click(seen):
    assert "Apply 4 changes:" in seen.question
    assert seen.preset == [0.001, 0.002]


@pytest.mark.browser
def test_fewer_epochs_than_have_begun_end_the_run_after_this_one_and_all_are_counted(seen):
    assert re.search(r"epochs 1 is below the present epoch (\d+): training ends after this epoch", seen.ending)
    done = len(seen.run.history.of("epoch"))
    assert done > 1
    assert f"{done} of {done} epochs" in seen.result
    assert seen.run.plan.epochs == 1


@pytest.mark.browser
def test_no_script_of_the_page_fails(seen):
    assert seen.errors == []
