"""One stopwatch for the loop and for measurements, and numbers on their way from the device to the host.

A GPU works behind the host's back: the host only queues kernels. So time is read from CUDA events; elsewhere the host's
clock is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

Spans = list[list[Any]]  # [begin, got, end] of each step


class Stopwatch:
    """Time steps by the device: `begin` before a batch is fetched, `got` when it is there, `end` after the step.

    Where the device is behind, a step begins as the one before it ends; where it idles, as the host begins it. `wall`:
    seconds of the loop by the host's clock, without pauses.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] | None = None):
        self.device, self.clock = device, clock or perf_counter
        self.spans: Spans = []  # since the last lap
        self.before = 0.0  # wall until the loop began
        self.since: float | None = None  # when it did

    def mark(self) -> Any:
        """Return this moment: an event on the device's stream, or the host's time."""
        if self.device.type != "cuda":
            return self.clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))  # not that of torch's current device, which may idle
        return event

    def begin(self) -> None:
        self.current = [self.mark()]

    def got(self) -> None:
        self.current.append(self.mark())

    def end(self) -> None:
        self.spans.append([*self.current, self.mark()])

    def lap(self) -> Spans:
        """Return the spans since the last lap, which the device may still be at."""
        spans, self.spans = self.spans, []
        return spans

    def start(self) -> None:
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


def seconds(spans: Spans) -> tuple[float, float]:
    """Return (seconds of steps, seconds of them that waited for data). Waits for the steps."""
    return sum(between(begin, end) for begin, _, end in spans), sum(between(begin, got) for begin, got, _ in spans)


def between(start: Any, end: Any) -> float:
    """Return the seconds from one mark to another, for which it waits."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


class Reading:
    """A few numbers on their way to the host: `put` them into `tensor`, `send`, and take `values`, which waits for
    them."""

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
        return self.event is None or self.event.query()

    def values(self) -> list[float]:
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()


def put(tensor: Tensor, *numbers: Tensor | float) -> None:
    """Write numbers into a vector. `tensor[i] = 5` would wait for the device (pytorch#186482)."""
    for place, number in zip(tensor.unbind(), numbers, strict=True):
        place.copy_(number) if isinstance(number, Tensor) else place.fill_(number)


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for exact sums, float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64
