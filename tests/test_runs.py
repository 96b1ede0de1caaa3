"""What a trained run shows in tables: its epochs, and the folder of runs that it lies in, also without its task."""

import os
import re
import shutil
from typing import Any

import own
import pytest
import toy
from acting import QUIET

import nbtools as nb
from nbtools.errors import CheckpointError, TrainError
from nbtools.run import lock
from nbtools.train import Record, checkpoint


@pytest.fixture(scope="module")
def run(pack, tmp_path_factory):
    """Four epochs, of which every second one is evaluated."""
    plan = toy.PLAN.replace(epochs=4, eval_every=2)
    return nb.fit(toy, pack, plan, tmp_path_factory.mktemp("runs") / "every second", **QUIET)


@pytest.fixture
def folder(run, tmp_path):
    """Copies of a run: older and newer, the newer one in a subfolder; and what is no run."""
    for name in ("older", "more/newer"):
        checkpoint.mark(shutil.copytree(run.folder, tmp_path / name), id=name)  # runs of their own
    os.utime(tmp_path / "older" / "run.json", (1, 1))
    (tmp_path / "data").mkdir()
    return tmp_path


def test_the_runs_of_a_folder_are_a_table_newest_first_and_one_that_cannot_be_opened_is_named(folder, run, capsys):
    frame = nb.runs(folder)
    assert list(frame.index) == ["more/newer", "older"]
    row = frame.loc["older"]
    assert (row["state"], row["best_accuracy"], row["epochs"]) == ("done", run.best["val_accuracy"], 4)
    assert row["minutes"] == pytest.approx(run.history.of("epoch")[-1]["wall"] / 60)
    (folder / "older" / "card.json").unlink()
    assert list(nb.runs(folder).index) == ["more/newer"]
    assert re.search(r"left out: .*older/card\.json is missing; copy the whole run", capsys.readouterr().err)
    assert nb.runs(folder / "data").empty
    assert "data has no runs in it" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="there is no such folder; name the one"):
        nb.runs(folder / "nowhere")


def test_a_run_of_a_task_without_a_name_is_listed_and_compared_and_asks_for_it_where_the_network_is_needed(tmp_path):
    """`nb.fit(nb.classify(net), pack)` in one line."""
    pack = own.packed("images", tmp_path)
    for seed in range(2):
        nb.fit(nb.classify(own.Small), pack, own.PLAN.replace(seed=seed), tmp_path / "runs" / str(seed), **QUIET)
    frame = nb.runs(tmp_path / "runs")
    assert frame["best_accuracy"].between(0, 1).all()
    assert list(frame["state"]) == ["done", "done"]
    compared = nb.compare(tmp_path / "runs")
    assert "accuracy" in compared.conclusion
    assert list(compared.frame["plan.seed"]) == [0, 1]
    opened = nb.Run.open(tmp_path / "runs" / "0")
    assert opened.best["val_accuracy"] == max(opened.summary()["val_accuracy"])
    for need in (lambda: opened.predict([pack.raw[0]]), opened.model, lambda: nb.evaluate(opened, pack)):
        with pytest.raises(CheckpointError, match=r"has no name there to open it by; pass task= with the same one"):
            need()
    again = nb.Run.open(opened.folder, nb.classify(own.Small))
    assert again.best == opened.best
    assert nb.evaluate(again, pack, "val")["accuracy"] == pytest.approx(opened.best["val_accuracy"])


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
