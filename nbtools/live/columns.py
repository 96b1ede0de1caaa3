"""A run's history as columns of numbers, and its steps as places on an axis."""

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
    """The finite numbers of a history, by kind of row and column. `follow` reads new rows only: a frame of a long run
    costs no more than one of a short run.

    changes: rows of changed settings, and those that say that the run went back. ended: the newest step or epoch row.
    """

    def __init__(self, history: History | None = None):
        self.clear()
        if history is not None:
            self.follow(history)

    def clear(self) -> None:
        self.count, self.seen = 0, None
        self.found: dict[tuple[str, str], tuple[array[float], array[float]]] = {}
        self.changes: list[Mapping[str, Any]] = []
        self.ended: Mapping[str, Any] | None = None

    def follow(self, history: History) -> Self:
        """Read the new rows; all of them again where rows were cut off."""
        rows = history.rows
        if self.count > len(rows) or (self.count and rows[self.count - 1] is not self.seen):
            self.clear()
        for row in rows[self.count :]:
            kind, step = row["kind"], row["step"]
            if kind == "change" or row.get("mark"):
                self.changes.append(row)
            elif kind in ("step", "epoch"):
                self.ended = row
            for name, value in row.items():
                if isinstance(value, (int, float)) and math.isfinite(value):  # a file edited by hand may hold text
                    if (kind, name) not in self.found:
                        self.found[kind, name] = (array("d"), array("d"))
                    steps, values = self.found[kind, name]
                    steps.append(step)
                    values.append(value)
        if rows:
            self.count, self.seen = len(rows), rows[-1]
        return self

    def series(self, name: str, *kinds: str) -> Series:
        """The column in rows of these kinds, in order of steps."""
        found = [self.found[kind, name] for kind in kinds if (kind, name) in self.found] or [EMPTY]
        steps, values = np.array(found[0][0]), np.array(found[0][1])
        for more in found[1:]:
            steps, values = np.append(steps, more[0]), np.append(values, more[1])
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
        return steps, values

    def either(self, name: str) -> Series:
        """The column as logged on steps, else on epochs."""
        return self.series(name, "step" if ("step", name) in self.found else "epoch")

    def evaluated(self, name: str) -> Series:
        """A metric at the ends of epochs, and wherever the user requested it in between."""
        return self.series(name, "epoch", "evaluation")

    def newest(self, name: str) -> float | None:
        """The last number of a column."""
        _, values = self.found.get(("step", name)) or self.found.get(("epoch", name)) or EMPTY
        return values[-1] if values else None

    @property
    def train_loss(self) -> float | None:
        """The train loss of a run, the same number wherever it is shown: the mean over the samples of the last epoch
        that ended, each when it was trained on. Before the first epoch ends: the mean since the last log step."""
        _, epochs = self.found.get(("epoch", "train_loss"), EMPTY)
        return epochs[-1] if epochs else self.newest("loss")


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
    steps, samples = columns.series("samples", "step", "epoch", "evaluation")
    return np.concatenate(([0.0], steps)), np.concatenate(([0.0], samples))


def spent(columns: Columns) -> Series:
    """(steps, seconds of the run until then by the clock, without pauses), from (0, 0)."""
    steps, seconds = columns.series("wall", "step", "epoch")
    return np.concatenate(([0.0], steps)), np.concatenate(([0.0], seconds))
