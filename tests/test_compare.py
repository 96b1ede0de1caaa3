"""Runs next to each other: the table says what differs and what came out, the picture whose line is which."""

import importlib
import io
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import IPython.display
import pytest
import toy
from acting import QUIET
from PIL import Image

import nbtools as nb
from nbtools.errors import CheckpointError, TrainError
from nbtools.run import Run
from nbtools.train import History, Record, checkpoint

pytestmark = pytest.mark.drawn  # the picture of a comparison
EVIL = '<img src=x onerror="alert(1)">'


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two short runs that differ in batch size and epochs."""
    folder = tmp_path_factory.mktemp("compare")
    pack, plan = toy.make_pack(folder), toy.PLAN.replace(lr=1e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nbtools.live.png.draw", lambda *_: b"")
        slow = nb.fit(toy, pack, plan, folder / "runs" / "slow", **QUIET)
        wide = nb.fit(toy, pack, plan.replace(batch_size=32, epochs=2), folder / "runs" / EVIL, **QUIET)
    return slow, wide


def test_the_frame_has_a_row_a_run_with_its_outcome_and_the_settings_that_differ(runs):
    frame, slow = nb.compare(*runs).frame, runs[0]
    assert list(frame.index) == ["slow", EVIL]
    assert frame.loc["slow", "best_accuracy"] == slow.best["val_accuracy"]
    assert frame.loc["slow", "best_epoch"] == slow.best["epoch"]
    assert frame.loc["slow", "val_loss"] == slow.summary()["val_loss"].iloc[-1]
    assert list(frame["epochs"]) == list(frame["planned_epochs"]) == [3, 2]
    assert frame.loc["slow", "steps"] == slow.history.rows[-1]["step"]
    assert frame.loc["slow", "minutes"] == pytest.approx(slow.history.of("epoch")[-1]["wall"] / 60)
    assert frame.loc["slow", "memory"] == pytest.approx(max(row["memory"] for row in slow.history.of("epoch")))
    assert list(frame["batch_size"]) == [16, 32]
    assert "lr" not in frame.columns  # the same in both
    assert "changed" not in frame.columns  # of neither
    assert nb.compare(*(run.folder for run in runs)).frame.equals(frame)


@pytest.fixture
def reached(runs, tmp_path):
    """Copies of a run with one evaluation of this accuracy and loss each, the first the oldest."""

    def make(*values: tuple[float, float], **changes: Any) -> Path:
        for k, (accuracy, loss) in enumerate(values):
            folder = shutil.copytree(runs[0].folder, tmp_path / "runs" / f"run-{k}")
            checkpoint.mark(folder, id=folder.name)  # a run of its own
            (folder / "plan.json").write_text(runs[0].plan.replace(lr=1e-3 * (k + 1), **changes).to_json())
            (folder / "history.csv").unlink()
            row = {"epoch_time": 14.0, "wall": 15.5, "val_accuracy": accuracy, "val_loss": loss}
            History(folder / "history.csv").append(Record("epoch", 0, 10, 100, row))
            os.utime(folder / "run.json", (k, k))
        return tmp_path / "runs"

    return make


def test_a_folder_of_runs_stands_for_the_newest_eight_in_it(reached, capsys):
    folder = reached(*[(0.5, 1.0)] * 9)
    names = [f"run-{k}" for k in range(1, 9)]
    assert list(nb.compare(folder).runs) == names, "in the order in which a user starts and names them"
    assert list(nb.compare(folder / "run-0", folder, folder / "run-1").runs) == ["run-0", *names], "each once"
    (folder / "run-3" / "plan.json").unlink()
    assert "run-3" not in nb.compare(folder).runs
    assert "run-3/plan.json is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "best", "said"),
    [
        ([(0.5, 1.0), (0.9, 0.9)], 1, "run-1 is the best: accuracy 0.900, 0.400 above run-0."),
        ([(0.9, 1.0), (0.91, 0.2)], None, "No clear winner by accuracy: run-1 0.910, run-0 0.900; on 48 validation "),
        ([(1.0, 0.1), (1.0, 0.1)], None, "No clear winner by accuracy: "),
        ([(30.0, 1.0), (45.0, 0.2)], 1, "run-1 is the best: accuracy 45.0, 15.0 above run-0."),
    ],
)
def test_the_best_run_is_marked_where_more_than_chance_sets_it_apart(reached, values, best, said):
    found = nb.compare(reached(*values))
    assert said in found.conclusion
    assert list(found.frame["lr"]) == [0.001, 0.002]
    assert found.best is (None if best is None else found.runs[f"run-{best}"])
    assert str(found).startswith(found.conclusion)
    assert (f"run-{best} (best)" in str(found), "(best)" in str(found)) == (best is not None,) * 2


def test_an_error_rate_of_zero_is_the_best_only_where_the_other_is_further_off_than_chance(reached):
    folder = reached((0.02, 1.0), (0.0, 1.0))
    errors: Any = SimpleNamespace(**{**vars(toy), "BEST": "-accuracy"})
    rates = [Run.open(folder / name, errors) for name in ("run-0", "run-1")]
    assert "No clear winner by accuracy: run-1 0, run-0 0.0200" in nb.compare(*rates).conclusion


def test_no_run_is_the_best_of_different_data_or_alone_or_before_both_have_been_evaluated(runs, tmp_path):
    plan = toy.PLAN.replace(epochs=1)
    other = nb.fit(toy, toy.make_pack(tmp_path / "other", count=120), plan, tmp_path / "b", **QUIET)
    assert (
        nb.compare(runs[0], other).conclusion
        == "No best run: they are of different tasks, or validated on different data."
    )
    assert nb.compare(runs[0]).conclusion == ""
    empty = Run(tmp_path / "empty", toy, runs[0].card, runs[0].plan)
    compared = nb.compare(runs[0], empty)
    assert compared.conclusion == "No best run: fewer than two have been evaluated."
    assert compared.frame.loc["empty", "steps"] == 0
    assert nb.compare(empty).figure()._repr_png_().startswith(b"\x89PNG")


def test_what_was_changed_while_a_run_trained_is_shown_with_its_step(runs, tmp_path):
    folder = shutil.copytree(runs[0].folder, tmp_path / "other")
    (folder / "history.csv").unlink()
    for step, what in ((10, "lr 0.001 → 0.0005"), (20, EVIL)):
        History(folder / "history.csv").append(Record("change", 0, step, 100, {"what": what}))
    frame = nb.compare(runs[0], folder).frame
    assert list(frame["changed"].fillna("")) == ["", f"lr 0.001 → 0.0005 at step 10; {EVIL} at step 20"]


def test_names_tell_the_folders_apart(runs, tmp_path):
    copies = [shutil.copytree(runs[0].folder, tmp_path / name / "run") for name in "ab"]
    assert list(nb.compare(*copies).runs) == list(map(str, copies))


def test_a_notebook_gets_a_table_and_a_picture_as_outputs_of_their_own_with_text_escaped(runs, monkeypatch):
    with pytest.raises(NotImplementedError):  # a terminal prints the text
        nb.compare(*runs)._ipython_display_()
    outputs: list[Any] = []
    monkeypatch.setattr(importlib.import_module("nbtools.compare"), "in_notebook", lambda: True)
    monkeypatch.setattr(IPython.display, "display", outputs.append)
    nb.compare(*runs)._ipython_display_()
    page, drawn = outputs
    assert "<img" not in page.data
    assert "&lt;img src=x onerror=" in page.data
    with Image.open(io.BytesIO(drawn._repr_png_())) as image:
        assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 100


def test_what_cannot_be_compared_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(TrainError, match="at least one run, got none; give it"):
        nb.compare()
    with pytest.raises(CheckpointError, match="not a run folder"):
        nb.compare(tmp_path)
