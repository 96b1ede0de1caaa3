"""Classes out of range are found before training, by their sample: on a GPU they would end the process's use of it."""

import numpy as np
import pytest
import toy
from acting import QUIET, acting, same
from torch import nn
from torch.nn import functional as F

import nbtools as nb
from nbtools.data import build_pack
from nbtools.errors import TrainError
from nbtools.train import rehearsal


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """As on CUDA, whose kernels check no index."""
    monkeypatch.setattr(rehearsal, "ASSERTING", ("cuda", "cpu"))


def test_a_label_that_a_survey_got_wrong_is_named_by_its_file(tmp_path):
    toy.demo(tmp_path / "raw", 60)
    np.save(tmp_path / "raw" / "9_98.npy", np.zeros(8, np.float32))
    pack = build_pack(tmp_path / "raw", "toy", {"ragged": False}, toy.survey, toy.read, progress=False)
    with pytest.raises(TrainError, match=r"of 4 classes: Target 9 is out of bounds.*9_98\.npy"):
        nb.fit(toy, pack, toy.PLAN, tmp_path / "run", **QUIET)
    assert not (tmp_path / "run").exists()


class Masks(nb.Task):
    def model(self, card, plan):
        return nn.Conv2d(3, 3, 1)

    def infer(self, model, batch, plan):
        return model(batch["x"].float())

    def loss(self, model, batch, plan):
        logits = self.infer(model, batch, plan) if isinstance(model, nn.Module) else model(batch)
        return F.cross_entropy(logits, batch["y"].long(), ignore_index=255)


@pytest.mark.usefixtures("own_cache")
def test_of_masks_the_second_highest_number_counts_where_the_highest_is_ignored(tmp_path):
    data = [(np.ones((8, 8, 3), np.float32), np.full((8, 8), 255 if i % 2 else i % 3, np.uint8)) for i in range(40)]
    data[30][1][0, 0] = 7
    with pytest.raises(TrainError, match=r"Target 7 is out of bounds.*item 30"):
        nb.fit(Masks(), nb.pack(data, progress=False), nb.Plan(epochs=1, batch_size=8), tmp_path / "run", **QUIET)


def test_an_assertion_of_a_kernel_is_explained_and_the_run_resumes_bit_for_bit(pack, tmp_path):
    def assertion() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later")

    with pytest.raises(TrainError, match=r"out of range on the GPU.*and run this again with NBTOOLS_DEVICE=cpu"):
        nb.fit(acting({12: assertion}), pack, toy.PLAN, tmp_path / "run", **QUIET)
    run, whole = (nb.fit(toy, pack, toy.PLAN, tmp_path / name, **QUIET) for name in ("run", "whole"))
    assert same(run, whole)
