"""The device that training goes to, and what is switched on there. No claim depends on this machine's CPU."""

import os
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy
from acting import QUIET
from cases import CASES, augmented
from test_resume import log, same, trained
from torch import nn
from torch.utils.checkpoint import checkpoint

import nbtools as nb
from nbtools.errors import TrainError
from nbtools.tasks import captcha, hwdb
from nbtools.train import Diverged, adopt
from nbtools.train.device import autotuning

CUDA = torch.device("cuda")  # a name: nothing is put there


def test_training_goes_to_the_device_that_the_environment_names(pack, monkeypatch):
    """These tests name the CPU: on a machine with a GPU they would move there in silence."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert nb.TrainState(toy, pack, toy.PLAN).device.type == os.environ["NBTOOLS_DEVICE"] == "cpu"
    monkeypatch.setenv("NBTOOLS_DEVICE", "gpu")
    with pytest.raises(TrainError, match=r"NBTOOLS_DEVICE must be a device .* got 'gpu': .*; choose another GPU"):
        nb.TrainState(toy, pack, toy.PLAN)


def test_bf16_that_a_gpu_only_emulates_is_said_from_the_start_and_when_chosen_live(pack, monkeypatch):
    monkeypatch.setattr(sys.modules["nbtools.train.device"], "reduced_precision", lambda device: "fp16")  # as on a T4
    state = nb.TrainState(toy, pack, toy.PLAN.replace(amp="bf16"))
    said = "this GPU only emulates bfloat16, which is slow"
    for amp in ("bf16", "off", "bf16", "off"):  # the first two as on a resume, which takes over the saved plan first
        assert [each.startswith(said) for each in state.events] == [True] * (state.applied.amp == "bf16")
        adopt(state, state.plan.replace(amp=amp))


@pytest.mark.parametrize("task", [captcha, hwdb], ids=["captcha", "hwdb"])
def test_ctc_without_cudnn_is_refused_where_training_on_a_gpu_is_to_be_deterministic(task, monkeypatch):
    """torch would refuse in the middle of backward, with advice about switches that nbtools sets."""
    monkeypatch.setattr(torch, "get_deterministic_debug_mode", lambda: 2)
    monkeypatch.setattr("nbtools.tasks.common.ctc.cudnn_agrees", lambda device: False)
    logits, batch = SimpleNamespace(device=CUDA), {"label": torch.tensor([[0, 1]]), "label_length": torch.tensor([2])}
    with pytest.raises(TrainError, match=r"Plan\.deterministic .* CTC .* deterministic=False"):
        task.loss(lambda _batch: (logits, torch.tensor([9])), batch, task.PLAN)


def test_cudnn_is_tuned_for_steps_of_a_shape_that_often_recurs_and_for_nothing_else(monkeypatch):
    """Not for last batches, nor between steps: evaluations, previews, measurements."""
    cudnn, cpu = torch.backends.cudnn, torch.device("cpu")
    monkeypatch.setattr(cudnn, "benchmark", False)
    seen = []
    plain, exact = nb.Plan(), nb.Plan(deterministic=True)
    for device, plan, times in ((CUDA, plain, 10_000), (CUDA, plain, 30), (CUDA, exact, 10_000), (cpu, plain, 10_000)):
        with suppress(torch.OutOfMemoryError), autotuning(device, plan, times):
            seen.append(cudnn.benchmark)
            raise torch.OutOfMemoryError
        assert not cudnn.benchmark
    assert seen == [True, False, False, False]


@pytest.mark.usefixtures("fp16_on_cpu")
@pytest.mark.parametrize(("amp", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_mixed_precision_trains_to_about_the_same_loss_and_leaks_nothing(pack, amp, dtype):
    last, seen = {}, set()
    for precision in ("off", amp):
        state = nb.TrainState(toy, pack, toy.PLAN.replace(amp=precision), "cpu")
        state.network.register_forward_hook(lambda m, i, out, precision=precision: seen.add((precision, out.dtype)))
        for record in nb.train(toy, state, pack):
            assert torch.is_grad_enabled()
            assert not torch.is_autocast_enabled("cpu")
            last[precision] = record.values.get("loss", last.get(precision))
    assert last[amp] == pytest.approx(last["off"], rel=0.1)
    assert seen == {("off", torch.float32), (amp, dtype)}


def overflowing(model, batch, plan):
    """Gradients that are infinite under fp16, whatever their scale; the loss is a number."""
    total, count = toy.loss(model, batch, plan)
    if plan.amp == "fp16" and total.requires_grad:
        total.register_hook(lambda gradient: gradient * float("inf"))
    return total, count


@pytest.mark.usefixtures("fp16_on_cpu")
def test_fp16_that_skips_every_step_ends_with_what_to_do_and_the_run_continues_without_it(pack, tmp_path):
    task, plan = toy.with_(loss=overflowing), toy.PLAN.replace(amp="fp16", epochs=20)
    said = r"diverged at amp fp16: gradients overflow in every step, .* from step \d+, set amp=off, or amp=bf16 on a"
    for _ in range(2):  # run again as it is, it says so at once
        with pytest.raises(Diverged, match=said) as caught:
            nb.fit(task, pack, plan, tmp_path / "run", **QUIET)
    assert caught.value.steps[1] <= 45
    assert nb.Run.open(tmp_path / "run", task).state == "diverged"
    run = nb.fit(task, pack, plan.replace(amp="off", epochs=12), tmp_path / "run", **QUIET)
    assert run.history.of("step")[-1]["loss"] < 0.5 * run.history.of("step")[0]["loss"]


@pytest.mark.parametrize("name", ["captcha small", "sign transformer"])
def test_activations_computed_again_change_no_bit(tmp_path, name):
    pack = CASES[name].pack(tmp_path, 12)
    plans = [augmented(name).replace(checkpoint_activations=again) for again in (False, True)]
    (kept, rows), (again, others) = (trained(pack, CASES[name].task, plan, {}) for plan in plans)
    assert log(rows) == log(others)
    assert same(kept, again)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.head = nn.Linear(1, 6), nn.Linear(6, toy.CLASSES)
        self.layers = nn.ModuleList([nn.LSTM(6, 6), nn.GRU(6, 6), nn.RNN(6, 6)])

    def read(self, x):
        for layer in self.layers:
            x, _ = layer(x)
        return x

    def forward(self, batch):
        x = self.inputs(batch["x"].t()[..., None])  # (T, B, 6)
        return self.head(checkpoint(self.read, x, use_reentrant=False)[-1])


def test_recurrent_layers_compute_in_float32_under_bf16_in_training_also_when_computed_again(pack):
    task, seen = toy.with_(model=lambda card, plan: Reader()), []
    state = nb.TrainState(task, pack, toy.PLAN.replace(amp="bf16", epochs=1), "cpu")
    network: Any = state.model
    for layer in (network.inputs, *network.layers):
        layer.register_forward_hook(lambda layer, given, made: seen.append((type(layer).__name__, made[0].dtype)))
    next(nb.train(task, state, pack))
    assert {dtype for name, dtype in seen if name == "Linear"} == {torch.bfloat16}, "the rest is in mixed precision"
    recurrent = [dtype for name, dtype in seen if name != "Linear"]
    assert {*recurrent} == {torch.float32}
    assert len(recurrent) > 3, "computed again"
