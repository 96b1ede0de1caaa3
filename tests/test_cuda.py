"""The tests for a GPU work where little is installed, and what of them can run on a CPU passes there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
