"""The machine: its GPUs, a thread that samples one, the names that every measured figure carries, and matrix rates.
NVML reads a GPU without starting CUDA on it: that costs no VRAM, and processes can still be forked."""

import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch

from nbtools import disk, show
from nbtools.data import cache, cores
from nbtools.disk import VERSION
from nbtools.measure.timing import untouched
from nbtools.train import device as devices

MIB = 2**20
PERIOD, SECONDS = 1.0, 0.1  # between two readings; of matrix products in each precision
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
READINGS: dict[str, tuple[str, tuple[int, ...], Callable[[Any], Any]]] = {  # field of Gpu → question, its numbers, unit
    "capability": ("CudaComputeCapability", (), tuple),
    "memory_total": ("MemoryInfo", (), lambda memory: memory.total // MIB),
    "memory_used": ("MemoryInfo", (), lambda memory: memory.used // MIB),
    "utilisation": ("UtilizationRates", (), lambda rates: rates.gpu),
    "power": ("PowerUsage", (), lambda milliwatts: milliwatts / 1000),
    "power_limit": ("EnforcedPowerLimit", (), lambda milliwatts: milliwatts / 1000),
    "temperature": ("Temperature", (0,), int),  # NVML_TEMPERATURE_GPU
    "clock": ("ClockInfo", (0,), int),  # NVML_CLOCK_GRAPHICS
    "clock_max": ("MaxClockInfo", (0,), int),
    "throttle": ("CurrentClocksEventReasons", (), lambda bits: tuple(REASONS[bit] for bit in REASONS if bits & bit)),
    "processes": ("ComputeRunningProcesses", (), lambda running: tuple(process.pid for process in running)),
}


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU at one moment; None is what it does not report. index: NVML's, by PCI bus, as nvidia-smi shows it.
    Memory in MiB, utilisation in % of the last sample period, power in W, temperature in °C, clocks in MHz. processes:
    pids of programs that compute on it."""

    index: int
    name: str
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
        return {
            "name": self.name,
            "capability": cell(lambda pair: ".".join(map(str, pair)), self.capability),
            "memory": cell(lambda count: show.size(count * MIB), self.memory_used, self.memory_total),
            "use": cell("{} %".format, self.utilisation),
            "power": cell("{:.0f} W".format, self.power, self.power_limit),
            "temperature": cell("{} °C".format, self.temperature),
            "clock": cell("{:.0f} MHz".format, self.clock, self.clock_max),
            "throttled by": cell(lambda reasons: ", ".join(reasons) or "nothing", self.throttle),
            "processes": cell(lambda pids: str(len(pids)), self.processes),
        }


def cell(write: Callable[[Any], str], *values: Any) -> str | None:
    """Return `11.2 GB of 42.9 GB`, with a dash for what is not known; None where nothing is."""
    known = any(value is not None for value in values)
    return " of ".join(show.EMPTY if value is None else write(value) for value in values) if known else None


class Gpus(show.Table, list[Gpu]):
    """The GPUs of this machine, a table; empty without NVIDIA. note: driver or why none; cores, free RAM and disk."""

    note = ""

    def footer(self) -> str:
        return self.note

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        columns = [gpu.cells() for gpu in self]
        names = columns[0] if columns else ()
        return ["", *(f"GPU {gpu.index}" for gpu in self)], [(name, *(c[name] for c in columns)) for name in names]


def gpus() -> Gpus:
    """Return every NVIDIA GPU of this machine with its current state; never raises."""
    made, why, processor = Gpus(), "the driver lists no GPU", f"{cpu_name()}, {show.plural(cores(), 'core')}"
    if free := room(torch.device("cpu")):
        processor += f"; RAM: {show.size(free)} free"
    with suppress(OSError):
        processor += f"; disk: {show.size(disk.free_bytes(cache()))} free for {cache()}"
    try:
        with open_nvml() as nvml:
            made.note = f"NVIDIA driver {ask(nvml, 'SystemGetDriverVersion')}; CPU: {processor}"
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                made.append(Gpu(index, ask(nvml, "DeviceGetName", handle) or "NVIDIA GPU", **readings(nvml, handle)))
    except Unavailable as error:
        why = str(error).rstrip(".")
    if not made and torch.backends.mps.is_available():
        made.note = f"No NVIDIA GPU. Training uses Apple's GPU (MPS); the CPU is {processor}."
    elif not made and torch.cuda.is_available():
        made.note = f"NVML shows no GPU ({why}), but torch trains on one. CPU: {processor}."
    elif not made:
        hint = " On Colab: Runtime, Change runtime type, T4 GPU." if "google.colab" in sys.modules else ""
        made.note = f"No NVIDIA GPU ({why}). Training uses the CPU: {processor}.{hint}"
    elif not torch.cuda.is_available():
        made.note += f". torch {torch.__version__} cannot use it: training uses the CPU"
    return made


class Unavailable(Exception):
    """NVML cannot be used; the message says why."""


@contextmanager
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
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def ask(nvml: Any, question: str, *arguments: Any) -> Any:
    """Return one reading, or None if the device, the driver or an older nvidia-ml-py does not offer it."""
    try:
        return getattr(nvml, f"nvml{question}")(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def readings(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return what a device reports now, as fields of Gpu."""
    answers = {name: ask(nvml, f"DeviceGet{each[0]}", handle, *each[1]) for name, each in READINGS.items()}
    return {name: None if answer is None else READINGS[name][2](answer) for name, answer in answers.items()}


class Sampler:
    """Reads the GPU of a run once a second, inside its `with`. latest: columns of a history row, memory in MiB,
    utilisation in %, power in W, energy in Wh since it began; what is unknown is absent; without NVIDIA None."""

    def __init__(self, device: torch.device):
        self.device = device
        self.latest: dict[str, float | str] | None = None
        self.first: float | None = None  # energy in mJ at the first reading
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.work, name="nbtools-gpu", daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.stopping.set()
        self.thread.join()

    def work(self) -> None:
        with suppress(Unavailable), open_nvml():
            while not self.stopping.is_set():
                self.renew()
                self.stopping.wait(PERIOD)

    def renew(self) -> None:
        """Read the GPU now: `latest` may be a second old, which is much of the energy of a short run."""
        with suppress(Unavailable), open_nvml() as nvml:
            handle = nvml.nvmlDeviceGetHandleByIndex(0)
            if nvml.nvmlDeviceGetCount() > 1:  # CUDA hides and orders them in its own way
                handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(self.device).uuid}")
            now, energy = readings(nvml, handle), ask(nvml, "DeviceGetTotalEnergyConsumption", handle)
            self.first = energy if self.first is None else self.first
            values = {
                "gpu_utilisation": now["utilisation"],
                "gpu_memory_used": now["memory_used"],
                "gpu_power": now["power"],
                "gpu_energy": None if self.first is None or energy is None else (energy - self.first) / 3.6e6,
                "gpu_throttle": ", ".join(each for each in now["throttle"] or () if each != "idle") or None,
            }
            self.latest = {name: value for name, value in values.items() if value is not None}


def room(device: torch.device) -> int | None:
    """Return the bytes that are free now: of the GPU's memory (with what torch holds in reserve), or of RAM, also
    within a container's limit. None if the system does not report it (RAM on macOS and Windows)."""
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    free = [kilobytes("/proc/meminfo", "MemAvailable:")]
    with suppress(ValueError):  # of a container; elsewhere there is no such file, or no limit
        limit, used = (int(line_of(f"/sys/fs/cgroup/memory.{name}", "")) for name in ("max", "current"))
        cached = int(line_of("/sys/fs/cgroup/memory.stat", "inactive_file"))  # of files, which make room
        free.append(max(limit - used + cached, 0))
    return min(free) if free[0] else None


def line_of(path: str, word: str) -> str:
    """Return what follows the word that a line of a file of Linux begins with; "" where there is none."""
    with suppress(OSError):
        for line in Path(path).read_text(errors="replace").splitlines():
            if line.startswith(word):
                return line.removeprefix(word).strip(" \t:")
    return ""


def kilobytes(path: str, word: str) -> int:
    """Return the bytes of a line that tells kB, 0 where there is none."""
    return 1024 * int((line_of(path, word) or "0").split()[0])


def cpu_name() -> str:
    return line_of("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def machine(device: torch.device | None = None) -> dict[str, str]:
    """Return what every measured figure depends on: device, cores, versions."""
    device = device or devices.pick()
    name = cpu_name() if device.type == "cpu" else "Apple GPU (MPS)"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name}, {show.size(properties.total_memory)}"
    return {
        "device": name,
        "cores": f"{show.plural(cores(), 'CPU core')}, {show.plural(torch.get_num_threads(), 'thread')}",
        "torch": f"torch {torch.__version__}",
        "python": f"Python {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
    }


def check() -> str:
    """Show this machine's GPUs, versions, precisions and matrix rates."""
    device, here, rows = devices.pick(), machine(), []
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    parts = {
        "trains on": f"{here['device']}, {here['cores']}",
        "nbtools": f"{VERSION}, {here['python']}, {here['system']}",
        "torch": f"{torch.__version__}, {cuda}",
        "cuDNN": cell(str, torch.backends.cudnn.version()),
        "AMP": f"{devices.reduced_precision(device)}, where nb.advise measures a gain",
    }
    for name, each in precisions(device).items():
        middle, least, most = (show.number(f(each) / 1e9) if each else "" for f in (median, min, max))
        rows.append((name, f"{middle} ({least}–{most}, n = {len(each)})" if each else "not on this device"))
    tables = [show.text(("machine", ""), [*parts.items()]), show.text(("matrix products", "GFLOP/s"), rows)]
    hint = "A plan for your data, measured: python -m nbtools advise TASK --data SOURCE"
    return "\n\n".join([str(gpus()), *tables, hint])


def precisions(device: torch.device) -> dict[str, list[float]]:
    """Return precision → FLOP/s of square matrix products, a value a round; none of what the device lacks."""
    ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    dtypes = {"float32": torch.float32, "TF32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    there = {"TF32": ampere, "bf16": ampere or device.type == "cpu", "fp16": device.type in devices.FP16_DEVICES}
    rates = {name: list[float]() for name in dtypes}
    with untouched(device):
        for name in (name for name in dtypes if there.get(name, True)):
            torch.set_float32_matmul_precision("high" if name == "TF32" else "highest")
            for seconds in (0.02, SECONDS):  # the first round warms up
                rates[name] = matrix_rates(device, dtypes[name], seconds)
    return rates


def matrix_rates(device: torch.device, dtype: torch.dtype, seconds: float = 0.02) -> list[float]:
    """Return the FLOP/s of each of some rounds of square matrix products, in about so many seconds."""
    from torch.utils.benchmark import Timer  # which warns where CUDA is installed without a GPU, as on Colab's CPUs

    side = 512 if device.type == "cpu" else 4096  # 512: 5 ms on one CPU core
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    timer = Timer("torch.mm(a, b)", globals={"torch": torch, "a": a, "b": b}, num_threads=torch.get_num_threads())
    with torch.cuda.device(device if device.type == "cuda" else -1):  # which the timer waits for
        return [2 * side**3 / each for each in timer.blocked_autorange(min_run_time=seconds).times]
