"""A run's history as columns of numbers, and its steps as places on an axis."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from nbtools.train import History

XS = ("step", "samples", "minutes")
Series = tuple[np.ndarray, np.ndarray]  # (steps, values), both (n,) float64
NONE: tuple[array[float], array[float]] = (array("d"), array("d"))


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
        self.columns: dict[tuple[str, str], tuple[array[float], array[float]]] = {}
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
                    if (kind, name) not in self.columns:
                        self.columns[kind, name] = (array("d"), array("d"))
                    steps, values = self.columns[kind, name]
                    steps.append(step)
                    values.append(value)
        if rows:
            self.count, self.seen = len(rows), rows[-1]
        return self

    def series(self, name: str, *kinds: str) -> Series:
        """Return the column in rows of these kinds, in order of steps."""
        parts = [self.columns[kind, name] for kind in kinds if (kind, name) in self.columns] or [NONE]
        steps, values = (np.concatenate([np.array(part[side]) for part in parts]) for side in (0, 1))
        order = np.argsort(steps, kind="stable") if len(parts) > 1 else slice(None)
        return steps[order], values[order]

    def either(self, name: str) -> Series:
        """Return the column as logged on steps, else on epochs."""
        return self.series(name, "step" if ("step", name) in self.columns else "epoch")

    def newest(self, name: str) -> float | None:
        """Return the last number of a column."""
        _, values = self.columns.get(("step", name)) or self.columns.get(("epoch", name)) or NONE
        return values[-1] if values else None

    def samples(self) -> Series:
        """Return (steps, samples until then) of every row, from (0, 0)."""
        steps, values = self.series("samples", "step", "epoch", "evaluation")
        return np.insert(steps, 0, 0.0), np.insert(values, 0, 0.0)

    def seconds(self) -> Series:
        """Return (steps, seconds of the run until then by the clock, without pauses), from (0, 0)."""
        steps, values = self.series("wall", "step", "epoch")
        return np.insert(steps, 0, 0.0), np.insert(values, 0, 0.0)

    def along(self, x: str, steps: np.ndarray) -> np.ndarray:
        """Return the places of steps on an axis of XS."""
        if x == "step":
            return steps
        known, values = self.samples() if x == "samples" else self.seconds()
        return np.interp(steps, known, values) / (60 if x == "minutes" else 1)
