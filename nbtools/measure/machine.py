"""The machine: its GPUs as plain values, a thread that samples one of them, its memory, and the names of device and
versions that every measured figure carries.

NVML (through nvidia-ml-py) reads a GPU without starting CUDA on it: that costs no VRAM, and processes can still be
forked. What a device does not report (Colab's vGPUs and MIG slices omit much) is None.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nbtools import disk, show
from nbtools.data import cache, cores
from nbtools.train import TrainState
from nbtools.train import device as devices

MIB = 2**20
PERIOD = 1.0  # seconds between two readings
HEADROOM = {"cuda": 0.1, "cpu": 0.2}  # of what is free: fragments, others; glibc's malloc kept 14–19 % beyond its use
CGROUPS = (  # of a container: limit, in use, the line of memory.stat with what the kernel can drop; versions 2 and 1
    (Path("/sys/fs/cgroup/memory.max"), "memory.current", "inactive_file "),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), "memory.usage_in_bytes", "total_inactive_file "),
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


class Gpus(show.Table, list[Gpu]):
    """The GPUs of this machine; shows as a table. Empty without NVIDIA. note: driver, or why there is none; processor,
    cores, RAM and disk."""

    def __init__(self, found: Iterable[Gpu] = (), note: str = ""):
        super().__init__(found)
        self.note = note

    def footer(self) -> str:
        return self.note

    def __repr__(self) -> str:
        return str(self)

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        """Return (headers, rows): one column per GPU."""
        columns = [cells(gpu) for gpu in self]
        names = columns[0] if columns else ()
        return ["", *(f"GPU {gpu.index}" for gpu in self)], [(name, *(c[name] for c in columns)) for name in names]


def gpus() -> Gpus:
    """Return every NVIDIA GPU of this machine with its present state; never raises."""
    try:
        with opened() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            driver = ask(nvml, "nvmlSystemGetDriverVersion")
            places = torch_indices([ask(nvml, "nvmlDeviceGetUUID", handle) for handle in handles])
            found = []
            for index, (handle, place) in enumerate(zip(handles, places, strict=True)):
                name = ask(nvml, "nvmlDeviceGetName", handle) or "NVIDIA GPU"
                found.append(Gpu(index, name, place, **state(nvml, handle)))
        why = "the driver lists no GPU"
    except Unavailable as error:
        found, driver, why = [], None, str(error)
    if found:
        return Gpus(found, f"NVIDIA driver {driver}; CPU: {processor()}")
    if torch.backends.mps.is_available():
        return Gpus((), f"No NVIDIA GPU. Training uses Apple's GPU (MPS); the CPU is {processor()}.")
    hint = " On Colab: Runtime, Change runtime type, T4 GPU." if "google.colab" in sys.modules else ""
    return Gpus((), f"No NVIDIA GPU ({why.rstrip('.')}). Training uses the CPU: {processor()}.{hint}")


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
    """Return one reading, or None if the device, the driver or an older nvidia-ml-py does not offer it."""
    try:
        return getattr(nvml, question)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def state(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return the readings of one device, as fields of Gpu."""
    memory = ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    use = ask(nvml, "nvmlDeviceGetUtilizationRates", handle)
    running = ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    capability = ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    bits = ask(nvml, "nvmlDeviceGetCurrentClocksEventReasons", handle)
    power, limit = (ask(nvml, f"nvmlDeviceGet{name}", handle) for name in ("PowerUsage", "EnforcedPowerLimit"))
    graphics = 0  # NVML_CLOCK_GRAPHICS
    return {
        "capability": capability and tuple(capability),
        **{f"memory_{name}": memory and getattr(memory, name) // MIB for name in ("total", "used")},
        "utilisation": use and use.gpu,
        "power": power and power / 1000,
        "power_limit": limit and limit / 1000,
        "temperature": ask(nvml, "nvmlDeviceGetTemperature", handle, 0),
        "clock": ask(nvml, "nvmlDeviceGetClockInfo", handle, graphics),
        "clock_max": ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, graphics),
        "throttle": None if bits is None else tuple(text for bit, text in REASONS.items() if bits & bit),
        "processes": None if running is None else tuple(process.pid for process in running),
    }


def cells(g: Gpu) -> dict[str, str | None]:
    """Return row → cell of the table: what is not known is None, which shows as a dash."""
    return {
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
    """Return `11.2 of 42.9 GB`, with a dash for what is not known."""
    if now is None and limit is None:
        return None
    first, last = (show.EMPTY if value is None else write(value) for value in (now, limit))
    return f"{first.removesuffix(last.lstrip('0123456789.'))} of {last}"


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
        with contextlib.suppress(Unavailable), opened():
            while not self.stopping.is_set():
                self.renew()
                self.stopping.wait(PERIOD)

    def renew(self) -> None:
        """Read the GPU now: `latest` may be a second old, which is much of the energy of a short run."""
        with contextlib.suppress(Unavailable), opened() as nvml:
            handle = nvml.nvmlDeviceGetHandleByIndex(self.index)
            readings, energy = state(nvml, handle), ask(nvml, "nvmlDeviceGetTotalEnergyConsumption", handle)
            self.first = energy if self.first is None else self.first
            values = {
                "gpu_utilisation": readings["utilisation"],
                "gpu_memory_used": readings["memory_used"],
                "gpu_power": readings["power"],
                "gpu_energy": None if self.first is None or energy is None else (energy - self.first) / 3.6e6,
                "gpu_throttle": ", ".join(each for each in readings["throttle"] or () if each != "idle") or None,
            }
            self.latest = {name: value for name, value in values.items() if value is not None}


# -- memory


def peak(device: torch.device, act: Callable[[], Any]) -> int:
    """Return the peak bytes that `act` takes, above those in use before: by torch's allocator on CUDA, whose statistics
    begin anew; by what the process holds at most on Linux; 0 elsewhere."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        act()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    before = devices.resident()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    act()
    return max([0, *(mark - before for mark in kilobytes("/proc/self/status", "VmHWM"))])


def held(state: TrainState) -> int:
    """Return the bytes of a state that stay between steps: weights, buffers, moving average, what the optimizer
    keeps."""
    modules = [state.model, *([] if state.ema is None else [state.ema])]
    kept = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    values = [value for each in state.optimizer.state.values() for value in each.values()]
    storages = [t.untyped_storage() for t in (*kept, *values) if isinstance(t, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def room(device: torch.device) -> int | None:
    """Return the bytes that are free now: of the GPU's memory (with what torch holds in reserve), or of RAM, the
    container's limit included. None if the system does not report it (RAM on macOS and Windows)."""
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    rooms = kilobytes("/proc/meminfo", "MemAvailable")
    for limit, used, droppable in CGROUPS:  # file cache that can be dropped is not in use
        if (most := number(limit)) is not None:
            lines = read(limit.with_name("memory.stat"))
            dropped = sum(int(line.split()[1]) for line in lines if line.startswith(droppable))
            rooms.append(max(0, most - (number(limit.with_name(used)) or 0) + dropped))
    return min(rooms, default=None)


def ram_in_all() -> int | None:
    """Return the bytes of RAM that this process may use if nothing else does; None if the system does not report it."""
    limits = [number(limit) for limit, _, _ in CGROUPS]
    return min((size for size in (*kilobytes("/proc/meminfo", "MemTotal"), *limits) if size is not None), default=None)


def kilobytes(file: str, name: str) -> list[int]:
    """Return the bytes of a line of such a file of Linux; [] without it."""
    return [int(line.split()[1]) * 1024 for line in read(Path(file)) if line.startswith(f"{name}:")]


def number(file: Path) -> int | None:
    """Return a cgroup's number of bytes; None for "max", or version 1's equivalent."""
    text = read(file)
    return int(text[0]) if text and text[0].isdigit() and int(text[0]) < 1 << 60 else None


def read(path: Path) -> list[str]:
    """Return the lines of a file; [] if there is none."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


# -- names


def processor() -> str:
    """Return the processor, and what this process may use of the machine: `AMD EPYC 7B13, 2 cores; RAM: 6.1 of 7.8 GB
    free; disk: 74 GB free for /tmp/nbtools`, the folder of staged data and packs."""
    parts = [f"{cpu_name()}, {show.plural(cores(), 'core')}"]
    if free := room(torch.device("cpu")):
        parts.append(f"RAM: {pair(free, ram_in_all() or free, show.size)} free")
    with contextlib.suppress(OSError):
        parts.append(f"disk: {show.size(disk.free_bytes(cache()))} free for {cache()}")
    return "; ".join(parts)


def described(device: torch.device) -> str:
    """Return name and memory of what trains: `NVIDIA A100-SXM4-40GB, 42.3 GB`; of a CPU also its cores."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {show.size(properties.total_memory)}"
    size = ram_in_all()
    parts = ["Apple GPU (MPS)"] if device.type == "mps" else [cpu_name(), show.plural(cores(), "core")]
    return ", ".join([*parts, *([] if size is None else [f"{show.size(size)} RAM"])])


def cpu_name() -> str:
    """Return the model name of the CPU, or its architecture."""
    names = [line for line in read(Path("/proc/cpuinfo")) if line.lower().startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def machine() -> dict[str, str]:
    """Return what every measured figure depends on: device, cores, versions."""
    device = devices.pick()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cores": f"{show.plural(cores(), 'CPU core')}, {show.plural(devices.threads(), 'thread')}",
        "torch": f"torch {torch.__version__}",
        "python": f"Python {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
    }


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


def cpu_time() -> tuple[int, int] | None:
    """Return (ticks in use, ticks in all) of all cores since the machine started; None where that is not said."""
    first, *_ = [*read(Path("/proc/stat")), ""]
    ticks = [int(word) for word in first.split()[1:9]]  # user, nice, system, idle, iowait, irq, softirq, steal
    return (sum(ticks) - ticks[3] - ticks[4], sum(ticks)) if len(ticks) == 8 else None
