"""A run as an ONNX file: what is in it, that its answers are torch's, and what happens where they cannot be."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import own
import pytest
import torch
import toy
from cases import CASES

import nbtools as nb
from nbtools.__main__ import main
from nbtools.data import collate
from nbtools.errors import TrainError
from nbtools.folder import begin, identity
from nbtools.run import Run
from nbtools.tasks import sign


def a_run(task: Any, pack: nb.Pack, plan: nb.Plan, folder: Path) -> Run:
    """A run that has not trained: with the weights that it starts with, but for batch norms, which have seen data."""
    state = nb.TrainState(task, pack, plan)
    raw = collate([pack.sample(int(i)) for i in pack.ids("train")[:8]], pack.columns)
    with torch.no_grad():
        state.model.train()(state.task.batch(raw, plan, None))
    begin(folder, pack, state, None, state.plan, None, identity(state.task, pack.card, state.model, plan))
    return Run.open(folder, task)


class Named(own.Mean):
    def forward(self, x, x_length):
        return {"hidden": x, "out": super().forward(x, x_length)}


MADE: dict[str, Any] = {name: (case.task, case.plan) for name, case in CASES.items() if not case.large}
MADE["sign gru"] = sign, CASES["sign gru"].plan.replace(normalise="none")
MADE["sign transformer"] = sign, CASES["sign transformer"].plan.replace(normalise="none")
MADE["own"] = nb.classify(Named(3, 2)), own.PLAN
QUICK = "captcha small", "hwdb slim", "sign gru", "own"  # the others are exported the same way


@pytest.mark.parametrize("network", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in MADE])
def test_a_file_gives_the_answers_of_the_run_for_any_batch_and_has_its_card_beside_it(network, tmp_path, capsys):
    """Of any length too, as its last samples have."""
    task, plan = MADE[network]
    pack = own.packed("sequences", tmp_path) if network == "own" else CASES[network].pack(tmp_path / "made", 24)
    run = a_run(task, pack, plan, tmp_path / "run")
    path = run.export(tmp_path / "model.onnx")
    session: Any = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert "on 8 samples its outputs in onnxruntime" in capsys.readouterr().err
    ids = run.readable(pack).ids("train")[-4:]  # none of those that were compared, nor as many
    bound = nb.TrainState(task, pack, plan).task
    batch = bound.batch(collate([pack.sample(i) for i in ids], pack.columns), run.plan, None)
    with torch.no_grad():
        expected = run.model("cpu")(batch)
    expected = [expected["out"]] if isinstance(expected, dict) else expected
    expected = expected if isinstance(expected, tuple | list) else [expected]
    theirs = session.run(None, {one.name: batch[one.name].numpy() for one in session.get_inputs()})
    for ours, given in zip([one for one in expected if isinstance(one, torch.Tensor)], theirs, strict=True):
        np.testing.assert_allclose(given, ours.numpy(), atol=1e-4)
    about = json.loads((tmp_path / "model.json").read_text())
    assert about["card"]["classes"] == pack.classes
    assert about["plan"]["lr"] == plan.lr
    named = {one.name for one in (*session.get_inputs(), *session.get_outputs())}
    assert named <= {**about["inputs"], **about["outputs"]}.keys()


class Restless(toy.Linear):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(batch) + torch.rand(4)


def test_nothing_is_written_of_a_network_that_answers_differently(tmp_path):
    task = toy.with_(model=lambda card, plan: Restless(8, 4))
    run = a_run(task, toy.make_pack(tmp_path / "data", 60), toy.PLAN, tmp_path / "run")
    words = r"cannot export Restless as ONNX: on 8 samples its outputs differ from torch's by .*, above 0\.0001"
    with pytest.raises(TrainError, match=words):
        run.export(tmp_path / "model.onnx")
    assert not list(tmp_path.glob("model*"))


def test_the_samples_are_the_runs_own_while_its_pack_is_there_else_those_of_a_pack_that_is_named(tmp_path, capsys):
    pack = toy.make_pack(tmp_path / "data", 60)
    run = a_run(toy, pack, toy.PLAN, tmp_path / "run")
    moved = pack.folder.rename(tmp_path / "moved")
    words = ["export", str(run.folder), str(tmp_path / "toy.onnx")]
    assert main(words) == 1
    assert str(pack.folder) in capsys.readouterr().err
    assert main([*words, "--pack", str(moved)]) == 0
    assert main(["export", str(run.folder), str(tmp_path / "toy")]) == 0  # safetensors, which need no sample
    assert capsys.readouterr().out.endswith("toy.safetensors\n")
