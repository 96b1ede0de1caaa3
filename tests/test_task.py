"""Task: modules, classes and instances as tasks, the defaults of what they leave out, and how a run finds them."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nbtools as nb
from nbtools.data import Entry, Survey
from nbtools.errors import CheckpointError, NbtoolsError, TrainError
from nbtools.live.view import Previews
from tests import toy


class Least(nb.Task):
    """Nothing but what has no default."""

    def model(self, card, plan):
        return nn.Sequential(Pick(), nn.Linear(8, toy.CLASSES))

    def loss(self, model, batch, plan):
        return nn.functional.cross_entropy(model(batch), batch["label"][:, 0], reduction="sum"), len(batch["id"])


class Pick(nn.Module):
    def forward(self, batch):
        return batch["x"]


class Static:
    """No Task: its hooks stand in the class."""

    model = staticmethod(Least().model)
    loss = staticmethod(Least().loss)


class Wide(Least):
    def __init__(self, width: int):
        self.width = width


least, wide = Least(), Wide(3)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("task"), 60)


def module() -> Any:
    """A module with the two functions and no more."""
    made: Any = ModuleType("tests.least")
    made.model, made.loss = least.model, least.loss
    return made


@pytest.mark.parametrize(
    ("task", "name"),
    [
        *((Least, f"{__name__}:Least"), (least, f"{__name__}:least"), (wide, f"{__name__}:wide")),
        *((Static, f"{__name__}:Static"), (toy, "tests.toy"), (module(), "tests.least")),
    ],
    ids=str,
)
def test_a_class_an_instance_and_a_module_train_answer_and_are_found_again(tmp_path, pack, task, name, monkeypatch):
    if name == "tests.least":
        monkeypatch.setitem(sys.modules, name, task)
    plan = (toy.PLAN if task is toy else nb.Plan()).replace(epochs=1, batch_size=8)
    nb.fit(task, pack, plan, run=tmp_path / "run", receipt=False, progress=False)
    run = nb.Run.open(tmp_path / "run")
    assert f'"task": "{name}"' in (tmp_path / "run" / "run.json").read_text()
    assert nb.evaluate(run, pack).keys() >= {"loss"}
    assert len(run.predict_pack(pack, [0, 1, 2])) == 3
    assert run.history.of("epoch")[-1]["val_loss"] > 0


def test_what_two_functions_leave_out_has_its_default(pack):
    state = nb.TrainState(least, pack, nb.Plan(batch_size=8))
    task, x = state.task, torch.ones(2, 8)
    assert task.BASELINE.changes_from(nb.Plan()) == {"feed": "auto → workers"}
    assert task.batch({"x": x}, nb.Plan(), None) == {"x": x}
    assert task.metrics(x, {}) == {} == task.suggest(pack.card, "cpu")
    assert torch.equal(task.decode(x, pack.card)[1], x[1])
    assert task.with_network(nb.Plan(), pack, "large") == nb.Plan()
    assert nb.advise(least, pack, measure=False).plan.batch_size == 8
    assert Previews(state, pack).now() == []
    hooks = {"demo": 1, "survey": 2, "read": 2, "validate": 1, "features": 2, "show": 0}  # and how much each is given
    for refused, count in hooks.items():
        with pytest.raises(NbtoolsError, match=r"test_task:least .*(has no|checks|use the task)"):
            getattr(task, refused)(*["here"] * count)


def test_a_survey_and_a_reader_make_a_pack(tmp_path):
    class Packing(Least):
        def survey(self, folder, options):
            return Survey([Entry(p.name, label=np.array([int(p.name[0])])) for p in folder.iterdir()], list("abcd"))

        def read(self, path, options):
            return {"x": np.load(path)}

    source = toy.demo(tmp_path / "raw", 40)
    pack = Packing().pack(source, val=0.25, into=tmp_path / "pack", progress=False)
    assert sum(pack.splits.values()) == 40
    assert pack.raw is not None
    assert np.array_equal(pack.raw[3]["x"], pack.sample(3)["x"])


def test_a_task_of_a_plan_of_its_own_is_compared_with_that_plan_read_one_by_one():
    class Own(Least):
        PLAN = toy.PLAN

    assert Own().BASELINE.changes_from(toy.PLAN) == {"feed": "auto → workers"}


@pytest.mark.parametrize("lacking", ["model", "loss"])
def test_what_has_no_default_is_asked_for_by_its_name(pack, lacking):
    task: Any = SimpleNamespace(**{name: getattr(least, name) for name in ("model", "loss") if name != lacking})
    with pytest.raises(TrainError, match=f"has no {lacking}"):
        next(iter(nb.train(task, nb.TrainState(task, pack, nb.Plan(batch_size=8)), pack)))


def test_an_object_without_a_name_is_opened_by_giving_it_again(tmp_path, pack):
    task: Any = SimpleNamespace(**vars(toy))
    nb.fit(task, pack, toy.PLAN.replace(epochs=1), run=tmp_path / "run", receipt=False, progress=False)
    with pytest.raises(CheckpointError, match=r"'types:'.*pass task="):
        nb.Run.open(tmp_path / "run")
    assert nb.Run.open(tmp_path / "run", task).predict_pack(pack, [0])[0] in "abcd"
