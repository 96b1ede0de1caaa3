"""Runs beside each other: the table says what differs and what came out, the picture whose line is which."""

import importlib
import io
import shutil
from typing import Any

import IPython.display
import numpy as np
import pytest
import toy
from PIL import Image

import nbtools as nb
from nbtools.errors import CheckpointError, TrainError
from nbtools.live import XS, Columns, along, chart, number
from nbtools.live.picture import picture
from nbtools.run import Run
from nbtools.train import History, Record

compare = importlib.import_module("nbtools.compare")  # nb.compare is the function of that name

EVIL = '<img src=x onerror="alert(1)">'


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two short runs that differ in lr and batch size."""
    folder = tmp_path_factory.mktemp("compare")
    pack = toy.make_pack(folder)
    options: dict[str, Any] = {"receipt": False, "progress": False}
    slow = nb.fit(toy, pack, toy.PLAN.replace(lr=1e-3), folder / "runs" / "slow", **options)
    wide = nb.fit(toy, pack, toy.PLAN.replace(lr=1e-3, batch_size=32, epochs=2), folder / "runs" / EVIL, **options)
    return slow, wide


def test_the_frame_has_a_row_a_run_with_its_outcome_and_the_knobs_that_differ(runs):
    frame = compare.compare(*runs).frame
    slow = runs[0]
    assert list(frame.index) == ["slow", EVIL]
    assert frame.loc["slow", "best_accuracy"] == slow.best["val_accuracy"]
    assert frame.loc["slow", "best_epoch"] == slow.best["epoch"] + 1
    assert frame.loc["slow", "val_loss"] == slow.summary()["val_loss"].iloc[-1]
    assert list(frame["epochs"]) == [3, 2]
    assert list(frame["planned_epochs"]) == [3, 2]
    assert frame.loc["slow", "steps"] == slow.history.rows[-1]["step"]
    assert frame.loc["slow", "minutes"] == pytest.approx(slow.summary()["epoch_time"].sum() / 60)
    assert frame.loc["slow", "memory"] == max(row["memory"] for row in slow.history.of("step"))
    assert list(frame["batch_size"]) == [16, 32]
    assert "lr" not in frame.columns  # the same in both
    assert "energy" not in frame.columns  # known of none


def test_epochs_are_those_that_ended_whatever_the_plan_asks_for(runs, tmp_path):
    """A run of 3 epochs whose plan was changed to 1 afterwards, beside one of 2."""
    folder = shutil.copytree(runs[0].folder, tmp_path / "lowered")
    (folder / "plan.json").write_text(runs[0].plan.replace(epochs=1).to_json())
    compared = nb.compare(folder, runs[1])
    assert list(compared.frame["epochs"]) == [3, 2]
    rows = [line.split() for line in str(compared).splitlines()]
    assert ["epochs", "3", "2"] in rows
    assert ["planned", "epochs", "1", "2"] in rows


def test_the_train_loss_is_one_number_in_summary_comparison_and_picture(runs):
    """The last epoch's mean: the last log window and the smoothed curve end elsewhere."""
    slow = runs[0]
    loss = slow.summary()["train_loss"].iloc[-1]
    assert loss != slow.history.of("step")[-1]["loss"], "the toy run cannot tell the two apart"
    assert nb.compare(slow).frame["train_loss"].tolist() == [loss]
    [line] = [line for line in picture(Columns(slow.history)).charts[0].lines if line.name.startswith("train")]
    assert (line.name, line.value) == ("train, last epoch", number(loss))


def test_before_the_first_epoch_ends_the_train_loss_is_that_of_the_last_log_step(runs, tmp_path):
    folder = shutil.copytree(runs[0].folder, tmp_path / "young")
    steps = [row for row in runs[0].history.rows if row["epoch"] == 0 and row["kind"] == "step"]
    (folder / "history.csv").unlink()
    young = History(folder / "history.csv")
    for row in steps:
        young.append(Record("step", 0, row["step"], row["samples"], {"loss": row["loss"], "lr": row["lr"]}))
    assert nb.compare(folder).frame["train_loss"].tolist() == [steps[-1]["loss"]]
    [line] = [line for line in picture(Columns(young)).charts[0].lines if line.name]
    assert (line.name, line.value) == ("train", number(steps[-1]["loss"]))


def test_an_lr_of_a_thousand_leaves_the_rest_of_its_history_in_the_chart(runs, tmp_path):
    folder = shutil.copytree(runs[0].folder, tmp_path / "typo")
    (folder / "history.csv").unlink()
    found = History(folder / "history.csv")
    for step in range(1, 101):
        if step in (51, 53):
            what = "lr 0.002 → 1000" if step == 51 else "clip_norm 1 → 2, lr 1000 → 0.002"
            found.append(Record("change", 0, step - 1, 16 * step, {"what": what}))
        found.append(Record("step", 0, step, 16 * step, {"loss": 1.0, "lr": 1000.0 if step in (51, 52) else 2e-3}))
    [chart] = [chart for chart in nb.compare(folder).picture().charts if chart.title == "learning rate"]
    [line] = chart.lines
    assert (line.x[0], line.x[-1]) == (1, 100)
    assert {*line.y.tolist()} == {2e-3, 1000.0}
    assert not line.dotted
    assert chart.scale.log
    heights = chart.scale.heights(line.y)
    assert 0 < heights.min() < 0.2
    assert 0.8 < heights.max() < 1


def test_runs_and_their_folders_compare_alike(runs):
    assert compare.compare(*(run.folder for run in runs)).frame.equals(compare.compare(*runs).frame)


def test_each_chart_has_a_line_a_run_in_the_colour_and_dashes_of_the_key(runs):
    picture = compare.compare(*runs).picture()
    assert [line.name for line in picture.key] == ["slow", EVIL]
    assert [each.title for each in picture.charts] == [
        *("train loss", "validation loss", "accuracy"),
        *("learning rate", "samples/s"),
    ]
    for each in picture.charts:
        assert [(line.colour, line.dash) for line in each.lines] == [(line.colour, line.dash) for line in picture.key]
    assert picture.last == runs[0].history.rows[-1]["step"]


def test_the_x_axis_can_be_samples_or_minutes_of_training(runs):
    slow = runs[0]
    last = slow.history.rows[-1]
    over = {x: compare.compare(*runs, x=x).picture() for x in XS}
    assert over["samples"].last == last["samples"]
    assert over["minutes"].last == pytest.approx(compare.compare(*runs).frame["minutes"].max())
    assert over["minutes"].x == "minutes"
    for drawn in over.values():
        [validation] = [each for each in drawn.charts if each.title == "validation loss"]
        assert (validation.lines[0].y == [row["val_loss"] for row in slow.history.of("epoch")]).all()
    ends = [row["samples"] for row in slow.history.of("epoch")]
    [validation] = [each for each in over["samples"].charts if each.title == "validation loss"]
    assert validation.lines[0].x.tolist() == ends


def test_minutes_of_an_unfinished_epoch_are_counted_at_the_pace_of_its_steps():
    found = History()
    found.append(Record("step", 0, 10, 1000, {"samples_per_s": 50.0}))
    found.append(Record("epoch", 0, 10, 1000, {"epoch_time": 30.0, "eval_time": 99.0}))
    found.append(Record("step", 1, 15, 1500, {"samples_per_s": 50.0}))
    place = along(Columns(found), "minutes")
    assert (60 * place(np.array([0.0, 5.0, 10.0, 15.0]))).tolist() == [0.0, 15.0, 30.0, 40.0]


def test_thirty_runs_have_thirty_looks():
    looks = [look for _, look in zip(range(30), compare.looks(), strict=False)]
    assert len(set(looks)) == 30
    assert {look[0] for look in looks} <= {
        chart.BLUE,
        chart.VERMILLION,
        chart.GREEN,
        chart.ORANGE,
        chart.PURPLE,
        chart.SKY,
    }


def test_names_are_the_shortest_that_tell_the_folders_apart(tmp_path):
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "b" / "run"]
    assert compare.distinct(folders) == ["a/run", "b/run", "b/run (2)"]
    assert compare.distinct([tmp_path / "x", tmp_path / "y"]) == ["x", "y"]


def test_few_runs_are_columns_of_the_table_and_many_its_rows(runs):
    few = str(compare.compare(*runs)).splitlines()
    assert few[0].split()[:2] == ["run", "slow"]
    assert any(line.split() == ["batch", "size", "16", "32"] for line in few)
    assert any(line.split() == ["epochs", "3", "2"] for line in few)
    many = str(compare.compare(*runs * 3)).splitlines()
    assert len(many) == 2 + 6
    assert many[2].startswith("slow ")
    assert many[4].startswith("slow (2)")


def test_a_notebook_gets_a_table_and_a_picture_as_outputs_of_their_own_with_text_escaped(runs, monkeypatch):
    outputs: list[Any] = []
    monkeypatch.setattr(compare, "in_notebook", lambda: True)
    monkeypatch.setattr(IPython.display, "display", outputs.append)
    compare.compare(*runs)._ipython_display_()
    page, picture = outputs
    assert "<img" not in page.data
    assert "&lt;img src=x onerror=" in page.data
    with Image.open(io.BytesIO(picture.data)) as image:
        assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 100


def test_a_terminal_is_left_to_print_the_text(runs):
    with pytest.raises(NotImplementedError):
        compare.compare(*runs)._ipython_display_()


def test_a_run_without_rows_is_compared_as_well(runs, tmp_path):
    empty = Run(tmp_path / "empty", toy, runs[0].card, runs[0].plan)
    frame = compare.compare(runs[0], empty).frame
    assert frame.loc["empty", "steps"] == 0
    assert len(compare.compare(runs[0], empty).picture().key) == 2
    assert compare.compare(empty).png().startswith(b"\x89PNG")


def test_what_cannot_be_compared_is_refused_with_what_to_do(runs, tmp_path):
    with pytest.raises(TrainError, match="at least one run, got none; give it"):
        compare.compare()
    with pytest.raises(TrainError, match="x must be one of step, samples, minutes, got 'hours'"):
        compare.compare(*runs, x="hours")
    with pytest.raises(CheckpointError, match="not a run folder"):
        compare.compare(tmp_path)
