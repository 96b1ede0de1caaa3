"""The torch device: which one, what it can do, what is in use on it, and the process-wide switches a plan asks for."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

import torch

from nbtools.errors import TrainError
from nbtools.plan import Plan

# torch reads it once, at the process's first matrix product on CUDA, and without it refuses all of them under
# Plan.deterministic (Context.cpp, alertCuBLASConfigNotDeterministic). cuBLAS's workspace takes 32 MiB then instead of 8
# (on Hopper 32 in any case).
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT = ((TRIM_THRESHOLD, 2**31 - 1, 2**31 - 1), (MMAP_THRESHOLD, 2**30, 2**25))  # the last where glibc allows no more


def pick() -> torch.device:
    """CUDA, else Apple's MPS, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def require(plan: Plan, device: torch.device) -> None:
    """Refuse what the device cannot do. Raises TrainError."""
    if plan.graph and device.type != "cuda":
        raise TrainError(f"Plan.graph replays CUDA graphs, and this device is {device.type}; set graph=False")
    if plan.amp == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise TrainError("Plan.amp = bf16 is only emulated on this GPU, slower than fp32; use amp=fp16")


def prepare(plan: Plan, device: torch.device, many_shapes: bool) -> None:
    """Set determinism, on CUDA cuDNN's autotuner (few shapes only) and TF32, on a CPU how malloc frees."""
    torch.use_deterministic_algorithms(plan.deterministic)
    if device.type == "cpu":
        keep_freed()
    if device.type != "cuda":
        return
    torch.backends.cudnn.benchmark = not plan.deterministic and not many_shapes
    # In all versions. The newer `fp32_precision` alone makes torch.get_float32_matmul_precision() raise, which inductor
    # calls (pytorch#166387). Convolutions take TF32 by default.
    torch.set_float32_matmul_precision("high")


@cache
def glibc() -> ctypes.CDLL | None:
    """The C library where it is glibc, whose malloc can be told what to keep."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "gnu_get_libc_version") else None


@cache
def keep_freed() -> bool:
    """Have malloc keep what tensors free, for this process and for good: else it hands every large activation back to
    the system, and a CPU step spends 5 % (small network) to 25 % (the guide's) of its time on page faults. Settings of
    the user's own (MALLOC_…, another allocator) stay. Returns whether it was done."""
    library = glibc()
    if library is None or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    return all(library.mallopt(kind, most) or library.mallopt(kind, less) for kind, most, less in KEPT)


def give_back(device: torch.device) -> None:
    """Hand memory that is free, and kept for the next step, back to the GPU or the system."""
    library = glibc()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif library is not None:
        library.malloc_trim(0)


def autocast(plan: Plan, device: torch.device) -> AbstractContextManager:
    """Mixed precision around a forward pass. To be left within a step: a generator must not yield inside."""
    return nullcontext() if plan.amp == "off" else torch.autocast(device.type, DTYPES[plan.amp])


def memory(device: torch.device) -> dict[str, float]:
    """MiB in use: on CUDA gpu_memory_allocated and gpu_memory_reserved, elsewhere the process's resident memory."""
    if device.type == "cuda":
        used = {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}
        return {f"gpu_memory_{name}": size / 2**20 for name, size in used.items()}
    return {"memory": resident() / 2**20}


def resident() -> int:
    """Bytes of this process in RAM now (Linux); elsewhere the most it ever had."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * 4096
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
