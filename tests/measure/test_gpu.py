"""GPU readings against a fake NVML: two cards, cards that refuse readings, no driver, no library."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from jupyters import until

from nbtools.data import cores
from nbtools.measure import Gpu, Sampler, gpus

GIB = 2**30


class NVMLError(Exception):
    """As pynvml's: the base of all that NVML refuses."""


REFUSED = NVMLError("Not Supported")
REST = rf"CPU: .+, {cores()} cores?; RAM: [\d.]+ GB free; disk: [\d.]+ [kMGT]?B free for .+"


def fake_nvml(names=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"), **changed):
    """A module with pynvml's functions for these cards; changed: other answers, which a function makes or raises."""
    answers = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": len(names),
        "nvmlSystemGetDriverVersion": "550.54.15",
        "nvmlDeviceGetHandleByIndex": lambda i: i,
        "nvmlDeviceGetName": lambda i: names[i],
        "nvmlDeviceGetHandleByUUID": lambda uuid: int(uuid[4]),
        "nvmlDeviceGetCudaComputeCapability": (8, 0),
        "nvmlDeviceGetMemoryInfo": lambda i: SimpleNamespace(total=40 * GIB, free=(39 - i) * GIB, used=(1 + i) * GIB),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=40),
        "nvmlDeviceGetPowerUsage": 250_500,
        "nvmlDeviceGetEnforcedPowerLimit": 400_000,
        "nvmlDeviceGetTemperature": lambda i, sensor: {0: 65}[sensor],  # of the GPU
        "nvmlDeviceGetClockInfo": lambda i, clock: {0: 1110}[clock],  # of its cores
        "nvmlDeviceGetMaxClockInfo": lambda i, clock: {0: 1410}[clock],
        "nvmlDeviceGetCurrentClocksEventReasons": 0x1 | 0x4 | 0x20,
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=42)],
        "nvmlDeviceGetTotalEnergyConsumption": 5_000_000,
        **changed,
    }
    module = ModuleType("pynvml")
    for name, answer in answers.items():
        acts = callable(answer) or isinstance(answer, NVMLError)
        vars(module)[name] = Mock(side_effect=answer) if acts else Mock(return_value=answer)
    vars(module)["NVMLError"] = NVMLError
    return module


@pytest.fixture
def nvml(monkeypatch):
    return lambda *names, **changed: monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(*names, **changed))


def test_two_cards_are_read_as_values_in_the_named_units_and_shown_escaped(nvml):
    nvml(["<img src=x onerror=alert(1)>", "B"])
    found = gpus()
    first, second = found
    assert (first.index, first.capability, first.memory_total, first.utilisation) == (0, (8, 0), 40960, 97)
    assert (first.power, first.power_limit, first.temperature, first.clock) == (250.5, 400, 65, 1110)
    assert (first.throttle, first.processes) == (("idle", "power limit", "too hot (driver)"), (42,))
    assert (second.index, second.name, second.memory_used) == (1, "B", 2048)
    for shown in (str(found), found._repr_html_().replace("\xa0", " ")):
        for part in ("1.1 GB of 42.9 GB", "97 %", "250 W of 400 W", "65 °C", "1110 MHz of 1410 MHz", "550.54.15"):
            assert part in shown
    assert "<img" not in found._repr_html_()
    assert re.search(REST, str(found))


READINGS = [name for name in vars(fake_nvml()) if re.match("nvml(Device|System)Get(?!Count|Handle)", name)]


def test_a_reading_that_a_device_refuses_is_unknown_and_the_rest_stands(nvml):
    for name in READINGS:
        nvml(**{name: REFUSED})
        assert sum(value is None for value in vars(gpus()[0]).values()) <= 4, name
        assert ("– of 400 W" in str(gpus())) == (name == "nvmlDeviceGetPowerUsage")
    nvml(**dict.fromkeys(READINGS, REFUSED))
    assert (gpus()[0], "use it: training uses the CPU" in str(gpus())) == (Gpu(index=0, name="NVIDIA GPU"), True)


def test_without_nvidia_one_line_says_why_and_what_trains(nvml, monkeypatch):
    nvml(nvmlInit=REFUSED)
    assert gpus() == []
    assert "\n" not in str(gpus())
    assert re.search(REST, str(gpus()))
    assert "No NVIDIA GPU (Not Supported). Training uses the CPU" in str(gpus())
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py is not installed" in str(gpus())
    with monkeypatch.context() as patch:  # a container without NVML
        patch.setattr(torch.cuda, "is_available", lambda: True)
        assert "NVML shows no GPU (nvidia-ml-py is not installed" in str(gpus())
        assert "torch trains on one" in str(gpus())
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert re.search(r"Apple's GPU \(MPS\).*RAM: ", str(gpus()))
    monkeypatch.setattr(Path, "read_text", lambda path, **_: files.get(path.name, ""))
    files = {"meminfo": "MemAvailable: 24000000 kB", "memory.stat": "inactive_file 100000000"}
    files |= {"memory.max": "4000000000", "memory.current": "1500000000"}
    assert "RAM: 2.6 GB free" in str(gpus()), "within a container's limit"
    files["meminfo"] = ""
    assert "RAM" not in str(gpus()), "of which macOS does not say how much is free"


@pytest.mark.parametrize("cards", [1, 2])
def test_a_run_samples_its_own_card_in_the_background(nvml, monkeypatch, cards):
    """CUDA hides cards and puts the fastest first; a slice of one has another uuid. Between readings is a pause."""
    monkeypatch.setattr(sys.modules["nbtools.measure.machine"], "PERIOD", 60.0)
    joules = iter((1e6, 8.2e6))
    nvml(cards * ["A100"], nvmlDeviceGetTotalEnergyConsumption=lambda i: next(joules, 0.0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(uuid="1111-aaaa"))
    with Sampler(torch.device("cuda", 0)) as sampler:
        until(lambda: sampler.latest, "a reading")
        sampler.renew()
        assert sampler.latest == {
            "gpu_utilisation": 97,
            "gpu_memory_used": 1024 * cards,
            "gpu_power": 250.5,
            "gpu_energy": 2.0,
            "gpu_throttle": "power limit, too hot (driver)",
        }
    assert sys.modules["pynvml"].nvmlInit.call_count == sys.modules["pynvml"].nvmlShutdown.call_count == 3
