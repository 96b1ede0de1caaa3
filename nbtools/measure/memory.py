"""How much memory a train step takes, and how much there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
CGROUPS = (  # of a container: limit, in use, the line of memory.stat with what the kernel can drop; versions 2 and 1
    (Path("/sys/fs/cgroup/memory.max"), "memory.current", "inactive_file "),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), "memory.usage_in_bytes", "total_inactive_file "),
)


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
    """Return the bytes of a state that stay between steps: weights, buffers, moving average, what the optimizer
    keeps."""
    modules = [state.model, *([] if state.ema is None else [state.ema])]
    kept = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    values = [value for each in state.optimizer.state.values() for value in each.values()]
    return size_of([*kept, *(value for value in values if isinstance(value, Tensor))])


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages below tensors."""
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


def ram() -> Room | None:
    """Return the lesser of what Linux has available and what the container still allows, of whose use file cache that
    can be dropped is none."""
    rooms = [Room(free, "available RAM", HEADROOM_RAM) for free in meminfo("MemAvailable")]
    for limit, used, cache in CGROUPS:
        if (most := number(limit)) is not None:
            dropped = [int(line.split()[1]) for line in read(limit.with_name("memory.stat")) if line.startswith(cache)]
            left = max(0, most - (number(limit.with_name(used)) or 0) + sum(dropped))
            rooms.append(Room(left, "RAM left by the container's limit", HEADROOM_RAM))
    return min(rooms, key=lambda room: room.bytes, default=None)


def ram_in_all() -> int | None:
    """Return the bytes of RAM that this process may use if nothing else does; None if the system does not report it."""
    limits = [number(limit) for limit, _, _ in CGROUPS]
    return min((size for size in (*meminfo("MemTotal"), *limits) if size is not None), default=None)


def meminfo(name: str) -> list[int]:
    """Return the bytes of a line of /proc/meminfo; [] without it."""
    lines = read(Path("/proc/meminfo"))
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")]


def number(file: Path) -> int | None:
    """Return a cgroup's number of bytes; None for "max", or version 1's equivalent."""
    text = read(file)
    return int(text[0]) if text and text[0].isdigit() and int(text[0]) < 1 << 60 else None


def read(path: Path) -> list[str]:
    """Return the lines of a file; [] if there is none."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
