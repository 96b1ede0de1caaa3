"""Mixed precision: recurrent layers keep float32 under bf16, fp16 is refused on a CPU, and bf16 is advised where it was
measured to be faster and to learn the same. No claim depends on what this machine's CPU can do."""

import copy
import io
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import toy
from simulated import Job
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import nbtools as nb
from nbtools import measure
from nbtools.live import send, surface
from nbtools.tasks import captcha
from nbtools.train import device


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"), count=200)


def own(**changes) -> Any:
    """A task like toy, but for some of its names."""
    names = {name: value for name, value in vars(toy).items() if not name.startswith("__")}
    return type("Own", (), {**names, **changes})


class Reader(nn.Module):
    """Every kind of recurrent layer over eight time steps; what each answered, and was asked, in `seen`."""

    def __init__(self, again: bool = False):
        super().__init__()
        self.inputs = nn.Linear(1, 6)
        self.layers = nn.ModuleDict({"lstm": nn.LSTM(6, 6), "gru": nn.GRU(6, 6), "rnn": nn.RNN(6, 6)})
        self.head = nn.Linear(6, toy.CLASSES)
        self.again = again
        self.seen: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def read(self, x):
        for name, layer in self.layers.items():
            given, (x, _) = x, layer(x)
            self.seen.append((name, given.detach(), x.detach()))
        return x

    def forward(self, batch):
        x = self.inputs(batch["x"].t()[..., None])  # (T, B, 6)
        x = checkpoint(self.read, x, use_reentrant=False) if self.again else self.read(x)
        return self.head(x[-1])


def keeps_float32(network: Reader) -> bool:
    """Whether all that the layers answered is what they answer in float32, bit for bit."""
    alone = copy.deepcopy(network.layers)
    with torch.no_grad():
        return all(
            answer.dtype == torch.float32 and torch.equal(answer, alone[name](given.float())[0])
            for name, given, answer in network.seen
        )


@pytest.mark.parametrize("again", [False, True], ids=["plain", "activations computed again"])
def test_recurrent_layers_compute_in_float32_under_bf16_in_training(pack, again):
    task = own(model=lambda card, plan: Reader(again))
    state = nb.TrainState(task, pack, toy.PLAN.replace(amp="bf16", epochs=1), "cpu")
    network: Any = state.model
    dtypes = set()
    network.head.register_forward_hook(lambda module, given, out: dtypes.add(out.dtype))
    keys = list(state.model.state_dict())
    for record in nb.train(task, state, pack):
        if record.kind == "step":
            break
    assert {name for name, *_ in network.seen} == {"lstm", "gru", "rnn"}
    assert network.seen[0][1].dtype == dtypes.pop() == torch.bfloat16  # the rest is in mixed precision
    assert all(answer.dtype == torch.float32 for *_, answer in network.seen)
    assert list(state.model.state_dict()) == keys
    assert not any("forward" in vars(module) for module in state.model.modules())


def test_they_do_in_evaluation_and_prediction_too(pack, tmp_path):
    networks = []

    def model(card, plan):
        networks.append(Reader())
        return networks[-1]

    task = own(model=model)
    plan = toy.PLAN.replace(amp="bf16", epochs=1)
    run = nb.fit(task, pack, plan, tmp_path / "run", receipt=False, progress=False)
    for answer in (lambda: nb.evaluate(run, pack), lambda: run.predict_pack(pack, [0, 1, 2])):
        networks.clear()
        answer()
        assert networks[-1].seen
        assert keeps_float32(networks[-1])
    copy.deepcopy(networks[-1])
    torch.save(networks[-1], io.BytesIO())


def test_a_forward_of_ones_own_and_packed_sequences_survive(pack):
    """A layer whose forward was replaced by hand keeps it; PackedSequence and a first state are widened as well."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inputs, self.layer, self.head = nn.Linear(1, 6), nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 4)
            mine, self.calls = self.layer.forward, []
            vars(self.layer)["forward"] = lambda *given: (self.calls.append(given), mine(*given))[1]

        def forward(self, batch):
            x = self.inputs(batch["x"][..., None])
            start = x.new_zeros(1, len(x), 6)
            packed = pack_padded_sequence(x, [8] * len(x), batch_first=True)
            out, _ = pad_packed_sequence(self.layer(packed, (start, start))[0], batch_first=True)
            assert out.dtype == torch.float32
            return self.head(out[:, -1])

    task = own(model=lambda card, plan: Packed())
    state = nb.TrainState(task, pack, toy.PLAN.replace(amp="bf16", epochs=1), "cpu")
    network: Any = state.model
    replaced = network.layer.forward
    for _ in nb.train(task, state, pack):
        continue
    assert network.calls
    assert network.layer.forward is replaced


def test_a_step_that_fails_leaves_the_layers_as_they_were(pack):
    def loss(model, batch, plan):
        raise ZeroDivisionError

    task = own(model=lambda card, plan: Reader(), loss=loss)
    state = nb.TrainState(task, pack, toy.PLAN.replace(amp="bf16"), "cpu")
    with pytest.raises(ZeroDivisionError):
        next(iter(nb.train(task, state, pack)))
    assert not any("forward" in vars(module) for module in state.model.modules())


REFUSED = r"Plan.amp = fp16 needs a GPU, and this device is cpu.*; use amp=bf16 or amp=off"


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr(device, "pick", lambda: torch.device("cpu"))


@pytest.mark.usefixtures("cpu")
def test_fp16_on_a_cpu_is_refused_in_a_sentence(pack, tmp_path):
    plan = toy.PLAN.replace(amp="fp16")
    with pytest.raises(nb.NbtoolsError, match=REFUSED):
        nb.TrainState(toy, pack, plan, "cpu")
    with pytest.raises(nb.NbtoolsError, match=REFUSED):
        nb.fit(toy, pack, plan, tmp_path / "run", progress=False)


def test_fp16_on_a_cpu_is_refused_at_the_terminal(tmp_path):
    source = captcha.demo(tmp_path / "raw", count=40)
    places = {"CUDA_VISIBLE_DEVICES": "", "NBTOOLS_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "nbtools", "train", "captcha", "--data", str(source), "--amp", "fp16"]
    command += ["--run", str(tmp_path / "run")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **places})
    assert ran.returncode
    assert "Plan.amp = fp16 needs a GPU" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.usefixtures("cpu")
def test_a_run_on_a_cpu_that_is_asked_for_fp16_says_so_and_goes_on(pack, tmp_path, monkeypatch):
    folder, steps = tmp_path / "run", []

    def batch(raw, plan, draws):
        steps.append(1) if draws is not None else None
        if len(steps) == 5:
            send(folder, [], {"amp": "fp16"})
        return toy.batch(raw, plan, draws)

    monkeypatch.setattr(surface, "LOOK_EVERY", 0.0)
    run = nb.fit(own(batch=batch), pack, toy.PLAN.replace(epochs=2), folder, receipt=False, progress=False)
    assert len(run.history.of("epoch")) == 2
    assert run.plan.amp == "off"
    assert any("Plan.amp = fp16 needs a GPU" in event for event in run.events)


def test_a_run_that_a_gpu_trained_in_fp16_is_read_on_a_cpu_in_float32(pack, tmp_path):
    run = nb.fit(toy, pack, toy.PLAN.replace(epochs=1), tmp_path / "run", receipt=False, progress=False)
    float32 = nb.evaluate(run, pack)
    path = tmp_path / "run" / "plan.json"
    path.write_text(path.read_text().replace('"amp": "off"', '"amp": "fp16"'))
    found = nb.Run.open(tmp_path / "run", toy)
    assert found.plan.amp == "fp16"
    dtypes = []
    hooked = nn.modules.module.register_module_forward_hook(lambda module, given, out: dtypes.append(out.dtype))
    try:
        assert nb.evaluate(found, pack) == float32
    finally:
        hooked.remove()
    assert set(dtypes) == {torch.float32}


@pytest.mark.usefixtures("cpu")
def test_a_precision_is_measured_without_a_trace(pack):
    before, job = torch.get_rng_state(), Job(amp={"bf16": 0.5})
    found = measure.find_precision(job, pack, toy.PLAN, seconds=3.0, clock=job.clock)
    assert found is not None
    assert found.ratio == pytest.approx(2.0)
    assert found.drift is not None
    assert 0 <= found.drift < 0.02
    assert torch.equal(torch.get_rng_state(), before)
