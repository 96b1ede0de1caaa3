"""What a trained run shows in tables: its epochs, its evaluation, and the folder of runs that it lies in."""

import os
import re
import shutil
from html import unescape
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import toy
from acting import QUIET
from IPython.lib.pretty import pretty

import nbtools as nb
from nbtools.errors import CheckpointError, TrainError
from nbtools.frame import Frame
from nbtools.live import Surface, picker, samples
from nbtools.live.samples import POOL, SAMPLES, WORST, Choice, Previews
from nbtools.run import lock
from nbtools.table import number
from nbtools.train import Record, as_task, checkpoint


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


def test_the_best_epoch_shows_what_the_gpu_read_with_units(run, tmp_path):
    folder = shutil.copytree(run.folder, tmp_path / "run")
    read = {"gpu_energy": 12.345, "gpu_power": 283.4, "gpu_utilisation": 96.0, "gpu_memory_peak": 2900.0, "lr": 1e-3}
    last = checkpoint.place(checkpoint.names(folder)[0])[1]
    nb.History(folder / "history.csv").append(Record("epoch", 4, last, 900, {"val_accuracy": 1.1, **read}))
    shown = pretty(nb.Run.open(folder).best)
    for value in ("12.3 Wh", "283 W", "96 %", "3.0 GB", "0.001"):
        assert value in shown
    assert "metric" not in shown, "lr is none"


@pytest.fixture
def folder(run, tmp_path):
    """Copies of a run: older and newer, the newer one in a subfolder; and what is no run."""
    for name in ("older", "more/newer"):
        checkpoint.mark(shutil.copytree(run.folder, tmp_path / name), id=name)  # runs of their own
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
    assert row["time"] == pytest.approx(run.history.of("epoch")[-1]["wall"])
    assert (row["tags"], row["notes"]) == ("baseline", "<b>with the old labels")
    assert nb.Run.open(folder / "older").tags == ("baseline",), "kept in its folder"
    assert "&lt;b&gt;with the old labels" in found._repr_html_()
    assert "<b>" not in found._repr_html_()
    assert "2 runs" in str(found)
    headers, rows = found.table()
    assert headers == ["run", "state", "best", "epochs", "time", "samples/s", "changed", "tags", "notes"]
    assert rows[1][:4] == [
        "older",
        "done",
        f"accuracy {number(run.best['val_accuracy'])}, epoch {run.best['epoch']}",
        "4 of 4",
    ]
    assert nb.runs(folder / "more").table()[0][-1] == "changed", "no column that holds nothing"


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


def test_what_keep_copied_below_the_same_folder_counts_once_and_a_copy_that_was_trained_on_is_a_run(pack, tmp_path):
    plan = toy.PLAN.replace(epochs=1)
    run = nb.fit(toy, pack, plan, tmp_path / "a", keep=tmp_path / "kept/a", **QUIET)
    shutil.copytree(run.folder, tmp_path / "b")
    assert (found := nb.runs(tmp_path)).names == ["a"]
    assert "kept/a: a copy of a" in str(found)
    assert nb.compare(tmp_path).conclusion == "", "of a single run"
    nb.fit(toy, pack, plan.replace(epochs=3), tmp_path / "b", **QUIET)
    nb.fit(toy, pack, plan.replace(epochs=2), tmp_path / "a", **QUIET)
    assert nb.runs(tmp_path).names == ["a", "b"]


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
    (found.folder / "plan.json").write_text(run.plan.replace(epochs=1).to_json())
    found.history.append(Record("step", 4, 98, 998, {"loss": 1.0}))
    assert str(nb.Run.open(found.folder)).startswith(f"Run {found.folder}: in epoch 5 of 5, best")
    longer.history.append(Record("event", 4, 99, 999, {"what": "stopped", "asked": "stop"}))
    assert longer.state == "stopped"


def test_ticked_runs_are_compared_below_the_table_of_a_notebook(folder):
    found = nb.runs(folder)
    shown: list[list[str]] = []
    made = picker(["a", "<b>", "c"], lambda names: shown.append(names) or found.compare().page())
    *boxes, button = made.children[0].children
    assert [box.value for box in boxes] == [True, True, False]
    boxes[0].value = False
    for _ in range(2):
        button.click()
    assert shown == [["<b>"]] * 2
    page = made.children[1].value
    assert page.index("<table") < page.index('src="data:image/png;base64,')
    boxes[1].value = False
    button.click()
    assert "No run is ticked" in made.children[1].value
    many = picker([f"run-{k}" for k in range(31)], lambda names: "")
    assert "the first 30 of 31" in many.children[1].value


def tinted(pack, i, answer):
    """The picture of sample i, all of one value: which one it is."""
    return np.full((4, 4), i % 256, np.uint8), "abcd"[int(pack.sample(i)["label"][0])], answer


@pytest.fixture
def previews(pack):
    state = nb.TrainState(as_task(toy.with_(preview=tinted)), pack, toy.PLAN)
    return Previews(state, pack)


def shown(previews):
    return [int(one.image[0, 0]) for one in previews.now()]


def test_the_worst_samples_are_those_of_the_highest_loss_and_the_first_are_spread_over_the_split(
    previews, pack, monkeypatch
):
    ids = [int(i) for i in pack.ids("val")]
    assert len(ids) < POOL, "all of them are looked at"
    spread = shown(previews)
    assert (spread[0], spread[-1], len(spread)) == (ids[0] % 256, ids[-1] % 256, SAMPLES)
    assert shown(previews) == spread, "the same each time"
    state, found = previews.state, {}
    for i in ids:  # one by one, by torch
        logits = state.evaluated.eval()({"x": torch.from_numpy(pack.sample(i)["x"])[None]})
        found[i] = float(
            torch.nn.functional.cross_entropy(logits.detach(), torch.tensor(pack.sample(i)["label"]).long())
        )
    previews.which = WORST
    monkeypatch.setattr(samples, "PATIENCE", 60.0)
    assert shown(previews) == [i % 256 for i in sorted(ids, key=found.__getitem__)[::-1][:SAMPLES]]
    monkeypatch.setattr(samples, "PATIENCE", 0.0)
    assert len(set(shown(previews))) == SAMPLES, "the worst of as many as there was time for"


def test_chosen_samples_are_shown_in_their_order(previews):
    previews.which = [7, 3]
    assert shown(previews) == [7, 3]


def test_the_controls_of_samples_say_what_is_chosen():
    chosen: list[Any] = []
    made = Choice("first", chosen.append)
    made.kind.value = WORST
    made.kind.value = ""
    assert made.numbers.layout.visibility == "visible"
    made.numbers.value = "12, 40; x"
    assert chosen == [WORST, [12, 40]]
    again = Choice([12, 40], chosen.append)
    assert (again.kind.value, again.numbers.value) == ("", "12, 40")


def test_samples_chosen_while_it_trains_are_kept_when_the_run_resumes_and_are_shown_at_once(
    pack, tmp_path, capsys, monkeypatch
):
    plan, listen, wanted = toy.PLAN.replace(epochs=2), Surface.listen, [[9999], [7, 3]]

    def clicked(surface):
        if wanted:
            surface.choose(wanted.pop())
        return listen(surface)

    monkeypatch.setattr(Surface, "listen", clicked)
    first = nb.fit(toy, pack, plan.replace(epochs=1), tmp_path / "run", receipt=False)
    assert any("sample 9999 is not in the pack" in event for event in first.events)
    assert checkpoint.read_index(first.folder)["samples"] == [7, 3]
    truth = ["abcd"[int(pack.sample(i)["label"][0])] for i in (7, 3)]
    assert truths(capsys.readouterr().err)[:2] == truth, "at once"
    nb.fit(toy, pack, plan, tmp_path / "run", receipt=False)
    assert truths(capsys.readouterr().err.split("epoch 2 of 2:")[0]) == truth, "before an epoch has ended"


def test_samples_can_be_chosen_in_the_call_and_what_is_none_is_refused(pack, tmp_path, capsys):
    plan = toy.PLAN.replace(epochs=1)
    run = nb.fit(toy, pack, plan, tmp_path / "run", receipt=False, samples=(7, 3))
    assert checkpoint.read_index(run.folder)["samples"] == [7, 3]
    assert truths(capsys.readouterr().err)[:2] == ["abcd"[int(pack.sample(i)["label"][0])] for i in (7, 3)]
    run = nb.fit(toy, pack, plan, tmp_path / "many", samples=range(30), **QUIET)
    assert checkpoint.read_index(run.folder)["samples"] == list(range(SAMPLES))
    lacking = rf"sample {len(pack)} is not in the pack; choose ids from 0 to {len(pack) - 1}"
    wrong: Any
    for wrong in ("last", ["a.png"], 5, [], [3, len(pack)]):
        with pytest.raises(TrainError, match=rf"samples must be 'first', 'worst' or a list of ids|{lacking}"):
            nb.fit(toy, pack, plan, tmp_path / "other", samples=wrong, **QUIET)
        assert not (tmp_path / "other").exists(), "refused before anything is written"


def truths(said: str) -> list[str]:
    return re.findall(r"^truth +(\w)", said, re.M)
