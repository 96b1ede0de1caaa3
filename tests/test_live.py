"""The live surface in a real browser: a person acts on a captcha run while its cell runs, in two generations of
Jupyter.

One visit to each does everything, and keeps what it saw; the claims below are about that. Screenshots and times stay
in `browser.SHOTS`.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import browser
import kernels
import nbformat
import pytest
import serving
import watched
from browser import Notebook, saved, text
from person import Act, Log, Person
from serving import CLASSIC, LAB, Stack, until

from nbtools.data import Pack
from nbtools.run import Run
from nbtools.train import checkpoint

WIDGET = "application/vnd.jupyter.widget-view+json"
PROMISED = 0.25  # seconds from click to effect, beside the step under way
SCRIPT = "<img src=x onerror=window.hacked=1>"
RUN = f"runs/{SCRIPT}"
ALPHABET = "<b>&01"  # of the labels, which are parts of file names
CELLS = (
    f"""import torch; torch.set_num_threads(1)
import nbtools as nb, watched
raw = watched.demo("raw", {{count}}, alphabet="{ALPHABET}", size=(32, 84))
(raw / "{SCRIPT}_1.png").write_bytes(b"no image")
pack = watched.pack(raw, into="pack")
plan = watched.PLAN.replace(
    network="small", loss="cross_entropy", amp="off", channels_last=False, epochs={{epochs}}, batch_size=32,
    warmup_epochs=0, schedule="constant", eval_every={{eval_every}})
pack.bad""",
    f'run = nb.fit(watched, pack, plan, run="{RUN}", receipt=False)',
    'order = ["second"]; run.summary()',
    'order.append("third"); print(nb.evaluate(run, pack, split="test"))',
    'order.append("asked"); print(*order)',
)
FIT, SECOND, THIRD, ASKED = 1, 2, 3, 4


def cells(count: int, epochs: int, eval_every: int) -> list[str]:
    return [source.format(count=count, epochs=epochs, eval_every=eval_every) for source in CELLS]


@dataclass
class Seen:
    """What one visit saw."""

    stack: Stack
    work: Path
    train: list[int] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    silences: list[float] = field(default_factory=list)
    saved: dict[str, Any] = field(default_factory=dict)  # the notebook's file, after Stop
    resumed: dict[str, Any] = field(default_factory=dict)  # and after the run went on and was interrupted
    live: str = ""  # fit's output while it runs, as text
    frames: list[tuple[float, float]] = field(default_factory=list)
    refused: str = ""  # what stands beside a field that somebody tries to hack
    kept: bool = False  # and whether the plan stayed as it was
    hacked: list[bool] = field(default_factory=list)
    reopened: str = ""  # fit's output in the saved notebook without a kernel, as text
    picture: bool = False
    errors: list[str] = field(default_factory=list)


def visit(stack: Stack, chromium: str, folder: Path) -> Seen:
    """A person's visit to one training notebook, from Run all to a look at the saved file."""
    seen = Seen(stack, folder / "work")
    with serving.serving(stack, folder) as address, browser.chromium(chromium) as window:
        serving.write(seen.work / "captcha.ipynb", cells(1200, 100_000, 10_000))
        notebook = browser.OPENED[stack.name](window, address)
        try:
            train(notebook, seen)
            again(notebook, seen)
            reopened = browser.OPENED[stack.name](window, address)
            reopen(reopened, seen)
            seen.errors = notebook.errors + reopened.errors
            seen.train = Pack.open(seen.work / "pack").ids("train").tolist()
            seen.steps = Log(seen.work / watched.LOG).steps()
        except BaseException as error:
            notebook.shot(f"{stack.name}-failed")
            error.add_note(notebook.output(FIT).inner_text())
            raise
    return seen


def train(notebook: Notebook, seen: Seen) -> None:
    """Run all, look, act fifty times, queue one more cell, stop, save."""
    name, log = seen.stack.name, Log(seen.work / watched.LOG)
    person = Person(notebook, FIT, seen.work / RUN, log)
    notebook.open("captcha.ipynb")
    notebook.ready()
    notebook.run_all()
    until(lambda: len(log.steps()) > 40, "an epoch")
    looks(notebook, f"{name}-running")
    seen.live, seen.frames = notebook.output(FIT).inner_text(), notebook.frames()
    hack(notebook, person, seen)
    notebook.page.get_by_text("More:").click()
    person.fifty(lambda: looks(notebook, f"{name}-paused"))
    notebook.run(ASKED)
    person.stopped()
    seen.acts, seen.silences = person.acts, person.silences
    until(lambda: notebook.prompt(ASKED) == str(len(CELLS) + 1), "the cell that was asked for meanwhile")
    looks(notebook, f"{name}-after")
    seen.hacked.append(hacked(notebook))
    seen.saved = saved(notebook, seen.work / "captcha.ipynb")


def looks(notebook: Notebook, name: str) -> None:
    """Screenshots: wide, narrow, and dark where there is a dark theme."""
    notebook.output(FIT).scroll_into_view_if_needed()
    notebook.shot(name)
    with notebook.narrow():
        notebook.shot(f"{name}-narrow")
    if isinstance(notebook, browser.Lab):
        notebook.theme(dark=True)
        notebook.shot(f"{name}-dark")
        notebook.theme(dark=False)


def hack(notebook: Notebook, person: Person, seen: Seen) -> None:
    """Type a script where a number belongs, and put the number back."""
    lr = person.now("lr")
    notebook.type("lr", SCRIPT)
    row = notebook.row("lr")
    until(lambda: "must be" in row.inner_text(), "the reason beside the field")
    seen.refused = row.inner_text()
    steps = len(person.log.steps())
    until(lambda: len(person.log.steps()) > steps + 5, "steps")
    seen.kept = person.now("lr") == lr
    seen.hacked.append(hacked(notebook))
    notebook.type("lr", str(lr))
    until(lambda: "must be" not in row.inner_text(), "a valid field")


def hacked(notebook: Notebook) -> bool:
    return notebook.page.evaluate("window.hacked !== undefined")


def again(notebook: Notebook, seen: Seen) -> None:
    """The run goes on; the kernel is interrupted; two cells wait behind it."""
    log = Log(seen.work / watched.LOG)
    before = len(log.steps())
    for cell in (FIT, SECOND, THIRD):
        notebook.run(cell)
    until(lambda: len(log.steps()) > before + 40, "steps of the run that goes on")
    notebook.interrupt()
    until(lambda: notebook.prompt(THIRD) == str(len(CELLS) + 4), "the cells behind an interrupted one")
    for cell, words in ((FIT, "stopped by you"), (THIRD, "whole_accuracy")):  # what is printed may come after a prompt
        until(lambda cell=cell, words=words: words in notebook.output(cell).inner_text(), words)
    seen.resumed = saved(notebook, seen.work / "captcha.ipynb")


def reopen(notebook: Notebook, seen: Seen) -> None:
    """Look at the file that was saved after Stop, where there is no kernel."""
    facts = {name: said for name, said in seen.saved["metadata"].items() if name != "language_info"}
    facts["kernelspec"] = {"name": "gone", "display_name": "gone"}
    (seen.work / "reopened.ipynb").write_text(json.dumps({**seen.saved, "metadata": facts}))
    notebook.open("reopened.ipynb")
    notebook.without_kernel()
    output = notebook.output(FIT)
    seen.picture = until(lambda: notebook.shows(output.locator("img")), "the final picture")
    seen.reopened = output.inner_text()
    seen.hacked.append(hacked(notebook))
    looks(notebook, f"{seen.stack.name}-reopened")


@pytest.fixture(scope="module", params=[LAB, CLASSIC], ids=lambda stack: stack.name)
def seen(request, chromium, tmp_path_factory) -> Seen:
    stack, folder = request.param, tmp_path_factory.mktemp(request.param.name)
    found = visit(stack, chromium, folder)
    (browser.SHOTS / f"{stack.name}.json").write_text(json.dumps(times(found.acts), indent=1))
    return found


def times(acts: list[Act]) -> dict[str, Any]:
    """What was measured, in seconds, for people to look at."""
    columns = {name: [getattr(act, name) for act in acts] for name in ("wait", "step", "beyond")}
    facts = {name: {"p50": statistics.median(c), "p95": late(c), "max": max(c)} for name, c in columns.items()}
    rows = [f"{act.wait:.3f} s, step {act.step:.3f} s: {act.what}" for act in acts]
    return {"n": len(acts), **facts, "acts": rows}


def late(waits: list[float]) -> float:
    """The 95th percentile."""
    return statistics.quantiles(waits, n=20)[-1]


@pytest.mark.browser
@pytest.mark.timeout(600)
def test_fifty_interactions_with_a_training_cell_are_all_handled(seen):
    assert len(seen.acts) == 51, "fifty, and Stop"
    assert all(act.came for act in seen.acts)


@pytest.mark.browser
def test_from_click_to_effect_it_takes_a_quarter_of_a_second_and_the_step_under_way(seen):
    assert late([act.beyond for act in seen.acts]) <= PROMISED, sorted(seen.acts, key=lambda act: -act.beyond)[:5]


@pytest.mark.browser
def test_pause_stops_the_steps_and_resume_goes_on(seen):
    assert len(seen.silences) == 5
    assert min(seen.silences) > 0.3


@pytest.mark.browser
def test_batch_size_and_precision_change_within_epochs_and_every_sample_still_comes_once(seen):
    rows, train = seen.steps, sorted(seen.train)
    epoch, changes = [], 0
    for before, row in zip([rows[0], *rows], rows, strict=False):
        changes += bool(epoch) and (before["batch_size"], before["amp"]) != (row["batch_size"], row["amp"])
        epoch += row["ids"]
        if len(epoch) >= len(train):
            assert sorted(epoch) == train
            epoch = []
    assert changes >= 10, "no change fell within an epoch"
    assert set(epoch) <= set(train)
    assert len(set(epoch)) == len(epoch)


@pytest.mark.browser
def test_stop_leaves_a_usable_run_and_so_does_an_interrupt(seen):
    assert "stopped by you after step" in text(seen.saved, FIT)
    assert "stopped by you after step" in text(seen.resumed, FIT)
    for notebook in (seen.saved, seen.resumed):
        assert "whole_accuracy" in text(notebook, THIRD), "the run that fit returned could not be evaluated"
        assert not [
            output for cell in notebook["cells"] for output in cell["outputs"] if output["output_type"] == "error"
        ]
    run = Run.open(seen.work / RUN, watched)
    assert checkpoint.place(checkpoint.names(run.folder)[0])[1] == len(seen.steps)
    assert run.model() is not None


@pytest.mark.browser
def test_cells_queued_meanwhile_run_afterwards_in_order(seen):
    assert text(seen.saved, ASKED).split() == ["second", "third", "asked", "asked"]
    assert [seen.saved["cells"][cell]["execution_count"] for cell in (FIT, SECOND, THIRD, ASKED)] == [2, 3, 4, 6]
    assert [seen.resumed["cells"][cell]["execution_count"] for cell in (FIT, SECOND, THIRD)] == [7, 8, 9]


@pytest.mark.browser
def test_the_saved_notebook_is_valid_and_holds_the_final_picture_and_no_widget(seen):
    for notebook in (seen.saved, seen.resumed):
        nbformat.validate(nbformat.reads(json.dumps(notebook), 4))
        check_saved(notebook)


@pytest.mark.browser
def test_the_saved_bar_of_a_finished_pack_says_that_it_is_finished(seen):
    for notebook in (seen.saved, seen.resumed):
        check_packed(notebook)


@pytest.mark.browser
def test_opened_anew_without_a_kernel_it_shows_the_final_picture(seen):
    assert seen.picture
    assert "stopped by you" in seen.reopened
    for left_over in ("widget", "Widget", "Error displaying"):
        assert left_over not in seen.reopened


@pytest.mark.browser
def test_names_labels_and_what_people_type_are_text_and_never_markup(seen):
    assert SCRIPT in seen.live, "the run's name"
    assert SCRIPT in seen.refused
    assert seen.kept, "an invalid lr changed the plan"
    assert seen.hacked == [False, False, False]


@pytest.mark.browser
def test_curves_lie_where_their_labels_say(seen):
    assert len(seen.frames) >= 4
    assert all(drawing == pytest.approx(frame, abs=1) for drawing, frame in seen.frames), seen.frames


@pytest.mark.browser
def test_no_script_of_the_page_fails(seen):
    assert seen.errors == []


EXECUTORS = {
    "papermill": "import papermill, sys; papermill.execute_notebook(*sys.argv[1:], progress_bar=False)",
    "nbclient": "import nbclient, nbformat, sys; notebook = nbformat.read(sys.argv[1], 4); "
    "nbclient.NotebookClient(notebook).execute(); nbformat.write(notebook, sys.argv[2])",
}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_same_notebook_ends_without_anybody_clicking(executor, tmp_path):
    work = {stack: tmp_path / stack.name / "work" for stack in (LAB, CLASSIC)}
    started = {stack: execute(stack, EXECUTORS[executor], folder) for stack, folder in work.items()}
    for stack, process in started.items():
        said, _ = process.communicate(timeout=200)
        assert process.returncode == 0, said
        notebook = json.loads((work[stack] / "done.ipynb").read_text())
        assert text(notebook, ASKED).split() == ["second", "third", "asked"]
        check_saved(notebook)
        check_packed(notebook)


def execute(stack: Stack, script: str, work: Path) -> subprocess.Popen[str]:
    """Start a script that runs a short training notebook, to done.ipynb."""
    work.mkdir(parents=True)
    serving.write(work / "captcha.ipynb", cells(count=120, epochs=2, eval_every=1))
    return subprocess.Popen(
        [kernels.python(stack.kernel), "-c", script, "captcha.ipynb", "done.ipynb"],
        cwd=work,
        env=serving.environment(work.parent),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def check_saved(notebook: dict[str, Any]) -> None:
    """One picture in fit's cell, nothing that needs a kernel there, and no list of widgets without their state."""
    outputs = notebook["cells"][FIT]["outputs"]
    shown = [name for output in outputs for name in output.get("data", {})]
    assert shown.count("image/png") == 1
    assert WIDGET not in shown
    widgets = notebook["metadata"].get("widgets")
    assert widgets is None or widgets["application/vnd.jupyter.widget-state+json"]["state"]


def check_packed(notebook: dict[str, Any]) -> None:
    """The bar of packing is one line of text, and says what it said last."""
    outputs = notebook["cells"][0]["outputs"]
    assert not [output for output in outputs if WIDGET in output.get("data", {})]
    said = ["".join(output.get("data", {}).get("text/plain", "")) for output in outputs]
    [packing] = [line for line in said if line.startswith("packing")]
    assert re.match(r"packing: 100%\|.*samples/s\]$", packing), packing
    assert "0%|" not in text(notebook, 0)
