"""The learning-rate range test: it ends where a closed form says, steps as training does, and leaves no trace."""

import json
import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import toy
from test_lr import bowl

from nbtools.errors import TrainError
from nbtools.measure import find_batch, lr_sweep, receipt, step_profile
from nbtools.train import TrainState

CPU = torch.device("cpu")
SGD = toy.PLAN.replace(optimizer="sgd", betas=(0.0, 0.9), clip_norm=None)


@pytest.fixture(scope="module")
def found(pack) -> Any:
    return lr_sweep(toy, pack, toy.PLAN, high=100.0)


@pytest.mark.parametrize("curvature", [20.0])
def test_a_bowl_is_lost_just_above_two_over_its_curvature_and_the_suggestion_lies_below(pack, curvature):
    found = lr_sweep(bowl(curvature, 1.0), pack, SGD, low=1e-4 / curvature, high=1e2 / curvature)
    edge = 2 / curvature
    assert found.lost is not None
    assert edge < found.lost < 2 * edge
    assert found.suggestion is not None
    assert edge / 100 < found.suggestion < edge / 2
    assert all(math.isfinite(loss) for loss in found.losses)


@pytest.mark.usefixtures("fp16_on_cpu")
def test_steps_that_fp16_leaves_out_leave_the_lrs_and_the_number_of_losses_as_they_are(pack, monkeypatch):
    plan = toy.PLAN.replace(amp="fp16")
    smooth_way = lr_sweep(toy, pack, plan, steps=30)
    scaler = torch.amp.GradScaler  # one whose first gradients overflow, until it finds its scale
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device: scaler(device, init_scale=2.0**24))
    found = lr_sweep(toy, pack, plan, steps=30)
    assert found.skipped > 0 == smooth_way.skipped
    assert found.lrs == smooth_way.lrs
    assert len(found.losses) == len(found.lrs)
    assert f"{found.skipped} that fp16 skipped" in str(found)


QUICK = toy.PLAN.replace(deterministic=True, ema=0.9)
MEASURED = {
    "finder": lambda task, pack: find_batch(task, pack, QUICK, CPU, 0.5, most=8),
    "profile": lambda task, pack: step_profile(task, pack, QUICK.replace(micro_batch_size=5), CPU, 0.1),
    "sweep": lambda task, pack: lr_sweep(task, pack, QUICK, steps=25),
    "receipt": lambda task, pack: receipt(task, pack, QUICK, seconds=0.02),
}


@pytest.mark.parametrize("name", MEASURED)
def test_measuring_leaves_no_model_in_memory_and_all_else_as_it_was(pack, name):
    made, state = [], TrainState(toy, pack, toy.PLAN)
    kept = {name: value.clone() for name, value in state.tensors().items()}

    def model(card, plan):
        found = toy.model(card, plan)
        made.append(weakref.ref(found))
        return found

    torch.manual_seed(7)
    before = torch.get_rng_state(), repr(np.random.get_state(legacy=False))
    assert MEASURED[name](toy.with_(model=model), pack)
    assert [ref() for ref in made] == [None] * len(made) != []
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert repr(np.random.get_state(legacy=False)) == before[1]
    assert all(torch.equal(value, kept[name]) for name, value in state.tensors().items())


@pytest.mark.parametrize("name", MEASURED)
def test_a_module_that_a_task_hands_out_each_time_is_not_trained(pack, name):
    network = toy.Net(16, 0.1)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    MEASURED[name](toy.with_(model=lambda card, plan: network), pack)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_the_same_seed_gives_the_same_curve_and_slow_steps_are_fewer_steps(pack, found):
    again = lr_sweep(toy, pack, toy.PLAN, high=100.0)
    assert (again.lrs, again.losses, again.suggestion) == (found.lrs, found.losses, found.suggestion)
    assert len(lr_sweep(toy, pack, toy.PLAN, seconds=1e-3).lrs) == 25


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.0, 0.1)])
def test_a_range_that_is_none_and_too_few_steps_are_refused(pack, low, high):
    with pytest.raises(TrainError, match="lr_sweep needs 0 < low < high"):
        lr_sweep(toy, pack, toy.PLAN, low=low, high=high)
    with pytest.raises(TrainError, match="steps must be at least 25"):
        lr_sweep(toy, pack, toy.PLAN, steps=10)


def test_a_sweep_is_plain_json_and_shows_the_suggestion(pack, found):
    assert type(found).from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found
    assert str(found).startswith(f"lr {found.suggestion:.2g}: ")
    lost = lr_sweep(toy, pack, SGD, low=1e10, high=1e30)
    assert "no suggestion" in str(lost)
    assert lost._repr_png_().startswith(b"\x89PNG")
