"""Batch, forward pass and loss of each network on a pretended GPU: PyTorch's CUDA build checks devices, dtypes and
shapes of tensors without data. What mixes devices or needs a value on the host raises.

`make fake-cuda` runs it, with Colab's Python and torch. Backward passes do not run in that mode."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nbtools.data import Draws, gather
from nbtools.measure.examples import EXAMPLES, Bench, NotHere
from nbtools.train import DTYPES
from nbtools.train.device import recurrent_in_float32

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(torch.version.cuda is None, reason="needs PyTorch's CUDA build: make fake-cuda"),
]
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("examples"), CUDA)


def cases():
    bench = Bench(None, CUDA)  # pyright: ignore[reportArgumentType]  (its data are made later)
    for name in EXAMPLES:
        for network in bench.networks(name):
            yield from (
                pytest.param(name, network, amp, id=f"{name}-{network}-{amp}") for amp in ("off", "bf16", "fp16")
            )


def ctc_loss(log_probs, targets, input_lengths, target_lengths, **_):
    """torch's has no kernel for pretended tensors. Its lengths must be on the host, to which it copies them."""
    assert log_probs.device == CUDA
    assert log_probs.dtype == torch.float32
    assert targets.device == CUDA
    return log_probs.sum()


def recurrent(layer, x, state=None):
    """The output of an LSTM or a GRU; cuDNN's has no kernel for pretended tensors either."""
    return x.new_zeros(*x.shape[:2], layer.hidden_size * (1 + layer.bidirectional)), state


@pytest.fixture(scope="module")
def pretending():
    """One mode for all, since tasks keep tables between calls."""
    return FakeTensorMode()


@pytest.mark.parametrize(("name", "network", "amp"), [*cases()])
def test_a_step_needs_no_value_on_the_host_and_mixes_no_devices(bench, pretending, name, network, amp, monkeypatch):
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: True)
    monkeypatch.setattr("torch.nn.functional.ctc_loss", ctc_loss)
    monkeypatch.setattr("torch.nn.GRU.forward", recurrent)
    monkeypatch.setattr("torch.nn.LSTM.forward", recurrent)
    try:
        case = bench.case(name, network)
    except NotHere as why:
        pytest.skip(str(why))
    augmented = {f.name: 1.0 for f in dataclasses.fields(case.plan) if f.name == "augment"}
    plan, raw = case.plan.replace(amp=amp, **augmented), gather(case.pack, case.pack.ids("train")[:8])
    with pretending:
        with CUDA:
            model = case.task.model(case.pack.card, plan)
        moved = {key: torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA) for key, tensor in raw.items()}
        batch = case.task.batch(moved, plan, Draws(plan.seed, 0, moved["id"]))
        with recurrent_in_float32(plan, CUDA, model), torch.autocast("cuda", DTYPES.get(amp), enabled=amp != "off"):
            total, count = case.task.loss(model, batch, plan)
    assert total.device == CUDA
    assert total.shape == ()
    assert not isinstance(count, torch.Tensor) or count.device == CUDA
