"""Runs next to each other: what came out, what differs, and which is the best where chance does not explain it."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toy
from acting import QUIET

import nbtools as nb
from nbtools.errors import CheckpointError, TrainError
from nbtools.run import Run
from nbtools.train import History, Record, checkpoint

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


def test_a_row_a_run_has_its_outcome_and_the_settings_that_differ_and_a_notebook_shows_it_escaped(runs):
    compared, slow = nb.compare(*runs), runs[0]
    frame, name = compared.frame, str(slow.folder)
    assert list(frame.index) == [str(run.folder) for run in runs]
    assert frame.loc[name, "best_accuracy"] == slow.best["val_accuracy"]
    assert frame.loc[name, "best_epoch"] == slow.best["epoch"]
    assert list(frame["epochs"]) == list(frame["plan.epochs"]) == [3, 2]
    assert list(frame["plan.batch_size"]) == [16, 32]
    assert "plan.lr" not in frame.columns  # the same in both
    assert nb.compare(*(run.folder for run in runs)).frame.equals(frame)
    page = compared._repr_html_()
    assert "<img" not in page
    assert "&lt;img src=x onerror=" in page
    assert compared.conclusion in str(compared)
    for title in ("validation loss", "accuracy", "learning rate"):
        assert re.search(f"<b>{title}.*?<svg .*?data-name=", page), "the charts of the live view"


@pytest.fixture
def reached(runs, tmp_path):
    """Copies of a run with one evaluation of this accuracy and loss each, the first the oldest."""

    def make(*values: tuple[float, float]) -> Path:
        for k, (accuracy, loss) in enumerate(values):
            folder = shutil.copytree(runs[0].folder, tmp_path / "runs" / f"run-{k}")
            checkpoint.mark(folder, id=folder.name)  # a run of its own
            (folder / "history.csv").unlink()
            row = {"epoch_time": 14.0, "wall": 15.5, "val_accuracy": accuracy, "val_loss": loss}
            History(folder / "history.csv").append(Record("epoch", 0, 10, 100, row))
        return tmp_path / "runs"

    return make


@pytest.mark.parametrize(
    ("values", "best", "said"),
    [
        ([(0.5, 1.0), (0.9, 0.9)], 1, "run-1 is the best: accuracy 0.900, 0.400 above "),
        ([(0.9, 1.0), (0.91, 0.2)], None, "run-0 0.900; on 48 validation samples, chance alone can make such"),
        ([(30.0, 1.0), (45.0, 0.2)], 1, "run-1 is the best: accuracy 45.0, 15.0 above "),
    ],
)
def test_the_best_run_is_named_where_more_than_chance_sets_it_apart(reached, values, best, said):
    folder = reached(*values)
    compared = nb.compare(folder / "run-0", folder / "run-1")
    assert said in compared.conclusion
    assert compared.best is (None if best is None else compared.runs[str(folder / f"run-{best}")])


def test_an_error_rate_of_zero_is_the_best_only_where_the_other_is_further_off_than_chance(reached):
    folder = reached((0.02, 1.0), (0.0, 1.0))
    errors: Any = SimpleNamespace(**{**vars(toy), "BEST": "-accuracy"})
    rates = [Run.open(folder / name, errors) for name in ("run-0", "run-1")]
    assert nb.compare(*rates).conclusion.startswith("No clear winner by accuracy: ")


def test_no_run_is_the_best_of_different_data_or_alone_or_before_both_have_been_evaluated(runs, tmp_path):
    plan = toy.PLAN.replace(epochs=1)
    other = nb.fit(toy, toy.make_pack(tmp_path / "other", count=120), plan, tmp_path / "b", **QUIET)
    assert "of different tasks, or validated on different data" in nb.compare(runs[0], other).conclusion
    assert nb.compare(runs[0]).conclusion == ""
    compared = nb.compare(runs[0], Run(tmp_path / "empty", toy, runs[0].card, runs[0].plan))
    assert compared.conclusion == "No best run: fewer than two have been evaluated."


def test_a_folder_stands_for_the_newest_eight_runs_in_it_and_what_cannot_be_compared_is_refused(reached, tmp_path):
    with pytest.raises(TrainError, match="at least one run, got none; give it"):
        nb.compare(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        nb.compare(tmp_path / "nowhere")
    assert len(nb.compare(reached(*[(0.5, 1.0)] * 9)).runs) == 8
