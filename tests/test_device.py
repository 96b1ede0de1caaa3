"""Claims about the device: how malloc keeps what tensors free, and the switches that training on a GPU sets."""

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import toy

import nbtools as nb
from nbtools.errors import TrainError
from nbtools.measure import untouched
from nbtools.tasks import captcha, hwdb
from nbtools.train import Plan, device

CUDA = torch.device("cuda")  # a name: nothing is put there

FAULTS = """
import resource, torch
from nbtools.train import Plan, device

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        [torch.ones(2**20) for _ in range(8)]  # 4 MiB each, all freed
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
device.prepare(Plan(), torch.device("cpu"), many_shapes=False)
print((before, faults() and faults()))
"""


@pytest.mark.full  # two processes that import torch
@pytest.mark.skipif(device.glibc() is None, reason="another C library frees in its own way")
@pytest.mark.parametrize(("settings", "kept"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "1048576"}, False)])
def test_training_on_a_cpu_keeps_its_memory_unless_the_user_set_malloc_otherwise(settings, kept):
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, env={**plain, **settings}, capture_output=True, text=True, timeout=120, check=True)
    before, after = ast.literal_eval(done.stdout)
    assert (after * 10 < before) == kept


@pytest.fixture
def switches():
    """Lets a test set torch's process-wide switches."""
    with untouched(torch.device("cpu")):
        yield


def readings() -> dict:
    """What torch answers about the precision of products: other libraries and the compiler ask all of these."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    found = {}
    for name, read in {
        "precision": torch.get_float32_matmul_precision,
        "matmul": lambda: matmul.allow_tf32,
        "convolution": lambda: cudnn.allow_tf32,
        "backend": lambda: getattr(matmul, "fp32_precision", None),
    }.items():
        try:
            found[name] = read()
        except RuntimeError as error:
            found[name] = str(error)
    return found


@pytest.mark.usefixtures("switches")
def test_preparing_a_gpu_for_training_takes_tf32_and_every_library_can_still_ask():
    device.prepare(Plan(), CUDA, many_shapes=False)
    found = readings()
    assert found.pop("backend") in ("tf32", None)  # None: torch < 2.9
    assert found == {"precision": "high", "matmul": True, "convolution": True}


@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("chosen", ["highest", "high", "medium", "fp32_precision"])
def test_measuring_on_a_gpu_gives_the_users_precision_back(chosen):
    """fp32_precision: by the newer switch alone, after which torch refuses to answer for the older ones."""
    matmul = torch.backends.cuda.matmul
    if chosen != "fp32_precision":
        torch.set_float32_matmul_precision(chosen)
    elif hasattr(matmul, chosen):
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = "tf32"
    before = readings()
    with untouched(torch.device("cpu")):
        device.prepare(Plan(deterministic=True), CUDA, many_shapes=False)
    if chosen == "fp32_precision":  # the older switches may answer now
        assert readings()["backend"] == before["backend"]
    else:
        assert readings() == before


def test_importing_nbtools_settles_cublas_workspace_before_any_product(monkeypatch):
    """torch asks for it at the process's first product, and not again; a user's own setting stays."""
    assert "CUBLAS_WORKSPACE_CONFIG" in os.environ  # nbtools is imported
    for own, expected in ((":16:8", ":16:8"), (None, ":4096:8")):
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        if own is not None:
            monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", own)
        runpy.run_path(str(device.__file__))
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == expected


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


@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("task", [captcha, hwdb], ids=["captcha", "hwdb"])
def test_ctc_is_refused_in_a_sentence_where_training_on_a_gpu_is_to_be_deterministic(task):
    """torch would refuse in the middle of backward, with advice about switches that nbtools sets."""
    device.prepare(Plan(deterministic=True), CUDA, many_shapes=True)
    batch = {"label": torch.tensor([[0, 1]]), "label_length": torch.tensor([2])}
    with pytest.raises(TrainError, match=r"Plan\.deterministic .* CTC .* deterministic=False"):
        task.loss(lambda _batch: (OnCuda(), torch.tensor([9])), batch, task.PLAN)


TEAMS = """
import os, sys, threading
from pathlib import Path
from statistics import mode
from torch import nn
import own, nbtools as nb

teams = []  # a number for each step: threads that Python has not started

class Net(nn.Sequential):
    def forward(self, x):
        if self.training:
            teams.append(len(os.listdir("/proc/self/task")) - threading.active_count())
        return super().forward(x)

folder, feed = Path(sys.argv[1]), sys.argv[2]
task = nb.classify(Net(nn.Flatten(), nn.Linear(432, 400), nn.ReLU(), nn.Linear(400, 3)))
pack, plan = own.packed("images", folder), task.PLAN.replace(batch_size=4, epochs=4, feed=feed)
nb.fit(task, pack, plan, run=folder / "run", keep=folder / "kept", receipt=False, progress=False)
epoch = len(teams) // 4
print(mode(teams[:epoch]), mode(teams[-epoch:]))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux lists them")
@pytest.mark.parametrize("feed", ["resident", "streamed"])
def test_only_the_thread_that_trains_has_a_team_of_openmps_threads(tmp_path, feed):
    """Where there are more threads in teams than cores, libgomp's no longer spin for their next piece of work: once a
    checkpoint was written, in a thread that copied with torch, steps of hwdb's network took 1.4 times as long."""
    command = [sys.executable, "-c", TEAMS, str(tmp_path), feed]
    settings = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1", "NBTOOLS_DEVICE": "cpu"}
    settings["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120, check=True)
    before, after = map(int, done.stdout.split()[-2:])
    assert before == after
