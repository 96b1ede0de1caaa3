"""A notebook's situations: what the same call, or another one, makes of a run folder that is there."""

import dataclasses
import json
import os
import shutil
import sys
from collections import OrderedDict
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, patch

import numpy as np
import own
import pandas as pd
import pytest
import torch
from acting import QUIET, texts
from PIL import Image
from torch import nn
from torch.nn import functional as F

import nbtools as nb
from nbtools import disk
from nbtools.errors import CheckpointError, TrainError
from nbtools.live import send
from nbtools.measure import Advice, LrTrial
from nbtools.measure.finders import Candidate
from nbtools.run import lock
from nbtools.train import Task

PACK = partial(own.packed, "points")
PLAN = nb.Plan(epochs=2, batch_size=16, lr=1e-2, schedule="constant")
LONG = PLAN.replace(epochs=30)


class Net(nn.Sequential):
    def __init__(self, act=nn.ReLU, drop=0.0):
        body = nn.Sequential(nn.Linear(4, 8), act(), nn.Dropout(drop))
        super().__init__(OrderedDict(body=body, head=nn.Linear(8, 2)))


class Focal(nn.CrossEntropyLoss):
    def __init__(self, weights):
        super().__init__()
        self.weights = weights


class Smooth:
    def __init__(self, share: float):
        self.share = share

    def __call__(self, outputs, y):
        self.calls = vars(self).get("calls", 0) + 1
        return F.cross_entropy(outputs, y, label_smoothing=self.share)


class Acting(Net):
    def __init__(self, act):
        super().__init__()
        self.act = act


class Mine(nb.Task):
    def __init__(self, alpha):
        self.alpha, self.seen = alpha, []

    def model(self, card, plan):
        return Net()

    def loss(self, model, batch, plan):
        self.calls = vars(self).get("calls", 0) + 1
        self.seen.append(self.calls)
        return self.alpha * F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


def scaled(scale: Any) -> Any:
    return lambda outputs, y: scale * F.cross_entropy(outputs, y)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, at_once):
    monkeypatch.chdir(tmp_path)


def task(*network, **more) -> Task:
    torch.manual_seed(0)
    return nb.classify(Net(*network), **more)


def frozen() -> Task:
    net = Net()
    net.body.requires_grad_(False)
    return nb.classify(net)


def fit(pack, plan=None, run=None, who=None, **more) -> nb.Run:
    return nb.fit(who or task(), pack, plan, run, **{**QUIET, **more})


def refused(pack, plan, run, who=None, *, says: str, error: Any = TrainError, **more) -> None:
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    with pytest.raises(error, match=says):
        fit(pack, plan, run, who, **more)
    assert before == {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def stopped(pack, plan, run=None, **change) -> nb.Run:
    """A run that is asked for a change after three steps, and to stop four later."""
    steps = count(1)

    def act(record: nb.Record, run: nb.Run) -> Any:
        step = next(steps) if record.kind == "step" else 0
        if step == 3 and change:
            send(run.folder, settings=change)
        return "stop" if step == 7 else None

    return fit(pack, plan, run, callbacks=[act])


TRIAL = LrTrial(1e-3, 3e-3, "lowest", (Candidate(1e-3, 0.5), Candidate(3e-3, 0.4)), 100, 2.0)


def advised(**values) -> Advice:
    plan = PLAN.replace(**values)
    return Advice(plan, dict.fromkeys(plan.to_dict(), "a rule of thumb"))


def epochs(run) -> int:
    return len(run.history.of("epoch"))


def test_run_all_twice_returns_the_finished_run_other_settings_start_another_and_more_epochs_extend_it(pack, capsys):
    first, again = fit(pack, PLAN), fit(pack, PLAN)
    assert first.folder == again.folder == Path("runs/net-1")
    assert epochs(again) == 2
    assert "finished" in capsys.readouterr().err
    other = fit(pack, PLAN.replace(lr=1e-3))
    assert [nb.Run.open(run.folder, task()).plan.lr for run in (first, other)] == [1e-2, 1e-3]
    more = fit(pack, PLAN.replace(lr=1e-3, epochs=3))
    assert (more.folder, more.folder.name, epochs(more)) == (other.folder, "net-2", 3)
    assert fit(pack, PLAN.replace(lr=1e-3)).folder.name == "net-3"
    longer = [fit(pack, plan) for plan in (advised(), advised().plan.replace(epochs=3))]
    assert [(run.folder.name, epochs(run)) for run in longer] == [("net-4", 3)] * 2


def test_a_cell_with_another_network_loss_metric_setting_or_value_that_one_of_them_holds_starts_another_run(pack):
    def cells() -> list[Task]:
        smooth, weighted = nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(torch.tensor([1.0, 2.0]))
        losses = [smooth, weighted, *(partial(F.cross_entropy, label_smoothing=share) for share in (0.1, 0.4))]
        losses += [Focal([1, 2]), Focal([1, 3]), scaled(1.0), scaled(2.0), Smooth(0.1), Smooth(0.2)]
        losses += [scaled(torch.full((2,), scale)) for scale in (1.0, 2.0)]
        acts = [F.gelu, F.silu, {"n": {"a": 1}}, {"n": {"a": 2}}, TRIAL, dataclasses.replace(TRIAL, lr=1.0)]
        others = [task(), task(nn.Tanh), task(metrics=["f1"]), frozen(), *(task(loss=loss) for loss in losses)]
        return [*others, Mine(1), Mine(2), *(nb.classify(Acting(act)) for act in acts)]

    first, again = ([fit(pack, PLAN, who=cell).folder.name for cell in cells()] for _ in range(2))
    assert (
        first
        == again
        == [*(f"net-{number}" for number in range(1, 19)), *(f"acting-{number}" for number in range(1, 7))]
    )
    counting = task(loss=Smooth(0.3))
    assert fit(pack, PLAN, who=counting).folder == fit(pack, PLAN, who=counting).folder


def test_the_panel_that_drove_an_unfinished_run_changes_it_and_the_next_notebook_starts_another(pack):
    panel, other = nb.Panel(advised(epochs=30)), nb.Panel(advised(epochs=30, batch_size=32))
    run = stopped(pack, panel)
    panel.fields["batch_size"].value = "8"
    again = stopped(pack, panel)
    assert (again.folder, again.plan.batch_size) == (run.folder, 8)
    assert texts(again, "change")[0].startswith("batch_size 16 → 8")
    assert stopped(pack, other).folder != run.folder


def test_without_a_plan_what_the_task_gives_for_a_start_is_another_run(pack, monkeypatch):
    monkeypatch.setattr("nbtools.measure.advisor.search_plan", lambda task, pack, rules, *_: rules({}))
    runs = [fit(pack, who=task(plan=nb.Plan(lr=lr, epochs=2))) for lr in (1e-3, 1e-2, 1e-3)]
    assert [run.folder.name for run in runs] == ["net-1", "net-2", "net-1"]
    assert runs[0].plan.lr != runs[1].plan.lr
    assert epochs(fit(pack, who=task(plan=nb.Plan(lr=1e-3, epochs=3)))) == 3, "more epochs extend"


def test_a_run_keeps_the_trial_that_chose_its_lr_and_says_the_remarks_of_its_pack(pack, capsys):
    pack = dataclasses.replace(pack, manifest={**pack.manifest, "remarks": ["1 class without a val sample"]})
    fit(pack, nb.Panel(dataclasses.replace(advised(), lr_trial=TRIAL)), "r")
    assert nb.Run.open("r", task()).lr_trial == TRIAL
    assert "1 class without a val sample" in capsys.readouterr().err


def test_a_refused_or_interrupted_call_without_a_name_leaves_no_folder(pack):
    stop = MagicMock(side_effect=KeyboardInterrupt)
    with patch.object(sys.modules["nbtools.fit"], "prepare", stop), pytest.raises(KeyboardInterrupt):
        fit(pack)
    assert list(Path("runs").iterdir()) == []
    refused(pack, PLAN.replace(batch_size=10**6), None, says="larger than the train split")
    assert list(Path("runs").iterdir()) == []
    with lock(fit(pack, PLAN).folder):
        refused(pack, PLAN, None, says="another process")


def test_a_live_change_stays_applied_though_the_cell_run_anew_has_the_old_value_and_a_fixed_setting_is_refused(pack):
    runs = [stopped(pack, LONG, "r", lr=0.02)]
    index = json.loads(Path("r/run.json").read_text())
    assert (index["given"]["lr"], index["applied"]["lr"]) == (PLAN.lr, 0.02)
    runs += [stopped(pack, LONG, "r")]
    assert [(run.plan.lr, len(texts(run, "change"))) for run in runs] == [(0.02, 1)] * 2
    other = LONG.replace(optimizer="sgd", seed=1, lr=0.5)
    refused(pack, other, "r", says=r"optimizer adamw → sgd, seed 0 → 1.*fresh=True")


def test_newly_measured_advice_changes_nothing_in_a_resumed_run_and_is_said(pack, capsys):
    stopped(pack, advised(epochs=30), "r")
    again = stopped(pack, advised(epochs=30, batch_size=32, amp="bf16"), "r")
    assert (again.plan.batch_size, again.plan.amp, texts(again, "change")) == (16, "off", [])
    said = "this run keeps its applied settings; this call would change batch_size 16 → 32, amp off → bf16"
    assert said in capsys.readouterr().err
    again = stopped(pack, advised(batch_size=32).plan.replace(epochs=20), "r")
    assert (again.plan.epochs, again.plan.batch_size) == (20, 16), "only what code gave is a change"
    assert "with epochs 30 → 20" in capsys.readouterr().err


def test_a_run_without_a_finished_step_starts_over_as_whatever_comes(pack):
    class Broken(Net):
        def forward(self, x):
            if self.training and len(x) == 16:
                raise RuntimeError("a mistake")
            return super().forward(x)

    with pytest.raises(RuntimeError, match="a mistake"):
        fit(pack, PLAN, "r", nb.classify(Broken()))
    run = fit(pack, PLAN.replace(seed=1), "r", task(nn.Tanh))
    assert (epochs(run), run.plan.seed) == (2, 1)


def test_more_epochs_say_the_lr_that_they_mean_and_any_other_change_is_refused_by_name(pack, capsys):
    falls: dict[str, Any] = {"schedule": lambda plan: lambda progress: 1 - progress}
    for folder, plan, given in (("r", PLAN.replace(schedule="cosine"), {}), ("own", PLAN, falls)):
        fit(pack, plan, folder, task(**given))
        assert (seen := nb.Run.open(folder, task(**given))).best["epoch"] <= 2
        refused(pack, plan.replace(lr=0.1), folder, task(**given), says=r"finished.*lr 0.01 → 0.1.*fresh=True")
        assert epochs(fit(pack, plan.replace(epochs=4), folder, task(**given))) == 4
        assert seen.best["epoch"] > 2, "as it is now"
        assert "epochs 2 → 4: lr continues at 0.005; it had reached 0" in capsys.readouterr().err


def test_another_identity_in_a_named_folder_is_refused_with_what_differs_unless_layers_are_unfrozen(pack):
    fit(pack, PLAN, "r", frozen())
    more = PLAN.replace(epochs=4)
    says = r"network: body.1: ReLU\(.*\), body.2: Dropout\(p=0.0.*\) → body.1: Tanh\(\), body.2: Dropout\(p=0.5"
    refused(pack, more, "r", task(nn.Tanh, 0.5), says=says, error=CheckpointError)
    refused(pack, more, "r", task(metrics=["f1"]), says="metrics: ", error=CheckpointError)
    other = nb.pack([(np.ones(4, np.float32), i % 2) for i in range(64)], progress=False)
    refused(other, more, "r", frozen(), says="pack: ", error=CheckpointError)
    run = fit(nb.Pack.open(shutil.copytree(pack.folder, "equal data elsewhere")), more, "r")
    assert epochs(run) == 4
    assert "newly trained, without saved optimizer state: body.0.weight, body.0.bias" in " ".join(run.events)


def test_another_network_or_loss_than_the_trained_one_is_said(pack, capsys):
    fit(pack, PLAN, "r")
    for other, what in ((task(nn.Tanh), "network was not body.1: Tanh()"), (task(loss=scaled(2.0)), "loss was not ")):
        nb.Run.open("r", other).model()
        assert f"r: this is not quite what was trained; its {what}" in capsys.readouterr().err


def test_data_divided_otherwise_than_the_runs_are_said_and_a_run_packs_with_its_own_shares_and_seed(tmp_path, capsys):
    rows = pd.DataFrame(np.random.default_rng(0).normal(size=(80, 4)), columns=[*"abcd"])
    rows["y"] = ["no", "yes"] * 40
    pack, other = (nb.pack(rows, target="y", seed=seed, test=20, progress=False) for seed in (1, 2))
    run, said = fit(pack, PLAN, "r"), "divides the run's data in another way"
    own = run.pack(rows, progress=False)
    assert (own.card.digest, own.card.content) == (pack.card.digest, other.card.content)
    assert nb.evaluate(run, pack) == nb.evaluate(run, own)
    assert said not in capsys.readouterr().err
    nb.evaluate(run, other)
    assert said in capsys.readouterr().err
    table = rows[rows.a > 0]
    assert run.predict(table, all=True).index.equals(table.index)
    with pytest.raises(TrainError, match="run must be a Run, its folder or a TrainState, got Net"):
        nb.evaluate(cast(Any, run.model()), pack)


def test_another_device_or_place_of_the_same_files_is_no_other_run_nor_a_stream_without_isatty(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=str, flush=str))
    for place, device, done in (("one", "cuda", 2), ("two", "cpu", 4)):
        Path(place).mkdir()
        for i in range(12):
            Image.new("L", (8, 8), i).save(f"{place}/{i}.png")
        rows = pd.DataFrame({"file": [f"{Path(place).absolute()}/{i}.png" for i in range(12)], "y": ["a", "b"] * 6})
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
        vars(net)["device"] = device
        plan = PLAN.replace(epochs=done, batch_size=4)
        assert epochs(fit(nb.pack(rows, image="file", target="y"), plan, "r", nb.classify(net), progress=True)) == done


def test_a_kept_run_that_may_only_be_read_is_continued_and_left_as_it_is(pack, monkeypatch):
    fit(pack, PLAN, "r", keep="kept")
    kept = {path.name: path.read_bytes() for path in Path("kept").iterdir()}
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    run = fit(pack, PLAN.replace(epochs=4), "another session's", keep="kept")
    assert (epochs(run), "kept may only be read" in " ".join(run.events)) == (4, True)
    assert kept == {path.name: path.read_bytes() for path in Path("kept").iterdir()}


def test_fresh_starts_over_and_leaves_other_files_alone(pack):
    fit(pack, PLAN, "r")
    Path("r/thesis.txt").write_text("mine")
    run = fit(pack, PLAN.replace(epochs=1, lr=0.1), "r", task(nn.Tanh), fresh=True)
    assert (epochs(run), nb.Run.open("r", task(nn.Tanh)).plan.lr) == (1, 0.1)
    assert Path("r/thesis.txt").read_text() == "mine"
    Path("r").rename("out")
    disk.remove(Path("out/run.json"))
    disk.remove(Path("out/card.json"))
    refused(pack, PLAN, "out", says="out holds .*, but no run; name another folder", error=CheckpointError)


def test_a_lost_folder_comes_back_and_a_kept_run_that_is_further_is_taken_over(pack, monkeypatch):
    monkeypatch.setenv("HOME", str(Path.cwd()))
    fit(pack, PLAN, "pc", keep="kept")
    fit(pack, PLAN.replace(epochs=4), "colab", keep="kept")
    Path("pc/thesis.txt").write_text("mine")
    run = fit(pack, PLAN.replace(epochs=5), "~/pc", keep="~/kept")
    assert (run.folder / "thesis.txt").read_text() == "mine"
    assert [row["epoch"] for row in run.history.of("epoch")] == [0, 1, 2, 3, 4]
    assert texts(run, "change") == ["epochs 2 → 4", "epochs 4 → 5"]
    assert epochs(nb.Run.open("kept", task())) == 5


def test_a_kept_run_that_was_trained_on_elsewhere_since_the_last_copy_is_not_mixed_with_this_one(pack):
    fit(pack, PLAN.replace(epochs=1), "pc", keep="kept")
    fit(pack, PLAN, "pc")  # and the copy does not get it
    fit(pack, PLAN.replace(epochs=3), "colab", keep="kept")
    longer, says = PLAN.replace(epochs=4), r"pc \(step 8\) and .*/kept \(step 12\) were trained separately"
    refused(pack, longer, "pc", says=says, error=CheckpointError, keep="kept")
    fit(pack, PLAN, "pc", keep="other")
    assert epochs(fit(pack, longer, "pc", keep="other")) == 4, "a copy that is behind is no obstacle"


def test_a_folder_that_is_moved_while_it_trains_ends_the_run_and_its_copy_stays(pack):
    def move(record, run):
        return record.kind == "step" and record.step == -(-pack.splits["train"] // 16) and run.folder.rename("away")

    with pytest.raises(CheckpointError, match="r was moved or deleted while it trained; put it back, and run it again"):
        fit(pack, PLAN, "r", keep="kept", callbacks=[move])
    assert not Path("kept/run.json").exists()
    fit(pack, PLAN, "away", keep="kept")
    refused(pack, PLAN, "r", says="r holds files but no run", error=CheckpointError, keep="kept")


def test_neither_two_runs_nor_the_files_of_others_are_mixed_with_a_kept_run(pack):
    fit(pack, PLAN, "r", keep="kept")
    fit(pack, PLAN, "other")
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("mine")
    for folder, says in {
        "other": "kept holds a different run from other",
        "mine": "holds files but no run",
        "kept": "is the run's own folder",
        None: "needs run=",
    }.items():
        refused(pack, PLAN, folder, says=says, error=CheckpointError, keep="kept")
    refused(pack, PLAN.replace(seed=1), "new", says=r"name another run= \(and keep=\)", keep="kept")
    assert not Path("new").exists(), "what was copied from there has gone again"
    says = "which fresh=True does not replace; name another keep="
    refused(pack, PLAN, "r", says=says, error=CheckpointError, keep="kept", fresh=True)
