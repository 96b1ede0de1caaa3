"""Values that a picture is made of: charts, lines, marks and their axes with round numbers. What draws them knows no
History."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
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


BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
"""Okabe & Ito (2008): told apart with every kind of colour vision, and on white as on black."""

COLUMNS = 100  # a line has two points in each at most: its lowest and its highest


@dataclass(frozen=True)
class Line:
    """One curve: x and y (n,) float64.

    look: `line`, `faint` (behind another, not in the legend) or `points`. value: its last one, as text for the legend.
    ring: a point to point out. dash: px drawn and left out, in turns; (): a line without gaps. right: read it at the
    axis on the right.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: str
    look: str = "line"
    value: str = ""
    ring: tuple[float, float] | None = None
    dash: tuple[int, ...] = ()
    right: bool = False

    @property
    def dotted(self) -> bool:
        """Whether its points are drawn one by one."""
        return len(self.x) == 1 or (self.look == "points" and len(self.x) <= 60)


@dataclass(frozen=True)
class Chart:
    """One panel: lines over the picture's x axis; note: said in its middle when there is no line."""

    title: str
    lines: tuple[Line, ...]
    scale: Scale
    unit: str = ""
    right: Scale | None = None
    right_unit: str = ""
    note: str = ""

    @property
    def units(self) -> str:
        return f"{self.unit} · {self.right_unit}, right" if self.right else self.unit


@dataclass(frozen=True)
class Mark:
    """A knob that was turned at x. short: only a tick at the top, as one of many. name: as much of `what` as there is
    room for, in a row above the first chart (0: next to it), at the right (side 1) or the left (-1) of the mark."""

    x: float
    what: str
    name: str = ""
    side: int = 1
    row: int = 0
    short: bool = False


@dataclass(frozen=True)
class Badge:
    """A word that stands out; colour: of its ground, "" for none."""

    text: str
    colour: str = ""


@dataclass(frozen=True)
class Picture:
    """Charts that share an x axis from 0 to `last`, marks on it, facts (label, value) and badges above, samples below,
    and the share of the run that is done. key: lines whose names explain all charts."""

    charts: tuple[Chart, ...] = ()
    last: float = 1.0
    marks: tuple[Mark, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    badges: tuple[Badge, ...] = ()
    share: float | None = None
    title: str = ""
    x: str = "step"
    key: tuple[Line, ...] = ()

    @property
    def names(self) -> int:
        """Rows that the names of marks take."""
        return 1 + max((mark.row for mark in self.marks if mark.name), default=-1)

    def ticks(self) -> tuple[list[float], list[str]]:
        """(values, labels) of the x axis; a half step or sample is none."""
        places = ticks(0, self.last, 5)
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


def smoothed(values: np.ndarray, half: int) -> np.ndarray:
    """(n,) → (n,): the mean of the 2·half + 1 points around each, fewer at the ends; it does not lag."""
    if not half:
        return values
    around, inside = np.ones(2 * half + 1), slice(half, half + len(values))
    return np.convolve(values, around)[inside] / np.convolve(np.ones(len(values)), around)[inside]


def averaged(x: np.ndarray, y: np.ndarray, columns: int = COLUMNS) -> tuple[np.ndarray, np.ndarray]:
    """At most one point a column, the mean of those in it: what a smooth line has to show, however long the run."""
    size = math.ceil(len(x) / columns)
    if size <= 1:
        return x, y
    starts = np.arange(0, len(x), size)
    counts = np.full(len(starts), float(size))
    counts[-1] = len(x) - starts[-1]
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts


def thinned(x: np.ndarray, y: np.ndarray, columns: int = COLUMNS) -> tuple[np.ndarray, np.ndarray]:
    """At most two points a column, its lowest and its highest in their order: no peak is lost, as with every n-th."""
    size = math.ceil(len(x) / columns)
    if size <= 2:
        return x, y
    whole = len(x) // size * size
    blocks, rest = y[:whole].reshape(-1, size), y[whole:]
    start = np.arange(0, whole, size)
    lowest, highest = blocks.argmin(1) + start, blocks.argmax(1) + start
    pairs = np.empty(2 * len(start), np.int64)
    pairs[::2], pairs[1::2] = np.minimum(lowest, highest), np.maximum(lowest, highest)
    tail = sorted((whole + rest.argmin(), whole + rest.argmax())) if len(rest) else []
    keep = np.concatenate(([0], pairs, tail, [len(x) - 1])).astype(int)
    keep = keep[np.concatenate(([True], keep[1:] > keep[:-1]))]
    return x[keep], y[keep]
