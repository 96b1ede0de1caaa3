"""A run as an ONNX file: what is in it, that its answers are torch's, and what happens where they cannot be."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import own
import pytest
import torch
import toy
from torch import nn

import nbtools as nb
from nbtools.__main__ import main
from nbtools.data import collate
from nbtools.errors import ExportError, MissingExtra, PackError
from nbtools.folder import begin
from nbtools.run import Run
from nbtools.tasks import captcha, hwdb, segment, sign


def a_run(task: Any, pack: nb.Pack, plan: nb.Plan, folder: Path) -> Run:
    """A run that has not trained: with the weights that it starts with, but for batch norms, which have seen data."""
    state = nb.TrainState(task, pack, plan)
    raw = collate([pack.sample(int(i)) for i in pack.ids("train")[:8]], pack.columns)
    with torch.no_grad():
        state.model.train()(state.task.batch(raw, plan, None))
    begin(folder, pack, state)
    return Run.open(folder, task)


PACKS = {
    "captcha": lambda raw: captcha.pack(captcha.demo(raw, 40, size=(24, 64)), progress=False),
    "lines": lambda raw: captcha.pack(captcha.demo(raw, 40, length=(2, 6)), layout="lines", progress=False),
    "hwdb": lambda raw: hwdb.pack(
        hwdb.demo(raw, 40, characters=12, length=(2, 6), height=64), height=64, progress=False
    ),
    "sign": lambda raw: sign.pack(
        sign.demo(raw, 40, glosses=5, categories=2, frames=(10, 20), features=True), progress=False
    ),
    "segment": lambda raw: segment.pack(segment.demo(raw, 35, size=(48, 64)), progress=False),
}
NETWORKS = {
    "captcha guide": (captcha, "captcha"),
    "captcha small": (captcha, "captcha"),
    "lines ctc": (captcha, "lines"),
    "hwdb hctr": (hwdb, "hwdb"),
    "hwdb slim": (hwdb, "hwdb"),
    "sign transformer": (sign, "sign"),
    "sign gru": (sign, "sign"),
    "segment bisenetv2": (segment, "segment"),
    "segment slim": (segment, "segment"),
}
QUICK = "captcha small", "hwdb slim", "sign gru"  # the others are exported the same way
DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """Name → pack of demo data, made when first asked for."""
    made: dict[str, nb.Pack] = {}

    def pack(name: str) -> nb.Pack:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("NBTOOLS_CACHE", str(folder / "cache"))
                made[name] = PACKS[name](folder / "raw")
        return made[name]

    return pack


def opened(path: Path) -> tuple[Any, dict[str, Any]]:
    """(session, metadata) of a file."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session, {k: json.loads(text) for k, text in session.get_modelmeta().custom_metadata_map.items()}


def answers_of(path: Path, pack: nb.Pack, ids: np.ndarray) -> tuple[list[np.ndarray], dict[str, Any]]:
    """(outputs, metadata) of a file for samples of a pack, with inputs made as its metadata says, by NumPy alone."""
    session, about = opened(path)
    columns = {name: tensor.numpy() for name, tensor in collate([pack.sample(i) for i in ids], pack.columns).items()}
    given = {
        one.name: np.asarray(eval(about["inputs"][one.name]["text"], {**about, "np": np, **columns}), DTYPES[one.type])
        for one in session.get_inputs()
    }
    assert {one.name: one.shape for one in session.get_inputs()} == {
        name: each["shape"] for name, each in about["inputs"].items()
    }
    assert [one.name for one in session.get_outputs()] == list(about["outputs"])
    return session.run(None, given), about


@pytest.mark.parametrize("network", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in NETWORKS])
def test_a_file_alone_gives_the_answers_of_the_run(network, packs, tmp_path, capsys):
    (task, name), (_, choice) = NETWORKS[network], network.split()
    pack = packs(name)
    plan = task.PLAN.replace(network=choice, **({"normalise": "none"} if task is sign else {}))
    run = a_run(task, pack, plan, tmp_path / "run")
    path = run.export(tmp_path / "model.onnx")
    assert "on 8 samples its outputs in onnxruntime" in capsys.readouterr().out
    ids = run.readable(pack).ids("train")[-5:]  # none of those that were compared
    given, about = answers_of(path, pack, ids)
    raw = collate([pack.sample(i) for i in ids], pack.columns)
    with torch.no_grad():
        expected = run.model("cpu")(task.batch(raw, run.plan, None))
    expected = (
        [expected] if isinstance(expected, torch.Tensor) else [e for e in expected if isinstance(e, torch.Tensor)]
    )
    for ours, theirs in zip(expected, given, strict=True):
        np.testing.assert_allclose(theirs, ours.numpy(), atol=1e-4)
    assert about["classes"] == pack.classes
    assert about["plan"]["network"] == choice
    assert about["options"] == pack.options


@pytest.fixture
def run(tmp_path):
    return a_run(toy, toy.make_pack(tmp_path / "data", 60), toy.PLAN, tmp_path / "run")


def with_network(network: type[nn.Module]) -> Any:
    """The toy with another network of a batch."""
    return toy.with_(model=lambda card, plan: network())


class Mean(nn.Module):
    """x (B, L, 3), x_length (B,) → logits (B, 2) of the mean step."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, x_length: torch.Tensor) -> torch.Tensor:
        return self.head(x.sum(1) / x_length[:, None])


@pytest.mark.parametrize("name", ["sequences", "regress"])
def test_a_file_of_an_nb_pack_takes_what_batch_makes_and_answers_as_the_run_does(name, tmp_path):
    task, data = own.TASKS[name]
    task, pack = nb.classify(Mean) if name == "sequences" else task, own.packed(data, tmp_path)
    run = a_run(task, pack, own.PLAN, tmp_path / "run")
    ids = pack.ids("train")[-5:]
    session, about = opened(run.export(tmp_path / "own.onnx"))
    batch = run.task.batch(collate([pack.sample(i) for i in ids], pack.columns), own.PLAN, None)
    [output] = session.run(None, {name: batch[name].numpy() for name in about["inputs"]})
    answers, expected = run.task.decode(torch.from_numpy(output), run.card), run.predict_pack(pack, ids)
    assert [getattr(one, "name", None) for one in answers] == [getattr(one, "name", None) for one in expected]
    numbers = [[getattr(one, "probability", one) for one in ones] for ones in (answers, expected)]
    np.testing.assert_allclose(numbers[0], numbers[1], rtol=1e-4)
    assert all(one["text"] for kind in ("inputs", "outputs") for one in about[kind].values())


class Restless(nn.Module):
    """Answers differently at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 4), 0

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        return self.layer(batch["x"]) + self.calls


class Chooser(nn.Module):
    """Takes a branch by what the data is, which no graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.layer(batch["x"]) if batch["x"].sum() > 0 else -self.layer(batch["x"])


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (
            Restless,
            r"cannot export Restless as ONNX: on 8 samples its outputs .* differ .* up to .*, and at most 0\.0001 is",
        ),
        pytest.param(Chooser, r"cannot export Chooser .*; nothing was", marks=pytest.mark.full),
    ],
)
def test_nothing_is_written_of_a_network_that_answers_differently_or_cannot_be_exported(network, words, tmp_path):
    task = with_network(network)
    run = a_run(task, toy.make_pack(tmp_path / "data", 60), toy.PLAN, tmp_path / "run")
    with pytest.raises(ExportError, match=words):
        run.export(tmp_path / "model.onnx")
    assert not list(tmp_path.glob("model*"))


def test_a_task_that_does_not_say_what_its_network_reads_is_refused(tmp_path):
    task = toy.with_()
    del task.tensors
    run = a_run(task, toy.make_pack(tmp_path / "data", 60), toy.PLAN, tmp_path / "run")
    with pytest.raises(ExportError, match=r"has no tensors\(card, plan\), .*; define it, or leave \.onnx out"):
        run.export(tmp_path / "model.onnx")


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_without_a_package_that_is_needed_the_sentence_says_what_to_install(package, run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r"needs onnx .*: pip install .* onnxruntime, or nbtools\[onnx\]"):
        run.export(tmp_path / "toy.onnx")


def test_the_samples_are_the_runs_own_while_its_pack_is_there_else_those_of_a_pack_that_is_named(tmp_path, capsys):
    pack = toy.make_pack(tmp_path / "data", 60)
    run = a_run(toy, pack, toy.PLAN, tmp_path / "run")
    moved = pack.folder.rename(tmp_path / "moved")
    with pytest.raises(PackError, match=r"the pack that it was trained on is no longer at .*pack; name one with pack="):
        run.export(tmp_path / "toy.onnx")
    words = ["export", str(run.folder), str(tmp_path / "toy.onnx")]
    assert main(words) == 1
    assert main([*words, "--pack", str(moved)]) == 0
    assert "differ from torch's by at most" in capsys.readouterr().err
    assert opened(tmp_path / "toy.onnx")[1]["task"] == "toy"
    assert main(["export", str(run.folder), str(tmp_path / "toy")]) == 0  # safetensors, which need no sample
    assert capsys.readouterr().out.endswith("toy.safetensors\n")
