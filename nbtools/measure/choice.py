"""Which batch size is chosen from what was measured, and what is worth measuring: pure functions of samples/s."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WITHIN = 0.95  # of the best throughput
NEAR = 0.75  # of the best: worth measuring again
CLEAR = 2.0  # standard errors between a ratio and WITHIN
OUT = 3.0  # standard errors below NEAR: measured no longer
LEAST_TURNS = 8  # fewer say nothing


@dataclass(frozen=True)
class Choice:
    """The smallest batch size within 5 % of the best; clear: whether more turns could hardly change it."""

    batch_size: int
    best: int
    ratio: float
    clear: bool


def choose(rates: Mapping[int, Sequence[float]]) -> Choice:
    """samples/s of each turn by batch size → the choice. The last turns are those that all sizes had together, so that
    ratios are taken within a turn; a size is within 5 % when its median ratio is, less its standard error."""
    turns = min(map(len, rates.values()))
    rates = {size: values[-turns:] for size, values in rates.items()}
    best = max(rates, key=lambda size: statistics.median(rates[size]))
    chosen, ratio, clear = best, 1.0, turns >= LEAST_TURNS
    for size in sorted((size for size in rates if size < best), reverse=True):
        middle, error = compared(rates[size], rates[best])
        if middle - error >= WITHIN:
            chosen, ratio = size, middle
        clear = clear and abs(middle - WITHIN) > CLEAR * error
    return Choice(chosen, best, ratio, clear)


def compared(rates: Sequence[float], best: Sequence[float]) -> tuple[float, float]:
    """(median ratio to the best within a turn, its standard error), by median deviation: neighbours make outliers."""
    ratios = [a / b for a, b in zip(rates, best, strict=True)]
    middle = statistics.median(ratios)
    spread = 1.48 * statistics.median(abs(r - middle) for r in ratios)  # of a normal distribution: its σ
    return middle, 1.25 * spread / math.sqrt(len(ratios))


def hopeless(rates: Mapping[int, Sequence[float]]) -> list[int]:
    """Sizes so clearly below the best that more turns are wasted on them."""
    turns = min(map(len, rates.values()))
    if turns < LEAST_TURNS:
        return []
    rates = {size: values[-turns:] for size, values in rates.items()}
    best = max(rates, key=lambda size: statistics.median(rates[size]))
    pairs = {size: compared(values, rates[best]) for size, values in rates.items()}
    return [size for size, (middle, error) in pairs.items() if middle + OUT * error < NEAR]


def near(firsts: Mapping[int, float]) -> list[int]:
    """Sizes worth turns after a first sight, which may deceive: those near the best, and its neighbours in any case."""
    best = max(firsts, key=lambda size: firsts[size])
    return sorted(s for s, rate in firsts.items() if rate >= NEAR * firsts[best] or s in (best // 2, best * 2))


def between(sizes: Sequence[int], knee: int, best: int, cap: int) -> list[int]:
    """Sizes to try besides the powers of two: half-way steps about the knee and the best, for throughput is no smooth
    function of the batch size (on one CPU 96 was 10 % above 64 and 128)."""
    powers = [size for size in (knee, best) if size & (size - 1) == 0]
    found = {size * k // 4 for size in powers for k in (3, 6)} | ({cap} if cap < 1.5 * best else set())
    return sorted(size for size in found - set(sizes) if min(sizes) < size <= cap)


def knee(rates: Mapping[int, float]) -> tuple[int, int]:
    """(the smallest size within 5 % of the best, the best)."""
    best = max(rates, key=lambda size: rates[size])
    return min(size for size in rates if rates[size] >= WITHIN * rates[best]), best
