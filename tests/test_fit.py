"""fit, Run and the receipt: what one call leaves behind."""

import json
import os
import shutil
import signal
import sys
import time
import types
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import toy
from safetensors.torch import load_file

import nbtools as nb
from nbtools import disk, measure
from nbtools.data import Card
from nbtools.data.pack import RawFiles
from nbtools.errors import CheckpointError, DiskError, PackError, PlanError, TrainError
from nbtools.run import Run
from nbtools.train import checkpoint

pytestmark = pytest.mark.usefixtures("undrawn")

QUIET: dict[str, Any] = {"receipt": False, "progress": False}


def raw_of(pack) -> RawFiles:
    assert pack.raw is not None
    return pack.raw


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
    assert np.isfinite(np.asarray(epochs[wanted], float)).all()
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
    advice = nb.advise(toy, pack, measure=False)
    held: Any = type("Held", (), {"plan": advice.plan.replace(epochs=1)})()
    assert nb.fit(toy, pack, held, tmp_path / "run", **QUIET).plan == held.plan
    with pytest.raises(PlanError, match=r"plan must be a toy\.Plan .* got Plan; use toy\.PLAN"):
        nb.fit(toy, pack, nb.Plan(), tmp_path / "other", **QUIET)
    assert not (tmp_path / "other").exists()


def test_evaluating_on_a_pack_of_other_classes_is_refused(run, pack):
    """The users' complaint: wrong predictions because training and inference differ in preprocessing."""
    import dataclasses

    other = dataclasses.replace(pack, card=dataclasses.replace(pack.card, classes=list("dcba")))
    with pytest.raises(PackError, match="classes are not those the run was trained with"):
        nb.evaluate(run, other)


def test_a_folder_that_is_no_run_is_said_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"no run\.json, so this is not a run folder; train with"):
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


def test_a_run_stopped_in_its_first_epoch_has_an_empty_summary(pack, tmp_path):
    run = nb.fit(interrupted(1), pack, toy.PLAN, tmp_path / "run", **QUIET)
    assert len(run.history.of("step")) == 1
    assert run.summary().empty
    assert "0 of 3 epochs" in repr(run)


def interrupted(*calls) -> Any:
    """The toy task, and a SIGINT in some of its batches."""
    done = []

    def batch(raw, plan, draws):
        done.append(1)
        if len(done) in calls:
            os.kill(os.getpid(), signal.SIGINT)
        return toy.batch(raw, plan, draws)

    return types.SimpleNamespace(**{**vars(toy), "batch": batch})


def test_an_export_keeps_the_whole_name(run, tmp_path):
    assert run.export(tmp_path / "model-v1.2").name == "model-v1.2.safetensors"
    assert run.export(tmp_path / "b.safetensors").name == "b.safetensors"


def test_no_plan_means_the_runs_own(pack, tmp_path):
    plan = toy.PLAN.replace(hidden=24, epochs=1)
    nb.fit(toy, pack, plan, tmp_path / "run", **QUIET)
    assert nb.fit(toy, pack, None, tmp_path / "run", **QUIET).plan == plan


def test_an_early_stopped_run_goes_on_only_when_its_plan_changes(pack, tmp_path):
    flat: Any = types.SimpleNamespace(**{**vars(toy), "metrics": lambda outputs, batch: {"accuracy": (1, 2)}})
    plan = toy.PLAN.replace(epochs=50, early_stop=3)
    epochs = [len(nb.fit(flat, pack, p, tmp_path / "run", **QUIET).summary()) for p in (plan, plan)]
    longer = nb.fit(flat, pack, plan.replace(epochs=60), tmp_path / "run", **QUIET)
    assert [*epochs, len(longer.summary())] == [4, 4, 7]


def test_a_knob_changed_on_resume_survives_a_crash_before_the_next_checkpoint(pack, tmp_path):
    nb.fit(interrupted(3), pack, toy.PLAN, tmp_path / "run", **QUIET)
    plan, sizes = toy.PLAN.replace(batch_size=7, epochs=1), []

    def batch(raw, plan, draws):
        sizes.append(len(raw["id"]))
        if len(sizes) == 2:
            raise ZeroDivisionError
        return toy.batch(raw, plan, draws)

    task: Any = types.SimpleNamespace(**{**vars(toy), "batch": batch})
    with pytest.raises(ZeroDivisionError):
        nb.fit(task, pack, plan, tmp_path / "run", **QUIET)
    run = nb.fit(task, pack, plan, tmp_path / "run", **QUIET)
    assert sizes[:10] == [7] * 10
    assert [row["what"] for row in run.history.of("change")] == ["epochs 3 → 1, batch_size 16 → 7"]


def test_a_folder_in_place_of_a_pack_is_said_so(pack, tmp_path):
    with pytest.raises(PackError, match=r"pack must be a nb\.Pack, got PosixPath; make one with toy\.pack\(source\)"):
        nb.fit(toy, pack.raw.source, toy.PLAN, tmp_path / "run", **QUIET)


def test_two_at_once_in_one_run_folder_is_refused(pack, tmp_path):
    caught = []

    def batch(raw, plan, draws):
        if not caught:
            with pytest.raises(TrainError, match="another process trains here") as error:
                nb.fit(toy, pack, toy.PLAN, tmp_path / "run", **QUIET)
            caught.append(error)
        return toy.batch(raw, plan, draws)

    task: Any = types.SimpleNamespace(**{**vars(toy), "batch": batch})
    assert len(nb.fit(task, pack, toy.PLAN, tmp_path / "run", **QUIET).summary()) == 3
    assert nb.fit(toy, pack, toy.PLAN, tmp_path / "run", **QUIET).events == []


def test_a_run_is_not_written_to_drive_directly(pack):
    with pytest.raises(CheckpointError, match=r"written to local disk, and copied to Drive by keep='drive:runs/x'"):
        nb.fit(toy, pack, toy.PLAN, "drive:runs/x", **QUIET)


def test_keep_named_only_after_the_run_brings_all_of_it(run, pack, tmp_path):
    nb.fit(toy, pack, toy.PLAN, run.folder, keep=tmp_path / "drive", **QUIET)
    kept = Run.open(tmp_path / "drive", toy)
    assert kept.best == run.best
    assert nb.evaluate(kept, pack) == nb.evaluate(run, pack)
    shutil.copytree(tmp_path / "drive", tmp_path / "vm")
    assert len(nb.fit(toy, pack, toy.PLAN, tmp_path / "vm", **QUIET).summary()) == 3


def test_keep_mixes_no_two_runs_and_replaces_no_strangers(run, pack, tmp_path):
    nb.fit(toy, pack, toy.PLAN, run.folder, keep=tmp_path / "drive", **QUIET)
    nb.fit(toy, pack, toy.PLAN.replace(epochs=1), tmp_path / "other", **QUIET)
    with pytest.raises(CheckpointError, match=r"keeps another run than .*; name another keep="):
        nb.fit(toy, pack, toy.PLAN, tmp_path / "other", keep=tmp_path / "drive", **QUIET)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds files and no run"):
        nb.fit(toy, pack, toy.PLAN, tmp_path / "runs", keep=tmp_path / "drive", **QUIET)
    assert (tmp_path / "runs" / "thesis.txt").read_text() == "mine"


def test_a_copy_that_failed_is_made_up_for_and_the_index_names_nothing_absent(run, tmp_path, monkeypatch):
    """Drive's Errno 5, once for each file of the run."""
    count = len([path for path in run.folder.iterdir() if path.name != "run.json"])
    real, target = disk.write_atomic, tmp_path / "drive"
    for broken in range(count + 1):
        calls = []

        def flaky(path, data, calls=calls, broken=broken):
            calls.append(path)
            if path.parent == target and len(calls) == broken + 1:
                raise OSError(5, "Input/output error")
            return real(path, data)

        monkeypatch.setattr(disk, "write_atomic", flaky)
        keeper = checkpoint.Keeper(run.folder, target)
        keeper.keep()
        keeper.flush()
        if (target / "run.json").exists():
            assert Run.open(target, toy).model("cpu") is not None
        keeper.keep()
        keeper.close()
        assert Run.open(target, toy).best == run.best
        assert len(checkpoint.weights(target)) > 0
        shutil.rmtree(target)


def test_an_index_kept_while_the_run_goes_on_names_what_was_there(run, tmp_path):
    folder, target = tmp_path / "run", tmp_path / "drive"
    shutil.copytree(run.folder, folder)
    keeper = checkpoint.Keeper(folder, target)
    with keeper.change:  # the thread waits: the run is one checkpoint further before it copies
        keeper.wanted = data = (folder / "run.json").read_bytes()
        index = json.loads(data)
        (folder / "run.json").write_text(
            json.dumps({**index, "last": "0009-00000081", "best": "0009-00000081.weights"})
        )
        keeper.change.notify_all()
    keeper.close()
    assert checkpoint.read_index(target) == index
    assert len(checkpoint.weights(target)) > 0


def test_what_is_pruned_before_it_is_kept_is_no_complaint(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    keeper = checkpoint.Keeper(folder, tmp_path / "drive")
    with keeper.change:
        keeper.keep()
        for path in folder.glob("*.safetensors"):
            path.unlink()
    keeper.close()
    assert keeper.complaints == []
    assert not (tmp_path / "drive" / "run.json").exists()


def test_checkpoints_are_ordered_by_number_and_files_of_others_are_left(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    (folder / "2024-11-21.txt").write_text("mine")
    for name in ("9999-00000001", "10000-00000002"):
        (folder / f"{name}.json").write_text("{}")
    assert checkpoint.names(folder)[:2] == ["10000-00000002", "9999-00000001"]
    checkpoint.prune(folder, {"last": "10000-00000002"})
    assert (folder / "2024-11-21.txt").exists()


@pytest.mark.parametrize("trouble", ["a raw file is gone", "interrupt"])
def test_a_receipt_that_fails_costs_no_run(tmp_path, monkeypatch, trouble):
    pack = toy.make_pack(tmp_path, count=60)
    monkeypatch.setattr(sys.modules[measure.Receipt.__module__], "SECONDS", 0.05)
    if trouble == "interrupt":

        def receipt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(measure, "receipt", receipt)
    else:
        (raw_of(pack).source / pack.names[int(pack.ids("train")[3])]).unlink()
    run = nb.fit(toy, pack, toy.PLAN.replace(epochs=1), tmp_path / "run", progress=False)
    assert run.receipt is None
    assert any(told.startswith("no receipt: ") for told in run.events)
    assert len(run.summary()) == 1


def test_fit_leaves_a_receipt_and_a_second_call_does_not_measure_again(pack, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[measure.Receipt.__module__], "ROUNDS", 1)
    real, calls = measure.receipt, []
    monkeypatch.setattr(measure, "receipt", lambda *a: (calls.append(1), real(*a, seconds=0.05))[1])
    for _ in range(2):
        run = nb.fit(toy, pack, toy.PLAN.replace(epochs=1), tmp_path / "run", progress=False)
        assert run.receipt is not None
        assert run.receipt.machine["torch"].endswith(torch.__version__)
    assert calls == [1]


def test_a_run_does_not_go_on_with_other_data_of_the_same_counts_and_classes(pack, tmp_path):
    nb.fit(toy, pack, toy.PLAN.replace(epochs=1), tmp_path / "run", **QUIET)
    other = toy.make_pack(tmp_path / "other", seed=0)
    assert nb.fit(toy, other, toy.PLAN.replace(epochs=2), tmp_path / "run", **QUIET).summary().shape[0] == 2
    moved = toy.demo(tmp_path / "moved", seed=0)
    np.save(moved / "3_0.npy" if (moved / "3_0.npy").exists() else next(moved.glob("*_0.npy")), np.ones(8, np.float32))
    with pytest.raises(CheckpointError, match="trained on another pack"):
        nb.fit(toy, toy.pack(moved, into=tmp_path / "p"), toy.PLAN.replace(epochs=3), tmp_path / "run", **QUIET)


def test_quick_epochs_that_are_not_the_best_do_not_each_write_a_checkpoint(pack, tmp_path, monkeypatch):
    real, saves = checkpoint.save, []
    monkeypatch.setattr(checkpoint, "save", lambda *a, **k: (saves.append(1), time.sleep(0.05), real(*a, **k))[2])
    flat: Any = types.SimpleNamespace(**{**vars(toy), "metrics": lambda outputs, batch: {"accuracy": (1, 2)}})
    run = nb.fit(flat, pack, toy.PLAN.replace(epochs=20), tmp_path / "run", **QUIET)
    assert len(run.summary()) == 20
    assert len(saves) < 10  # the first state, the first best, the last, and few between
    assert json.loads((run.folder / "run.json").read_text())["last"].startswith("0020-")


def test_the_picture_lies_in_both_folders_from_the_first_checkpoint_on_and_is_drawn_once_a_minute(pack, tmp_path):
    drawn = []

    def batch(raw, plan, draws):
        pictures = [tmp_path / folder / "plot.png" for folder in ("run", "kept")]
        index = json.loads((tmp_path / "run" / "run.json").read_text())
        if draws is not None and index.get("best"):  # a checkpoint that training wrote
            drawn.append([path.stat().st_mtime_ns for path in pictures if path.exists()])
            time.sleep(0.05)
        return toy.batch(raw, plan, draws)

    task: Any = types.SimpleNamespace(**{**vars(toy), "batch": batch})
    nb.fit(task, pack, toy.PLAN, tmp_path / "run", keep=tmp_path / "kept", **QUIET)
    assert all(drawn)
    assert len(drawn[-1]) == 2, "not kept within the epochs that followed"
    assert len({times[0] for times in drawn}) == 1


def test_what_cannot_be_shown_is_a_message_and_costs_no_run(pack, tmp_path, monkeypatch):
    def broken(*_args, **_more):
        raise ZeroDivisionError("no ink")

    task: Any = types.SimpleNamespace(**{**vars(toy), "preview": broken})
    run = nb.fit(task, pack, toy.PLAN.replace(epochs=1), tmp_path / "samples", receipt=False)
    assert "no samples are shown: ZeroDivisionError: no ink" in run.events
    monkeypatch.setattr("nbtools.live.png.draw", broken)
    run = nb.fit(toy, pack, toy.PLAN, tmp_path / "run", **QUIET)
    assert len(run.summary()) == 3
    assert {"no picture until the end: ZeroDivisionError: no ink", "no picture: ZeroDivisionError: no ink"} <= {
        *run.events
    }


def test_advice_is_a_plan_also_where_ipywidgets_does_not_import(pack, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.delitem(sys.modules, "nbtools.live.form", raising=False)
    advice = types.SimpleNamespace(plan=toy.PLAN.replace(epochs=1), reasons={})
    assert len(nb.fit(toy, pack, advice, tmp_path / "run", **QUIET).summary()) == 1


class Colab(types.ModuleType):
    """google.colab, as far as giving a machine back needs it."""

    def __init__(self) -> None:
        super().__init__("google.colab")
        self.runtime = self.drive = self
        self.given_back = 0

    def unassign(self) -> None:
        self.given_back += 1

    def mount(self, point: str, force_remount: bool) -> None:
        raise MessageError("Error: credential propagation was unsuccessful")


class MessageError(Exception):
    """What Colab raises where access to Drive is not granted."""


@pytest.fixture
def colab(monkeypatch, tmp_path):
    fake = Colab()
    monkeypatch.setenv("NBTOOLS_DRIVE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "google", types.ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", fake)
    return fake


def test_release_gpu_gives_the_machine_back_when_the_run_is_kept(pack, tmp_path, colab):
    nb.fit(toy, pack, toy.PLAN.replace(epochs=1), tmp_path / "run", "drive:kept", release_gpu=True, **QUIET)
    assert colab.given_back == 1
    assert Run.open(tmp_path / "kept", toy).history.of("epoch")


def test_release_gpu_keeps_the_machine_while_the_run_is_on_no_other_disk(pack, tmp_path, colab):
    (tmp_path / "kept").write_text("a file where the folder should be")
    plan = toy.PLAN.replace(epochs=1)
    run = nb.fit(toy, pack, plan, tmp_path / "run", "drive:kept", release_gpu=True, **QUIET)
    assert any("not kept" in event for event in run.events)
    assert colab.given_back == 0
    (tmp_path / "kept").unlink()
    nb.fit(toy, pack, plan, tmp_path / "run", "drive:kept", release_gpu=True, **QUIET)
    assert colab.given_back == 1


def test_release_gpu_does_not_take_the_machine_from_a_person_who_stopped_the_run(pack, tmp_path, colab):
    nb.fit(interrupted(3), pack, toy.PLAN, tmp_path / "run", "drive:kept", release_gpu=True, **QUIET)
    assert colab.given_back == 0


def test_release_gpu_is_refused_where_the_run_would_go_with_the_machine(pack, tmp_path, colab):
    for keep in (None, tmp_path / "beside"):
        with pytest.raises(CheckpointError, match="name a folder that stays: keep="):
            nb.fit(toy, pack, toy.PLAN, tmp_path / "run", keep, release_gpu=True, **QUIET)
    assert not (tmp_path / "run").exists()


def test_where_drive_is_declined_a_run_ends_and_its_machine_is_not_given_back(
    pack, tmp_path, colab, monkeypatch, capsys
):
    monkeypatch.delenv("NBTOOLS_DRIVE")
    monkeypatch.setattr(sys.modules["nbtools.data.drive"], "_declined", False, raising=False)
    run = nb.fit(toy, pack, toy.PLAN.replace(epochs=1), tmp_path / "run", "drive:kept", release_gpu=True, **QUIET)
    assert run.history.of("epoch")
    assert "nothing is kept at drive:kept" in capsys.readouterr().out
    assert colab.given_back == 0, "the run was only there"


def test_a_run_kept_in_the_notebooks_former_folder_goes_on_there(pack, tmp_path, colab, capsys):
    plan = toy.PLAN.replace(epochs=2)
    nb.fit(toy, pack, plan.replace(epochs=1), tmp_path / "first", "drive:nbtools/runs/toy", **QUIET)
    again = nb.fit(toy, pack, plan, tmp_path / "second", "drive:nbtools-data/runs/toy", **QUIET)
    assert [row["epoch"] for row in again.history.of("epoch")] == [0, 1]
    assert "using drive:nbtools/runs/toy, where notebooks used to keep it" in capsys.readouterr().out
    assert len(Run.open(tmp_path / "nbtools" / "runs" / "toy", toy).history.of("epoch")) == 2
    nb.fit(toy, pack, plan, tmp_path / "third", "drive:nbtools-data/runs/new", **QUIET)
    assert Run.open(tmp_path / "nbtools-data" / "runs" / "new", toy)
