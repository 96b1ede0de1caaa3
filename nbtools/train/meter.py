"""The meter: loss, speed and memory of a run, and the stopwatch by which loop and measurements take their time. The
host only queues a GPU's kernels, so time is read from CUDA events; elsewhere the host's clock is exact. Values cross to
the host on log steps only, whose rows come when they have arrived."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from nbtools.errors import TrainError
from nbtools.train.history import Record

LEAST_SCALE = 1e-4  # of fp16's loss, below which fairseq gives up too: overflowing steps halve it
Spans = list[list[Any]]  # [begin, got, end] of each step


class Diverged(TrainError):
    """The loss became NaN or infinite, or fp16 skips every step. steps: the last good one and the last of the interval
    in which it happened. setting: the one to change; "lr" is a guess, others are certain."""

    def __init__(self, message: str, steps: tuple[int, int], setting: str = "lr"):
        super().__init__(message, entry="NaN")
        self.steps, self.setting = steps, setting

    def _render_traceback_(self) -> list[str]:  # in IPython, instead of a traceback: no line of code is at fault
        return [f"{type(self).__name__}: {self}"]


class Stopwatch:
    """Time steps by the device: `mark` before a batch is fetched, when it is there, and after the step make a span.
    Where the device is behind, a step begins as the one before it ends; where it idles, as the host begins it. `wall`:
    seconds of the loop by the host's clock, without pauses."""

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
    if spans and not isinstance(spans[-1][-1], float):
        spans[-1][-1].synchronize()
        spans = [[0.0, begin.elapsed_time(got) / 1e3, begin.elapsed_time(end) / 1e3] for begin, got, end in spans]
    return sum(end - begin for begin, _, end in spans), sum(got - begin for begin, got, _ in spans)


class Meter:
    """Loss and count of this epoch, summed on the device, and its seconds by the device's stopwatch."""

    def __init__(self, device: torch.device):
        self.device, self.watch = device, Stopwatch(device)
        self.loss, self.sent = (torch.zeros(size, dtype=sum_dtype(device), device=device) for size in ((), 3))
        self.host = self.sent  # where loss, count and scale of a log step arrive
        self.event: torch.cuda.Event | None = None  # that they have
        if device.type == "cuda":
            self.host, self.event = torch.empty_like(self.sent, device="cpu", pin_memory=True), torch.cuda.Event()
        self.count: Tensor | float = 0
        self.seconds = self.waited = 0.0  # of this epoch: training, and of that waiting for data
        self.logged = (0.0, 0.0)  # loss and count at the last row
        self.since = (0, 0)  # step and samples there
        self.pending: tuple[Record, Spans] | None = None  # a row without loss and speed

    def add(self, loss_sum: Tensor, count: Tensor | float, begin: Any, got: Any) -> None:
        """Count a step. begin, got: the stopwatch's marks before its batch and after."""
        self.loss += loss_sum
        self.count = self.count + count
        self.watch.spans.append([begin, got, self.watch.mark()])

    def log(self, record: Record, scaler: torch.amp.GradScaler) -> None:
        """Send the values of a log step to the host. record: its row so far."""
        scale: Any = scaler._scale if scaler.is_enabled() else math.inf  # on the device: `get_scale` would wait for it
        self.send(self.loss, self.count, scale)
        self.pending, self.watch.spans = (record, self.watch.spans), []

    def send(self, *numbers: Tensor | float) -> None:
        put(self.sent, *numbers)
        if self.event is not None:
            self.host.copy_(self.sent, non_blocking=True)
            self.event.record(torch.cuda.current_stream(self.device))

    def received(self) -> list[float]:
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()

    def rows(self, wait: bool = True) -> list[Record]:
        """Return the row of the last log step once its values are here, or when waiting. Raises Diverged."""
        if self.pending is None or not (wait or self.event is None or self.event.query()):
            return []
        (record, spans), self.pending = self.pending, None
        (step, samples), self.since = self.since, (record.step, record.samples)
        total, count, scale = self.received()
        steps, times = (step, record.step), seconds(spans)
        self.seconds, self.waited = self.seconds + times[0], self.waited + times[1]
        if not math.isfinite(total):
            raise Diverged(f"the loss became {total} in steps {step + 1} to {record.step}", steps)
        if scale < LEAST_SCALE:
            what = f"gradients overflow in every step, even at a loss scale of {scale:.0e}"
            raise Diverged(f"{what}, so every step is skipped", steps, "amp")
        (total_before, count_before), self.logged = self.logged, (total, count)
        made = averages("loss", total - total_before, count - count_before, record.samples - samples, times)
        return [replace(record, values={**made, **record.values, "wall": self.watch.wall})]

    def epoch(self, samples: int) -> dict[str, Any]:
        """Return loss, speed and memory of an epoch of so many samples, and begin the next one. Waits."""
        took, waited = seconds(self.watch.spans)
        times = self.seconds + took, self.waited + waited
        values = averages("train_loss", float(self.loss), float(self.count), samples, times)
        values |= {"epoch_time": times[0], "wall": self.watch.wall}
        if self.device.type == "cuda":
            values["gpu_memory_peak"] = torch.cuda.max_memory_allocated(self.device) / 2**20
            torch.cuda.reset_peak_memory_stats(self.device)
        self.loss.zero_()
        self.count, self.seconds, self.waited, self.logged, self.watch.spans = 0, 0.0, 0.0, (0.0, 0.0), []
        return values

    def facts(self) -> dict[str, Any]:
        """Return its plain values, for JSON. Waits for the device. A row that is pending becomes part of the next."""
        took, waited = seconds([*(self.pending[1] if self.pending else []), *self.watch.spans])
        times = {"seconds": self.seconds + took, "waited": self.waited + waited, "wall": self.watch.wall}
        return {"loss": float(self.loss), "count": float(self.count), "logged": self.logged, **times}

    def load(self, facts: dict[str, Any], step: int, samples: int) -> None:
        """Go on from saved values, timing steps from this one on; wall time never goes back."""
        self.loss.fill_(facts["loss"])
        count, self.seconds, self.waited = facts["count"], facts["seconds"], facts["waited"]
        self.count = int(count) if float(count).is_integer() else count  # a float plus an int64 tensor is a float32
        self.logged, self.since, self.pending = tuple(facts["logged"]), (step, samples), None
        self.watch.spans, self.watch.before = [], max(self.watch.before, facts["wall"])


def averages(loss: str, total: float, count: float, samples: int, times: tuple[float, float]) -> dict[str, float]:
    """Return the mean loss under its name, none where no step counted: 0 would be the best of all; and speeds."""
    seconds, waited = max(times[0], 1e-9), times[1]
    speed = {"samples_per_s": samples / seconds, "data_wait": waited / seconds}
    return {loss: total / count, **speed} if count else speed


def put(tensor: Tensor, *numbers: Tensor | float) -> None:
    """Write numbers into a vector. `tensor[i] = 5` would wait for the device (pytorch#186482)."""
    for place, number in zip(tensor.unbind(), numbers, strict=True):
        place.copy_(number) if isinstance(number, Tensor) else place.fill_(number)


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for exact sums, float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64
