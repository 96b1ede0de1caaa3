"""A run evaluated on data that it has not seen: in one call all of it is test, read with the run's own classes."""

import importlib
import json
from typing import Any

import pytest
from acting import QUIET

import nbtools as nb
from nbtools.__main__ import main
from nbtools.errors import TrainError

pytestmark = pytest.mark.usefixtures("own_cache")
SMALL = {"size": (24, 64)}
TASKS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "captcha": ({"count": 40, **SMALL}, {"count": 9, "alphabet": "12", **SMALL}, "whole_accuracy"),
    "hwdb": ({"count": 40, "height": 24, "characters": "AKOSX"}, {"count": 9, "height": 24, "characters": "AK"}, "cer"),
    "sign": ({"count": 24, "glosses": 3, "categories": 2}, {"count": 9, "glosses": 3, "categories": 2}, "cat_accuracy"),
    "segment": ({"count": 14, "size": (48, 48)}, {"count": 7, "size": (48, 48)}, "miou"),
}
"""What a run is trained on, new data (which for captcha and hwdb has fewer characters), and a metric."""


@pytest.mark.parametrize("name", ["captcha", "hwdb", "sign", pytest.param("segment", marks=pytest.mark.full)])
def test_one_call_evaluates_a_new_folder_and_training_on_it_is_refused_in_a_sentence(name, tmp_path, capsys):
    task = importlib.import_module(f"nbtools.tasks.{name}")
    first, second, metric = TASKS[name]
    known, new = task.demo(tmp_path / "known", **first), task.demo(tmp_path / "new", **second, seed=1)
    (new / "classes.txt").unlink(missing_ok=True)  # segment's: the run knows them
    pack = task.pack(known, progress=False)
    plan = nb.advise(task, pack, measure=False).plan.replace(epochs=1, warmup_epochs=0.0)
    run = nb.fit(task, pack, plan, tmp_path / "run", **QUIET)
    every = ["--data", str(new), "--test", "1.0", "--run"]
    capsys.readouterr()
    assert main(["evaluate", name, *every, str(run.folder)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    unseen = run.pack(new, test=1.0, progress=False)
    assert unseen.splits == {"train": 0, "val": 0, "test": second["count"]}
    assert unseen.classes == run.card.classes
    assert found == nb.evaluate(run, unseen)
    assert metric in found
    assert main(["train", name, *every, str(tmp_path / "never")]) == 1
    assert f"training needs at least 2 samples, the train split has 0 of {second['count']}" in capsys.readouterr().err
    with pytest.raises(TrainError, match="training needs at least 2 samples"):
        nb.advise(task, unseen)
    assert not (tmp_path / "never").exists()
