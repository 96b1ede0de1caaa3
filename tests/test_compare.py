"""Runs next to each other: the table says what differs and what came out, the picture whose line is which."""

import importlib
import io
import os
import re
import shutil
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import IPython.display
import pytest
import toy
from acting import QUIET
from PIL import Image

import nbtools as nb
from nbtools import table
from nbtools.compare import alike
from nbtools.errors import CheckpointError, TrainError
from nbtools.live import XS, Columns, overlay
from nbtools.live.picture import picture
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


@pytest.fixture
def other(runs, tmp_path):
    """(folder of a copy of the first run, its history to be written anew)."""
    folder = shutil.copytree(runs[0].folder, tmp_path / "other")
    (folder / "history.csv").unlink()
    return folder, History(folder / "history.csv")


def charts(comparison: Any) -> dict[str, Any]:
    return {chart.title: chart for chart in comparison.picture().charts}


def test_the_frame_has_a_row_a_run_with_its_outcome_and_the_settings_that_differ(runs):
    frame, slow = nb.compare(*runs).frame, runs[0]
    assert list(frame.index) == ["slow", EVIL]
    assert frame.loc["slow", "best_accuracy"] == slow.best["val_accuracy"]
    assert frame.loc["slow", "best_epoch"] == slow.best["epoch"]
    assert frame.loc["slow", "val_loss"] == slow.summary()["val_loss"].iloc[-1]
    assert list(frame["epochs"]) == list(frame["planned_epochs"]) == [3, 2]
    assert frame.loc["slow", "steps"] == slow.history.rows[-1]["step"]
    assert frame.loc["slow", "minutes"] == pytest.approx(slow.history.of("epoch")[-1]["wall"] / 60)
    assert frame.loc["slow", "memory"] == max(row["memory"] for row in slow.history.of("step"))
    assert list(frame["batch_size"]) == [16, 32]
    assert "lr" not in frame.columns  # the same in both
    assert "energy" not in frame.columns  # known of none
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
            os.utime(folder / "history.csv", (k, k))
        return tmp_path / "runs"

    return make


def test_a_folder_of_runs_stands_for_the_newest_eight_in_it_and_the_text_says_so(reached, runs):
    folder = reached(*[(0.5, 1.0)] * 9)
    found = nb.compare(folder)
    assert found.names == tuple(f"run-{k}" for k in range(1, 9)), "in the order in which a user starts and names them"
    assert f"The newest 8 of the 9 runs in {folder}." in str(found)
    assert f"The newest 8 of the 9 runs in {folder}." in found.html()
    assert nb.compare(folder / "run-0", folder).names[:2] == ("run-0", "run-1")
    (folder / "run-3" / "plan.json").unlink()
    assert "Left out: run-3: " in str(nb.compare(folder))


@pytest.mark.parametrize(
    ("values", "best", "said"),
    [
        ([(0.5, 1.0), (0.9, 0.9)], 1, "run-1 is the best: accuracy 0.900, 0.400 above run-0. It was trained wi"),
        ([(0.9, 1.0), (0.91, 0.2)], None, "No clear winner by accuracy: run-1 0.910, run-0 0.900; on 48 validation "),
        ([(0.0, 1.0), (0.0, 0.8)], 1, "None of them has learned yet: accuracy is 0 in all. run-1 is the best: valida"),
        ([(0.0, 0.325), (0.0, 0.321)], None, "by validation loss: run-1 0.321, run-0 0.325; on 48 validation samples,"),
        ([(1.0, 0.1), (1.0, 0.1)], None, "No clear winner by accuracy: "),
        ([(30.0, 1.0), (30.1, 0.2)], None, "No clear winner by accuracy: run-1 30.1, run-0 30.0; on 48 validation "),
        ([(-0.501, 1.0), (-0.5, 0.2)], None, "No clear winner by accuracy: run-1 -0.500, run-0 -0.501; on 48 "),
        ([(30.0, 1.0), (45.0, 0.2)], 1, "run-1 is the best: accuracy 45.0, 15.0 above run-0. "),
        ([(0.0, 1e-5), (0.0, 0.0)], None, "by validation loss: run-1 0, run-0 1.00e-5; on 48 validation samples,"),
    ],
)
def test_the_best_run_is_marked_where_more_than_chance_sets_it_apart(reached, values, best, said):
    found = nb.compare(reached(*values))
    assert said in found.conclusion
    assert ("It was trained with lr 0.002 instead of 0.001." in found.conclusion) == (best is not None)
    assert found.best is (None if best is None else found.runs[found.names.index(f"run-{best}")])
    for shown in (str(found), unescape(found.html()).replace("\xa0", " ")):
        assert found.conclusion in shown
        assert ("(best)" in shown) == (best is not None)
        assert f"run-{best} (best)" in shown or best is None


def test_a_better_accuracy_counts_from_two_standard_errors_of_so_many_samples():
    """Of 0.90 on 1,000 samples: 2 √(2 · 0.9 · 0.1 / 1000) = 0.027."""
    assert alike(0.900, 0.875, 1000, share=True)
    assert not alike(0.900, 0.870, 1000, share=True)
    assert not alike(0.900, 0.875, 10_000, share=True)
    assert alike(1.0, 0.995, 200, share=True), "one sample"


def test_a_lower_loss_counts_from_what_few_samples_may_differ_and_from_two_percent_of_many():
    assert alike(1.0, 1.16, 36, share=False)
    assert not alike(1.0, 1.18, 36, share=False)
    assert alike(1.0, 1.019, 1_000_000, share=False)
    assert not alike(1.0, 1.021, 1_000_000, share=False)


def test_an_error_rate_of_zero_is_the_best_only_where_the_other_is_further_off_than_chance(reached):
    folder = reached((0.02, 1.0), (0.0, 1.0))
    errors: Any = SimpleNamespace(**{**vars(toy), "BEST": "-accuracy"})
    rates = [Run.open(folder / name, errors) for name in ("run-0", "run-1")]
    assert "No clear winner by accuracy: run-1 0, run-0 0.0200" in nb.compare(*rates).conclusion


def test_no_run_is_the_best_of_different_tasks_or_data_or_alone(runs, reached, tmp_path):
    other = nb.fit(
        toy, toy.make_pack(tmp_path / "other", count=120), toy.PLAN.replace(epochs=1), tmp_path / "b", **QUIET
    )
    assert nb.compare(runs[0], other).conclusion == "No best run: they are validated on different data."
    assert nb.compare(runs[0]).conclusion == ""
    empty = Run(tmp_path / "empty", toy, runs[0].card, runs[0].plan)
    assert nb.compare(runs[0], empty).conclusion == "No best run: fewer than two have been evaluated."


def test_the_time_of_a_run_has_a_unit(reached):
    assert re.search(r"^time +16 s$", str(nb.compare(reached((0.5, 1.0)))), re.M)


def test_epochs_are_those_that_ended_whatever_the_plan_asks_for(runs, tmp_path):
    folder = shutil.copytree(runs[0].folder, tmp_path / "lowered")
    (folder / "plan.json").write_text(runs[0].plan.replace(epochs=1).to_json())
    rows = [line.split() for line in str(nb.compare(folder, runs[1])).splitlines()]
    assert any(row[:1] == ["lowered"] for row in rows)
    assert ["epochs", "3", "2"] in rows
    assert ["planned", "epochs", "1", "2"] in rows


def test_a_setting_that_was_changed_while_a_run_trained_is_shown_with_the_value_it_started_with(other, runs):
    folder, found = other
    (folder / "plan.json").write_text(runs[0].plan.replace(lr=5e-4).to_json())
    found.append(Record("step", 0, 10, 100, {"loss": 1.0}))
    for step, what in ((10, "lr 0.002 → 0.001"), (20, "amp off → bf16, lr 0.001 → 0.0005")):
        found.append(Record("change", 0, step, 100, {"what": what}))
    differing = {caption: rows for caption, _, rows in nb.compare(runs[0], folder).tables()}["Settings that differ"]
    assert ["lr", "0.001", "0.002 → 0.0005"] in differing


def test_what_was_changed_while_each_run_trained_is_listed_by_step_below_the_settings_that_differ(runs, other):
    folder, found = other
    found.append(Record("step", 0, 10, 100, {"loss": 1.0}))
    for what in ("lr 0.001 → 0.00070710678", EVIL):
        found.append(Record("change", 0, 10, 100, {"what": what}))
    back = {"what": "Training diverged at lr 1000; back at step 10", "mark": "diverged, back to step 10"}
    found.append(Record("event", 0, 10, 100, back))
    comparison = nb.compare(runs[1], folder)
    captions = [caption for caption, _, _ in comparison.tables()]
    assert captions == ["Results", "Settings that differ", "Changed while it trained"]
    said = f"lr 0.001 → 0.000707, {EVIL}, {back['what']}"
    assert comparison.changes() == [["10", None, said]]
    assert str(comparison).index("Settings that differ") < str(comparison).index("lr 0.001 → 0.000707")
    assert [caption for caption, _, _ in nb.compare(runs[0], runs[0]).tables()] == ["Results"]


def test_the_train_loss_is_one_number_in_summary_and_comparison_and_a_curve_says_its_own_end(runs, other):
    """The last epoch's mean, before an epoch has ended that of the last log step; the smoothed curve ends elsewhere."""
    slow, (folder, young) = runs[0], other
    loss = slow.summary()["train_loss"].iloc[-1]
    assert loss != slow.history.of("step")[-1]["loss"], "the toy run cannot tell the two apart"
    for row in [row for row in slow.history.of("step") if row["epoch"] == 0]:
        young.append(Record("step", 0, row["step"], row["samples"], {"loss": row["loss"], "lr": row["lr"]}))
    found = (slow, slow.history, "train", loss), (folder, young, "train", young.rows[-1]["loss"])
    for run, history, name, value in found:
        assert nb.compare(run).frame["train_loss"].tolist() == [value]
        [line] = [line for line in picture(Columns(history)).charts[0].lines if line.name.startswith("train")]
        assert (line.name, line.value) == (name, table.number(line.y[-1]))


def test_each_chart_has_a_line_a_run_in_the_colour_and_dashes_of_the_key(runs):
    drawn = nb.compare(*runs).picture()
    assert [line.name for line in drawn.key] == ["slow", EVIL]
    titles = ["train loss", "validation loss", "accuracy", "learning rate", "samples/s"]
    assert [chart.title for chart in drawn.charts] == titles
    for chart in drawn.charts:
        assert [(line.colour, line.dash) for line in chart.lines] == [(line.colour, line.dash) for line in drawn.key]
    assert drawn.last == runs[0].history.rows[-1]["step"]


def test_thirty_runs_have_thirty_looks():
    key = overlay([str(i) for i in range(30)], [History()] * 30, ["loss"] * 30).key
    assert len({(line.colour, line.dash) for line in key}) == 30


def test_the_x_axis_can_be_samples_or_minutes_of_training(runs):
    slow = runs[0]
    over = {x: nb.compare(*runs, x=x) for x in XS}
    assert over["samples"].picture().last == slow.history.rows[-1]["samples"]
    assert over["minutes"].picture().last == pytest.approx(over["minutes"].frame["minutes"].max())
    for comparison in over.values():
        line = charts(comparison)["validation loss"].lines[0]
        assert (line.y == [row["val_loss"] for row in slow.history.of("epoch")]).all()
    line = charts(over["samples"])["validation loss"].lines[0]
    assert line.x.tolist() == [row["samples"] for row in slow.history.of("epoch")]


def test_minutes_are_those_of_the_clock_evaluations_and_watchers_included(other):
    folder, found = other
    found.append(Record("step", 0, 10, 1000, {"samples_per_s": 50.0, "wall": 21.0}))
    found.append(Record("epoch", 0, 10, 1000, {"epoch_time": 20.0, "eval_time": 9.0, "wall": 30.0}))
    found.append(Record("step", 1, 15, 1500, {"samples_per_s": 50.0, "wall": 40.0}))
    comparison = nb.compare(folder, x="minutes")
    assert 60 * comparison.frame["minutes"].item() == pytest.approx(40)
    assert (60 * charts(comparison)["samples/s"].lines[0].x).tolist() == pytest.approx([30, 40])


def test_names_are_the_shortest_that_tell_the_folders_apart(runs, tmp_path):
    copies = [shutil.copytree(runs[0].folder, tmp_path / name / "run") for name in "ab"]
    assert nb.compare(*copies, copies[1]).names == ("a/run", "b/run", "b/run (2)")


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
    with Image.open(io.BytesIO(drawn.image)) as image:
        assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 100


def test_a_run_without_rows_is_compared_as_well(runs, tmp_path):
    empty = Run(tmp_path / "empty", toy, runs[0].card, runs[0].plan)
    compared = nb.compare(runs[0], empty)
    assert compared.frame.loc["empty", "steps"] == 0
    assert len(compared.picture().key) == 2
    assert nb.compare(empty).png().startswith(b"\x89PNG")


def test_what_cannot_be_compared_is_refused_with_what_to_do(runs, tmp_path):
    with pytest.raises(TrainError, match="at least one run, got none; give it"):
        nb.compare()
    with pytest.raises(TrainError, match="x must be one of step, samples, minutes, got 'hours'"):
        nb.compare(*runs, x="hours")
    with pytest.raises(CheckpointError, match="not a run folder"):
        nb.compare(tmp_path)
    (shutil.copytree(runs[0].folder, tmp_path / "broken") / "plan.json").unlink()
    with pytest.raises(CheckpointError, match=r"none of its runs can be compared. Left out: broken: .*plan.json is"):
        nb.compare(tmp_path)
