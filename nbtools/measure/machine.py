"""The machine: its GPUs as plain values, a thread that samples one of them, and the names of device and versions that
every measured figure carries.

NVML (through nvidia-ml-py) reads a GPU without starting CUDA on it: that costs no VRAM, and processes can still be
forked. What a device does not report (Colab's vGPUs and MIG slices omit much) is None.
"""

from __future__ import annotations

import contextlib
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nbtools import disk, show
from nbtools.data import cache, cores
from nbtools.train import device as devices

MIB = 2**20
PERIOD = 1.0  # seconds between two readings
CGROUPS = (  # of a container: limit, in use, the line of memory.stat with what the kernel can drop; versions 2 and 1
    (Path("/sys/fs/cgroup/memory.max"), "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), "memory.usage_in_bytes", "total_inactive_file"),
)
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

    index: NVML's, by PCI bus, as nvidia-smi shows it. torch_index: the N of torch's `cuda:N`, None for a GPU that this
    process does not see; of several it is known once CUDA has started. Memory in MiB, utilisation in % of the last
    sample period, power in W, temperature in °C, clocks in MHz. processes: pids of programs that compute on it.
    """

    index: int
    name: str
    torch_index: int | None = None
    capability: tuple[int, int] | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    utilisation: int | None = None
    power: float | None = None
    power_limit: float | None = None
    temperature: int | None = None
    clock: int | None = None
    clock_max: int | None = None
    throttle: tuple[str, ...] | None = None
    processes: tuple[int, ...] | None = None

    def cells(self) -> dict[str, str | None]:
        """Return row → cell of the table: what is not known is None, which shows as a dash."""
        return {
            "torch": written(self.torch_index, "cuda:{}".format),
            "name": self.name,
            "capability": written(self.capability, lambda pair: ".".join(map(str, pair))),
            "memory": of(self.memory_used, self.memory_total, lambda count: show.size(count * MIB)),
            "use": written(self.utilisation, "{} %".format),
            "power": of(self.power, self.power_limit, "{:.0f} W".format),
            "temperature": written(self.temperature, "{} °C".format),
            "clock": of(self.clock, self.clock_max, "{:.0f} MHz".format),
            "throttled by": written(self.throttle, lambda reasons: ", ".join(reasons) or "nothing"),
            "processes": written(self.processes, lambda pids: str(len(pids))),
        }


def written(value: Any, write: Callable[[Any], str]) -> str | None:
    return None if value is None else write(value)


def of(now: float | None, limit: float | None, write: Callable[[Any], str]) -> str | None:
    """Return `11.2 GB of 42.9 GB`, with a dash for what is not known."""
    if now is None and limit is None:
        return None
    return " of ".join(written(value, write) or show.EMPTY for value in (now, limit))


class Gpus(show.Table, list[Gpu]):
    """The GPUs of this machine; shows as a table. Empty without NVIDIA. note: driver, or why there is none; processor,
    cores, RAM and disk."""

    def __init__(self, gpus_here: Iterable[Gpu] = (), note: str = ""):
        super().__init__(gpus_here)
        self.note = note

    def footer(self) -> str:
        return self.note

    def __repr__(self) -> str:
        return str(self)

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        """Return (headers, rows): one column per GPU."""
        columns = [gpu.cells() for gpu in self]
        names = columns[0] if columns else ()
        return ["", *(f"GPU {gpu.index}" for gpu in self)], [(name, *(c[name] for c in columns)) for name in names]


def gpus() -> Gpus:
    """Return every NVIDIA GPU of this machine with its present state; never raises."""
    gpus_here, why = list[Gpu](), "the driver lists no GPU"
    try:
        with open_nvml() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            places = torch_indices([ask(nvml, "nvmlDeviceGetUUID", handle) for handle in handles])
            for index, (handle, place) in enumerate(zip(handles, places, strict=True)):
                name = ask(nvml, "nvmlDeviceGetName", handle) or "NVIDIA GPU"
                gpus_here.append(Gpu(index, name, place, **readings(nvml, handle)))
            driver = ask(nvml, "nvmlSystemGetDriverVersion")
    except Unavailable as error:
        why = str(error).rstrip(".")
    if gpus_here:
        return Gpus(gpus_here, f"NVIDIA driver {driver}; CPU: {processor()}")
    if torch.backends.mps.is_available():
        return Gpus((), f"No NVIDIA GPU. Training uses Apple's GPU (MPS); the CPU is {processor()}.")
    hint = " On Colab: Runtime, Change runtime type, T4 GPU." if "google.colab" in sys.modules else ""
    return Gpus((), f"No NVIDIA GPU ({why}). Training uses the CPU: {processor()}.{hint}")


def nvml_index(torch_index: int) -> int | None:
    """Return NVML's index of torch's `cuda:N`, None if it cannot be known."""
    return next((g.index for g in gpus() if g.torch_index == torch_index), None)


def torch_indices(uuids: Sequence[str | None]) -> list[int | None]:
    """Return torch's index of each NVML device: CUDA_VISIBLE_DEVICES hides and orders them, CUDA itself puts the
    fastest first. A single one is certain, several are once CUDA has started."""
    here = range(torch.cuda.device_count())
    if len(here) == len(uuids) == 1:
        return [0]
    if not torch.cuda.is_initialized():
        return [None] * len(uuids)
    known = {f"GPU-{torch.cuda.get_device_properties(index).uuid}": index for index in here}
    return [known.get(uuid or "") for uuid in uuids]


class Unavailable(Exception):
    """NVML cannot be used; the message says why."""


@contextlib.contextmanager
def open_nvml() -> Iterator[Any]:
    """Yield NVML, started and stopped (it is reference-counted). Raises Unavailable."""
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
    """Return one reading, or None if the device, the driver or an older nvidia-ml-py does not offer it."""
    try:
        return getattr(nvml, question)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def readings(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return what a device reports now, as fields of Gpu."""

    def get(name: str, *more: int) -> Any:
        return ask(nvml, f"nvmlDeviceGet{name}", handle, *more)

    memory, use, graphics = get("MemoryInfo"), get("UtilizationRates"), 0  # NVML_CLOCK_GRAPHICS
    running, bits = get("ComputeRunningProcesses"), get("CurrentClocksEventReasons")
    power, limit, capability = get("PowerUsage"), get("EnforcedPowerLimit"), get("CudaComputeCapability")
    return {
        "capability": capability and tuple(capability),
        "memory_total": memory and memory.total // MIB,
        "memory_used": memory and memory.used // MIB,
        "utilisation": use and use.gpu,
        "power": power and power / 1000,
        "power_limit": limit and limit / 1000,
        "temperature": get("Temperature", 0),
        "clock": get("ClockInfo", graphics),
        "clock_max": get("MaxClockInfo", graphics),
        "throttle": None if bits is None else tuple(text for bit, text in REASONS.items() if bits & bit),
        "processes": None if running is None else tuple(process.pid for process in running),
    }


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
        with contextlib.suppress(Unavailable), open_nvml():
            while not self.stopping.is_set():
                self.renew()
                self.stopping.wait(PERIOD)

    def renew(self) -> None:
        """Read the GPU now: `latest` may be a second old, which is much of the energy of a short run."""
        with contextlib.suppress(Unavailable), open_nvml() as nvml:
            handle = nvml.nvmlDeviceGetHandleByIndex(self.index)
            now, energy = readings(nvml, handle), ask(nvml, "nvmlDeviceGetTotalEnergyConsumption", handle)
            self.first = energy if self.first is None else self.first
            values = {
                "gpu_utilisation": now["utilisation"],
                "gpu_memory_used": now["memory_used"],
                "gpu_power": now["power"],
                "gpu_energy": None if self.first is None or energy is None else (energy - self.first) / 3.6e6,
                "gpu_throttle": ", ".join(each for each in now["throttle"] or () if each != "idle") or None,
            }
            self.latest = {name: value for name, value in values.items() if value is not None}


# -- memory and names


def room(device: torch.device) -> int | None:
    """Return the bytes that are free now: of the GPU's memory (with what torch holds in reserve), or of RAM, the
    container's limit included. None if the system does not report it (RAM on macOS and Windows)."""
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    rooms = [1024 * kilobytes for kilobytes in numbers("/proc/meminfo", "MemAvailable:")]
    for limit, used, droppable in CGROUPS:  # file cache that can be dropped is not in use
        for most in numbers(limit):
            in_use = sum(numbers(limit.with_name(used))) - sum(numbers(limit.with_name("memory.stat"), droppable))
            rooms.append(max(0, most - in_use))
    return min(rooms, default=None)


def numbers(path: str | Path, word: str = "") -> list[int]:
    """Return the number of each line of a file of Linux that begins with the word; [] where there is none."""
    try:
        lines = [line.split() for line in Path(path).read_text(errors="replace").splitlines()]
    except OSError:
        return []
    words = [line[1:2] if word else line for line in lines if not word or line[:1] == [word]]
    return [int(each) for line in words for each in line if each.isdigit()]


def processor() -> str:
    """Return the processor, and what is free: `AMD EPYC 7B13, 2 cores; RAM: 6.1 GB free; disk: 74 GB free for
    /tmp/nbtools`, the folder of staged data and packs."""
    parts = [f"{cpu_name()}, {show.plural(cores(), 'core')}"]
    if free := room(torch.device("cpu")):
        parts.append(f"RAM: {show.size(free)} free")
    with contextlib.suppress(OSError):
        parts.append(f"disk: {show.size(disk.free_bytes(cache()))} free for {cache()}")
    return "; ".join(parts)


def cpu_name() -> str:
    """Return the model name of the CPU, or its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine(device: torch.device | None = None) -> dict[str, str]:
    """Return what every measured figure depends on: device, cores, versions."""
    device = device or devices.pick()
    name = cpu_name() if device.type == "cpu" else "Apple GPU (MPS)"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name}, {show.size(properties.total_memory)}"
    return {
        "device": name,
        "cores": f"{show.plural(cores(), 'CPU core')}, {show.plural(devices.threads(), 'thread')}",
        "torch": f"torch {torch.__version__}",
        "python": f"Python {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
    }
