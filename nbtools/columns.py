"""The numbers of a history as columns that grow with it: a frame reads only the rows that came since the last one."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from nbtools.history import History


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

    def series(self, kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) float64 of the rows that have a finite number there."""
        steps, values = self.found.get((kind, name), EMPTY)
        return np.array(steps), np.array(values)

    def either(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The column as logged on steps, else on epochs."""
        return self.series("step" if ("step", name) in self.found else "epoch", name)

    def newest(self, name: str) -> float | None:
        """The last number of that column, where there is one."""
        _, values = self.found.get(("step", name)) or self.found.get(("epoch", name)) or EMPTY
        return values[-1] if values else None

    def evaluated(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A metric at the ends of epochs, and where a person asked for it between them."""
        x, y = self.series("epoch", name)
        if ("evaluation", name) not in self.found:
            return x, y
        between_x, between_y = self.series("evaluation", name)
        x, y = np.concatenate((x, between_x)), np.concatenate((y, between_y))
        order = np.argsort(x, kind="stable")
        return x[order], y[order]


EMPTY: tuple[array[float], array[float]] = (array("d"), array("d"))
