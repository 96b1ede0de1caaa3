"""What one call of fit leaves behind, and its callbacks, which may stop a run, or end it."""

import dataclasses
import json
import os
import signal
import sys
from functools import partial
from time import sleep
from typing import Any
from unittest.mock import DEFAULT, MagicMock

import numpy as np
import pandas as pd
import pytest
import torch
import toy
from acting import QUIET, STEPS, acting, asking, interrupted, last_step, refused, same, texts
from safetensors.torch import load_file

import nbtools as nb
from nbtools import measure
from nbtools.data import Card
from nbtools.errors import CheckpointError, DiskError, MissingExtra, PackError, PlanError, TrainError
from nbtools.train import checkpoint

PLAN = toy.PLAN
ONE = PLAN.replace(epochs=1)
ctrl_c = partial(os.kill, os.getpid(), signal.SIGINT)


def test_a_run_folder_has_the_columns_of_the_guides_log_and_the_best_weights_which_read_raw_files(untouched, pack):
    files = {path.name for path in untouched.folder.iterdir()}
    assert {"plan.json", "history.csv", "run.json", "card.json", "plot.png"} <= files
    assert not [name for name in files if name.endswith(".part")]
    frame = pd.read_csv(untouched.folder / "history.csv")
    epochs = frame[frame.kind == "epoch"]
    wanted = ["train_loss", "val_loss", "val_accuracy", "lr", "batch_size", "epoch_time", "samples_per_s", "data_wait"]
    assert np.isfinite(np.asarray(epochs[wanted], float)).all()
    assert list(untouched.summary().index) == [1, 2, 3]
    assert 0 < epochs.lr.iloc[-1] < 0.02 * untouched.plan.lr  # the last step still learns
    opened = nb.Run.open(untouched.folder, toy)
    best = max(untouched.history.of("epoch"), key=lambda row: row["val_accuracy"])
    assert opened.best["epoch"] == best["epoch"] + 1, "counted from 1, as everywhere on a screen"
    assert nb.evaluate(opened, pack, "val")["accuracy"] == best["val_accuracy"]
    files = [pack.raw.source / name for name in pack.names[:20]]
    assert untouched.predict(files, batch_size=7) == untouched.predict_pack(pack, range(20))
    assert untouched.predict(files[0]) == untouched.predict([files[0]])
    assert untouched.predict([]) == []
    refused(PackError, r"nothing\.npy: No such file", untouched.predict, untouched.folder / "nothing.npy")


def test_an_export_is_enough_to_use_the_model(untouched, pack, tmp_path, monkeypatch):
    path = untouched.export(tmp_path / "toy-v1.2")
    assert path.name == "toy-v1.2.safetensors"
    assert untouched.export(path) == path
    monkeypatch.setenv("NBTOOLS_DRIVE", str(tmp_path))
    assert untouched.export("drive:a/net") == tmp_path / "a" / "net.safetensors"
    card = json.loads(path.with_suffix(".json").read_text())
    model = toy.model(Card.from_dict(card["card"]), toy.Plan(**card["plan"]))
    model.load_state_dict(load_file(path))
    x = torch.from_numpy(pack.arrays["x"][:9])
    with torch.no_grad():
        assert torch.equal(model.eval()({"x": x}), untouched.model("cpu")({"x": x}))
    assert card["validation"]["val_accuracy"] == untouched.best["val_accuracy"]


def test_what_cannot_be_trained_evaluated_or_opened_is_refused_before_anything_is_written(untouched, pack, tmp_path):
    fit = partial(nb.fit, toy, **QUIET)
    new = tmp_path / "run"
    refused(PlanError, r"plan must be a toy\.Plan .* got Plan; use toy\.PLAN", fit, pack, nb.Plan(), new)
    refused(TrainError, "BEST must be one of loss, acc.*, got 'acc'", nb.fit, toy.with_(BEST="acc"), pack, ONE, new)
    refused(PackError, r"pack must be an nb\.Pack, got PosixPath; make one with toy\.pack", fit, tmp_path, ONE, new)
    refused(CheckpointError, "a run folder must be local; keep='drive:runs/x' copies", fit, pack, ONE, "drive:runs/x")
    (mounts := tmp_path / "mounts").write_text(f"drive {tmp_path}/drive fuse.drive rw 0 0\n")
    (tmp_path / "drive").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nbtools.disk.MOUNTS", mounts)
        patch.chdir(tmp_path / "drive")  # as people on Colab do
        for place in (tmp_path / "drive" / "runs" / "x", "runs/x"):
            refused(CheckpointError, "a run folder must be local; keep=", fit, pack, ONE, place)
    into = r"called epochs; settings go into plan=toy\.PLAN\.replace\(epochs=3\)"
    refused(PlanError, into, nb.fit, toy, pack, epochs=3)
    refused(PlanError, r"advise takes no epochs, lr; change its plan: nb\.a", nb.advise, toy, pack, epochs=3, lr=0.1)
    refused(PackError, r"pack must be an nb\.Pack, got str; make one with run\.pack", nb.evaluate, untouched, "photos")
    assert not new.exists()
    (tmp_path / "file").write_text("")
    refused(DiskError, "starting a run", fit, pack, ONE, tmp_path / "file" / "run")
    other = dataclasses.replace(pack, card=dataclasses.replace(pack.card, classes=list("dcba")))
    for act in (lambda: nb.evaluate(untouched, other), lambda: untouched.report(other)):
        refused(PackError, r"classes differ from those that the run was trained with \(\['d'", act)
    new.mkdir()
    for index, words in (
        (None, r"no run\.json, so this is not a run folder; nb\.runs lists"),
        ("{", "Expecting property name"),
        ('{"task": "no.such.task"}', r"card\.json is missing; copy the whole run folder"),
    ):
        if index is not None:
            (new / "run.json").write_text(index)
        refused(CheckpointError, words, nb.Run.open, new)


def test_a_receipt_is_measured_once_and_one_that_fails_costs_no_run(pack, tmp_path, monkeypatch):
    ways = [KeyboardInterrupt(), OSError("a raw file is gone"), DEFAULT, DEFAULT]
    receipt = MagicMock(wraps=partial(measure.receipt, seconds=0.05), side_effect=ways)
    verdict = MagicMock(wraps=partial(measure.verdict, seconds=0.05))
    monkeypatch.setattr(measure, "receipt", receipt)
    monkeypatch.setattr(measure, "verdict", verdict)
    runs = [nb.fit(toy, pack, ONE, tmp_path / "run", progress=False) for _ in range(4)]
    assert "no receipt: interrupted; run it again to get it" in runs[0].events
    assert "no receipt: OSError: a raw file is gone" in runs[1].events
    assert receipt.call_count == 3, "the last call measured nothing"
    nb.fit(toy, pack, ONE.replace(epochs=2), tmp_path / "run", progress=False)
    assert receipt.call_count == 4, "more epochs have a receipt of their own"
    assert runs[3].receipt.machine["torch"].endswith(torch.__version__)
    assert runs[3].verdict is not None
    assert not verdict.call_args.kwargs["fixed"], "it may change what a run in progress keeps"


def test_release_gpu_gives_the_machine_back_only_when_the_run_is_on_another_disk(pack, tmp_path, monkeypatch):
    colab = MagicMock()
    monkeypatch.setenv("NBTOOLS_DRIVE", str(tmp_path))
    for name in ("google", "google.colab"):
        monkeypatch.setitem(sys.modules, name, colab)

    def given_back_by(task, run="run", keep: Any = "drive:kept") -> int:
        nb.fit(task, pack, ONE, tmp_path / run, keep, release_gpu=True, **QUIET)
        return colab.runtime.unassign.call_count

    assert given_back_by(toy, "here", tmp_path / "beside") == 0, "with the run on its disk"
    interrupted(lambda: given_back_by(acting({3: ctrl_c})))
    assert given_back_by(toy) == 1, "not when the user stopped it"
    assert given_back_by(toy) == 1, "nor where nothing was trained"
    assert nb.Run.open(tmp_path / "kept", toy).history.of("epoch")


def test_a_setting_changed_on_resume_survives_a_crash_before_the_next_checkpoint(pack, tmp_path):
    interrupted(lambda: nb.fit(acting({3: ctrl_c}), pack, toy.PLAN, tmp_path / "run", **QUIET))
    plan = toy.PLAN.replace(batch_size=7, epochs=1)
    with pytest.raises(ZeroDivisionError):
        nb.fit(acting({2: lambda: 1 / 0}), pack, plan, tmp_path / "run", **QUIET)
    task = acting()
    run = nb.fit(task, pack, plan, tmp_path / "run", **QUIET)
    assert {len(ids) for _, _, ids in task.seen[:-1]} == {7}
    assert texts(run, "change") == ["epochs 3 → 1, batch_size 16 → 7"]


def test_a_slow_disk_keeps_no_epoch_waiting_and_the_best_state_is_written(pack, tmp_path, monkeypatch):
    slow = MagicMock(wraps=checkpoint.publish, side_effect=lambda *_: sleep(0.3) or DEFAULT)
    plan = toy.PLAN.replace(epochs=20)
    whole = nb.fit(toy, pack, plan, tmp_path / "whole", **QUIET)
    monkeypatch.setattr(checkpoint, "publish", slow)
    run = nb.fit(toy, pack, plan, tmp_path / "run", **QUIET)
    assert slow.call_count <= 6, "of 20 epochs, most of which were the best so far"
    assert run.best["epoch"] == whole.best["epoch"]
    assert same(run, whole)


def test_a_call_inside_of_no_grad_or_autocast_is_refused(pack, tmp_path):
    """Under autocast torch would keep the weights of the first step, and every step would compute with those."""
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with pytest.raises(TrainError, match="inside autocast or no_grad; move it outside"), context:
            nb.fit(toy, pack, ONE.replace(amp="bf16"), tmp_path / "run", **QUIET)


def test_callbacks_get_every_record_with_values_and_one_may_stop_the_run_after_the_step(pack, folder, untouched):
    seen: list[tuple[str, int]] = []

    def prune(record: nb.Record, run: nb.Run) -> Any:
        seen.append((record.kind, record.step))
        assert record.values.items() <= run.history.rows[-1].items(), "the history has it already"
        return "stop" if record.step == 12 else None

    run = nb.fit(toy, pack, PLAN, folder, callbacks=[lambda record, run: None, prune], **QUIET)
    assert seen == [*(("step", step) for step in range(1, 10)), ("epoch", 9), *(("step", s) for s in range(10, 13))]
    assert run.events == ["stopped by the callback prune after step 12; run it again to continue"]
    assert (run.state, last_step(run.folder)) == ("stopped", 12)
    assert same(nb.fit(toy, pack, PLAN, run.folder, **QUIET), untouched)


@pytest.mark.usefixtures("at_once")
def test_a_callback_sees_the_best_model_so_far_and_its_changes_join_those_of_the_user(pack, folder):
    seen = list[tuple[float, float]]()

    def halve(record: nb.Record, run: nb.Run) -> None:
        if record.kind == "epoch":
            seen.append((nb.evaluate(run, pack, "val")["loss"], record.values["val_loss"]))
            run.plan = run.plan.replace(lr=run.plan.lr / 2)

    task = acting({STEPS: asking(folder, batch_size=8)})  # in the last step of an epoch
    run = nb.fit(task, pack, PLAN.replace(epochs=2, early_stop=None), folder, callbacks=[halve], **QUIET)
    assert [ours == pytest.approx(theirs) for ours, theirs in seen] == [True] * 2
    assert (run.plan.batch_size, run.plan.lr) == (8, PLAN.lr / 4)


def test_an_error_in_a_callback_is_the_users_own_and_loses_no_checkpoint(pack, folder, untouched):
    def wrong(record: nb.Record, run: nb.Run) -> None:
        if record.step == STEPS + 3:
            raise ZeroDivisionError("a mistake")

    with pytest.raises(ZeroDivisionError, match="a mistake") as caught:
        nb.fit(toy, pack, PLAN, folder, callbacks=[wrong], **QUIET)
    assert caught.traceback[-1].name == "wrong"
    assert nb.Run.open(folder, toy).state == "failed"
    assert last_step(folder) == STEPS
    assert same(nb.fit(toy, pack, PLAN, folder, **QUIET), untouched)


def test_what_is_no_callback_and_no_logger_is_refused_before_anything_is_written(pack, folder, monkeypatch):
    fit = partial(nb.fit, toy, pack, PLAN, folder, **QUIET)
    refused(TrainError, r"callbacks must be a list of functions f\(record, run\), got 3", fit, callbacks=3)
    refused(TrainError, r'log must be "tensorboard" or None, got \'wandb\'', fit, log="wandb")
    refused(PlanError, r"Plan has no setting 'callback'; it has epochs", fit, callback=[print])
    launch = partial(nb.launch, *fit.args, processes=2)
    refused(PlanError, r"Plan has no setting 'callbacks'; it has epochs", launch, callbacks=[print])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    refused(MissingExtra, r'log="tensorboard" needs tensorboard .*: pip install tensorboard$', fit, log="tensorboard")
    assert not folder.exists()


@pytest.mark.usefixtures("at_once")
def test_tensorboard_shows_the_rows_of_the_history_each_once_after_a_crash_and_a_way_back(pack, folder):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def scalars(tag: str) -> list[tuple[int, float]]:
        return [(each.step, each.value) for each in reader.EventAccumulator(str(folder)).Reload().Scalars(tag)]

    with pytest.raises(ZeroDivisionError):
        nb.fit(acting({STEPS + 3: lambda: 1 / 0}), pack, PLAN, folder, log="tensorboard", **QUIET)
    assert scalars("step/loss")[-1][0] > last_step(folder), "rows that the next start repeats"
    run = nb.fit(acting({4: asking(folder, force=True, lr=1000.0)}), pack, PLAN, folder, log="tensorboard", **QUIET)
    assert "Training diverged after lr 0.01 → 1000" in " ".join(run.events)
    for kind in ("step", "epoch"):
        for name in ("lr", "loss" if kind == "step" else "val_loss"):
            rows = [(row["step"], pytest.approx(row[name])) for row in run.history.of(kind)]
            assert scalars(f"{kind}/{name}") == rows
    nb.fit(toy, pack, PLAN.replace(epochs=1), folder, log="tensorboard", fresh=True, **QUIET)
    assert len(scalars("step/loss")) == STEPS
