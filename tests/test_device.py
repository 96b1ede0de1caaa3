"""The device that training goes to, and what is refused on it."""

import os

import pytest
import torch
import toy

import nbtools as nb
from nbtools.errors import TrainError
from nbtools.tasks import captcha, hwdb


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

    device = torch.device("cuda")  # a name: nothing is put there


@pytest.mark.parametrize("task", [captcha, hwdb], ids=["captcha", "hwdb"])
def test_ctc_is_refused_in_a_sentence_where_training_on_a_gpu_is_to_be_deterministic(task, monkeypatch):
    """torch would refuse in the middle of backward, with advice about switches that nbtools sets."""
    monkeypatch.setattr(torch, "get_deterministic_debug_mode", lambda: 2)
    batch = {"label": torch.tensor([[0, 1]]), "label_length": torch.tensor([2])}
    with pytest.raises(TrainError, match=r"Plan\.deterministic .* CTC .* deterministic=False"):
        task.loss(lambda _batch: (OnCuda(), torch.tensor([9])), batch, task.PLAN)
