"""A kernel's assertion on a GPU, which ends the process's use of it, is explained."""

import pytest
import toy
from acting import QUIET, acting, same

import nbtools as nb
from nbtools.errors import TrainError


def test_an_assertion_of_a_kernel_is_explained_and_the_run_resumes_bit_for_bit(pack, tmp_path):
    def assertion() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later")

    with pytest.raises(TrainError, match=r"out of range on the GPU.*and run this again with NBTOOLS_DEVICE=cpu"):
        nb.fit(acting({12: assertion}), pack, toy.PLAN, tmp_path / "run", **QUIET)
    run, whole = (nb.fit(toy, pack, toy.PLAN, tmp_path / name, **QUIET) for name in ("run", "whole"))
    assert same(run, whole)
