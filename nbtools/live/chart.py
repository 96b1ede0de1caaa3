"""The values that make up a picture: charts, lines, marks, and axes with round numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbtools.show import exponent


@dataclass(frozen=True)
class Scale:
    """A vertical axis from low to high."""

    low: float
    high: float
    log: bool = False

    def heights(self, values: np.ndarray) -> np.ndarray:
        """(n,) → (n,): 0 at low, 1 at high; values beyond stay at the edge."""
        inside = np.minimum(np.maximum(values, self.low), self.high)
        if self.log:
            return np.log(inside / self.low) / math.log(self.high / self.low)
        return (inside - self.low) / (self.high - self.low)

    def ticks(self) -> tuple[list[float], list[str]]:
        """(values, labels) from low to high."""
        places = log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high)
        return places, tick_labels(places, self.log)


TICKS = 5  # of an axis, about


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high: 1, 2, 2.5 or 5 times a power of ten apart."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    power = 10 ** math.floor(math.log10(span / TICKS))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power * TICKS >= span * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; where there is room, 1 and 3 or 1, 2 and 5 times each; on less than these, as on any axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]
        if len(found) <= TICKS + 1:
            break
    return found[:: math.ceil(len(found) / (TICKS + 1))] if len(found) > 1 else ticks(low, high)


def tick_labels(values: Sequence[float], log: bool = False) -> list[str]:
    """Labels of one axis with equal decimals; thousands as 2k, 2.5M."""
    if log:
        return [f"{v:g}" if 0.01 <= v < 1e4 else exponent(f"{v:.0e}") for v in values]
    top = max(map(abs, values), default=0.0)
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if top >= 2 * scale:
            return [f"{v / scale:g}{suffix}" if v else "0" for v in values]
    if 0 < top < 0.01:  # 2.5e-4 is as short as the room on the left
        return [re.sub(r"\.?0+e", "e", exponent(f"{v:.3e}")) if v else "0" for v in values]
    decimals = next((d for d in range(12) if all(abs(round(v, d) - v) <= 1e-9 * top for v in values)), 12)
    return [f"{v + 0.0:.{decimals}f}" for v in values]


BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
"""Okabe & Ito (2008): distinguishable with every kind of colour vision, on white and on black."""

COLUMNS = 100  # a line has two points in each at most: its lowest and its highest


@dataclass(frozen=True)
class Line:
    """One curve: x and y (n,) float64.

    look: `line`, `faint` (behind another, not in the legend) or `points`. value: the last one, as text for the legend.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: str
    look: str = "line"
    value: str = ""

    @property
    def dotted(self) -> bool:
        """Whether its points are drawn one by one."""
        return len(self.x) == 1 or (self.look == "points" and len(self.x) <= 60)


@dataclass(frozen=True)
class Chart:
    """One panel: lines over the picture's x axis. cut: the highest value, where the axis ends below it. small: of the
    machine or the schedule, drawn small below the others."""

    title: str
    lines: tuple[Line, ...]
    scale: Scale
    unit: str = ""
    cut: str = ""
    small: bool = False

    @property
    def named(self) -> int:
        """Entries of its legend."""
        return sum(bool(line.name) for line in self.lines)

    @property
    def about(self) -> str:
        """What stands next to the title."""
        parts = (self.unit, "log scale" if self.scale.log else "", f"peak {self.cut} cut off" if self.cut else "")
        return " · ".join(filter(None, parts))

    @property
    def alt(self) -> str:
        """In words, for who cannot see it: `loss: train 0.231, validation 0.305`."""
        values = ", ".join(f"{line.name} {line.value}".strip() for line in self.lines if line.name)
        return f"{self.title}: {values}" if values else self.title


NAMED = 2  # of the newest marks: whole lines; older ones are ticks, or the curves would be lost behind them


@dataclass(frozen=True)
class Mark:
    """A change of settings at x. name: `what` if there is room for some of it, in a row above the first chart (0: next
    to it), to the right (side 1) or left (-1) of the mark. row None: an old change, only a tick at the top."""

    x: float
    what: str
    name: str = ""
    side: int = 1
    row: int | None = None


@dataclass(frozen=True)
class Picture:
    """Charts that share an x axis from `first` to `last`; marks on it; above them the run's state, its facts, and the
    share of the run that is done. zoomed: lines reach beyond the axis, and are drawn as far as it goes."""

    charts: tuple[Chart, ...] = ()
    last: float = 1.0
    marks: tuple[Mark, ...] = ()
    facts: tuple[Any, ...] = ()
    state: str = ""
    share: float | None = None
    title: str = ""
    x: str = "step"
    first: float = 0.0
    zoomed: bool = False

    @property
    def alt(self) -> str:
        """What the picture shows, in words."""
        return "; ".join(filter(None, (self.title, *(chart.alt for chart in self.charts))))

    def share_of(self, x: float) -> float:
        """How far along the axis a place is: 0 at its start, 1 at its end."""
        return (x - self.first) / (self.last - self.first)

    @property
    def rows(self) -> int:
        """Rows of names above the first chart."""
        return max((mark.row + 1 for mark in self.marks if mark.row is not None), default=0)

    def ticks(self) -> tuple[list[float], list[str]]:
        """(values, labels) of the x axis; a half step or sample is none."""
        places = ticks(self.first, self.last)
        if self.x != "minutes":
            places = [place for place in places if place == int(place)]
        return places, tick_labels(places)


def extent(values: Iterable[np.ndarray]) -> tuple[float, float]:
    pairs = [(float(v.min()), float(v.max())) for v in values]
    return min(low for low, _ in pairs), max(high for _, high in pairs)


def airy(low: float, high: float, log: bool = False) -> Scale:
    """A scale with a little air above and below low … high."""
    if log:
        air = max((high / low) ** 0.06, 1.12)
        return Scale(low / air, high * air, True)
    air = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Scale(max(0.0, low - air) if low >= 0 else low - air, high + air)


def calmed(x: np.ndarray, y: np.ndarray, part: float = 1 / 50) -> tuple[np.ndarray, np.ndarray]:
    """At most COLUMNS means, each then averaged with its neighbours over a part of the line: readings of an instant
    flicker, and a mean of both sides does not lag."""
    size = math.ceil(len(x) / COLUMNS)
    if size > 1:
        starts = np.arange(0, len(x), size)
        counts = np.append(starts[1:], len(x)) - starts
        x, y = np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts
    half = int(len(y) * part / 2)
    if not half:
        return x, y
    around, inside = np.ones(2 * half + 1), slice(half, half + len(y))
    return x, np.convolve(y, around)[inside] / np.convolve(np.ones(len(y)), around)[inside]


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most two points per column, its lowest and its highest: no peak is lost, unlike with every n-th point."""
    size = math.ceil(len(x) / COLUMNS)
    if size <= 2:
        return x, y
    columns = np.concatenate((y, y[-1:].repeat(-len(y) % size))).reshape(-1, size)
    starts = np.arange(0, len(y), size)
    keep = np.zeros(len(y), bool)
    keep[starts + columns.argmin(1)] = keep[starts + columns.argmax(1)] = keep[0] = keep[-1] = True
    return x[keep], y[keep]
