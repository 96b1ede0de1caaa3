"""Indices out of range are found before training, by their sample: on a GPU they would end the process's use of it."""

from typing import Any

import numpy as np
import pytest
import toy
from acting import QUIET, acting, same
from torch import nn
from torch.nn import functional as F

import nbtools as nb
from nbtools.data import build_pack
from nbtools.errors import TrainError
from nbtools.train import indices

pytestmark = pytest.mark.usefixtures("own_cache", "everywhere")
KNOWN = 5  # what a network has places for


@pytest.fixture
def everywhere(monkeypatch):
    """As on CUDA, whose kernels check no index."""
    monkeypatch.setattr(indices, "DEVICES", ("cuda", "cpu"))


class Own(nb.Task):
    """A loss of x (B, 6) whole numbers, one of which is out of its range."""

    def __init__(self, loss: Any):
        self.own = loss

    def model(self, card, plan):
        return nn.Linear(6, KNOWN)

    def infer(self, model, batch, plan):
        return self.model_of(batch, model)

    def model_of(self, batch, model):
        return model(batch["x"].float())

    def loss(self, model, batch, plan):
        return self.own(model(batch) if not isinstance(model, nn.Module) else self.model_of(batch, model), batch["x"])


def mask(logits, x):
    """Logits (B, K, 2, 3) of x as a label image; 250 counts for nothing."""
    return F.cross_entropy(logits[:, :, None, None].expand(-1, -1, 2, 3), x.view(-1, 2, 3).long(), ignore_index=250)


LOSSES = {
    "classes": (lambda logits, x: F.cross_entropy(logits, x[:, 0].long()), "a class in the loss is 60"),
    "masks": (mask, "a class in the loss is 60"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_has_no_class_for_is_named_by_its_sample_before_the_first_step(tmp_path, name):
    loss, rule = LOSSES[name]
    x = np.ones((40, 6), np.int64)
    if name == "masks":
        x[:, 3:] = 250
    x[30, :1] = 60
    plan, folder = nb.Plan(epochs=1, batch_size=8), tmp_path / "run"
    with pytest.raises(TrainError, match=rf"sample 30 \(.*\): {rule}, where (0|-{KNOWN}) to {KNOWN - 1} are allowed"):
        nb.fit(Own(loss), nb.pack([{"x": row} for row in x], progress=False), plan, folder, receipt=False)
    x[30, :1] = 2
    run = nb.fit(Own(loss), nb.pack([{"x": row} for row in x], progress=False), plan, tmp_path / "right", receipt=False)
    assert len(run.history.of("epoch")) == 1


def test_a_label_that_a_survey_got_wrong_is_named_by_its_file(tmp_path):
    toy.demo(tmp_path / "raw", 60).joinpath("0_7.npy")
    np.save(tmp_path / "raw" / "9_98.npy", np.zeros(8, np.float32))
    pack = build_pack(tmp_path / "raw", "toy", {"ragged": False}, toy.survey, toy.read, progress=False)
    with pytest.raises(TrainError, match=r"\(9_98.npy\): a class in the loss is 9, where 0 to 3 are allowed"):
        nb.fit(toy, pack, toy.PLAN, tmp_path / "run", receipt=False)


def test_an_assertion_of_a_kernel_is_explained_and_the_run_resumes_bit_for_bit(pack, tmp_path):
    def assertion() -> None:
        raise RuntimeError(
            "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
        )

    with pytest.raises(
        TrainError, match=r"out of range on the GPU.*restart it, and run this again with NBTOOLS_DEVICE=cpu"
    ):
        nb.fit(acting({12: assertion}), pack, toy.PLAN, tmp_path / "run", **QUIET)
    run, whole = (nb.fit(toy, pack, toy.PLAN, tmp_path / name, **QUIET) for name in ("run", "whole"))
    assert same(run, whole)
