"""GPU readings against a fake NVML: two cards, cards that refuse readings, no driver, no library."""

import html
import re
import sys
import types

import pytest
import torch

from nbtools.data import cores
from nbtools.measure import Gpu, gpus

GIB = 2**30


class NVMLError(Exception):
    """As pynvml's: the base of all that NVML refuses."""


def plain(value):
    return lambda *_: value


def fake_nvml(names=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"), **changed):
    """A module with pynvml's functions for these cards; `changed` replaces functions, NVMLError makes one raise it."""
    answers = {
        "nvmlInit": plain(None),
        "nvmlShutdown": plain(None),
        "nvmlDeviceGetCount": plain(len(names)),
        "nvmlSystemGetDriverVersion": plain("550.54.15"),
        "nvmlDeviceGetHandleByIndex": lambda i: i,
        "nvmlDeviceGetName": lambda i: names[i],
        "nvmlDeviceGetUUID": lambda i: f"GPU-{i}{i}{i}{i}-aaaa",
        "nvmlDeviceGetCudaComputeCapability": plain((8, 0)),
        "nvmlDeviceGetMemoryInfo": lambda i: types.SimpleNamespace(
            total=40 * GIB, free=(39 - i) * GIB, used=(1 + i) * GIB
        ),
        "nvmlDeviceGetUtilizationRates": plain(types.SimpleNamespace(gpu=97, memory=40)),
        "nvmlDeviceGetPowerUsage": plain(250_500),
        "nvmlDeviceGetEnforcedPowerLimit": plain(400_000),
        "nvmlDeviceGetTemperature": lambda i, sensor: 65,
        "nvmlDeviceGetClockInfo": lambda i, kind: {0: 1110, 2: 1215}[kind],
        "nvmlDeviceGetMaxClockInfo": lambda i, kind: 1410,
        "nvmlDeviceGetCurrentClocksEventReasons": plain(0x4 | 0x20),
        "nvmlDeviceGetComputeRunningProcesses": plain([types.SimpleNamespace(pid=42)]),
        "nvmlDeviceGetTotalEnergyConsumption": plain(5_000_000),
        **changed,
    }
    module = types.ModuleType("pynvml")
    vars(module).update({name: refuse if answer is NVMLError else answer for name, answer in answers.items()})
    vars(module)["NVMLError"] = NVMLError
    return module


def refuse(*_):
    raise NVMLError("Not Supported")


@pytest.fixture
def nvml(monkeypatch):
    """Installs a fake NVML and gives it back; the environment hides no GPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def install(*arguments, **changed):
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(*arguments, **changed))
        return sys.modules["pynvml"]

    return install


def test_two_cards_are_read_as_values_in_the_named_units(nvml):
    nvml()
    first, second = gpus()
    assert first == Gpu(
        index=0,
        name="NVIDIA A100-SXM4-40GB",
        driver="550.54.15",
        torch_index=0,
        capability=(8, 0),
        memory_total=40960,
        memory_free=39936,
        memory_used=1024,
        utilisation=97,
        power=250.5,
        power_limit=400.0,
        temperature=65,
        clock=1110,
        clock_max=1410,
        memory_clock=1215,
        throttle=("power limit", "too hot (driver)"),
        processes=(42,),
    )
    assert (second.index, second.memory_used) == (1, 2048)
    assert first.gigabytes == 43
    assert first.bf16 is True


def test_the_table_names_readings_and_escapes_the_name(nvml, monkeypatch):
    nvml(["<img src=x onerror=alert(1)>"])
    found = gpus()
    for shown in (str(found), found._repr_html_().replace("\xa0", " ")):
        for part in ("cuda:0", "8.0", "1.1 of 42.9 GB", "97 %", "250 of 400 W", "65 °C", "1110 of 1410 MHz", "too hot"):
            assert part in shown
        assert "550.54.15" in shown
    assert "<img" not in found._repr_html_()
    nvml(["A"] * 4)  # more than three stand below each other
    monkeypatch.setenv("COLUMNS", "160")
    assert str(gpus()).split("\n")[4].split()[:3] == ["3", "cuda:3", "A"]


@pytest.mark.parametrize("cards", [["Tesla T4"], []])
def test_cores_ram_and_free_disk_are_shown_with_a_gpu_and_without(nvml, cards, monkeypatch, tmp_path):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "not yet made"))
    nvml(cards)
    found = gpus()
    for shown in (str(found), html.unescape(found._repr_html_()).replace("\xa0", " ")):
        ram, space = r"RAM: ([\d.]+) of ([\d.]+) GB free", r"disk: [\d.]+ [kMGT]?B free for (.+)"
        rest = re.search(rf"CPU: .+, (\d+) cores?; {ram}; {space}", shown)
        assert rest, shown
        assert int(rest[1]) == cores()
        assert 0 < float(rest[2]) <= float(rest[3])
        assert str(tmp_path / "not yet made") in rest[4]
    assert found.note.count("\n") == 0


READINGS = [name for name in vars(fake_nvml()) if name.startswith(("nvmlDeviceGet", "nvmlSystemGet"))]
READINGS = [name for name in READINGS if name not in ("nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")]


def test_a_reading_that_a_device_refuses_is_unknown_and_the_rest_stands(nvml):
    nvml()
    whole = gpus()
    for refused in READINGS:
        nvml(**{refused: NVMLError})
        found = gpus()
        assert len(found) == 2
        lost = [name for name, value in vars(found[0]).items() if value is None and vars(whole[0])[name] is not None]
        assert len(lost) <= 3, (refused, lost)
    nvml(**dict.fromkeys(READINGS, NVMLError))
    found = gpus()
    assert found[0] == Gpu(index=0, name="NVIDIA GPU", torch_index=0)
    assert found[0].bf16 is None
    assert str(found).count("–") >= 14


def test_without_a_working_driver_the_list_is_empty_and_one_line_names_the_cpu(nvml):
    nvml(nvmlInit=NVMLError)
    found = gpus()
    assert found == []
    assert "\n" not in str(found)
    assert "Not Supported" in str(found)
    assert "CPU" in str(found)


def test_without_the_library_the_line_says_so_and_an_apple_machine_is_told_of_mps(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus() == []
    assert "nvidia-ml-py is not installed" in str(gpus())
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert "Apple's GPU (MPS)" in str(gpus())


@pytest.mark.parametrize(
    ("names", "environ", "expected"),
    [
        ("AA", {}, [0, 1]),
        ("AB", {}, [None, None]),  # CUDA puts the fastest first: which one that is cannot be told here
        ("AB", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [0, 1]),
        ("AA", {"CUDA_VISIBLE_DEVICES": "1, 0"}, [1, 0]),
        ("AB", {"CUDA_VISIBLE_DEVICES": "GPU-1"}, [None, 0]),
    ],
)
def test_the_torch_index_follows_cuda_visible_devices(nvml, monkeypatch, names, environ, expected):
    nvml(list(names))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert [card.torch_index for card in gpus()] == expected


def test_a_card_counts_at_least_as_the_size_it_is_sold_under():
    """NVML's figures of T4, L4, RTX 4090, A100-40GB (NVML's and torch's) and RTX 3060; a "24 GB" L4 has 22.5 GiB."""
    for sold, mib in ((16, 15360), (24, 23034), (24, 24564), (40, 40960), (40, 40339), (12, 12288)):
        assert sold <= (Gpu(0, "a card", memory_total=mib).gigabytes or 0) <= sold * 1.1
