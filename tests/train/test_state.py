"""The state of a run that somebody changes between its parts: optimizer state by name, the best by its metric, and a
network that does not fit its data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from acting import QUIET
from torch import nn

import nbtools as nb


def points(count: int = 96) -> list[tuple[np.ndarray, int]]:
    x = np.random.default_rng(0).normal(size=(count, 8)).astype(np.float32)
    return [(row, int(row[0] > 0) + int(row[1] > 0)) for row in x]


@pytest.fixture(scope="module")
def pack(tmp_path_factory) -> nb.Pack:
    return nb.pack(points(), into=tmp_path_factory.mktemp("points") / "pack", progress=False)


class Net(nn.Module):
    """x (B, 8) → logits (B, 3). Its body, of unlike shapes, comes first, or its head."""

    def __init__(self, head_first: bool = False):
        super().__init__()
        if head_first:
            self.head = nn.Linear(5, 3)
        self.body = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU())
        self.head = nn.Linear(5, 3) if not head_first else self.head

    def forward(self, x):
        return self.head(self.body(x))


def plan(**more: Any) -> nb.Plan:
    return nb.Plan(**{"epochs": 1, "batch_size": 16, "lr": 1e-2, "schedule": "constant", **more})


def trained(net: nn.Module, pack: nb.Pack, settings: nb.Plan) -> nb.TrainState:
    state = nb.TrainState(nb.classify(net), pack, settings)
    for _ in nb.train(nb.classify(net), state, pack):
        continue
    return state


def moments(state: nb.TrainState) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.tensors().items() if name.startswith("optimizer.")}


# -- by name


@pytest.mark.parametrize("settings", [{}, {"optimizer": "sgd"}, {"ema": 0.9}], ids=["adamw", "sgd", "ema"])
def test_moments_go_to_the_parameters_of_their_name_and_new_ones_start_without(pack, settings):
    """A frozen body, then all trained, with the parameters in another order; and the reverse."""
    frozen, whole = Net(), Net(head_first=True)
    frozen.body.requires_grad_(False)
    for before, after in ((frozen, whole), (whole, frozen)):
        old = trained(before, pack, plan(**settings))
        state = nb.TrainState(nb.classify(after), pack, plan(epochs=2, **settings))
        state.load(old.tensors(), old.facts())
        ours, theirs = moments(state), moments(old)
        trainable = [name for name, p in after.named_parameters() if p.requires_grad]
        assert {name.removeprefix("optimizer.").rpartition(".")[0] for name in ours} == set(trainable)
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]) if name in theirs else not tensor.any(), name
        said = [event for event in state.events if "without moments" in event]
        assert bool(said) == (after is whole)
        assert all("body.0.weight, body.0.bias, body.2.weight and 1 more" in event for event in said)
        for _ in nb.train(nb.classify(after), state, pack):
            continue
        assert all(torch.isfinite(p).all() for p in state.model.parameters())


def test_moments_of_another_shape_are_refused(pack):
    old = trained(Net(), pack, plan())
    tensors = old.tensors()
    tensors["optimizer.head.weight.exp_avg"] = torch.zeros(3, 4)
    state = nb.TrainState(nb.classify(Net()), pack, plan())
    with pytest.raises(nb.NbtoolsError, match=r"optimizer state of head.weight has the shape \(3, 4\).*has \(3, 5\)"):
        state.load(tensors, old.facts())


# -- the best


def scored(pack: nb.Pack, values: list[float], losses: list[float], **more: Any) -> nb.TrainState:
    """A run whose evaluations give these values and losses."""
    calls: list[int] = []

    def metric(outputs, batch):
        size = len(batch["y"])
        return values[len(calls) - 1] * size, size

    def loss(outputs, y):
        if not torch.is_grad_enabled() and len(y) == pack.splits["val"]:
            return outputs.sum() * 0 + losses[len(calls) - 1]
        return nn.functional.cross_entropy(outputs, y)

    task = nb.classify(Net(), metrics=[metric], loss=loss)
    task.BEST = "metric"
    state = nb.TrainState(task, pack, plan(epochs=len(values), **more))
    best: list[int] = []
    for record in nb.train(task, state, pack):
        if record.kind == "step":
            calls[:] = range(record.epoch + 1)
        if record.kind == "epoch" and state.improved:
            best.append(record.epoch + 1)
            state.improved = False
    state.chosen = best  # pyright: ignore[reportAttributeAccessIssue]
    return state


def test_ties_go_to_the_lower_loss_and_then_to_the_later_epoch_but_end_no_patience(pack):
    state: Any = scored(pack, [0.5, 0.7, 0.7, 0.7, 0.7], [1.0, 0.5, 0.6, 0.4, 0.4])
    assert state.chosen == [1, 2, 4, 5]
    assert state.best.stale == 3
    early: Any = scored(pack, [0.7] * 9, [0.5] * 9, early_stop=3)
    assert early.epoch == 4
    assert "did not improve in 3 evaluations" in early.stopped


# -- a network that does not fit


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(100, 3)

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1))


IMAGES = [(np.full((12, 12, 3), 20 * i, np.uint8), i % 3) for i in range(12)] * 3
UNFIT: dict[str, tuple[Any, Any, str]] = {  # a network, items, what is said
    "width": (nn.Linear(64, 3), points(40), r"does not take the pack's x float32 \(8\).* \(\d+x8 and 64x3\)"),
    "flatten": (Pictures(), IMAGES, r"x uint8 \(12, 12, 3\).* \(\d+x400 and 100x3\)"),
}


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("given", [plan(), None], ids=["plan", "no plan"])
def test_a_network_that_does_not_fit_is_refused_with_the_shapes_before_a_folder_exists(tmp_path, name, given):
    network, items, said = UNFIT[name]
    pack = nb.pack(items, into=tmp_path / "pack", progress=False)
    torch.manual_seed(5)
    random = torch.get_rng_state()
    with pytest.raises(nb.NbtoolsError, match=said):
        nb.fit(nb.classify(network), pack, given, run=tmp_path / "run", **QUIET)
    assert not (tmp_path / "run").exists()
    assert torch.equal(torch.get_rng_state(), random)
