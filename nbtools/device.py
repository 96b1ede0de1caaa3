"""The torch device: which one, what it can do, what is in use on it, and the process-wide switches a plan asks for."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from nbtools.errors import TrainError
from nbtools.plan import Plan

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
    """Set determinism, and on CUDA cuDNN's autotuner (few shapes only) and TF32."""
    if plan.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch refuses every matrix product
    torch.use_deterministic_algorithms(plan.deterministic)
    if device.type != "cuda":
        return
    torch.backends.cudnn.benchmark = not plan.deterministic and not many_shapes
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # torch ≥ 2.9; not to be mixed with the older flags
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.conv.fp32_precision = "tf32"  # pyright: ignore[reportAttributeAccessIssue]
    else:
        torch.set_float32_matmul_precision("high")


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
