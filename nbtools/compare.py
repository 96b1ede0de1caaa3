"""Runs next to each other: a table of their results and of the settings that differ, and their curves together."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nbtools import table
from nbtools.data import in_notebook
from nbtools.errors import TrainError
from nbtools.live import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    XS,
    Chart,
    Columns,
    Line,
    Picture,
    Scale,
    Series,
    along,
    calmed,
    decade,
    extent,
    falling,
    number,
    png,
    rates,
    shares,
    spent,
    taken,
    thinned,
    train_loss,
)
from nbtools.run import Run
from nbtools.train import best_metric

if TYPE_CHECKING:
    import pandas as pd

COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY)
DASHES = ((), (7, 3), (2, 2), (9, 3, 2, 3), (12, 5))  # five with six colours: thirty looks before one repeats
BESIDE = 4  # runs at most that are columns of the table; more are its rows

COUNTS = ("best_epoch", "epochs", "steps")
HEADERS = {"minutes": "minutes", "samples_per_s": "samples/s", "memory": "memory, MiB", "energy": "energy, Wh"}

Panel = tuple[str, Callable[[Columns], Series], Callable[[float, float], Scale], str]
"""A chart: its title, what it reads of a run, its axis from low and high, the look of its lines."""


def compare(*runs: Run | str | Path, x: str = "step") -> Comparison:
    """Compare runs, or run folders, over step, samples or minutes (of training, without evaluations).

    Raises TrainError if there is no run or x is unknown, CheckpointError for a folder without a run.
    """
    if not runs:
        raise TrainError("compare needs at least one run, got none; give it runs or run folders")
    if x not in XS:
        raise TrainError(f"x must be one of {', '.join(XS)}, got {x!r}")
    opened = tuple(run if isinstance(run, Run) else Run.open(run) for run in runs)
    return Comparison(opened, tuple(distinct([run.folder for run in opened])), x)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs with the names that tell them apart. Shows as a table and a picture in a notebook, as a table in text."""

    runs: tuple[Run, ...]
    names: tuple[str, ...]
    x: str = "step"

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per run: its best metrics, losses, what was done and what it took, and each setting of the plan in
        which the runs differ. epochs: the finished ones; `planned epochs` where the plans differ. train_loss: the mean
        over the last epoch, see `Columns.train_loss`. val_loss: of the newest evaluation. Memory in MiB, energy in Wh.
        """
        import pandas as pd

        rows = [{**outcome(run), **knobs} for run, knobs in zip(self.runs, differing(self.runs), strict=True)]
        frame = pd.DataFrame(rows, index=pd.Index(self.names, name="run"))
        return frame.dropna(axis="columns", how="all")

    def picture(self) -> Picture:
        """The curves of all runs, and a key that says whose is which."""
        columns = [Columns(run.history) for run in self.runs]
        key = [Line(name, *NONE, *look) for name, look in zip(self.names, looks(), strict=False)]
        places = [along(each, self.x) for each in columns]
        charts = []
        for title, read, scale, look in panels(self.runs):
            found = zip(key, places, map(read, columns), strict=True)
            lines = [
                Line("", place(steps), values, of.colour, look, dash=of.dash)
                for of, place, (steps, values) in found
                if len(steps)
            ]
            if lines:
                charts.append(Chart(title, tuple(lines), scale(*extent(line.y for line in lines))))
        last = max((float(line.x[-1]) for chart in charts for line in chart.lines), default=1.0) or 1.0
        return Picture(tuple(charts), last, x=self.x, key=tuple(key))

    def png(self) -> bytes:
        return png.draw(self.picture())

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """(headers, rows) to show: one column per run while they fit next to each other, else one row per run."""
        columns = [(str(name), list(values)) for name, values in self.frame.items()]
        headers = ["run", *(HEADERS.get(name, name.replace("_", " ")) for name, _ in columns)]
        cells = [[shown(name, value) for value in values] for name, values in columns]
        rows = [list(row) for row in zip(self.names, *cells, strict=True)]
        if len(rows) > BESIDE:
            return headers, rows
        head, *body = zip(headers, *rows, strict=True)
        return list(head), [list(row) for row in body]

    def __repr__(self) -> str:
        return table.text(*self.table())

    def _ipython_display_(self) -> None:
        """Two outputs, since a saved notebook keeps a picture where GitHub shows it only as one of its own."""
        if not in_notebook():
            raise NotImplementedError  # IPython then prints the repr
        from IPython.display import HTML, Image, display

        display(HTML(table.html(*self.table())))
        display(Image(self.png(), retina=True))


NONE = (np.empty(0), np.empty(0))


def looks() -> Iterator[tuple[str, str, str, None, tuple[int, ...]]]:
    """Colour and dashes, with what stands between them in a Line."""
    i = 0
    while True:
        yield COLOURS[i % len(COLOURS)], "line", "", None, DASHES[i % len(DASHES)]
        i += 1


def distinct(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart; the same one twice is numbered."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-depth:]) for part in parts]
        if len(set(found)) == len(set(parts)):
            break
    seen: collections.Counter[str] = collections.Counter()
    for i, name in enumerate(found):
        seen[name] += 1
        found[i] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return found


def outcome(run: Run) -> dict[str, Any]:
    """What a run came to; None where it is not known."""
    columns, (metric, _), best = Columns(run.history), best_metric(run.task), run.best
    seconds, samples = spent(columns)[1][-1], taken(columns)[1][-1]
    losses, ended = columns.evaluated("val_loss")[1], columns.ended or {}
    memory = (columns.either(name)[1] for name in ("gpu_memory_peak", "gpu_memory_reserved", "memory"))
    return {
        f"best_{metric}": best.get(f"val_{metric}"),
        "best_epoch": best["epoch"] + 1 if best else None,
        "train_loss": columns.train_loss,
        "val_loss": float(losses[-1]) if len(losses) else None,
        "epochs": len(columns.series("epoch", "epoch")[0]),
        "steps": ended.get("step", 0),
        "minutes": seconds / 60,
        "samples_per_s": samples / seconds if seconds else None,
        "memory": next((float(values.max()) for values in memory if len(values)), None),
        "energy": columns.newest("gpu_energy"),
    }


def differing(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """For each run, the settings of its plan that are not the same in all; None where a task has no such setting. The
    name of one that `outcome` also reports begins with `planned`: what was planned is not what was done."""
    plans = [run.plan.to_dict() for run in runs]
    every = {name: None for plan in plans for name in plan}
    names = [name for name in every if len({repr(plan.get(name)) for plan in plans}) > 1]
    known = set().union(*map(outcome, runs))
    columns = {name: f"planned_{name}" if name in known else name for name in names}
    return [{column: plan.get(name) for name, column in columns.items()} for plan in plans]


def shown(name: str, value: Any) -> Any:
    """A cell of the table: a measured number in few digits, a setting as one would type it."""
    if value is None or value != value:  # NaN, where a run does not know it
        return None
    if name in COUNTS:
        return f"{int(value):,}"
    return number(value) if name in HEADERS or name.startswith("best_") or name.endswith("_loss") else value


def panels(runs: Sequence[Run]) -> list[Panel]:
    """The charts; one for each metric by which a run's best checkpoint is chosen."""
    metrics = dict.fromkeys(name for name, _ in (best_metric(run.task) for run in runs) if name != "loss")
    return [
        ("train loss", lambda columns: calmed(*train_loss(columns), 1 / 20), falling, "line"),
        ("validation loss", lambda columns: thinned(*columns.evaluated("val_loss")), falling, "points"),
        *(
            (name, lambda columns, name=name: thinned(*columns.evaluated(f"val_{name}")), shares, "points")
            for name in metrics
        ),
        ("learning rate", lambda columns: thinned(*rates(columns)), decade, "line"),
        ("samples/s", lambda columns: calmed(*columns.either("samples_per_s")), from_zero, "line"),
    ]


def from_zero(low: float, high: float) -> Scale:
    return Scale(0.0, high * 1.08 or 1.0)
