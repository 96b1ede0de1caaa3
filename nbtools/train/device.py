"""The torch device: which one, what it can do, what is in use on it, and the switches that a plan asks for."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from nbtools.errors import TrainError
from nbtools.train.plan import Plan

# torch reads it once, at the process's first matrix product on CUDA, and without it refuses all of them under
# Plan.deterministic (Context.cpp, alertCuBLASConfigNotDeterministic). It costs 24 MiB of workspace, on Hopper none.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

FULL = (  # torch's message in a plain RuntimeError when memory runs out
    "DefaultCPUAllocator: can't allocate",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",  # outside torch's allocator: a kernel's code, a pinned buffer
    "MPS backend out of memory",
    "_STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN 8
    "ALLOCATION_FAILED",  # cuDNN 9
)
ONEDNN = "could not create a primitive"  # all of its message when it gets no memory, on a CPU
T = TypeVar("T")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GRAPH_DEVICES = ("cuda",)
FP16_DEVICES = ("cuda", "mps")  # on a CPU most of its kernels are not vectorised, or emulated: a step took 14 s
NEARLY = 0.98  # torch sees a little less than is sold: 39.4 GiB (42.3 GB) of "40 GB", 22.0 GiB (23.7 GB) of "24 GB"
OWN_THREADS: list[int] = []  # the number before a plan asked for another; empty: none did
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # malloc.h


def world() -> int:
    """How many processes torchrun started for this run."""
    return int(os.environ.get("WORLD_SIZE", 1))


def pick(name: str | None = None) -> torch.device:
    """The device of a name, else of the environment variable NBTOOLS_DEVICE; else CUDA, Apple's MPS, or the CPU. Of
    several processes on a machine, each has a GPU of its own, cuda:LOCAL_RANK. Raises TrainError for one that torch
    does not offer here."""
    asked = "NBTOOLS_DEVICE" if name is None else "device"
    name, local = os.environ.get("NBTOOLS_DEVICE") if name is None else name, int(os.environ.get("LOCAL_RANK", 0))
    if asked == "NBTOOLS_DEVICE":
        require_own(name, world())
    if world() > 1 and (name == "cuda" or (not name and torch.cuda.is_available())):
        if local >= (here := torch.cuda.device_count()):
            fix = f"start at most {here} processes on this machine, or set NBTOOLS_DEVICE=cpu"
            raise TrainError(f"process {local} of this machine has no GPU of its own, torch has {here}; {fix}")
        return torch.device("cuda", local)
    if name:
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:
            rule = f"{asked} must be a device that torch has here, such as cpu or cuda:0"
            raise TrainError(f"{rule}, got {name!r}: {str(error).splitlines()[0]}") from None
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def require_own(name: str | None, processes: int) -> None:
    """Refuse one GPU for several processes. name: of NBTOOLS_DEVICE. Raises TrainError."""
    if processes > 1 and name and name.startswith("cuda:"):
        rule = f"each of {processes} processes takes a GPU of its own, so NBTOOLS_DEVICE must not name one by number"
        raise TrainError(f"{rule}, got {name!r}; set NBTOOLS_DEVICE=cuda, and choose GPUs with CUDA_VISIBLE_DEVICES")


def require(plan: Plan, device: torch.device, processes: int = 1) -> None:
    """Refuse what the device cannot do. Raises TrainError."""
    if plan.graph and processes > 1:
        rule = "Plan.graph replays the CUDA graphs of one process"
        raise TrainError(f"{rule}, but {processes} train together; set graph=False, or start one process")
    if plan.sync_batchnorm and processes > 1 and device.type != "cuda":
        rule = f"Plan.sync_batchnorm needs CUDA: torch has no SyncBatchNorm on {device.type}"
        raise TrainError(f"{rule}; set sync_batchnorm=False, each process then normalises its share of a batch")
    if plan.graph and device.type not in GRAPH_DEVICES:
        raise TrainError(f"Plan.graph replays CUDA graphs, but this device is {device.type}; set graph=False")
    if plan.amp == "fp16" and device.type not in FP16_DEVICES:
        raise TrainError(
            f"Plan.amp = fp16 needs a GPU, but this device is {device.type}, where a step would take many times as "
            "long as in float32; use amp=bf16 or amp=off"
        )
    if plan.amp == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise TrainError("Plan.amp = bf16 is only emulated on this GPU, slower than fp32; use amp=fp16")


def prepare(plan: Plan, device: torch.device, many_shapes: bool) -> None:
    """Set determinism, on CUDA cuDNN's autotuner (few shapes only) and TF32, on a CPU how malloc frees."""
    torch.use_deterministic_algorithms(plan.deterministic)
    use_threads(None if world() > 1 else plan.threads)  # torchrun and the ranks' shares of the cores set their own
    if device.type == "cpu":
        keep_freed()
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = not plan.deterministic and not many_shapes
        # The newer `fp32_precision` alone makes torch.get_float32_matmul_precision() raise, which inductor calls
        # (pytorch#166387). Convolutions take TF32 by default.
        torch.set_float32_matmul_precision("high")


def use_threads(count: int | None) -> None:
    """Compute with so many CPU threads; None: with as many as before a plan asked for another number."""
    if count is not None:
        OWN_THREADS[:] = OWN_THREADS or [torch.get_num_threads()]
    if count is not None or OWN_THREADS:
        torch.set_num_threads(count or OWN_THREADS.pop())


def threads() -> int:
    """CPU threads, as the user or torch set them."""
    return OWN_THREADS[0] if OWN_THREADS else torch.get_num_threads()


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch's own error, or what a CPU, MPS, cuBLAS and cuDNN raise instead."""
    text = str(error)
    full = isinstance(error, RuntimeError) and (text == ONEDNN or any(words in text for words in FULL))
    return full or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def within_memory(act: Callable[[], T]) -> tuple[T | None, str]:
    """(its result, ""), or (None, why) where memory ran out; without the error, whose frames would keep tensors."""
    try:
        return act(), ""
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return None, str(error).split(". ")[0] or "out of memory"


@contextmanager
def asserts_explained() -> Iterator[None]:
    """Turn a kernel's assertion on a GPU, which is about an index, into a TrainError."""
    try:
        yield
    except RuntimeError as error:
        if "device-side assert" not in str(error):
            raise
        rule = "a label, token or other index was out of range on the GPU, which this process cannot use any more"
        fix = "restart it, and run this again with NBTOOLS_DEVICE=cpu in the environment, which names it"
        raise TrainError(f"{rule}; {fix}", entry="Device-side assert") from error


START = "before the first step"


def required(act: Callable[[], T], when: str = START) -> T:
    """Its result; where memory runs out, that of a second attempt, with all memory that nothing uses. Raises TrainError
    where memory runs out again: for what cannot be done in smaller parts. when: in words."""
    found, reason = within_memory(act)
    if found is None:
        gc.collect()
        give_back(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))
        found, reason = within_memory(act)
    if found is None:
        rule = f"out of memory {when} ({reason})"
        raise TrainError(f"{rule}; use a smaller network, or free memory", entry="Out of memory")
    return found


@cache
def glibc() -> ctypes.CDLL | None:
    """The C library, where it is glibc."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "gnu_get_libc_version") else None


@cache
def keep_freed() -> None:
    """Have malloc keep what tensors free, permanently: else it hands every large activation back to the system, and a
    CPU step spends 5 % (small network) to 25 % (the guide's) of its time on page faults. The user's own settings
    (MALLOC_…, another allocator) stay."""
    library = glibc()
    if library is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        library.mallopt(TRIM_THRESHOLD, 2**31 - 1)
        if not library.mallopt(MMAP_THRESHOLD, 2**30):
            library.mallopt(MMAP_THRESHOLD, 2**25)  # where glibc allows no more


def give_back(device: torch.device) -> None:
    """Return free memory that is cached for the next step to the GPU or the system."""
    library = glibc()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif library is not None:
        library.malloc_trim(0)


def gigabytes(device: torch.device) -> float:
    """10⁹ bytes of a CUDA GPU's memory, 0 elsewhere."""
    return torch.cuda.get_device_properties(device).total_memory / 1e9 if device.type == "cuda" else 0.0


def tier(gigabytes: float, tiers: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The first of (GB that a GPU is sold with, value) that this memory reaches, in descending order."""
    return next(tier for tier in tiers if gigabytes >= NEARLY * tier[0])


def reduced(device: torch.device) -> str:
    """The Plan.amp that may be faster than float32 on the device, to be measured; "off" if none was tried (MPS)."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if device.type == "cpu" else "off"


@contextmanager
def autocast(plan: Plan, device: torch.device, model: nn.Module) -> Iterator[None]:
    """Mixed precision around a forward pass of the model; a generator must not yield inside. fp16 is float32 where it
    may not train: evaluations and predictions of a run that a GPU trained."""
    if plan.amp == "off" or (plan.amp == "fp16" and device.type not in FP16_DEVICES):
        yield
    else:
        with recurrent_in_float32(plan, device, model), torch.autocast(device.type, DTYPES[plan.amp]):
            yield


def modes() -> tuple[Any, ...]:
    """What `restore_modes` takes: whether gradients are on, the depth of autocast contexts, and their switches."""
    torch.autocast_increment_nesting()
    kinds = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.autocast_decrement_nesting(), kinds


def restore_modes(before: tuple[Any, ...]) -> None:
    """After an interrupt, which may come while torch enters or leaves a context: that stays entered then, and in
    autocast torch goes on with copies of weights that have changed since."""
    grad, depth, kinds = before
    torch.set_grad_enabled(grad)
    for kind, enabled, dtype in kinds:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting() > depth:
        continue
    torch.clear_autocast_cache()


@contextmanager
def recurrent_in_float32(plan: Plan, device: torch.device, model: nn.Module) -> Iterator[None]:
    """Inside, under bf16, the model's LSTM, GRU and RNN layers leave autocast: forward, backward and recomputation. On
    CUDA autocast runs cuDNN's in fp16, whatever its dtype (`_cudnn_rnn_cast_reflatten` casts to kHalf,
    aten/src/ATen/cudnn/AutocastRNN.cpp), and bf16 trains without the loss scaling that fp16 needs."""
    layers = recurrent(model) if plan.amp == "bf16" else []
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = in_float32(layer.forward, device)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def recurrent(model: nn.Module) -> list[nn.RNNBase]:
    """The LSTM, GRU and RNN layers. `model.modules()` takes four times as long, at every forward pass."""
    found, left = set(), [model]
    while left:
        module = left.pop()
        if isinstance(module, nn.RNNBase):
            found.add(module)
        left += filter(None, module._modules.values())
    return list(found)


def in_float32(forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A layer's forward outside autocast."""

    def widened(value: Any) -> Any:
        floating = isinstance(value, (Tensor, PackedSequence)) and value.data.is_floating_point()
        return value.float() if floating else value

    def run(*given: Any, **named: Any) -> Any:
        given, named = tree_map(widened, (given, named))
        with torch.autocast(device.type, enabled=False):
            return forward(*given, **named)

    return run


def synchronizing(act: Callable[[], T]) -> tuple[T, tuple[str, ...]]:
    """(its result, `file:line` below the call from where torch warned of a synchronizing operation, outside torch where
    there is); none without CUDA."""
    lines: dict[str, None] = {}
    thread, show = threading.get_ident(), warnings.showwarning

    def caught(message: Warning | str, *more: Any, **named: Any) -> None:
        if "synchronizing" not in str(message):
            show(message, *more, **named)
        elif threading.get_ident() == thread:  # a feed's or a writer's own waits are none of the step's
            stack = [each for each in traceback.extract_stack()[:-1] if not each.filename.endswith("warnings.py")]
            own = [each for each in stack if Path(torch.__file__).parent not in Path(each.filename).parents]
            lines[f"{(own or stack)[-1].filename}:{(own or stack)[-1].lineno}"] = None

    with warnings.catch_warnings(), warned_of_waits():
        warnings.simplefilter("always")
        warnings.showwarning = caught
        found = act()
    return found, tuple(lines)


@contextmanager
def warned_of_waits() -> Iterator[None]:
    """On CUDA torch warns of operations that wait for the device; once a process it also warns that it misses some."""
    if not torch.cuda.is_initialized():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("warn")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def timing_event(device: torch.device) -> Any:
    """A mark in the device's own time, where it works behind the host's back; None elsewhere."""
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None


class Stopwatch:
    """Times steps by the device: `begin` before a batch is fetched, `got` when it is there, `end` after the step.

    On CUDA a step's seconds are those between events on its stream. Where the device is behind, it begins a step as it
    ends the one before, so that spans add up to all of its time, whatever the host does meanwhile; where it idles, it
    begins as the host does, and what a watcher of the loop takes is left out. Waiting for data is what the device
    waits. Elsewhere the host's clock tells the same. `wall`: seconds of the loop by the host's clock, without pauses.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] | None = None):
        self.device, self.clock = device, clock or perf_counter
        self.spans: list[list[Any]] = []  # [begin, got, end] of the steps since the last lap
        self.spare: list[Any] = []  # events to use again
        self.before = 0.0  # seconds of wall until the loop began
        self.since: float | None = None  # when it did

    def mark(self) -> Any:
        """This moment: an event of the device, or the host's time."""
        event = self.spare.pop() if self.spare else timing_event(self.device)
        if event is None:
            return self.clock()
        event.record(torch.cuda.current_stream(self.device))  # not that of torch's current device, which may idle
        return event

    def begin(self) -> None:
        self.current = [self.mark()]

    def got(self) -> None:
        self.current.append(self.mark())

    def end(self) -> None:
        self.spans.append([*self.current, self.mark()])

    def lap(self) -> Lap:
        """The steps since the last lap."""
        spans, self.spans = self.spans, []
        return Lap(self, spans)

    def peek(self) -> tuple[float, float]:
        """Return what `lap().seconds()` would, and let the lap go on."""
        return sum(between(span[0], span[2]) for span in self.spans), sum(between(*span[:2]) for span in self.spans)

    def start(self) -> None:
        """The loop begins."""
        self.since = self.clock()

    def stop(self) -> None:
        self.before, self.since = self.wall, None

    @property
    def wall(self) -> float:
        return self.before + (0.0 if self.since is None else self.clock() - self.since)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the block out of `wall`."""
        start = self.clock()
        try:
            yield
        finally:
            if self.since is not None:
                self.since += self.clock() - start


class Lap:
    """Some steps, which the device may still be at. times: (seconds, seconds that waited for data), once read."""

    def __init__(self, watch: Stopwatch | None, spans: list[list[Any]], times: tuple[float, float] | None = None):
        self.watch, self.spans, self.times = watch, spans, times

    def seconds(self) -> tuple[float, float]:
        """Return (seconds, seconds of them that waited for data); waits for the steps."""
        if self.times is None:
            assert self.watch is not None
            ongoing, self.watch.spans = self.watch.spans, self.spans
            self.times, self.watch.spans = self.watch.peek(), ongoing
            self.watch.spare += [mark for span in self.spans for mark in span if not isinstance(mark, float)]
            self.spans = []
        return self.times


def between(start: Any, end: Any) -> float:
    """Seconds from one mark to another, for which it waits."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def put(tensor: Tensor, *numbers: Tensor | float) -> None:
    """Write the numbers into a vector. `tensor[i] = 5` would copy a number from the host, and wait for the device
    (pytorch#186482)."""
    for place, number in zip(tensor.unbind(), numbers, strict=True):
        place.copy_(number) if isinstance(number, Tensor) else place.fill_(number)


class Reading:
    """A few numbers on the device, and their way to the host: only who takes them before they arrive waits. Made once,
    so that a step allocates nothing for it: `put` them into `tensor`, `send`, and take the values before the next
    ones."""

    def __init__(self, size: int, device: torch.device):
        self.tensor = self.host = torch.zeros(size, dtype=sum_dtype(device), device=device)
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.host, self.event = torch.empty_like(self.tensor, device="cpu", pin_memory=True), torch.cuda.Event()

    def send(self) -> None:
        if self.event is not None:
            self.host.copy_(self.tensor, non_blocking=True)
            self.event.record(torch.cuda.current_stream(self.tensor.device))

    @property
    def arrived(self) -> bool:
        """Whether `values` would not wait; always true on a CPU, where there is nothing to wait for."""
        return self.event is None or self.event.query()

    def values(self) -> list[float]:
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype for exact sums, if the device has one."""
    return torch.float32 if device.type == "mps" else torch.float64


def memory(device: torch.device) -> dict[str, float]:
    """MiB in use: on CUDA allocated and reserved, elsewhere the process's resident memory."""
    if device.type == "cuda":
        used = {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}
        return {f"gpu_memory_{name}": size / 2**20 for name, size in used.items()}
    return {"memory": resident() / 2**20}


def resident() -> int:
    """Bytes of this process in RAM now (Linux); elsewhere its peak."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * 4096
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def again(part: nn.Module, *inputs: Any) -> Any:
    """`part(*inputs)`, whose activations are computed a second time in backward instead of being kept, without moving
    the running averages of batch norm a second time."""
    norms = [m for m in part.modules() if isinstance(m, _BatchNorm) and m.training]
    passes = 0

    def forward(*inputs: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == 1:
            return part(*inputs)
        kept = [(m.momentum, m.num_batches_tracked) for m in norms]
        for m in norms:
            m.momentum = 0.0
            if m.num_batches_tracked is not None:
                m.num_batches_tracked = m.num_batches_tracked.clone()
        try:
            return part(*inputs)
        finally:  # also where torch ends the second pass early, by an exception, since backward needs no more
            for m, (momentum, counted) in zip(norms, kept, strict=True):
                m.momentum, m.num_batches_tracked = momentum, counted

    return checkpoint(forward, *inputs, use_reentrant=False)
