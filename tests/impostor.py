"""A CPU that passes for a CUDA GPU, so that what is decided by `device.type` runs where there is none: events, traces,
memory, recorded steps and precisions, but neither its speed nor its errors."""

import json
import sys
from contextlib import nullcontext
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tape import Tape
from torch.overrides import TorchFunctionMode

from nbtools.train import device as devices
from nbtools.train import graph

GPU = torch.device("cuda", 0)
CARD = SimpleNamespace(name="NVIDIA A100", major=8, minor=0, total_memory=40 * 2**30, uuid="1-a")


class OnCpu(TorchFunctionMode):
    """What is asked of the GPU, the CPU does."""

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
    told: dict[str, Any] = {"is_available": True, "device_count": 1, "mem_get_info": (2**35, 2**36)}
    told |= {"get_device_capability": (8, 0), "is_bf16_supported": True, "get_device_properties": CARD}
    told |= dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated"), 2**20)
    told |= dict.fromkeys(("synchronize", "empty_cache", "reset_peak_memory_stats", "current_stream"))
    told |= {"get_device_name": CARD.name, "memory_stats_as_nested_dict": held, "device": nullcontext()}
    for name, value in told.items():
        patch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    patch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    patch.setattr(torch.cuda, "set_rng_state", lambda state, device: torch.set_rng_state(state))
    patch.setattr(torch.cuda, "default_generators", [torch.default_generator])
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.profiler, "profile", Profile)
    patch.setattr(torch.random, "fork_rng", lambda devices=(), **more: fork([], **more))
    patch.setattr(torch, "autocast", lambda kind, *more, **settings: autocast("cpu", *more, **settings))
    patch.setattr(sys.modules["nbtools.measure.profile"], "matrix_rates", lambda *_: [1e12])  # minutes on a CPU
    patch.setattr(devices, "pick", lambda: GPU)
    patch.setattr(graph, "Recorder", Tape)
    patch.setattr(graph, "uncapturable", lambda device: "")
    return OnCpu()
