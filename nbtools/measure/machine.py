"""The machine: its GPUs as plain values, a thread that samples one of them, and the names of device and versions that
every measured figure carries.

NVML (through nvidia-ml-py) reads a GPU without starting CUDA on it: that costs no VRAM, and processes can still be
forked. What a device does not report (Colab's vGPUs and MIG slices omit much) is None. Tested on a fake NVML only.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nbtools import disk, show
from nbtools.data import cache, cores
from nbtools.measure import memory
from nbtools.train import device as devices

MIB = 2**20
PERIOD = 1.0  # seconds between two readings
REASONS = {  # nvml.h, nvmlClocksEventReason*
    0x1: "idle",
    0x2: "clocks set by an application",
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "waiting for the slowest of a sync-boost group",
    0x20: "too hot (driver)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU at one moment; None is what it does not report.

    index: NVML's, by PCI bus, as nvidia-smi shows it; CUDA_VISIBLE_DEVICES does not change it. torch_index: the N of
    torch's `cuda:N`, None for a GPU that this process does not see, or where the two orders cannot be matched.
    Memory in MiB, utilisation in % of the last sample period, power in W, temperature in °C, clocks in MHz. processes:
    pids of programs that compute on it.
    """

    index: int
    name: str
    driver: str | None = None
    torch_index: int | None = None
    capability: tuple[int, int] | None = None
    memory_total: int | None = None
    memory_free: int | None = None
    memory_used: int | None = None
    utilisation: int | None = None
    power: float | None = None
    power_limit: float | None = None
    temperature: int | None = None
    clock: int | None = None
    clock_max: int | None = None
    memory_clock: int | None = None
    throttle: tuple[str, ...] | None = None
    processes: tuple[int, ...] | None = None

    @property
    def gigabytes(self) -> int | None:
        """Memory in decimal GB, never below the figure a card is sold under: a "24 GB" L4 has 22.5 GiB."""
        return None if self.memory_total is None else round(self.memory_total * MIB / 1e9)

    @property
    def bf16(self) -> bool | None:
        """Whether bfloat16 runs in hardware: Ampere and later."""
        return None if self.capability is None else self.capability >= (8, 0)


class Gpus(show.Table, list[Gpu]):
    """The GPUs of this machine; shows as a table. Empty without NVIDIA. note: the rest of the machine: processor,
    cores, RAM and disk. missing: why there is none."""

    def __init__(self, found: Iterable[Gpu] = (), note: str = "", missing: str = ""):
        super().__init__(found)
        self.note, self.missing = note, missing

    def footer(self) -> str:
        return self.note

    def __repr__(self) -> str:
        return str(self)

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        """(headers, rows): one column per GPU if they fit side by side, else one row per GPU."""
        headers, rows = [*(cells(self[0]) if self else ())], [list(cells(g).values()) for g in self]
        if len(rows) > 3:
            return headers, rows
        return ["", *(f"GPU {row[0]}" for row in rows)], list(zip(headers, *rows, strict=True))[1:]


def gpus() -> Gpus:
    """Every NVIDIA GPU of this machine with its present state; never raises."""
    try:
        with opened() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            names = [word(ask(nvml, "nvmlDeviceGetName", h)) or "NVIDIA GPU" for h in handles]
            uuids = [word(ask(nvml, "nvmlDeviceGetUUID", h)) or "" for h in handles]
            places = torch_indices(names, uuids, os.environ)
            driver = word(ask(nvml, "nvmlSystemGetDriverVersion"))
            found = [
                Gpu(index=i, name=names[i], driver=driver, torch_index=places[i], **state(nvml, handle))
                for i, handle in enumerate(handles)
            ]
    except Unavailable as why:
        return without_nvidia(str(why))
    if not found:
        return without_nvidia("the driver lists no GPU")
    return Gpus(found, f"NVIDIA driver {driver}; CPU: {processor()}")


def nvml_index(torch_index: int) -> int | None:
    """NVML's index of torch's `cuda:N`, None if it cannot be known."""
    return next((g.index for g in gpus() if g.torch_index == torch_index), None)


class Unavailable(Exception):
    """NVML cannot be used; the message says why."""


@contextlib.contextmanager
def opened() -> Iterator[Any]:
    """NVML, started and stopped (it is reference-counted). Raises Unavailable."""
    try:
        import pynvml as nvml
    except ImportError:
        raise Unavailable("nvidia-ml-py is not installed") from None
    try:
        nvml.nvmlInit()
        yield nvml
    except nvml.NVMLError as error:
        raise Unavailable(str(error)) from None
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def ask(nvml: Any, question: str, *arguments: Any) -> Any:
    """One reading, or None if the device, the driver or an older nvidia-ml-py does not offer it."""
    try:
        return getattr(nvml, question)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def state(nvml: Any, handle: Any) -> dict[str, Any]:
    """The readings of one device, as fields of Gpu."""
    memory = ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    use = ask(nvml, "nvmlDeviceGetUtilizationRates", handle)
    running = ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    capability = ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    bits = ask(nvml, "nvmlDeviceGetCurrentClocksEventReasons", handle)
    if bits is None:  # drivers before 535 know the older name only
        bits = ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    graphics, ram = 0, 2  # NVML_CLOCK_GRAPHICS, NVML_CLOCK_MEM
    return {
        "capability": capability and tuple(capability),
        **{f"memory_{name}": memory and getattr(memory, name) // MIB for name in ("total", "free", "used")},
        "utilisation": use and use.gpu,
        "power": thousandth(ask(nvml, "nvmlDeviceGetPowerUsage", handle)),
        "power_limit": thousandth(ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle)),
        "temperature": ask(nvml, "nvmlDeviceGetTemperature", handle, 0),
        "clock": ask(nvml, "nvmlDeviceGetClockInfo", handle, graphics),
        "clock_max": ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, graphics),
        "memory_clock": ask(nvml, "nvmlDeviceGetClockInfo", handle, ram),
        "throttle": None if bits is None else tuple(text for bit, text in REASONS.items() if bits & bit),
        "processes": None if running is None else tuple(process.pid for process in running),
    }


def thousandth(value: float | None) -> float | None:
    return None if value is None else value / 1000


def word(text: str | bytes | None) -> str | None:
    return text.decode(errors="replace") if isinstance(text, bytes) else text


def torch_indices(names: Sequence[str], uuids: Sequence[str], environ: Mapping[str, str]) -> list[int | None]:
    """Torch's index of each NVML device, decided without starting CUDA; None: hidden, or not knowable.

    CUDA puts the fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID, so plain numbers are certain only then or among
    equal GPUs. It reads CUDA_VISIBLE_DEVICES up to the first entry that it does not know.
    """
    same_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(set(names)) <= 1
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    entries = [str(i) for i in range(len(names))] if listed is None else listed.split(",")
    found: list[int | None] = [None] * len(names)
    for place, entry in enumerate(part.strip() for part in entries):
        if entry.isdecimal() and int(entry) < len(names):
            match = [int(entry)] if same_order else []
        else:
            match = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
            if len(match) != 1:
                break
        for i in match:
            found[i] = place
    return found


def cells(g: Gpu) -> dict[str, str | None]:
    """Header → cell of the table: what is not known is None, which shows as a dash."""
    return {
        "GPU": str(g.index),
        "torch": None if g.torch_index is None else f"cuda:{g.torch_index}",
        "name": g.name,
        "capability": None if g.capability is None else ".".join(map(str, g.capability)),
        "memory": pair(g.memory_used, g.memory_total, lambda count: show.size(count * MIB)),
        "use": None if g.utilisation is None else f"{g.utilisation} %",
        "power": pair(g.power, g.power_limit, "{:.0f} W".format),
        "temperature": None if g.temperature is None else f"{g.temperature} °C",
        "clock": pair(g.clock, g.clock_max, "{:.0f} MHz".format),
        "throttled by": None if g.throttle is None else ", ".join(g.throttle) or "nothing",
        "processes": None if g.processes is None else str(len(g.processes)),
    }


def pair(now: float | None, limit: float | None, write: Callable[[float], str]) -> str | None:
    """`11.2 of 42.9 GB`, with a dash for what is not known."""
    if now is None and limit is None:
        return None
    first, last = (show.EMPTY if value is None else write(value) for value in (now, limit))
    return f"{first.removesuffix(last.lstrip('0123456789.'))} of {last}"


def without_nvidia(why: str) -> Gpus:
    """What to say on machines without NVIDIA: what does the work, and where to get a GPU."""
    if torch.backends.mps.is_available():
        return Gpus((), f"No NVIDIA GPU. Training uses Apple's GPU (MPS); the CPU is {processor()}.", "No NVIDIA GPU.")
    hint = " On Colab: Runtime, Change runtime type, T4 GPU." if "google.colab" in sys.modules else ""
    missing = f"No NVIDIA GPU ({why.rstrip('.')})."
    return Gpus((), f"{missing} Training uses the CPU: {processor()}.{hint}", missing + hint)


def processor() -> str:
    """The processor, and what this process may use of the machine: `AMD EPYC 7B13, 2 cores; RAM: 6.1 of 7.8 GB free;
    disk: 74 GB free for /tmp/nbtools`, the folder of staged data and packs."""
    parts = [f"{cpu_name()}, {show.plural(cores(), 'core')}"]
    if room := memory.ram():
        parts.append(f"RAM: {pair(room.bytes, memory.ram_in_all() or room.bytes, show.size)} free")
    with contextlib.suppress(OSError):
        parts.append(f"disk: {show.size(disk.free_bytes(cache()))} free for {cache()}")
    return "; ".join(parts)


def described(device: torch.device) -> str:
    """Name and memory of what trains: `NVIDIA A100-SXM4-40GB, 42.3 GB`; of a CPU also its cores."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {show.size(properties.total_memory)}"
    size = memory.ram_in_all()
    parts = ["Apple GPU (MPS)"] if device.type == "mps" else [cpu_name(), show.plural(cores(), "core")]
    return ", ".join([*parts, *([] if size is None else [f"{show.size(size)} RAM"])])


def cpu_name() -> str:
    """The model name of the CPU, or its architecture."""
    with contextlib.suppress(OSError):
        if platform.system() == "Darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True).stdout.strip() or platform.machine()
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_time() -> tuple[int, int] | None:
    """(ticks in use, ticks in all) of all cores since the machine started; None where the system does not say."""
    first, *_ = [*memory.read(Path("/proc/stat")), ""]
    ticks = [int(word) for word in first.split()[1:9]]  # user, nice, system, idle, iowait, irq, softirq, steal
    return (sum(ticks) - ticks[3] - ticks[4], sum(ticks)) if len(ticks) == 8 else None


def others_share() -> Callable[[], float]:
    """Return what tells the share of the processor that other programs took since, 0–1."""
    before, own = cpu_time(), time.process_time()

    def share() -> float:
        now = cpu_time()
        if not before or not now or now[1] == before[1]:
            return 0.0
        busy = (now[0] - before[0]) - (time.process_time() - own) * os.sysconf("SC_CLK_TCK")
        return min(max(busy / (now[1] - before[1]), 0.0), 1.0)

    return share


class Sampler:
    """Reads one GPU (NVML's index) in the background once a second, inside its `with`. latest: columns of a history
    row, memory in MiB, utilisation in %, power in W, energy in Wh since sampling began; what is unknown is absent, and
    without NVIDIA all of it is None."""

    def __init__(self, index: int = 0):
        self.index = index
        self.latest: dict[str, float | str] | None = None
        self.first: float | None = None  # energy in mJ at the first reading
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.work, name="nbtools-gpu", daemon=True)

    def __enter__(self) -> Sampler:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.stopping.set()
        self.thread.join()

    def work(self) -> None:
        with contextlib.suppress(Unavailable), opened() as nvml:
            while not self.stopping.is_set():
                self.read(nvml)
                self.stopping.wait(PERIOD)

    def renew(self) -> None:
        """Read the GPU now: `latest` may be a second old, which is much of the energy of a short run."""
        with contextlib.suppress(Unavailable), opened() as nvml:
            self.read(nvml)

    def read(self, nvml: Any) -> None:
        handle = nvml.nvmlDeviceGetHandleByIndex(self.index)
        readings, energy = state(nvml, handle), ask(nvml, "nvmlDeviceGetTotalEnergyConsumption", handle)
        self.first = energy if self.first is None else self.first
        values = {
            "gpu_utilisation": readings["utilisation"],
            "gpu_memory_used": readings["memory_used"],
            "gpu_power": readings["power"],
            "gpu_energy": None if self.first is None or energy is None else (energy - self.first) / 3.6e6,
            "gpu_throttle": ", ".join(reason for reason in readings["throttle"] or () if reason != "idle") or None,
        }
        self.latest = {name: value for name, value in values.items() if value is not None}


def machine() -> dict[str, str]:
    """What every measured figure depends on: device, cores, versions."""
    device = devices.pick()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cores": f"{show.plural(cores(), 'CPU core')}, {show.plural(devices.threads(), 'thread')}",
        "torch": f"torch {torch.__version__}",
        "python": f"Python {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
    }
