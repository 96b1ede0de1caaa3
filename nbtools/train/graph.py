"""Training steps as CUDA graphs: the hundreds of kernels of a step are recorded once and then launched as one.

A graph repeats its kernels on the same memory, so the raw batch, the keys of random numbers and lr lie in tensors that
are written before each replay, and the first replay has to give what the same step gave eagerly. A capture that fails
may end the process (pytorch#180395): a child process tries a small one first, and a file marks a step that ended it.
"""

import gc
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nbtools import data, disk
from nbtools.train.defaults import Batch
from nbtools.train.device import T, within_memory

Sums = tuple[Tensor, Tensor | float]  # of the loss, and of how many terms
Act = Callable[[Batch], Sums]
WARM_UP = 2  # steps of a shape before the one that is recorded
MOST_GRAPHS = 8  # shapes that are recorded: each keeps a batch, and what its step has alive at a time
NEAR, NEAR_STEP = 1e-3, 0.1  # differences of two equal losses, which a GPU may add in another order, and updates
PATIENCE = 60.0  # seconds for the child process, which takes 6 to 20 to import torch and start CUDA
CHILD = """
import sys, torch
torch.cuda.set_device(int(sys.argv[1]))
x = torch.ones(4, 8, device="cuda")
torch.cuda.make_graphed_callables(torch.nn.Linear(8, 8, device="cuda"), (x,))(x).sum().backward()
torch.cuda.synchronize()
"""
stream = cache(torch.cuda.Stream)  # one for all recorders of the process: on each, cuBLAS keeps 32 MiB for good


class Graphs:
    """The recorded steps of a run by shape. events: where to say that there are none. off: why, or ""."""

    def __init__(self, device: torch.device, events: list[str]):
        self.recorder, self.device, self.events, self.off, self.replayed = Recorder(device), device, events, "", 0
        index = torch.empty(0, device=device).device.index  # also of a device without its number
        self.numbers = torch.default_generator if index is None else torch.cuda.default_generators[index]
        self.clear()
        if why := uncapturable(device):
            self.give_up(why)

    def step(self, raw: Batch, size: int, act: Act, written: Callable[[], list[Tensor]], kind: object) -> Sums:
        """Return act(raw), replayed where such a step is recorded: the next one then overwrites the result. size: of a
        whole batch; kind: of step. act reads what else changes, as lr, in tensors; written: those it changes."""
        shapes = tuple(tensor.shape for tensor in raw.values())
        if shapes in self.recorded:
            inputs, replay, sums = self.recorded[shapes]
            torch._foreach_copy_([*inputs.values()], [*raw.values()])  # pyright: ignore[reportPrivateImportUsage]
            replay()
            self.replayed += 1
            return sums
        self.seen[shapes] += len(raw["id"]) == size
        if self.seen[shapes] == WARM_UP + 1 and len(self.recorded) < MOST_GRAPHS:
            if not (tried := record_of(self.device, kind)).exists():
                return self.first(raw, act, written(), shapes, tried)
            self.give_up(f"an earlier capture of this step ended its process (remove {tried} to try again)")
        return self.recorder.run(partial(act, raw))

    def first(self, raw: Batch, act: Act, written: list[Tensor], shapes: tuple[torch.Size, ...], tried: Path) -> Sums:
        """Return an eager step, then recorded and replayed from where it began. Where that gives something else, or
        fails, the eager one counts, and no step is recorded any more; nor where the host waits in it: a capture that
        fails for that leaves the allocator believing in one."""
        (before, why), after = within_memory(partial(self.copy, written)), list[Tensor]()
        host = torch.default_generator.get_state()
        eager, waits = synchronizing(partial(self.recorder.run, partial(act, raw)))
        why = why or "".join(f"the host waits for the device at {line}" for line in waits[:1])
        if self.numbers is not torch.default_generator and not torch.equal(host, torch.default_generator.get_state()):
            why = why or "the host draws random numbers in it"
        try:
            if before is not None and not why:
                disk.write_atomic(tried, "a step is being captured")  # what stays where that ends the process
                after, inputs = self.copy(written), {name: tensor.clone() for name, tensor in raw.items()}
                replay, sums = self.recorder.capture(partial(act, inputs))
                self.restore(written, before)
                replay()
                if near(sums[0], eager[0], written, after, before):
                    self.recorded[shapes], self.replayed = (inputs, replay, sums), self.replayed + 1
                    return sums
                self.restore(written, after)
                why = "a replayed step gives a different result: it depends on what the host does in it"
        except (RuntimeError, OSError) as error:  # all of CUDA's, that memory ran out, and the disk's
            why = str(error).split("\n")[0]
            if after:  # the replay may have failed
                self.restore(written, after)
        finally:
            with suppress(OSError):  # a cache that cannot be written any more
                tried.unlink(missing_ok=True)
        self.give_up(why)
        return eager

    def copy(self, written: list[Tensor]) -> list[Tensor]:
        return [*(tensor.detach().clone() for tensor in written), self.numbers.get_state()]

    @torch.no_grad()
    def restore(self, written: list[Tensor], copies: list[Tensor]) -> None:
        torch._foreach_copy_(written, copies[:-1])  # pyright: ignore[reportPrivateImportUsage]
        self.numbers.set_state(copies[-1])

    def give_up(self, why: str) -> None:
        self.off = why
        self.clear()
        self.events.append(f"graph off: {why}; each kernel is launched by the host")

    def clear(self) -> None:
        """Forget all recorded steps: for their memory, or where a plan or other tensors take the place of theirs."""
        self.recorded: dict[tuple[torch.Size, ...], tuple[Batch, Callable[[], Any], Sums]] = {}
        self.seen: Counter[tuple[torch.Size, ...]] = Counter()


@torch.no_grad()
def near(loss: Tensor, expected: Tensor, now: list[Tensor], after: list[Tensor], before: list[Tensor]) -> bool:
    """Return whether two steps from the same state give the same loss, and weights that differ by little of a step: of
    a gradient that is only rounding Adam makes a whole one."""
    weights = [each for each in zip(now, after, before, strict=False) if each[0].requires_grad]
    apart = sum(float((a - b).float().square().sum()) for a, b, _ in weights)
    moved = sum(float((b - c).float().square().sum()) for _, b, c in weights)
    return torch.allclose(loss, expected, NEAR, NEAR, equal_nan=True) and apart <= NEAR_STEP**2 * moved


class Recorder:
    """Record functions of tensors on a GPU, on a stream of their own: there the steps before run too, since autograd
    goes back to the stream on which it first met a parameter."""

    def __init__(self, device: torch.device):
        self.stream, self.pool = stream(device), torch.cuda.graph_pool_handle()

    def run(self, act: Callable[[], T]) -> T:
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                return act()
        finally:  # also where memory runs out: what follows restores tensors that act may still write
            current.wait_stream(self.stream)

    def capture(self, act: Callable[[], T]) -> tuple[Callable[[], Any], T]:
        """Return (what repeats act, what that leaves its results in), without any effect yet. Raises RuntimeError."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.stream.device)
        gc.collect()  # graphs of other runs that end amid a capture would end it too
        try:  # the current stream, else a failed capture leaves its own as that; a feed's thread copies meanwhile
            recording = torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local")
            with torch.cuda.stream(current), recording:
                result = act()
        except torch.OutOfMemoryError:  # which ends the capture well
            raise
        except RuntimeError:
            numbers, index = torch.cuda.default_generators[self.stream.device_index], self.stream.device_index
            numbers.graphsafe_set_state(numbers.clone_state())  # else it waits for the end of the capture
            ends = "_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"  # from torch 2.8 on; before
            with suppress(RuntimeError, AttributeError):  # as does the allocator (pytorch#180395; until 2.11)
                getattr(torch._C, ends[not hasattr(torch._C, ends[0])])(index, self.pool)
                torch._C._cuda_releasePool(index, self.pool)
            raise
        return graph.replay, result


def synchronizing(act: Callable[[], T]) -> tuple[T, list[str]]:
    """Return (its result, `file:line` of each place that made the host wait for a GPU)."""
    if not torch.cuda.is_initialized():
        return act(), []
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings(record=True) as caught:
            torch.cuda.set_sync_debug_mode("warn")
            warnings.simplefilter("always")
            result = act()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    waits = [each for each in caught if "called a synchronizing" in str(each.message)]
    return result, [*dict.fromkeys(f"{each.filename}:{each.lineno}" for each in waits)]


def uncapturable(device: torch.device) -> str:
    """Return why nothing may be captured in this process; "" once a child process has captured and replayed a small
    forward and backward pass on this GPU with these versions, which the cache keeps."""
    if device.type == "cuda" and not (path := record_of(device)).exists():
        command = [sys.executable, "-c", CHILD, str(device.index or 0)]
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
            return f"a trial in a child process failed: {(said.strip() or str(error)).splitlines()[-1]}"
        disk.write_atomic(path, "captured and replayed")
    return ""


def record_of(device: torch.device, *step: object) -> Path:
    """Return the file about captures on this GPU with these versions: of that in a child process, or of a step's."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parts = torch.version.cuda, torch.__version__, getattr(torch._C, "_cuda_getDriverVersion", int)(), name, step
    return data.cache() / "captured" / data.digest(repr(parts))
