"""How much memory a train step takes and how much there is: measured at small batches, predicted for larger ones.

On CUDA the allocator knows its peak. On a CPU every tensor that an operation makes is followed until it dies: what
autograd saves for backward is most of that, but not all (of the guide's captcha network at batch 128, 87 %).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from nbtools.train import TrainState

HEADROOM = 0.1  # of the limit that is left free: found sizes fail later, in fragments and to neighbours
HEADROOM_RAM = 0.2  # glibc's malloc keeps freed memory: processes grew by 14–19 % more than was in use
FILES = {  # limit, in use, the line of memory.stat with what the kernel can drop
    "": ("memory.max", "memory.current", "inactive_file"),  # cgroup v2
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # v1
}


@dataclass(frozen=True)
class Line:
    """bytes(batch) = fixed + per_sample × batch: two probes fix it."""

    fixed: float
    per_sample: float

    @classmethod
    def through(cls, first: tuple[int, int], second: tuple[int, int]) -> Line:
        """The line through two (batch size, bytes)."""
        slope = (second[1] - first[1]) / (second[0] - first[0])
        return cls(first[1] - slope * first[0], slope)

    def at(self, batch_size: int) -> int:
        return round(self.fixed + self.per_sample * batch_size)


@dataclass
class Peak:
    """The most bytes that were taken at once, above those in use when the measurement began."""

    bytes: int = 0


@contextmanager
def peak(device: torch.device) -> Iterator[Peak]:
    """Measure what runs inside; the value stands at its end. On CUDA it starts the allocator's peak count anew."""
    found = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        torch.cuda.synchronize(device)
        found.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    with Live() as live:
        yield found
    found.bytes = live.most


class Live(TorchDispatchMode):
    """Bytes of the tensors that operations made and that are still alive; their most. About 10 µs an operation.

    A storage counts once, however many views it has; what the operations were given from outside does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}  # address of the storage → its bytes
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tensors((args, kwargs)):
            self.see(tensor, 0)
        out = func(*args, **(kwargs or {}))
        for tensor in tensors(out):
            self.see(tensor, tensor.untyped_storage().nbytes())
        return out

    def see(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.alive:
            return
        self.alive[key] = size
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.gone, key).atexit = False

    def gone(self, key: int) -> None:
        self.now -= self.alive.pop(key, 0)


def tensors(tree: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(tree) if type(leaf) in (Tensor, torch.nn.Parameter) and strided(leaf))


def strided(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided


def held(state: TrainState) -> int:
    """Bytes of a state that stay between steps: weights, buffers, the moving average, what the optimizer keeps."""
    kept: list[object] = [*state.model.parameters(), *state.model.buffers()]
    if state.ema is not None:
        kept += [*state.ema.parameters(), *state.ema.buffers()]
    kept += [value for values in state.optimizer.state.values() for value in values.values()]
    return size_of(value for value in kept if isinstance(value, Tensor))


def size_of(values: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages below tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in values}.values())


@dataclass(frozen=True)
class Room:
    """Bytes that this process may still take, and who says so."""

    bytes: int
    source: str
    headroom: float = HEADROOM

    @property
    def usable(self) -> int:
        return int(self.bytes * (1 - self.headroom))


def room(device: torch.device) -> Room | None:
    """What is free now: of the GPU's memory (with what torch holds in reserve), or of RAM, the container's limit
    included. None where the system does not say (RAM on macOS and Windows)."""
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Room(torch.cuda.mem_get_info(device)[0] + reserve, "free GPU memory")
    if device.type == "mps":
        free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return Room(free, "what Metal recommends")
    return ram()


def ram(root: Path = Path("/")) -> Room | None:
    """The least of what the machine has available and what each cgroup above this process still allows; root: of the
    file system that Linux tells it in."""
    found, meminfo = [], root / "proc/meminfo"
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in lines:
            found.append(Room(int(lines["MemAvailable"].split()[0]) * 1024, "available RAM", HEADROOM_RAM))
    for base, names in FILES.items():
        for folder in groups(root, base):
            left = allowance(folder, *names)
            if left is not None:
                found.append(Room(left, "RAM that the container's limit leaves", HEADROOM_RAM))
    return min(found, key=lambda r: r.bytes, default=None)


def groups(root: Path, base: str) -> set[Path]:
    """The cgroup folders of this process, from its own up to the topmost; a container may see that one alone."""
    own, top, paths = root / "proc/self/cgroup", root / "sys/fs/cgroup" / base, [Path("/")]
    if own.is_file():
        rows = [line.split(":", 2) for line in own.read_text().splitlines()]
        paths += [Path(path) for _, kinds, path in rows if kinds == base or base in kinds.split(",")]
    folders = {top / step.relative_to("/") for path in paths for step in (path, *path.parents)}
    return {folder for folder in folders if folder.is_dir()}


def allowance(folder: Path, limit: str, usage: str, droppable: str) -> int | None:
    """Bytes that one cgroup still allows, file cache that can be dropped not counted as used; None without a limit."""
    try:
        most = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file at the root or in the other version of cgroups
        return None
    if not most.isdigit() or int(most) >= 1 << 60:  # "max", or v1's way to say so
        return None
    return max(0, int(most) - used + int(stat.get(droppable, 0)))
