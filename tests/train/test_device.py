"""The device that training goes to, what is refused on it, and what is switched on around single steps."""

import os
from contextlib import suppress

import pytest
import torch
import toy

import nbtools as nb
from nbtools.errors import TrainError
from nbtools.tasks import captcha, hwdb
from nbtools.train.device import autotuning, find_scale

CUDA = torch.device("cuda")  # a name: nothing is put there


def test_training_goes_to_the_device_that_the_environment_names(tmp_path, monkeypatch):
    """These tests name the CPU: on a machine with a GPU they would move there in silence."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pack = toy.make_pack(tmp_path, 40)
    assert nb.TrainState(toy, pack, toy.PLAN).device.type == os.environ["NBTOOLS_DEVICE"] == "cpu"
    monkeypatch.setenv("NBTOOLS_DEVICE", "gpu")
    with pytest.raises(TrainError, match=r"NBTOOLS_DEVICE must be a device that torch has here, .* got 'gpu'"):
        nb.TrainState(toy, pack, toy.PLAN)


class OnCuda:
    """Logits that say they lie on a GPU."""

    device = CUDA


@pytest.mark.parametrize("task", [captcha, hwdb], ids=["captcha", "hwdb"])
def test_ctc_without_cudnn_is_refused_in_a_sentence_where_training_on_a_gpu_is_to_be_deterministic(task, monkeypatch):
    """torch would refuse in the middle of backward, with advice about switches that nbtools sets."""
    monkeypatch.setattr(torch, "get_deterministic_debug_mode", lambda: 2)
    monkeypatch.setattr("nbtools.tasks.common.ctc.cudnn_agrees", lambda device: False)
    batch = {"label": torch.tensor([[0, 1]]), "label_length": torch.tensor([2])}
    with pytest.raises(TrainError, match=r"Plan\.deterministic .* CTC .* deterministic=False"):
        task.loss(lambda _batch: (OnCuda(), torch.tensor([9])), batch, task.PLAN)


def test_cudnn_is_tuned_for_steps_of_a_shape_that_often_recurs_and_for_nothing_else(monkeypatch):
    """Not for last batches, nor between steps: evaluations, previews, measurements."""
    cudnn, cpu = torch.backends.cudnn, torch.device("cpu")
    monkeypatch.setattr(cudnn, "benchmark", False)
    seen = []
    for device, plan, times in (
        (CUDA, nb.Plan(), 10_000),
        (CUDA, nb.Plan(), 30),
        (CUDA, nb.Plan(deterministic=True), 10_000),
        (cpu, nb.Plan(), 10_000),
    ):
        with suppress(torch.OutOfMemoryError), autotuning(device, plan, times):
            seen.append(cudnn.benchmark)
            raise torch.OutOfMemoryError
        assert not cudnn.benchmark
    assert seen == [True, False, False, False]


@pytest.mark.parametrize(("slope", "halved"), [(0.5, 0), (100.0, 7), (float("inf"), 16)])
def test_fp16_finds_its_scale_on_one_batch_and_its_first_step_counts(slope, halved):
    """A gradient above 65,504 is infinite in fp16, whatever the scale."""
    weight, scaler = torch.nn.Parameter(torch.zeros(3)), torch.amp.GradScaler("cpu")
    weight.register_hook(lambda gradient: gradient.half().float())
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def differentiate() -> float:
        weight.grad = None
        scaler.scale((slope * weight).sum()).backward()
        return scaler.get_scale()

    assert find_scale(scaler, [weight], differentiate) == 65_536 / 2**halved
    assert scaler.get_scale() == 65_536 / 2**halved
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [-slope if halved < 16 else 0.0] * 3
