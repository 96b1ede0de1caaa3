"""The tests for a GPU pass in a dry run where little is installed. And a CPU passes for a CUDA GPU, so that what is
decided by `device.type` runs where there is none, but neither its speed nor its errors."""

import json
import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy
from tape import Tape
from torch.overrides import TorchFunctionMode

import nbtools as nb
from nbtools.train import device, graph

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


GPU = torch.device("cuda", 0)
CARD = SimpleNamespace(name="NVIDIA A100", major=8, minor=0, total_memory=40 * 2**30, uuid="1-a")


class OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        args, kwargs = [moved(each) for each in args], {name: moved(value) for name, value in kwargs.items()}
        return args[0] if func is torch.Tensor.pin_memory else func(*args, **kwargs)


def moved(value: Any) -> Any:
    return "cpu" if isinstance(value, (str, torch.device)) and str(value).startswith("cuda") else value


class Event:
    def __init__(self, **_: Any) -> None:
        self.at = 0.0  # not yet

    def record(self, stream: Any = None) -> None:
        self.at = perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        assert self.at, "waits for what was never recorded"

    def elapsed_time(self, end: "Event") -> float:
        assert self.at * end.at, "reads what was never recorded"
        return 1e3 * (end.at - self.at)


class Profile:
    """A trace whose only kernel takes nine tenths of the block's time."""

    def __init__(self, activities: Any):
        self.cuda = torch.profiler.ProfilerActivity.CUDA in activities

    def __enter__(self) -> "Profile":
        self.start = perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.took = perf_counter() - self.start

    def export_chrome_trace(self, path: str) -> None:
        kernel = {"cat": "kernel", "name": "void product<float>", "dur": 0.9e6 * self.took}
        with open(path, "w") as file:
            json.dump({"traceEvents": [kernel] * self.cuda}, file)


def pretend(patch: pytest.MonkeyPatch) -> TorchFunctionMode:
    """Have torch say that there is a GPU; return the mode in which it works."""
    held = {f"{name}_bytes": {"all": {"current": 2**20}} for name in ("allocated", "reserved")}
    autocast, fork = torch.autocast, torch.random.fork_rng
    told: dict[str, Any] = {"is_available": True, "is_bf16_supported": True, "mem_get_info": (2**35, 2**36)}
    told |= {"get_device_properties": CARD, "get_device_name": CARD.name, "memory_stats_as_nested_dict": held}
    told |= dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated"), 2**20)
    quiet = "synchronize", "empty_cache", "reset_peak_memory_stats", "current_stream", "is_current_stream_capturing"
    told |= dict.fromkeys(quiet)
    for name, value in told.items():
        patch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    patch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    patch.setattr(torch.cuda, "set_rng_state", lambda state, device: torch.set_rng_state(state))
    patch.setattr(torch.cuda, "default_generators", [torch.default_generator])
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.profiler, "profile", Profile)
    patch.setattr(torch.random, "fork_rng", lambda devices=(), **more: fork([], **more))
    patch.setattr(torch, "autocast", lambda kind, *more, **settings: autocast("cpu", *more, **settings))
    patch.setattr("nbtools.measure.profile.matrix_rates", lambda *_: [1e12])  # minutes on a CPU
    patch.setattr(device, "pick", lambda: GPU)
    patch.setattr(graph, "Recorder", Tape)
    patch.setattr(graph, "uncapturable", lambda device: "")
    return OnCpu()


def test_from_advice_to_receipt_everything_goes_the_way_of_cuda(tmp_path, monkeypatch):
    pack = toy.make_pack(tmp_path, count=600)
    with pretend(monkeypatch):
        advice = nb.advise(toy, pack, seconds=6.0)
        assert "measured here by the GPU's time per step" in advice.reasons["amp"]
        for amp, recorded in (("bf16", True), ("fp16", False)):
            plan = advice.plan.replace(amp=amp, graph=recorded, epochs=3)
            run = nb.fit(toy, pack, plan, run=tmp_path / amp, progress=False)
            assert None not in (run.receipt, run.verdict)
            assert run.summary()["val_accuracy"].iloc[-1] > 0.5
            assert {"gpu_memory_allocated", "gpu_memory_peak"} <= {*run.history.rows[-1]}
        assert nb.lr_sweep(toy, pack, plan, lrs=(1e-3, 1e-2)).lr
