"""Several runs: those of a folder in a table, and side by side, with which is the best where chance does not explain
it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtools import disk, show
from nbtools.data import in_notebook, patient, say
from nbtools.errors import CheckpointError, DiskError, StageError, TrainError
from nbtools.live import Columns, along
from nbtools.run import Run
from nbtools.show import header, number, plural
from nbtools.train import TaskLike, best_metric, checkpoint, kept_until

if TYPE_CHECKING:
    import pandas as pd

    from nbtools.figures import Sheet

MOST = 8  # runs of a folder that are compared: the curves of more hide one another


def runs(folder: str | Path = "runs", task: TaskLike | None = None) -> pd.DataFrame:
    """Return a row for each run in a folder and its subfolders, the newest first, named by where it is in there: state,
    best metric, epochs, minutes, samples/s, when it last went on, how far it is kept, tags and notes.

    A message names those that cannot be opened. task: only for runs whose own cannot be imported by name. Raises
    CheckpointError for a folder that is not there.
    """
    import pandas as pd

    opened, rows = open_runs(Path(folder), task), []
    if not opened:
        say(f"{folder} has no runs in it")
    for run in opened.values():
        best = {name: value for name, value in outcome(run).items() if name not in ("train_loss", "steps", "memory")}
        about = {"kept": kept_until(run.folder), "tags": run.tags, "notes": run.notes}
        rows.append({"state": run.state, **best, "changed": datetime.fromtimestamp(int(changed(run))), **about})
    return pd.DataFrame(rows, pd.Index(opened, name="run"))


def open_runs(folder: Path, task: TaskLike | None = None) -> dict[str, Run]:
    """Open the runs in a folder and its subfolders, the newest first; a message names those that cannot be. Raises
    CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder; name the one in which the run folders are")
    runs: dict[str, Run] = {}
    with disk.explained("looking for runs", folder):
        for place in patient(lambda: {path.parent for path in folder.glob(f"**/{checkpoint.INDEX}")}, folder):
            try:
                runs[place.relative_to(folder).as_posix()] = Run.open(place, task)
            except (CheckpointError, DiskError, StageError) as error:
                say(f"left out: {error}")
        return dict(sorted(runs.items(), key=lambda each: (-changed(each[1]), each[0])))


def changed(run: Run) -> float:
    """Return when a run last went on, in seconds since 1970."""
    return (run.folder / checkpoint.INDEX).stat().st_mtime


def outcome(run: Run) -> dict[str, Any]:
    """Return a run's results; None for what is unknown."""
    epochs, best, metric = run.summary(), run.best, best_metric(run.task)[0]
    last = {name: values.dropna().iloc[-1] for name, values in epochs.items() if values.notna().any()}
    wall = run.history.series("wall")[1]
    return {
        f"best_{metric}": best.get(f"val_{metric}"),
        "best_epoch": best.get("epoch"),
        **{name: last.get(name) for name in ("train_loss", "val_loss")},
        "epochs": len(epochs),
        "steps": max((row["step"] for row in run.history.rows), default=0),
        "minutes": wall[-1] / 60 if wall else 0.0,
        "samples_per_s": epochs["samples_per_s"].median() if "samples_per_s" in last else None,
        "memory": max((values.max() for name, values in epochs.items() if "memory" in str(name)), default=None),
    }


def compare(*runs: Run | str | Path) -> Comparison:
    """Compare runs, run folders, or the newest eight runs in a folder of them (`nb.compare("runs")`). Raises TrainError
    if there is no run, CheckpointError for a folder without a run."""
    every: dict[Path, Run] = {}
    for run in runs:
        if isinstance(run, Run):
            inside = [run]
        elif (Path(run) / checkpoint.INDEX).exists() or not Path(run).is_dir():
            inside = [Run.open(run)]
        else:
            inside = [*open_runs(Path(run)).values()][:MOST][::-1] or [Run.open(run)]  # which says why it is none
        every |= {one.folder.resolve(): one for one in inside}
    if not every:
        raise TrainError("compare needs at least one run, got none; give it runs, run folders or a folder of runs")
    short = len({folder.name for folder in every}) == len(every)
    named = {folder.name if short else str(run.folder): run for folder, run in every.items()}
    return Comparison(named, *judge(named))


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs by their names; shows as a sentence about the best and a table, in a notebook with a picture of curves.

    best: by the metric that chooses checkpoints, None where chance may explain the difference. conclusion: which it is
    and by how much, or why none is.
    """

    runs: Mapping[str, Run]
    best: Run | None
    conclusion: str

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row a run: best metric, losses, what was done, memory in MiB, each setting of the plan in which the runs
        differ (`planned_epochs`: of the plan), and what was changed while it trained."""
        import pandas as pd

        frame = pd.DataFrame(map(outcome, self.runs.values()), pd.Index(self.runs, name="run"))
        plans = [run.plan.to_dict() for run in self.runs.values()]
        for name in dict.fromkeys(chain.from_iterable(plans)):
            values = [plan.get(name) for plan in plans]
            if len(set(map(repr, values))) > 1:
                frame[f"planned_{name}" if name in frame else name] = values  # what was planned is not what was done
        changes = [run.history.of("change") for run in self.runs.values()]
        frame["changed"] = [
            "; ".join(f"{row['what']} at step {row['step']}" for row in rows) or None for rows in changes
        ]
        return frame.dropna(axis="columns", how="all")

    def figure(self) -> Sheet:
        """Draw the curves of all runs over their samples: losses, the metrics that choose checkpoints, lr, speed."""
        from nbtools.figures import curves

        every = [Columns(run.history) for run in self.runs.values()]
        metrics = dict.fromkeys(f"val_{best_metric(run.task)[0]}" for run in self.runs.values())
        charts = {}
        for name in ("train_loss", "val_loss", *metrics, "lr", "samples_per_s"):
            lines = [(columns, *columns.series(name, "epoch", "evaluation")) for columns in every]
            charts[show.header(name)] = [(along(columns, "samples")(steps), y) for columns, steps, y in lines]
        return curves(charts, list(self.runs), "samples")

    def cells(self) -> tuple[list[str], list[list[Any]]]:
        """Return (headers, rows) of the frame as it is shown: a column a run, values with their units."""
        names = [f"{name} (best)" if run is self.best else name for name, run in self.runs.items()]
        columns = ((str(name), values) for name, values in self.frame.items())
        return ["", *names], [[show.header(n), *(show.written(n, v) for v in values)] for n, values in columns]

    def __repr__(self) -> str:
        return "\n\n".join(filter(None, [self.conclusion, show.text(*self.cells())]))

    def _ipython_display_(self) -> None:
        """Show two outputs: in a saved notebook GitHub shows a picture only if it is an output by itself."""
        if not in_notebook():
            raise NotImplementedError  # IPython then prints the repr
        from IPython.display import HTML, display

        display(HTML(show.html(*self.cells(), self.conclusion)))
        display(self.figure())


def judge(runs: Mapping[str, Run]) -> tuple[Run | None, str]:
    """Return (the best run, the conclusion); None where none is better by more than chance, see `alike`."""
    metrics = {best_metric(run.task) for run in runs.values()}
    values = {name: run.best[f"val_{best_metric(run.task)[0]}"] for name, run in runs.items() if run.best}
    if len(runs) < 2:
        return None, ""
    if len(metrics) > 1 or len({run.card.digest for run in runs.values()}) > 1:
        return None, "No best run: they are of different tasks, or validated on different data."
    if len(values) < 2:
        return None, "No best run: fewer than two have been evaluated."
    [(metric, sign)] = metrics
    best, *others = sorted(values, key=lambda name: -sign * values[name])
    count = min(min(run.plan.eval_samples or math.inf, run.card.splits["val"]) for run in runs.values())
    share = metric != "loss" and all(0 <= value <= 1 for value in values.values())
    by = "validation loss" if metric == "loss" else header(metric)
    level = [name for name in (best, *others) if alike(values[best], values[name], count, share)]
    if len(level) > 1:
        said = ", ".join(f"{name} {number(values[name])}" for name in level)
        why = f"on {plural(int(count), 'validation sample')}, chance alone can make such a difference"
        return None, f"No clear winner by {by}: {said}; {why}."
    apart = f"{number(abs(values[best] - values[others[0]]))} {'above' if sign > 0 else 'below'} {others[0]}"
    return runs[best], f"{best} is the best: {by} {number(values[best])}, {apart}."


def alike(best: float, other: float, count: float, share: bool) -> bool:
    """Return whether chance can make such a difference over so many samples, by a rule of thumb.

    share: of metrics from 0 to 1, two standard errors of the difference of two shares, which no mean of such numbers
    exceeds. Else, of a loss that varies between samples by as much as its mean, 1 / √count of it and at least 2 %.
    """
    middle, count = (best + other) / 2, max(count, 1)
    limit = 2 * math.sqrt(2 * middle * (1 - middle) / count) if share else max(0.02, count**-0.5) * abs(best)
    return abs(best - other) <= limit
