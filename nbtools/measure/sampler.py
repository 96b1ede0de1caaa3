"""A thread that reads one GPU while it works: utilisation, memory, power, energy, once or twice a second."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from dataclasses import dataclass

from nbtools.measure import gpu

JOULES_PER_WH = 3600


@dataclass(frozen=True, slots=True)
class Reading:
    """One sample of one GPU. time: seconds since sampling began; memory in MiB, utilisation in %, power in W, energy in
    J since sampling began."""

    time: float
    utilisation: int | None
    memory_used: int | None
    power: float | None
    energy: float | None
    throttle: tuple[str, ...] | None

    def values(self) -> dict[str, float | str]:
        """Columns for a history row, energy in Wh; what is unknown is absent, and `idle` is no reason to name."""
        named = {
            "gpu_utilisation": self.utilisation,
            "gpu_memory_used": self.memory_used,
            "gpu_power": self.power,
            "gpu_energy": None if self.energy is None else self.energy / JOULES_PER_WH,
            "gpu_throttle": ", ".join(reason for reason in self.throttle or () if reason != "idle") or None,
        }
        return {name: value for name, value in named.items() if value is not None}


class Sampler:
    """Readings of one GPU (NVML's index) in the background, 1 or 2 a second, until `stop` or the end of the `with`.

        with Sampler() as sampler:
            ...
            sampler.latest

    Without NVIDIA it stays empty.
    """

    def __init__(self, index: int = 0, hertz: float = 1.0, keep: int = 7200):
        self.index, self.period = index, 1 / hertz
        self.readings: collections.deque[Reading] = collections.deque(maxlen=keep)
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.work, name="nbtools-gpu", daemon=True)

    @property
    def latest(self) -> Reading | None:
        return self.readings[-1] if self.readings else None

    def start(self) -> Sampler:
        self.thread.start()
        return self

    def stop(self) -> None:
        """Returns when the thread has ended, which takes no longer than the reading under way."""
        self.stopping.set()
        if self.thread.is_alive():
            self.thread.join()

    def __enter__(self) -> Sampler:
        return self.start()

    def __exit__(self, *_) -> None:
        self.stop()

    def work(self) -> None:
        with contextlib.suppress(gpu.Unavailable), gpu.opened() as nvml:
            handle = nvml.nvmlDeviceGetHandleByIndex(self.index)
            meter, start = Meter(), time.perf_counter()
            while True:
                now = time.perf_counter() - start
                counter = gpu.ask(nvml, "nvmlDeviceGetTotalEnergyConsumption", handle)  # mJ since the driver was loaded
                power = gpu.apply(gpu.thousandth, gpu.ask(nvml, "nvmlDeviceGetPowerUsage", handle))
                memory = gpu.ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
                use = gpu.ask(nvml, "nvmlDeviceGetUtilizationRates", handle)
                self.readings.append(
                    Reading(
                        time=now,
                        utilisation=use and use.gpu,
                        memory_used=gpu.apply(gpu.mib, memory and memory.used),
                        power=power,
                        energy=meter.joules(now, power, gpu.apply(gpu.thousandth, counter)),
                        throttle=gpu.apply(gpu.reasons, gpu.throttle_bits(nvml, handle)),
                    )
                )
                if self.stopping.wait(self.period):
                    return


class Meter:
    """Energy since the first reading: the device's own counter, or else the power summed over time (trapezoids)."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.sum = 0.0
        self.last: tuple[float, float] | None = None

    def joules(self, now: float, power: float | None, counter: float | None) -> float | None:
        if counter is not None:
            self.first = counter if self.first is None else self.first
            return counter - self.first
        if power is None:
            return None
        if self.last is not None:
            then, before = self.last
            self.sum += (now - then) * (power + before) / 2
        self.last = (now, power)
        return self.sum
