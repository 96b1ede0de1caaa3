"""Indices out of range are found before training, by their sample: on a GPU they would end the process's use of it."""

from typing import Any

import numpy as np
import pytest
import torch
import toy
from acting import QUIET, acting, same
from torch import nn
from torch.nn import functional as F

import nbtools as nb
from nbtools.data import build_pack
from nbtools.errors import TrainError
from nbtools.train import indices
from nbtools.train.indices import extremes, outermost

pytestmark = pytest.mark.usefixtures("own_cache", "everywhere")
KNOWN = 5  # what a network has places for


@pytest.fixture
def everywhere(monkeypatch):
    """As on CUDA, whose kernels check no index."""
    monkeypatch.setattr(indices, "DEVICES", ("cuda", "cpu"))


class Tokens(nn.Module):
    """Tokens x (B, T) → logits (B, 3), with an embedding of positions too where there are any."""

    def __init__(self, tokens: int = 100, positions: int = 0):
        super().__init__()
        self.tokens, self.last = nn.Embedding(tokens, 4), nn.Linear(4, 3)
        self.positions = nn.Embedding(positions, 4) if positions else None

    def forward(self, x):
        found = self.tokens(x)
        if self.positions is not None:
            found = found + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.last(found.mean(1))


def texts(lengths: Any) -> list[tuple[np.ndarray, int]]:
    """Sequences of small tokens, of three classes; the 30th has token 60."""
    found = [(np.full(n, i % 7), i % 3) for i, n in enumerate(lengths)]
    found[30][0][-1] = 60
    return found


class Own(nb.Task):
    """A loss of x (B, 6) whole numbers, one of which is out of its range."""

    def __init__(self, loss: Any):
        self.own = loss

    def model(self, card, plan):
        return nn.Linear(6, KNOWN)

    def infer(self, model, batch, plan):
        return self.model_of(batch, model)

    def model_of(self, batch, model):
        return model(batch["x"].float())

    def loss(self, model, batch, plan):
        return self.own(model(batch) if not isinstance(model, nn.Module) else self.model_of(batch, model), batch["x"])


def mask(logits, x):
    """Logits (B, K, 2, 3) of x as a label image; 250 counts for nothing."""
    return F.cross_entropy(logits[:, :, None, None].expand(-1, -1, 2, 3), x.view(-1, 2, 3).long(), ignore_index=250)


def spelled(logits, x):
    """x as texts of one to six characters, padded with 99."""
    lengths = 1 + torch.arange(len(x)) % 6
    x = x.masked_fill(torch.arange(6) >= lengths[:, None], 99)
    return F.ctc_loss(logits.log_softmax(1).expand(20, -1, -1), x, torch.full((len(x),), 20), lengths)


LOSSES = {
    "classes": (lambda logits, x: F.cross_entropy(logits, x[:, 0].long()), "a class in the loss is 60"),
    "masks": (mask, "a class in the loss is 60"),
    "texts of CTC": (spelled, "a class in the CTC loss is 60"),
    "gather": (lambda logits, x: logits.gather(1, x.long()).mean(), "an index to gather, scatter or select is 60"),
    "an index": (lambda logits, x: logits[torch.arange(len(x)), x[:, 0].long()].mean(), "an index is 60"),
    "scatter": (
        lambda logits, x: (logits * torch.zeros_like(logits).scatter(1, x.long(), 1.0)).mean(),
        "an index to gather, scatter or select is 60",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_has_no_class_for_is_named_by_its_sample_before_the_first_step(tmp_path, name):
    loss, rule = LOSSES[name]
    x = np.ones((40, 6), np.int64)
    if name == "masks":
        x[:, 3:] = 250
    x[30, :1] = 60
    plan, folder = nb.Plan(epochs=1, batch_size=8), tmp_path / "run"
    with pytest.raises(TrainError, match=rf"sample 30 \(.*\): {rule}, where (0|-{KNOWN}) to {KNOWN - 1} are allowed"):
        nb.fit(Own(loss), nb.pack([{"x": row} for row in x], progress=False), plan, folder, receipt=False)
    x[30, :1] = 2
    run = nb.fit(Own(loss), nb.pack([{"x": row} for row in x], progress=False), plan, tmp_path / "right", receipt=False)
    assert len(run.history.of("epoch")) == 1


@pytest.mark.parametrize("kind", ["a float", "of a column that is too large to be read whole"])
def test_a_class_is_named_by_its_sample_also_if_it_is(kind, tmp_path, monkeypatch):
    x = np.ones((40, 6), np.float32 if kind == "a float" else np.int64)
    x[30 : 31 if kind == "a float" else None, 0] = 60  # which is standardised: 59
    if kind != "a float":
        monkeypatch.setattr(indices, "LARGE", x.nbytes // 5)
        monkeypatch.setattr(indices, "CHUNK", x[0].nbytes)
    pack = nb.pack([{"x": row} for row in x], progress=False)
    rule = r"sample 3\d \(.*\): a class in the loss is (59|60), where 0 to 4 are allowed"
    with pytest.raises(TrainError, match=rule):
        nb.fit(Own(LOSSES["classes"][0]), pack, nb.Plan(epochs=1, batch_size=8), tmp_path / "run", receipt=False)


def test_the_outermost_numbers_of_many_chunks_are_those_of_the_column(monkeypatch):
    monkeypatch.setattr(indices, "CHUNK", 64)
    for seed in range(200):
        draw = np.random.default_rng(seed)
        values = draw.integers(-3, 2 + seed % 9, (60, 3)).astype(draw.choice(["int64", "int8", "float32"]))
        used = draw.random(60) < 0.7
        rows = outermost(values, used)
        numbers = np.unique(values[used])
        assert {*numbers[:2], *numbers[-2:]} <= {*values[rows].ravel()}
        assert used[rows].all()
        assert len(rows) <= 4
    assert outermost(np.ones((0, 3), np.int64), np.ones(0, bool)) == []
    for other in (0.5, np.nan, np.inf):
        assert outermost(np.array([1, 2, 3, other], np.float32), np.ones(4, bool)) == []


@pytest.mark.parametrize(
    ("network", "rule"),
    [
        (Tokens(60), r"sample 30 \(.*\): an index into an embedding is 60, where 0 to 59 are allowed"),
        (Tokens(positions=11), r"sample 17 \(.*\): an index into an embedding is 11, where 0 to 10 are allowed"),
    ],
    ids=["tokens", "positions"],
)
def test_a_token_or_a_position_without_an_embedding_is_named_by_its_sample(tmp_path, network, rule):
    pack = nb.pack(texts([12 if i == 17 else 5 + i % 3 for i in range(40)]), progress=False)
    with pytest.raises(TrainError, match=rule):
        nb.fit(nb.classify(network), pack, nb.Plan(epochs=1, batch_size=8), tmp_path / "run", receipt=False)


def test_a_loss_of_ones_own_with_fewer_outputs_than_classes_is_refused(tmp_path):
    pack = nb.pack([(np.ones(4, np.float32) * i, i % 4) for i in range(40)], progress=False)
    task = nb.classify(nn.Linear(4, 3), loss=nn.CrossEntropyLoss(), metrics=())
    with pytest.raises(
        TrainError, match=r"outputs \(B, 3\) and y \(B,\) int64 of 4 classes: Target 3 is out of bounds"
    ):
        nb.fit(task, pack, nb.Plan(epochs=1, batch_size=8), tmp_path / "run", receipt=False)


def test_a_label_that_a_survey_got_wrong_is_named_by_its_file(tmp_path):
    toy.demo(tmp_path / "raw", 60).joinpath("0_7.npy")
    np.save(tmp_path / "raw" / "9_98.npy", np.zeros(8, np.float32))
    pack = build_pack(tmp_path / "raw", "toy", {"ragged": False}, toy.survey, toy.read, progress=False)
    with pytest.raises(TrainError, match=r"\(9_98.npy\): a class in the loss is 9, where 0 to 3 are allowed"):
        nb.fit(toy, pack, toy.PLAN, tmp_path / "run", receipt=False)


def test_looking_changes_nothing_and_a_task_that_fails_there_is_left_alone(pack, monkeypatch):
    def trained(task: Any, where: tuple[str, ...]) -> list[torch.Tensor]:
        monkeypatch.setattr(indices, "DEVICES", where)
        state = nb.TrainState(task, pack, toy.PLAN.replace(epochs=1), "cpu")
        for _ in nb.train(task, state, pack):
            continue
        return list(state.tensors().values())

    def infer(model, batch, plan):
        if len(batch["x"]) == 2:
            raise RuntimeError("of the task's own")
        return model(batch)

    expected = trained(toy, ())
    for task in (toy, toy.with_(infer=infer)):
        assert all(map(torch.equal, trained(task, ("cpu",)), expected))


def test_an_assertion_of_a_kernel_is_explained_and_the_run_resumes_bit_for_bit(pack, tmp_path):
    def assertion() -> None:
        raise RuntimeError(
            "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
        )

    with pytest.raises(
        TrainError, match=r"out of range on the GPU.*restart it, and run this again with NBTOOLS_DEVICE=cpu"
    ):
        nb.fit(acting({12: assertion}), pack, toy.PLAN, tmp_path / "run", **QUIET)
    run, whole = (nb.fit(toy, pack, toy.PLAN, tmp_path / name, **QUIET) for name in ("run", "whole"))
    assert same(run, whole)


@pytest.mark.parametrize("ragged", [False, True])
def test_the_samples_looked_at_have_the_lowest_and_highest_numbers_and_the_longest_sequence(tmp_path, ragged):
    pack = toy.make_pack(tmp_path, 40, ragged=ragged)
    labels = pack.arrays["label"][:, 0]
    found = extremes(pack)
    assert {*labels[found]} == {0, 1, 2, 3}, "the two lowest and the two highest of four"
    if ragged:
        lengths = pack.lengths("x", np.arange(40))
        assert lengths[found].max() == lengths.max()
    assert len(found) <= 4 + ragged
