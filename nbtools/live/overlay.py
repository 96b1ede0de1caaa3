"""The curves of several runs in one picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from nbtools.live.chart import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    Chart,
    Line,
    Picture,
    Scale,
    calmed,
    extent,
    thinned,
)
from nbtools.live.columns import Columns, Series, along
from nbtools.live.picture import falling, from_zero, shares, train_loss
from nbtools.table import spelled
from nbtools.train import History

COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY)
DASHES = ((), (7, 3), (2, 2), (9, 3, 2, 3), (12, 5))  # five with six colours: thirty combinations before one repeats
NONE = np.empty(0)

Panel = tuple[str, Callable[[Columns], Series], Callable[[Sequence[np.ndarray]], Scale], str]
"""A chart: its title, what it reads of a run, its axis from its values, the look of its lines."""


def overlay(names: Sequence[str], histories: Sequence[History], metrics: Sequence[str], x: str = "step") -> Picture:
    """The curves of runs over one of XS, and a key to the runs; metrics: the one that chooses each run's
    best checkpoint."""
    runs = [Columns(history) for history in histories]
    looks = [(COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)]) for i in range(len(names))]
    charts = []
    for title, read, scale, look in panels(metrics):
        curves = [(*read(each), along(each, x), *style) for each, style in zip(runs, looks, strict=True)]
        lines = tuple(
            Line("", place(steps), values, colour, look, dash=dash)
            for steps, values, place, colour, dash in curves
            if len(steps)
        )
        if lines:
            charts.append(Chart(title, lines, scale([line.y for line in lines])))
    last = max((float(line.x[-1]) for chart in charts for line in chart.lines), default=1.0) or 1.0
    key = [Line(name, NONE, NONE, colour, dash=dash) for name, (colour, dash) in zip(names, looks, strict=True)]
    return Picture(tuple(charts), last, x=x, key=tuple(key))


def panels(metrics: Sequence[str]) -> list[Panel]:
    """The charts; one for each metric but the loss, which has its own."""
    return [
        ("train loss", lambda columns: calmed(*train_loss(columns), 1 / 20), of_loss, "line"),
        ("validation loss", lambda columns: thinned(*columns.evaluated("val_loss")), of_loss, "points"),
        *(
            (spelled(name), lambda columns, name=name: thinned(*columns.evaluated(f"val_{name}")), shares, "points")
            for name in dict.fromkeys(metrics)
            if name != "loss"
        ),
        ("learning rate", lambda columns: thinned(*columns.either("lr")), above_zero, "line"),
        ("samples/s", lambda columns: calmed(*columns.either("samples_per_s")), above_zero, "line"),
    ]


def of_loss(values: Sequence[np.ndarray]) -> Scale:
    return falling(*extent(values))


def above_zero(values: Sequence[np.ndarray]) -> Scale:
    return from_zero(*extent(values))
