"""Optimizer state goes to the parameters of its name, also where the network changes between the parts of a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
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
        said = [event for event in state.events if "without saved optimizer state" in event]
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
