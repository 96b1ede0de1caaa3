"""Which clock tells how long something takes on a device, and when the device is done."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, process_time

import torch


def clock_of(device: torch.device, feed: str) -> tuple[Callable[[], float], str]:
    """CPU time where one thread does all the work: other programs then cost little. Elsewhere the clock on the wall:
    several threads wait for each other in CPU time, and a GPU or a worker process has none."""
    if device.type == "cpu" and torch.get_num_threads() == 1 and feed == "resident":
        return process_time, "CPU time"
    return perf_counter, "wall-clock time"


def finish(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
