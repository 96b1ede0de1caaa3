"""Axes with round numbers, and how numbers and durations are written beside them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Scale:
    """A vertical axis from low to high; step: between its ticks, None for what is round."""

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def heights(self, values: np.ndarray) -> np.ndarray:
        """(n,) → (n,): 0 at low, 1 at high; values beyond stay at the edge."""
        inside = np.minimum(np.maximum(values, self.low), self.high)
        if self.log:
            return np.log(inside / self.low) / math.log(self.high / self.low)
        return (inside - self.low) / (self.high - self.low)

    def ticks(self) -> tuple[list[float], list[str]]:
        """(values, labels) from low to high."""
        if self.step is not None:
            places = [self.low + i * self.step for i in range(round((self.high - self.low) / self.step) + 1)]
        else:
            places = log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high)
        return places, tick_labels(places, self.log)


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`, `4 d 17 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def number(value: float) -> str:
    """Three or four digits: enough to see a change, few enough to read at once."""
    size = abs(value)
    if size != 0 and (size < 1e-3 or size >= 1e6):
        return scientific(value)
    decimals = next((d for limit, d in ((0.1, 4), (10, 3), (100, 2), (1000, 1)) if size < limit), 0)
    return f"{value:,.{decimals}f}"


def scientific(value: float, decimals: int = 2) -> str:
    """`2.00e-4`: without the zero that Python puts before a short exponent."""
    digits, _, power = f"{value:.{decimals}e}".partition("e")
    return f"{digits}e{int(power)}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) from low to high, about `count` of them."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    power = 10 ** math.floor(math.log10(span / count))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power * count >= span * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Powers of ten, about `count` at most; where so many fit, 1 and 3 or 1, 2 and 5 times each."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]
        if len(found) <= count + 1:
            break
    return found[:: math.ceil(len(found) / (count + 1))]


def tick_labels(values: Sequence[float], log: bool = False) -> list[str]:
    """Labels of one axis with equal decimals; thousands as 2k, 2.5M."""
    if log:
        return [f"{v:g}" if 0.01 <= v < 1e4 else scientific(v, 0) for v in values]
    top = max(map(abs, values), default=0.0)
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if top >= scale * (1 if scale > 1e3 else 2):
            return [f"{v / scale:g}{suffix}" if v else "0" for v in values]
    gap = min((b - a for a, b in itertools.pairwise(values)), default=top or 1.0)
    decimals = max(0, -math.floor(math.log10(gap) + 1e-9)) if gap > 0 else 0
    decimals += any(abs(v * 10**decimals - round(v * 10**decimals)) > 1e-6 for v in values)
    return [f"{v + 0.0:.{decimals}f}" for v in values]
