"""A notebook's situations: what the same call, or another one, makes of a run folder that is there."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nbtools as nb
from nbtools.errors import CheckpointError, TrainError
from nbtools.measure import Advice
from nbtools.run import lock
from nbtools.train import Task, checkpoint

QUIET: dict[str, Any] = {"receipt": False, "progress": False}
PLAN = nb.Plan(epochs=2, batch_size=16, lr=1e-2, schedule="constant")


class Net(nn.Module):
    def __init__(self, act=nn.ReLU, drop=0.0):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), act(), nn.Dropout(drop))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    into = tmp_path_factory.mktemp("pack")
    return nb.pack([(each, int(each[0] > 0)) for each in x], into=into, progress=False)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def task(*network, **more) -> Task:
    torch.manual_seed(0)
    return nb.classify(Net(*network), **more)


def fit(pack, plan=None, run=None, who=None, **more) -> nb.Run:
    return nb.fit(who or task(), pack, plan, run, **{**QUIET, **more})


def ask(folder, actions, change=None):
    (folder / "control.json").write_text(json.dumps({"do": actions, **(change or {})}))
    time.sleep(0.11)  # a run looks for requests ten times a second


def stopped(pack, plan, run=None, step=3, change=None, **more) -> nb.Run:
    """A run that is asked for a change, and then to stop, after some steps."""

    class Stopping(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self._count = nn.Linear(4, 2), 0

        def forward(self, x):
            self._count += self.training
            if self.training and self._count in (step, step + 4):
                folder = max(Path().glob("**/run.json"), key=lambda path: path.stat().st_mtime_ns).parent
                if self._count == step + 4:
                    ask(folder, ["stop"])
                elif change:
                    ask(folder, [], change)
            return self.body(x)

    return fit(pack, plan, run, nb.classify(Stopping()), **more)


def facts(folder) -> dict[str, Any]:
    return json.loads((Path(folder) / "run.json").read_text())


def advised(**values) -> Advice:
    plan = PLAN.replace(**values)
    return Advice(plan, dict.fromkeys(plan.to_dict(), "a rule of thumb"))


def epochs(run) -> int:
    return len(run.history.of("epoch"))


# -- run=None


def test_run_all_twice_returns_the_finished_run_and_says_so(pack, capsys):
    first = fit(pack, PLAN)
    again = fit(pack, PLAN)
    assert first.folder == again.folder == Path("runs/net-1")
    assert epochs(again) == 2
    assert "finished" in capsys.readouterr().err


def test_other_settings_start_another_run_and_more_epochs_extend_a_finished_one(pack):
    runs = [fit(pack, PLAN.replace(lr=lr)) for lr in (1e-3, 1e-2)]
    assert [str(run.folder) for run in runs] == ["runs/net-1", "runs/net-2"]
    assert [nb.Run.open(run.folder, task()).plan.lr for run in runs] == [1e-3, 1e-2]
    more = fit(pack, PLAN.replace(epochs=3))
    assert (more.folder.name, epochs(more)) == ("net-2", 3)
    assert fit(pack, PLAN.replace(epochs=2)).folder.name == "net-3"


def test_a_changed_cell_with_another_network_loss_or_metric_starts_another_run(pack):
    assert fit(pack, PLAN).folder.name == "net-1"
    assert fit(pack, PLAN, who=task(nn.Tanh)).folder.name == "net-2"
    assert fit(pack, PLAN, who=task(loss=nn.CrossEntropyLoss(label_smoothing=0.1))).folder.name == "net-3"
    weighted = task(loss=nn.CrossEntropyLoss(torch.tensor([1.0, 2.0])))
    assert fit(pack, PLAN, who=weighted).folder.name == "net-4"
    assert fit(pack, PLAN, who=task(metrics=["f1"])).folder.name == "net-5"
    frozen = Net()
    frozen.body.requires_grad_(False)
    assert fit(pack, PLAN, who=nb.classify(frozen)).folder.name == "net-6"
    assert fit(pack, PLAN).folder.name == "net-1"


def test_the_panel_that_drove_an_unfinished_run_changes_it_and_the_next_notebook_starts_another(pack):
    panel = nb.Panel(advised(epochs=30))
    run = stopped(pack, panel)
    panel.fields["batch_size"].value = "8"
    again = stopped(pack, panel)
    assert again.folder == run.folder
    assert again.plan.batch_size == 8
    [change] = [row["what"] for row in again.history.of("change")]
    assert change.startswith("batch_size 16 → 8")
    other = nb.Panel(advised(epochs=30))
    other.fields["batch_size"].value = "32"
    assert stopped(pack, other).folder != run.folder


def test_without_a_plan_what_the_task_gives_for_a_start_is_another_run(pack, monkeypatch):
    monkeypatch.setattr("nbtools.measure.advisor.measured", lambda task, pack, thumb, *_: thumb)
    runs = [fit(pack, who=task(plan=nb.Plan(lr=lr, epochs=2))) for lr in (1e-3, 1e-2, 1e-3)]
    assert [run.folder.name for run in runs] == ["net-1", "net-2", "net-1"]
    assert runs[0].plan.lr != runs[1].plan.lr
    assert epochs(fit(pack, who=task(plan=nb.Plan(lr=1e-3, epochs=3)))) == 3, "more epochs extend"


def test_a_run_that_another_process_holds_is_refused_without_a_name_too(pack):
    run = fit(pack, PLAN)
    (run.folder / "control.json").write_text("{}")
    with lock(run.folder), pytest.raises(TrainError, match="another process"):
        fit(pack, PLAN)
    assert (run.folder / "control.json").exists(), "a request to the process that trains"


def test_a_refused_call_without_a_name_leaves_no_folder(pack):
    with pytest.raises(TrainError, match="larger than the train split"):
        fit(pack, PLAN.replace(batch_size=10**6))
    assert list(Path("runs").iterdir()) == []


def test_layers_that_are_unfrozen_train_on_in_the_named_folder_and_are_said(pack):
    frozen = Net()
    frozen.body.requires_grad_(False)
    fit(pack, PLAN, "r", nb.classify(frozen))
    run = fit(pack, PLAN.replace(epochs=4), "r")
    assert epochs(run) == 4
    assert "newly trained, without moments from the checkpoint: body.0.weight, body.0.bias" in " ".join(run.events)


# -- restart in the middle


def test_a_live_change_stays_applied_though_the_restarted_kernels_cell_gives_the_old_value(pack):
    run = stopped(pack, PLAN.replace(epochs=30), "r", change={"lr": 0.02})
    assert run.plan.lr == 0.02
    assert facts("r")["given"]["lr"] == PLAN.lr
    assert facts("r")["applied"]["lr"] == 0.02
    for _ in range(2):
        again = stopped(pack, PLAN.replace(epochs=30), "r")
        assert (again.plan.lr, len(again.history.of("change"))) == (0.02, 1)


def test_newly_measured_advice_changes_nothing_in_a_resumed_run_and_is_said(pack, capsys):
    stopped(pack, advised(epochs=30), "r")
    again = stopped(pack, advised(epochs=30, batch_size=32, amp="bf16"), "r")
    assert (again.plan.batch_size, again.plan.amp, again.history.of("change")) == (16, "off", [])
    said = "this run keeps what it has applied so far; the advice would be batch_size 16 → 32, amp off → bf16"
    assert said in capsys.readouterr().err
    again = stopped(pack, advised(batch_size=32).plan.replace(epochs=20), "r")
    assert (again.plan.epochs, again.plan.batch_size) == (20, 16), "only what code gave is a change"
    assert "with epochs 30 → 20" in capsys.readouterr().err


def test_a_fixed_setting_of_an_unfinished_run_is_refused_by_name_and_nothing_is_written(pack):
    stopped(pack, PLAN.replace(epochs=30), "r")
    before = {path.name: path.read_bytes() for path in Path("r").iterdir()}
    with pytest.raises(TrainError, match=r"optimizer adamw → sgd, seed 0 → 1.*fresh=True"):
        stopped(pack, PLAN.replace(epochs=30, optimizer="sgd", seed=1, lr=0.5), "r")
    assert before == {path.name: path.read_bytes() for path in Path("r").iterdir()}


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


# -- finished, named


def test_a_finished_named_run_refuses_another_lr_and_still_shows_its_own(pack):
    fit(pack, PLAN, "r")
    with pytest.raises(TrainError, match=r"finished.*lr 0.01 → 0.1.*fresh=True"):
        fit(pack, PLAN.replace(lr=0.1), "r")
    assert nb.Run.open("r", task()).plan.lr == 0.01
    assert json.loads(Path("r/plan.json").read_text())["lr"] == 0.01


def test_more_epochs_say_the_lr_that_they_mean_before_they_train(pack, capsys):
    fit(pack, PLAN.replace(schedule="cosine"), "r")
    run = fit(pack, PLAN.replace(schedule="cosine", epochs=4), "r")
    assert epochs(run) == 4
    said = "epochs 2 → 4: lr goes on at 0.005, where it had come to 0"
    assert said in capsys.readouterr().err


def test_another_identity_in_a_named_folder_is_refused_with_what_differs(pack):
    fit(pack, PLAN, "r")
    said = r"network: body.1: ReLU\(.*\), body.2: Dropout\(p=0.0.*\) → body.1: Tanh\(\), body.2: Dropout\(p=0.5"
    with pytest.raises(CheckpointError, match=said):
        fit(pack, PLAN.replace(epochs=4), "r", task(nn.Tanh, 0.5))
    with pytest.raises(CheckpointError, match="metrics: "):
        fit(pack, PLAN.replace(epochs=4), "r", task(metrics=["f1"]))


def test_fresh_starts_over_and_leaves_other_files_alone(pack):
    fit(pack, PLAN, "r")
    Path("r/thesis.txt").write_text("mine")
    run = fit(pack, PLAN.replace(epochs=1, lr=0.1), "r", task(nn.Tanh), fresh=True)
    assert (epochs(run), run.plan.lr) == (1, 0.1)
    assert Path("r/thesis.txt").read_text() == "mine"


# -- keep=


def test_a_lost_folder_comes_back_and_a_kept_run_that_is_further_is_taken_over(pack):
    fit(pack, PLAN, "pc", keep="kept")
    fit(pack, PLAN.replace(epochs=4), "colab", keep="kept")
    run = fit(pack, PLAN.replace(epochs=5), "pc", keep="kept")
    assert [row["epoch"] for row in run.history.of("epoch")] == [0, 1, 2, 3, 4]
    assert [row["what"] for row in run.history.of("change")] == ["epochs 2 → 4", "epochs 4 → 5"]
    assert epochs(nb.Run.open("kept", task())) == 5


def test_neither_two_runs_nor_the_files_of_others_are_mixed_with_a_kept_run(pack):
    fit(pack, PLAN, "r", keep="kept")
    fit(pack, PLAN, "other")
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("mine")
    refused = {
        "other": "kept holds a different run than other",
        "mine": "holds files but no run",
        "kept": "is the folder of a run itself",
    }
    for folder, words in refused.items():
        with pytest.raises(CheckpointError, match=words):
            fit(pack, PLAN, folder, keep="kept")
    with pytest.raises(CheckpointError, match="which fresh=True does not replace; name another keep="):
        fit(pack, PLAN, "r", keep="kept", fresh=True)
    with pytest.raises(CheckpointError, match="needs run="):
        fit(pack, PLAN, keep="kept")
    assert Path("mine/thesis.txt").read_text() == "mine"
    assert epochs(nb.Run.open("kept", task())) == 2


# -- what is said and recorded


def test_whoever_looks_at_a_run_that_begins_sees_a_whole_one_or_none(pack, monkeypatch):
    real, opened = checkpoint.mark, []

    def mark(folder, **entries):
        index = real(folder, **entries)
        opened.append(nb.Run.open(folder, task()).plan.lr)
        return index

    monkeypatch.setattr(checkpoint, "mark", mark)
    fit(pack, PLAN, "r")
    fit(pack, PLAN.replace(lr=0.1), "r", fresh=True)
    assert {opened[0], opened[-1]} == {0.01, 0.1}
