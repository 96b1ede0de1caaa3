"""What all tests share: the CPU as their device, no network, and browsers only where there is one."""

import gc
import os
import shutil
import signal
import socket
from functools import partial

import pytest
import torch
import toy
from acting import QUIET
from hypothesis import settings

import nbtools as nb
from nbtools.data import cores
from nbtools.folder import Job
from nbtools.train import device

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

os.environ.setdefault("NBTOOLS_DEVICE", "cpu")
settings.register_profile("nbtools", deadline=None, derandomize=True, database=None)  # no verdict by chance or by clock
settings.load_profile("nbtools")


def pytest_configure():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with Ctrl-C ignored
    torch.set_num_threads(1)  # a few small images are not worth sharing, and threads that wait starve on a busy machine


def pytest_xdist_auto_num_workers(config):
    """`-n auto`: one more than cores, since tests wait for kernels, browsers and processes a quarter of their time."""
    return cores() + 1


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    """Without a browser its tests are skipped; in CI that is a failure, never a silent skip."""
    if os.environ.get("CI") == "true" or any(shutil.which(name) for name in BROWSERS):
        return
    for item in items:
        if item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.skip(reason="no chromium here; .ci/run installs one"))


@pytest.fixture(scope="session")
def chromium():
    return next(filter(None, map(shutil.which, BROWSERS)))


@pytest.fixture(scope="module", autouse=True)
def undrawn(request):
    """Runs without their PNG: drawing it takes longer than a toy's training. Modules marked `drawn` look at it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("drawn") is None:
            patch.setattr("nbtools.live.draw.png", lambda *_: b"\x89PNG")
        yield


@pytest.fixture(scope="module")
def pack(request, tmp_path_factory):
    """200 samples of the toy task, or what the module's PACK makes in a folder."""
    return getattr(request.module, "PACK", toy.make_pack)(tmp_path_factory.mktemp("pack"))


@pytest.fixture
def place(tmp_path, own_cache, monkeypatch):
    (tmp_path / "drive").mkdir()
    monkeypatch.setenv("NBTOOLS_DRIVE", str(tmp_path / "drive"))
    return tmp_path


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def one_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBTOOLS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def untouched(request, tmp_path_factory, pack):
    """The run of the module's PLAN, to which nothing happens."""
    return nb.fit(toy, pack, request.module.PLAN, tmp_path_factory.mktemp("runs") / "untouched", **QUIET)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def desk(tmp_path, monkeypatch, own_cache):
    """The working folder and cache are the test's own, and runs come without their receipt, which takes too long."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nb, "fit", partial(nb.fit, receipt=False, progress=False))
    torch.manual_seed(0)


@pytest.fixture
def at_once(monkeypatch):
    """Runs look for control.json after each step, so that a test knows when it is read."""
    monkeypatch.setattr("nbtools.live.surface.LOOK_EVERY", 0.0)


@pytest.fixture
def written(monkeypatch):
    """Each checkpoint is written before the next step: else an epoch is left out while one is being written."""
    save = Job.save
    monkeypatch.setattr(Job, "save", lambda job: (save(job), job.wait())[0])


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """What was imported so far is no longer looked through by gc.collect(), which every measurement calls."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fp16_on_cpu(monkeypatch):
    """Lift the rule that fp16 trains on a GPU only: the loss scaler's bookkeeping is the same anywhere."""
    monkeypatch.setattr(device, "FP16_DEVICES", ("cuda", "mps", "cpu"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Only this machine may be reached: a test that needs the network would pass here and fail elsewhere."""
    connect = socket.socket.connect

    def guarded(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "localhost", "::1"):
            raise AssertionError(f"a test tried to reach {address[0]}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
