"""The tests for a GPU work where little is installed, and what of them can run on a CPU passes there."""

import os
import subprocess
import sys
from pathlib import Path

import impostor
import pytest
import toy

import nbtools as nb

ROOT = Path(__file__).parent.parent
BARE = """
import sys
sys.modules |= dict.fromkeys(["hypothesis", "xdist", "captcha", "rapidfuzz", "scipy", "nbclient", "onnx"])  # not there
import pytest
sys.exit(pytest.main(["-q", "-m", "cuda", "tests/cuda", "-k", sys.argv[1]]))
"""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("some", ["loop_waits or does_not_fit", pytest.param("", marks=pytest.mark.full)])
def test_they_run_where_little_is_installed_and_pass_without_a_gpu(some):
    bare = {"NBTOOLS_CUDA_DRY": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BARE, some]
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, **bare}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


def test_from_advice_to_receipt_everything_goes_the_way_of_cuda(tmp_path, monkeypatch):
    """On a CPU that passes for a GPU: the way that only its tests take else."""
    pack = toy.make_pack(tmp_path, count=600)
    with impostor.pretend(monkeypatch):
        advice = nb.advise(toy, pack, seconds=6.0)
        assert "measured here by the GPU's time per step" in advice.reasons["amp"]
        for amp, graph in (("bf16", True), ("fp16", False)):
            plan = advice.plan.replace(amp=amp, graph=graph, epochs=6)
            run = nb.fit(toy, pack, plan, run=tmp_path / amp, progress=False)
            assert None not in (run.receipt, run.verdict)
            assert run.summary()["val_accuracy"].iloc[-1] > 0.5
            assert {"gpu_memory_allocated", "gpu_memory_peak"} <= {*run.history.rows[-1]}
        assert nb.lr_sweep(toy, pack, plan).lr
