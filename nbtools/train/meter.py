"""The meter: loss, speed and memory of a run. Values cross to the host on log steps only, and nothing waits for them:
the row of a log step comes when its values have arrived."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from nbtools.errors import TrainError
from nbtools.train.clock import Reading, Spans, Stopwatch, put, seconds, sum_dtype
from nbtools.train.history import Record

LEAST_SCALE = 1e-4  # of fp16's loss, below which fairseq gives up too: overflowing steps halve it from 65,536


class Diverged(TrainError):
    """The loss became NaN or infinite, or fp16 skips every step. steps: the last good one and the last of the interval
    in which it happened. setting: the one to change; "lr" is a guess, others are certain."""

    def __init__(self, message: str, steps: tuple[int, int], setting: str = "lr"):
        super().__init__(message, entry="NaN")
        self.steps, self.setting = steps, setting

    def _render_traceback_(self) -> list[str]:  # in IPython, instead of a traceback: no line of code is at fault
        return [f"{type(self).__name__}: {self}"]


class Meter:
    """Loss and count of this epoch, summed on the device, and its seconds by the device's stopwatch."""

    def __init__(self, device: torch.device):
        self.device, self.watch, self.reading = device, Stopwatch(device), Reading(3, device)  # loss, count and scale
        self.loss = torch.zeros((), dtype=sum_dtype(device), device=device)
        self.count: Tensor | float = 0
        self.seconds = self.waited = 0.0  # of this epoch: training, and of that waiting for data
        self.logged = (0.0, 0.0)  # loss and count at the last log step
        self.since = (0, 0)  # step and samples at the last log step
        self.pending: tuple[Record, tuple[int, int], Spans] | None = None  # a row without loss and speed
        self.scale = math.inf  # of fp16's loss, at the last log step

    def add(self, loss_sum: Tensor, count: Tensor | float) -> None:
        """Count a step."""
        self.loss += loss_sum
        self.count = self.count + count

    def log(self, record: Record, scaler: torch.amp.GradScaler | None) -> None:
        """Send the values of a log step to the host. record: its row so far."""
        scale: Any = math.inf if scaler is None else scaler._scale  # on the device: `get_scale` would wait for it
        put(self.reading.tensor, self.loss, self.count, scale)
        self.reading.send()
        self.pending = record, self.since, self.watch.lap()
        self.since = record.step, record.samples

    def rows(self, wait: bool = True) -> list[Record]:
        """Return the row of the last log step, if it is still to come; without waiting, only if its values are here.
        Raises Diverged if the loss is not finite, or fp16 skips all steps."""
        if self.pending is None or not (wait or self.reading.arrived):
            return []
        (record, (step, samples), lap), self.pending = self.pending, None
        total, count, self.scale = self.reading.values()
        speed, steps = self.speed(record.samples - samples, *self.timed(lap)), (step, record.step)
        if not math.isfinite(total):
            raise Diverged(f"the loss became {total} in steps {step + 1} to {record.step}", steps)
        if self.scale < LEAST_SCALE:
            what = f"gradients overflow in every step, though their scale has fallen to {self.scale:.0e}"
            raise Diverged(f"{what}, and none counts", steps, "amp")
        loss = mean("loss", total - self.logged[0], count - self.logged[1])
        self.logged = total, count
        return [replace(record, values={**loss, **speed, **record.values, "wall": self.watch.wall})]

    def timed(self, lap: Spans) -> tuple[float, float]:
        """Add the times of a lap to the epoch's, and return them."""
        took, waited = seconds(lap)
        self.seconds, self.waited = self.seconds + took, self.waited + waited
        return took, waited

    @staticmethod
    def speed(samples: int, seconds: float, waited: float) -> dict[str, float]:
        """Return samples_per_s, and the share of the time in which the device waited for data."""
        seconds = max(seconds, 1e-9)
        return {"samples_per_s": samples / seconds, "data_wait": waited / seconds}

    def epoch(self, samples: int) -> dict[str, Any]:
        """Return loss, speed and memory of an epoch of so many samples, and begin the next one. Waits."""
        self.timed(self.watch.lap())
        values = {
            **mean("train_loss", float(self.loss), float(self.count)),
            **self.speed(samples, self.seconds, self.waited),
            "epoch_time": self.seconds,
            "wall": self.watch.wall,
        }
        if self.device.type == "cuda":
            values["gpu_memory_peak"] = torch.cuda.max_memory_allocated(self.device) / 2**20
            torch.cuda.reset_peak_memory_stats(self.device)
        self.loss.zero_()
        self.count, self.seconds, self.waited, self.logged = 0, 0.0, 0.0, (0.0, 0.0)
        return values

    def facts(self) -> dict[str, Any]:
        """Return its plain values, for JSON. Waits for the device."""
        took, waited = seconds(self.watch.spans)
        facts = {"loss": float(self.loss), "count": float(self.count), "logged": self.logged, "since": self.since}
        facts |= {"seconds": self.seconds + took, "waited": self.waited + waited, "wall": self.watch.wall}
        if self.pending is not None:
            record, since, lap = self.pending
            facts["pending"] = [asdict(record), since, seconds(lap), self.reading.values()]
        return facts

    def load(self, facts: dict[str, Any]) -> None:
        """Go on from saved values; wall time never goes back."""
        self.loss.fill_(facts["loss"])
        count, self.seconds, self.waited = facts["count"], facts["seconds"], facts["waited"]
        self.count = int(count) if float(count).is_integer() else count  # a float plus an int64 tensor is a float32
        self.logged, self.since = tuple(facts["logged"]), tuple(facts["since"])
        self.watch.spans, self.watch.before, self.pending = [], max(self.watch.before, facts["wall"]), None
        if "pending" in facts:
            record, since, (took, waited), values = facts["pending"]
            put(self.reading.tensor, *values)
            self.reading.send()
            self.pending = Record(**record), tuple(since), [[0.0, waited, took]]


def mean(name: str, total: float, count: float) -> dict[str, float]:
    """Return {name: total / count}; {} where no step counted: a loss of 0 would be the best of all."""
    return {name: total / count} if count else {}
