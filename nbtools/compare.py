"""Runs next to each other: which is the best, a table of their results and of the settings that differ, and their
curves together."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nbtools import show
from nbtools.data import in_notebook
from nbtools.errors import CheckpointError, TrainError, sentence
from nbtools.live import XS, Columns, Series, along, spent, worded
from nbtools.run import Run, opened
from nbtools.show import number, plural, shown, spelled
from nbtools.train import best_metric, checkpoint

if TYPE_CHECKING:
    import pandas as pd

    from nbtools.figures import Sheet

OUTCOMES = ("train_loss", "val_loss", "epochs", "steps", "minutes", "samples_per_s", "memory", "energy")
MOST = 8  # runs of a folder: the curves of more hide one another
ERRORS = 2  # standard errors: accuracies that differ by less may do so by chance
CLOSE, FLOOR = 0.02, 1e-4  # of a loss; at least so much, whatever the loss


def compare(*runs: Run | str | Path, x: str = "step") -> Comparison:
    """Compare runs, run folders, or the newest runs in a folder of them (`nb.compare("runs")`: at most eight, the
    newest last), over step, samples or minutes (by the clock, without pauses).

    Raises TrainError if there is no run or x is unknown, CheckpointError for a folder without a run.
    """
    if not runs:
        raise TrainError("compare needs at least one run, got none; give it runs, run folders or a folder of runs")
    if x not in XS:
        raise TrainError(f"x must be one of {', '.join(XS)}, got {x!r}")
    found, notes = zip(*map(meant, runs), strict=True)
    whole = tuple(chain.from_iterable(found))
    return Comparison(whole, tuple(distinct([run.folder for run in whole])), x, " ".join(filter(None, notes)))


def meant(run: Run | str | Path) -> tuple[list[Run], str]:
    """(a run, the one in a folder, or the newest of those below it, which of them these are)."""
    if isinstance(run, Run):
        return [run], ""
    folder = Path(run)
    within, left_out = opened(folder) if not (folder / checkpoint.INDEX).exists() else ({}, {})
    missing = [sentence(f"Left out: {name}: {why}") for name, why in left_out.items()]
    if not within and missing:
        raise CheckpointError(f"{folder}: none of its runs can be compared. {' '.join(missing)}")
    if not within:
        return [Run.open(folder)], ""  # or the error that says why it is none
    several = f"The newest {MOST} of the {len(within)} runs in {folder}." if len(within) > MOST else ""
    return list(within.values())[:MOST][::-1], " ".join(filter(None, [several, *missing]))


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs with unique names; note: which of a folder they are. Shows as a sentence about the best, tables and a
    picture in a notebook, without the picture in text."""

    runs: tuple[Run, ...]
    names: tuple[str, ...]
    x: str = "step"
    note: str = ""

    @property
    def best(self) -> Run | None:
        """The best run, by the metric that chooses checkpoints; None where `conclusion` names none."""
        return dict(zip(self.names, self.runs, strict=True)).get(self.judged[0] or "")

    @property
    def conclusion(self) -> str:
        """Which run is the best, by how much and with which settings, or why none is; "" for a single run."""
        return self.judged[1]

    @cached_property
    def judged(self) -> tuple[str | None, str]:
        return judge(self.runs, self.names)

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

    def figure(self) -> Sheet:
        """Draw the curves of all runs over x: losses, the metrics that choose checkpoints, lr and samples/s."""
        from nbtools.figures import curves

        metrics = [f"val_{best_metric(run.task)[0]}" for run in self.runs]
        every = [Columns(run.history) for run in self.runs]
        charts = {}
        for name in dict.fromkeys(("train_loss", "val_loss", *metrics, "lr", "samples_per_s")):
            lines = [curve(columns, name) for columns in every]
            charts[show.header(name)] = [
                (along(columns, self.x)(steps), values) for columns, (steps, values) in zip(every, lines, strict=True)
            ]
        return curves(charts, self.names, self.x)

    def png(self) -> bytes:
        return self.figure()._repr_png_()

    def tables(self) -> list[tuple[str, list[str], list[list[Any]]]]:
        """Return (caption, headers, rows) of what came out, the settings that differ, and what was changed on the way,
        each with one column per run; those that have rows."""
        results, settings = [], []
        for name, values in self.frame.items():
            cells = [show.written(str(name), value) for value in values]
            if name in OUTCOMES or str(name).startswith("best_"):
                results.append([show.header(str(name)), *cells])
            else:
                settings.append([show.header(str(name)), *map(partial(since, str(name)), self.runs, cells)])
        marked = [f"{name} (best)" if name == self.judged[0] else name for name in self.names]
        made = [
            ("Results", ["", *marked], results),
            ("Settings that differ", ["setting", *self.names], settings),
            ("Changed while it trained", ["step", *self.names], self.changes()),
        ]
        return [each for each in made if each[2]]

    def changes(self) -> list[list[Any]]:
        """Return a row for each step at which a run's settings changed, or to which it went back: the step, and per run
        what happened there."""
        made: dict[int, list[Any]] = {}
        for place, run in enumerate(self.runs):
            for row in Columns(run.history).changes:
                cells = made.setdefault(row["step"], [None] * len(self.runs))
                what = worded({"what": row.get("what")})  # and not the mark of one that went back
                cells[place] = ", ".join(filter(None, [cells[place], what]))
        return [[f"{step:,}", *cells] for step, cells in sorted(made.items())]

    def __repr__(self) -> str:
        drawn = (f"{caption}\n{show.text(headers, rows)}" for caption, headers, rows in self.tables())
        return "\n\n".join(filter(None, [self.note, self.conclusion, *drawn]))

    def html(self) -> str:
        drawn = (show.html(headers, rows, caption) for caption, headers, rows in self.tables())
        return "".join([show.note(self.note), show.note(self.conclusion), *drawn])

    def _ipython_display_(self) -> None:
        """Two outputs, since in a saved notebook GitHub shows a picture only if it is an output by itself."""
        if not in_notebook():
            raise NotImplementedError  # IPython then prints the repr
        from IPython.display import HTML, display

        display(HTML(self.html()))
        display(self.figure())


def judge(runs: Sequence[Run], names: Sequence[str]) -> tuple[str | None, str]:
    """(name of the best run, the conclusion); None where none is clearly best by the metric that chooses checkpoints.

    Clearly: by more than chance, see `alike`.
    """
    metrics = {best_metric(run.task) for run in runs}
    if len(runs) < 2 or len(metrics) > 1 or len({run.card.digest for run in runs}) > 1:
        what = "of different tasks" if len(metrics) > 1 else "validated on different data"
        return None, f"No best run: they are {what}." if len(runs) > 1 else ""
    metric, sign = metrics.pop()
    found, start = {name: run.best.get(f"val_{metric}") for name, run in zip(names, runs, strict=True)}, ""
    if sign > 0 and {*found.values()} == {0.0}:
        start = f"None of them has learned yet: {spelled(metric)} is 0 in all. "
        metric, sign = "loss", -1.0
        found = {name: outcome(run)["val_loss"] for name, run in zip(names, runs, strict=True)}
    values = {name: value for name, value in found.items() if value is not None}
    if len(values) < 2:
        return None, f"{start}No best run: fewer than two have been evaluated."
    best, *others = sorted(values, key=lambda name: -sign * values[name])
    counted = min(min(run.plan.eval_samples or math.inf, run.card.splits["val"]) for run in runs)
    share = metric != "loss" and all(0 <= value <= 1 for value in values.values())
    close = [name for name in others if alike(values[best], values[name], counted, share)]
    by = "validation loss" if metric == "loss" else spelled(metric)
    if close:
        level = ", ".join(f"{name} {number(values[name])}" for name in (best, *close))
        why = f"on {plural(int(counted), 'validation sample')}, chance alone can make such a difference"
        return None, f"{start}No clear winner by {by}: {level}; {why}."
    second = others[0]
    apart = f"{number(abs(values[best] - values[second]))} {'above' if sign > 0 else 'below'} {second}"
    settings = difference(runs, names, best, second)
    return best, f"{start}{best} is the best: {by} {number(values[best])}, {apart}. {settings}"


def alike(best: float, other: float, count: float, share: bool) -> bool:
    """Whether two values over so many samples are no further apart than chance can make them.

    share: of an accuracy, an error rate or another metric from 0 to 1, ERRORS standard errors of the difference of two
    shares, which no mean of such numbers exceeds. Else of a loss, or of a metric in units of its own: if a sample's
    varies as much as its mean, a standard error is about 1 / √count of it; at least CLOSE of it, and FLOOR. A rule of
    thumb.
    """
    if not share:
        return abs(best - other) <= max(max(CLOSE, max(count, 1) ** -0.5) * abs(best), FLOOR)
    middle = (best + other) / 2
    return abs(best - other) <= ERRORS * math.sqrt(2 * middle * (1 - middle) / max(count, 1))


def difference(runs: Sequence[Run], names: Sequence[str], best: str, other: str) -> str:
    """In which settings the best run differs from another, in a sentence."""
    ours, theirs = (runs[names.index(name)].plan.to_dict() for name in (best, other))
    apart = [f"{n} {shown(ours[n])} instead of {shown(theirs.get(n))}" for n in ours if ours[n] != theirs.get(n)]
    return f"It was trained with {', '.join(apart)}." if apart else "Both were trained with the same settings."


def since(name: str, run: Run, value: str | None) -> str | None:
    """A setting's value, after the one that the run started with if it was changed while it trained."""
    found = (re.search(rf"(?:^|, ){name} (\S+) → ", str(row.get("what"))) for row in run.history.of("change"))
    first = next((worded({"what": match[1]}) for match in found if match), value)
    return value if first == value else f"{first} → {value}"


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


def curve(columns: Columns, name: str) -> Series:
    """Return (steps, values) of a column; what was logged on steps is averaged over a twentieth of them."""
    if name.startswith("val_"):
        return columns.evaluated(name)
    steps, values = columns.series("loss", "step") if name == "train_loss" else columns.either(name)
    if not len(steps):
        return columns.either(name)
    window = np.ones(max(len(values) // 20, 1))
    return steps, np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def outcome(run: Run) -> dict[str, Any]:
    """A run's results; None for what is unknown."""
    columns, best = Columns(run.history), run.best
    epochs = [row for row in run.history.of("epoch") if row.get("samples_per_s")]
    trained = sum(row["epoch_time"] for row in epochs)
    speed = sum(row["epoch_time"] * row["samples_per_s"] for row in epochs) / trained if trained else None
    losses = columns.evaluated("val_loss")[1]
    memory = (columns.either(name)[1] for name in ("gpu_memory_peak", "gpu_memory_reserved", "memory"))
    metric = best_metric(run.task)[0]
    return {
        f"best_{metric}": best.get(f"val_{metric}"),
        "best_epoch": best.get("epoch"),
        "train_loss": columns.train_loss,
        "val_loss": float(losses[-1]) if len(losses) else None,
        "epochs": len(run.history.of("epoch")),
        "steps": (columns.ended or {}).get("step", 0),
        "minutes": spent(columns)[1][-1] / 60,
        "samples_per_s": speed or columns.newest("samples_per_s"),
        "memory": next((float(values.max()) for values in memory if len(values)), None),
        "energy": columns.newest("gpu_energy"),
    }
