"""Training steps as CUDA graphs: the hundreds of kernels of a step, from the raw batch to its sums, are recorded once
and then launched as one.

A graph repeats its kernels on the same memory, and nothing of what the host did. So the raw batch, the keys of random
numbers and lr lie in tensors that are written before each replay, and the first replay has to give what the step gave
when the host launched each kernel.

A capture that fails can end the process (pytorch#180395). None begins here before a child process has managed one on
this machine with the same versions, nor for a step that makes the host wait for the device.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from nbtools import data, disk
from nbtools.train.device import within_memory
from nbtools.train.plan import Plan
from nbtools.train.task import Batch

Sums = tuple[Tensor, Tensor | float]
Act = Callable[[Batch], Sums]
WARM_UP = 2  # steps of a shape before the one that is recorded
MOST_GRAPHS = 8  # shapes that are recorded: each keeps a batch, and what its step has alive at a time
NEAR = 1e-3  # difference of two equal losses: a GPU may add in another order
NEAR_STEP = 0.1  # and of two equal updates: of a gradient that is only rounding Adam makes a whole step


def unrecordable(plan: Plan) -> str:
    """Return why steps under a plan cannot be recorded; "" where they can."""
    if plan.amp == "fp16":
        return "fp16 decides on the host whether a step counts"
    if plan.checkpoint_activations:
        return "recomputing activations reads the state of random numbers on the host"
    return "a compiled step is not recorded" if plan.compile else ""


class Recorded(NamedTuple):
    inputs: Batch
    replay: Callable[[], Any]
    sums: Sums
    kept: Any  # the tensors that the graph may read, none of which may be freed


class Graphs:
    """The recorded steps of a run under its present plan, one for each shape of a whole batch. events: where to say
    that there are none. off: why, or "". replayed: how many steps were."""

    def __init__(self, device: torch.device, events: list[str]):
        self.recorder, self.events, self.off, self.replayed = Recorder(device), events, "", 0
        gpu = torch.empty(0, device=device).device.index  # also of a device without its number
        self.numbers = torch.default_generator if gpu is None else torch.cuda.default_generators[gpu]
        self.plan: Plan | None = None
        self.steps: dict[tuple[torch.Size, ...], int | Recorded] = {}  # by shapes: how many came, or what was recorded
        if why := uncapturable(device):
            self.give_up(why)

    def follow(self, plan: Plan) -> bool:
        """Return whether steps under this plan, the present one from now on, are recorded; say why not."""
        why = unrecordable(plan)
        if plan is not self.plan:
            self.plan = plan
            self.clear()
            self.events += [f"graph off: {why}; each kernel is launched by the host"] if why else []
        return not why

    def step(self, raw: Batch, act: Act, written: Callable[[], list[Tensor]]) -> Sums:
        """Return act(raw), a step: replayed where such a step is recorded; its result is overwritten by the next one
        then. act reads what else may change, such as lr, in tensors. written: the tensors that it changes."""
        shapes, eager = tuple(tensor.shape for tensor in raw.values()), partial(act, raw)
        known = self.steps.get(shapes, 0 if len(self.steps) < MOST_GRAPHS else None)
        if known is None or self.off or self.plan is None or len(raw["id"]) != self.plan.batch_size:
            return self.recorder.run(eager)
        if isinstance(known, Recorded):
            torch._foreach_copy_([*known.inputs.values()], [*raw.values()])  # pyright: ignore[reportPrivateImportUsage]
            known.replay()
            self.replayed += 1
            return known.sums
        self.steps[shapes] = known + 1
        return self.recorder.run(eager) if known < WARM_UP else self.first(raw, act, written(), shapes)

    def first(self, raw: Batch, act: Act, written: list[Tensor], shapes: tuple[torch.Size, ...]) -> Sums:
        """Return a step that the host launches, then recorded and replayed from where it began. Where the two differ,
        or the second fails, the first one counts, and the run goes on without graphs."""
        before, why = within_memory(lambda: self.copy(written))
        if before is None:
            self.give_up(why)
            return self.recorder.run(partial(act, raw))
        eager, why = self.recorder.rehearse(partial(act, raw))
        try:
            made = None if why else self.record(raw, act, written, before)
            after = self.copy(written)
            if made is not None:
                self.restore(written, before)
                made.replay()
                if same(made.sums[0], eager[0], written, after, before):
                    self.steps[shapes], self.replayed = made, self.replayed + 1
                    return made.sums
                self.restore(written, after)
                why = "replayed, a step gives something else: it depends on what the host does in it"
        except RuntimeError as error:  # all of CUDA's, and that memory ran out
            why = str(error).split("\n")[0]
        self.give_up(why)
        return eager

    def record(self, raw: Batch, act: Act, written: list[Tensor], before: list[Tensor]) -> Recorded:
        """Return the step, without any effect yet. The graph may read whatever tensor is there by now."""
        for tensor in written:
            tensor.grad = None
        inputs, copied = {name: tensor.clone() for name, tensor in raw.items()}, {id(tensor) for tensor in before}
        alive = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and id(each) not in copied]
        return Recorded(inputs, *self.recorder.capture(partial(act, inputs)), alive)

    def copy(self, written: list[Tensor]) -> list[Tensor]:
        """Return copies of tensors, and of the state of random numbers."""
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
        """Forget all recorded steps, where their memory is needed, or other tensors take the place of some."""
        self.steps.clear()


@torch.no_grad()
def same(loss: Tensor, expected: Tensor, now: list[Tensor], after: list[Tensor], before: list[Tensor]) -> bool:
    """Return whether two steps from the same state give the same loss, and weights that differ by little of a step."""

    def apart(these: list[Tensor], those: list[Tensor]) -> float:
        pairs = ((a, b) for a, b, tensor in zip(these, those, now, strict=False) if tensor.requires_grad)
        return sum(float((a - b).float().square().sum()) for a, b in pairs) ** 0.5

    near = torch.allclose(loss, expected, NEAR, NEAR, equal_nan=True)
    return near and apart(now, after) <= NEAR_STEP * apart(after, before)


# -- a capture

T = TypeVar("T")
PATIENCE = 60.0  # seconds for the child process, which takes 6 to 20 to import torch and start CUDA
VERDICTS = "graphs.json"  # in the cache: {versions and GPU: why not, or ""}
CHILD = "import sys; from nbtools.train.graph import trial; trial(int(sys.argv[1]))"


class Recorder:
    """Record functions of tensors on a GPU in one pool of memory, on a stream of their own: there the steps before run
    too, since autograd goes back to the stream on which it first met a parameter."""

    def __init__(self, device: torch.device):
        self.stream, self.pool = stream(device), torch.cuda.graph_pool_handle()

    def run(self, act: Callable[[], T]) -> T:
        """Return what act returns, for the current stream."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                return act()
        finally:  # also where memory runs out: what follows restores tensors that act may still write
            current.wait_stream(self.stream)

    def rehearse(self, act: Callable[[], T]) -> tuple[T, str]:
        """Return (what `run` does, why act cannot be captured, or "")."""
        result, lines = synchronizing(partial(self.run, act))
        return result, f"the host waits for the device at {lines[0]}" if lines else ""

    def capture(self, act: Callable[[], T]) -> tuple[Callable[[], Any], T]:
        """Return (what repeats act, what that leaves its results in), without any effect yet. Raises RuntimeError."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.stream.device)
        gc.collect()  # graphs of other runs that end amid a capture would end it too
        try:  # thread_local: a feed's thread allocates and copies meanwhile
            with (
                torch.cuda.stream(current),  # else a failed capture leaves its own as the current one
                torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"),
            ):
                result = act()
        except RuntimeError:
            numbers = torch.cuda.default_generators[self.stream.device_index]
            numbers.graphsafe_set_state(numbers.clone_state())  # else it waits for the end of the capture
            raise
        return graph.replay, result


def synchronizing(act: Callable[[], T]) -> tuple[T, tuple[str, ...]]:
    """Return (its result, `file:line` of each place that made the host wait for a GPU, outside torch where there is
    one); none without CUDA."""
    if not torch.cuda.is_initialized():
        return act(), ()
    lines: dict[str, None] = {}
    thread, show, before = threading.get_ident(), warnings.showwarning, torch.cuda.get_sync_debug_mode()

    def caught(message: Warning | str, *more: Any, **named: Any) -> None:
        if "synchronizing" not in str(message):
            show(message, *more, **named)
        elif threading.get_ident() == thread:  # a feed's or a writer's own waits are none of the step's
            inner = (warnings.__file__, str(Path(torch.__file__).parent))
            *_, place = (each for each in traceback.extract_stack()[:-1] if not each.filename.startswith(inner))
            lines[f"{place.filename}:{place.lineno}"] = None

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # once a process torch warns that it misses some
            torch.cuda.set_sync_debug_mode("warn")
            warnings.simplefilter("always")
            warnings.showwarning = caught
            return act(), tuple(lines)  # evaluated in this order
    finally:
        torch.cuda.set_sync_debug_mode(before)


@cache
def stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream for all recorders of the process: on each, cuBLAS keeps 32 MiB a thread for good."""
    return torch.cuda.Stream(device)


def uncapturable(device: torch.device) -> str:
    """Return why nothing may be captured in this process; "" once a child process has captured and replayed a small
    training step. The verdict is kept in the cache."""
    if device.type != "cuda":
        return ""
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name(device)}"
    path, verdicts = data.cache() / VERDICTS, dict[str, str]()
    with suppress(OSError, ValueError):
        verdicts = json.loads(path.read_text())
    if versions not in verdicts:
        verdicts[versions] = failure([sys.executable, "-c", CHILD, str(device.index or 0)])
        if "out of memory" not in verdicts[versions]:  # which another process may have taken for a while
            with suppress(OSError):
                disk.write_atomic(path, json.dumps(verdicts, indent=1))
    return verdicts[versions]


def failure(command: list[str]) -> str:
    """Run a child process; return in words how it failed, or ""."""
    paths, what = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, "a trial in a child process"
    try:
        done = subprocess.run(command, env=paths, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return f"{what} did not end within {PATIENCE:g} s"
    if done.returncode < 0:
        return f"{what} was ended by {signal.Signals(-done.returncode).name}"
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return f"{what} failed: {last}" if done.returncode else ""


def trial(index: int) -> None:
    """Capture and replay a small training step on a GPU; the process may end of it."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    network, recorder = torch.nn.Linear(8, 8, device=device), Recorder(device)
    optimizer = torch.optim.AdamW(network.parameters(), capturable=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.dropout(network(torch.ones(4, 8, device=device))).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(3):
        recorder.run(step)
    replay, loss = recorder.capture(step)
    replay()
    assert bool(torch.isfinite(loss)), "a replayed step gave no number"
