"""Task: modules, classes and instances as tasks, the defaults of what they leave out, and how a run finds them."""

import dataclasses
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from acting import QUIET, refused
from torch import nn

import nbtools as nb
from nbtools.errors import CheckpointError, NbtoolsError, TrainError
from tests import toy


class Least(nb.Task):
    def model(self, card, plan):
        return toy.linear(card, plan)

    def loss(self, model, batch, plan):
        return nn.functional.cross_entropy(model(batch), batch["label"][:, 0], reduction="sum"), len(batch["id"])


class Wide(Least):
    def __init__(self, width: int):
        self.width = width


least, wide = Least(), Wide(3)
module: Any = ModuleType("tests.least")  # with the two functions and no more
module.model, module.loss = least.model, least.loss
TASKS = {":Least": Least, ":least": least, ":wide": wide, "tests.toy": toy, "tests.least": module}


@pytest.mark.parametrize("place", TASKS)
def test_a_class_an_instance_and_a_module_train_answer_and_are_found_again(tmp_path, pack, place, monkeypatch):
    monkeypatch.setitem(sys.modules, "tests.least", module)
    task, name = TASKS[place], f"{__name__}{place}" if place[0] == ":" else place
    plan = (toy.PLAN if task is toy else nb.Plan()).replace(epochs=1, batch_size=8)
    nb.fit(task, pack, plan, run=tmp_path / "run", **QUIET)
    run = nb.Run.open(tmp_path / "run")
    assert f'"task": "{name}"' in (tmp_path / "run" / "run.json").read_text()
    assert nb.evaluate(run, pack).keys() >= {"loss"}
    assert len(run.predict_pack(pack, [0, 1, 2])) == 3
    assert run.history.of("epoch")[-1]["val_loss"] > 0
    for ends in (sys.exit, int, lambda _: nn.ReLU):  # which raise, or are no task any more
        monkeypatch.setattr(sys.modules["nbtools.train.task"], "importlib", SimpleNamespace(import_module=ends))
        assert list(nb.runs(tmp_path)["epochs"]) == [1]
        refused(CheckpointError, f"its task '{name}' cannot be imported", nb.Run.open(tmp_path / "run").model)


def test_what_two_functions_leave_out_has_its_default_and_each_of_them_is_asked_for_by_its_name(pack):
    task, x = nb.TrainState(least, pack, nb.Plan(batch_size=8)).task, torch.ones(2, 8)
    assert task.BASELINE.changes_from(nb.Plan()) == {"feed": "auto → workers"}
    assert (task.BEST, task.part(pack, nb.Plan())) == ("-loss", pack)
    assert task.batch({"x": x}, nb.Plan(), None) == {"x": x}
    assert task.metrics(x, {}) == {} == task.suggest(pack.card, "cpu")
    assert task.suggest(dataclasses.replace(pack.card, options={"stored": False}), "cpu")["feed"][0] == "workers"
    assert torch.equal(task.decode(x, pack.card)[1], x[1])
    for lacking, name in (("model", "loss"), ("loss", "model")):
        part: Any = SimpleNamespace(**{name: getattr(least, name)})
        with pytest.raises(TrainError, match=f"has no {lacking}"):
            next(iter(nb.train(part, nb.TrainState(part, pack, nb.Plan(batch_size=8)), pack)))


@dataclass(frozen=True)
class Plan(toy.Plan):
    passes: int = nb.knob(3, "forward passes an answer", least=1, live=True)


def test_a_run_goes_on_and_is_evaluated_with_other_live_settings_and_refuses_the_rest(tmp_path, pack):
    passes, plan = set(), Plan(**{**toy.PLAN.to_dict(), "epochs": 2, "passes": 2})
    own: dict[str, Any] = {"Plan": Plan, "PLAN": plan, "BASELINE": plan}
    task = toy.with_(infer=lambda model, batch, plan: passes.add(plan.passes) or model(batch), **own)
    nb.fit(task, pack, plan, run=tmp_path / "run", **QUIET)
    more = plan.replace(epochs=3)
    run = nb.fit(task, pack, more, run=tmp_path / "run", **QUIET)
    passes.clear()
    nb.evaluate(run, pack, "test", passes=7)
    assert passes == {7}
    assert nb.Run.open(tmp_path / "run", task).plan == more
    for name, said in {"pases": "pases.*passes", "hidden": "Plan.hidden"}.items():
        refused(NbtoolsError, said, nb.evaluate, run, pack, "val", **{name: 8})
