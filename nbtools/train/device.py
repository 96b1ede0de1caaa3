"""Where numbers meet the device: which one, the switches that a plan sets on it, precision, and memory."""

import ctypes
import gc
import os
import random
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from nbtools.errors import TrainError
from nbtools.train.plan import Plan

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for Plan.deterministic: 24 MiB, on Hopper none

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GRAPH_DEVICES = ("cuda",)
FP16_DEVICES = ("cuda",)  # on a CPU a step took 14 s; MPS's fused optimizers ignore its scale (pytorch#186360)
FULL = ("out of memory", "DefaultCPUAllocator", "_STATUS_ALLOC_FAILED", "ALLOCATION_FAILED", "to find an engine")
"""What a RuntimeError says where memory ran out; the last is cuDNN's, of which no algorithm's workspace fits."""
NEARLY = 0.98  # torch sees a little less than is sold: 39.4 GiB (42.3 GB) of "40 GB", 22.0 GiB (23.7 GB) of "24 GB"
TUNING_PAYS = 5_000  # steps: 0.5 s a convolution on an H200, of which a step takes 2 ms, by a guess 5 % less afterwards
LIBRARY = ctypes.CDLL(None)
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h
T = TypeVar("T")


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def pick() -> torch.device:
    """Return the device that the environment variable NBTOOLS_DEVICE names; else CUDA, Apple's MPS, or the CPU. Each of
    several processes has a GPU of its own, cuda:LOCAL_RANK. Raises TrainError for one that is not here."""
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    name = os.environ.get("NBTOOLS_DEVICE") or best
    if world() > 1 and name.startswith("cuda"):
        local, here = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= here or ":" in name:
            rule = f"each process needs a GPU of its own: torch sees {here} here, and NBTOOLS_DEVICE is {name!r}"
            raise TrainError(f"{rule}; start at most {here} processes, or set NBTOOLS_DEVICE to cuda or cpu")
        return torch.device("cuda", local)
    try:
        return torch.ones(1, device=name).device  # by a kernel: a GPU may be too old for this torch
    except (RuntimeError, AssertionError) as error:
        rule = "NBTOOLS_DEVICE must be a device available to torch here, such as cpu or cuda:0"
        fix = "choose another GPU (on Kaggle T4 x2), or set NBTOOLS_DEVICE=cpu"
        raise TrainError(f"{rule}, got {name!r}: {str(error).splitlines()[0]}; {fix}") from None


def require(plan: Plan, device: torch.device, processes: int = 1) -> None:
    kind, here = device.type, f"but this device is {device.type}"
    outside = not torch.is_grad_enabled() or any(map(torch.is_autocast_enabled, ("cpu", "cuda", "mps")))
    for wrong, rule in (
        (outside, "amp controls autocast, but this call is inside autocast or no_grad; move it outside"),
        (plan.graph and processes > 1, f"graph needs one process, but {processes} train together; set graph=False"),
        (plan.graph and kind not in GRAPH_DEVICES, f"graph replays CUDA graphs, {here}; set graph=False"),
        (plan.graph and unrecordable(plan), "graph cannot replay fp16, compile or checkpoint_activations; choose one"),
        (plan.sync_batchnorm and processes > 1 and kind != "cuda", f"sync_batchnorm needs CUDA, {here}; set it False"),
        (plan.amp == "fp16" and kind not in FP16_DEVICES, f"amp = fp16 needs CUDA, {here}; use amp=bf16 or amp=off"),
        (plan.channels_last and kind == "mps", "channels_last breaks batch norm on MPS (pytorch#175189); set False"),
        (plan.compile and plan.checkpoint_activations, "compile cannot trace checkpoint_activations; choose one"),
    ):
        if wrong:
            raise TrainError(f"Plan.{rule}")


def unrecordable(plan: Plan) -> bool:
    """Return whether steps under a plan decide something on the host, which no CUDA graph repeats."""
    return plan.amp == "fp16" or plan.checkpoint_activations or plan.compile


def reduced_precision(device: torch.device) -> str:
    """Return the Plan.amp that may be faster than float32 here, to be measured; "off" where none was tried (MPS)."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if device.type == "cpu" else "off"


def gigabytes(device: torch.device) -> float:
    return torch.cuda.get_device_properties(device).total_memory / 1e9 if device.type == "cuda" else 0.0


def tier(gigabytes: float, tiers: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the first (GB that a GPU is sold with, value) that this memory reaches, of tiers in descending order."""
    return next(tier for tier in tiers if gigabytes >= NEARLY * tier[0])


def prepare(plan: Plan, device: torch.device, processes: int = 1) -> None:
    """Set determinism, on CUDA TF32, on a CPU how malloc frees. Raises as `require` does."""
    require(plan, device, processes)
    torch.use_deterministic_algorithms(plan.deterministic)
    if device.type == "cpu" and hasattr(LIBRARY, "mallopt"):
        LIBRARY.mallopt(TRIM_THRESHOLD, 2**31 - 1)  # else page faults take 5 to 20 % of a step (captcha guide)
        any(LIBRARY.mallopt(MMAP_THRESHOLD, size) for size in (2**30, 2**25))  # some allow no more
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False  # but for `autotuning`
        torch.set_float32_matmul_precision("high")  # convolutions take TF32 by default; fp32_precision: pytorch#166387


@contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Change nothing outside: random numbers of torch, NumPy and Python, determinism, cuDNN's autotuner, TF32."""
    with ExitStack() as back, torch.random.fork_rng([device] if device.type == "cuda" else []):
        with suppress(RuntimeError):  # torch does not tell it where the user set `fp32_precision` (torch ≥ 2.9)
            back.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        back.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        back.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        back.callback(np.random.set_state, np.random.get_state())
        back.callback(random.setstate, random.getstate())
        yield


@contextmanager
def autotuning(device: torch.device, plan: Plan, times: int) -> Iterator[None]:
    """Switch on cuDNN's autotuner for a training step whose shape is to come `times` more, if that pays. cuDNN keeps
    the algorithm that it first chose for a shape, tuned or not, for the life of the process (Conv_v8.cpp)."""
    pays = device.type == "cuda" and times >= TUNING_PAYS and not plan.deterministic
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, pays
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def again(part: nn.Module, *inputs: Any) -> Any:
    """Return `part(*inputs)`, whose activations backward computes again, though not batch norm's running averages."""
    return checkpoint(part, *inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), still(part)))


@contextmanager
def still(part: nn.Module) -> Iterator[None]:
    kept = [(m, m.momentum, m.num_batches_tracked) for m in part.modules() if isinstance(m, _BatchNorm) and m.training]
    for norm, *_ in kept:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:  # also where torch ends the second pass early, by an exception, since backward needs no more
        for norm, momentum, counted in kept:
            norm.momentum, norm.num_batches_tracked = momentum, counted


def autocast(plan: Plan, device: torch.device) -> AbstractContextManager[Any]:
    """Return mixed precision for a forward pass; a generator must not yield inside. fp16 is float32 where it may not
    train: evaluations and predictions of a run that a GPU trained."""
    off = plan.amp == "off" or (plan.amp == "fp16" and device.type not in FP16_DEVICES)
    return nullcontext() if off else torch.autocast(device.type, DTYPES[plan.amp])


def in_float32(layer: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
    """Return the forward pass of an LSTM, GRU or RNN, under bf16 without autocast, in which CUDA runs cuDNN's in fp16
    (`_cudnn_rnn_cast_reflatten`, AutocastRNN.cpp), which needs a scaled loss."""
    weight = next(layer.parameters())
    kind, dtype = weight.device.type, weight.dtype
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16:
        args, kwargs = tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))
        with torch.autocast(kind, enabled=False):
            return type(layer).forward(layer, *args, **kwargs)
    return type(layer).forward(layer, *args, **kwargs)


def within_memory(act: Callable[[], T]) -> tuple[T | None, str]:
    """Return (its result, ""), or (None, why) where memory ran out: torch's own error, or what a CPU, MPS, cuBLAS and
    cuDNN raise instead. No error, whose frames would keep tensors."""
    try:
        return act(), ""
    except (RuntimeError, MemoryError) as error:
        full = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in str(error) for words in FULL)
        if not full:
            raise
        return None, str(error).split(". ")[0] or "out of memory"


def run_or_explain(act: Callable[[], T], when: str = "before the first step") -> T:
    """Return the result of what cannot be done in smaller parts. Raises TrainError where memory runs out."""
    if torch.cuda.is_initialized():  # not a third of a second elsewhere, where little of a CPU's memory lies in cycles
        gc.collect()
    result, reason = within_memory(act)
    if result is None:
        raise TrainError(f"out of memory {when} ({reason}); free memory, or shrink the network", entry="Out of memory")
    return result


def give_back() -> None:
    """Return memory that nothing uses any more, or that is kept for the next step, to the GPU and the system."""
    gc.collect()
    torch.cuda.empty_cache()  # nothing, where CUDA is not in use
    if hasattr(LIBRARY, "malloc_trim"):
        LIBRARY.malloc_trim(0)


def memory(device: torch.device) -> dict[str, float]:
    """Return MiB in use: on CUDA allocated and reserved, elsewhere what this process has in RAM (macOS: its peak)."""
    if device.type == "cuda":
        used = torch.cuda.memory_stats_as_nested_dict(device)  # once: it takes longer than a small step's launch
        return {f"gpu_memory_{n}": used[f"{n}_bytes"]["all"]["current"] / 2**20 for n in ("allocated", "reserved")}
    if sys.platform == "linux":
        return {"memory": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20}
    return {"memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
