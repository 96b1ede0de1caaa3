"""What only a GPU can show, made for four minutes of one, not yet timed. Where torch, numpy, pytest and nbtools with
its requirements are installed, from the folder of the repository:

    python -m pytest -q -m cuda tests/cuda

`pytest.ini` next to this file is the configuration then: nothing of tests/conftest.py is loaded. NBTOOLS_CUDA_DRY=1
runs what can run on the CPU, a tape in place of CUDA graphs, to see that the tests themselves work.
"""

import os

import pytest
import torch
from cases import CASES
from tape import Tape

from nbtools.train import device as devices
from nbtools.train import graph

DRY = os.environ.get("NBTOOLS_CUDA_DRY") == "1"


def pytest_collection_modifyitems(items):
    if not DRY and not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def device():
    return torch.device("cpu" if DRY else f"cuda:{torch.cuda.current_device()}")


@pytest.fixture
def gpu(device):
    """A GPU; a dry run skips what has no meaning without one."""
    if device.type != "cuda":
        pytest.skip("only on a GPU")
    return device


@pytest.fixture
def small_here(request, device):
    if device.type == "cpu" and CASES[request.node.callspec.params["name"]].large:
        pytest.skip("too large for a dry run")


@pytest.fixture(autouse=True)
def trains_there(monkeypatch):
    monkeypatch.setenv("NBTOOLS_DEVICE", "cpu" if DRY else "cuda")
    if DRY:
        monkeypatch.setattr(devices, "FP16_DEVICES", ("cuda", "mps", "cpu"))
        monkeypatch.setattr(devices, "GRAPH_DEVICES", ("cuda", "cpu"))
        monkeypatch.setattr(graph, "Recorder", Tape)
    yield
    devices.give_back()


@pytest.fixture(scope="session")
def packs(tmp_path_factory):
    made = {}

    def pack(name, count=48):
        if (name, count) not in made:
            made[name, count] = CASES[name].pack(tmp_path_factory.mktemp("case") / "made", count)
        return made[name, count]

    return pack
