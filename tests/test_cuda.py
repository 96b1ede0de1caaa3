"""What only a GPU can show of training: run these first on a machine that has one (`pytest -m cuda`)."""

import pytest
import torch
import toy

import nbtools as nb
from nbtools.measure import step_profile

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of torch, while it compiles

PLAN = toy.PLAN.replace(epochs=2, dropout=0.0)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"))


def trained(pack, plan, evaluating=False):
    """A state after all epochs, evaluated in the middle of each where asked; its losses."""
    state = nb.TrainState(toy, pack, plan)
    losses = []
    for record in nb.train(toy, state, pack):
        losses += [record.values["loss"]] if record.kind == "step" and record.values else []
        state.evaluate_next = evaluating and record.kind == "step"
    return state, losses


def test_streamed_batches_with_evaluations_amid_the_epoch_train_as_resident_ones(pack):
    state, streamed = trained(pack, PLAN.replace(feed="streamed"), evaluating=True)
    assert state.device.type == "cuda"
    assert streamed == pytest.approx(trained(pack, PLAN.replace(feed="resident"))[1], rel=1e-3)


@pytest.mark.parametrize("lever", ["compile", "graph"])
def test_compiled_and_replayed_models_train_to_the_same_losses(pack, lever):
    assert trained(pack, PLAN.replace(**{lever: True}))[1] == pytest.approx(trained(pack, PLAN)[1], rel=0.05)
    assert torch.get_float32_matmul_precision() == "high"


def test_deterministic_training_repeats_its_losses(pack):
    plan = PLAN.replace(deterministic=True)
    assert trained(pack, plan)[1] == trained(pack, plan)[1]


def test_the_moving_average_makes_no_step_wait_for_the_gpu(pack):
    plan = PLAN.replace(ema=0.9)
    assert step_profile(toy, pack, plan, seconds=0.3).syncs == ()
