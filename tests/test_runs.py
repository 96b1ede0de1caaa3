"""What a trained run shows in tables: its epochs, its evaluation, and the folder of runs that it lies in."""

import os
import re
import shutil
from html import unescape

import pandas as pd
import pytest
import toy
from acting import QUIET
from IPython.lib.pretty import pretty

import nbtools as nb
from nbtools.errors import CheckpointError
from nbtools.frame import Frame
from nbtools.live import picker
from nbtools.run import lock
from nbtools.table import number
from nbtools.train import Record, checkpoint


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("pack"))


@pytest.fixture(scope="module")
def run(pack, tmp_path_factory):
    """Four epochs, of which every second one is evaluated."""
    plan = toy.PLAN.replace(epochs=4, eval_every=2)
    return nb.fit(toy, pack, plan, tmp_path_factory.mktemp("runs") / "every second", **QUIET)


def test_a_summary_shows_units_and_dashes_and_no_column_that_holds_nothing(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    summary = run.summary()
    assert summary["val_loss"].isna().tolist() == [True, False, True, False]
    shown = Frame(summary.assign(gpu_power=float("nan")))
    headers, rows = shown.shown()
    assert headers[:2] == ["epoch", "train loss"]
    assert "gpu power" not in headers
    cells = dict(zip(headers, zip(*rows, strict=True), strict=True))
    assert cells["val loss"] == (None, number(summary["val_loss"][2]), None, number(summary["val_loss"][4]))
    assert all(re.fullmatch(r"\d+ %", cell) for cell in cells["waiting for data"])
    assert all(re.fullmatch(r"[\d.]+ [MG]B", cell) for cell in cells["memory"])
    assert "nan" not in f"{shown}{shown._repr_html_()}".lower()
    assert type(summary.round(2)) is pd.DataFrame, "what is computed from it shows as pandas does"


def test_a_long_summary_shows_its_first_and_last_rows():
    frame = Frame({"train_loss": [0.5] * 1000}, index=pd.Index(range(1, 1001), name="epoch"))
    rows = [row[0] for row in frame.shown()[1]]
    assert [*rows[:2], rows[10], rows[-1], len(rows)] == ["1", "2", "…", "1,000", 41]


def test_the_headers_of_a_summary_explain_columns_and_metrics(run):
    explained = toy.with_(MEANINGS={"accuracy": 'right "as a whole" & <b>'})
    page = str(nb.Run.open(run.folder, explained).summary()._repr_html_())
    titles = {header: unescape(title) for title, header in re.findall(r'title="([^"]*)">([^<]*)</th>', page)}
    assert titles["val accuracy"] == 'right "as a whole" & <b>'
    assert "next batch" in titles["waiting for data"]


def test_an_evaluation_is_a_dict_that_shows_as_a_table_with_its_metrics_explained(run, pack):
    scores = nb.evaluate(run, pack)
    assert dict(scores) == scores
    assert isinstance(scores, dict)
    assert set(scores) == {"loss", "accuracy"}
    for shown in (pretty(scores), scores._repr_html_()):
        for part in (f"{pack.splits['test']} samples of the test split", number(scores["loss"]), "training minimises"):
            assert part in shown


@pytest.fixture
def folder(run, tmp_path):
    """Copies of a run: older and newer, the newer one in a subfolder; and what is no run."""
    for name in ("older", "more/newer"):
        shutil.copytree(run.folder, tmp_path / name)
    os.utime(tmp_path / "older" / "history.csv", (1, 1))
    (tmp_path / "data").mkdir()
    return tmp_path


def test_the_runs_of_a_folder_are_a_table_newest_first_with_state_best_time_speed_tags_and_notes(folder, run):
    nb.runs(folder)["older"].tags = "baseline"
    nb.runs(folder)["older"].notes = "<b>with the old labels"
    found = nb.runs(folder)
    assert found.names == ["more/newer", "older"]
    row = found.frame.loc["older"]
    assert (row["state"], row["best_accuracy"], row["epochs"]) == ("done", run.best["val_accuracy"], 4)
    assert row["time"] == pytest.approx(run.summary()["epoch_time"].sum())
    assert (row["tags"], row["notes"]) == ("baseline", "<b>with the old labels")
    assert nb.Run.open(folder / "older").tags == ("baseline",), "kept in its folder"
    assert "&lt;b&gt;with the old labels" in found._repr_html_()
    assert "<b>" not in found._repr_html_()
    assert "2 runs" in str(found)


def test_runs_are_picked_by_name_number_or_slice_and_compared(folder):
    found = nb.runs(folder)
    assert found[0].folder == found["more/newer"].folder == folder / "more/newer"
    assert found[:1].names == ["more/newer"]
    assert found["older", 0].compare().runs[0].folder == folder / "older"
    assert len(found.compare().frame) == 2
    with pytest.raises(CheckpointError, match="no run 'new' here; there are more/newer, older"):
        found["new"]
    with pytest.raises(CheckpointError, match="there is no such folder; name the one"):
        nb.runs(folder / "nowhere")


def test_a_run_that_cannot_be_opened_is_named_with_the_reason_and_leaves_the_others(folder):
    (folder / "older" / "card.json").unlink()
    found = nb.runs(folder)
    assert found.names == ["more/newer"]
    assert "older: " in str(found)
    assert "card.json is missing" in str(found)
    assert "0 runs" in str(nb.runs(folder / "data"))


def test_the_state_of_a_run_is_read_off_its_folder(folder, run):
    found = nb.runs(folder)["older"]
    assert found.state == "done"
    with lock(found.folder):
        assert found.state == "training"
    checkpoint.mark(found.folder, diverged=True)
    assert found.state == "diverged"
    checkpoint.mark(found.folder, diverged=None)
    (found.folder / "plan.json").write_text(run.plan.replace(epochs=9).to_json())
    longer = nb.Run.open(found.folder)
    assert longer.state == "interrupted"
    longer.history.append(Record("event", 4, 99, 999, {"what": "stopped", "asked": "stop"}))
    assert longer.state == "stopped"


def test_ticked_runs_are_compared_below_the_table_of_a_notebook(folder):
    found = nb.runs(folder)
    shown: list[list[str]] = []
    made = picker(["a", "<b>", "c"], lambda names: shown.append(names) or found.compare().parts())
    *boxes, button = made.children[0].children
    assert [box.value for box in boxes] == [True, True, False]
    boxes[0].value = False
    for _ in range(2):
        button.click()
    assert shown == [["<b>"]] * 2
    outputs = made.children[1].outputs
    assert [next(iter({"text/html", "image/png"} & set(each["data"]))) for each in outputs] == [
        "text/html",
        "image/png",
    ]
