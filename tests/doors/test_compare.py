"""Runs next to each other: what came out, what differs, and which is best where chance does not explain it."""

import re
import shutil
from typing import Any

import browser
import own
import pytest
import toy
from acting import QUIET

import nbtools as nb
from nbtools.errors import CheckpointError, TrainError
from nbtools.train import History, Record, checkpoint

EVIL = '<img src=x onerror="alert(1)">'


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two short runs that differ in batch size and epochs."""
    folder = tmp_path_factory.mktemp("compare")
    pack, plan = toy.make_pack(folder), toy.PLAN.replace(lr=1e-3)
    slow = nb.fit(toy, pack, plan, folder / "runs" / "slow", **QUIET)
    return slow, nb.fit(toy, pack, plan.replace(batch_size=32, epochs=2), folder / "runs" / EVIL, **QUIET)


def test_a_row_a_run_has_its_outcome_and_the_settings_that_differ_and_a_notebook_shows_it_escaped(runs):
    compared, slow = nb.compare(*runs), runs[0]
    frame, name = compared.frame, str(slow.folder)
    assert list(frame.index) == [str(run.folder) for run in runs]
    assert tuple(frame.loc[name, ["best_accuracy", "best_epoch"]]) == (slow.best["val_accuracy"], slow.best["epoch"])
    assert list(frame["epochs"]) == list(frame["plan.epochs"]) == [3, 2]
    assert (list(frame["plan.batch_size"]), "plan.lr" in frame.columns) == ([16, 32], False)  # the same in both
    assert frame.loc[name, "samples_per_s"] == pytest.approx(402 / slow.history.of("epoch")[-1]["wall"])  # 3 epochs
    page = compared._repr_html_()
    assert ("<img" in page, "&lt;img src=x onerror=" in page) == (False, True)
    assert compared.conclusion in str(compared)
    assert not re.search(r"\d\.\d{7}", str(compared)), "three digits"
    for title in ("validation loss", "accuracy", "learning rate"):
        assert re.search(f"<b>{title}.*?<svg .*?data-name=", page), "the charts of the live view"


@pytest.mark.browser
def test_its_charts_answer_the_pointer_with_the_values_of_every_run(runs, chromium):
    with browser.chromium(chromium) as window:
        page = window.new_page()
        page.set_content(nb.compare(*runs)._repr_html_())
        page.locator(".nbt-plot").first.hover()
        under = page.locator(".nbt-at").first.inner_text()
    assert re.match(r"step \d+\n", under)
    assert all(re.search(rf"{re.escape(str(run.folder))} [\d.]+", under) for run in runs), under


def reached(folder, run, *values: tuple[float, float]) -> list[Any]:
    """Copies of a run with one evaluation of this accuracy and loss each."""
    for k, (accuracy, loss) in enumerate(values):
        copy = shutil.copytree(run.folder, folder / f"run-{k}")
        checkpoint.mark(copy, id=copy.name, best="0001-00000010")  # a run of its own
        (copy / "history.csv").unlink()
        row = {"epoch_time": 14.0, "wall": 15.5, "val_accuracy": accuracy, "val_loss": loss}
        history = History(copy / "history.csv")
        history.append(Record("epoch", 0, 10, 100, row))
        history.append(Record("step", 1, 15, 150, {"loss": loss, "wall": 30.0}))
    return [folder / f"run-{k}" for k in range(len(values))]


def test_the_best_run_is_named_where_more_than_chance_sets_it_apart(runs, tmp_path):
    apart = nb.compare(*reached(tmp_path / "apart", runs[0], (0.03, 1.0), (0.9, 0.03)))
    assert "run-1 is the best: accuracy 0.900, 0.870 above " in apart.conclusion
    assert apart._repr_html_().count('data-log=""') == 1, "of the loss"
    close = nb.compare(*reached(tmp_path / "close", runs[0], (0.9, 1.0), (0.91, 0.2)))
    assert "run-0 0.900; on 48 validation samples, chance alone can explain such" in close.conclusion


def test_no_run_is_the_best_of_different_data_or_before_both_have_been_evaluated(runs, tmp_path):
    plan = toy.PLAN.replace(epochs=1)
    other = nb.fit(toy, toy.make_pack(tmp_path / "other", count=120), plan, tmp_path / "b", **QUIET)
    assert "have different tasks, or were validated on different data" in nb.compare(runs[0], other).conclusion
    checkpoint.mark(copy := shutil.copytree(runs[0].folder, tmp_path / "empty"), best=None)
    compared = nb.compare(runs[0], copy)
    assert compared.conclusion == "No best run: fewer than two have been evaluated."


def test_a_folder_is_a_table_of_runs_and_stands_for_all_of_them(runs, tmp_path, capsys):
    with pytest.raises(TrainError, match="at least one run, got none; give it"):
        nb.compare(tmp_path)
    for act in (nb.compare, nb.runs, lambda folder: nb.watch(folder, wait=0.1)):
        with pytest.raises(CheckpointError, match="no such folder"):
            act(tmp_path / "nowhere")
    every = reached(tmp_path / "runs", runs[0], *[(0.5, 1.0)] * 9)
    assert len(nb.compare(tmp_path / "runs").runs) == 9
    assert nb.compare(every[:2]).runs.keys() == nb.compare((*every[:2],)).runs.keys() == {*map(str, every[:2])}
    (every[0] / "card.json").unlink()
    (every[8] / "plan.json").write_text('{"lr": -1}')
    (every[1] / "plan.json").write_text('{"lr": 1, "gone": 2}')
    checkpoint.mark(every[2], task="own:Small")  # a network by now
    frame, said = nb.runs(tmp_path), capsys.readouterr().err
    assert sorted(frame.index) == [f"runs/run-{k}" for k in range(1, 8)]
    for words in (r"run-0/card\.json is missing; copy the whole run", r"run-8: .*lr must be greater than 0, got -1"):
        assert re.search(f"left out: .*{words}", said)
    assert "nowhere holds no run yet; waiting up to 0.1 s for one …" in said
    row = frame.loc["runs/run-1", ["best_accuracy", "epochs", "minutes", "samples_per_s"]]
    assert [*row] == [0.5, 1, 0.5, 5], "minutes also of an epoch that has not ended"
    assert not any(frame.changed.dt.microsecond)


def test_a_run_of_a_task_without_a_name_is_compared_and_asks_for_it_where_the_network_is_needed(tmp_path):
    pack = own.packed("images", tmp_path)
    for seed in range(2):
        nb.fit(nb.classify(own.Small), pack, own.PLAN.replace(seed=seed), tmp_path / "runs" / str(seed), **QUIET)
    assert list(nb.runs(tmp_path / "runs")["state"]) == ["done", "done"]
    compared = nb.compare(tmp_path / "runs")
    assert "accuracy" in compared.conclusion
    assert list(compared.frame["plan.seed"]) == [0, 1]
    opened = nb.Run.open(tmp_path / "runs" / "0")
    for need in (lambda: opened.predict([pack.raw[0]]), opened.model, lambda: nb.evaluate(opened, pack)):
        with pytest.raises(CheckpointError, match=r"has no name to import it by; pass the same one as task="):
            need()
    with pytest.raises(CheckpointError, match=r"makes another network .*; open .*: nb\.Run\.open\(folder, task\)"):
        nb.Run.open(opened.folder, nb.classify(lambda: own.Small(4))).model()
    again = nb.Run.open(opened.folder, nb.classify(own.Small))
    assert nb.evaluate(again, pack, "val")["accuracy"] == pytest.approx(opened.best["val_accuracy"])


def test_samples_can_be_chosen_in_the_call_and_what_is_none_is_refused(pack, tmp_path, monkeypatch):
    plan, shown = toy.PLAN.replace(epochs=1), []
    monkeypatch.setattr("nbtools.live.draw.png", lambda _, facts, samples: shown.append(samples) or b"\x89PNG")
    nb.fit(toy, pack, plan, tmp_path / "run", receipt=False, samples=(7, 3))
    assert [each.truth for each in shown[-1]] == ["abcd"[int(pack.sample(i)["label"][0])] for i in (7, 3)]
    with pytest.raises(TrainError, match="samples must be a list of ids of the pack"):
        nb.fit(toy, pack, plan, tmp_path / "other", samples=[3, len(pack)], **QUIET)
    assert not (tmp_path / "other").exists(), "refused before anything is written"
