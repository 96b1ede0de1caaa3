"""How long a model takes for one single sample, as its user experiences it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import numpy as np
import torch

from nbtools.errors import PlanError
from nbtools.show import Table

T = TypeVar("T")

WARM = 3  # predictions before the clock counts: the first ones load libraries and choose kernels


@dataclass(frozen=True)
class Latency(Table):
    """Seconds of n predictions, each of one sample alone. Shows as a table."""

    device: str
    sample: str
    n: int
    median: float
    slowest: float  # the 95th percentile

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        times = (f"{1e3 * seconds:.2f} ms" for seconds in (self.median, self.slowest))
        return ("device", "one sample", "predictions", "median", "95 %"), [
            (self.device, self.sample, f"{self.n}", *times)
        ]


def measure_latency(
    predict: Callable[[T], object], samples: Sequence[T] | np.ndarray, device: torch.device, about: str
) -> Latency:
    """Each sample predicted once, after a few to warm up. predict must wait for the device, as copying its answer to
    the host does; about: what a sample is. Raises PlanError without samples."""
    if not len(samples):
        raise PlanError("latency needs at least one sample, got none; take some of pack.ids('val')")
    seconds = []
    for sample in [*samples[:WARM], *samples]:
        began = perf_counter()
        predict(sample)
        seconds.append(perf_counter() - began)
    seconds = seconds[-len(samples) :]
    return Latency(str(device), about, len(seconds), statistics.median(seconds), float(np.quantile(seconds, 0.95)))
