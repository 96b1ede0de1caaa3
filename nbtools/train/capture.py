"""Capture kernels on a GPU, to launch them as one (https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

A capture that fails can end the process (pytorch#180395). None begins here before a child process has managed one on
this machine with the same versions, nor for a function that makes the host wait for the device.
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
from typing import Any, TypeVar

import torch
from torch import Tensor

from nbtools import data, disk

T = TypeVar("T")
PATIENCE = 60.0  # seconds for the child process, which takes 6 to 20 to import torch and start CUDA
VERDICTS = "graphs.json"  # in the cache: {versions and GPU: why not, or ""}
CHILD = "import sys; from nbtools.train.capture import trial; trial(int(sys.argv[1]))"


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
