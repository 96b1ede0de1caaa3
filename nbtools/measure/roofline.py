"""What this machine can do, and what a step asks of it: floors under the time of a step, as in a roofline.

    rates   = machine_rates(plan, device)  # measured: FLOP/s of a matrix product, bytes/s of a copy, seconds an op
    counts  = count(stepper, raw)          # counted: operations, floating-point operations, tensors' sizes
    seconds = counts.floors(rates)         # {"host": …, "compute": …, "memory": …}

A step cannot be faster than the largest of them; which one that is says what it is bound by. `syncs` names the lines
where a step makes the host wait for the device, so that it cannot run ahead.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from nbtools.measure.stepper import Stepper, clock_of, finish
from nbtools.train import DTYPES, Batch, Plan, backward

SIDE = {"cuda": 4096}  # of the square matrices; elsewhere 512: 5 ms on one CPU core
SIZES = {"cuda": (2**22, 2**25, 2**28)}  # bytes of a copied buffer; elsewhere those of SMALL
SMALL = (2**16, 2**19, 2**22, 2**25)  # 64 KiB (L2) to 32 MiB (memory)
LEAST = 0.02  # seconds that a rate is measured for


@dataclass(frozen=True)
class Rates:
    """Measured on this machine, each the best of its repeats: a capability, not an average.

    matrix: FLOP/s of a square matrix product in the plan's precision. bandwidth: ((bytes of a buffer, bytes/s read and
    written by a copy of it), …), ascending: what fits in a cache is faster. dispatch: seconds that the host spends on
    one operation of a training step (Python, dispatcher and autograd), from a step of many tiny layers.
    """

    matrix: float
    bandwidth: tuple[tuple[int, float], ...]
    dispatch: float

    def copy_rate(self, size: int) -> float:
        """bytes/s for an operation that touches so many bytes: of the buffer next larger than its share of them."""
        sizes = [2 * size for size, _ in self.bandwidth]  # a copy touches its buffer twice
        return self.bandwidth[min(bisect_left(sizes, size), len(sizes) - 1)][1]


@dataclass(frozen=True)
class Counts:
    """What a step of `samples` samples does. ops: operations dispatched, views included. flops: floating-point
    operations of forward and backward: of matrix products, convolutions and attention; not of elementwise operations,
    normalisation, fused RNN and CTC. touched: ((bytes, operations that read and write so many), …), sizes rounded up to
    powers of two; views move nothing."""

    samples: int
    ops: int
    flops: int
    touched: tuple[tuple[int, int], ...]

    def floors(self, rates: Rates) -> dict[str, float]:
        """Seconds: host = operations × dispatch, compute = flops / matrix rate, memory = bytes / copy rate."""
        return {
            "host": self.ops * rates.dispatch,
            "compute": self.flops / rates.matrix,
            "memory": sum(n * size / rates.copy_rate(size) for size, n in self.touched if size >= SMALL[0]),
        }


class Watch(TorchDispatchMode):
    """Counts the operations below it, and the bytes that each reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0
        self.touched: Counter[int] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.ops += 1
        read, made = dense((args, kwargs)), dense(out)
        held = {t.untyped_storage().data_ptr() for t in read}
        view = made and not func._schema.is_mutable and all(t.untyped_storage().data_ptr() in held for t in made)
        if not view:
            size = sum(t.numel() * t.element_size() for t in [*read, *made])
            self.touched[1 << max(size - 1, 0).bit_length()] += 1
        return out


def dense(values: Any) -> list[Tensor]:
    """The tensors among them that have a storage; sparse ones have none."""
    return [t for t in tree_iter(values) if isinstance(t, Tensor) and t.layout == torch.strided]


def count(stepper: Stepper, raw: Batch, flops: int | None = None) -> Counts:
    """A step on a raw batch, counted by operation; flops: those of forward and backward where known, else another pass
    counts them."""
    state = stepper.state
    kept, state.network = state.network, state.model  # a compiled network hides its operations
    try:
        with Watch() as watch:
            stepper.step(raw)
        if flops is None:
            with FlopCounterMode(display=False) as counter:
                backward(state, raw)
            flops = int(counter.get_total_flops())
    finally:
        state.network = kept
    return Counts(len(raw["id"]), watch.ops, flops, tuple(sorted(watch.touched.items())))


def machine_rates(plan: Plan, device: torch.device) -> Rates:
    dtype = DTYPES.get(plan.amp, torch.float32)
    return Rates(matrix_rate(device, dtype), bandwidth(device), dispatch(device))


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of square matrix products."""
    side = SIDE.get(device.type, 512)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / best(lambda: torch.mm(a, b), device)


def bandwidth(device: torch.device) -> tuple[tuple[int, float], ...]:
    found = []
    for size in SIZES.get(device.type, SMALL):
        a = torch.ones(size, dtype=torch.uint8, device=device)
        b = torch.empty_like(a)
        copies = max(1, (2**26 if device.type == "cuda" else 2**22) // size)  # one is shorter than its dispatch
        flat = best(lambda a=a, b=b, n=copies: [b.copy_(a) for _ in range(n)], device) / copies
        found.append((size, 2 * size / flat))
    return tuple(found)


def dispatch(device: torch.device) -> float:
    """Seconds an operation: a training step of 24 tiny layers, over the operations counted in it."""
    if device.type == "cuda":
        device = torch.device("cpu")  # the host's part; that of the launch is measured on the step itself
    network = nn.Sequential(*[layer for _ in range(24) for layer in (nn.Linear(4, 4), nn.ReLU())]).to(device)
    x = torch.ones(2, 4, device=device)

    def once() -> None:
        for parameter in network.parameters():
            parameter.grad = None
        network(x).sum().backward()

    once()
    with Watch() as watch:
        once()
    return best(once, device) / watch.ops


def best(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call, to the device's end, after two to warm up; the best of at least LEAST seconds of repeats."""
    times: list[float] = []
    for _ in range(2):
        call()
    finish(device)
    clock, _ = clock_of(device, "resident")
    while sum(times) < LEAST or len(times) < 3:
        start = clock()
        call()
        finish(device)
        times.append(clock() - start)
    return min(times)


def syncs(stepper: Stepper) -> tuple[str, ...]:
    """`file:line` of the code that makes the host wait for the device in a step; () without CUDA."""
    if stepper.device.type != "cuda":
        return ()
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():  # torch warns, once a process, that the mode may miss a synchronizing operation
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("warn")
        return synchronizing(lambda: stepper.step(next(stepper.batches)))
    finally:
        torch.cuda.set_sync_debug_mode(before)


def synchronizing(call: Callable[[], Any]) -> tuple[str, ...]:
    """`file:line` below a call from where torch warned of a synchronizing operation, outside torch where there is."""
    lines: dict[str, None] = {}

    def caught(message: Warning | str, *rest: Any, **more: Any) -> None:
        if "synchronizing" in str(message):
            lines[own_line(sys._getframe(1))] = None

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = caught
        call()
    return tuple(lines)


def own_line(frame: FrameType | None) -> str:
    """The innermost line of a stack that is neither torch's nor that of the machinery of warnings."""
    stack = [(Path(each.f_code.co_filename), line) for each, line in traceback.walk_stack(frame)]
    torchs = Path(torch.__file__).parent
    own = ((file, line) for file, line in stack if torchs not in file.parents and file.name != "warnings.py")
    file, line = next(own, stack[0])
    return f"{file}:{line}"
