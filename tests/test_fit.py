"""fit, Run and the receipt: what a person gets from one call."""

import json
import shutil
import time

import pandas as pd
import pytest
import torch
import toy
from safetensors.torch import load_file

import nbtools as nb
from nbtools import checkpoint, disk, measure
from nbtools.errors import CheckpointError, DiskError, PackError, PlanError
from nbtools.measure import Receipt
from nbtools.pack import Card
from nbtools.run import Run

QUIET = {"receipt": False, "progress": False}


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, pack):
    return nb.fit(toy, pack, toy.PLAN, tmp_path_factory.mktemp("runs") / "run", **QUIET)


def test_a_run_folder_holds_what_the_design_promises(run):
    files = {path.name for path in run.folder.iterdir()}
    assert {"plan.json", "history.csv", "run.json", "card.json", "plot.png"} <= files
    index = json.loads((run.folder / "run.json").read_text())
    for name in (index["last"], index["best"]):
        assert {f"{name}.safetensors", f"{name}.json"} <= files
    assert len(checkpoint.names(run.folder)) == 3  # the last and two before it
    assert not [name for name in files if name.endswith(".part")]
    assert (run.folder / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_csv_has_the_columns_of_the_guides_log(run):
    frame = pd.read_csv(run.folder / "history.csv")
    epochs = frame[frame.kind == "epoch"]
    wanted = ["train_loss", "val_loss", "val_accuracy", "lr", "batch_size", "epoch_time", "samples_per_s", "data_wait"]
    assert len(epochs) == 3
    assert epochs[wanted].notna().all(axis=None)
    assert list(run.summary().index) == [1, 2, 3]
    assert 0 < epochs.lr.iloc[-1] < 0.02 * run.plan.lr  # the last step still learns


def test_an_opened_run_gives_the_best_weights_and_the_same_answers(run, pack):
    opened = nb.Run.open(run.folder, toy)
    best = max(run.history.of("epoch"), key=lambda row: row["val_accuracy"])
    assert opened.best["epoch"] == best["epoch"]
    assert nb.evaluate(opened, pack, "val")["accuracy"] == best["val_accuracy"]
    assert nb.evaluate(opened, pack) == nb.evaluate(run, pack)
    assert "3 of 3 epochs, best val_accuracy" in repr(opened)


def test_predict_reads_raw_files_with_the_runs_own_preprocessing(run, pack):
    files = [pack.raw.source / name for name in pack.names[:20]]
    assert run.predict(files, batch_size=7) == run.predict_pack(pack, range(20))
    assert run.predict(files[0]) == run.predict([files[0]])
    assert run.predict([]) == []


def test_predict_names_the_file_that_cannot_be_read(run, tmp_path):
    with pytest.raises(PackError, match=r"nothing\.npy: No such file"):
        run.predict(tmp_path / "nothing.npy")


def test_an_export_is_enough_to_use_the_model(run, pack, tmp_path):
    path = run.export(tmp_path / "toy")
    card = json.loads(path.with_suffix(".json").read_text())
    model = toy.model(Card.from_dict(card["card"]), toy.Plan.from_dict(card["plan"]))
    model.load_state_dict(load_file(path))
    model.eval()
    x = torch.from_numpy(pack.arrays["x"][:9])
    with torch.no_grad():
        assert torch.equal(model({"x": x}), run.model("cpu")({"x": x}))
    assert card["validation"]["val_accuracy"] == run.best["val_accuracy"]


def test_fit_on_a_finished_run_trains_nothing_and_returns_it(run, pack):
    before = {path.name: path.read_bytes() for path in run.folder.iterdir() if path.suffix != ".png"}
    again = nb.fit(toy, pack, toy.PLAN, run.folder, **QUIET)
    assert {path.name: path.read_bytes() for path in again.folder.iterdir() if path.suffix != ".png"} == before


def test_a_plan_may_come_from_advice_or_from_anything_with_a_plan(pack, tmp_path):
    advice = nb.advise(toy, pack)
    held = type("Held", (), {"plan": advice.plan.replace(epochs=1)})()
    assert nb.fit(toy, pack, held, tmp_path / "run", **QUIET).plan == held.plan
    with pytest.raises(PlanError, match=r"plan must be a toy\.Plan .* got Plan; take toy\.PLAN"):
        nb.fit(toy, pack, nb.Plan(), tmp_path / "other", **QUIET)
    assert not (tmp_path / "other").exists()


def test_evaluating_on_a_pack_of_other_classes_is_refused(run, pack):
    """The users' complaint: wrong predictions because training and inference differ in preprocessing."""
    import dataclasses

    other = dataclasses.replace(pack, card=dataclasses.replace(pack.card, classes=list("dcba")))
    with pytest.raises(PackError, match="classes are not those the run was trained with"):
        nb.evaluate(run, other)


def test_a_folder_that_is_no_run_is_said_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"no run\.json, so this is no run folder; train with"):
        Run.open(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        Run.open(tmp_path)
    (tmp_path / "run.json").write_text('{"task": "no.such.task"}')
    with pytest.raises(CheckpointError, match=r"task 'no\.such\.task' cannot be imported"):
        Run.open(tmp_path)


def test_a_full_disk_stops_with_a_sentence_and_loses_no_checkpoint(pack, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    real, count = disk.write, [0]

    def failing(file, data):
        count[0] += 1
        if count[0] > 12:
            raise OSError(28, "No space left on device")
        real(file, data)

    monkeypatch.setattr(disk, "write", failing)
    with pytest.raises(DiskError, match="the disk is full"):
        nb.fit(toy, pack, toy.PLAN, folder, **QUIET)
    monkeypatch.undo()
    whole = nb.fit(toy, pack, toy.PLAN, tmp_path / "whole", **QUIET)
    again = nb.fit(toy, pack, toy.PLAN, folder, **QUIET)
    assert again.summary().train_loss.tolist() == whole.summary().train_loss.tolist()


def test_an_unwritable_run_folder_is_said_so(pack, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="starting a run"):
        nb.fit(toy, pack, toy.PLAN, tmp_path / "file" / "run", **QUIET)


def test_a_run_never_evaluated_still_gives_its_newest_weights(tmp_path):
    pack = toy.make_pack(tmp_path, count=12)
    pack.split[:] = 0
    run = nb.fit(toy, pack, toy.PLAN.replace(batch_size=6, epochs=2), tmp_path / "run", **QUIET)
    assert run.best == {}
    assert "val_loss" not in run.summary()
    assert len(run.predict_pack(pack, range(3))) == 3


def test_the_receipt_compares_with_the_baseline_on_the_same_network_and_data(pack):
    """Reading that sleeps makes the baseline data-bound by a known amount."""

    class Slow(type(pack.raw)):
        def __getitem__(self, i):
            time.sleep(0.002)
            return super().__getitem__(i)

    import dataclasses

    slow = dataclasses.replace(pack, raw=Slow(pack.raw.folder, pack.raw.source, pack.raw.read))
    found = measure.receipt(toy, slow, toy.PLAN.replace(hidden=24), seconds=0.3)
    assert found.before.plan["hidden"] == found.after.plan["hidden"] == 24
    assert found.before.plan["feed"] == "workers"
    assert found.before.samples_per_s < 500
    assert found.before.data_wait > 0.7 > 0.5 > found.after.data_wait
    assert found.ratio > 3
    assert found.ratio_least <= found.ratio <= found.ratio_most
    assert Receipt.from_dict(json.loads(found.to_json())).to_json() == found.to_json()
    assert "× the baseline's samples/s on this machine" in str(found)
    if not torch.cuda.is_available():
        assert "No GPU: the GPU's levers" in str(found)


def test_without_the_source_files_the_receipt_says_that_data_was_not_measured(tmp_path):
    pack = toy.make_pack(tmp_path, count=60)
    shutil.rmtree(pack.raw.source)
    gone = nb.Pack.open(pack.folder)
    assert gone.raw is None
    found = measure.receipt(toy, gone, toy.PLAN, seconds=0.1)
    assert "the data part was not measured" in str(found)


def test_fit_leaves_a_receipt_and_a_second_call_does_not_measure_again(pack, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "ROUNDS", 1)
    real, calls = measure.receipt, []
    monkeypatch.setattr(measure, "receipt", lambda *a: (calls.append(1), real(*a, seconds=0.05))[1])
    for _ in range(2):
        run = nb.fit(toy, pack, toy.PLAN.replace(epochs=1), tmp_path / "run", progress=False)
        assert run.receipt is not None
        assert run.receipt.machine["torch"].endswith(torch.__version__)
    assert calls == [1]
