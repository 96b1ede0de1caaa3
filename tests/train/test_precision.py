"""Mixed precision: the same loss, nothing left switched on, recurrent layers in float32 under bf16, fp16 on a GPU only;
and parts that are computed twice. No claim depends on what this machine's CPU can do."""

import re
from typing import Any

import pytest
import torch
import toy
from acting import QUIET
from torch import nn
from torch.utils.checkpoint import checkpoint

import nbtools as nb
from nbtools.__main__ import main
from nbtools.train import Diverged


def losses(state, pack):
    return [r.values["loss"] for r in nb.train(state.task, state, pack) if r.kind == "step" and r.values]


@pytest.mark.usefixtures("fp16_on_cpu")
@pytest.mark.parametrize(("amp", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_mixed_precision_trains_to_about_the_same_loss_and_leaks_nothing(pack, amp, dtype):
    expected = losses(nb.TrainState(toy, pack, toy.PLAN, "cpu"), pack)[-1]
    mixed, seen, logged = nb.TrainState(toy, pack, toy.PLAN.replace(amp=amp), "cpu"), set(), []
    mixed.network.register_forward_hook(lambda m, i, out: seen.add(out.dtype))
    for record in nb.train(toy, mixed, pack):
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        logged += [record.values["loss"]] if "loss" in record.values else []
    assert logged[-1] == pytest.approx(expected, rel=0.1)
    assert seen == {dtype}


def overflowing(model, batch, plan):
    """Gradients that are infinite under fp16, whatever their scale; the loss is a number."""
    total, count = toy.loss(model, batch, plan)
    if plan.amp == "fp16" and total.requires_grad:
        total.register_hook(lambda gradient: gradient * float("inf"))
    return total, count


@pytest.mark.usefixtures("fp16_on_cpu")
def test_fp16_that_skips_every_step_ends_with_what_to_do_and_the_run_continues_without_it(pack, tmp_path):
    task, plan = toy.with_(loss=overflowing), toy.PLAN.replace(amp="fp16", epochs=20)
    said = (
        r"diverged at amp fp16: gradients overflow in every step, .* from step \d+, set amp=off, or amp=bf16 on a GPU"
    )
    for _ in range(2):  # run again as it is, it says so at once
        with pytest.raises(Diverged, match=said) as caught:
            nb.fit(task, pack, plan, tmp_path / "run", **QUIET)
    assert caught.value.steps[1] <= 45
    run = nb.Run.open(tmp_path / "run", task)
    assert run.state == "diverged"
    run = nb.fit(task, pack, plan.replace(amp="off", epochs=12), tmp_path / "run", **QUIET)
    assert run.history.of("step")[-1]["loss"] < 0.5 * run.history.of("step")[0]["loss"]


# -- recurrent layers


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


@pytest.mark.parametrize("again", [False, True], ids=["plain", "activations computed again"])
def test_recurrent_layers_compute_in_float32_under_bf16_in_training(pack, again):
    task = toy.with_(model=lambda card, plan: Reader(again))
    state = nb.TrainState(task, pack, toy.PLAN.replace(amp="bf16", epochs=1), "cpu")
    network: Any = state.model
    dtypes = set()
    network.head.register_forward_hook(lambda module, given, out: dtypes.add(out.dtype))
    next(nb.train(task, state, pack))
    assert {name for name, *_ in network.seen} == {"lstm", "gru", "rnn"}
    assert network.seen[0][1].dtype == dtypes.pop() == torch.bfloat16  # the rest is in mixed precision
    assert all(answer.dtype == torch.float32 for *_, answer in network.seen)


# -- fp16 on a CPU

REFUSED = r"Plan.amp = fp16 needs a GPU, but this device is cpu.*; use amp=bf16 or amp=off"


@pytest.mark.usefixtures("own_cache")
def test_fp16_on_a_cpu_is_refused_in_a_sentence(pack, tmp_path, capsys):
    with pytest.raises(nb.NbtoolsError, match=REFUSED):
        nb.fit(toy, pack, toy.PLAN.replace(amp="fp16"), tmp_path / "run", progress=False)
    source = toy.demo(tmp_path / "raw", 40)
    assert main(["train", "toy", "--data", str(source), "--amp", "fp16", "--run", str(tmp_path / "again")]) == 1
    assert re.match(f"nbtools: {REFUSED}", capsys.readouterr().err)


def test_a_run_that_a_gpu_trained_in_fp16_is_read_on_a_cpu_in_float32(pack, tmp_path):
    run = nb.fit(toy, pack, toy.PLAN.replace(epochs=1), tmp_path / "run", **QUIET)
    float32 = nb.evaluate(run, pack)
    path = tmp_path / "run" / "plan.json"
    path.write_text(path.read_text().replace('"amp": "off"', '"amp": "fp16"'))
    found = nb.Run.open(tmp_path / "run", toy)
    assert found.plan.amp == "fp16"
    assert nb.evaluate(found, pack) == float32
