"""The numbers of a history as columns that grow with it: a frame reads only the rows that came since the last one."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np

from nbtools.train import History

XS = ("step", "samples", "minutes")

Series = tuple[np.ndarray, np.ndarray]
"""(steps, values), both (n,) float64."""


class Columns:
    """Rows by kind, read by column. names: of all numeric columns, in the order of their first row. changes: rows of
    turned knobs. ended: the newest step or epoch row."""

    def __init__(self, history: History | None = None):
        self.clear()
        if history is not None:
            self.follow(history)

    def clear(self) -> None:
        self.count, self.seen = 0, None
        self.found: dict[tuple[str, str], tuple[array[float], array[float]]] = {}
        self.names: dict[str, None] = {}
        self.changes: list[Mapping[str, Any]] = []
        self.ended: Mapping[str, Any] | None = None

    def follow(self, history: History) -> Self:
        """Take over the rows that are new; all of them anew where rows were cut off."""
        rows = history.rows
        if self.count > len(rows) or (self.count and rows[self.count - 1] is not self.seen):
            self.clear()
        for i in range(self.count, len(rows)):
            self.take(rows[i])
        if rows:
            self.count, self.seen = len(rows), rows[-1]
        return self

    def take(self, row: Mapping[str, Any]) -> None:
        kind, step = row["kind"], row["step"]
        if kind == "change":
            self.changes.append(row)
        elif kind in ("step", "epoch"):
            self.ended = row
        for name, value in row.items():
            if isinstance(value, (int, float)) and math.isfinite(value):  # a file edited by hand may hold text
                pair = self.found.get((kind, name))
                if pair is None:
                    pair = self.found[kind, name] = (array("d"), array("d"))
                    self.names.setdefault(name)
                pair[0].append(step)
                pair[1].append(value)

    def series(self, kind: str, name: str) -> Series:
        """(steps, values) float64 of the rows that have a finite number there."""
        steps, values = self.found.get((kind, name), EMPTY)
        return np.array(steps), np.array(values)

    def either(self, name: str) -> Series:
        """The column as logged on steps, else on epochs."""
        return self.series("step" if ("step", name) in self.found else "epoch", name)

    def newest(self, name: str) -> float | None:
        """The last number of that column, where there is one."""
        _, values = self.found.get(("step", name)) or self.found.get(("epoch", name)) or EMPTY
        return values[-1] if values else None

    @property
    def train_loss(self) -> float | None:
        """The train loss of a run, the same number wherever it is shown: the mean over the samples of the last epoch
        that ended, each when it was trained on. Before the first epoch ends: the mean since the last log step."""
        _, epochs = self.series("epoch", "train_loss")
        return float(epochs[-1]) if len(epochs) else self.newest("loss")

    def evaluated(self, name: str) -> Series:
        """A metric at the ends of epochs, and where a person asked for it between them."""
        x, y = self.series("epoch", name)
        if ("evaluation", name) not in self.found:
            return x, y
        between_x, between_y = self.series("evaluation", name)
        x, y = np.concatenate((x, between_x)), np.concatenate((y, between_y))
        order = np.argsort(x, kind="stable")
        return x[order], y[order]


EMPTY: tuple[array[float], array[float]] = (array("d"), array("d"))


def along(columns: Columns, x: str) -> Callable[[np.ndarray], np.ndarray]:
    """The function from steps to places on an axis of XS."""
    if x == "step":
        return lambda steps: steps
    steps, values = taken(columns) if x == "samples" else spent(columns)
    scale = 60 if x == "minutes" else 1
    return lambda wanted: np.interp(wanted, steps, values) / scale


def taken(columns: Columns) -> Series:
    """(steps, samples taken until then) of every row, in order, from (0, 0)."""
    pairs = [columns.series(kind, "samples") for kind in ("step", "epoch", "evaluation")]
    steps, samples = (np.concatenate([[0.0], *parts]) for parts in zip(*pairs, strict=True))
    order = np.argsort(steps, kind="stable")
    return steps[order], samples[order]


def spent(columns: Columns) -> Series:
    """(steps, seconds of training until then): at the epochs' ends, and at the steps logged since the last of them."""
    ends, seconds = columns.series("epoch", "epoch_time")
    steps, speed = columns.series("step", "samples_per_s")
    last = ends[-1] if len(ends) else 0.0
    steps, speed = steps[steps > last], speed[steps > last]
    samples = np.interp(np.concatenate(([last], steps)), *taken(columns))
    since = np.diff(samples) / np.maximum(speed, 1e-9)
    return np.concatenate(([0.0], ends, steps)), np.cumsum(np.concatenate(([0.0], seconds, since)))
