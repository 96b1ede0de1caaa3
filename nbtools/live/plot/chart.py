"""Values that a picture of training is made of, and the arithmetic of its curves; what draws them knows no History."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from nbtools.live.plot import axis
from nbtools.live.plot.axis import Scale

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
"""Okabe & Ito (2008): told apart with every kind of colour vision, and on white as on black."""

COLUMNS = 100  # a line has two points in each at most: its lowest and its highest


@dataclass(frozen=True)
class About:
    """What a history does not say of its run: its name, how long it shall be, and which metric is the best one
    (`whole_accuracy`, or `-cer` where lower is better)."""

    title: str = ""
    epochs: int | None = None
    epoch_samples: int | None = None
    best: str = ""


@dataclass(frozen=True)
class Preview:
    """One sample with its right answer and the model's. image: (H, W) or (H, W, 3) uint8 of any size. whole: answers
    are names, right or wrong as such, and not letter by letter."""

    image: np.ndarray
    truth: str = ""
    predicted: str = ""
    whole: bool = False


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
    and the share of the run that is done. key: lines whose names explain all charts. origin: x counts the decades from
    this value on a logarithmic axis."""

    charts: tuple[Chart, ...] = ()
    last: float = 1.0
    marks: tuple[Mark, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    badges: tuple[Badge, ...] = ()
    share: float | None = None
    title: str = ""
    x: str = "step"
    key: tuple[Line, ...] = ()
    origin: float | None = None

    @property
    def names(self) -> int:
        """Rows that the names of marks take."""
        return 1 + max((mark.row for mark in self.marks if mark.name), default=-1)

    def ticks(self) -> tuple[list[float], list[str]]:
        """(values, labels) of the x axis; a half step or sample is none."""
        if self.origin is not None:
            powers = axis.log_ticks(self.origin, self.origin * 10**self.last, 8)
            return [math.log10(power / self.origin) for power in powers], axis.tick_labels(powers, True)
        places = axis.ticks(0, self.last, 5)
        if self.x != "minutes":
            places = [place for place in places if place == int(place)]
        return places, axis.tick_labels(places)


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
