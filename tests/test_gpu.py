"""GPU readings against a fake NVML: two cards, cards that refuse readings, no driver, no library."""

import html
import re
import sys
import time
import types

import pytest
import torch
import toy

from nbtools.data import cores
from nbtools.live import Surface
from nbtools.measure import Gpu, Sampler, check, follow, gpus
from nbtools.measure.check import formats
from nbtools.measure.machine import cpu_name, torch_indices
from nbtools.train import History, Record, TrainState

GIB = 2**30
FORMATS = ("float32", "TF32", "bf16", "fp16")


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
    assert str(gpus()).split("\n")[5].split()[:3] == ["3", "cuda:3", "A"]


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


def test_an_older_nvml_with_bytes_and_the_older_throttle_name_is_read(nvml):
    module = nvml([b"Tesla T4"], nvmlDeviceGetCudaComputeCapability=plain((7, 5)))
    del module.nvmlDeviceGetCurrentClocksEventReasons
    module.nvmlDeviceGetCurrentClocksThrottleReasons = plain(0x1)
    (found,) = gpus()
    assert found.name == "Tesla T4"
    assert found.throttle == ("idle",)
    assert found.bf16 is False


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"])
def test_without_a_working_driver_the_list_is_empty_and_one_line_names_the_cpu(nvml, broken):
    closed = []
    nvml(**{"nvmlShutdown": lambda: closed.append(True), broken: NVMLError})
    found = gpus()
    assert found == []
    assert closed == [True]
    assert "\n" not in str(found)
    assert "Not Supported" in str(found)
    assert cpu_name() in str(found)
    assert html.escape(found.note) in found._repr_html_()


def test_without_the_library_the_line_says_so_and_an_apple_machine_is_told_of_mps(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus() == []
    assert "nvidia-ml-py is not installed" in str(gpus())
    with Sampler() as sampler:
        pass
    assert sampler.latest is None
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert "Apple's GPU (MPS)" in str(gpus())


@pytest.mark.parametrize(
    ("names", "environ", "expected"),
    [
        ("AA", {}, [0, 1]),
        ("AB", {}, [None, None]),  # CUDA puts the fastest first: which one that is cannot be told here
        ("AB", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [0, 1]),
        ("AA", {"CUDA_VISIBLE_DEVICES": "1"}, [None, 0]),
        ("AA", {"CUDA_VISIBLE_DEVICES": "1, 0"}, [1, 0]),
        ("AA", {"CUDA_VISIBLE_DEVICES": ""}, [None, None]),
        ("AA", {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, [0, None]),
        ("AA", {"CUDA_VISIBLE_DEVICES": "7,0"}, [None, None]),
        ("AB", {"CUDA_VISIBLE_DEVICES": "GPU-1"}, [None, 0]),
        ("AB", {"CUDA_VISIBLE_DEVICES": "GPU-"}, [None, None]),
    ],
)
def test_the_torch_index_follows_cuda_visible_devices(names, environ, expected):
    assert torch_indices(list(names), ["GPU-0", "GPU-1"], environ) == expected


def test_a_card_counts_at_least_as_the_size_it_is_sold_under():
    """NVML's figures of T4, L4, RTX 4090, A100-40GB (NVML's and torch's) and RTX 3060; a "24 GB" L4 has 22.5 GiB."""
    for sold, mib in ((16, 15360), (24, 23034), (24, 24564), (40, 40960), (40, 40339), (12, 12288)):
        assert sold <= (Gpu(0, "a card", memory_total=mib).gigabytes or 0) <= sold * 1.1


def wait_for(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def test_the_sampler_reads_in_the_background_until_its_end(nvml, monkeypatch):
    closed, counter = [], iter(range(1_000_000, 2_000_000, 7_200))
    nvml(nvmlDeviceGetTotalEnergyConsumption=lambda _: next(counter), nvmlShutdown=lambda: closed.append(True))
    monkeypatch.setattr(sys.modules[Sampler.__module__], "PERIOD", 0.005)

    def energy() -> float:
        return float((sampler.latest or {}).get("gpu_energy", 0.0))

    with Sampler(index=1) as sampler:
        wait_for(lambda: energy() > 0.005)
    assert not sampler.thread.is_alive()
    assert closed == [True]
    assert energy() == pytest.approx(0.002 * round(energy() / 0.002)), "7,200 mJ a reading, recorded in Wh"
    assert sampler.latest == {
        "gpu_utilisation": 97,
        "gpu_memory_used": 2048,
        "gpu_power": 250.5,
        "gpu_energy": energy(),
        "gpu_throttle": "power limit, too hot (driver)",
    }


def test_what_a_device_refuses_is_no_column_and_an_idle_clock_no_reason(nvml):
    nvml(**dict.fromkeys(READINGS, NVMLError) | {"nvmlDeviceGetCurrentClocksEventReasons": plain(0x1)})
    with Sampler() as sampler:
        wait_for(lambda: sampler.latest is not None)
        start = time.monotonic()
    assert time.monotonic() - start < 0.9, "its end does not wait for the next reading"
    assert sampler.latest == {}


def test_a_run_on_a_gpu_reads_it_while_it_lasts(nvml, tmp_path):
    nvml()
    pack = toy.make_pack(tmp_path, count=60)
    state = TrainState(toy, pack, toy.PLAN)
    state.device = torch.device("cuda", 1)  # for the surface alone: nothing is trained
    with Surface(tmp_path / "run", state, pack, History(), toy.PLAN, show=False) as surface:
        sampler = surface.sampler
        assert sampler is not None
        assert sampler.index == 1
        wait_for(lambda: sampler.latest is not None)
        row = surface.measured(Record("step", 0, 1, 16, {"loss": 1.0}))
    assert row.values["gpu_utilisation"] == 97
    assert not sampler.thread.is_alive()


def test_energy_is_read_once_more_when_training_ends(nvml, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[Sampler.__module__], "PERIOD", 3600.0)
    used = [0.0]  # mJ
    nvml(nvmlDeviceGetTotalEnergyConsumption=lambda _: used[0])
    state = TrainState(toy, toy.make_pack(tmp_path, count=60), toy.PLAN)
    state.device = torch.device("cuda", 1)  # for the surface alone
    with Surface(tmp_path / "run", state, toy.make_pack(tmp_path / "b"), History(), toy.PLAN, show=False) as surface:
        sampler = surface.sampler
        assert sampler is not None
        wait_for(lambda: sampler.latest is not None)
        used[0] = 7.2e6
        rows = [surface.measured(Record("epoch", 0, 4, 60, {"train_loss": 1.0}))]
        state.position.epoch = toy.PLAN.epochs
        rows += [surface.measured(Record("epoch", 1, 8, 120, {"train_loss": 1.0}))]
    assert [row.values["gpu_energy"] for row in rows] == [0.0, pytest.approx(2.0)], "Wh"


def test_the_check_shows_the_cards_and_their_driver(nvml, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    nvml()
    found = check()
    shown = str(found)
    assert all(part in shown for part in ("cuda:1", "8.0", "1.1 of 42.9 GB", "550.54.15", "GFLOP/s"))
    assert found.to_dict()["gpus"][1]["memory_used"] == 2048


@pytest.mark.parametrize(("capability", "trains"), [((7, 5), ["float32", "fp16"]), ((8, 0), [*FORMATS])])
def test_the_formats_that_a_card_trains_in_follow_its_capability(capability, trains, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = formats(torch.device("cuda"))
    assert [name for name, (dtype, _) in found.items() if dtype is not None] == trains
    assert all("7.5" in found[name][1] for name in {*FORMATS} - {*trains})


@pytest.mark.cuda
def test_each_format_is_measured_on_the_card_and_torch_is_left_as_it_was():
    before = torch.get_float32_matmul_precision()
    rates = {each.name: each.flops or 0.0 for each in check({}).arithmetic}
    assert torch.get_float32_matmul_precision() == before
    assert rates["fp16"] > rates["float32"] > 1e11
    assert (rates["TF32"] > rates["float32"]) == (torch.cuda.get_device_capability() >= (8, 0))


def test_watching_keeps_the_driver_awake_and_lets_go_of_it(nvml, monkeypatch):
    monkeypatch.setattr(sys.modules[Sampler.__module__], "PERIOD", 0.0)
    monkeypatch.setattr(sys.modules[Sampler.__module__], "FIRST", 0.0)
    calls, shown = [], []

    def show(text):
        shown.append((text, calls.count("init") - calls.count("shutdown")))
        if len(shown) == 3:
            raise KeyboardInterrupt

    nvml(nvmlInit=lambda: calls.append("init"), nvmlShutdown=lambda: calls.append("shutdown"))
    with pytest.raises(KeyboardInterrupt):
        follow(show)
    assert all("97 %" in text and "CPU: " in text and held == 1 for text, held in shown)
    assert calls.count("init") == calls.count("shutdown")
