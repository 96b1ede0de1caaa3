"""How much memory a train step takes, and how much there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nbtools.train import TrainState
from nbtools.train import device as devices

HEADROOM = 0.1  # of what is free: sizes that fit once fail later, in fragments and to other processes
HEADROOM_RAM = 0.2  # glibc's malloc keeps freed memory: processes grew by 14–19 % more than was in use
CGROUPS = {  # limit, in use, the line of memory.stat with what the kernel can drop
    "": ("memory.max", "memory.current", "inactive_file"),  # version 2
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
}


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
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    act()
    most = [int(line.split()[1]) * 1024 for line in read(Path("/proc/self/status")) if line.startswith("VmHWM:")]
    return max(0, *(mark - before for mark in most)) if most else 0


def held(state: TrainState) -> int:
    """Bytes of a state that stay between steps: weights, buffers, the moving average, what the optimizer keeps in this
    process."""
    modules = [state.model, *([] if state.ema is None else [state.ema])]
    kept = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    values = [value for each in state.optimizer.state.values() for value in each.values()]
    return size_of([*kept, *(value for value in values if isinstance(value, Tensor))])


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages below tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@dataclass(frozen=True)
class Room:
    """Bytes that this process may still take, and the source of that figure."""

    bytes: int
    source: str
    headroom: float = HEADROOM

    @property
    def usable(self) -> int:
        return int(self.bytes * (1 - self.headroom))


def room(device: torch.device) -> Room | None:
    """What is free now: of the GPU's memory (with what torch holds in reserve), or of RAM, the container's limit
    included. None if the system does not report it (RAM on macOS and Windows)."""
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Room(torch.cuda.mem_get_info(device)[0] + reserve, "free GPU memory")
    if device.type == "mps":
        free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return Room(free, "of the memory that Metal recommends")
    return ram()


def ram(root: Path = Path("/")) -> Room | None:
    """The least of what Linux has available and what each cgroup above this process allows, below this root."""
    found = [(free, "available RAM") for free in meminfo(root, "MemAvailable")]
    allowed = (allowance(group, *names) for group, names in groups(root))
    found += [(left, "RAM left by the container's limit") for left in allowed if left is not None]
    return Room(*min(found), HEADROOM_RAM) if found else None


def ram_in_all(root: Path = Path("/")) -> int | None:
    """Bytes of RAM that this process may use if nothing else does: the machine's, or the least limit of a cgroup above
    it. None if the system does not report it."""
    limits = (limit_of(group / names[0]) for group, names in groups(root))
    return min((size for size in (*meminfo(root, "MemTotal"), *limits) if size is not None), default=None)


def meminfo(root: Path, name: str) -> list[int]:
    """Bytes of a line of /proc/meminfo; [] without it."""
    lines = read(root / "proc/meminfo")
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")]


def groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Every cgroup above this process, with the names of its files."""
    cgroup = read(root / "proc/self/cgroup")
    for base, names in CGROUPS.items():
        paths = ["/", *(path for _, kinds, path in (line.split(":", 2) for line in cgroup) if base in kinds.split(","))]
        for path in {parent for each in paths for parent in (Path(each), *Path(each).parents)}:
            yield root / "sys/fs/cgroup" / base / path.relative_to("/"), names


def allowance(group: Path, limit: str, usage: str, droppable: str) -> int | None:
    """Bytes that a cgroup still allows; None without a limit. File cache that can be dropped does not count as used."""
    most, used = limit_of(group / limit), read(group / usage)
    if most is None or not used:
        return None
    stat = dict(line.split() for line in read(group / "memory.stat"))
    return max(0, most - int(used[0]) + int(stat.get(droppable, 0)))


def limit_of(file: Path) -> int | None:
    """A cgroup's limit in bytes; None for "max", or version 1's equivalent."""
    text = read(file)
    return int(text[0]) if text and text[0].isdigit() and int(text[0]) < 1 << 60 else None


def read(path: Path) -> list[str]:
    """The lines of a file; [] if there is none."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
