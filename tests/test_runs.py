"""What a trained run shows in tables: its epochs, its evaluation, and the folder of runs that it lies in."""

import os
import re
import shutil
from typing import Any

import pytest
import toy
from acting import QUIET

import nbtools as nb
from nbtools.errors import CheckpointError, TrainError
from nbtools.run import lock
from nbtools.show import number
from nbtools.train import Record, checkpoint


@pytest.fixture(scope="module")
def run(pack, tmp_path_factory):
    """Four epochs, of which every second one is evaluated."""
    plan = toy.PLAN.replace(epochs=4, eval_every=2)
    return nb.fit(toy, pack, plan, tmp_path_factory.mktemp("runs") / "every second", **QUIET)


def test_an_evaluation_is_a_dict_that_a_notebook_shows_with_its_metrics_explained(run, pack):
    scores = nb.evaluate(run, pack)
    assert repr(scores) == repr(dict(scores))
    assert set(scores) == {"loss", "accuracy"}
    for part in (f"{pack.splits['test']} samples of the test split", number(scores["loss"]), "training minimises"):
        assert part in scores._repr_html_()


@pytest.fixture
def folder(run, tmp_path):
    """Copies of a run: older and newer, the newer one in a subfolder; and what is no run."""
    for name in ("older", "more/newer"):
        checkpoint.mark(shutil.copytree(run.folder, tmp_path / name), id=name)  # runs of their own
    os.utime(tmp_path / "older" / "run.json", (1, 1))
    (tmp_path / "data").mkdir()
    return tmp_path


def test_the_runs_of_a_folder_are_a_table_newest_first_with_state_best_time_speed_tags_and_notes(folder, run):
    older = nb.Run.open(folder / "older")
    assert older.notes == ""
    older.tags, older.notes = ["baseline"], "<b>with the old labels"
    frame = nb.runs(folder)
    assert list(frame.index) == ["more/newer", "older"]
    row = frame.loc["older"]
    assert (row["state"], row["best_accuracy"], row["epochs"]) == ("done", run.best["val_accuracy"], 4)
    assert row["minutes"] == pytest.approx(run.history.of("epoch")[-1]["wall"] / 60)
    assert (row["tags"], row["notes"]) == (["baseline"], "<b>with the old labels")
    assert nb.Run.open(folder / "older").tags == ["baseline"], "kept in its folder"
    with pytest.raises(CheckpointError, match="there is no such folder; name the one"):
        nb.runs(folder / "nowhere")


def test_a_run_that_cannot_be_opened_is_named_with_the_reason_and_leaves_the_others(folder, capsys):
    (folder / "older" / "card.json").unlink()
    assert list(nb.runs(folder).index) == ["more/newer"]
    assert re.search(r"left out: .*older/card\.json is missing; copy the whole run", capsys.readouterr().err)
    assert nb.runs(folder / "data").empty
    assert "data has no runs in it" in capsys.readouterr().err


def test_the_state_of_a_run_is_read_off_its_folder(folder, run):
    found = nb.Run.open(folder / "older")
    assert found.state == "done"
    with lock(found.folder):
        assert found.state == "training"
    (found.folder / "plan.json").write_text(run.plan.replace(epochs=9).to_json())
    longer = nb.Run.open(found.folder)
    assert longer.state == "interrupted"
    (found.folder / "plan.json").write_text(run.plan.replace(epochs=1).to_json())
    found.history.append(Record("step", 4, 98, 998, {"loss": 1.0}))
    assert str(nb.Run.open(found.folder)).startswith(f"Run {found.folder}: 4 of 4 epochs, best")
    longer.history.append(Record("event", 4, 99, 999, {"what": "stopped", "asked": "stop"}))
    assert longer.state == "stopped"


def test_samples_can_be_chosen_in_the_call_and_what_is_none_is_refused(pack, tmp_path, capsys):
    plan = toy.PLAN.replace(epochs=1)
    nb.fit(toy, pack, plan, tmp_path / "run", receipt=False, samples=(7, 3))
    assert truths(capsys.readouterr().err)[:2] == ["abcd"[int(pack.sample(i)["label"][0])] for i in (7, 3)]
    nb.fit(toy, pack, plan.replace(epochs=2), tmp_path / "run", receipt=False)
    assert truths(capsys.readouterr().err)[:2] == ["abcd"[int(pack.sample(i)["label"][0])] for i in (7, 3)]
    lacking = rf"sample {len(pack)} is not in the pack; choose ids from 0 to {len(pack) - 1}"
    wrong: Any
    for wrong in ("last", ["a.png"], 5, [], [3, len(pack)]):
        with pytest.raises(TrainError, match=rf"samples must be 'first', 'worst' or a list of ids|{lacking}"):
            nb.fit(toy, pack, plan, tmp_path / "other", samples=wrong, **QUIET)
        assert not (tmp_path / "other").exists(), "refused before anything is written"


def truths(said: str) -> list[str]:
    return re.findall(r"^truth +(\w)", said, re.M)
