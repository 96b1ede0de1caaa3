"""Runs next to each other: a table of their results and of the settings that differ, and their curves together."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtools import table
from nbtools.data import in_notebook
from nbtools.errors import TrainError
from nbtools.live import XS, Columns, Picture, overlay, png, spent, taken, worded
from nbtools.run import Run
from nbtools.train import best_metric

if TYPE_CHECKING:
    import pandas as pd

OUTCOMES = ("train_loss", "val_loss", "epochs", "steps", "minutes", "samples_per_s", "memory", "energy")


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
    """Runs with unique names. Shows as a table and a picture in a notebook, as a table in text."""

    runs: tuple[Run, ...]
    names: tuple[str, ...]
    x: str = "step"

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per run: its best metrics, losses, what was done, its cost, and each setting of the plan in
        which the runs differ. epochs: the finished ones; `planned_epochs` where the plans differ. train_loss: the mean
        over the last epoch, see `Columns.train_loss`. val_loss: of the newest evaluation. Memory in MiB, energy in Wh.
        """
        import pandas as pd

        rows = [outcome(run) for run in self.runs]
        plans = [run.plan.to_dict() for run in self.runs]
        for name in dict.fromkeys(name for plan in plans for name in plan):
            values = [plan.get(name) for plan in plans]
            if len(set(map(repr, values))) > 1:
                column = f"planned_{name}" if name in rows[0] else name  # what was planned is not what was done
                for row, value in zip(rows, values, strict=True):
                    row[column] = value
        frame = pd.DataFrame(rows, index=pd.Index(self.names, name="run"))
        return frame.dropna(axis="columns", how="all")

    def picture(self) -> Picture:
        """The curves of all runs, and a key to the runs."""
        metrics = [best_metric(run.task)[0] for run in self.runs]
        return overlay(self.names, [run.history for run in self.runs], metrics, self.x)

    def png(self) -> bytes:
        return png.draw(self.picture())

    def tables(self) -> list[tuple[str, list[str], list[list[Any]]]]:
        """(caption, headers, rows) to show: what came out, the settings that differ, and what was changed on the way,
        each with one column per run; those that have rows."""
        from nbtools.frame import header, written

        columns = [(str(name), values) for name, values in self.frame.items()]
        results: list[list[Any]] = []
        differing: list[list[Any]] = []
        for name, values in columns:
            rows = results if name in OUTCOMES or name.startswith("best_") else differing
            rows.append([header(name), *(written(name, value) for value in values)])
        found = ("Results", "", results), ("Settings that differ", "setting", differing)
        made = [(caption, [first, *self.names], rows) for caption, first, rows in found]
        made.append(("Changed while it trained", ["step", *self.names], self.changes()))
        return [each for each in made if each[2]]

    def changes(self) -> list[list[Any]]:
        """A row for each step at which a run's settings changed: the step, and per run what changed there."""
        made: dict[int, list[Any]] = {}
        for place, run in enumerate(self.runs):
            for row in run.history.of("change"):
                cells = made.setdefault(row["step"], [None] * len(self.runs))
                cells[place] = ", ".join(filter(None, [cells[place], worded(row)]))
        return [[f"{step:,}", *cells] for step, cells in sorted(made.items())]

    def __repr__(self) -> str:
        return "\n\n".join(f"{caption}\n{table.text(headers, rows)}" for caption, headers, rows in self.tables())

    def parts(self) -> list[Any]:
        """What a notebook displays: two outputs, since in a saved notebook GitHub shows a picture only if it is an
        output by itself."""
        from IPython.display import HTML

        return [HTML(self.html()), self.still()]

    def html(self) -> str:
        return "".join(table.html(headers, rows, caption) for caption, headers, rows in self.tables())

    def still(self) -> png.Still:
        picture = self.picture()
        return png.Still(png.draw(picture), picture.alt)

    def page(self) -> str:
        """Tables and picture as one piece of HTML."""
        return self.html() + self.still().html()

    def _ipython_display_(self) -> None:
        if not in_notebook():
            raise NotImplementedError  # IPython then prints the repr
        from IPython.display import display

        for part in self.parts():
            display(part)


def distinct(folders: Sequence[Path]) -> list[str]:
    """The shortest path suffixes that are unique; duplicates are numbered."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            break
    seen: collections.Counter[str] = collections.Counter()
    for i, name in enumerate(names):
        seen[name] += 1
        names[i] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return names


def outcome(run: Run) -> dict[str, Any]:
    """A run's results; None for what is unknown."""
    columns, best = Columns(run.history), run.best
    seconds, samples = spent(columns)[1][-1], taken(columns)[1][-1]
    losses = columns.evaluated("val_loss")[1]
    memory = (columns.either(name)[1] for name in ("gpu_memory_peak", "gpu_memory_reserved", "memory"))
    metric = best_metric(run.task)[0]
    return {
        f"best_{metric}": best.get(f"val_{metric}"),
        "best_epoch": best["epoch"] + 1 if best else None,
        "train_loss": columns.train_loss,
        "val_loss": float(losses[-1]) if len(losses) else None,
        "epochs": len(run.history.of("epoch")),
        "steps": (columns.ended or {}).get("step", 0),
        "minutes": seconds / 60,
        "samples_per_s": samples / seconds if seconds else None,
        "memory": next((float(values.max()) for values in memory if len(values)), None),
        "energy": columns.newest("gpu_energy"),
    }
